"""Reading a log: which bytes of which files belong to offsets or times.

Files are opened before anything is served, so that retention never affects a reader during a scan. No lock is held
while a file is opened or read: a footer may need disk access, and the event loop uses the lookups too. Messages at or
above the high watermark are not returned, and neither are batches that this process has not validated.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from natslog.arrow import ipc
from natslog.errors import CorruptLog, InvalidRequest, OffsetOutOfRange
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.chain import Segment, SegmentChain, damage_error
from natslog.log.extent import Extent, bytes_between, extent, overlapping
from natslog.log.hidden_rows import Hiding
from natslog.log.lag import Lag, lag_at
from natslog.log.read_plan import FileRange, ReadPlan
from natslog.log.removed import Hidden, Offsets, offset_range, offset_set
from natslog.log.sealed import SealedSegment
from natslog.log.segment import damage, read_batch
from natslog.log.splits import Stretch, cut_into_splits
from natslog.log.visibility import Visibility
from natslog.model import Split
from natslog.units import offsets_between

_INDEXES_KEPT = 64
_MOST_KNOWN_BATCHES = 32
_READ_AT_ONCE_BYTES, _READ_FIRST_BYTES = 8 * 1024 * 1024, 256 * 1024


class _KnownTimes:
    """The timestamps of the batches that were searched last, of all logs: while messages expire one after another, the
    same batch is searched many times. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[int, int], tuple[Segment, Offsets, Offsets]] = OrderedDict()

    def of(
        self, segment: Segment, at: int, read: Callable[[Segment, int], tuple[Offsets, Offsets]], *, is_kept: bool
    ) -> tuple[Offsets, Offsets]:
        """Offsets and timestamps of the batch of this number in the segment."""
        key = (id(segment), at)
        with self._lock:
            known = self._known.get(key)
            if known is not None and known[0] is segment:
                self._known.move_to_end(key)
                return known[1:]
        found = read(segment, at)
        if is_kept:
            with self._lock:
                self._known[key] = (segment, *found)
                self._known.move_to_end(key)
                if len(self._known) > _MOST_KNOWN_BATCHES:
                    self._known.popitem(last=False)
        return found


_known_times = _KnownTimes()


