"""Acks of all kinds, redelivery, and streams whose messages depend on acks."""

from __future__ import annotations

import asyncio
import time
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
    state_of,
    stream_with,
    until,
    when_acked,
)


async def acks(seen: Seen) -> None:
    """A consumer of one message for each kind of ack: orders between messages depend on time."""
    js = seen.js
    await stream_with(seen, "ACKS", 5)

    async def consumer(at: int, **config: Any) -> Any:
        settings = api.ConsumerConfig(ack_wait=30.0, **config)
        return await js.pull_subscribe(f"ACKS.{at}", durable=f"a{at}", config=settings)

    async def one(subscription: Any, step: str) -> Msg:
        message = (await subscription.fetch(1, timeout=WITHIN_S))[0]
        seen.saw(step, delivery_of(message))
        return message

    acked = await consumer(0)
    answer = await (await one(acked, "for ack_sync")).ack_sync(timeout=WITHIN_S)
    seen.saw("answer to ack_sync", [answer.data, answer.headers])
    seen.saw("after ack_sync", info_of(await acked.consumer_info()))
    naked = await consumer(1)
    await (await one(naked, "for nak")).nak()
    again = await one(naked, "after nak")
    seen.saw("while redelivered", info_of(await naked.consumer_info()))
    await again.ack_sync(timeout=WITHIN_S)
    seen.saw("after nak and ack", info_of(await naked.consumer_info()))
    delayed = await consumer(2)
    message = await one(delayed, "for nak with delay")
    naked_s = time.monotonic()
    await message.nak(delay=1.0)
    await (await one(delayed, "after the delay")).ack_sync(timeout=WITHIN_S)
    seen.saw("not before the delay", time.monotonic() - naked_s >= 0.95)
    terminated = await consumer(3)
    await (await one(terminated, "for term")).term()
    seen.saw("after term", await when_acked(seen, "ACKS", "a3"))
    await seen.saw_of("terminated is not redelivered", terminated.fetch(1, timeout=NOT_WITHIN_S))
    twice = await one(await consumer(4, max_ack_pending=1), "for two acks")
    await twice.ack_sync(timeout=WITHIN_S)
    answer = await seen.nc.request(twice.reply, b"+ACK", timeout=WITHIN_S)
    seen.saw("answer to a second ack", [answer.data, answer.headers])


async def ack_all(seen: Seen) -> None:
    js = seen.js
    await stream_with(seen, "ALL", 6)
    config = api.ConsumerConfig(ack_policy=api.AckPolicy.ALL)
    subscription = await js.pull_subscribe("ALL.>", durable="a", config=config)
    messages = await subscription.fetch(6, timeout=WITHIN_S)
    await messages[3].ack_sync(timeout=WITHIN_S)
    seen.saw("the fourth is acked", info_of(await subscription.consumer_info()))
    await messages[5].ack_sync(timeout=WITHIN_S)
    seen.saw("the last is acked", info_of(await subscription.consumer_info()))
    await subscription.unsubscribe()


async def redelivery(seen: Seen) -> None:
    js = seen.js
    await stream_with(seen, "AGAIN", 2)
    config = api.ConsumerConfig(ack_wait=0.5, max_deliver=3)
    subscription = await js.pull_subscribe("AGAIN.0", durable="r", config=config)
    for time_of in ("first", "second", "third"):
        message = (await subscription.fetch(1, timeout=WITHIN_S))[0]
        seen.saw(f"{time_of} time", delivery_of(message))
    await seen.saw_of("no fourth time", subscription.fetch(1, timeout=1.5))
    seen.saw("given up", await when_acked(seen, "AGAIN", "r"))
    await subscription.unsubscribe()

    config = api.ConsumerConfig(backoff=[0.2, 0.4], max_deliver=3, filter_subject="AGAIN.1")
    backed = await js.pull_subscribe("AGAIN.1", durable="b", config=config)
    counts = [(await backed.fetch(1, timeout=WITHIN_S))[0].metadata.num_delivered for _ in range(3)]
    seen.saw("with backoff", counts)
    await backed.unsubscribe()


