"""An event loop whose time is that of a simulated world, and threads whose work takes as long as the seed says.

Every callback is one action of the world, so that its checks run after each, and a world with real asyncio code in it
is as deterministic as one without. A loop is that of one life of a process: what is left of it when the process has
crashed is never run.
"""

from __future__ import annotations

import asyncio
import inspect
from asyncio import events
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextvars import Context
from typing import Any, TypeVar

from tests.sim.world import World

Result = TypeVar("Result")


class WorldLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as code needs that opens no files and no connections.

    Args:
        late_ms: by how much a timer is late, because the loop is busy.

    Attributes:
        is_dead: the process has crashed, or ended.
    """

    def __init__(self, world: World, late_ms: Callable[[], float] = lambda: 0.0) -> None:
        self.is_dead = False
        self._world, self._late_ms = world, late_ms
        self._tasks: list[asyncio.Task[Any]] = []
        self._failure: BaseException | None = None

    def within(self, work: Callable[[], Result]) -> Result:
        """Does this as a callback of the loop would."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            result = work()
        finally:
            events._set_running_loop(before)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return result

    def die(self) -> None:
        """Nothing runs any more."""
        self.is_dead = True
        for task in self._tasks:
            coroutine: Any = task.get_coro()
            if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # which runs nothing of it

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """An error in it is one of the world."""
        task = self.create_task(work, name=name)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error

    # ---- as an event loop ----

    def time(self) -> float:
        return self._world.now_ms / 1000

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._world.after(0.0, lambda: self._run(handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        delay_ms = max(0.0, when * 1000 - self._world.now_ms) + self._late_ms()
        self._world.after(delay_ms, lambda: self._run(handle))
        return handle

    def _run(self, handle: asyncio.Handle) -> None:
        if not (self.is_dead or handle.cancelled()):
            self.within(handle._run)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the queue of the world, and is not run."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name)
        self._tasks = [one for one in self._tasks if not one.done()]
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_dead:
            self._failure = self._failure or context.get("exception") or AssertionError(context["message"])

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False


class WorldThreads(Executor):
    """Args: `delay_ms`: of one piece of work, before and after it is done. `failure`: with which one fails, if so."""

    def __init__(
        self, world: World, delay_ms: Callable[[], float], failure: Callable[[], Exception | None] = lambda: None
    ) -> None:
        self._world, self._delay_ms, self._failure = world, delay_ms, failure

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future = Future[Any]()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if (failure := self._failure()) is not None:
                    raise failure
                result = work(*args, **named)
            except Exception as error:
                done = (future.set_exception, error)
            else:
                done = (future.set_result, result)
            self._world.after(self._delay_ms(), lambda: done[0](done[1]))

        self._world.after(self._delay_ms(), run)
        return future
