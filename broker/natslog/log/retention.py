"""Which segments are too old: pure arithmetic; a segment's newest message is read only when it decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class RetainedSegment(Protocol):
    """What retention reads."""

    @property
    def max_timestamp_us(self) -> int: ...


def expired_count(droppable: Sequence[RetainedSegment], *, now_us: int, most: int, max_age_s: float | None) -> int:
    """How many of the oldest segments go.

    Args:
        droppable: oldest first; only whole segments are dropped.
        now_us: stream time; a segment's age counts from its newest message.
        most: so many go at most, so that a wrong time does not remove everything at once.
    """
    if max_age_s is None:
        return 0
    for count, segment in enumerate(droppable[:most]):
        if segment.max_timestamp_us >= now_us - max_age_s * 1_000_000:
            return count
    return min(most, len(droppable))
