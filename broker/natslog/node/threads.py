"""Work in threads: for tasks that may be cancelled, which a thread cannot be; and until the broker stops.

Files are used in threads. So this is where an error of the system becomes one of natslog (`FileUnavailable`): who waits
for the work reports it, and tries again, instead of ending the broker.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from natslog.errors import FILE_ERRORS, FileUnavailable, NatslogError, ShuttingDown
from natslog.request_ids import carried

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Threads(ThreadPoolExecutor):
    """Threads of a broker. Requests may arrive for a moment after they were shut down.

    Args:
        are_shared: one piece of work is done for several requests, so that its lines in the log have no request id.

    Raises:
        ShuttingDown: from `submit`, after `shutdown`; so from `run_in_executor` too.
    """

    def __init__(self, count: int, name: str, *, are_shared: bool = False) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._are_shared = are_shared
        self._is_shut_down = False

    def submit(
        self, work: Callable[Arguments, Result], /, *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Future[Result]:
        if self._is_shut_down:
            raise ShuttingDown(
                "this broker is shutting down: send the request to another broker, or repeat it when this broker has "
                "restarted"
            )
        ready: Callable[..., Result] = work if self._are_shared else carried(work)
        return super().submit(_with_own_errors(ready), *arguments, **named)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut_down = True
        super().shutdown(wait, cancel_futures=cancel_futures)


def _with_own_errors(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    def done(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        try:
            return work(*arguments, **named)
        except OSError as error:
            if isinstance(error, NatslogError) or error.errno not in FILE_ERRORS:
                raise
            raise FileUnavailable.of(error) from error

    return done


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


async def in_thread_before(deadline_s: float, executor: Executor, work: Callable[[], Result]) -> Result | None:
    """As `in_thread`; None if the work has not begun at `deadline_s` of `time.monotonic`, since no thread was free."""
    submitted = executor.submit(work)
    running = asyncio.wrap_future(submitted)
    try:
        await asyncio.wait([running], timeout=seconds_until(deadline_s))
        return None if submitted.cancel() else await asyncio.shield(running)
    except asyncio.CancelledError:
        submitted.cancel()
        await until_done(running)
        raise


def seconds_until(deadline_s: float) -> float | None:
    """As a timeout. Args: deadline_s: of `time.monotonic`; infinite: there is none."""
    return None if math.isinf(deadline_s) else max(0.0, deadline_s - time.monotonic())


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
