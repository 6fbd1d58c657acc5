"""Work that is begun where it is called, and continued by a task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from natslog.node.begun import begin


def story(happened: list[str], *, is_cancelled: bool) -> None:
    async def work() -> None:
        happened.append("begun")
        try:
            await asyncio.sleep(0.001)
            happened.append("done")
        except asyncio.CancelledError:
            happened.append("cancelled")
            raise

    async def told() -> None:
        tasks: list[asyncio.Task[None]] = []

        def spawn(rest: Coroutine[Any, Any, None], name: str) -> None:
            tasks.append(asyncio.create_task(rest, name=name))

        begin(work(), "work", spawn)
        assert happened == ["begun"]
        (task,) = tasks
        if is_cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task

    asyncio.run(told())


def test_it_is_continued_by_a_task() -> None:
    happened: list[str] = []
    story(happened, is_cancelled=False)
    assert happened == ["begun", "done"]


def test_it_is_cancelled_also_before_the_first_step_of_the_task() -> None:
    """What it must undo, or wait for, was left: a replica was copying for ever."""
    happened: list[str] = []
    story(happened, is_cancelled=True)
    assert happened == ["begun", "cancelled"]


def test_work_that_does_not_wait_needs_no_task() -> None:
    async def work() -> None:
        return

    begin(work(), "work", lambda rest, name: pytest.fail("it is done"))


def test_an_error_is_passed_to_the_task() -> None:
    async def work() -> None:
        raise KeyError("a bug")

    async def told() -> None:
        tasks: list[asyncio.Task[None]] = []
        begin(work(), "work", lambda rest, name: tasks.append(asyncio.create_task(rest)))
        with pytest.raises(KeyError):
            await tasks[0]

    asyncio.run(told())
