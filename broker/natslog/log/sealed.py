"""Sealed segments: Arrow IPC *files*, written once, opened by any Arrow reader.

Sealing merges tiny commits into batches of up to 64 Ki rows or 8 MiB (and compresses them where the stream asks for
it; batches of runs keep their bounds and their marks), writes a new file, fsyncs it and renames it into place; the
active file is removed after that. Where the commits are large already and nothing is to be compressed, end-of-stream
and footer are appended to the bytes as they stand.

Invariants. A sealed file never changes. Every batch is read and proven once before it is first served by this process:
wrong data on disk is found before a reader receives it. The index in the footer has a CRC of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow import ipc
from natslog.errors import CorruptLog
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.checked_file import write_all
from natslog.log.footer import FILE_MAGIC, footer_bytes
from natslog.log.merging import Merged, Stored, merge, stored
from natslog.log.segment import ActiveSegment, damage, file_header, read_at, read_batch
from natslog.log.small_runs import SmallRuns

_LARGE_COMMIT_BYTES = 256 * 1024
_STATS_CHARS = 256
_SYNC_EVERY_BYTES = 4 * 1024 * 1024
_INDEX_TEXT = re.compile(rb"v[12] batches=\d+ crc32c=[0-9a-f]{8} [A-Za-z0-9+/=]*")


class SegmentFacts(NamedTuple):
    """How many rows a segment has, and the times of the newest messages of its first and its last batch."""

    rows: int
    oldest_us: int
    newest_us: int


def _facts_of(index: BatchIndex) -> SegmentFacts:
    times_us = index.max_timestamps_us or (0,)
    return SegmentFacts(sum(index.rows), times_us[0], times_us[-1])


class SealedSegment:
    """A file on disk; its index is read when first needed and may be dropped again (`forget`)."""

    __slots__ = (
        "_index",
        "_proven",
        "base_offset",
        "checked_erasures",
        "is_unmergeable",
        "kept_for",
        "kept_rows",
        "known",
        "path",
        "size_bytes",
    )

    def __init__(self, path: Path, base_offset: int, size_bytes: int) -> None:
        self.path = path
        self.known: SegmentFacts | None = None  # once its index was read
        self.is_unmergeable = False  # merging failed; it is not tried again in this process
        self.kept_rows = 0  # hidden ones that rewriting had to leave in it, because they count for older messages
        self.kept_for = 0  # how many older messages there were then
        self.checked_erasures = 0  # it has no rows of those up to this serial number (`log.erasing`)
        self.base_offset = base_offset
        self.size_bytes = size_bytes
        self._index: BatchIndex | None = None
        self._proven = bytearray()

    @property
    def index(self) -> BatchIndex:
        """Raises CorruptLog if the footer is damaged."""
        index = self._index
        if index is None:
            index = self._index = read_footer_index(self.path)
            self.known = _facts_of(index)
            if len(self._proven) != len(index):
                self._proven = bytearray(len(index))
        return index

    @property
    def facts(self) -> SegmentFacts:
        """The index is read once for them, and not kept. Raises CorruptLog."""
        known = self.known
        if known is None:
            known = _facts_of(self.index)
            self.forget()
        return known

    @property
    def has_index(self) -> bool:
        """Whether the index is in memory."""
        return self._index is not None

    def has_footer(self) -> bool:
        """Whether the footer is whole, and with it the index."""
        try:
            return self.index is not None
        except CorruptLog:
            return False

    @property
    def end_offset(self) -> int:
        return self.index.end_offsets[-1]

    @property
    def max_timestamp_us(self) -> int:
        return self.index.max_timestamps_us[-1]

    def forget(self) -> None:
        """Releases the memory of the index; validated batches remain validated."""
        self._index = None

    def forget_proofs(self) -> None:
        """Marks validated batches as unchecked: they are read again before they are served."""
        self._proven = bytearray(len(self._proven))

    def prove(self, fd: int, index: BatchIndex, first: int, last: int) -> int:
        """Reads the batches `[first, last)` once in this process's life. `index`: the segment's, as the caller has it.

        Returns:
            Where the intact ones end, at least `first + 1`.

        Raises:
            CorruptLog: the first one is damaged.
        """
        for at in range(first, last):
            if not self._proven[at]:
                try:
                    read_batch(fd, index[at], self.path)
                except CorruptLog:
                    if at == first:
                        raise
                    return at
                self._proven[at] = 1
        return last


def split_footer(path: Path) -> tuple[int, bytes]:
    """Where end-of-stream and footer of a sealed segment begin in the file, and their bytes.

    Raises:
        CorruptLog: the file does not end as a sealed segment does.
    """
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        tail_bytes = 4 + len(FILE_MAGIC)
        tail = read_at(file.fileno(), max(0, size_bytes - tail_bytes), tail_bytes)
        start = size_bytes - tail_bytes - int.from_bytes(tail[:4], "little") - len(ipc.END_OF_STREAM)
        if not tail.endswith(FILE_MAGIC) or start < 0:
            raise CorruptLog(
                f"{path}: the footer of this sealed segment is damaged", file=str(path), position=size_bytes
            )
        return start, read_at(file.fileno(), start, size_bytes - start)


def read_footer_index(path: Path) -> BatchIndex:
    """The batch index that sealing left in the footer.

    Raises:
        CorruptLog: the file does not end as a sealed segment does, or the index is damaged.
    """
    position, footer = split_footer(path)
    found = _INDEX_TEXT.search(footer)
    if found is None:
        raise CorruptLog(f"{path}: the footer of this sealed segment is damaged", file=str(path), position=position)
    return BatchIndex.from_text(found.group(0), str(path))


@dataclass(frozen=True, slots=True)
class Written:
    """The sealed form of a segment. `uncompressed_bytes`: of its rows; None where they are not compressed."""

    path: Path
    uncompressed_bytes: int | None = None


def write_sealed(segment: ActiveSegment, stream_id: str, compression: str, pause: Callable[[], None]) -> Written:
    """Writes the sealed form of a full active segment, durably; the caller renames it to `….arrow`.

    Args:
        pause: called after every few MiB of work; may sleep.

    Returns:
        A new file beside the segment, or the segment's own where a footer was all that was missing.

    Raises:
        CorruptLog: a batch is no longer what was written; the active file stays as it is.
        OSError: as the system says; the active file still holds everything.
    """
    mean_bytes = segment.size_bytes / max(1, len(segment.index))
    if compression == "none" and mean_bytes >= _LARGE_COMMIT_BYTES:
        _append_footer(segment)
        return Written(segment.path)
    return write_beside(segment, segment.end_offset, _merged(segment), stream_id, compression, pause)


def write_beside(
    segment: ActiveSegment | SealedSegment,
    end_offset: int,
    batches: Iterable[Merged],
    stream_id: str,
    compression: str,
    pause: Callable[[], None],
) -> Written:
    """Writes a sealed file of these batches, of all offsets from the segment's first one to `end_offset`; durable and
    read back when this returns.

    Raises:
        CorruptLog, OSError: as `write_sealed`; no file remains.
    """
    beside = segment.path.with_suffix(".tmp")
    try:
        uncompressed_bytes = _write_batches(segment.base_offset, batches, beside, stream_id, compression, pause)
        _prove_all(beside, segment.base_offset, end_offset, pause)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return Written(beside, None if compression == "none" else uncompressed_bytes)


def _prove_all(path: Path, base_offset: int, end_offset: int, pause: Callable[[], None]) -> None:
    """Former files are removed only when every batch of the new one has been read back."""
    written = SealedSegment(path, base_offset, path.stat().st_size)
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(len(index := written.index)):
            written.prove(fd, index, at, at + 1)
            pause()
    finally:
        os.close(fd)
    assert written.end_offset == end_offset, "the new file is for the same offsets"


def _append_footer(segment: ActiveSegment) -> None:
    fd = os.open(segment.path, os.O_RDWR | os.O_APPEND)
    try:
        header_bytes = {}
        for at in range(len(segment.index)):  # headers only: nothing is thrown away, and bodies are proven when served
            entry = segment.index[at]
            header = ipc.proven_header(read_at(fd, entry.position, min(entry.length, ipc.MAX_HEADER_BYTES)))
            if header is None or header.base_offset != entry.base_offset or header.total_bytes != entry.length:
                raise damage(segment.path, entry, "has a damaged header")
            header_bytes[entry.position] = header.header_bytes
        os.ftruncate(fd, segment.size_bytes)  # a part of a footer from an earlier try
        tail = sealing_bytes(segment.index, header_bytes)
        write_all(fd, [memoryview(tail)])
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_batches(
    base_offset: int,
    batches: Iterable[Merged],
    beside: Path,
    stream_id: str,
    compression: str,
    pause: Callable[[], None],
) -> int:
    """Batches into a new file, synced in small steps so that no commit waits behind one large flush. Returns the size
    of their rows before compression.
    """
    index, header_bytes_of, uncompressed_bytes = BatchIndex(), {}, 0
    fd = os.open(beside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o644)
    try:
        header = file_header(stream_id, base_offset)
        write_all(fd, [memoryview(header)])
        position, synced = len(header), 0
        for merged in batches:
            message, entry = _encode_sealed(merged, position, compression)
            write_all(fd, [message])
            index.append(entry)
            uncompressed_bytes += merged.rows.nbytes
            header_bytes_of[position] = 8 + int.from_bytes(message[4:8], "little")
            position += len(message)
            if position - synced >= _SYNC_EVERY_BYTES:
                os.fdatasync(fd)
                synced = position
            pause()
        tail = sealing_bytes(index, header_bytes_of)
        write_all(fd, [memoryview(tail)])
        os.fsync(fd)
    finally:
        os.close(fd)
    return uncompressed_bytes


def sealing_bytes(index: BatchIndex, header_bytes_of: Mapping[int, int]) -> bytes:
    """End-of-stream and footer, wholly determined by the index and the lengths of the batches' headers."""
    return ipc.END_OF_STREAM + footer_bytes(index, header_bytes_of, _footer_metadata(index))


