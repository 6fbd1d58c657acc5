"""A real full disk (a small tmpfs): refused before anything is lost, readable meanwhile, and it resumes by itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import all_values, eventually, publish_acked, running

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize(
    "min_free_bytes",
    [pytest.param("1MiB", id="reserve"), pytest.param("1", id="to the last byte", marks=pytest.mark.long)],
)
def test_full_disk_turns_the_stream_read_only_until_there_is_room(small_disk: Path, min_free_bytes: str) -> None:
    with running(small_disk / "own", min_free_bytes=min_free_bytes, segment_bytes="1MiB") as (server, broker):
        client = broker.client()
        client.create_stream("orders", "orders")
        acked: list[bytes] = []
        refusals = []
        for at in range(200):
            value = b"%04d" % at + b"x" * 100_000
            answer = publish_acked(server.url, "orders", [value])[0]
            if "error" in answer:
                refusals.append(answer["error"])
                break
            acked.append(value)
        assert refusals, "the disk never filled up"
        assert refusals[0]["code"] == 503
        assert "no room" in refusals[0]["description"]
        assert all_values(client, "orders") == acked, "what was acked is readable while the disk is full"
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        eventually(lambda: "offset" in publish_acked(server.url, "orders", [b"after"])[0])
        broker.kill()
        broker.start()
        stored = all_values(client, "orders")
        assert stored[: len(acked)] == acked
        assert set(stored[len(acked) :]) == {b"after"}
