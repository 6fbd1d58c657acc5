"""Numbers of consumers are brought up to date for a limited time: by the leader, and for all its streams together."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap64

from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.jetstream.consumers.leading import LedConsumers
from natslog.jetstream.consumers.machine import Consumer
from natslog.jetstream.consumers.served import ServedConsumer
from natslog.jetstream.consumers.serving import ConsumerServing
from natslog.jetstream.consumers.state import ConsumerRecord
from natslog.log import ReplicaLog
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings
from natslog.node.replicas.consumer_cursors import COUNT_WITHIN_S, ConsumerCursors
from natslog.node.replicas.consumer_records import ConsumerPosition, StoredConsumer
from tests.conftest import open_log, rows

NOW_US = 1_790_000_000_000_000
PAST_S = 0.0


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ReplicaLog]:
    """Four batches of ten messages, on two subjects."""
    found = open_log(tmp_path)
    for at in range(4):
        found.append(rows([b"x"] * 10, f"orders.{'ab'[at % 2]}"), NOW_US)
    yield found
    found.close()


class Stream(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def stream_record(name: str) -> StreamRecord:
    settings = StreamSettings(subject=f"{name}.>")
    me = BrokerId(1)
    return StreamRecord(
        name=name,
        id=StreamId(name),
        settings=settings,
        created_us=0,
        leader=me,
        leader_epoch=Epoch(1),
        replicas=(me,),
        isr=(me,),
    )


def served_of(log: ReplicaLog, readers: Any, *filters: str) -> tuple[LedConsumers, ServedConsumer]:
    """A consumer that begins at the second message."""
    stream: Any = Stream(name="A", record=SimpleNamespace(purged_below=0), usable_log=lambda: log)
    leaf: Any = SimpleNamespace(is_up=True, interest=SimpleNamespace(has=lambda *_: True, groups=lambda _: ()))
    led = LedConsumers(
        stream,
        leaf,
        readers,
        api_prefix="$JS.API",
        records_of=lambda *_: [],
        is_led_here=lambda _: True,
        pushing=set(),
        spawn=lambda work, _: asyncio.ensure_future(work),
    )
    config = ConsumerConfig(durable_name="C", ack_policy="explicit", filter_subjects=list(filters))
    record = ConsumerRecord(created_us=NOW_US, config=config, start=2, resume=2)
    machine = Consumer("C", config, 2, has_interest=lambda _: True)
    machine.begin(1, log.high_watermark)
    return led, ServedConsumer(led, "C", "id", record, machine)


def test_nothing_is_read_after_the_deadline(log: ReplicaLog) -> None:
    led, served = served_of(log, object(), "orders.b")
    assert asyncio.run(led.reconcile_until(served, PAST_S)) is None
    led, served = served_of(log, object())
    assert asyncio.run(led.reconcile_until(served, PAST_S)) == 39, "it is known without reading"


def test_messages_are_read_until_the_deadline(log: ReplicaLog) -> None:
    with ThreadPoolExecutor(1) as readers:
        led, served = served_of(log, readers, "orders.a", "orders.c")
        assert asyncio.run(led.reconcile_until(served, math.inf)) == asyncio.run(led.reconcile(served)) == 19


def test_pending_messages_that_are_gone_do_not_count(log: ReplicaLog) -> None:
    led, served = served_of(log, object())
    served.machine.pending.append(np.arange(2, 7), np.arange(1, 6), 1)
    log.visibility.removed.record(BitMap64([1, 2]))  # sequences 2 and 3
    assert asyncio.run(led.reconcile_until(served, PAST_S)) == 37
    assert len(served.machine.pending) == 5, "as it was"
    assert asyncio.run(led.reconcile_until(served, math.inf)) == 37
    assert len(served.machine.pending) == 3


@pytest.mark.parametrize("busy", ["the consumer", "the threads"])
def test_what_is_busy_is_waited_for_until_the_deadline(log: ReplicaLog, busy: str) -> None:
    """As long as others read: the consumer's deliveries, or those that use all threads."""

    async def numbers(readers: ThreadPoolExecutor) -> None:
        led, served = served_of(log, readers, "orders.b")
        if busy == "the consumer":
            await served.reading.acquire()
        else:
            readers.submit(ended.wait)
        assert await led.reconcile_until(served, time.monotonic() + 0.02) is None
        if busy == "the consumer":
            served.reading.release()
        ended.set()
        assert await led.reconcile_until(served, time.monotonic() + 60) == 20

    ended = threading.Event()
    with ThreadPoolExecutor(1) as readers:
        try:
            asyncio.run(asyncio.wait_for(numbers(readers), 10))
        finally:
            ended.set()


