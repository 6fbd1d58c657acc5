"""How many stored bytes a range of offsets takes, and how far so many bytes reach.

For segments in the middle only the size is used, and for the outer two the positions of their batches. The cost
therefore does not grow with the range. A batch that is cut counts in proportion to its rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from natslog.log.batch_index import BatchIndex
from natslog.log.chain import Segment


@dataclass(frozen=True, slots=True)
class Extent:
    """Offsets `[start, end)` and about how many bytes they take."""

    start: int
    end: int
    bytes: int


def extent(segments: Sequence[Segment], start: int, end: int, max_bytes: int | None = None) -> Extent:
    """`[start, end)`, or its beginning that takes at most `max_bytes`, but a row where there is one.

    Args:
        start, end: within the log.
    """
    size_bytes = 0
    for segment, base_offset, end_offset in overlapping(segments, start, end):
        low, high = max(start, base_offset), min(end, end_offset)
        whole = low == base_offset and high == end_offset
        piece_bytes = segment.size_bytes if whole else bytes_between(segment.index, low, high)
        if max_bytes is not None and size_bytes + piece_bytes > max_bytes:
            reached = max(reach(segment.index, low, high, max_bytes - size_bytes), start + 1)
            return Extent(start, reached, size_bytes + bytes_between(segment.index, low, reached))
        size_bytes += piece_bytes
    return Extent(start, end, size_bytes)


def overlapping(segments: Sequence[Segment], start: int, end: int) -> Iterator[tuple[Segment, int, int]]:
    """Segments that have a part of the range, with the offsets they cover. A segment ends where the next one begins:
    reading the end of each would read the footers of all.
    """
    bases = [segment.base_offset for segment in segments]
    for at in range(max(0, bisect_right(bases, start) - 1), bisect_left(bases, end)):
        end_offset = bases[at + 1] if at + 1 < len(bases) else segments[at].end_offset
        yield segments[at], bases[at], end_offset


def bytes_between(index: BatchIndex, start: int, end: int) -> int:
    """About how many bytes of a segment `[start, end)` takes; offsets that it lacks take none."""
    return max(0, position_of(index, end) - position_of(index, start))


def position_of(index: BatchIndex, offset: int) -> int:
    """Where this offset lies in the file, a batch being as if its rows were equally long."""
    at = index.first_covering(offset)
    if len(index) == 0:
        return 0
    if at == len(index):
        return index.positions[-1] + index.lengths[-1]
    base, end = index.base_offsets[at], index.end_offsets[at]
    return index.positions[at] + index.lengths[at] * max(0, offset - base) // (end - base)


def reach(index: BatchIndex, start: int, end: int, room_bytes: int) -> int:
    """The offset that `room_bytes` from `start` on lead to."""
    limit = position_of(index, start) + room_bytes
    low, high = start, end
    while low < high:  # the last offset whose position is within the limit
        middle = (low + high + 1) // 2
        if position_of(index, middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
