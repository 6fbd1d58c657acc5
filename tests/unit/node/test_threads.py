"""Threads of a broker that stops: what comes too late is refused as such, not as a bug."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import pickle
import threading

import pytest

from natslog.errors import FILE_ERRORS, NatslogError, ShuttingDown
from natslog.node.threads import Threads, in_thread, in_thread_before


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


@pytest.mark.parametrize("has_begun", [False, True])
def test_caller_that_is_cancelled_ends_after_work_that_has_begun_and_before_other_work(has_begun: bool) -> None:
    begun, may_end, done = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        may_end.wait(10)
        done.append("work")

    async def story() -> None:
        with Threads(1, "test") as threads:
            try:
                if not has_begun:
                    threads.submit(may_end.wait, 10)
                asked = asyncio.create_task(in_thread_before(math.inf, threads, work))
                await asyncio.sleep(0)
                if has_begun:
                    await asyncio.to_thread(begun.wait, 10)
                asked.cancel()
                await asyncio.wait([asked], timeout=0.05)
                assert asked.done() is not has_begun
                may_end.set()
                with pytest.raises(asyncio.CancelledError):
                    await asked
                assert done == (["work"] if has_begun else [])
            finally:
                may_end.set()

    asyncio.run(story())
    assert begun.is_set() is has_begun


@pytest.mark.parametrize("number", sorted(FILE_ERRORS))
def test_errors_of_files_are_reported_with_a_remedy_and_can_be_tried_again(number: int) -> None:
    def failing() -> None:
        raise OSError(number, os.strerror(number), "/data/streams/x")

    with Threads(1, "read") as threads:
        error = threads.submit(failing).exception()
    assert isinstance(error, NatslogError)
    assert isinstance(error, OSError), "what handles errors of files handles it, too"
    assert (error.errno, error.retriable, error.status) == (number, True, 503)
    assert os.strerror(number) in error.message
    assert "/data/streams/x" in error.message
    again = pickle.loads(pickle.dumps(error))
    assert (again.errno, again.message) == (error.errno, error.message)


def test_other_errors_of_the_system_are_passed_on() -> None:
    def missing() -> None:
        raise FileNotFoundError(errno.ENOENT, "it is gone")

    with Threads(1, "read") as threads:
        error = threads.submit(missing).exception()
    assert type(error) is FileNotFoundError