def services_of(numbers: Callable[..., Awaitable[list[ConsumerPosition]]]) -> SimpleNamespace:
    return SimpleNamespace(jetstream=SimpleNamespace(consumers=SimpleNamespace(numbers=numbers)))


def test_all_streams_of_a_request_have_one_deadline() -> None:
    deadlines: list[float] = []

    async def numbers(stream: Any, name: str | None, deadline_s: float) -> list[ConsumerPosition]:
        deadlines.append(deadline_s)
        await asyncio.sleep(0.01)
        return []

    streams = {name: SimpleNamespace(log=object(), has_companion_records=True) for name in ("a", "b")}
    hosting: Any = SimpleNamespace(streams=streams, services=services_of(numbers))
    positions: Any = SimpleNamespace(led=streams.get)
    cluster: Any = SimpleNamespace()
    begun_s = time.monotonic()
    found = asyncio.run(
        ConsumerCursors(cluster, hosting, positions).on_this_broker(["a", "b", "c"], None, COUNT_WITHIN_S)
    )
    assert found == {"a": [], "b": []}
    assert deadlines[0] == deadlines[1]
    assert begun_s < deadlines[0] <= time.monotonic() + COUNT_WITHIN_S


@pytest.mark.parametrize("consumers", [0, 1, 7])
def test_others_get_the_event_loop_between_streams_with_few_consumers(consumers: int) -> None:
    in_turn = Counter[int]()
    turn = 0

    async def numbers(stream: Any, name: str | None, deadline_s: float) -> list[ConsumerPosition]:
        in_turn[turn] += 1 + consumers
        return [ConsumerPosition("C", 0, 0, True)] * consumers

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def asked() -> None:
        counting = asyncio.create_task(count_turns())
        names = [str(at) for at in range(500)]
        streams = {name: SimpleNamespace(log=object(), has_companion_records=True) for name in names}
        hosting: Any = SimpleNamespace(streams=streams, services=services_of(numbers))
        positions: Any = SimpleNamespace(led=streams.get)
        cluster: Any = SimpleNamespace()
        assert (
            list(await ConsumerCursors(cluster, hosting, positions).on_this_broker(names, None, COUNT_WITHIN_S))
            == names
        )
        counting.cancel()

    asyncio.run(asked())
    assert max(in_turn.values()) <= 110


@pytest.mark.parametrize("change", ["none", "created again", "not led"])
def test_consumers_of_one_stream_may_change_while_others_have_the_event_loop(log: ReplicaLog, change: str) -> None:
    names = [f"{at:03}" for at in range(250)]
    config = ConsumerConfig(durable_name="C", ack_policy="explicit")
    stored = ConsumerRecord(created_us=NOW_US, config=config, start=2, resume=2).to_bytes()

    async def numbers() -> list[int | None]:
        broker: Any = SimpleNamespace(leaf=None, halt=None)
        serving = ConsumerServing(broker)
        led, _ = served_of(log, object())
        stream: Any = led.stream
        stream.log, stream.record = log, stream_record("A")
        stream.consumers = SimpleNamespace(consumers={name: StoredConsumer(f"id-{name}", stored) for name in names})
        for name in names:
            _, led.consumers[name] = served_of(log, object())
            led.consumers[name].id = f"id-{name}"
        serving._led[stream] = led
        reconcile_until, quiesced = led.reconcile_until, list[str]()

        async def changing(served: ServedConsumer, deadline_s: float) -> int | None:
            left = await reconcile_until(served, deadline_s)
            quiesced.append(served.id)
            if len(quiesced) == 10 and change == "created again":
                name = names[9]
                stream.consumers.consumers[name] = StoredConsumer("id-new", stored)
                _, led.consumers[name] = served_of(log, object())
                led.consumers[name].id = "id-new"
            return left

        async def other() -> None:
            assert 0 < len(quiesced) <= 100, "it has a turn"
            if change == "not led":
                del serving._led[stream]

        led.reconcile_until = changing  # type: ignore[method-assign]
        turn = asyncio.create_task(other())
        found = await serving.numbers(stream, None, time.monotonic() + 60)
        await turn
        assert [one.name for one in found] == names, "all positions are known"
        return [None if one.numbers is None else one.numbers.num_pending for one in found]

    expected: list[int | None] = [39] * 250
    if change == "created again":
        expected[9] = None  # not those of the former one
    if change == "not led":
        expected[100:] = [None] * 150
    assert asyncio.run(numbers()) == expected
