"""The size of messages as JetStream counts it: subject, headers and payload, and a fixed number of bytes a message.

Theory of operation. The metadata of a stored batch states the length of each column's data, so the size of all its
messages follows from its header. Per segment the sizes of its batches are summed up once, and extended with what is
appended, so that a total costs two lookups a segment. Only a batch of which some messages are hidden, or past the log
start, is read; what was computed for a segment with hidden messages is kept until more of it is hidden.

Source: nats-server, `fileStoreMsgSize` in `server/filestore.go`, `memStoreMsgSize` in `server/memstore.go`.
"""

from __future__ import annotations

import os
import struct
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow import ipc
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.row_buffers import offsets_of
from natslog.log.batch_index import BatchEntry
from natslog.log.chain import Segment, SegmentChain
from natslog.log.extent import overlapping
from natslog.log.removed import RemovedOffsets
from natslog.log.segment import damage, read_at, read_batch
from natslog.model import StreamSettings

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
    lines = _LINE_BYTES + sum(np.asarray(pc.binary_length(pairs.field(at)), np.int64) for at in range(2))
    before, ends = np.concatenate(([0], np.cumsum(lines))), np.cumsum(counts)
    return np.asarray(np.where(has_any, rule.headers_bytes, 0) + before[ends] - before[ends - counts], np.int64)


class MessageBytes:
    """Of one log. For one thread at a time; methods raise CorruptLog where a part of the log is damaged."""

    def __init__(self, chain: SegmentChain, removed: RemovedOffsets) -> None:
        self._chain, self._removed = chain, removed
        self._rule = _FILE
        self._sums: dict[Path, array[int]] = {}  # of all rows of the first n batches
        self._hiding: dict[Path, tuple[tuple[int, int, int], int]] = {}
        self._part: tuple[tuple[Path, int, int, int, int], int] | None = None

    def total(self, start: int, end: int, rule: SizeRule) -> int:
        """Of the visible messages in `[start, end)`."""
        return self._chain.on_snapshot(lambda segments: self._total(segments, start, end, rule))

    def start_within(self, start: int, end: int, max_bytes: int, rule: SizeRule) -> int:
        """The least start at or after `start` with which the messages up to `end` take at most `max_bytes`."""

        def search(segments: list[Segment]) -> int:
            excess = self._total(segments, start, end, rule) - max_bytes
            if excess <= 0:
                return start
            for segment, base, segment_end in overlapping(segments, start, end):
                low, high = max(start, base), min(end, segment_end)
                size = self._of_segment(segment, low, high)
                if size >= excess:
                    return self._offset_behind(segment, low, high, excess)
                excess -= size
            return end

        return self._chain.on_snapshot(search)

    def _total(self, segments: list[Segment], start: int, end: int, rule: SizeRule) -> int:
        if rule != self._rule or len(self._sums) > 2 * len(segments) + 8:
            self._rule, self._part = rule, None
            self._sums.clear()
            self._hiding.clear()
        return sum(
            self._of_segment(segment, max(start, base), min(end, segment_end))
            for segment, base, segment_end in overlapping(segments, start, end)
        )

    def _of_segment(self, segment: Segment, low: int, high: int) -> int:
        hidden = self._removed.count(low, high)
        if not hidden:
            return self._of_batches(segment, low, high)
        key, known = (low, high, hidden), self._hiding.get(segment.path)
        if known is None or known[0] != key:
            index = segment.index
            ranges = zip(index.base_offsets, index.end_offsets, strict=False)
            parts = [(max(low, base), min(high, end)) for base, end in ranges if base < high and end > low]
            known = self._hiding[segment.path] = key, sum(self._of_batches(segment, *part) for part in parts)
        return known[1]

    def _of_batches(self, segment: Segment, low: int, high: int) -> int:
        """Of a range of one segment: all of it, or within one batch, where messages are hidden."""
        index, sums = segment.index, self._sums_of(segment)
        first, last = index.first_covering(low), bisect_left(index.base_offsets, high, 0, len(sums) - 1) - 1
        if last < first:
            return 0
        found = sums[last + 1] - sums[first]
        for at in {first, last}:
            base, end = index.base_offsets[at], index.end_offsets[at]
            if low > base or high < end or self._removed.count(base, end):
                found += self._visible_part(segment, at, low, high) - (sums[at + 1] - sums[at])
        return found

    def _sums_of(self, segment: Segment) -> array[int]:
        """With batches that were appended since. Another file may have taken the place of the segment."""
        index = segment.index
        count, sums = len(index), self._sums.setdefault(segment.path, array("q", [0]))
        if len(sums) > count + 1:
            sums = self._sums[segment.path] = array("q", [0])
        if len(sums) <= count:
            fd = self._chain.open(segment)
            try:
                for at in range(len(sums) - 1, count):
                    sums.append(sums[-1] + _size_of_batch(fd, index[at], segment.path, self._rule))
            finally:
                os.close(fd)
        return sums

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

    def _offset_behind(self, segment: Segment, low: int, high: int, size_bytes: int) -> int:
        """Behind the first messages from `low` on that take so many bytes, or a little more."""
        index = segment.index
        for at in range(index.first_covering(low), len(index)):
            base, end = max(low, index.base_offsets[at]), min(high, index.end_offsets[at])
            size = self._of_batches(segment, base, end)
            if size >= size_bytes:
                offsets, sizes = self._visible_rows(segment, index[at], base, end)
                return int(offsets[np.searchsorted(np.cumsum(sizes), size_bytes)]) + 1
            size_bytes -= size
        return high


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
