"""The size of messages as JetStream counts it: subject, headers and payload, and a fixed number of bytes a message.

Theory of operation. The metadata of a stored batch states the length of each column's data, so the size of all its
messages follows from its header. Per segment the sizes of its batches are summed up once, and extended with what is
appended, so that a total costs two lookups a segment. Only a batch of which some messages are hidden, or past the log
start, is read; the size of its hidden messages is kept until more of it are hidden.

Source: nats-server, `fileStoreMsgSize` in `server/filestore.go`, `memStoreMsgSize` in `server/memstore.go`.
"""

from __future__ import annotations

import os
import struct
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow import ipc
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.row_buffers import offsets_of
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.chain import Segment, SegmentChain
from natslog.log.extent import overlapping
from natslog.log.removed import RemovedOffsets
from natslog.log.segment import damage, read_at, read_batch
from natslog.log.small_runs import SmallRuns
from natslog.model import StreamSettings
from natslog.wire.stored_layout import ROWS

_BLOCK_BYTES = len("NATS/1.0\r\n") + len("\r\n")
_LINE_BYTES = len(": ") + len("\r\n")
_LISTS, _PAIRS = 4, 6
"""Of the nodes of a batch: the lists of headers, and the names in them."""
_DATA = (6, 15, 18, 21)
"""Of the buffers of a batch: the bytes of subjects, of names and of values of headers, and of payloads."""


class SizeRule(NamedTuple):
    """What a message takes besides its texts, and what one with headers takes in addition."""

    row_bytes: int
    headers_bytes: int


_FILE = SizeRule(22 + 8, 4 + _BLOCK_BYTES)
_MEMORY = SizeRule(16, _BLOCK_BYTES)


def size_rule(settings: StreamSettings) -> SizeRule:
    """By the storage that the JetStream API states."""
    in_memory = settings.jetstream is not None and settings.jetstream.storage == "memory"
    return _MEMORY if in_memory else _FILE


def sizes_of(rows: pa.RecordBatch, rule: SizeRule) -> npt.NDArray[np.int64]:
    """Of each message. `rows`: with subject, headers and value."""
    sizes = np.full(rows.num_rows, rule.row_bytes, np.int64)
    for name in ("subject", "value"):
        sizes += np.diff(offsets_of(rows.column(name)))
    headers = rows.column("headers")
    return sizes if headers.null_count == rows.num_rows else sizes + _header_sizes(headers, rule)


def _header_sizes(headers: pa.Array[Any], rule: SizeRule) -> npt.NDArray[np.int64]:
    has_any = np.asarray(headers.is_valid(), np.bool_)
    counts = pc.fill_null(pc.list_value_length(headers), 0).to_numpy(zero_copy_only=False)
    pairs = headers.flatten()
    lines = _LINE_BYTES + sum(
        np.asarray(pc.fill_null(pc.binary_length(pairs.field(at)), 0), np.int64) for at in range(2)
    )
    before, ends = np.concatenate(([0], np.cumsum(lines))), np.cumsum(counts)
    return np.asarray(np.where(has_any, rule.headers_bytes, 0) + before[ends] - before[ends - counts], np.int64)


