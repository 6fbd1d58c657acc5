"""The end of tasks: what stops the broker, what does not, and what a stop waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from natslog.errors import NatslogError, StorageFull
from natslog.node.supervisor import Supervisor


def ended(work: Coroutine[Any, Any, None], *, may_fail: bool = False) -> tuple[list[Any], list[Any]]:
    """Bugs and failures that were reported of this work."""
    bugs, failures = list[Any](), list[Any]()

    def note(task: str, error: NatslogError) -> None:
        failures.append((task, error))

    async def run() -> None:
        tasks = Supervisor(lambda *bug: bugs.append(bug), on_failure=note if may_fail else None)
        tasks.start(work, "some work")
        await tasks.ended()
        await asyncio.sleep(0)
        assert len(tasks) == 0

    asyncio.run(run())
    return bugs, failures


async def fail(error: Exception) -> None:
    raise error


def test_a_task_that_returns_is_no_bug() -> None:
    assert ended(asyncio.sleep(0)) == ([], [])


def test_an_exception_is_a_bug_also_where_tasks_may_fail() -> None:
    error = KeyError("a bug")
    for may_fail in (False, True):
        assert ended(fail(error), may_fail=may_fail) == ([("some work", error)], [])


def test_an_error_in_operation_is_a_bug_unless_the_owner_states_what_follows() -> None:
    error = StorageFull("no room")
    assert ended(fail(error)) == ([("some work", error)], [])
    assert ended(fail(error), may_fail=True) == ([], [("some work", error)])


def test_stop_cancels_and_waits_until_the_last_task_has_ended() -> None:
    bugs, closed = list[Any](), list[str]()

    async def use(file: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            closed.append(file)

    async def run() -> None:
        tasks = Supervisor(lambda *bug: bugs.append(bug))
        for file in ("a", "b"):
            tasks.start(use(file), file)
        await tasks.ended(within_s=0.01)
        assert (len(tasks), closed) == (2, [])
        await tasks.stop()
        assert sorted(closed) == ["a", "b"]
        await tasks.stop()

    asyncio.run(run())
    assert bugs == []
