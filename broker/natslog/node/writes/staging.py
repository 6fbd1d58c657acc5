"""Where uploaded parts of direct appends wait for their commit: files that nobody but their uploader counts on.

DIR/staged/<number>    one part as it was uploaded; all are removed at start

Theory of operation. An upload goes to a file as it comes, in writes of about a megabyte, its CRC32C taken on the way.
Then the file is read back once: whole, well-formed, rows as the stream takes them. What is known of a part stands in
memory: after a restart the files mean nothing. Attempts replace nothing of each other; the commit says which count.

Invariants. Nothing is fsynced. Every file is removed: with its batch's commit or abort, when the batch was not touched
for an hour, or at the next start. What one batch has staged is bounded, and the disk keeps its reserve.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
import pyarrow as pa
from crc32c import crc32c

from natslog.errors import InvalidRequest, Overloaded, PartsMissing, PayloadTooLarge, StorageFull, StorageUnavailable
from natslog.ingest.staged_rows import RowRules, UploadedRows, regrouped
from natslog.log import free_bytes
from natslog.log.checked_file import write_all
from natslog.model import StreamId

logger = logging.getLogger("natslog.node")

Result = TypeVar("Result")

_THREADS = 4
_MOST_UPLOADS = 64
_WRITE_BYTES = 1024 * 1024
_FORGET_AFTER_S = 3600.0
_SILENT_S = 30.0
_ATTEMPTS = 2  # of everything in a batch: what may be staged for it, in times of what one run may have

BatchKey: TypeAlias = tuple[StreamId, str, int]
"""Stream, producer, batch."""


class PartName(msgspec.Struct, frozen=True):
    """What a commit names: a part, which attempt at it, and what its upload was answered with."""

    part: str
    attempt: int
    rows: int
    digest: str


@dataclass(frozen=True, slots=True)
class StagedPart:
    """An uploaded part: `uploaded_bytes` of that digest in a file, `rows` rows, `size_bytes` as a log stores them."""

    path: Path
    rules: RowRules
    rows: int
    size_bytes: int
    uploaded_bytes: int
    digest: str

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its rows. Raises PartsMissing: the file is not what was uploaded any more."""
        try:
            fd = os.open(self.path, os.O_RDONLY)
            try:
                rows = UploadedRows(fd, self.rules, "staged part", checks_rows=False)
                yield from rows
            finally:
                os.close(fd)
        except (OSError, InvalidRequest) as error:
            raise PartsMissing(f"a staged part cannot be read ({error}): stage the batch again") from error
        if f"{rows.crc:08x}" != self.digest:
            raise PartsMissing("a staged part is not what was uploaded any more (CRC32C): stage the batch again")


@dataclass(slots=True)
class _StagedBatch:
    parts: dict[tuple[str, int], StagedPart] = field(default_factory=dict)
    touched_s: float = field(default_factory=time.monotonic)
    uploading_bytes: int = 0

    @property
    def uploaded_bytes(self) -> int:
        return self.uploading_bytes + sum(part.uploaded_bytes for part in self.parts.values())