def _footer_metadata(index: BatchIndex) -> dict[str, str]:
    offsets = f"{index.base_offsets[0]}-{index.end_offsets[-1]}" if len(index) else "none"
    return {"natslog.offsets": offsets, "natslog.index": index.to_text().decode()}


def _merged(segment: ActiveSegment) -> Iterator[Merged]:
    """Neighbouring commits of one epoch as one batch, in bounded memory."""
    fd = os.open(segment.path, os.O_RDONLY)
    try:
        yield from merge(_batches(segment, fd))
    finally:
        os.close(fd)


def _batches(segment: ActiveSegment, fd: int) -> Iterator[Stored]:
    """All of them, proven; small ones together."""
    small_runs, at = SmallRuns(fd, segment.size_bytes), 0
    while at < len(segment.index):
        entry = segment.index[at]
        run = small_runs.at(entry.position)
        if run is not None and segment.index.has(at, run.batches):
            yield run.stated, run.rows(), run.packed_ids()
            at += len(run.batches)
            continue
        header, rows, packed_ids = stored(message := read_batch(fd, entry, segment.path))
        small_runs.note(header, message)
        yield header, rows, packed_ids
        at += 1


def _encode_sealed(merged: Merged, position: int, compression: str) -> tuple[memoryview, BatchEntry]:
    batch, base_offset, end_offset = merged.rows, merged.base_offset, merged.end_offset
    times = batch.column("timestamp").cast(pa.int64())
    subjects = pc.min_max(batch.column("subject")).as_py()
    stats = {
        "offset": [base_offset, end_offset],
        "timestamp_us": [times[0].as_py() if len(times) else merged.max_timestamp_us, merged.max_timestamp_us],
        "subject": [(subjects["min"] or "")[:_STATS_CHARS], (subjects["max"] or "")[:_STATS_CHARS]],
    }
    message = merged.encoded(
        compression=None if compression == "none" else compression, stats=msgspec.json.encode(stats)
    )
    entry = BatchEntry(base_offset, end_offset, batch.num_rows, position, len(message), merged.max_timestamp_us)
    return message, entry
