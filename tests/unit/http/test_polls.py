"""The queue of long polls: a bug in it stops the broker, a closed log does not; neither leaves a poll waiting."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from natslog.errors import CorruptLog
from natslog.http import polls
from natslog.http.answer_parts import Question
from natslog.node.replicas.stream import HostedStream


def test_bug_in_the_queue_stops_the_broker_and_wakes_the_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Any, due: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(polls._Queue, "_serve", fails)
    bugs: list[BaseException] = []

    async def story() -> None:
        log = SimpleNamespace(high_watermark=0)
        stream: Any = SimpleNamespace(
            id="aa", name="orders", log=log, is_leading=True, advanced=asyncio.Event(), usable_log=lambda: log
        )
        asked = Question(
            start=0, end=None, max_bytes=None, wait_ms=60_000, subject=None, columns=None, ndjson=False, exact=True
        )
        queues = polls.Polls(SimpleNamespace(), SimpleNamespace(), lambda what, error: bugs.append(error))  # type: ignore[arg-type]
        with queues.poll(stream, asked) as poll:
            turn = asyncio.ensure_future(poll.turn())
            await asyncio.sleep(0)
            log.high_watermark = 1
            advanced, stream.advanced = stream.advanced, asyncio.Event()
            advanced.set()
            async with asyncio.timeout(20):
                await turn

    asyncio.run(story())
    assert [type(bug) for bug in bugs] == [ZeroDivisionError]


def test_log_that_is_closed_while_equal_polls_wait_ends_them_and_stops_no_broker() -> None:
    bugs: list[BaseException] = []

    async def story() -> None:
        log: Any = SimpleNamespace(high_watermark=0)
        stream: Any = SimpleNamespace(
            id="aa", name="orders", log=log, is_leading=True, advanced=asyncio.Event(), usable_log=lambda: log
        )
        stream.is_at_tail = lambda offset: HostedStream.is_at_tail(stream, offset)
        asked = Question(
            start=0, end=None, max_bytes=None, wait_ms=60_000, subject=None, columns=None, ndjson=False, exact=True
        )
        queues = polls.Polls(SimpleNamespace(), SimpleNamespace(), lambda what, error: bugs.append(error))  # type: ignore[arg-type]

        def closed() -> None:
            raise CorruptLog("the log of stream 'orders' is not open yet")

        with queues.poll(stream, asked) as first, queues.poll(stream, asked) as second:
            turns = [asyncio.ensure_future(poll.turn()) for poll in (first, second)]
            await asyncio.sleep(0)
            stream.log, stream.usable_log = None, closed
            advanced, stream.advanced = stream.advanced, asyncio.Event()
            advanced.set()
            async with asyncio.timeout(20):
                await asyncio.gather(*turns)

    asyncio.run(story())
    assert not bugs
