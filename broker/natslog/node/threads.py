"""Work in threads for tasks that may be cancelled: a thread cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(executor: Executor, work: Callable[..., Result], *arguments: Any) -> Result:
    """As `run_in_executor`. A caller that is cancelled is so once the work has been done: files that it uses must not
    be closed before.
    """
    running = asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await until_done(running)
        raise


async def until_done(future: asyncio.Future[Any]) -> None:
    """However often the caller is cancelled; raises that then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