class LogReader:
    """Lookups in a chain of segments; thread-safe."""

    def __init__(self, chain: SegmentChain, visibility: Visibility | None = None) -> None:
        self._chain = chain
        self._visibility = visibility or Visibility()
        self._known_time = -1, 0

    def forget_proofs(self, path: Path) -> None:
        """This file could not be read although it was validated before."""
        for segment in list(self._chain.segments):
            if segment.path == path and isinstance(segment, SealedSegment):
                segment.forget_proofs()

    def plan_read(
        self,
        start: int,
        end: int | None = None,
        *,
        max_bytes: int,
        prove: bool = True,
        uncommitted: bool = False,
        hidden: Hidden | None = None,
    ) -> ReadPlan:
        """Opens the files that hold `[start, end)`, whole batches, at most about `max_bytes` as they are
        stored (but at least one batch).

        Args:
            start: from the first readable offset to the high watermark, both included (at the latter the plan is
                empty).
            end: exclusive; None or above the high watermark means up to it.
            prove: reads sealed batches that this process has not proven yet; else the caller proves what it reads.
            hidden: what is left out; None: what readers do not get.
            uncommitted: from the first file up to the log end offset, for another replica or this one itself.

        Raises:
            OffsetOutOfRange: `start` is not in the log; the facts hold both bounds.
            CorruptLog: the range begins in a damaged part.
        """
        upto = self._check_in_log(start, uncommitted)
        limit = upto if end is None else min(end, upto)
        plan = ReadPlan(start)
        removed = hidden
        if removed is None and not uncommitted:
            removed = self._visibility.removed_below(upto)
        try:
            if removed:
                self._fill_with_visible(plan, removed, limit, max_bytes)
            else:
                self._fill(plan, limit, max_bytes, prove, uncommitted)
        except OffsetOutOfRange:  # retention took the next segment meanwhile
            if not plan.ranges:
                raise
        except CorruptLog:
            if not plan.ranges:  # otherwise what comes before the damage is served first
                plan.close()
                raise
        except BaseException:
            plan.close()
            raise
        plan.next_offset = max(start, min(plan.next_offset, limit))
        return plan

    def _fill(self, plan: ReadPlan, limit: int, room_bytes: int, prove: bool, uncommitted: bool) -> None:
        while plan.next_offset < limit and room_bytes > 0:
            if (added := self._extend(plan, limit, room_bytes, prove, uncommitted)) is None:
                return
            room_bytes -= added.length

    def _fill_with_visible(self, plan: ReadPlan, removed: Hidden, limit: int, max_bytes: int) -> None:
        """As a plan is filled otherwise, but without hidden rows. It may end earlier."""
        hiding = Hiding(plan, removed, max_bytes)
        try:
            while plan.next_offset < limit and hiding.room_bytes > 0:
                if self._pass_over_hidden(plan, hiding, removed, limit):
                    continue
                if self._extend(plan, limit, hiding.room_bytes, True, False) is None:
                    break
                hiding.hide_in_last()
        finally:
            hiding.close()

    def _pass_over_hidden(self, plan: ReadPlan, hiding: Hiding, removed: Hidden, limit: int) -> bool:
        """Whether messages are hidden up to another batch than the next one: those between are not read."""
        start = plan.next_offset
        visible = removed.next_visible(start, limit)
        if visible == start:
            return False
        upto = visible
        if visible < limit:
            index = self._index_at(visible)
            if (at := index.first_covering(visible)) < len(index):
                upto = min(visible, max(start, index.base_offsets[at]))
        if upto == start:
            return False
        hiding.pass_over(start, upto, self._newest_us_below(upto))
        plan.next_offset = upto
        return True

    def _index_at(self, offset: int) -> BatchIndex:
        """Of the segment that holds this offset."""
        _, index, fd = self._opened(offset, False)
        os.close(fd)
        return index

    def _newest_us_below(self, end: int) -> int:
        """The time of the newest message of the batch that holds the offset before `end`; 0 if it is damaged."""
        try:
            index = self._index_at(end - 1)
        except CorruptLog:
            return 0
        at = min(index.first_covering(end - 1), len(index) - 1)
        return index.max_timestamps_us[at] if at >= 0 else 0

    def rows_at(self, offsets: Offsets) -> Iterator[tuple[Offsets, pa.RecordBatch | CorruptLog]]:
        """The stored messages with these offsets, also if they are hidden, in parts of one stored batch. Messages that
        are not in the log, or were removed from its files, are left out. Of what is damaged: the offsets, and why.

        Args:
            offsets: ascending, each once.
        """
        offsets = offsets[offsets < self._chain.high_watermark]
        while len(offsets):
            try:
                segment, index, fd = self._opened(int(offsets[0]), False)
            except (OffsetOutOfRange, CorruptLog) as error:
                if isinstance(error, CorruptLog):
                    yield offsets[:1], error
                offsets = offsets[1:]
                continue
            with open(fd, "rb", buffering=0):
                end = max(int(offsets[0]) + 1, index.end_offsets[len(index) - 1] if len(index) else 0)
                while len(offsets) and offsets[0] < end:
                    at, count = index.first_covering(int(offsets[0])), 1
                    try:
                        self._check_covered(segment, index, at, int(offsets[0]))
                        count = int(np.searchsorted(offsets, index.end_offsets[at]))
                        batch = ipc.decode_batch(read_batch(fd, index[at], segment.path))
                        part = _rows_of(batch, index[at], offsets[:count])
                        if len(part[0]):
                            yield part
                    except CorruptLog as error:
                        yield offsets[:count], error
                    offsets = offsets[count:]

    def visible_rows(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """The visible messages in `[start, end)`, in bounded memory; little is read for the first of them.

        Raises:
            OffsetOutOfRange: `start` is not in the log. CorruptLog: a part of it is damaged.
        """
        max_bytes = _READ_FIRST_BYTES
        while start < end:
            with self.plan_read(start, end, max_bytes=max_bytes) as plan:
                for header, batch in plan.rows():
                    rows = ipc.rows_within(header, batch, start, min(end, plan.next_offset))
                    if rows.start < rows.stop:
                        yield batch[rows]
                start = plan.next_offset
            max_bytes = min(2 * max_bytes, _READ_AT_ONCE_BYTES)

    def stored_rows(
        self, start: int, end: int, *, prove: bool = False, columns: tuple[str, ...] | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """See `applied_rules.StoredRows`: also of messages that are hidden, or not committed yet.

        Args:
            columns: those that are needed, with `offset` as the first one; None: all.
        """
        start = max(start, self._chain.log_start_offset)
        while start < end:
            with self.plan_read(start, end, max_bytes=_READ_AT_ONCE_BYTES, prove=prove, uncommitted=True) as plan:
                for header, batch in plan.rows() if columns is None else plan.selected(columns):
                    rows = ipc.rows_within(header, batch, start, end)
                    if rows.start < rows.stop:
                        yield header.epoch, batch[rows]
                start = plan.next_offset

    def time_us_of(self, offset: int) -> int | None:
        """When this message was stored; None: nothing is stored there. The last one that was asked for is kept.

        Raises:
            OffsetOutOfRange: it was removed meanwhile. CorruptLog: it cannot be read.
        """
        known = self._known_time
        if known[0] == offset:
            return known[1]
        for _, rows in self.stored_rows(offset, offset + 1, columns=("offset", "timestamp")):
            if rows.column("offset")[0].as_py() == offset:
                found = int(rows.column("timestamp").cast(pa.int64())[0].as_py())
                self._known_time = offset, found
                return found
        return None

    def forget_time(self) -> None:
        """Messages were cut off."""
        self._known_time = -1, 0

    def gaps(self) -> BitMap64:
        """Offsets that have no row, although their batches are stored. Raises CorruptLog."""

        def within(segments: list[Segment]) -> BitMap64:
            found = BitMap64()
            for segment in segments:
                index = segment.index
                if sum(index.rows) < segment.end_offset - segment.base_offset:
                    with open(self._chain.open(segment), "rb") as file:
                        for at in range(len(index)):
                            found |= _gaps_of(file.fileno(), index[at], segment.path)
            return found

        return self._chain.on_snapshot(within)

    def _check_in_log(self, start: int, uncommitted: bool = False) -> int:
        at = self._chain.positions()
        log_start_offset = at.log_start_offset if uncommitted else at.first_readable_offset
        high_watermark = at.log_end_offset if uncommitted else at.high_watermark
        if not log_start_offset <= start <= high_watermark:
            raise OffsetOutOfRange(
                f"offset {start} is not in the log, which has {offsets_between(log_start_offset, high_watermark)}",
                offset=start,
                log_start_offset=log_start_offset,
                high_watermark=high_watermark,
            )
        return high_watermark

    def _extend(self, plan: ReadPlan, limit: int, room_bytes: int, prove: bool, uncommitted: bool) -> FileRange | None:
        """Adds neighbouring batches of one segment to the plan. None: the segment was sealed or rewritten since the
        plan was begun, and its next batch has offsets that the plan has already. So the plan ends here.
        """
        offset = plan.next_offset
        segment, index, fd = self._opened(offset, uncommitted)
        try:
            first = index.first_covering(offset)
            self._check_covered(segment, index, first, offset)
            if plan.start < offset and index.base_offsets[first] < offset:
                os.close(fd)
                return None
            last = self._last_batch(index, first, limit, room_bytes)
            if prove and isinstance(segment, SealedSegment):
                last = segment.prove(fd, index, first, last)
        except BaseException:
            os.close(fd)
            raise
        added = FileRange(fd, segment.path, index, first, last)
        plan.ranges.append(added)
        plan.next_offset = added.end
        return added

    def _opened(self, offset: int, uncommitted: bool) -> tuple[Segment, BatchIndex, int]:
        """The segment that holds this offset, its index, and its file, opened: all of one moment."""
        while True:
            segment = self._segment_of(offset, uncommitted)
            try:
                index = segment.index  # a sealed one may read its footer
                return segment, index, self._chain.open(segment)
            except FileNotFoundError:
                if self._chain.is_current(segment):
                    raise
            except CorruptLog as error:
                raise self._damage_of(segment, error) from error

    def _damage_of(self, segment: Segment, error: CorruptLog) -> CorruptLog:
        """Of a footer: with the offsets of the segment."""
        behind = [one.base_offset for one in self._chain.snapshot() if one.base_offset > segment.base_offset]
        ends = {"end": behind[0]} if behind else {}
        return CorruptLog(error.message, **({"start": segment.base_offset} | ends | error.facts))

    @staticmethod
    def _last_batch(index: BatchIndex, first: int, limit: int, room_bytes: int) -> int:
        """Exclusive end of the run of neighbouring batches from `first` that stays below `limit` and `room_bytes`."""
        by_offset = bisect_left(index.base_offsets, limit, first, len(index))
        by_bytes = bisect_right(index.positions, index.positions[first] + room_bytes, first, len(index)) - 1
        last = max(first + 1, min(by_offset, by_bytes if by_bytes < len(index) - 1 else by_offset))
        starts, ends = index.base_offsets[first + 1 : last], index.end_offsets[first : last - 1]
        if starts == ends:  # at the speed of C: there may be many
            return last
        return first + 1 + next(at for at in range(len(starts)) if starts[at] != ends[at])  # a quarantined hole

    def _segment_of(self, offset: int, uncommitted: bool) -> Segment:
        with self._chain.lock:
            self._check_in_log(offset, uncommitted)  # again: retention may have moved on
            at = bisect_right([segment.base_offset for segment in self._chain.segments], offset) - 1
            segment = self._chain.segments[max(at, 0)]  # what lies before the first one is missing
        if isinstance(segment, SealedSegment):
            self._forget_others(segment)
        return segment

    def _forget_others(self, segment: SealedSegment) -> None:
        """Keeps the indexes of a bounded number of sealed segments in memory."""
        loaded = [one for one in list(self._chain.segments) if isinstance(one, SealedSegment) and one.has_index]
        if len(loaded) > _INDEXES_KEPT:
            for other in loaded[: len(loaded) - _INDEXES_KEPT]:
                if other is not segment:
                    other.forget()

    def _check_covered(self, segment: Segment, index: BatchIndex, first: int, offset: int) -> None:
        if first < len(index) and index.base_offsets[first] <= offset:
            return
        for known in self._chain.damages:
            if known.start_offset <= offset and (known.end_offset is None or offset < known.end_offset):
                raise damage_error([known])
        entry = BatchEntry(offset, index.base_offsets[first] if first < len(index) else offset + 1, 0, 0, 0, 0)
        raise damage(segment.path, entry, "is missing")

    def offset_at(self, timestamp_us: int, start: int = 0) -> tuple[int, int | None]:
        """The first offset whose timestamp is at or after this, and that timestamp; (high watermark, None) if none is.

        Args:
            start: offsets below are passed over.

        Raises:
            CorruptLog: the place to look is damaged.
        """
        return self._chain.on_snapshot(lambda segments: self._offset_at(segments, timestamp_us, start))

    def _offset_at(self, segments: list[Segment], timestamp_us: int, start: int) -> tuple[int, int | None]:
        end = self._chain.high_watermark
        segments = [segment for segment in segments if segment.base_offset < end]
        segments = segments[max(0, bisect_right([segment.base_offset for segment in segments], start) - 1) :]
        at = bisect_left(segments, timestamp_us, key=lambda segment: segment.max_timestamp_us)
        if at == len(segments) or start >= end:
            return end, None
        for segment in segments[at:]:
            found = self._first_row(segment, timestamp_us, start)
            if found is not None:
                return found if found[0] < end else (end, None)
        return end, None

    def _first_row(self, segment: Segment, timestamp_us: int, start: int) -> tuple[int, int] | None:
        """Offset and timestamp of a segment's first row from `start` and from a time on. None if it has none: the
        newest messages of a batch may have been removed.
        """
        index = segment.index
        first = max(index.first_at_or_after(timestamp_us), index.first_covering(start))
        for at in range(first, len(index)):
            is_committed = index.end_offsets[at] <= self._chain.high_watermark  # what is not may be cut, and replaced
            offsets, times = _known_times.of(segment, at, self._times, is_kept=is_committed)
            row = max(int(np.searchsorted(times, timestamp_us)), int(np.searchsorted(offsets, start)))
            if row < len(offsets):
                return int(offsets[row]), int(times[row])
        return None

    def _times(self, segment: Segment, at: int) -> tuple[Offsets, Offsets]:
        """The offsets of a batch, and their timestamps."""
        fd = self._chain.open(segment)
        try:
            batch = ipc.decode_batch(read_batch(fd, segment.index[at], segment.path))
        finally:
            os.close(fd)
        times = batch.column("timestamp").cast(pa.int64())
        return batch.column("offset").to_numpy().copy(), times.to_numpy().copy()

    def lag(self, offset: int) -> Lag:
        """The lag of a reader whose next offset this is; valid for any offset.

        Raises:
            CorruptLog: the footer of an outer segment is damaged.
        """
        removed = self._visibility.removed_below(self._chain.high_watermark)
        return lag_at(self._chain, offset, self._forget_others, removed)

    def count(self, start: int, end: int) -> int:
        """How many visible messages there are in `[start, end)`, both within the log."""
        removed = self._visibility.removed_below(self._chain.high_watermark)
        return max(0, end - start) - removed.count(start, end)

    def known_count(self) -> int:
        """How many visible messages there are, as far as rules were applied. Touches no file."""
        start, end = self._chain.first_readable_offset, self._chain.high_watermark
        return end - start - self._visibility.removed.count(start, end)

    def start_of_newest(self, count: int) -> int:
        """The offset from which on there are so many visible messages, or all where there are fewer."""
        start, end = self._chain.first_readable_offset, self._chain.high_watermark
        removed = self._visibility.removed_below(end)
        return removed.visible_from(start, end, max(0, self.count(start, end) - count))

    def extent(self, start: int, end: int, max_bytes: int | None = None) -> Extent:
        """About how many stored bytes `[start, end)` takes; with `max_bytes`, of as much of it as they hold.

        Raises:
            InvalidRequest, OffsetOutOfRange: as `splits`.
        """
        self._check_range(start, end)
        return self._chain.on_snapshot(lambda segments: extent(segments, start, end, max_bytes))

    def reach(self, start: int, end: int, *, max_rows: int | None, max_bytes: int | None) -> int:
        """The end of the beginning of `[start, end)` that has at most so many visible messages, of about so many stored
        bytes, but one message where there is one; behind all removed offsets that follow them.

        Raises:
            InvalidRequest, OffsetOutOfRange: as `splits`.
        """
        removed, reached = self._visibility.removed_below(self._chain.high_watermark), end
        if max_bytes is not None:
            one_row = removed.visible_from(start, end, 1)
            reached = max(one_row, self.extent(start, end, max_bytes).end)
        if max_rows is not None:
            reached = min(reached, removed.visible_from(start, end, max_rows))
        return removed.next_visible(reached, end)

    def splits(
        self, start: int, end: int, *, max_bytes: int | None, max_rows: int | None, min_splits: int
    ) -> list[Split]:
        """Cuts `[start, end)` into parts for parallel readers, on batch boundaries where the limits allow it.

        Raises:
            InvalidRequest: `start` beyond `end`.
            OffsetOutOfRange: either is not in the log.
        """
        self._check_range(start, end)
        removed = self._visibility.removed_below(self._chain.high_watermark)

        def cut(segments: list[Segment]) -> list[Split]:
            stretches = [self._stretch(*one, start, end) for one in overlapping(segments, start, end)]
            stretches = [one for one in stretches if one.start < one.end]
            if not stretches or stretches[0].start > start:  # the first segments are lost
                upto = stretches[0].start if stretches else end
                stretches.insert(0, Stretch(start, upto, 0, BatchIndex))
            limits = {"max_bytes": max_bytes, "max_rows": max_rows}
            return cut_into_splits(stretches, removed, min_splits=min_splits, **limits)

        return self._chain.on_snapshot(cut) if start < end else []

    def _stretch(self, segment: Segment, base_offset: int, end_offset: int, start: int, end: int) -> Stretch:
        """The part of a segment in `[start, end)`. Only for the outer two segments of a range, the index is needed."""

        def index() -> BatchIndex:
            if isinstance(segment, SealedSegment) and not segment.has_index:
                self._forget_others(segment)
            return segment.index

        low, high = max(start, base_offset), min(end, end_offset)
        is_whole = low == base_offset and high == end_offset
        return Stretch(low, high, segment.size_bytes if is_whole else bytes_between(index(), low, high), index)

    def _check_range(self, start: int, end: int) -> None:
        self._check_in_log(start)
        if start > end:
            raise InvalidRequest(f"start {start} is beyond end {end}", start=start, end=end)
        self._check_in_log(end)


def _rows_of(batch: pa.RecordBatch, entry: BatchEntry, offsets: Offsets) -> tuple[Offsets, pa.RecordBatch]:
    """The rows with these offsets, which ascend within the batch, as far as it has them."""
    rows = offsets - entry.base_offset
    if entry.has_gaps:
        stored = batch.column("offset").to_numpy()
        rows = np.searchsorted(stored, offsets)
        has_row = np.append(stored, -1)[rows] == offsets
        rows, offsets = rows[has_row], offsets[has_row]
    if len(rows) == batch.num_rows:
        return offsets, batch
    return offsets, batch.slice(int(rows[0]), 1) if len(rows) == 1 else batch.take(pa.array(rows))


def _gaps_of(fd: int, entry: BatchEntry, path: Path) -> BitMap64:
    """The offsets of a batch that have no row."""
    whole = offset_range(entry.base_offset, entry.end_offset)
    if entry.rows == entry.end_offset - entry.base_offset:
        return BitMap64()
    if not entry.rows:
        return whole
    return whole - offset_set(ipc.decode_batch(read_batch(fd, entry, path)).column("offset").to_numpy())
