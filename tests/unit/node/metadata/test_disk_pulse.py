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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_pulse, "_EVERY_S", 0.01)
    monkeypatch.setattr(disk_pulse, "_HANGS_AFTER_S", 0.1)


def beating(file: Path, watch: Callable[[DiskPulse], Awaitable[None]]) -> None:
    async def main() -> None:
        pulse = DiskPulse(file, DiskReserve(file.with_name("reserve")))
        task = asyncio.create_task(pulse.run())
        await watch(pulse)
        task.cancel()
        await asyncio.wait([task])
        pulse.close()

    asyncio.run(main())


async def until(pulse: DiskPulse, hangs: bool) -> None:
    async with asyncio.timeout(20):
        while pulse.hangs != hangs:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_writes_that_do_not_return_are_seen_and_so_is_their_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, thawed = os.pwrite, threading.Event()
    thawed.set()

    def waiting(fd: int, data: bytes, offset: int) -> int:
        thawed.wait(20)
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", waiting)

    async def watch(pulse: DiskPulse) -> None:
        await asyncio.sleep(0.3)
        assert not pulse.hangs
        thawed.clear()
        await until(pulse, hangs=True)
        thawed.set()
        await until(pulse, hangs=False)

    beating(tmp_path / "pulse", watch)
    assert (tmp_path / "pulse").stat().st_size == 20, "always the same few bytes"


def test_a_disk_that_refuses_writes_answers(tmp_path: Path) -> None:
    async def watch(pulse: DiskPulse) -> None:
        await asyncio.sleep(0.3)
        assert not pulse.hangs

    beating(tmp_path / "missing" / "pulse", watch)
