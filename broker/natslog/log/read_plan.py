"""Where the batches of one answer lie: ranges of open files, so that retention never affects the reader.

A plan consists of whole batches. The first one may begin before the offsets asked for, and the last one may end after
them; `take_uneven` replaces these two by batches that hold just the rows asked for.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from natslog.arrow import ipc
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.projection import project, proven_at, schema_of
from natslog.errors import CorruptLog
from natslog.log.batch_encoder import stores_headers
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.segment import damage, read_at, read_batch
from natslog.log.small_runs import SmallRuns
from natslog.wire.small_batches import SmallRun, StoredHeader, batches_of, rows_of

Found = TypeVar("Found")

_LARGE_BYTES = 256 * 1024
"""Of a batch of which it is worth while to read some columns only."""
_MOST_HEADER_BYTES = 256 * 1024
"""Of the new headers of one plan with some of the columns."""


@dataclass(slots=True)
class FileRange:
    """The neighbouring batches `[first, last)` of an open file, numbered as in its index."""

    fd: int
    path: Path
    index: BatchIndex
    first: int
    last: int

    @property
    def batches(self) -> int:
        return self.last - self.first

    @property
    def position(self) -> int:
        """In bytes, of the first batch."""
        return self.index.positions[self.first]

    @property
    def length(self) -> int:
        """In bytes, of all batches."""
        return self.index.positions[self.last - 1] + self.index.lengths[self.last - 1] - self.position

    @property
    def rows(self) -> int:
        return sum(self.index.rows[self.first : self.last])

    @property
    def start(self) -> int:
        """The first batch's base offset."""
        return self.index.base_offsets[self.first]

    @property
    def end(self) -> int:
        """Exclusive, of the last batch."""
        return self.index.end_offsets[self.last - 1]

    def damage_at(self, position: int) -> CorruptLog:
        """The error for the batch that holds this byte of the range."""
        at = max(self.first, bisect_right(self.index.positions, self.position + position, self.first, self.last) - 1)
        return damage(self.path, self.index[at], "is not what was written")


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A part of an open file: `length` bytes from `position` on."""

    fd: int
    path: Path
    position: int
    length: int


class ReadPlan:
    """Where the batches of one answer lie. Holds files open: use it in a `with`.

    Attributes:
        start, next_offset: the offsets that the plan is for; the outer batches may go beyond.
        rows_taken: rows within these offsets, of batches that are no longer in the plan. rows_behind: the same, of the
            last batch, which is lost where the plan is ended before it.
    """

    def __init__(self, start: int) -> None:
        self.ranges: list[FileRange] = []
        self.rows_taken = self.rows_behind = 0
        self.start = self.next_offset = start

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.ranges)

    @property
    def batches(self) -> int:
        return sum(piece.batches for piece in self.ranges)

    @property
    def removed_rows(self) -> int:
        """How many of its offsets have no message any more; 0 where its outer batches go beyond them."""
        return 0 if self._uneven() else self._offsets_without(self.rows_taken + self.rows_behind)

    def _offsets_without(self, rows: int) -> int:
        return self.next_offset - self.start - rows - sum(piece.rows for piece in self.ranges)

    @property
    def has_uneven_gaps(self) -> bool:
        """Whether messages were removed from an outer batch that goes beyond the plan: the place of a row in it does
        not follow from its offset.
        """
        return any(self.ranges[number].index[at].has_gaps for number, at in self._uneven())

    def limit_unpacked(self, max_bytes: int) -> None:
        """Ends the plan before the batch with which it takes more than this once it is decompressed, but not before
        its second batch. Only headers are read. An uncompressed batch counts with its stored length.

        Raises:
            CorruptLog: a header is not what was written.
        """
        size_bytes = 0
        for number, piece in enumerate(self.ranges):
            for at in range(piece.first, piece.last):
                size_bytes += _unpacked_bytes(piece, piece.index[at])
                if size_bytes > max_bytes and (number or at > piece.first):
                    self._end_before(number, at)
                    return

    def limit_stored(self, max_bytes: int) -> None:
        """Ends the plan before the batch with which it takes more than this as it is stored, but not before its second
        batch.
        """
        left_bytes = max_bytes
        for number, piece in enumerate(self.ranges):
            if piece.length > left_bytes:
                at = bisect_right(piece.index.positions, piece.position + left_bytes, piece.first, piece.last) - 1
                at = max(at, piece.first + (number == 0))
                if at < piece.last:
                    self._end_before(number, at)
                elif number + 1 < len(self.ranges):
                    self.end_before(number + 1)
                return
            left_bytes -= piece.length

    def end_before(self, number: int) -> None:
        """Ends the plan before this range, which is not the first one."""
        self._end_before(number, self.ranges[number].first)

    def _end_before(self, number: int, at: int) -> None:
        piece = self.ranges[number]
        self.next_offset = piece.index.base_offsets[at]
        self.rows_behind = 0
        piece.last = at
        kept = number + (piece.batches > 0)
        for left_out in self.ranges[kept:]:
            os.close(left_out.fd)
        del self.ranges[kept:]

    @property
    def uneven_bytes(self) -> int:
        """The stored length of the batches that `take_uneven` reads; 0 if there is nothing to cut."""
        return sum(self.ranges[number].index.lengths[at] for number, at in self._uneven())

    def _uneven(self) -> set[tuple[int, int]]:
        """The outer batches that go beyond the plan: number of the range, and number in its index."""
        uneven: set[tuple[int, int]] = set()
        if self.ranges and self.ranges[0].start < self.start:
            uneven.add((0, self.ranges[0].first))
        if self.ranges and self.ranges[-1].end > self.next_offset:
            uneven.add((len(self.ranges) - 1, self.ranges[-1].last - 1))
        return uneven

    def take_uneven(self) -> tuple[memoryview, memoryview]:
        """Takes a first batch that begins too early and a last one that ends too late out of the plan. Returns their
        rows within `[start, next_offset)`, each as an encoded batch, or nothing where there is nothing to cut.

        Raises:
            CorruptLog: one is not what was written.
        """
        before = after = memoryview(b"")
        if self.ranges and self.ranges[0].start < self.start:
            piece = self.ranges[0]
            before, self.rows_taken = self._rows_within(piece, piece.first)
            piece.first += 1
            self._drop_if_empty(piece)
        if self.ranges and self.ranges[-1].end > self.next_offset:
            piece = self.ranges[-1]
            after, self.rows_behind = self._rows_within(piece, piece.last - 1)
            piece.last -= 1
            self._drop_if_empty(piece)
        return before, after

    def _rows_within(self, piece: FileRange, at: int) -> tuple[memoryview, int]:
        """As a batch, and how many."""
        clipped = ipc.clip_batch(read_batch(piece.fd, piece.index[at], piece.path), self.start, self.next_offset)
        header = ipc.proven_header(clipped)
        assert header is not None, "it was just written"
        return clipped, header.rows

    def _drop_if_empty(self, piece: FileRange) -> None:
        if not piece.batches:
            self.ranges.remove(piece)
            os.close(piece.fd)

    def messages(self) -> list[bytes]:
        """The encoded batches. Raises as `proven_messages`."""
        return [message for _, message in self.proven_messages()]

    def proven_messages(self) -> list[tuple[ipc.BatchHeader, bytes]]:
        """The encoded batches, read and proven, each with its header.

        Raises:
            CorruptLog: one is not what was written.
        """
        return [(header, bytes(message)) for header, message in self.walked_messages()]

    def walked_messages(self) -> Iterator[tuple[ipc.BatchHeader, memoryview]]:
        """As `proven_messages`, a range of a file at a time; each is valid as long as a reference to it exists.

        Raises:
            CorruptLog: one is not what was written.
        """
        yield from self._read(ipc.split_messages)

    def rows(self) -> Iterator[tuple[StoredHeader, pa.RecordBatch]]:
        """All rows, of many small batches as one; each with what its batches state. Outer batches may go beyond the
        plan (`ipc.rows_within`).

        Raises:
            CorruptLog: a batch is not what was written.
        """
        yield from self._read(rows_of)

    def selected(self, columns: tuple[str, ...]) -> Iterator[tuple[StoredHeader, pa.RecordBatch]]:
        """As `rows`, with these columns only; of large batches nothing else is read.

        Raises:
            CorruptLog: what is read of a batch is not what was written.
        """
        for piece in self.ranges:
            if piece.length < _LARGE_BYTES * piece.batches:
                for stated, batch in self._read_range(piece, rows_of):
                    yield stated, batch.select(columns)
                continue
            for at in range(piece.first, piece.last):
                yield _selected(piece, piece.index[at], columns)

    def batches_and_rows(self) -> Iterator[tuple[StoredHeader, memoryview | pa.RecordBatch]]:
        """As `rows`; large batches are encoded."""
        yield from self._read(batches_of)

    def _read(self, split: Callable[..., Iterator[Found]]) -> Iterator[Found]:
        for piece in self.ranges:
            yield from self._read_range(piece, split)

    @staticmethod
    def _read_range(piece: FileRange, split: Callable[..., Iterator[Found]]) -> Iterator[Found]:
        """All of it at once."""
        try:
            yield from split(read_at(piece.fd, piece.position, piece.length), source=str(piece.path))
        except CorruptLog as error:
            raise piece.damage_at(error.facts.get("position", 0)) from error

    def projected(self, columns: tuple[str, ...]) -> list[bytes | FilePiece] | None:
        """Messages with these columns only: new headers, and pieces of the files. The plan ends with them: earlier than
        before, where there are too many headers.

        Returns:
            None where a batch is of format 1, which proves no single columns.

        Raises:
            CorruptLog: a header is not what was written.
        """
        pieces: list[bytes | FilePiece] = []
        made_bytes = 0
        for number, piece in enumerate(self.ranges):
            for at in range(piece.first, piece.last):
                entry = piece.index[at]
                header, window = _proven_window(piece, entry)
                if header.batch_format == ipc.FIRST_FORMAT:
                    return None
                if made_bytes > _MOST_HEADER_BYTES:
                    self._end_before(number, at)
                    return pieces
                made = project(header, window, columns)
                made_bytes += len(made.header)
                body = entry.position + header.header_bytes
                pieces.append(bytes(made.header))
                pieces += [FilePiece(piece.fd, piece.path, body + start, end - start) for start, end in made.body]
        return pieces

    def headed_rows(self) -> Iterator[tuple[StoredHeader, pa.RecordBatch, ipc.PackedIds | None]]:
        """The rows of batches that hold message headers or packed ids, and these ids, read and proven; of other large
        batches only their metadata is read.

        Raises:
            CorruptLog: one is not what was written.
        """
        for found in self._walked():
            if isinstance(found, SmallRun):
                if found.has_headers or found.has_ids:
                    yield found.stated, found.rows(), found.packed_ids()
                continue
            piece, position, window, header = found
            if header.ids_bytes or stores_headers(window):
                entry = BatchEntry(header.base_offset, header.end_offset, header.rows, position, header.total_bytes, 0)
                message = read_batch(piece.fd, entry, piece.path)
                yield header, ipc.decode_batch(message), ipc.packed_ids_of(header, message)

    def headers(self) -> Iterator[StoredHeader]:
        """The header of each batch, of many small ones together; bodies of large ones are not read.

        Raises:
            CorruptLog: one is not what was written.
        """
        for found in self._walked():
            yield found.stated if isinstance(found, SmallRun) else found[3]

    def _walked(self) -> Iterator[tuple[FileRange, int, bytes, ipc.BatchHeader] | SmallRun]:
        """Each batch's file, position, first bytes and proven header; many small ones together."""
        for piece in self.ranges:
            position, end = piece.position, piece.position + piece.length
            small_runs = SmallRuns(piece.fd, end)
            while position < end:
                if (run := small_runs.at(position)) is not None:
                    yield run
                    position += run.end
                    continue
                entry = BatchEntry(piece.start, piece.end, 0, position, end - position, 0)
                try:
                    window = read_at(piece.fd, position, min(ipc.MAX_HEADER_BYTES, end - position))
                except OSError as error:
                    raise damage(piece.path, entry, f"cannot be read: {error}") from error
                header = ipc.proven_header(window)
                if header is None:
                    raise damage(piece.path, entry, "has a damaged header")
                small_runs.note(header, window)
                yield piece, position, window, header
                position += header.total_bytes

    def __enter__(self) -> ReadPlan:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        for piece in self.ranges:
            os.close(piece.fd)
        self.ranges = []


