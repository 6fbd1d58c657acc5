"""Whether the disk still takes writes: seen on a file that does not."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from natslog.node.disk_reserve import DiskReserve
from natslog.node.metadata import disk_pulse
from natslog.node.metadata.disk_pulse import DiskPulse
from tests.harness import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_pulse, "_EVERY_S", 0.01)
    monkeypatch.setattr(disk_pulse, "_HANGS_AFTER_S", 0.1)


def beating(
    file: Path,
    watch: Callable[[DiskPulse], Awaitable[None]],
    on_bug: Callable[[str, BaseException], None] = lambda what, error: pytest.fail(f"{what}: {error}"),
) -> None:
    async def main() -> None:
        pulse = DiskPulse(file, DiskReserve(file.with_name("reserve")))
        pulse.start(on_bug)
        try:
            await watch(pulse)
        finally:
            pulse.close()

    asyncio.run(main())


async def until(pulse: DiskPulse, hangs: bool) -> None:
    async with asyncio.timeout(20):
        while pulse.hangs != hangs:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes of the pulse wait while it is not set."""
    write, thawed = os.pwrite, threading.Event()
    thawed.set()

    def waiting(fd: int, data: bytes, offset: int) -> int:
        thawed.wait(20)
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", waiting)
    return thawed


def test_writes_that_do_not_return_are_seen_and_so_is_their_return(tmp_path: Path, thawed: threading.Event) -> None:
    async def watch(pulse: DiskPulse) -> None:
        await asyncio.sleep(0.3)
        assert not pulse.hangs
        thawed.clear()
        await until(pulse, hangs=True)
        thawed.set()
        await until(pulse, hangs=False)

    beating(tmp_path / "pulse", watch)
    assert (tmp_path / "pulse").stat().st_size == 20, "always the same few bytes"


def test_it_is_logged_while_the_event_loop_itself_waits_for_the_disk(
    tmp_path: Path, thawed: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    async def watch(pulse: DiskPulse) -> None:
        await asyncio.sleep(0.1)
        thawed.clear()
        eventually(lambda: "does not complete writes" in caplog.text, 30, "the line")  # keeps the loop busy
        assert pulse.hangs
        thawed.set()
        eventually(lambda: "completes writes again" in caplog.text, 30, "the line")
        assert not pulse.hangs

    beating(tmp_path / "pulse", watch)


def test_a_disk_that_refuses_writes_answers(tmp_path: Path) -> None:
    async def watch(pulse: DiskPulse) -> None:
        await asyncio.sleep(0.3)
        assert not pulse.hangs

    beating(tmp_path / "missing" / "pulse", watch)


def test_a_bug_that_ends_a_thread_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a disk that hangs later would not be noticed."""
    bugs = list[tuple[str, BaseException]]()

    def broken(fd: int, data: bytes, offset: int) -> int:
        raise ZeroDivisionError

    async def watch(pulse: DiskPulse) -> None:
        monkeypatch.setattr(os, "pwrite", broken)
        async with asyncio.timeout(20):
            while not bugs:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    beating(tmp_path / "pulse", watch, lambda *bug: bugs.append(bug))
    assert [(what, type(error)) for what, error in bugs] == [("disk pulse", ZeroDivisionError)]
