"""Which sealed segments of a log are small, and which of them become one file next.

Theory of operation. Segments of many small batches are closed early (`BatchIndex.has_many_small`), so that few batches
of a log are small at any time; and neighbouring small segments are merged, so that their number does not grow with the
messages. A segment is full where an ordinary one would be closed: by bytes, offsets or age. The *share* of a segment,
or of neighbours together, is how much of a full one they are; above one half it is large, and stays as it is. Of the
neighbours between two large segments, as many become one as fit into a full one. Of those behind the last large one,
eight of about the same share become one while that is small, and all of them as soon as they are more than a full one.
So a row is written about three times: when its segment is sealed, and twice in merging.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from natslog.errors import CorruptLog
from natslog.log.chain import Segment, SegmentChain
from natslog.log.compression import CompressedSizes
from natslog.log.merging import Stored, merge, stored
from natslog.log.sealed import SealedSegment, write_beside
from natslog.log.segment import damage, read_batch

_LARGE = 0.5
_MERGED_AT_ONCE = 8
_UNEVEN = 2.0
_MERGED_EARLY = 0.25
_MOST_WAITING = 32
_LOOKED_AT = 64


@dataclass(frozen=True, slots=True)
class Full:
    """When a segment of a stream is full: by the first of these."""

    size_bytes: int
    offsets: int
    age_us: float

    def share(self, size_bytes: int, offsets: int, age_us: float) -> float:
        """How much of a full one; 1 or more: it is full."""
        return max(size_bytes / self.size_bytes, offsets / self.offsets, age_us / self.age_us)


@dataclass(frozen=True, slots=True)
class Extents:
    """A sealed segment, or neighbouring ones together. `size_bytes`: uncompressed."""

    size_bytes: int
    start: int
    end: int
    oldest_us: int
    newest_us: int

    def share(self, full: Full) -> float:
        return full.share(self.size_bytes, self.end - self.start, self.newest_us - self.oldest_us)

    def with_next(self, other: Extents) -> Extents:
        return Extents(self.size_bytes + other.size_bytes, self.start, other.end, self.oldest_us, other.newest_us)


def chosen(segments: Sequence[Extents], full: Full) -> range:
    """Which of these neighbours, the newest segments of a log, are merged next; an empty range: none."""
    shares = [one.share(full) for one in segments]
    start = 0
    while start < len(segments):
        end = _end_of_one(segments, shares, start, full)
        if end == len(segments):  # all that is left is not more than a full one: further neighbours may come
            return _of_same_share(shares, start)
        if end - start > 1:
            return range(start, end)
        start = end
    return range(0)


def _end_of_one(segments: Sequence[Extents], shares: Sequence[float], start: int, full: Full) -> int:
    """Where the neighbours end that fit into one with the first of them."""
    end, merged = start + 1, segments[start]
    while end < len(segments) and max(shares[start], shares[end]) <= _LARGE:
        merged = merged.with_next(segments[end])
        if merged.share(full) > 1:
            break
        end += 1
    return end


def _of_same_share(shares: Sequence[float], start: int) -> range:
    """Of the last ones."""
    windows = [(sum(shares[at : at + _MERGED_AT_ONCE]), at) for at in range(start, len(shares) - _MERGED_AT_ONCE + 1)]
    even = [
        (share, at)
        for share, at in windows
        if share <= _MERGED_EARLY and max(shares[at : at + _MERGED_AT_ONCE]) * _MERGED_AT_ONCE <= _UNEVEN * share
    ]
    if not even and len(shares) - start >= _MOST_WAITING:
        even = windows
    _, at = min(even, default=(0.0, len(shares)))
    return range(at, min(at + _MERGED_AT_ONCE, len(shares)))


class SmallSegments:
    """The sealed segments of one log. For one thread at a time, except `may_be_due`."""

    def __init__(self, chain: SegmentChain, compression: CompressedSizes) -> None:
        self._chain, self._compression = chain, compression
        self._settled: Segment | None = self._newest_sealed()

    @property
    def may_be_due(self) -> bool:
        """Whether a segment was sealed since nothing was to be merged. Touches no file."""
        return self._newest_sealed() is not self._settled

    def next(self, full: Full) -> list[SealedSegment]:
        """Neighbours that are to become one; empty: none are until a further segment is sealed.

        Raises:
            CorruptLog: the footer of one is damaged.
        """
        newest, found = self._newest_sealed(), self._candidates()
        extents = [self._extents(one, end, full) for one, end in found]
        parts = [found[at][0] for at in chosen(extents, full)]
        if not parts:
            self._settled = newest
        return parts

    def _newest_sealed(self) -> Segment | None:
        return next((one for one in reversed(self._chain.snapshot()) if isinstance(one, SealedSegment)), None)

    def _candidates(self) -> list[tuple[SealedSegment, int]]:
        """The newest sealed segments without others between them, and where each ends."""
        found: list[tuple[SealedSegment, int]] = []
        for following, segment in pairwise(reversed(self._chain.snapshot())):
            if isinstance(segment, SealedSegment):
                found.append((segment, following.base_offset))
            elif found:
                break
        return found[:_LOOKED_AT][::-1]

    def _extents(self, segment: SealedSegment, end: int, full: Full) -> Extents:
        """Its times are read where they decide. One that cannot be merged is as if it were full."""
        start = segment.base_offset
        if segment.is_unmergeable:
            return Extents(full.size_bytes, start, end, 0, 0)
        size_bytes = self._compression.uncompressed_bytes(start) or segment.size_bytes
        if full.share(size_bytes, end - start, 0) > _LARGE:
            return Extents(size_bytes, start, end, 0, 0)
        try:
            facts = segment.facts
        except (CorruptLog, OSError):
            segment.is_unmergeable = True
            raise
        return Extents(size_bytes, start, end, facts.oldest_us, facts.newest_us)


def write_merged(
    parts: Sequence[SealedSegment], stream_id: str, compression: str, pause: Callable[[], None]
) -> tuple[SealedSegment, int | None]:
    """Neighbours as one new file beside the first of them, durable and proven, and the size of its rows if they are
    compressed.

    Raises:
        CorruptLog: a batch is damaged, or missing; the parts stay as they are. OSError: as the system says.
    """
    first, end_offset = parts[0], parts[-1].end_offset
    try:
        written = write_beside(first, end_offset, merge(_batches_of(parts)), stream_id, compression, pause)
    except CorruptLog as error:
        bad = bisect_right([part.base_offset for part in parts], error.facts.get("start", 0)) - 1
        parts[max(0, bad)].is_unmergeable = True
        raise
    fresh = SealedSegment(written.path, first.base_offset, written.path.stat().st_size)
    fresh.kept_rows = sum(part.kept_rows for part in parts)
    fresh.kept_for = max(part.kept_for for part in parts)
    fresh.checked_erasures = min(part.checked_erasures for part in parts)
    return fresh, written.uncompressed_bytes


def _batches_of(parts: Sequence[SealedSegment]) -> Iterator[Stored]:
    """Raises CorruptLog: offsets between two of them have no batch, which would be covered by the next one."""
    expected = parts[0].base_offset
    for part in parts:
        fd, index = os.open(part.path, os.O_RDONLY), part.index
        try:
            for at in range(len(index)):
                if index.base_offsets[at] != expected:
                    raise damage(part.path, index[at], f"begins at another offset than {expected}")
                expected = index.end_offsets[at]
                yield stored(read_batch(fd, index[at], part.path))
        finally:
            os.close(fd)
            part.forget()
