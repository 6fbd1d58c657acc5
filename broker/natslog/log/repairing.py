"""Damaged parts of a sealed segment are replaced by batches of another replica: the file is written anew.

Theory of operation. `missing_ranges` names the offsets that have to be fetched: those of damaged batches. Where the
index is damaged, all batches are read, and those that hold are kept. What was fetched is kept in an unnamed file
(`FetchedBatches`). `rewritten` then writes the segment's own intact batches and the fetched ones, in offset order, with
a new header and footer, beside the segment, syncs the file and reads all of it back. The caller renames it: a crash at
any moment leaves the damaged file or the repaired one.

What no replica has any more may be accepted as lost: a batch without rows then covers these offsets (`add_removed`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from natslog.arrow import ipc
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.errors import CorruptAnswer, CorruptLog
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.checked_file import write_all
from natslog.log.recovery import scan_segment
from natslog.log.scrub import OffsetRange
from natslog.log.sealed import SealedSegment, read_footer_index, sealing_bytes
from natslog.log.segment import damage, file_header, header_bytes_of, read_batch
from natslog.units import offsets_between

_SYNC_EVERY_BYTES = 4 * 1024 * 1024


class FetchedBatches:
    """Batches of another replica. A context manager. Args: `folder`: of the log."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.entries: list[BatchEntry] = []
        self.size_bytes = 0
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed at its exit)

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def add(self, message: bytes, start: int, end: int) -> int:
        """A batch that begins at `start` and ends at or below `end`. Returns its end offset.

        Raises:
            CorruptAnswer: it is damaged, or is for other offsets. OSError: it cannot be stored.
        """
        header = ipc.proven_header(message)
        is_whole = header is not None and header.total_bytes == len(message) and ipc.body_holds(header, message)
        if header is None or not is_whole or header.base_offset != start or not start < header.end_offset <= end:
            raise CorruptAnswer(f"the batch at offset {start} that another replica sent is damaged, or another one")
        write_all(self.fd, [message])
        self.entries.append(
            BatchEntry(start, header.end_offset, header.rows, self.size_bytes, len(message), header.max_timestamp_us)
        )
        self.size_bytes += len(message)
        return header.end_offset

    def add_removed(self, start: int, end: int, *, epoch: int, max_timestamp_us: int) -> int:
        """A batch without rows for `[start, end)`: readers find removed offsets there. Returns `end`."""
        empty = pa.RecordBatch.from_pylist([], schema=MESSAGE_SCHEMA)
        message = ipc.encode_batch(
            empty, base_offset=start, end_offset=end, epoch=epoch, max_timestamp_us=max_timestamp_us
        )
        return self.add(bytes(message), start, end)

    def __enter__(self) -> FetchedBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def missing_ranges(
    segment: SealedSegment, end_offset: int, stream_id: str, damaged: Sequence[OffsetRange]
) -> list[OffsetRange]:
    """The offsets to be fetched: of all batches in which an offset of `damaged` lies. None if only the header or the
    footer is damaged.

    Args:
        end_offset: where the next segment begins.
    """
    index, is_proven = _own_index(segment, stream_id)
    if is_proven:
        damaged = ()
    found: list[OffsetRange] = []
    expected = segment.base_offset
    for base, end in [*zip(index.base_offsets, index.end_offsets, strict=True), (end_offset, end_offset)]:
        if base > expected:
            found.append((expected, base))
        if any(start < end and base < stop for start, stop in damaged):
            found.append((base, end))
        expected = end
    return found


def _own_index(segment: SealedSegment, stream_id: str) -> tuple[BatchIndex, bool]:
    """The batches of a segment, and whether each of them was read: where the index is damaged, those that hold."""
    try:
        return read_footer_index(segment.path), False
    except CorruptLog:
        position = len(file_header(stream_id, segment.base_offset))
        return scan_segment(segment.path, position=position, base_offset=segment.base_offset).index, True
    except FileNotFoundError:
        return BatchIndex(), True


def rewritten(segment: SealedSegment, end_offset: int, stream_id: str, fetched: FetchedBatches) -> Path:
    """Writes the repaired segment beside the damaged one; durable, and read back, when this returns.

    Raises:
        CorruptLog: a batch of the segment that was not fetched is damaged, or offsets are missing.
        OSError: as the system says; no file is left behind.
    """
    beside = segment.path.with_suffix(".tmp")
    try:
        _write(segment, end_offset, stream_id, fetched, beside)
        _prove(beside, segment.base_offset, end_offset)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return beside


def _write(segment: SealedSegment, end_offset: int, stream_id: str, fetched: FetchedBatches, beside: Path) -> None:
    index, header_bytes, expected = BatchIndex(), {}, segment.base_offset
    fd = os.open(beside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o644)
    try:
        header = file_header(stream_id, segment.base_offset)
        write_all(fd, [header])
        position, synced = len(header), 0
        for entry, message in _batches(segment, stream_id, fetched):
            if entry.base_offset != expected:
                raise damage(segment.path, entry, f"begins at another offset than {expected}")
            write_all(fd, [message])
            index.append(
                BatchEntry(expected, entry.end_offset, entry.rows, position, len(message), entry.max_timestamp_us)
            )
            header_bytes[position] = header_bytes_of(message)
            expected, position = entry.end_offset, position + len(message)
            if position - synced >= _SYNC_EVERY_BYTES:  # no commit waits behind one large flush
                os.fdatasync(fd)
                synced = position
        if expected != end_offset:
            missing = offsets_between(expected, end_offset)
            raise CorruptLog(f"{segment.path}: {missing} are missing", file=str(segment.path))
        write_all(fd, [sealing_bytes(index, header_bytes)])
        os.fsync(fd)
    finally:
        os.close(fd)


def _batches(segment: SealedSegment, stream_id: str, fetched: FetchedBatches) -> Iterator[tuple[BatchEntry, bytes]]:
    """In offset order: own batches, and the fetched ones in place of those that they cover."""
    index, _ = _own_index(segment, stream_id)
    own = os.open(segment.path, os.O_RDONLY) if len(index) else os.open(segment.path.parent, os.O_RDONLY)
    try:
        covered = [(one.base_offset, one.end_offset) for one in fetched.entries]
        kept = [
            (entry, own)
            for entry in (index[at] for at in range(len(index)))
            if not any(start < entry.end_offset and entry.base_offset < end for start, end in covered)
        ]
        both = [*kept, *((entry, fetched.fd) for entry in fetched.entries)]
        for entry, fd in sorted(both, key=lambda one: one[0].base_offset):
            yield entry, read_batch(fd, entry, segment.path)
    finally:
        os.close(own)


def _prove(path: Path, base_offset: int, end_offset: int) -> None:
    """Reads all of it back."""
    written = SealedSegment(path, base_offset, path.stat().st_size)
    fd = os.open(path, os.O_RDONLY)
    try:
        at, count = 0, len(written.index)
        while at < count:
            at = written.prove(fd, written.index, at, count)
        assert written.end_offset == end_offset, "a repair keeps every offset"
    finally:
        os.close(fd)
