"""The history of lags: what is noted of consumers, and how many are looked up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from natslog.node import lag_history
from natslog.node.clock import now_us
from natslog.node.lag_history import LagHistory
from natslog.node.replicas import lags
from natslog.node.replicas.consumer_records import ConsumerNumbers, ConsumerPosition


class _Lags:
    """Of each offset: 10 bytes and so many seconds for each message below 100."""

    def __init__(self, seconds_per_row: float = 0.5) -> None:
        self.asked: dict[str, list[int]] = {}
        self._seconds_per_row = seconds_per_row

    async def on_this_broker(self, positions: Mapping[str, Sequence[int]]) -> dict[str, list[dict[str, Any]]]:
        self.asked = {name: list(offsets) for name, offsets in positions.items()}
        return {
            name: [
                {"bytes": 10 * left, "seconds": left * self._seconds_per_row}
                for left in (100 - offset for offset in offsets)
            ]
            for name, offsets in positions.items()
        }


def history_of(lags: _Lags, cursors: list[SimpleNamespace], positions: Sequence[ConsumerPosition] = ()) -> LagHistory:
    """Of a broker that leads the stream `s`, of which 100 messages are committed."""
    record = SimpleNamespace(id="1", leader=1)
    cluster = SimpleNamespace(me=1, state=SimpleNamespace(streams={"s": record}))
    stream = SimpleNamespace(record=record, log=SimpleNamespace(high_watermark=100))

    async def counted(names: list[str], count_within_s: float) -> dict[str, list[ConsumerPosition]]:
        return {"s": positions} if names else {}

    async def find(within_s: float) -> list[SimpleNamespace]:
        return cursors

    parts: Any = (
        cluster,
        SimpleNamespace(led_here=lambda: [("s", stream)]),
        lags,
        SimpleNamespace(find=find),
        SimpleNamespace(led_here=lambda: {"s": positions}, on_this_broker=counted),
    )
    return LagHistory(*parts)


def cursor(consumer: str, offset: int, set_us: int = 0) -> SimpleNamespace:
    return SimpleNamespace(stream="s", consumer=consumer, offset=offset, set_us=set_us)


def test_each_unit_is_noted_and_a_consumer_that_is_deleted_is_unknown_then() -> None:
    cursors = [cursor("behind", 60), cursor("current", 100)]
    noted = _Lags()
    history = history_of(noted, cursors)

    async def sampled() -> dict[str, dict[str, list[int | None]]]:
        await history.sample()
        cursors[:] = [cursor("behind", 80)]
        await history.sample()
        return await history.on_this_broker("s")

    assert asyncio.run(sampled()) == {
        "behind": {"rows": [40, 20], "bytes": [400, 200], "seconds": [20, 10]},
        "current": {"rows": [0, None], "bytes": [0, None], "seconds": [0, None]},
    }


def consumer(name: str, *, pending: int | None, unacked: int, waiting: int = 0) -> ConsumerPosition:
    numbers = ConsumerNumbers((0, 0), (0, 0), pending, unacked, 0, waiting)
    return ConsumerPosition(name, 0, 0, is_durable=True, numbers=numbers)


def test_a_consumer_has_stopped_if_it_has_messages_and_did_not_move_in_two_samples() -> None:
    """Not one that moved lately, nor one whose filter leaves out all messages that there are, or whose client waits."""
    cursors = [cursor("late", 60), cursor("slow", 0, set_us=now_us()), cursor("current", 100), cursor("recent", 90)]
    consumers = [
        consumer("idle", pending=0, unacked=0),
        consumer("waits", pending=3, unacked=0),
        consumer("holds", pending=0, unacked=2),
        consumer("uncounted", pending=None, unacked=0),
        consumer("asks", pending=5, unacked=1, waiting=1),
    ]
    history = history_of(_Lags(seconds_per_row=2), cursors, consumers)

    async def sampled() -> list[dict[str, list[str]]]:
        found = []
        for _ in range(2):
            await history.sample()
            found.append(history.stopped)
        cursors[0] = cursor("late", 70, set_us=now_us())
        await history.sample()
        return [*found, history.stopped]

    jetstream = ["jetstream:holds", "jetstream:uncounted", "jetstream:waits"]
    stopped = {"s": [*jetstream, "late"]}
    assert asyncio.run(sampled()) == [{}, stopped, {"s": jetstream}]


def test_a_consumer_may_take_three_times_as_long_as_between_its_last_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query with a trigger of five minutes has not stopped after ten."""
    clock = SimpleNamespace(minutes=1000)
    monkeypatch.setattr(lags, "now_us", lambda: clock.minutes * 60_000_000)
    cursors = [cursor("slow", 0, set_us=995 * 60_000_000)]
    history = history_of(_Lags(seconds_per_row=60), cursors)

    async def stopped_after(minutes: int) -> dict[str, list[str]]:
        clock.minutes += minutes
        for _ in range(2):
            await history.sample()
        return history.stopped

    assert asyncio.run(stopped_after(0)) == {"s": ["slow"]}, "nothing is known of its pace"
    cursors[0].set_us = 1000 * 60_000_000
    assert asyncio.run(stopped_after(10)) == {}
    assert asyncio.run(stopped_after(6)) == {"s": ["slow"]}


def test_only_those_furthest_behind_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag_history, "MOST_READ", 2)
    noted = _Lags()
    history = history_of(noted, [cursor("a", 90), cursor("b", 10), cursor("c", 50), cursor("d", 100)])

    async def sampled() -> dict[str, dict[str, list[int | None]]]:
        await history.sample()
        return await history.on_this_broker("s")

    found = asyncio.run(sampled())
    assert noted.asked == {"s": [10, 50]}
    assert {name: units["bytes"] for name, units in found.items()} == {"a": [None], "b": [900], "c": [500], "d": [0]}
    assert {name: units["rows"] for name, units in found.items()} == {"a": [10], "b": [90], "c": [50], "d": [0]}
