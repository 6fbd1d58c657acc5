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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow import ipc
from natslog.arrow.run_marks import RunMark
from natslog.errors import CorruptLog
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.checked_file import write_all
from natslog.log.footer import FILE_MAGIC, footer_bytes
from natslog.log.segment import ActiveSegment, damage, file_header, read_at, read_batch

MERGED_ROWS = 64 * 1024
MERGED_BYTES = 8 * 1024 * 1024
_LARGE_COMMIT_BYTES = 256 * 1024
_STATS_CHARS = 256
_SYNC_EVERY_BYTES = 4 * 1024 * 1024
_INDEX_TEXT = re.compile(rb"v[12] batches=\d+ crc32c=[0-9a-f]{8} [A-Za-z0-9+/=]*")


class SealedSegment:
    """A file on disk; its index is read when first needed and may be dropped again (`forget`)."""

    __slots__ = ("_index", "_proven", "base_offset", "path", "size_bytes")

    def __init__(self, path: Path, base_offset: int, size_bytes: int) -> None:
        self.path = path
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
            if len(self._proven) != len(index):
                self._proven = bytearray(len(index))
        return index

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


def write_sealed(segment: ActiveSegment, stream_id: str, compression: str, pause: Callable[[], None]) -> Path:
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
        return segment.path
    beside = segment.path.with_suffix(".tmp")
    try:
        _rewrite(segment, beside, stream_id, compression, pause)
        _prove_all(beside, segment, pause)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return beside


def _prove_all(path: Path, segment: ActiveSegment, pause: Callable[[], None]) -> None:
    """The active file is removed only when every batch of the sealed one has been read back."""
    written = SealedSegment(path, segment.base_offset, path.stat().st_size)
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(len(index := written.index)):
            written.prove(fd, index, at, at + 1)
            pause()
    finally:
        os.close(fd)
    assert written.end_offset == segment.end_offset, "sealing keeps every row"


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


def _rewrite(segment: ActiveSegment, beside: Path, stream_id: str, compression: str, pause: Callable[[], None]) -> None:
    """Merged batches into a new file, synced in small steps so that no commit waits behind one large flush."""
    index, header_bytes_of = BatchIndex(), {}
    fd = os.open(beside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o644)
    try:
        header = file_header(stream_id, segment.base_offset)
        write_all(fd, [memoryview(header)])
        position, synced = len(header), 0
        for merged in _merged(segment):
            message, entry = _encode_sealed(merged, position, compression)
            write_all(fd, [message])
            index.append(entry)
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


def sealing_bytes(index: BatchIndex, header_bytes_of: Mapping[int, int]) -> bytes:
    """End-of-stream and footer, wholly determined by the index and the lengths of the batches' headers."""
    return ipc.END_OF_STREAM + footer_bytes(index, header_bytes_of, _footer_metadata(index))


def _footer_metadata(index: BatchIndex) -> dict[str, str]:
    offsets = f"{index.base_offsets[0]}-{index.end_offsets[-1]}" if len(index) else "none"
    return {"natslog.offsets": offsets, "natslog.index": index.to_text().decode()}


@dataclass(frozen=True, slots=True)
class _Merged:
    """Rows that become one batch, of the offsets `[base_offset, end_offset)`."""

    base_offset: int
    end_offset: int
    max_timestamp_us: int
    rows: pa.RecordBatch
    packed_ids: ipc.PackedIds | None
    epoch: int
    run: RunMark | None
    batch_format: int


class _Waiting:
    """Neighbouring commits of one epoch that will be one batch."""

    def __init__(self) -> None:
        self._batches: list[tuple[ipc.BatchHeader, pa.RecordBatch, ipc.PackedIds | None]] = []
        self._rows = self._size_bytes = 0

    def has_room_for(self, header: ipc.BatchHeader) -> bool:
        if not self._batches:
            return True
        fits = self._rows + header.rows <= MERGED_ROWS and self._size_bytes + header.total_bytes <= MERGED_BYTES
        return fits and header.epoch == self._batches[0][0].epoch

    def add(self, header: ipc.BatchHeader, message: bytes) -> None:
        self._batches.append((header, ipc.decode_batch(message), ipc.packed_ids_of(header, message)))
        self._rows += header.rows
        self._size_bytes += header.total_bytes

    def taken(self) -> Iterator[_Merged]:
        """What waits, if anything; nothing waits then."""
        if self._batches:
            headers, batches, ids = zip(*self._batches, strict=True)
            newest = max(header.batch_format for header in headers)
            self._batches, self._rows, self._size_bytes = [], 0, 0
            first, last = headers[0], headers[-1]
            yield _Merged(
                first.base_offset,
                last.end_offset,
                last.max_timestamp_us,
                concat(list(batches)),
                _joined(headers, ids),
                first.epoch,
                first.run,
                newest,
            )


def _joined(headers: Sequence[ipc.BatchHeader], ids: Sequence[ipc.PackedIds | None]) -> ipc.PackedIds | None:
    if all(one is None for one in ids):
        return None
    none = np.zeros((max(header.rows for header in headers), ipc.ID_BYTES), np.uint8)
    return np.concatenate(
        [none[: header.rows] if one is None else one for header, one in zip(headers, ids, strict=True)]
    )


def _merged(segment: ActiveSegment) -> Iterator[_Merged]:
    """Neighbouring commits of one epoch as one batch, in bounded memory; a batch of a run stays one by itself."""
    fd = os.open(segment.path, os.O_RDONLY)
    try:
        waiting = _Waiting()
        for at in range(len(segment.index)):
            message = read_batch(fd, segment.index[at], segment.path)
            header = ipc.proven_header(message)
            assert header is not None, "read_batch returns proven messages"
            if header.run is not None or not waiting.has_room_for(header):
                yield from waiting.taken()
            waiting.add(header, message)
            if header.run is not None:
                yield from waiting.taken()
        yield from waiting.taken()
    finally:
        os.close(fd)


def concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all rows (the batch itself where there is one)."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _encode_sealed(merged: _Merged, position: int, compression: str) -> tuple[memoryview, BatchEntry]:
    batch, base_offset, end_offset = merged.rows, merged.base_offset, merged.end_offset
    times = batch.column("timestamp").cast(pa.int64())
    subjects = pc.min_max(batch.column("subject")).as_py()
    stats = {
        "offset": [base_offset, end_offset],
        "timestamp_us": [times[0].as_py() if len(times) else merged.max_timestamp_us, merged.max_timestamp_us],
        "subject": [(subjects["min"] or "")[:_STATS_CHARS], (subjects["max"] or "")[:_STATS_CHARS]],
    }
    message = ipc.encode_batch(
        batch,
        base_offset=base_offset,
        end_offset=end_offset,
        epoch=merged.epoch,
        max_timestamp_us=merged.max_timestamp_us,
        compression=None if compression == "none" else compression,
        stats=msgspec.json.encode(stats),
        run=merged.run,
        packed_ids=merged.packed_ids,
        batch_format=merged.batch_format,
    )
    entry = BatchEntry(base_offset, end_offset, batch.num_rows, position, len(message), merged.max_timestamp_us)
    return message, entry
