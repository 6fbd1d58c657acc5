"""The segments of one stream in offset order: sealed ones, full ones that wait to be sealed, the one taking commits."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from natslog.errors import CorruptLog
from natslog.log.recovery import Damage
from natslog.log.sealed import SealedSegment
from natslog.log.segment import ActiveSegment

Segment: TypeAlias = ActiveSegment | SealedSegment


@dataclass(slots=True)
class SegmentChain:
    """Guarded by `lock` where the list changes or files are opened by what it says.

    Where the log stands is read without the lock, by the event loop too, so that nobody waits for a disk to learn it:
    the list is changed by single steps (append, replace one, drop the first or last ones), and is never empty again.

    Attributes:
        committed: the high watermark as the replica's role knows it; None where this is the only replica, so that what
            is on its stable storage is committed.
    """

    segments: list[Segment] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    committed: int | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def last(self) -> Segment | None:
        return self.segments[-1] if self.segments else None

    @property
    def log_start_offset(self) -> int:
        return self.segments[0].base_offset if self.segments else 0

    @property
    def log_end_offset(self) -> int:
        return self.segments[-1].end_offset if self.segments else 0

    @property
    def high_watermark(self) -> int:
        end = self.log_end_offset
        return end if self.committed is None else min(self.committed, end)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in list(self.segments))

    @property
    def has_unsealed(self) -> bool:
        """Whether a full segment waits to be sealed. The oldest goes first, so the newest of them tells."""
        newest_full = self.segments[-2] if len(self.segments) > 1 else None
        return isinstance(newest_full, ActiveSegment) and not newest_full.unsealable

    @property
    def unsealed(self) -> list[ActiveSegment]:
        """The unsealed segments at the end, newest first: the one taking commits, and full ones."""
        found = []
        for segment in reversed(self.segments):
            if not isinstance(segment, ActiveSegment):
                break
            found.append(segment)
        return found

    def oldest_unsealed(self) -> ActiveSegment | None:
        """The full segment to be sealed next; the last one takes commits, and what is not committed may yet be cut."""
        with self.lock:
            unsealed = (segment for segment in self.segments[:-1] if isinstance(segment, ActiveSegment))
            oldest = next((segment for segment in unsealed if not segment.unsealable), None)
            return oldest if oldest is not None and oldest.end_offset <= self.high_watermark else None

    def droppable_prefix(self) -> list[Segment]:
        """What retention may take: sealed segments (and those that cannot be) at the start, never the log's last one,
        because its end must stay known.
        """
        prefix: list[Segment] = []
        with self.lock:
            for segment, following in pairwise(self.segments):
                if isinstance(segment, ActiveSegment) and not segment.unsealable:
                    break
                if following.base_offset > self.high_watermark:
                    break
                prefix.append(segment)
        return prefix


def damage_error(damages: list[Damage]) -> CorruptLog:
    first = damages[0]
    return CorruptLog(
        "; ".join(map(str, damages))
        + ". Reads go on around it, writes are refused: restore the file from a replica or "
        "a copy (`natslog verify` checks it)",
        file=str(first.path),
        position=first.position,
        start=first.start_offset,
        end=first.end_offset,
    )
