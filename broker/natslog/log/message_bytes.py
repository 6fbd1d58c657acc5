"""The size of messages as JetStream counts it: subject, headers and payload, and a fixed number of bytes a message.

Theory of operation. The metadata of a stored batch states the length of each column's data, so the size of all its
messages follows from its header: 22 bytes for the record, 8 for its hash, the subject, the payload, and for a message
with headers 4 more and the headers as they are sent. Only a batch of which some messages are hidden, or past the log
start, is read. What was computed for a segment is kept until more of it is hidden, or it has more batches.

Source: nats-server, `fileStoreMsgSize` in `server/filestore.go`.
"""

from __future__ import annotations

import os
import struct
from array import array
from bisect import bisect_right
from pathlib import Path

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
from natslog.log.removed import Hidden, Offsets, RemovedOffsets
from natslog.log.segment import damage, read_at, read_batch

ROW_BYTES = 22 + 8
HEADERS_BYTES = 4 + len("NATS/1.0\r\n") + len("\r\n")
LINE_BYTES = len(": ") + len("\r\n")
_LISTS, _PAIRS = 4, 6
"""Of the nodes of a batch: the lists of headers, and the names in them."""
_DATA = (6, 15, 18, 21)
"""Of the buffers of a batch: the bytes of subjects, of names and of values of headers, and of payloads."""

_Key = tuple[int, int, int, int]


def sizes_of(rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Of each message."""
    sizes = np.full(rows.num_rows, ROW_BYTES, np.int64)
    for name in ("subject", "value"):
        sizes += np.diff(offsets_of(rows.column(name)))
    headers = rows.column("headers")
    if headers.null_count < rows.num_rows:
        sizes += _header_sizes(headers)
    return sizes


def _header_sizes(headers: pa.Array) -> npt.NDArray[np.int64]:
    has_any = np.asarray(headers.is_valid(), np.bool_)
    counts = pc.fill_null(pc.list_value_length(headers), 0).to_numpy(zero_copy_only=False)
    pairs = headers.flatten()
    lines = LINE_BYTES + sum(np.asarray(pc.binary_length(pairs.field(name)), np.int64) for name in ("key", "value"))
    ends = np.concatenate(([0], np.cumsum(lines)))
    starts = np.concatenate(([0], np.cumsum(counts)))
    return np.where(has_any, HEADERS_BYTES, 0) + np.diff(ends[starts])


class MessageBytes:
    """Of one log. For one thread at a time."""

    def __init__(self, chain: SegmentChain, removed: RemovedOffsets) -> None:
        self._chain, self._removed = chain, removed
        self._batches: dict[Path, array[int]] = {}  # of all rows that a segment has, by batch
        self._known: dict[Path, tuple[_Key, int]] = {}

    def total(self, start: int, end: int) -> int:
        """Of the visible messages in `[start, end)`. Raises CorruptLog: a part of the log is damaged."""
        return self._chain.on_snapshot(lambda segments: self._total(segments, start, end))

    def _total(self, segments: list[Segment], start: int, end: int) -> int:
        paths = {segment.path for segment in segments}
        for known in (self._batches, self._known):
            for path in [path for path in known if path not in paths]:
                del known[path]
        found = 0
        for segment, base, segment_end in overlapping(segments, start, end):
            low, high = max(start, base), min(end, segment_end)
            key = (low, high, self._removed.count(low, high), segment.size_bytes)
            known_size = self._known.get(segment.path)
            if known_size is None or known_size[0] != key:
                known_size = self._known[segment.path] = key, self._of_segment(segment, low, high)
            found += known_size[1]
        return found

    def _of_segment(self, segment: Segment, low: int, high: int) -> int:
        index, hidden = segment.index, self._removed
        fd = self._chain.open(segment)
        try:
            sizes, found = self._batches_of(segment, fd), 0
            for at in range(index.first_covering(low), bisect_right(index.base_offsets, high - 1, 0, len(sizes))):
                base, end = index.base_offsets[at], index.end_offsets[at]
                if low <= base and end <= high and not hidden.count(base, end):
                    found += sizes[at]
                else:
                    found += _visible_part(fd, index[at], segment.path, (low, high), hidden)
            return found
        finally:
            os.close(fd)

    def _batches_of(self, segment: Segment, fd: int) -> array[int]:
        """With those that were appended since. Another file may have taken the place of the segment."""
        index, sizes = segment.index, self._batches.setdefault(segment.path, array("q"))
        if len(sizes) > len(index):
            sizes = self._batches[segment.path] = array("q")
        for at in range(len(sizes), len(index)):
            sizes.append(_size_of_batch(fd, index[at], segment.path))
        return sizes


def _visible_part(fd: int, entry: BatchEntry, path: Path, within: tuple[int, int], hidden: Hidden) -> int:
    batch = ipc.decode_batch(read_batch(fd, entry, path))
    offsets: Offsets = batch.column("offset").to_numpy()
    counts = (offsets >= within[0]) & (offsets < within[1]) & ~hidden.marks(offsets)
    return int(sizes_of(batch)[counts].sum())


def _size_of_batch(fd: int, entry: BatchEntry, path: Path) -> int:
    """Of all its messages, by its metadata. Raises CorruptLog."""
    try:
        metadata_bytes = int.from_bytes(read_at(fd, entry.position, 8)[4:], "little")
        if not 0 < metadata_bytes < entry.length:
            raise ValueError(f"its header has {metadata_bytes} bytes")
        metadata = BatchMetadata(read_at(fd, entry.position + 8, metadata_bytes))
        nodes, buffers = metadata.nodes, metadata.buffers
        body = entry.position + 8 + metadata_bytes
        data = sum(_unpacked(fd, body, *buffers[at], is_packed=metadata.codec is not None) for at in _DATA)
        headed = nodes[_LISTS][0] - nodes[_LISTS][1]
        return ROW_BYTES * metadata.rows + data + HEADERS_BYTES * headed + LINE_BYTES * nodes[_PAIRS][0]
    except (struct.error, ValueError, TypeError, IndexError) as error:
        raise damage(path, entry, f"has no valid header ({error})") from error


def _unpacked(fd: int, body: int, position: int, length: int, *, is_packed: bool) -> int:
    """The length of a buffer without compression: it begins with it, or with -1."""
    if not is_packed or length < 8:
        return length
    (stated,) = struct.unpack("<q", read_at(fd, body + position, 8))
    return length - 8 if stated < 0 else int(stated)
