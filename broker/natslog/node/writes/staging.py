"""Uploaded parts of direct appends, kept in files until their commit.

DIR/staged/<number>         one part as it was uploaded
DIR/staged/<number>.json    what it is: it is written when the part has been checked

Theory of operation. An upload is written to a file as it arrives, and its CRC32C is taken on the way. Then the file is
read back once and checked: whole, well-formed, rows as the stream takes them. Attempts at a part do not replace each
other; the commit names the valid ones. A broker that starts lists the parts that it finds: rows that were staged before
a restart can be committed. If another broker leads the stream meanwhile, it copies the parts that a commit names.

Invariants. Nothing is fsynced: a commit compares each part with its CRC32C when it reads it. Every file is deleted:
with its batch's commit or abort, or after an hour in which the batch was not touched. What is staged for one batch is
bounded, and the disk keeps its reserve.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import pyarrow as pa
from crc32c import crc32c

from natslog.errors import (
    DataDirError,
    InvalidRequest,
    Overloaded,
    PartsMissing,
    PayloadTooLarge,
    StorageFull,
    StorageUnavailable,
)
from natslog.ingest.staged_rows import (
    BYTES_PER_ROW,
    RowRules,
    claimed_bytes,
    read_rows,
    regrouped,
    rows_of_bytes,
)
from natslog.log import free_bytes
from natslog.log.checked_file import write_all
from natslog.log_events import event
from natslog.model import BrokerId, PartReceipt, StreamId
from natslog.node.threads import Threads, in_thread, until_done
from natslog.wire.row_hashes import content_digest, row_hashes, sum_digests

logger = logging.getLogger("natslog.node")

Result = TypeVar("Result")

_THREADS = 4
_MOST_UPLOADS = 64
_CHUNK_BYTES = 1024 * 1024  # at most, as they arrive
_FORGET_AFTER_S = 3600.0
_SILENT_S = 30.0
_PIECE_BYTES = 2 * 1024 * 1024  # of what other brokers copy
_MEMORY_BYTES = 128 * 1024 * 1024  # of rows that are committed by the request that brought them, as stored
_ATTEMPTS = 2  # of everything in a batch: the limit of staged data, as a multiple of the limit of one run

BatchKey: TypeAlias = tuple[StreamId, str, int]
"""Stream, producer, batch."""


@dataclass(frozen=True, slots=True)
class StagedPart:
    """A part in its file: `uploaded_bytes` as uploaded, `size_bytes` as a log stores its rows."""

    path: Path
    rules: RowRules
    receipt: PartReceipt
    size_bytes: int
    uploaded_bytes: int

    def batches(self, allowed: tuple[str, ...] | None = None) -> Iterator[pa.RecordBatch]:
        """Its rows.

        Args:
            allowed: wildcards, one of which covers the subject of each row; None: that is not checked again.

        Raises:
            PartsMissing: the file is not what was uploaded any more. Forbidden: a row has another subject.
        """
        rules, checks_rows = replace(self.rules, allowed=allowed), allowed is not None
        try:
            yield from read_rows(self.path, int(self.receipt.digest, 16), rules, "staged part", checks_rows=checks_rows)
        except (OSError, InvalidRequest) as error:
            raise PartsMissing(f"a staged part cannot be read ({error}): stage the batch again") from error


@dataclass(frozen=True, slots=True)
class PartInMemory:
    """Rows that are committed by the request that brought them."""

    receipt: PartReceipt
    size_bytes: int
    content: Sequence[pa.RecordBatch]

    def batches(self) -> Iterator[pa.RecordBatch]:
        yield from self.content

    @classmethod
    def of(cls, data: bytes, rules: RowRules, what: str, max_bytes: int) -> PartInMemory:
        """Of an uncompressed Arrow IPC stream. Raises as `rows_of_bytes`; PayloadTooLarge: its rows are too many."""
        batches, size_bytes = list[pa.RecordBatch](), 0
        for batch in rows_of_bytes(data, rules, what):
            size_bytes += batch.nbytes + BYTES_PER_ROW * batch.num_rows
            if size_bytes > max_bytes:
                raise too_large(size_bytes, max_bytes)
            batches.append(batch)
        rows, size_bytes, content = _sums_of(batches)
        return cls(PartReceipt("rows", 0, rows, f"{crc32c(data):08x}", content), size_bytes, batches)


Part: TypeAlias = StagedPart | PartInMemory


def _sums_of(batches: Iterable[pa.RecordBatch]) -> tuple[int, int, str]:
    """How many rows, their bytes as a log stores them, and the digest of their content."""
    rows = size_bytes = 0
    digests = []
    for batch in batches:
        rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes + BYTES_PER_ROW * batch.num_rows
        hashes = row_hashes(*(batch.column(name) for name in ("subject", "value", "key", "headers")))
        digests.append(content_digest(hashes))
    return rows, size_bytes, f"{sum_digests(digests):032x}"


class _Description(msgspec.Struct, frozen=True):
    """The file beside a part. `covered_by`: a text where the stream has one subject."""

    stream: str
    producer: str
    batch: int
    receipt: PartReceipt
    covered_by: str | tuple[str, ...]
    default_subject: str | None
    size_bytes: int
    uploaded_bytes: int


@dataclass(slots=True)
class _StagedBatch:
    parts: dict[tuple[str, int], StagedPart] = field(default_factory=dict)  # by name and attempt
    touched_s: float = 0.0

    def unlink_files(self) -> None:
        for part in self.parts.values():
            _unlink(part.path)


@dataclass(slots=True, eq=False)
class _Upload:
    """A part that is being written to its file. Attributes: `crc`, `size_bytes`, of the received data."""

    key: BatchKey
    path: Path
    size_bytes: int = 0
    crc: int = 0

    def write(self, fd: int, chunk: bytes) -> None:
        self.crc = crc32c(chunk, self.crc)
        write_all(fd, [chunk])

    def examined(self, part: str, attempt: int, rules: RowRules, max_bytes: int, broker: BrokerId) -> StagedPart:
        """Reads the file back and checks all of it. Raises as `read_rows`; PayloadTooLarge: its rows are too many."""
        what = f"part {part} of batch {self.key[2]} of {self.key[1]}"
        if (claimed := claimed_bytes(self.path, what)) > max_bytes:
            raise too_large(claimed, max_bytes)
        rows, size_bytes, content = _sums_of(read_rows(self.path, self.crc, rules, what))
        receipt = PartReceipt(part, attempt, rows, f"{self.crc:08x}", content, broker)
        stream, producer, number = self.key
        sizes = size_bytes, self.size_bytes
        covered_by = rules.covered_by[0] if len(rules.covered_by) == 1 else rules.covered_by
        described = _Description(stream, producer, number, receipt, covered_by, rules.default_subject, *sizes)
        fd = os.open(_description_of(self.path), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        try:
            write_all(fd, [msgspec.json.encode(described)])
        finally:
            os.close(fd)
        return StagedPart(self.path, rules, receipt, *sizes)


class Staging:
    """The staged parts of one broker. All but the file work is the event loop's.

    Args:
        broker: this one. `max_bytes`: of one run. `min_free_bytes`: what the disk keeps free.

    Raises:
        DataDirError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, broker: BrokerId, *, max_bytes: int, min_free_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._broker = broker
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._batches: dict[BatchKey, _StagedBatch] = {}
        self._uploads: list[_Upload] = []
        self._memory_bytes = 0
        self._threads = Threads(_THREADS, "stage")
        try:
            folder.mkdir(exist_ok=True)
            self._numbers = itertools.count(self._restore())
        except OSError as error:
            raise DataDirError(
                f"the folder {folder} cannot be used ({error.strerror}): free space on that disk, or correct its "
                "permissions, then start the broker again"
            ) from error

    def _restore(self) -> int:
        """Lists the parts in the folder, and deletes what is none or too old. Returns the first unused number."""
        changed_s: dict[BatchKey, float] = {}
        last = -1
        for path in [path for path in sorted(self._folder.iterdir()) if path.suffix != ".json"]:
            part = _described(path)
            if part is None:
                _unlink(path)
                continue
            key, staged = part
            batch = self._batches[key] = self._touched(key)
            batch.parts[staged.receipt.part, staged.receipt.attempt] = staged
            changed_s[key] = max(changed_s.get(key, 0.0), path.stat().st_mtime)
            last = max(last, int(path.name))
        for key in [key for key, at_s in changed_s.items() if at_s < time.time() - _FORGET_AFTER_S]:
            self._batches.pop(key).unlink_files()
        for path in self._folder.glob("*.json"):
            if not path.with_suffix("").exists():
                path.unlink()
        if self._batches:
            logger.info(
                "%s has parts of %d batches that can be committed",
                self._folder,
                len(self._batches),
                extra=event("staging.restored", path=self._folder, count=len(self._batches)),
            )
        return last + 1

    @contextmanager
    def in_memory(self, size_bytes: int) -> Iterator[None]:
        """While rows of a request are in memory. Raises Overloaded: those of others take all of the room."""
        if self._memory_bytes and self._memory_bytes + size_bytes > _MEMORY_BYTES:
            raise Overloaded("rows of other requests wait for the disk or for replicas: try again in a moment")
        self._memory_bytes += size_bytes
        try:
            yield
        finally:
            self._memory_bytes -= size_bytes

    @property
    def staged_bytes(self) -> int:
        keys = {*self._batches, *(upload.key for upload in self._uploads)}
        return sum(map(self._uploaded_bytes, keys))

    def _uploaded_bytes(self, key: BatchKey) -> int:
        parts = self._batches[key].parts.values() if key in self._batches else ()
        arriving = sum(upload.size_bytes for upload in self._uploads if upload.key == key)
        return arriving + sum(part.uploaded_bytes for part in parts)

    def _touched(self, key: BatchKey) -> _StagedBatch:
        """The staged parts of a batch, which is kept for an hour from now on."""
        batch = self._batches.get(key) or _StagedBatch()
        batch.touched_s = time.monotonic()
        return batch

    async def receive(
        self, key: BatchKey, part: str, attempt: int, rules: RowRules, chunks: AsyncIterator[bytes]
    ) -> StagedPart:
        """Stores an upload. It replaces an earlier one of the same part and attempt.

        Raises:
            InvalidRequest: the data is invalid. PayloadTooLarge: more than the limit of a batch. StorageFull,
            StorageUnavailable, Overloaded: it cannot be stored now.
        """
        if len(self._uploads) >= _MOST_UPLOADS:
            raise Overloaded(f"{_MOST_UPLOADS} uploads are in progress: try again in a moment")
        self._touched(key)
        upload = _Upload(key, self._folder / f"{next(self._numbers):020d}")
        self._uploads.append(upload)
        try:
            await self._write(upload, chunks)
            staged = await self._in_thread(upload.examined, part, attempt, rules, self.max_bytes, self._broker)
        except BaseException as error:
            _unlink(upload.path)
            if isinstance(error, OSError):
                why = error.strerror or error
                raise StorageUnavailable(f"the upload could not be stored ({why}): try again") from error
            raise
        finally:
            self._uploads.remove(upload)
        batch = self._batches[key] = self._touched(key)
        replaced = batch.parts.get((part, attempt))
        batch.parts[part, attempt] = staged
        if replaced is not None:
            _unlink(replaced.path)
        return staged

    async def _write(self, upload: _Upload, chunks: AsyncIterator[bytes]) -> None:
        """One chunk is written while the next one arrives."""
        fd = os.open(upload.path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
        writing = asyncio.create_task(self._in_thread(upload.write, fd, b""))
        try:
            while chunk := await _next(chunks):
                await writing
                upload.size_bytes += len(chunk)
                self._check_room(upload)
                writing = asyncio.create_task(self._in_thread(upload.write, fd, chunk))
            await writing
        finally:
            try:
                await until_done(writing)
            finally:
                os.close(fd)  # not before: the next file that is opened gets the same descriptor

    def _check_room(self, upload: _Upload) -> None:
        batch_bytes = self._uploaded_bytes(upload.key)
        if upload.size_bytes > self.max_bytes or batch_bytes > _ATTEMPTS * self.max_bytes:
            raise self.too_large(batch_bytes)
        if free_bytes(self._folder) < self._min_free_bytes + _CHUNK_BYTES:
            raise StorageFull(
                f"the disk of {self._folder} has no space for uploads ({self._min_free_bytes} bytes are kept free): "
                "free space or lower the retention limits of streams",
                file=str(self._folder),
            )

    def too_large(self, size_bytes: int) -> PayloadTooLarge:
        return too_large(size_bytes, self.max_bytes)

    async def _in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await in_thread(self._threads, work, *arguments)

    def lacks(self, key: BatchKey, receipt: PartReceipt) -> bool:
        """Whether this part is not staged here as the receipt names it."""
        batch = self._batches.get(key)
        part = None if batch is None else batch.parts.get((receipt.part, receipt.attempt))
        return part is None or not receipt.names(part.receipt)

    async def piece(self, stream: str, producer: str, batch: int, part: str, attempt: int, at: int) -> dict[str, Any]:
        """For another broker: what was uploaded, from byte `at` on; `data` is empty at the end.

        Raises:
            PartsMissing: it is not staged here.
        """
        staged = self._touched((StreamId(stream), producer, batch)).parts.get((part, attempt))
        if staged is None:
            raise _missing(part, attempt, batch, producer)
        try:
            data = await self._in_thread(_read_piece, staged.path, at)
        except OSError as error:
            raise _missing(part, attempt, batch, producer) from error
        return {"data": base64.b64encode(data).decode(), "default_subject": staged.rules.default_subject}

    async def require_allowed(self, parts: Iterable[StagedPart], allowed: tuple[str, ...] | None) -> None:
        """The subjects of these parts are permitted to who commits them. Rules may have changed since the uploads,
        which may be of others, too; an upload with the same limits was checked when it was made.

        Raises:
            Forbidden, PartsMissing.
        """
        if allowed is not None:
            for part in [part for part in parts if part.rules.allowed != allowed]:
                await self._in_thread(_read_through, part, allowed)

    def named(self, key: BatchKey, receipts: Iterable[PartReceipt]) -> list[StagedPart]:
        """The parts that a commit names, in that order.

        Raises:
            PartsMissing: one is not staged here, or differs from the named one. PayloadTooLarge: together they are more
            than a run.
        """
        staged, found = self._touched(key).parts, []
        for receipt in receipts:
            part = staged.get((receipt.part, receipt.attempt))
            if part is None or not receipt.names(part.receipt):
                raise _missing(receipt.part, receipt.attempt, key[2], key[1])
            found.append(part)
        size_bytes = sum(part.size_bytes for part in found)
        if size_bytes > self.max_bytes:
            raise self.too_large(size_bytes)
        return found

    async def drop(self, key: BatchKey) -> None:
        """All parts of a batch, whatever their attempts."""
        batch = self._batches.pop(key, None)
        if batch is not None:
            await self._in_thread(batch.unlink_files)

    async def drop_forgotten(self) -> None:
        """The batches that were not touched for an hour."""
        since_s = time.monotonic() - _FORGET_AFTER_S
        for key in [key for key, batch in self._batches.items() if batch.touched_s < since_s]:
            logger.warning(
                "batch %d of %s was not committed here for an hour: its parts were deleted",
                key[2],
                key[1],
                extra=event("staging.expired", producer=key[1], batch=key[2]),
            )
            await self.drop(key)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _read_through(part: StagedPart, allowed: tuple[str, ...]) -> None:
    for _ in part.batches(allowed):
        pass


def _description_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _described(path: Path) -> tuple[BatchKey, StagedPart] | None:
    """A part that was staged before; None where its description is missing or damaged."""
    try:
        one = msgspec.json.decode(_description_of(path).read_bytes(), type=_Description)
    except (FileNotFoundError, ValueError):
        return None
    if not path.name.isdecimal() or path.stat().st_size != one.uploaded_bytes:
        return None
    covered_by = (one.covered_by,) if isinstance(one.covered_by, str) else one.covered_by
    rules = RowRules(covered_by, one.default_subject)
    staged = StagedPart(path, rules, one.receipt, one.size_bytes, one.uploaded_bytes)
    return (StreamId(one.stream), one.producer, one.batch), staged


def _unlink(path: Path) -> None:
    """A part and its description. What cannot be deleted is deleted at a later start."""
    try:
        path.unlink(missing_ok=True)
        _description_of(path).unlink(missing_ok=True)
    except OSError as error:
        logger.warning(
            "the staged part %s could not be deleted: %s", path, error, extra=event("staging.not_deleted", path=path)
        )


def _read_piece(path: Path, at: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), _PIECE_BYTES, at)


