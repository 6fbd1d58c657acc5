"""The segments of one stream in offset order: sealed ones, full ones that wait to be sealed, and the active one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple, TypeAlias, TypeVar

from natslog.errors import CorruptLog
from natslog.log.recovery import Damage
from natslog.log.sealed import SealedSegment
from natslog.log.segment import ActiveSegment, open_segment

Segment: TypeAlias = ActiveSegment | SealedSegment
T = TypeVar("T")


class Positions(NamedTuple):
    """Where a log begins and ends, at one moment.

    `first_readable_offset`: where it begins for readers, which is at its first file, or where it was purged or limited
    up to. `high_watermark`: what lies below is committed.
    """

    log_start_offset: int
    first_readable_offset: int
    high_watermark: int
    log_end_offset: int


@dataclass(slots=True)
class SegmentChain:
    """Guarded by `lock` where the list changes. No file is opened, read or synced under it, and none is
    renamed but a repaired one: the event loop takes it too.

    Positions of the log are read without the lock: the list is changed by single steps (append, replace one, drop the
    first or last ones), and is never empty again. A reader works on a list of its own (`on_snapshot`), and opens
    files by `open`: a segment leaves the list before its file goes, and a file that takes the place of another is in
    the list before the other goes.

    Attributes:
        committed: the high watermark as the replica's role knows it; None where this is the only replica, so that what
            is on its stable storage is committed.
        missing_from: where the log was stored to begin, if its first segments are lost; else None.
        purged_below: what lies below was purged. limited_below: what lies below is past a limit of messages or bytes.
            Files go with whole segments; readers do not get these messages before.
    """

    segments: list[Segment] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    committed: int | None = None
    missing_from: int | None = None
    purged_below: int = 0
    limited_below: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def snapshot(self) -> list[Segment]:
        with self.lock:
            return list(self.segments)

    def is_current(self, segment: Segment) -> bool:
        return any(one is segment for one in self.snapshot())

    def open(self, segment: Segment) -> int:
        """The file to which its index belongs. Raises FileNotFoundError: it was dropped or replaced."""
        fd = open_segment(segment)
        if not self.is_current(segment):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "the segment was replaced", str(segment.path))
        return fd

    def on_snapshot(self, work: Callable[[list[Segment]], T]) -> T:
        """The result of `work` on the current segments; it is repeated if a file was removed meanwhile."""
        while True:
            segments = self.snapshot()
            try:
                return work(segments)
            except FileNotFoundError:
                if all(one is other for one, other in zip_longest(segments, self.snapshot())):
                    raise

    def replace(self, former: Sequence[Segment], fresh: Segment) -> None:
        """In the list: a segment in place of these neighbours."""
        with self.lock:
            at = next(at for at, one in enumerate(self.segments) if one is former[0])
            self.segments[at : at + len(former)] = [fresh]

    def replace_with_file(self, former: Sequence[SealedSegment], fresh: SealedSegment) -> None:
        """Also the file of the first one, whose name the new one gets: in one step, so that no reader opens the new
        file by the old index. Raises OSError: nothing was replaced.
        """
        with self.lock:
            os.replace(fresh.path, former[0].path)
            fresh.path = former[0].path
            self.replace(former, fresh)

    @property
    def last(self) -> Segment | None:
        return self.segments[-1] if self.segments else None

    @property
    def log_start_offset(self) -> int:
        return self.positions().log_start_offset

    def positions(self) -> Positions:
        """All of one moment: what needs several of them takes them once."""
        segments = self.segments
        start, end = (segments[0].base_offset, segments[-1].end_offset) if segments else (0, 0)
        if self.missing_from is not None:
            start = self.missing_from
        high_watermark = end if self.committed is None else min(self.committed, end)
        first_readable = max(start, min(max(self.purged_below, self.limited_below), high_watermark))
        return Positions(start, first_readable, high_watermark, end)

    @property
    def first_readable_offset(self) -> int:
        return self.positions().first_readable_offset

    @property
    def log_end_offset(self) -> int:
        return self.segments[-1].end_offset if self.segments else 0

    @property
    def high_watermark(self) -> int:
        end = self.segments[-1].end_offset if self.segments else 0
        return end if self.committed is None else min(self.committed, end)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in list(self.segments))

    @property
    def has_unsealed(self) -> bool:
        """Whether a full segment waits to be sealed. The oldest is sealed first, so the newest of them is checked."""
        newest_full = self.segments[-2] if len(self.segments) > 1 else None
        return isinstance(newest_full, ActiveSegment) and not newest_full.unsealable

    @property
    def unsealed(self) -> list[ActiveSegment]:
        """The unsealed segments at the end, newest first: the active one, and full ones."""
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


def damage_error(damages: list[Damage]) -> CorruptLog:
    first = damages[0]
    return CorruptLog(
        "; ".join(map(str, damages))
        + ". Reads outside the damaged part continue, and writes are refused: restore the file from a replica or a "
        "copy (`natslog verify` checks it)",
        file=str(first.path),
        position=first.position,
        start=first.start_offset,
        end=first.end_offset,
    )