async def in_progress(seen: Seen) -> None:
    js = seen.js
    await stream_with(seen, "WORK", 1)
    subscription = await js.pull_subscribe("WORK.>", durable="w", config=api.ConsumerConfig(ack_wait=2.0))
    message = (await subscription.fetch(1, timeout=WITHIN_S))[0]
    until_s, redelivered = time.monotonic() + 3.0, 0
    while time.monotonic() < until_s:
        await message.in_progress()
        try:
            redelivered += len(await subscription.fetch(1, timeout=NOT_WITHIN_S))
        except TimeoutError:
            continue
    seen.saw("redelivered while in progress", redelivered)
    again = (await subscription.fetch(1, timeout=WITHIN_S))[0]
    seen.saw("redelivered afterwards", delivery_of(again))
    await again.ack_sync(timeout=WITHIN_S)
    seen.saw("its consumer", info_of(await subscription.consumer_info()))
    await subscription.unsubscribe()


# ---- streams with consumers ----


async def work_queue(seen: Seen) -> None:
    js = seen.js
    await stream_with(seen, "JOBS", 100, retention=api.RetentionPolicy.WORK_QUEUE)
    workers = [await js.pull_subscribe("JOBS.>", durable="jobs") for _ in range(2)]
    found: list[int] = []

    async def work(subscription: Any) -> None:
        while len(found) < 100:
            try:
                messages = await subscription.fetch(10, timeout=NOT_WITHIN_S)
            except TimeoutError:
                continue
            for message in messages:
                found.append(message.metadata.sequence.stream)
                await message.ack()

    await asyncio.wait_for(asyncio.gather(*(work(worker) for worker in workers)), WITHIN_S)
    seen.saw("each exactly once", sorted(found) == list(range(1, 101)))
    seen.saw("its consumer", await when_acked(seen, "JOBS", "jobs"))

    async def emptied() -> api.StreamInfo | None:
        info = await js.stream_info("JOBS")
        return None if info.state.messages else info

    seen.saw("messages are deleted", state_of(await until(emptied)))
    await seen.saw_of("a second consumer", js.add_consumer("JOBS", durable_name="other"))
    await seen.saw_of("a consumer that acks nothing", js.add_consumer("JOBS", durable_name="n", ack_policy="none"))
    for worker in workers:
        await worker.unsubscribe()


async def interest(seen: Seen) -> None:
    js = seen.js
    await js.add_stream(name="INTEREST", subjects=["INTEREST.>"], retention=api.RetentionPolicy.INTEREST)
    await seen.saw_of("publish, no consumer", js.publish("INTEREST.a", b"lost"), lambda ack: ack.seq)
    seen.saw("nothing is kept", state_of(await js.stream_info("INTEREST")))
    both = [await js.pull_subscribe("INTEREST.>", durable=name) for name in ("a", "b")]
    for at in range(3):
        await js.publish("INTEREST.a", b"%d" % at)
    for subscription in both:
        messages = await all_of(subscription, [], 3)
        seen.saw("messages", deliveries_of(messages))
        for message in messages:
            await message.ack_sync(timeout=WITHIN_S)

    async def emptied() -> api.StreamInfo | None:
        info = await js.stream_info("INTEREST")
        return None if info.state.messages else info

    seen.saw("messages are deleted", state_of(await until(emptied)))
    for subscription in both:
        await subscription.unsubscribe()


async def purge(seen: Seen) -> None:
    js = seen.js
    await stream_with(seen, "PURGE", 20)
    subscription = await js.pull_subscribe("PURGE.>", durable="p")
    messages = await subscription.fetch(5, timeout=WITHIN_S)
    await messages[0].ack_sync(timeout=WITHIN_S)
    await js.purge_stream("PURGE", seq=11)
    seen.saw("purged to 10", info_of(await subscription.consumer_info()))
    await seen.saw_of("the next ones", subscription.fetch(3, timeout=WITHIN_S), deliveries_of)
    await js.purge_stream("PURGE", subject="PURGE.4")
    await seen.saw_of("without a subject", all_of(subscription, [], 5), deliveries_of)
    await js.purge_stream("PURGE")
    seen.saw("purged", info_of(await subscription.consumer_info()))
    await js.publish("PURGE.0", b"new")
    await seen.saw_of("a new one", subscription.fetch(1, timeout=WITHIN_S), deliveries_of)
    await js.delete_stream("PURGE")
    await seen.saw_of("stream is deleted", js.consumer_info("PURGE", "p"))
