"""The session ends by the clock that goes on, and begins with a question, not with its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from natslog.cluster.lease import SESSION_S
from natslog.errors import MetadataUnavailable
from natslog.node.metadata import session
from natslog.node.metadata.group import SESSION_TICKS, TICK_S
from natslog.node.metadata.session import Session


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_ASK_EVERY_S", 0.01)
    monkeypatch.setattr(session, "_ASK_AGAIN_S", 0.001)


def during(one: Session, test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        keeping = asyncio.create_task(one.run())
        try:
            async with asyncio.timeout(10):
                await test()
        finally:
            keeping.cancel()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)


def test_session_is_shorter_than_what_the_metadata_leader_grants() -> None:
    assert SESSION_S <= SESSION_TICKS * TICK_S - 0.4, "two heartbeats may lie between a question and a sign of life"


def test_session_is_kept_while_questions_are_answered_and_ends_by_the_clock() -> None:
    clock, answers = Clock(), asyncio.Event()

    async def barrier() -> None:
        if not answers.is_set():
            raise MetadataUnavailable("no majority")

    one = Session(barrier, clock)

    async def test() -> None:
        assert not one.is_valid()
        answers.set()
        await until(one.is_valid)
        answers.clear()
        await asyncio.sleep(0.05)
        clock.now_s += SESSION_S - 0.1
        assert one.is_valid()
        clock.now_s += 0.2
        assert not one.is_valid(), "as in a process that was stopped: nothing ran meanwhile"
        answers.set()
        await until(one.is_valid)

    during(one, test)


def test_answer_that_was_waited_for_through_a_stop_begins_no_session() -> None:
    clock, may_answer, asked = Clock(), asyncio.Event(), [0]

    async def barrier() -> None:
        asked[0] += 1
        if asked[0] > 1:
            raise MetadataUnavailable("no majority")
        await may_answer.wait()

    one = Session(barrier, clock)

    async def test() -> None:
        await until(lambda: asked[0] > 0)
        clock.now_s += 30
        may_answer.set()
        await until(lambda: asked[0] > 2)
        assert not one.is_valid()

    during(one, test)


def test_bug_in_a_question_ends_the_session_with_its_trace() -> None:
    async def barrier() -> None:
        raise RuntimeError("a bug")

    async def run() -> None:
        await Session(barrier).run()

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(asyncio.wait_for(run(), 10))
