"""Cutting a range into parts for parallel readers: by the sizes of segments, on batch boundaries.

Theory of operation. The range is a line of stored bytes, and each segment is a stretch of it. Cuts are placed evenly on
that line. A cut near the end of a segment is moved there; for any other one, the batch where it falls is found by
bisection in the index of its segment. The cost therefore depends on the number of parts, and not on that of batches.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from natslog.log.batch_index import BatchIndex
from natslog.log.extent import position_of
from natslog.log.removed import RemovedOffsets
from natslog.model import Split

_NEAR_END = 8  # a cut is moved by up to this fraction of a part, so that it is at the end of a segment


@dataclass(frozen=True, slots=True)
class Stretch:
    """Offsets `[start, end)` of a segment and about how many bytes they take. `index`: of the segment; it may have to
    be read. Missing offsets take no bytes: reading them raises the error.
    """

    start: int
    end: int
    bytes: int
    index: Callable[[], BatchIndex]


def cut_into_splits(
    stretches: Sequence[Stretch],
    removed: RemovedOffsets,
    *,
    max_bytes: int | None,
    max_rows: int | None,
    min_splits: int,
) -> list[Split]:
    """About equal parts. A batch is cut for `max_rows`, or where there are fewer batches than `min_splits`. A part has
    rows, unless the whole range has none.

    Args:
        stretches: neighbours in offset order, none empty. `removed`: offsets that are no rows.
        max_bytes: a part is larger by about the half of a batch at most, or where it is a single batch.
        max_rows: never more. `min_splits`: how many parts at least, as far as there are rows.
    """
    if not stretches:
        return []
    line = _Line(stretches)
    count = max(min_splits, -(-line.bytes // max_bytes) if max_bytes else 1)
    edges = _even_edges(line, count)
    if max_rows is not None:
        limited = (_limited(line, low, high, max_rows, removed) for low, high in pairwise(edges))
        edges = [*chain.from_iterable(limited), edges[-1]]
    edges = _with_rows(_at_least(line, edges, min_splits), removed)
    sizes = pairwise(map(line.bytes_before, edges))
    return [
        Split(start=low, end=high, rows=high - low - removed.count(low, high), bytes=after - before)
        for (low, high), (before, after) in zip(pairwise(edges), sizes, strict=True)
    ]


class _Line:
    """The stretches, one after another."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = stretches
        self._starts = [one.start for one in stretches]
        self._bytes_upto = list(accumulate((one.bytes for one in stretches), initial=0))
        self.start, self.end, self.bytes = stretches[0].start, stretches[-1].end, self._bytes_upto[-1]

    def bytes_before(self, offset: int) -> int:
        if offset == self.end:
            return self.bytes
        at = bisect_right(self._starts, offset) - 1
        one, before = self._stretches[at], self._bytes_upto[at]
        if offset == one.start:
            return before
        index = one.index()
        inside = position_of(index, offset) - position_of(index, one.start)
        return before + min(max(0, inside), one.bytes)

    def boundary_near(self, at_bytes: int, slack_bytes: int = 0) -> int:
        """The end of a segment, if there is one within `slack_bytes`, else the boundary of batches nearest to a place.

        Args:
            at_bytes: from the start of the line, within it.
        """
        at = max(0, bisect_left(self._bytes_upto, at_bytes) - 1)
        one, inside = self._stretches[at], at_bytes - self._bytes_upto[at]
        if inside <= slack_bytes:
            return one.start
        if one.bytes - inside <= slack_bytes:
            return one.end
        index = one.index()
        if len(index) == 0:
            return one.start
        position = position_of(index, one.start) + inside
        batch = max(0, bisect_right(index.positions, position, 0, len(index)) - 1)
        low, high = index.positions[batch], index.positions[batch] + index.lengths[batch]
        nearest = index.base_offsets[batch] if position - low < high - position else index.end_offsets[batch]
        return min(max(nearest, one.start), one.end)

    def boundary_upto(self, offset: int) -> int:
        """The last boundary of batches at or below an offset."""
        one = self._stretches[bisect_right(self._starts, offset) - 1]
        if offset == one.start:
            return offset
        index = one.index()
        batch = index.first_covering(offset)
        if batch < len(index):
            return max(one.start, index.base_offsets[batch])
        return max(one.start, index.end_offsets[-1] if len(index) else one.start)


def _even_edges(line: _Line, count: int) -> list[int]:
    """The start, the boundaries nearest to where `count` equal parts meet, and the end."""
    slack_bytes = line.bytes // count // _NEAR_END
    cuts = {line.boundary_near(line.bytes * number // count, slack_bytes) for number in range(1, count)}
    return [line.start, *sorted(cuts - {line.start, line.end}), line.end]


def _limited(line: _Line, low: int, high: int, max_rows: int, removed: RemovedOffsets) -> Iterator[int]:
    """The starts of parts of `[low, high)`, on boundaries where that costs no more than a quarter of a part."""
    while low < high:
        yield low
        left = high - low - removed.count(low, high)
        parts = -(-left // max_rows)
        if parts <= 1:
            return
        rows = -(-left // parts)
        boundary = line.boundary_upto(removed.visible_from(low, high, max_rows))
        is_near = boundary >= removed.visible_from(low, high, max(1, rows * 3 // 4))
        low = boundary if is_near else removed.visible_from(low, high, rows)


def _with_rows(edges: list[int], removed: RemovedOffsets) -> list[int]:
    """The edges of the parts that have rows; removed offsets are in the part before them, or in the first one."""
    if not removed:
        return edges
    starts = [low for low, high in pairwise(edges) if removed.count(low, high) < high - low]
    return [edges[0], *starts[1:], edges[-1]]


def _at_least(line: _Line, edges: list[int], count: int) -> list[int]:
    """More edges, so that there are `count` parts: the largest ones are halved. (Cuts of large batches coincide.)"""
    largest: list[tuple[int, int, int]] = []

    def add(low: int, high: int) -> None:
        if high - low > 1:
            heapq.heappush(largest, (line.bytes_before(low) - line.bytes_before(high), low, high))

    if len(edges) > count:
        return edges
    for low, high in pairwise(edges):
        add(low, high)
    edges = list(edges)
    while len(edges) <= count and largest:
        _, low, high = heapq.heappop(largest)
        middle = line.boundary_near((line.bytes_before(low) + line.bytes_before(high)) // 2)
        if not low < middle < high:
            middle = (low + high) // 2
        edges.append(middle)
        add(low, middle)
        add(middle, high)
    return sorted(edges)
