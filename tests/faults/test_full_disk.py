"""A real full disk (a small tmpfs): refused before anything is lost, readable meanwhile, and it resumes by itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.harness import BrokerProcess, all_values, eventually, publish_acked, running

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
        assert "is full" in refusals[0]["description"]
        if min_free_bytes != "1":
            left = os.statvfs(small_disk)
            assert left.f_bavail * left.f_frsize > 900_000, "they are refused before the reserve is used"
        assert all_values(client, "orders") == acked, "what was acked is readable while the disk is full"
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        eventually(lambda: "offset" in publish_acked(server.url, "orders", [b"after"])[0])
        broker.kill()
        broker.start()
        stored = all_values(client, "orders")
        assert stored[: len(acked)] == acked
        assert set(stored[len(acked) :]) == {b"after"}


def fill(folder: Path) -> Path:
    """To the last byte."""
    filler = folder / "filler"
    with open(filler, "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(65536))
    return filler


NEW = {"name": "new", "subject": "new"}


@pytest.mark.long
@pytest.mark.parametrize("level", [1, 2])
def test_metadata_lives_from_its_reserve_while_the_disk_is_full_to_the_last_byte(small_disk: Path, level: int) -> None:
    """What needs more room is refused and may be tried again; deletions and other changes go on; it heals by itself."""
    subprocess.run(["mount", "-o", "remount,size=32m", str(small_disk)], check=True)
    (small_disk / "own" / "data").mkdir(parents=True)
    if level == 1:  # a folder of before there were levels
        shutil.copy(Path(__file__).parents[1] / "golden" / "metadata-v1", small_disk / "own" / "data" / "metadata")
    with running(small_disk / "own", min_free_bytes="1") as (server, broker):
        client = broker.client()
        client.create_stream("kept", "kept")
        client.create_stream("gone", "gone")
        client.set_cursor("reader", "kept", 0)
        offset = publish_acked(server.url, "kept", [b"before"])[0]["offset"]
        eventually(lambda: "reserve" in os.listdir(small_disk / "own/data/raft"))
        filler = fill(small_disk)
        full = eventually(lambda: error_of(broker, "POST", "streams", NEW))
        assert (full["status"], full["code"], full["retriable"]) == (503, "storage_full", True)
        refused = error_of(broker, "PUT", "cursors/reader/kept", {"offset": 1}).get("code")
        assert refused in ("storage_full", None), "the file of __cursors may have room"
        assert error_of(broker, "PATCH", "streams/kept", {"subject": "kept.>"})["code"] == "storage_full"
        client.delete_stream("gone")
        for at in range(1100):  # beyond a snapshot
            client.edit_stream("kept", max_bytes=1024 * 1024 + at)
        assert [stream["name"] for stream in client.streams() if stream["name"] in ("kept", "gone")] == ["kept"]
        assert all_values(client, "kept")[offset] == b"before"
        filler.unlink()
        eventually(lambda: error_of(broker, "POST", "streams", NEW) == {}, what="a stream is created")
        client.set_cursor("reader", "kept", 1)
        assert "offset" in publish_acked(server.url, "kept", [b"after"])[0]
        fill(small_disk)
        broker.kill()
        broker.start()
        assert "new" in [stream["name"] for stream in broker.client().streams()]


def error_of(broker: BrokerProcess, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Of one request; empty where there is none."""
    url = f"{broker.url}/v1/{path}"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30):
            return {}
    except urllib.error.HTTPError as error:
        return {**json.loads(error.read())["error"], "status": error.code}