class _Sizes:
    """Of one segment.

    Attributes:
        sums: of all rows of the first n batches. hidden_bytes: of each batch, of `hidden_rows` that are hidden.
        total: of the visible messages in the range that was asked for last, with as many hidden ones: see
            `_of_segment`.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.sums = array("q", [0])
        self.hidden_rows = np.zeros(0, np.int64)
        self.hidden_bytes = np.zeros(0, np.int64)
        self.total: tuple[tuple[int, int, int], int] = ((0, 0, 0), 0)

    def enlarge(self, batches: int) -> None:
        if len(self.hidden_rows) < batches:
            more = np.zeros(max(batches - len(self.hidden_rows), len(self.hidden_rows)), np.int64)
            self.hidden_rows = np.concatenate((self.hidden_rows, more))
            self.hidden_bytes = np.concatenate((self.hidden_bytes, more))

    def visible(self, at: int) -> int:
        """Of the visible rows of a batch, as far as hidden ones were looked for."""
        hidden = int(self.hidden_bytes[at]) if at < len(self.hidden_bytes) else 0
        return self.sums[at + 1] - self.sums[at] - hidden


class MessageBytes:
    """Of one log. Thread-safe; methods raise CorruptLog where a part of the log is damaged."""

    def __init__(self, chain: SegmentChain, removed: RemovedOffsets, rule: Callable[[], SizeRule]) -> None:
        self._chain, self._removed, self._rule_now = chain, removed, rule
        self._lock = threading.Lock()
        self._rule = _FILE
        self._sizes: dict[Path, _Sizes] = {}
        self._part: tuple[tuple[Path, int, int, int, int], int] | None = None

    def forget(self) -> None:
        """Batches were cut off, or replaced: others may take their places."""
        with self._lock:
            self._forget()

    def total(self, start: int, end: int) -> int:
        """Of the visible messages in `[start, end)`."""
        with self._lock:
            return self._chain.on_snapshot(lambda segments: self._total(segments, start, end))

    def start_within(self, start: int, end: int, max_bytes: int) -> int:
        """The least start at or after `start` with which the messages up to `end` take at most `max_bytes`."""

        def search(segments: list[Segment]) -> int:
            excess = self._total(segments, start, end) - max_bytes
            if excess <= 0:
                return start
            for segment, base, segment_end in overlapping(segments, start, end):
                low, high = max(start, base), min(end, segment_end)
                size = self._of_segment(segment, low, high)
                if size >= excess:
                    return self._offset_behind(segment, low, high, excess)
                excess -= size
            return end

        with self._lock:
            return self._chain.on_snapshot(search)

    def _forget(self) -> None:
        self._part = None
        self._sizes.clear()

    def _total(self, segments: list[Segment], start: int, end: int) -> int:
        rule = self._rule_now()
        if rule != self._rule or len(self._sizes) > 2 * len(segments) + 8:
            self._forget()
            self._rule = rule
        return sum(
            self._of_segment(segment, max(start, base), min(end, segment_end))
            for segment, base, segment_end in overlapping(segments, start, end)
        )

    def _of_segment(self, segment: Segment, low: int, high: int) -> int:
        first, last = self._batches(segment, low, high)
        if last < first:
            return 0
        index, sizes = segment.index, self._sizes[segment.path]
        hidden = self._removed.count(index.base_offsets[first], index.end_offsets[last])
        asked = (low, high, hidden)  # what is hidden stays hidden
        if sizes.total[0] == asked:
            return sizes.total[1]
        found = sizes.sums[last + 1] - sizes.sums[first]
        if hidden:
            found -= int(self._hidden_sizes(segment, first, last).sum())
        for at in {first, last}:
            if low > index.base_offsets[at] or high < index.end_offsets[at]:
                found += self._visible_part(segment, at, low, high) - sizes.visible(at)
        sizes.total = asked, found
        return found

    def _offset_behind(self, segment: Segment, low: int, high: int, size_bytes: int) -> int:
        """Behind the first messages from `low` on that take so many bytes, or a little more."""
        first, last = self._batches(segment, low, high)
        index, sums = segment.index, self._sizes[segment.path].sums
        sizes = np.diff(np.array(sums[first : last + 2], np.int64)) - self._hidden_sizes(segment, first, last)
        for at in {first, last}:
            if low > index.base_offsets[at] or high < index.end_offsets[at]:
                sizes[at - first] = self._visible_part(segment, at, low, high)
        ends = np.cumsum(sizes)
        at = int(np.searchsorted(ends, size_bytes))
        offsets, rows = self._visible_rows(segment, index[first + at], low, high)
        missing = size_bytes - (int(ends[at - 1]) if at else 0)
        return int(offsets[np.searchsorted(np.cumsum(rows), missing)]) + 1

    def _batches(self, segment: Segment, low: int, high: int) -> tuple[int, int]:
        """The first and the last batch that has a part of the range; their sizes are known then. Another file may have
        taken the place of the segment.
        """
        index, sizes = segment.index, self._sizes.get(segment.path)
        count = len(index)
        if sizes is None or sizes.segment is not segment or len(sizes.sums) > count + 1:
            sizes = self._sizes[segment.path] = _Sizes(segment)
        if len(sizes.sums) <= count:
            fd = self._chain.open(segment)
            try:
                _add_sizes(sizes.sums, fd, index, count, segment.path, self._rule)
            finally:
                os.close(fd)
        return index.first_covering(low), bisect_left(index.base_offsets, high, 0, count) - 1

    def _hidden_sizes(self, segment: Segment, first: int, last: int) -> npt.NDArray[np.int64]:
        """Of each of these batches: the size of its hidden messages. Only batches of which more are hidden than before
        are read.
        """
        index, sizes = segment.index, self._sizes[segment.path]
        sizes.enlarge(last + 1)
        ends = np.array(index.end_offsets[first : last + 1], np.int64)
        hidden = self._removed.offsets_within(index.base_offsets[first], int(ends[-1]))
        counts = np.bincount(np.searchsorted(ends, hidden, "right"), minlength=last + 1 - first)
        for at in (np.flatnonzero(counts != sizes.hidden_rows[first : last + 1]) + first).tolist():
            entry = index[at]
            _, visible = self._visible_rows(segment, entry, entry.base_offset, entry.end_offset)
            sizes.hidden_bytes[at] = sizes.sums[at + 1] - sizes.sums[at] - int(visible.sum())
            sizes.hidden_rows[at] = counts[at - first]
        return sizes.hidden_bytes[first : last + 1]

    def _visible_part(self, segment: Segment, at: int, low: int, high: int) -> int:
        entry = segment.index[at]
        key = (segment.path, entry.base_offset, max(low, entry.base_offset), min(high, entry.end_offset))
        hidden = self._removed.count(entry.base_offset, entry.end_offset)
        if self._part is None or self._part[0] != (*key, hidden):
            _, sizes = self._visible_rows(segment, entry, low, high)
            self._part = (*key, hidden), int(sizes.sum())
        return self._part[1]

    def _visible_rows(
        self, segment: Segment, entry: BatchEntry, low: int, high: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Offsets and sizes of the visible messages of a batch within a range."""
        fd = self._chain.open(segment)
        try:
            batch = ipc.decode_batch(read_batch(fd, entry, segment.path))
        finally:
            os.close(fd)
        offsets = batch.column("offset").to_numpy()
        marks = (offsets >= low) & (offsets < high) & ~self._removed.marks(offsets)
        return offsets[marks], sizes_of(batch, self._rule)[marks]


