"""Work in threads: for tasks that may be cancelled, which a thread cannot be; and until the broker stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from natslog.errors import ShuttingDown

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Threads(ThreadPoolExecutor):
    """Threads of a broker. Requests may arrive for a moment after they were shut down.

    Raises:
        ShuttingDown: from `submit`, after `shutdown`; so from `run_in_executor` too.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._is_shut_down = False

    def submit(
        self, work: Callable[Arguments, Result], /, *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Future[Result]:
        if self._is_shut_down:
            raise ShuttingDown(
                "this broker is shutting down: send the request to another broker, or repeat it when this broker has "
                "restarted"
            )
        return super().submit(work, *arguments, **named)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut_down = True
        super().shutdown(wait, cancel_futures=cancel_futures)


async def in_thread(executor: Executor, work: Callable[..., Result], *arguments: Any) -> Result:
    """As `run_in_executor`. A caller that is cancelled gets the cancellation after the work is done: files that it uses
    must not be closed before.
    """
    running = asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await until_done(running)
        raise


async def until_done(future: asyncio.Future[Any]) -> None:
    """Waits even if the caller is cancelled several times; raises the cancellation afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
