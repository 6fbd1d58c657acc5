"""Which segments are past their limits: pure arithmetic; a segment's newest message is read only when it decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class RetainedSegment(Protocol):
    """What retention reads."""

    @property
    def base_offset(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def max_timestamp_us(self) -> int: ...


def expired_count(
    droppable: Sequence[RetainedSegment],
    *,
    kept_bytes: int,
    log_end_offset: int,
    now_us: int,
    most_by_age: int,
    max_age_s: float | None,
    max_bytes: int | None,
    max_messages: int | None,
) -> int:
    """How many of the oldest segments go. Limits combine: a segment goes as soon as one of them says so.

    Args:
        droppable: oldest first; only whole segments are dropped.
        kept_bytes: of the others; counted towards `max_bytes`.
        now_us: stream time; a segment's age counts from its newest message.
        most_by_age: so many go at most because of their age; a limit of bytes or messages knows no bound.
    """
    by_age = 0
    total_bytes = kept_bytes + sum(segment.size_bytes for segment in droppable)
    for count, segment in enumerate(droppable):
        too_big = max_bytes is not None and total_bytes > max_bytes
        too_many = max_messages is not None and log_end_offset - segment.base_offset > max_messages
        if not (too_big or too_many):
            too_old = max_age_s is not None and segment.max_timestamp_us < now_us - max_age_s * 1_000_000
            if not too_old or by_age == most_by_age:
                return count
            by_age += 1
        total_bytes -= segment.size_bytes
    return len(droppable)