def _proven_window(piece: FileRange, entry: BatchEntry) -> tuple[ipc.BatchHeader, bytes]:
    """The header of a batch, and bytes that begin with it."""
    window = read_at(piece.fd, entry.position, min(entry.length, ipc.MAX_HEADER_BYTES))
    header = ipc.proven_header(window)
    if header is None or header.base_offset != entry.base_offset or header.total_bytes != entry.length:
        raise damage(piece.path, entry, "has a damaged header")
    return header, window


def _selected(piece: FileRange, entry: BatchEntry, columns: tuple[str, ...]) -> tuple[ipc.BatchHeader, pa.RecordBatch]:
    """These columns of one batch, proven."""
    header, window = _proven_window(piece, entry)
    if header.batch_format == ipc.FIRST_FORMAT:  # which proves no single columns
        return header, ipc.decode_batch(read_batch(piece.fd, entry, piece.path)).select(columns)
    made, body = project(header, window, columns), entry.position + header.header_bytes
    parts = (read_at(piece.fd, body + start, end - start) for start, end in made.body)
    try:
        _, message = proven_at(memoryview(b"".join((made.header, *parts))), 0, columns, source=str(piece.path))
    except CorruptLog as error:
        raise damage(piece.path, entry, "has a wrong CRC32C") from error
    return header, pa.ipc.read_record_batch(pa.py_buffer(message), schema_of(columns))


def _unpacked_bytes(piece: FileRange, entry: BatchEntry) -> int:
    window = read_at(piece.fd, entry.position, min(entry.length, ipc.MAX_HEADER_BYTES))
    if not ipc.has_stats(window):
        return entry.length  # only sealing compresses, and it writes statistics
    if (header := ipc.proven_header(window)) is None:
        raise damage(piece.path, entry, "has a damaged header")
    body = entry.position + header.header_bytes
    unpacked = BatchMetadata(window[8:]).unpacked_bytes(lambda offset: read_at(piece.fd, body + offset, 8))
    return unpacked or entry.length
