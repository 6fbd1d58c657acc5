"""The tasks of a broker: each has an owner, a name, and a rule for its end.

Theory of operation. A part that starts tasks does so by its `Supervisor`. A task may return. An exception that it ends
with is a bug, because what can fail in operation is handled where it fails: the broker stops instead of continuing
without this task. An owner whose tasks may fail in operation states what follows from a `NatslogError`. When the owner
stops, it cancels its tasks and waits until all have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from natslog.errors import NatslogError

Result = TypeVar("Result")

OnBug = Callable[[str, BaseException], None]
"""Called with the name of what has failed, and why: the broker must stop."""


class Supervisor:
    """The tasks of one owner, in the event loop.

    Args:
        on_bug: called with the name of a task, and the exception that has ended it.
        on_failure: called instead where that is a NatslogError. None: such an error is a bug as well.
    """

    def __init__(self, on_bug: OnBug, *, on_failure: Callable[[str, NatslogError], None] | None = None) -> None:
        self._on_bug, self._on_failure = on_bug, on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """How many tasks have not ended."""
        return len(self._tasks)

    def start(
        self, work: Coroutine[Any, Any, Result], name: str, *, context: Context | None = None
    ) -> asyncio.Task[Result]:
        """Args: context: of its variables; that of the caller by default."""
        task = asyncio.create_task(work, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._on_failure is not None and isinstance(error, NatslogError):
            self._on_failure(task.get_name(), error)
        else:
            self._on_bug(task.get_name(), error)

    async def ended(self, within_s: float | None = None) -> None:
        """Returns when all tasks have ended, or after this time. They are not cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)

    async def stop(self, within_s: float | None = None) -> None:
        """Cancels all tasks, also those that start meanwhile. Returns when they have ended, so that what they used may
        be closed; or after this time, because a task that waits for a thread ends with it.
        """
        try:
            async with asyncio.timeout(within_s):
                while self._tasks:
                    for task in self._tasks:
                        task.cancel()
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            return
