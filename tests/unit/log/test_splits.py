"""Cutting ranges for parallel readers: even parts on batch boundaries, at a cost that does not depend on the log."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.extent import bytes_between
from natslog.log.removed import RemovedOffsets
from natslog.log.splits import Stretch, cut_into_splits
from natslog.model import Split

Batch = tuple[int, int, int]


class Segments:
    """Stretches of segments with the given batches (rows, bytes), and what was read of their indexes."""

    def __init__(self, segments: list[list[tuple[int, int]]], start: int = 0, end: int | None = None) -> None:
        self.indexes_read: list[int] = []
        self.removed = RemovedOffsets()
        self.entries_read = 0
        self.batches: list[Batch] = []
        self.stretches: list[Stretch] = []
        self.end = sum(rows for segment in segments for rows, _ in segment) if end is None else end
        self.start, offset = start, 0
        for number, segment in enumerate(segments):
            base, index = offset, CountedIndex(self)
            for rows, size in segment:
                position = sum(size for _, _, size in self.batches[-len(index) :]) if len(index) else 0
                index.append(BatchEntry(offset, offset + rows, rows, position, size, 0))
                self.batches.append((offset, offset + rows, size))
                offset += rows
            low, high = max(base, start), min(offset, self.end)
            if low < high:
                self.stretches.append(Stretch(low, high, bytes_between(index, low, high), self._read(number, index)))
            index.count_from_here()

    def _read(self, number: int, index: BatchIndex):  # type: ignore[no-untyped-def]
        def read() -> BatchIndex:
            self.indexes_read.append(number)
            return index

        return read

    def cut(self, max_bytes: int | None = None, max_rows: int | None = None, min_splits: int = 1) -> list[Split]:
        limits = {"max_bytes": max_bytes, "max_rows": max_rows}
        return cut_into_splits(self.stretches, self.removed, min_splits=min_splits, **limits)


class CountedIndex(BatchIndex):
    """An index that counts which of its entries are read."""

    __slots__ = ("_segments",)

    def __init__(self, segments: Segments) -> None:
        super().__init__()
        self._segments = segments

    def count_from_here(self) -> None:
        for name in ("base_offsets", "end_offsets", "positions", "lengths"):
            setattr(self, name, CountedColumn(getattr(self, name), self._segments))


class CountedColumn(list[int]):
    def __init__(self, values: list[int], segments: Segments) -> None:
        super().__init__(values)
        self._segments = segments

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        self._segments.entries_read += 1
        return super().__getitem__(at)


batch = st.tuples(st.integers(1, 50), st.integers(1, 10_000))
logs = st.lists(st.lists(batch, min_size=1, max_size=8), min_size=1, max_size=8)


@settings(deadline=None, max_examples=120)
@given(
    data=st.data(),
    log=logs,
    min_splits=st.integers(1, 20),
    max_rows=st.none() | st.integers(1, 100),
    max_bytes=st.none() | st.integers(1, 20_000),
)
def test_splits_cover_the_range_once_and_obey_their_limits(
    data: st.DataObject,
    log: list[list[tuple[int, int]]],
    min_splits: int,
    max_rows: int | None,
    max_bytes: int | None,
) -> None:
    rows = sum(count for segment in log for count, _ in segment)
    start = data.draw(st.integers(0, rows - 1))
    segments = Segments(log, start, data.draw(st.integers(start + 1, rows)))
    splits = segments.cut(max_bytes, max_rows, min_splits)
    assert (splits[0].start, splits[-1].end) == (start, segments.end)
    assert all(left.end == right.start for left, right in pairwise(splits))
    assert all(split.rows == split.end - split.start > 0 for split in splits)
    assert sum(split.bytes for split in splits) == sum(one.bytes for one in segments.stretches)
    assert all(split.bytes >= 0 for split in splits)
    assert len(splits) >= min(min_splits, segments.end - start)
    largest = max(size for _, _, size in segments.batches)
    if max_rows is not None:
        assert max(split.rows for split in splits) <= max_rows
    if max_bytes is not None:
        assert all(split.bytes <= 1.25 * max_bytes + largest for split in splits)
    if max_rows is None and min_splits == 1:
        edges = {start for start, _, _ in segments.batches} | {start, segments.end}
        assert {split.start for split in splits} <= edges, "no batch is cut without need"


@settings(deadline=None, max_examples=120)
@given(
    log=logs,
    gaps=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), max_size=6),
    min_splits=st.integers(1, 20),
    max_rows=st.none() | st.integers(1, 50),
)
def test_removed_offsets_are_no_rows_and_make_no_splits(
    log: list[list[tuple[int, int]]], gaps: list[tuple[int, int]], min_splits: int, max_rows: int | None
) -> None:
    segments = Segments(log)
    gone = {at for start, count in gaps for at in range(start, min(start + count, segments.end))}
    segments.removed.record(BitMap64(gone))
    splits = segments.cut(None, max_rows, min_splits)
    assert (splits[0].start, splits[-1].end) == (0, segments.end)
    assert all(left.end == right.start for left, right in pairwise(splits))
    assert [one.rows for one in splits] == [len(set(range(one.start, one.end)) - gone) for one in splits]
    rows = segments.end - len(gone)
    assert all(one.rows for one in splits) or (rows == 0 and len(splits) == 1)
    if max_rows is not None:
        assert max(one.rows for one in splits) <= max_rows
        assert len(splits) <= min_splits + 2 * -(-rows // max_rows)


@settings(deadline=None)
@given(parts=st.integers(1, 16), per_segment=st.integers(1, 40), count=st.integers(1, 12))
def test_splits_of_equal_batches_are_even(parts: int, per_segment: int, count: int) -> None:
    segments = Segments([[(100, 1000)] * per_segment] * count)
    splits = segments.cut(min_splits=parts)
    target = 100 * per_segment * count / parts
    assert len(splits) >= parts
    assert all(split.rows <= target * 1.25 + 100 for split in splits)


def test_splits_of_a_long_log_read_few_entries_of_few_segments() -> None:
    """Four times the log: the same number of indexes, and a few more steps of bisection."""
    read = []
    for count in (50, 200):
        segments = Segments([[(10, 1000)] * 400] * count, start=5, end=count * 4000 - 5)
        assert len(segments.cut(min_splits=4)) == 4
        assert len(set(segments.indexes_read)) <= 2 + 3, "both ends, and where the three cuts are"
        read.append(segments.entries_read)
    assert max(read) < 300
    assert read[1] <= read[0] * 1.5


def test_splits_end_with_segments_where_that_is_even_enough() -> None:
    segments = Segments([[(10, 1000)] * 62, [(10, 1000)] * 66] * 5)
    splits = segments.cut(max_bytes=64_000)
    assert [split.start for split in splits[::2]] == [at * 1280 for at in range(5)]
    assert [split.rows for split in splits] == [620, 660] * 5
    assert segments.indexes_read == []