def _add_sizes(sums: array[int], fd: int, index: BatchIndex, count: int, path: Path, rule: SizeRule) -> None:
    """Of further batches, up to `count`; of many small ones together. Raises CorruptLog."""
    small_runs = SmallRuns(fd, index.positions[count - 1] + index.lengths[count - 1])
    while (at := len(sums) - 1) < count:
        entry = index[at]
        if (run := small_runs.at(entry.position)) is not None:
            ends = np.cumsum(run.batches[:, ROWS])
            sums.frombytes((sums[-1] + np.cumsum(sizes_of(run.rows(), rule))[ends - 1]).tobytes())
            continue
        sums.append(sums[-1] + _size_of_batch(fd, entry, path, rule))
        if at + 1 < count:
            window = read_at(fd, entry.position, min(entry.length, ipc.MAX_HEADER_BYTES))
            if (header := ipc.proven_header(window)) is not None:
                small_runs.note(header, window)


def _size_of_batch(fd: int, entry: BatchEntry, path: Path, rule: SizeRule) -> int:
    """Of all its messages, by its metadata. Raises CorruptLog."""
    try:
        metadata_bytes = int.from_bytes(read_at(fd, entry.position + 4, 4), "little")
        if not 0 < metadata_bytes < entry.length:
            raise ValueError(f"it states {metadata_bytes} bytes")
        metadata = BatchMetadata(read_at(fd, entry.position + 8, metadata_bytes))
        nodes, buffers = metadata.nodes, metadata.buffers
        body, is_packed = entry.position + 8 + metadata_bytes, metadata.codec is not None
        data = sum(_unpacked(fd, body, *buffers[at], is_packed=is_packed) for at in _DATA)
        headed = nodes[_LISTS][0] - nodes[_LISTS][1]
        return rule.row_bytes * metadata.rows + data + rule.headers_bytes * headed + _LINE_BYTES * nodes[_PAIRS][0]
    except (struct.error, ValueError, TypeError, IndexError) as error:
        raise damage(path, entry, f"has no valid header ({error})") from error


def _unpacked(fd: int, body: int, position: int, length: int, *, is_packed: bool) -> int:
    """The length of a buffer without compression: a compressed one begins with it, or with -1 if it is as it was."""
    if not is_packed or length < 8:
        return length
    (stated,) = struct.unpack("<q", read_at(fd, body + position, 8))
    return length - 8 if stated < 0 else int(stated)
