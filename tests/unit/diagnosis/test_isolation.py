"""A function in a process of its own: its result, its failure, its end."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from natslog.diagnosis.isolation import Unfinished, isolated
from natslog.errors import ConfigError


def test_result_comes_back() -> None:
    assert isolated(lambda: ["a" * 3_000_000, os.getpid() != os.getppid()], list[str | bool], 10)[1] is True
    assert isolated(os.getpid, int, 10) != os.getpid()


def test_work_that_hangs_is_ended() -> None:
    started = time.monotonic()
    with pytest.raises(Unfinished, match=r"did not end within 0.3 s") as found:
        isolated(lambda: time.sleep(60), type(None), 0.3)
    assert found.value.is_hung
    assert time.monotonic() - started < 5


def test_work_that_ignores_signals_is_ended() -> None:
    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    with pytest.raises(Unfinished, match="did not end"):
        isolated(work, type(None), 0.3)


def _fail(error: Exception) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (ConfigError("correct it"), "^correct it$"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_error_is_the_reason(error: Exception, shown: str) -> None:
    with pytest.raises(Unfinished, match=shown) as found:
        isolated(lambda: _fail(error), int, 10)
    assert not found.value.is_hung


def test_process_that_ends_has_no_result() -> None:
    with pytest.raises(Unfinished, match="ended without a result"):
        isolated(lambda: os.kill(os.getpid(), signal.SIGKILL), type(None), 10)


def test_memory_is_limited() -> None:
    with pytest.raises(Unfinished, match="MemoryError"):
        isolated(lambda: len(bytearray(8 * 1024**3)), int, 20)


def test_result_of_any_size_is_limited() -> None:
    with pytest.raises(Unfinished):
        isolated(lambda: bytes(100 * 1024 * 1024), bytes, 20)


def test_no_process_is_left() -> None:
    before = {child.pid for child in psutil.Process().children()}
    isolated(lambda: 1, int, 10)
    assert {child.pid for child in psutil.Process().children()} <= before
