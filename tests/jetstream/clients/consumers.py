"""Consumers: their settings, and messages by pull and push."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.msg import Msg
from nats.js import api

from tests.jetstream.clients.seen import (
    NOT_WITHIN_S,
    WITHIN_S,
    Seen,
    all_of,
    deliveries_of,
    delivery_of,
    info_of,
    is_waiting,
    live_deliveries_of,
    state_of,
    stream_with,
    until,
    when_acked,
)


async def consumers(seen: Seen) -> None:
    js = seen.js
    await stream_with(seen, "LIFE", 10)
    await seen.saw_of("info, missing", js.consumer_info("LIFE", "a"))
    await seen.saw_of(
        "create", js.add_consumer("LIFE", durable_name="a", ack_wait=3.5, description="of tests"), info_of
    )
    await seen.saw_of("create, the same", js.add_consumer("LIFE", durable_name="a", ack_wait=3.5), info_of)
    await seen.saw_of("create, changed", js.add_consumer("LIFE", durable_name="a", max_deliver=3), info_of)
    await seen.saw_of(
        "create, not changeable", js.add_consumer("LIFE", durable_name="a", deliver_policy=api.DeliverPolicy.NEW)
    )
    settings: dict[str, dict[str, Any]] = {
        "last": {"deliver_policy": api.DeliverPolicy.LAST},
        "last_per_subject": {"deliver_policy": api.DeliverPolicy.LAST_PER_SUBJECT, "filter_subject": "LIFE.>"},
        "new": {"deliver_policy": api.DeliverPolicy.NEW},
        "from": {"deliver_policy": api.DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": 4},
        "filtered": {"filter_subject": "LIFE.2", "metadata": {"a": "b"}},
        "filters": {"filter_subjects": ["LIFE.1", "LIFE.3"], "max_ack_pending": 2},
        "backoff": {"backoff": [0.5, 1.0, 2.0], "max_deliver": 4},
        "none": {"ack_policy": api.AckPolicy.NONE, "headers_only": True},
        "all": {"ack_policy": api.AckPolicy.ALL, "inactive_threshold": 60.0},
        "push": {"deliver_subject": "LIFE-push", "idle_heartbeat": 5.0, "flow_control": True},
        "wrong": {"deliver_policy": api.DeliverPolicy.BY_START_SEQUENCE},
        "wrong_filter": {"filter_subject": "other"},
        "wrong_filters": {"filter_subjects": ["LIFE.1", "LIFE.>"]},
        "wrong_backoff": {"backoff": [0.5, 1.0], "max_deliver": 1},
        "wrong_push": {"deliver_subject": "LIFE.push"},
    }
    for name, config in settings.items():
        created = js.add_consumer("LIFE", api.ConsumerConfig(name=name, durable_name=name, **config))
        await seen.saw_of(f"create, {name}", created, info_of)
    await seen.saw_of("create, no stream", js.add_consumer("MISSING", durable_name="a"))
    await seen.saw_of("list", js.consumers_info("LIFE"), _named)
    await seen.saw_of("list, from 9", js.consumers_info("LIFE", offset=9), _named)
    await seen.saw_of("delete", js.delete_consumer("LIFE", "a"))
    await seen.saw_of("delete, missing", js.delete_consumer("LIFE", "a"))
    unnamed = await seen.saw_of("create, no name", js.add_consumer("LIFE"), lambda info: info_of(info, is_named=False))
    await js.delete_consumer("LIFE", unnamed.name)
    await seen.saw_of("stream", js.stream_info("LIFE"), state_of)
    await seen.saw_of("list, no stream", js.consumers_info("MISSING"))


def _named(found: list[api.ConsumerInfo]) -> list[str]:
    return [info.name for info in found]


async def ordered(seen: Seen) -> None:
    js = seen.js
    await stream_with(seen, "ORDERED", 500)
    for sequence in range(50, 500, 7):
        await js.delete_msg("ORDERED", sequence)
    subscription = await js.subscribe("ORDERED.>", ordered_consumer=True, idle_heartbeat=0.5)
    first = [await subscription.next_msg(timeout=WITHIN_S) for _ in range(435)]
    seen.saw("first messages", deliveries_of(first[:60]))
    seen.saw("last messages", deliveries_of(first[-10:]))
    sequences = [message.metadata.sequence.stream for message in first]
    seen.saw("in order", [sequences == sorted(set(sequences)), len(sequences), sum(sequences)])
    info = await subscription.consumer_info()
    seen.saw("its consumer", info_of(info, is_named=False))
    await js.delete_consumer("ORDERED", info.name)
    for at in range(3):
        await js.publish("ORDERED.x", b"%d" % at)
    later = [await subscription.next_msg(timeout=WITHIN_S) for _ in range(3)]
    seen.saw("after its consumer was deleted", live_deliveries_of(later))
    await subscription.unsubscribe()
    await js.purge_stream("ORDERED", keep=2)
    only = await js.subscribe("ORDERED.>", ordered_consumer=True)
    found = [await only.next_msg(timeout=WITHIN_S) for _ in range(2)]
    seen.saw("after a purge", deliveries_of(found))
    await only.unsubscribe()


async def pull(seen: Seen) -> None:
    js = seen.js
    await stream_with(seen, "PULL", 12)
    subscription = await js.pull_subscribe("PULL.>", durable="p")
    await seen.saw_of("fetch", subscription.fetch(5, timeout=WITHIN_S), deliveries_of)
    seen.saw("five are pending", info_of(await subscription.consumer_info()))
    await seen.saw_of("fetch, more than there are", subscription.fetch(20, timeout=2.0), deliveries_of)
    await seen.saw_of("fetch one, none in time", subscription.fetch(1, timeout=NOT_WITHIN_S))
    await seen.saw_of("fetch three, none in time", subscription.fetch(3, timeout=NOT_WITHIN_S))
    await subscription.unsubscribe()

    other = await js.pull_subscribe("PULL.>", durable="q")
    messages = await other.fetch(12, timeout=WITHIN_S)
    for message in messages:
        await message.ack()
    seen.saw("all acked", await when_acked(seen, "PULL", "q"))
    waiting = asyncio.ensure_future(other.fetch(2, timeout=WITHIN_S))
    await until(lambda: is_waiting(seen, "PULL", "q"))
    for at in range(2):
        await js.publish("PULL.late", b"late %d" % at)
    await seen.saw_of("fetch, published later", all_of(other, await waiting, 2), live_deliveries_of)
    await other.unsubscribe()

    filtered = await js.pull_subscribe("PULL.3", config=api.ConsumerConfig(ack_policy=api.AckPolicy.NONE))
    await seen.saw_of("fetch, filtered", filtered.fetch(2, timeout=WITHIN_S), deliveries_of)
    await filtered.unsubscribe()
    config = api.ConsumerConfig(filter_subjects=["PULL.1", "PULL.4"], max_ack_pending=2)
    limited = await js.pull_subscribe("", stream="PULL", durable="l", config=config)
    messages = await limited.fetch(10, timeout=NOT_WITHIN_S)
    seen.saw("fetch, at most two pending", deliveries_of(messages))
    await messages[0].ack_sync(timeout=WITHIN_S)
    await seen.saw_of("fetch, one more", limited.fetch(1, timeout=WITHIN_S), deliveries_of)
    await limited.unsubscribe()


async def pull_requests(seen: Seen) -> None:
    """Requests that nats-py itself does not send, with the statuses that end them."""
    js = seen.js
    await stream_with(seen, "NEXT", 6)
    await js.add_consumer("NEXT", durable_name="n", max_waiting=1)
    requests = [
        ("one, as a number", b"", 1),
        ("no wait, two", {"batch": 2, "no_wait": True}, 2),
        ("no wait, more than there are", {"batch": 9, "no_wait": True}, 4),
        ("no wait, none", {"batch": 9, "no_wait": True}, 1),
        ("expires", {"batch": 1, "expires": 200_000_000}, 1),
        ("heartbeat, too long", {"batch": 1, "expires": 500_000_000, "idle_heartbeat": 400_000_000}, 1),
    ]
    for step, request, number in requests:
        subscription = await _requested(seen, "n", request)
        seen.saw(step, [_received(await subscription.next_msg(timeout=WITHIN_S)) for _ in range(number)])
        await subscription.unsubscribe()

    subscription = await _requested(seen, "n", b"{")
    seen.saw("not JSON", _received(await subscription.next_msg(timeout=WITHIN_S))["status"]["Status"])

    request = {"batch": 1, "expires": 1_000_000_000, "idle_heartbeat": 200_000_000}
    subscription = await _requested(seen, "n", request)
    statuses = [_received(await subscription.next_msg(timeout=WITHIN_S))]
    while statuses[-1]["status"]["Status"] == "100":
        statuses.append(_received(await subscription.next_msg(timeout=WITHIN_S)))
    seen.saw("heartbeats", [statuses[0], statuses[-1]])

    first = await _requested(seen, "n", {"batch": 1, "expires": 30_000_000_000})
    await until(lambda: is_waiting(seen, "NEXT", "n"))
    second = await _requested(seen, "n", {"batch": 1, "expires": 30_000_000_000})
    seen.saw("a second that waits", _received(await second.next_msg(timeout=WITHIN_S)))
    await js.publish("NEXT.x", b"y")
    seen.saw("the first", _received(await first.next_msg(timeout=WITHIN_S)))

    await js.publish("NEXT.x", b"y" * 1000)
    subscription = await _requested(seen, "n", {"batch": 1, "max_bytes": 100, "expires": 30_000_000_000})
    seen.saw("max_bytes, exceeded", _received(await subscription.next_msg(timeout=WITHIN_S)))

    subscription = await _requested(seen, "n", b"1")
    seen.saw("the large one", len((await subscription.next_msg(timeout=WITHIN_S)).data))
    waiting = await _requested(seen, "n", {"batch": 1, "expires": 30_000_000_000, "no_wait": False})
    await until(lambda: is_waiting(seen, "NEXT", "n"))
    await js.delete_consumer("NEXT", "n")
    seen.saw("its consumer is deleted", _received(await waiting.next_msg(timeout=WITHIN_S)))


async def _requested(seen: Seen, consumer: str, request: Any) -> Any:
    """A subscription that receives what answers this request for messages."""
    inbox = seen.nc.new_inbox()
    subscription = await seen.nc.subscribe(inbox)
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    await seen.nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.NEXT.{consumer}", body, reply=inbox)
    return subscription


def _received(message: Msg) -> dict[str, Any]:
    if message.reply.startswith("$JS.ACK"):
        return delivery_of(message)
    return {"status": dict(message.headers or {}), "data": message.data}


async def push(seen: Seen) -> None:
    js = seen.js
    await stream_with(seen, "PUSH", 5)
    subscription = await js.subscribe("PUSH.>", durable="m", manual_ack=True)
    messages = [await subscription.next_msg(timeout=WITHIN_S) for _ in range(5)]
    seen.saw("messages", deliveries_of(messages))
    seen.saw("before acks", info_of(await subscription.consumer_info()))
    await seen.saw_of("subscribe again", js.subscribe("PUSH.>", durable="m"))
    await messages[3].ack()
    for message in messages[:2]:
        await message.ack_sync(timeout=WITHIN_S)
    seen.saw("after three acks", info_of(await subscription.consumer_info()))
    for message in (messages[2], messages[4]):
        await message.ack()
    seen.saw("after all acks", await when_acked(seen, "PUSH", "m"))
    await js.publish("PUSH.later", b"later", headers={"A": "1"})
    later = await subscription.next_msg(timeout=WITHIN_S)
    seen.saw("a later message", delivery_of(later))
    await later.ack_sync(timeout=WITHIN_S)
    await subscription.unsubscribe()

    found: list[Msg] = []
    arrived = asyncio.Event()

    async def receive(message: Msg) -> None:
        found.append(message)
        if len(found) == 6:
            arrived.set()

    automatic = await js.subscribe("PUSH.>", durable="auto", cb=receive)
    await asyncio.wait_for(arrived.wait(), WITHIN_S)
    seen.saw("callback", deliveries_of(found))
    seen.saw("acked by the client", await when_acked(seen, "PUSH", "auto"))
    await automatic.unsubscribe()

    inbox = seen.nc.new_inbox()
    raw = await seen.nc.subscribe(inbox)
    policy = {"ack_policy": api.AckPolicy.ALL, "deliver_policy": api.DeliverPolicy.LAST}
    config = api.ConsumerConfig(durable_name="hb", deliver_subject=inbox, idle_heartbeat=0.3, **policy)
    await js.add_consumer("PUSH", config)
    seen.saw("last, then heartbeats", [_received(await raw.next_msg(timeout=WITHIN_S)) for _ in range(3)])
    await raw.unsubscribe()


async def queue_group(seen: Seen) -> None:
    js = seen.js
    await js.add_stream(name="QUEUE", subjects=["QUEUE.>"])
    received: list[list[int]] = [[], [], []]
    done = asyncio.Event()

    def receiver(member: int) -> Callable[[Msg], Awaitable[None]]:
        async def receive(message: Msg) -> None:
            received[member].append(message.metadata.sequence.stream)
            if sum(len(one) for one in received) >= 300:
                done.set()

        return receive

    members = [await js.subscribe("QUEUE.>", queue="workers", cb=receiver(member)) for member in range(3)]
    for at in range(300):
        await js.publish(f"QUEUE.{at}", b"%d" % at)
    await asyncio.wait_for(done.wait(), WITHIN_S)
    every = [sequence for one in received for sequence in one]
    seen.saw("each exactly once", sorted(every) == list(range(1, 301)))
    seen.saw("each member receives", [bool(one) for one in received])
    seen.saw("its consumer", await when_acked(seen, "QUEUE", "workers"))
    for member in members:
        await member.unsubscribe()
