"""Threads of a broker that stops: what comes too late is refused as such, not as a bug."""

from __future__ import annotations

import asyncio

import pytest

from natslog.errors import ShuttingDown
from natslog.node.threads import Threads, in_thread


def test_work_after_the_shutdown_is_refused_and_may_be_asked_for_again() -> None:
    async def story() -> None:
        threads = Threads(1, "test")
        assert await in_thread(threads, lambda: 1) == 1
        threads.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(ShuttingDown):
            await in_thread(threads, lambda: 1)
        with pytest.raises(ShuttingDown):
            await asyncio.get_running_loop().run_in_executor(threads, lambda: 1)
        assert ShuttingDown.retriable

    asyncio.run(story())


def test_error_of_the_work_itself_is_its_own() -> None:
    def fails() -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    with pytest.raises(RuntimeError):
        Threads(1, "test").submit(fails).result()
