"""Uploads that end otherwise than they should: what they leave, and how long they hold a place."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from natslog.errors import DataDirError, InvalidRequest, Overloaded, StorageUnavailable
from natslog.ingest.staged_rows import RowRules
from natslog.model import BrokerId, StreamId
from natslog.node.writes.staging import Staging, _StagedBatch

KEY = (StreamId("0" * 32), "query", 0)


async def half_and_then_silence() -> AsyncIterator[bytes]:
    yield b"half"
    await asyncio.Event().wait()


async def two_pieces_and_then_silence() -> AsyncIterator[bytes]:
    yield b"half"
    yield b"more"
    await asyncio.Event().wait()


async def no_arrow() -> AsyncIterator[bytes]:
    yield b"no Arrow"


@pytest.mark.parametrize(
    ("chunks", "words"), [(half_and_then_silence, "no data was received for"), (no_arrow, "no Arrow IPC")]
)
def test_upload_that_fails_gives_its_place_back_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks, words: str
) -> None:
    monkeypatch.setattr("natslog.node.writes.staging._SILENT_S", 0.05)

    async def upload() -> None:
        staging = Staging(tmp_path / "staged", BrokerId(1), max_bytes=1 << 20, min_free_bytes=0)
        with pytest.raises(InvalidRequest, match=words):
            async with asyncio.timeout(10):
                await staging.receive(KEY, "0", 0, RowRules(("orders",), "orders"), chunks())
        assert (staging._uploads, staging._batches) == ([], {})
        assert list((tmp_path / "staged").iterdir()) == []
        staging.close()

    asyncio.run(upload())


@pytest.mark.parametrize("call", ["open", "writev", "pread"])
def test_disk_error_during_an_upload_is_retriable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    async def upload() -> None:
        staging = Staging(tmp_path / "staged", BrokerId(1), max_bytes=1 << 20, min_free_bytes=0)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            with pytest.raises(StorageUnavailable, match="Input/output error"):
                await staging.receive(KEY, "0", 0, RowRules(("orders",), "orders"), no_arrow())
        assert list((tmp_path / "staged").iterdir()) == []
        staging.close()

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    asyncio.run(upload())


def test_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "staged").write_text("no folder")
    with pytest.raises(DataDirError, match="deeper cannot be used .* start the broker again"):
        Staging(tmp_path / "staged" / "deeper", BrokerId(1), max_bytes=1, min_free_bytes=0)


def test_file_of_an_upload_whose_client_leaves_is_closed_when_its_thread_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be cancelled. It wrote into whatever file had been given the same descriptor since."""
    is_writing, may_write, closed_early = threading.Event(), threading.Event(), []

    def write_late(upload: Any, fd: int, chunk: bytes) -> None:
        if chunk:
            is_writing.set()
            may_write.wait(10)
            try:
                os.fstat(fd)
            except OSError as error:
                closed_early.append(error)

    async def story() -> None:
        staging = Staging(tmp_path / "staged", BrokerId(1), max_bytes=1 << 20, min_free_bytes=0)
        monkeypatch.setattr("natslog.node.writes.staging._Upload.write", write_late)
        upload = asyncio.create_task(
            staging.receive(KEY, "0", 0, RowRules(("orders",), "orders"), two_pieces_and_then_silence())
        )
        await asyncio.to_thread(is_writing.wait, 10)
        upload.cancel()
        await asyncio.sleep(0.05)
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await upload
        staging._threads.shutdown(wait=True)

    asyncio.run(story())
    assert closed_early == []


def test_files_of_a_batch_are_deleted_though_the_client_leaves_meanwhile(tmp_path: Path) -> None:
    async def story() -> None:
        staging = Staging(tmp_path / "staged", BrokerId(1), max_bytes=1 << 20, min_free_bytes=0)
        file = tmp_path / "staged" / "part"
        file.write_text("rows")
        staging._batches[KEY] = batch = _StagedBatch()
        batch.parts["0", 0] = SimpleNamespace(path=file)  # type: ignore[assignment]
        may_go_on = threading.Event()
        busy = [staging._threads.submit(may_go_on.wait, 10) for _ in range(16)]
        dropping = asyncio.create_task(staging.drop(KEY))
        await asyncio.sleep(0.05)
        dropping.cancel()
        await asyncio.sleep(0.05)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await dropping
        staging._threads.shutdown(wait=True)
        assert all(one.done() for one in busy)
        assert not file.exists()

    asyncio.run(story())


def test_part_that_cannot_be_deleted_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        staging = Staging(tmp_path / "staged", BrokerId(1), max_bytes=1 << 20, min_free_bytes=0)
        part = tmp_path / "staged" / "part"
        part.mkdir()  # unlink fails
        staging._batches[KEY] = batch = _StagedBatch()
        batch.parts["0", 0] = SimpleNamespace(path=part)  # type: ignore[assignment]
        await staging.drop(KEY)
        staging.close()

    asyncio.run(story())
    assert "could not be deleted" in caplog.text


def test_descriptions_that_are_damaged_stop_no_start(tmp_path: Path) -> None:
    """They are not fsynced: after a loss of power they may contain anything."""
    folder = tmp_path / "staged"
    folder.mkdir()
    garbage = [b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'{"stream": 1}', os.urandom(64)]
    for number, content in enumerate(garbage):
        (folder / f"{number:020d}").write_bytes(b"rows")
        (folder / f"{number:020d}.json").write_bytes(content)
    (folder / "note.txt").write_text("a file of somebody else")
    (folder / "alone.json").write_text("{}")
    staging = Staging(folder, BrokerId(1), max_bytes=1, min_free_bytes=0)
    staging.close()
    assert list(folder.iterdir()) == []
    assert staging._batches == {}


def test_parts_of_a_batch_are_kept_as_long_as_the_newest_one(tmp_path: Path) -> None:
    async def upload(staging: Staging, key: Any, part: str) -> None:
        async def rows() -> AsyncIterator[bytes]:
            sink = pa.BufferOutputStream()
            batch = pa.record_batch({"value": pa.array([b"x"], pa.binary())})
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            yield bytes(sink.getvalue())

        await staging.receive(key, part, 0, RowRules(("orders",), "orders"), rows())

    async def stage() -> None:
        staging = Staging(tmp_path / "staged", BrokerId(1), max_bytes=1 << 20, min_free_bytes=0)
        for key, part in ((KEY, "0"), (KEY, "1"), ((*KEY[:2], 99), "0")):
            await upload(staging, key, part)
        staging.close()

    asyncio.run(stage())
    for number in (0, 2):  # the first part of KEY, and the only one of the other batch
        os.utime(tmp_path / "staged" / f"{number:020d}", (0, time.time() - 3700))
    staging = Staging(tmp_path / "staged", BrokerId(1), max_bytes=1 << 20, min_free_bytes=0)
    staging.close()
    assert {key: sorted(batch.parts) for key, batch in staging._batches.items()} == {KEY: [("0", 0), ("1", 0)]}
    assert len(list((tmp_path / "staged").iterdir())) == 4


def test_rows_of_requests_that_wait_are_bounded(tmp_path: Path) -> None:
    """One that is alone is taken, whatever its size: its own limits hold for it."""
    staging = Staging(tmp_path / "staged", BrokerId(1), max_bytes=1 << 20, min_free_bytes=0)
    half = 64 * 1024 * 1024
    with staging.in_memory(half), staging.in_memory(half):
        with pytest.raises(Overloaded, match="rows of other requests wait"), staging.in_memory(1):
            pass
    with staging.in_memory(3 * half):
        pass
    staging.close()
