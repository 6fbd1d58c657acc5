"""Which messages of a log are on which subject.

Theory of operation. The index consists of parts (`subject_part`). Each sealed segment has one, in a file beside it; the
messages behind them have parts in memory, made of the messages since the last lookup, and joined so that there are
few. The index is made when it is used for the first time, which reads the subjects of the whole log. From then on,
also after a restart, maintenance makes the part of each segment that is sealed, so that a lookup reads little.

A lookup searches one part after the other, and leaves out what readers do not get. Messages count up to a high
watermark, so that what is found is of one moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.errors import OffsetOutOfRange
from natslog.log.applied_rules import StoredRows
from natslog.log.chain import Segment, SegmentChain
from natslog.log.removed import Hidden, HiddenThen
from natslog.log.sealed import SealedSegment
from natslog.log.segment import SUBJECTS_SUFFIX
from natslog.log.subject_counts import KeptCounts, KnownCounts, SubjectCounts, combined
from natslog.log.subject_part import SubjectPart, file_identity, newest_visible, oldest_visible, text_at
from natslog.log.visibility import Visibility
from natslog.log_events import event
from natslog.wire.outgoing import TextBuffers, taken

logger = logging.getLogger("natslog.log")

_JOINED = 2
"""A part in memory is joined with the next one, unless it has more than so many times as many messages."""
_TRIED = 5
_FEW_BYTES = 8 * 1024 * 1024
"""Of messages that are read for the index by those who do not have the time to read many."""

Found = TypeVar("Found")
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class VisibleState:
    """The visible messages at one time: those in `[start, end)` that are not hidden."""

    start: int
    end: int
    hidden: Hidden

    @property
    def key(self) -> tuple[int, int, int]:
        """The same at two times if the same messages are visible: sets of hidden offsets only grow."""
        return self.end, self.start, self.hidden.count(self.start, self.end)


@dataclass(frozen=True, slots=True)
class OnSubject:
    """The visible messages on a subject: how many, and the offsets of the first and the last one (-1: none)."""

    count: int
    first: int
    last: int
    state: VisibleState


class SubjectIndex:
    """See the module. Thread-safe; calls block.

    Args:
        rows: reads the log's rows. kept_counts: those of all logs of the broker.
    """

    def __init__(
        self, folder: Path, chain: SegmentChain, visibility: Visibility, rows: StoredRows, kept_counts: KeptCounts
    ) -> None:
        self._chain, self._visibility, self._rows = chain, visibility, rows
        self._lock = threading.Lock()
        self._sealed: dict[int, tuple[Segment, SubjectPart]] = {}  # by base offset
        self._recent: dict[int, list[SubjectPart]] = {}  # by base offset of the segment
        self._covered: tuple[list[Segment], list[SubjectPart]] = ([], [])  # all segments but the last, if sealed
        self._kept_counts = kept_counts
        self._version = 0  # changes where what was counted before may be kept no more
        self.is_used = any(folder.glob(f"*{SUBJECTS_SUFFIX}"))

    # ---- lookups ----

    def on_subject(self, subject: str) -> OnSubject:
        """Raises CorruptLog: a part of the log is damaged."""
        text = subject.encode()

        def look_up(parts: Sequence[SubjectPart], state: VisibleState) -> OnSubject:
            count, first, last = 0, -1, -1
            for part in parts:
                offsets = part.offsets_of(text, state.start, state.end)
                if not len(offsets):
                    continue
                if state.hidden.count(int(offsets[0]), int(offsets[-1]) + 1):
                    offsets = offsets[~state.hidden.marks(offsets)]
                if len(offsets):
                    count, last = count + len(offsets), int(offsets[-1])
                    first = first if first >= 0 else int(offsets[0])
            return OnSubject(count, first, last, state)

        return self._at_one_moment(look_up)

    def last(self, subject: str, end: int | None = None) -> int:
        """The offset of the newest visible message on a subject (below `end`, where it is given); -1 if there is none.
        Raises as `on_subject`.
        """
        text = subject.encode()

        def look_up(parts: Sequence[SubjectPart], state: VisibleState) -> int:
            high = state.end if end is None else min(end, state.end)
            found = (newest_visible(one.offsets_of(text, state.start, high), state.hidden) for one in parts[::-1])
            return next((one for one in found if one >= 0), -1)

        return self._at_one_moment(look_up)

    def last_of(self, subjects: TextBuffers) -> Offsets:
        """`last` of many subjects at once. Raises as `on_subject`."""

        def look_up(parts: Sequence[SubjectPart], state: VisibleState) -> Offsets:
            found = np.full(len(subjects[0]) - 1, -1, np.int64)
            left, texts = np.arange(len(found)), subjects
            for part in parts[::-1]:
                if not len(left) or part.end <= state.start:
                    break
                newest = part.last_of(texts, state.start, state.end)
                for row in np.flatnonzero(state.hidden.marks_of(newest)).tolist():
                    offsets = part.offsets_of(text_at(texts, row), state.start, state.end)
                    newest[row] = newest_visible(offsets, state.hidden)
                found[left] = newest
                if (newest >= 0).any():
                    left = left[newest < 0]
                    texts = taken(subjects, left)
            return found

        return self._at_one_moment(look_up)

    def next(self, subject: str, start: int) -> int:
        """The offset of the first visible message on a subject at or after `start`; -1 if there is none. Raises as
        `on_subject`.
        """
        text = subject.encode()

        def look_up(parts: Sequence[SubjectPart], state: VisibleState) -> int:
            low = max(start, state.start)
            following = (one for one in parts if one.end > low)
            found = (oldest_visible(one.offsets_of(text, low, state.end), state.hidden) for one in following)
            return next((one for one in found if one >= 0), -1)

        return self._at_one_moment(look_up)

    def counts(self) -> tuple[VisibleState, SubjectCounts]:
        """All subjects of the messages that are visible now. Raises as `on_subject`."""
        version, state = self._version, self.visible_state()
        return state, self._counts_of(self._parts(state.end), state, version)

    def counts_at_hand(self, deadline_s: float) -> SubjectCounts | None:
        """As `counts`, if hardly any message has to be read for it. None: parts of the index are missing or are being
        made, or were not loaded from their files at `deadline_s` of `time.monotonic`; the next call continues.
        """
        version, state = self._version, self.visible_state()
        if not self._lock.acquire(blocking=False):
            return None
        try:
            segments = self._chain.snapshot()
            if not self._are_at_hand(segments, state.end, deadline_s):
                return None
            self.is_used, parts = True, self._parts_of(segments, state.end)
        except (OffsetOutOfRange, FileNotFoundError):  # retention has removed a segment meanwhile
            return None
        finally:
            self._lock.release()
        return self._counts_of(parts, state, version)

    def _counts_of(self, parts: Sequence[SubjectPart], state: VisibleState, version: int) -> SubjectCounts:
        """What was counted last is continued, if since then only messages were added.

        Args:
            version: before the parts were looked up.
        """
        known, begin = self._kept_counts.of(self), state.start
        if known is not None and known.still_hold(state.start, state.end, state.hidden):
            if known.counts.end == state.end:
                return known.counts
            begin = known.counts.end
        else:
            known = None
        fresh = (one.counts(state.hidden, begin, state.end) for one in parts if one.end > begin)
        counts = SubjectCounts(combined(fresh if known is None else chain([known.counts.table], fresh)), state.end)
        known = KnownCounts(state.start, state.hidden.count(state.start, state.end), counts)
        with self._lock:
            if version == self._version:
                self._kept_counts.keep(self, known)
        return counts

    def number(self) -> tuple[VisibleState, int]:
        """How many subjects the messages have that are visible now. Raises as `on_subject`."""
        version, state = self._version, self.visible_state()
        if all(rule.per_subject == 1 for rule in self._visibility.rules):
            return state, state.end - state.start - state.hidden.count(state.start, state.end)
        return state, len(self._counts_of(self._parts(state.end), state, version).table)

    def close(self) -> None:
        with self._lock:
            self._version += 1
            self._kept_counts.drop(self)

    def visible_state(self) -> VisibleState:
        """Which messages are visible now, whatever happens later."""
        end = self._chain.high_watermark
        hidden, end = self._visibility.hidden_as_of(end)
        return VisibleState(self._chain.first_readable_offset, end, HiddenThen(hidden))

    def _at_one_moment(self, look_up: Callable[[Sequence[SubjectPart], VisibleState], Found]) -> Found:
        """With what is hidden now, which is not copied; again where newer messages have hidden more meanwhile."""
        for _ in range(_TRIED):
            end = self._chain.high_watermark
            state = VisibleState(self._chain.first_readable_offset, end, self._visibility.removed_below(end))
            found = look_up(self._parts(end), state)
            if not self._visibility.has_rules or self._visibility.applied <= end:
                return found
        state = self.visible_state()
        return look_up(self._parts(state.end), state)

    # ---- parts ----

    def keep_up(self) -> None:
        """For maintenance: the parts of sealed segments, if the index was ever used. Raises as `on_subject`."""
        if self.is_used:
            with self._lock:
                self._of_sealed(self._chain.snapshot())

    def forget(self, path: Path) -> None:
        """This segment file was written again: nothing of the former one is stored any more. Raises OSError."""
        with self._lock:
            path.with_suffix(SUBJECTS_SUFFIX).unlink(missing_ok=True)

    def cut(self, end_offset: int) -> None:
        """Messages from this offset on were cut off: others may take their place."""
        with self._lock:
            for parts in self._recent.values():
                while parts and parts[-1].end > end_offset:
                    parts.pop()
            self._version += 1
            self._kept_counts.drop(self)

    def merge(self, merged: Sequence[Segment], replace: Callable[[], Segment]) -> None:
        """The parts of these neighbours become one, if all are known. `replace` puts a segment in their place, and
        returns it.
        """
        with self._lock:
            known = [self._sealed.get(segment.base_offset) for segment in merged]
            parts = [
                one[1] for one, segment in zip(known, merged, strict=True) if one is not None and one[0] is segment
            ]
            whole = SubjectPart.joined(parts) if len(parts) == len(merged) else None
            fresh = replace()
            if whole is not None:
                self._sealed[fresh.base_offset] = fresh, self._kept(fresh.path, whole, file_identity(fresh.path))

    def _parts(self, end: int) -> list[SubjectPart]:
        """Of the messages below `end`, and perhaps of some behind it."""
        self.is_used = True
        for tried in range(_TRIED):
            try:
                with self._lock:
                    return self._parts_of(self._chain.snapshot(), end)
            except (OffsetOutOfRange, FileNotFoundError):  # retention has removed a segment meanwhile
                if tried == _TRIED - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _parts_of(self, segments: list[Segment], end: int) -> list[SubjectPart]:
        parts = list(self._of_sealed(segments))
        for segment, following in pairwise([*segments[len(parts) :], None]):
            assert segment is not None, "only the last one is missing"
            parts += self._of_unsealed(segment, end if following is None else min(end, following.base_offset))
        return parts

    def _of_sealed(self, segments: list[Segment]) -> list[SubjectPart]:
        """Of the segments before the first one that is not sealed."""
        count = _sealed_count(segments)
        if self._covered[0] != segments[:count]:
            sealed = [self._part_of(*one) for one in _with_ends(segments, count)]
            self._sealed = {segment.base_offset: (segment, part) for segment, part in sealed}
            self._covered = segments[:count], [part for _, part in sealed]
            bases = {one.base_offset for one in segments[count:]}
            self._recent = {base: parts for base, parts in self._recent.items() if base in bases}
        return self._covered[1]

    def _are_at_hand(self, segments: list[Segment], end: int, deadline_s: float) -> bool:
        """Under the lock. Loads parts of sealed segments from their files."""
        count = _sealed_count(segments)
        if self._covered[0] != segments[:count]:
            for segment, part_end in _with_ends(segments, count):
                known = self._sealed.get(segment.base_offset)
                if known is not None and known[0] is segment:
                    continue
                if time.monotonic() > deadline_s:
                    return False
                if (part := SubjectPart.stored(segment.path, segment.base_offset, part_end)) is None:
                    return False
                self._sealed[segment.base_offset] = segment, part
        missing_bytes = 0.0
        for segment in segments[count:]:
            start, upto = segment.base_offset, min(end, segment.end_offset)
            parts = self._recent.get(start)
            missing = upto - (parts[-1].end if parts else start)
            missing_bytes += segment.size_bytes * max(0, missing) / max(1, segment.end_offset - start)
        return missing_bytes <= _FEW_BYTES

    def _part_of(self, segment: Segment, end: int) -> tuple[Segment, SubjectPart]:
        known = self._sealed.get(segment.base_offset)
        if known is not None and known[0] is segment:
            return known
        start, path = segment.base_offset, segment.path
        part = SubjectPart.stored(path, start, end)
        if part is not None:
            return segment, part
        identity = file_identity(path)  # before it is read: it may be written again meanwhile
        recent = self._recent.get(start, [])
        if recent and recent[-1].end == end and not self._visibility.removed.count(start, end):
            made = SubjectPart.joined(recent)
        else:
            made = SubjectPart.of_rows(start, end, self._visible_rows(start, end))
        return segment, self._kept(path, made, identity)

    @staticmethod
    def _kept(path: Path, made: SubjectPart, identity: bytes) -> SubjectPart:
        """In a file beside the segment, if that is possible."""
        try:
            made.store(path, identity)
        except OSError as error:
            logger.warning(
                f"{path}: the index of its subjects is kept in memory: {error}",
                extra=event("log.index_in_memory", path=path),
            )
        return SubjectPart.stored(path, made.start, made.end) or made

    def _visible_rows(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """What is hidden now stays hidden: it need not be in a part."""
        removed = self._visibility.removed
        for _, batch in self._rows(start, end):
            if removed.count(batch.column("offset")[0].as_py(), batch.column("offset")[-1].as_py() + 1):
                batch = batch.filter(pa.array(~removed.marks(batch.column("offset").to_numpy())))
            if len(batch):
                yield batch

    def _of_unsealed(self, segment: Segment, end: int) -> list[SubjectPart]:
        """In memory, up to `end` at least."""
        start = segment.base_offset
        parts = self._recent.setdefault(start, [])
        while parts and parts[-1].end > max(end, segment.end_offset):  # the log was cut
            parts.pop()
        known = parts[-1].end if parts else start
        if known < end:
            parts.append(SubjectPart.of_rows(known, end, self._visible_rows(known, end)))
            while len(parts) > 1 and len(parts[-2]) <= _JOINED * len(parts[-1]):
                parts[-2:] = [SubjectPart.joined(parts[-2:])]
        return parts


def _sealed_count(segments: list[Segment]) -> int:
    """Of those before the first one that is not sealed."""
    return next((at for at, one in enumerate(segments) if not isinstance(one, SealedSegment)), len(segments))


def _with_ends(segments: list[Segment], count: int) -> Iterator[tuple[Segment, int]]:
    """The first ones, each with the offset where it ends."""
    for segment, following in islice(pairwise([*segments, None]), count):
        assert segment is not None, "only the last one is missing"
        yield segment, segment.end_offset if following is None else following.base_offset