class Staging:
    """Of one broker; all but the file work is the event loop's.

    Args:
        max_bytes: of one run. `min_free_bytes`: what the disk keeps free.
    """

    def __init__(self, folder: Path, *, max_bytes: int, min_free_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._batches: dict[BatchKey, _StagedBatch] = {}
        self._numbers = itertools.count()
        self._uploads = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="stage")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)

    @property
    def staged_bytes(self) -> int:
        return sum(batch.uploaded_bytes for batch in self._batches.values())

    async def receive(
        self, key: BatchKey, part: str, attempt: int, rules: RowRules, chunks: AsyncIterator[bytes]
    ) -> StagedPart:
        """Takes an upload; another one of the same part and attempt takes its place.

        Raises:
            InvalidRequest: not what it must be. PayloadTooLarge, StorageFull, Overloaded: it cannot be taken now.
        """
        if self._uploads >= _MOST_UPLOADS:
            raise Overloaded(f"{_MOST_UPLOADS} uploads are under way: try again in a moment")
        batch = self._batches.setdefault(key, _StagedBatch())
        batch.touched_s = time.monotonic()
        path = self._folder / f"{next(self._numbers):020d}"
        upload = _Upload(batch, path)
        self._uploads += 1
        try:
            await self._write(upload, chunks)
            what = f"part {part} of batch {key[2]} of {key[1]}"
            staged = await self._in_thread(lambda: _examined(upload, rules, what))
        except BaseException:
            with suppress(FileNotFoundError):
                path.unlink()
            if not batch.parts and batch.uploading_bytes == upload.size_bytes and self._batches.get(key) is batch:
                del self._batches[key]
            raise
        finally:
            self._uploads -= 1
            batch.uploading_bytes -= upload.size_bytes
        batch = self._batches.setdefault(key, _StagedBatch())  # it may have been dropped meanwhile
        replaced = batch.parts.get((part, attempt))
        batch.parts[part, attempt] = staged
        batch.touched_s = time.monotonic()
        if replaced is not None:
            replaced.path.unlink(missing_ok=True)
        return staged

    async def _write(self, upload: _Upload, chunks: AsyncIterator[bytes]) -> None:
        """One write is under way while the next megabyte comes in."""
        fd = os.open(upload.path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
        writing: asyncio.Future[None] | None = None
        try:
            async for pieces in _gathered(chunks):
                if writing is not None:
                    await writing
                upload.add(sum(map(len, pieces)))
                self._check_room(upload)
                writing = asyncio.ensure_future(self._in_thread(partial(upload.write, fd, pieces)))
            if writing is not None:
                await writing
        except OSError as error:
            raise StorageUnavailable(f"the upload could not be kept ({error.strerror or error}): try again") from error
        finally:
            if writing is not None:
                await asyncio.wait([writing])
            os.close(fd)

    def _check_room(self, upload: _Upload) -> None:
        if upload.size_bytes > self.max_bytes or upload.batch.uploaded_bytes > _ATTEMPTS * self.max_bytes:
            raise self.too_large(upload.batch.uploaded_bytes)
        if free_bytes(self._folder) < self._min_free_bytes + _WRITE_BYTES:
            raise StorageFull(
                f"the disk of {self._folder} has no room for uploads ({self._min_free_bytes} bytes are kept free): "
                "make room or lower the retention of streams",
                file=str(self._folder),
            )

    def too_large(self, size_bytes: int) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"{size_bytes} bytes for one batch; this broker takes {self.max_bytes} as one run (append_max_bytes): make "
            "batches smaller (maxBytesPerTrigger, maxOffsetsPerTrigger, several writes), or raise it",
            max_bytes=self.max_bytes,
        )

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def named(self, key: BatchKey, names: Iterable[PartName]) -> list[StagedPart]:
        """The parts that a commit names, in that order.

        Raises:
            PartsMissing: one is not here, or not what is named. PayloadTooLarge: together they are more than a run.
        """
        batch = self._batches.get(key, _StagedBatch())
        batch.touched_s = time.monotonic()
        found = []
        for name in names:
            part = batch.parts.get((name.part, name.attempt))
            if part is None or (part.rows, part.digest) != (name.rows, name.digest):
                raise PartsMissing(
                    f"part {name.part} (attempt {name.attempt}) of batch {key[2]} of {key[1]} is not staged on this "
                    "broker as it is named: another broker leads by now, this one was restarted, or an hour has "
                    "passed. Stage the batch again",
                    part=name.part,
                    attempt=name.attempt,
                )
            found.append(part)
        size_bytes = sum(part.size_bytes for part in found)
        if size_bytes > self.max_bytes:
            raise self.too_large(size_bytes)
        return found

    async def drop(self, key: BatchKey) -> None:
        """All parts of a batch, whatever their attempts."""
        batch = self._batches.pop(key, None)
        if batch is not None and batch.parts:
            paths = [part.path for part in batch.parts.values()]
            await asyncio.get_running_loop().run_in_executor(self._threads, _unlink_all, paths)

    async def drop_forgotten(self) -> None:
        """What nobody touched for an hour."""
        since_s = time.monotonic() - _FORGET_AFTER_S
        for key in [key for key, batch in self._batches.items() if batch.touched_s < since_s]:
            logger.warning("batch %d of %s was staged and never committed; its parts are dropped", key[2], key[1])
            await self.drop(key)

    def close(self) -> None:
        self._threads.shutdown(wait=False)


class _Upload:
    """A file being written; `crc` and `size_bytes` of what came."""

    def __init__(self, batch: _StagedBatch, path: Path) -> None:
        self.batch, self.path = batch, path
        self.size_bytes = self.crc = 0

    def add(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self.batch.uploading_bytes += size_bytes

    def write(self, fd: int, pieces: list[bytes]) -> None:
        for piece in pieces:
            self.crc = crc32c(piece, self.crc)
        write_all(fd, pieces)


async def _gathered(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Chunks in lists of about a megabyte."""
    pieces: list[bytes] = []
    size_bytes = 0
    async for chunk in _prompt(chunks):
        pieces.append(chunk)
        size_bytes += len(chunk)
        if size_bytes >= _WRITE_BYTES:
            yield pieces
            pieces, size_bytes = [], 0
    if pieces:
        yield pieces


async def _prompt(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The chunks. Raises InvalidRequest where none comes for long: who has gone without a word holds no place."""
    while True:
        try:
            async with asyncio.timeout(_SILENT_S):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise InvalidRequest(f"nothing came for {_SILENT_S:.0f} s: upload the part again") from None
        if chunk is None:
            return
        yield chunk


def _examined(upload: _Upload, rules: RowRules, what: str) -> StagedPart:
    """In a thread: reads the file back and checks all of it."""
    fd = os.open(upload.path, os.O_RDONLY)
    try:
        uploaded = UploadedRows(fd, rules, what)
        rows = size_bytes = 0
        for batch in uploaded:
            rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes + 16 * batch.num_rows
    finally:
        os.close(fd)
    if uploaded.crc != upload.crc:
        raise StorageUnavailable(f"{what}: what was written to {upload.path} is not what is read back: try again")
    return StagedPart(upload.path, rules, rows, size_bytes, upload.size_bytes, f"{upload.crc:08x}")


def _unlink_all(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def rows_of(parts: Iterable[StagedPart]) -> Iterator[pa.RecordBatch]:
    """All rows of the parts, one after another, in batches as a log stores them; the next one is read meanwhile."""
    return _read_ahead(regrouped(batch for part in parts for batch in part.batches()))


def _read_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The disk syncs one batch while another thread reads, proves and gathers the one after it."""
    with ThreadPoolExecutor(1, thread_name_prefix="run") as thread:
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch
