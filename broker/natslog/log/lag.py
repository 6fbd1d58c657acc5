"""The lag of an offset: rows, stored bytes, and the age of the oldest unread message.

Theory of operation. Nothing is counted: each offset counts as a row unless it is hidden, and `extent` gives the bytes.
A commit has one timestamp, which is in the index; only a batch that sealing merged from several commits is read, and
validated once per process. The cost is therefore the same for ten rows and for ten
thousand million.

What is damaged is still reported: rows that cannot be read are not included, and if the timestamps themselves are
damaged, those of the index, which has a CRC of its own, are used instead.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from natslog.arrow import ipc
from natslog.errors import CorruptLog
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.chain import Segment, SegmentChain
from natslog.log.extent import extent
from natslog.log.recovery import Damage
from natslog.log.removed import RemovedOffsets
from natslog.log.sealed import SealedSegment
from natslog.log.segment import damage, read_at
from natslog.log_events import event

logger = logging.getLogger("natslog.log")

_OFFSET_AND_TIMESTAMP = [0, 1]


@dataclass(frozen=True, slots=True)
class Lag:
    """What lies between `offset` and the high watermark, and can be read.

    Attributes:
        rows: visible ones. `bytes`: as stored, with hidden ones.
        oldest_us: timestamp of the first unread message; None where there is none.
        lost_rows: below the log start; not counted in `rows`. `beyond_rows`: how far the offset is above the HW.
    """

    offset: int
    log_start_offset: int
    high_watermark: int
    rows: int = 0
    bytes: int = 0
    oldest_us: int | None = None

    @property
    def lost_rows(self) -> int:
        return max(0, self.log_start_offset - self.offset)

    @property
    def beyond_rows(self) -> int:
        return max(0, self.offset - self.high_watermark)


@dataclass(frozen=True, slots=True)
class _Place:
    """The batch `at` of a segment, where the range begins; the index is the segment's own."""

    segment: Segment
    index: BatchIndex
    at: int


def lag_at(
    chain: SegmentChain, offset: int, about_to_load: Callable[[SealedSegment], None], removed: RemovedOffsets
) -> Lag:
    """The lag of a reader whose next offset is `offset`. Blocks: it may read a footer and a batch.

    Args:
        about_to_load: called with a segment whose index is needed, so that the number of indexes in memory remains
        bounded.
    """
    return chain.on_snapshot(lambda segments: _lag_at(chain, segments, offset, about_to_load, removed))


def _lag_at(
    chain: SegmentChain,
    segments: Sequence[Segment],
    offset: int,
    about_to_load: Callable[[SealedSegment], None],
    removed: RemovedOffsets,
) -> Lag:
    log_start, end = chain.first_readable_offset, chain.high_watermark
    start = removed.next_visible(max(offset, log_start), end)
    segments = [segment for segment in segments if segment.base_offset < end]
    rows = end - start - _missing_rows(chain.damages, [segment.base_offset for segment in segments], start, end)
    rows -= removed.count(start, end)
    place = _first_at(segments, start, about_to_load) if start < end else None
    if place is None or rows <= 0:
        return Lag(offset, log_start, end)
    size_bytes = extent(segments, start, end).bytes
    fd = chain.open(place.segment)
    try:
        oldest_us = _timestamp_us(place, fd, start)
    finally:
        os.close(fd)
    return Lag(offset, log_start, end, rows, size_bytes, oldest_us)


def _missing_rows(damages: Sequence[Damage], bases: Sequence[int], start: int, end: int) -> int:
    """Offsets of `[start, end)` in damaged ranges; one without a known end ends where the next segment begins."""
    missing, covered = 0, start
    for known in sorted(damages, key=lambda one: one.start_offset):
        following = bisect_right(bases, known.start_offset)
        upto = known.end_offset
        if upto is None:
            upto = bases[following] if following < len(bases) else end
        low, high = max(known.start_offset, covered), min(upto, end)
        if low < high:
            missing, covered = missing + high - low, high
    return missing


def _index_of(segment: Segment, about_to_load: Callable[[SealedSegment], None]) -> BatchIndex:
    if isinstance(segment, SealedSegment):
        about_to_load(segment)
    return segment.index


def _first_at(segments: Sequence[Segment], start: int, about_to_load: Callable[[SealedSegment], None]) -> _Place | None:
    """The first batch with rows from `start` on: of the segment that covers it, or behind a hole."""
    covering = max(0, bisect_right([segment.base_offset for segment in segments], start) - 1)
    for segment in segments[covering:]:
        index = _index_of(segment, about_to_load)
        at = index.first_covering(start)
        if at < len(index):
            return _Place(segment, index, at)
    return None


def _timestamp_us(place: _Place, fd: int, start: int) -> int:
    """Of the first row from `start` on in its batch: it lies between the newest one of the batch before and its own."""
    times = place.index.max_timestamps_us
    newest = times[place.at]
    if not isinstance(place.segment, SealedSegment) or (place.at and times[place.at - 1] == newest):
        return newest
    try:
        place.segment.prove(fd, place.index, place.at, place.at + 1)
        read_us = _read_timestamp_us(place.segment.path, fd, place.index[place.at], start)
    except (CorruptLog, OSError, pa.ArrowException) as error:
        logger.warning(
            f"the age of offset {start} is that of the newest message of its batch: {error}",
            extra=event("log.age_estimated", offset=start),
        )
        return newest
    return newest if read_us is None else read_us


def _read_timestamp_us(path: Path, fd: int, entry: BatchEntry, start: int) -> int | None:
    """From a batch that was proven once; of its columns only two are decompressed. The footer of the file is not
    needed. None where its messages from `start` on were removed. Raises CorruptLog.
    """
    message = read_at(fd, entry.position, entry.length)
    if len(message) < entry.length:
        raise damage(path, entry, "is cut short")
    wanted = pa.ipc.IpcReadOptions(included_fields=_OFFSET_AND_TIMESTAMP)
    batch = pa.ipc.open_stream(ipc.schema_message() + message, options=wanted).read_next_batch()
    row = int(np.searchsorted(batch.column("offset").to_numpy(), start))
    return None if row == batch.num_rows else int(batch.column("timestamp").cast(pa.int64()).to_numpy()[row])