def _missing(part: str, attempt: int, batch: int, producer: str) -> PartsMissing:
    return PartsMissing(
        f"part {part} (attempt {attempt}) of batch {batch} of {producer} is not staged as the commit names it: it was "
        "committed or aborted, its broker lost it, or an hour has passed. Stage the batch again",
        part=part,
        attempt=attempt,
    )


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    """Empty at the end. Raises InvalidRequest: no data was received for too long, and an upload uses one of few
    places.
    """
    try:
        async with asyncio.timeout(_SILENT_S):
            return await anext(chunks, b"")
    except TimeoutError:
        raise InvalidRequest(f"no data was received for {_SILENT_S:.0f} s: upload the part again") from None


def rows_of(parts: Sequence[Part]) -> Iterator[pa.RecordBatch]:
    """All rows of the parts, one after another, in batches as a log stores them. While the disk syncs one of them,
    another thread reads, proves and gathers the next one, unless all are in memory.
    """
    batches = regrouped(batch for part in parts for batch in part.batches())
    if all(isinstance(part, PartInMemory) for part in parts):
        yield from batches
        return
    with ThreadPoolExecutor(1, thread_name_prefix="append") as thread:
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch


def too_large(size_bytes: int, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"one batch has {size_bytes} bytes, but this broker accepts at most {max_bytes} per batch "
        "(append_max_bytes): make batches smaller (maxBytesPerTrigger, maxOffsetsPerTrigger, several writes), or "
        "raise append_max_bytes",
        max_bytes=max_bytes,
    )
