"""What a follower that stands by has received, and its log does not have yet.

Theory of operation. Frames are copied as they come, into parts of up to 1 MiB or 0.25 s. Now and then all parts are
compared with the rows that the log has got since the last time (`compared`, in a thread), and what is stored is dropped
(`apply`). A row may come before its message, since NATS delivers to each subscriber by itself: it counts for 3 s.

What stays for 10 s was refused by the leader, or lost on the leader's connection; it is dropped as well. Where the
memory for all streams is used up, the oldest messages of the stream are dropped and counted.

Invariant: parts are in the order in which they were received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from natslog.ingest.columns import Column, Growing
from natslog.ingest.standby import Marks, Words, unmatched, words_of_frames
from natslog.node.writes.ingest_memory import IngestMemory, IngestStats
from natslog.wire.frames import Frames
from natslog.wire.layout import END, FRAME_COLUMNS, PAYLOAD, REPLY, START, SUBJECT

_PART_BYTES, _PART_S = 1024 * 1024, 0.25
_KEPT_S, _EARLY_S = 10.0, 3.0
_POSITIONS = [START, END, SUBJECT, REPLY, PAYLOAD]
_NO_WORDS = np.zeros(0, np.uint64)


def _size_of(frames: Frames) -> int:
    return int((frames.rows[:, END] - frames.rows[:, START]).sum()) + frames.rows.nbytes


class _Copies:
    """Frames one after another in a buffer of their own."""

    def __init__(self, begun_s: float) -> None:
        self.begun_s, self.size_bytes = begun_s, 0
        self._bytes, self._rows = Column(), Growing(np.int64, FRAME_COLUMNS)

    def add(self, frames: Frames, size_bytes: int) -> None:
        rows, before = frames.rows, self._bytes.rows
        starts = np.ascontiguousarray(rows[:, START])
        self._bytes.extend(frames.buffer, starts, rows[:, END] - starts)
        self._rows.extend(rows)
        moved = self._bytes.texts.offsets[before:-1] - starts
        self._rows.values[-len(rows) :, _POSITIONS] += moved[:, np.newaxis]
        self.size_bytes += size_bytes

    @property
    def frames(self) -> Frames:
        return Frames(self._bytes.texts.data, self._rows.values)


@dataclass(slots=True, eq=False)
class Part:
    """Frames to which no more are added. `words`: made where they are compared first."""

    frames: Frames
    size_bytes: int
    received_s: float
    words: Words | None = None

    def with_words(self) -> Words:
        if self.words is None:
            self.words = words_of_frames(self.frames)
        return self.words

    def only(self, marks: Marks) -> Part:
        """Copies of the marked frames."""
        frames = self.frames.select(marks)
        copies, size_bytes = _Copies(self.received_s), _size_of(frames)
        copies.add(frames, size_bytes)
        return Part(copies.frames, size_bytes, self.received_s, self.with_words()[marks])


@dataclass(frozen=True, slots=True)
class Compared:
    """Marks of the messages of these parts that are not stored, and of the rows whose messages have not come."""

    parts: Sequence[Part]
    are_left: Marks
    rows: Words
    are_early: Marks


class StandbyMessages:
    """Of one stream. In the event loop. Args: screen: selects what is kept of the frames of a part."""

    def __init__(self, memory: IngestMemory, stats: IngestStats, screen: Callable[[Frames], Frames]) -> None:
        self._memory, self._stats, self._screen = memory, stats, screen
        self._open: _Copies | None = None
        self._parts: deque[Part] = deque()
        self._early = _NO_WORDS
        self._early_since_s = np.zeros(0)

    @property
    def is_empty(self) -> bool:
        return self._open is None and not self._parts

    def add(self, frames: Frames, now_s: float) -> bool:
        """Copies them. False: messages were dropped for that, or these are, because there is no memory."""
        last, size_bytes, had_room = self._open, _size_of(frames), True
        if last is not None and (last.size_bytes >= _PART_BYTES or now_s - last.begun_s >= _PART_S):
            self._close()
        while not self._memory.take(size_bytes):
            had_room = False
            dropped = self._drop_first() if self._parts else frames
            self._stats.standby_dropped += len(dropped.rows)
            if dropped is frames:
                return False
        self._open = self._open or _Copies(now_s)
        self._open.add(frames, size_bytes)
        return had_room

    def comparison(self) -> Callable[[Words], Compared]:
        """Compares all that was received until now with the rows that are new; to be called in any thread, once."""
        self._close()
        parts, early = list(self._parts), self._early

        def compare(rows: Words) -> Compared:
            rows = np.concatenate((early, rows))
            are_left, are_early = unmatched(np.concatenate([_NO_WORDS, *(one.with_words() for one in parts)]), rows)
            return Compared(parts, are_left, rows, are_early)

        return compare

    def apply(self, found: Compared, now_s: float) -> None:
        """Drops what is stored, and what was kept for too long. Of the last comparison."""
        at, kept = 0, list[Part]()
        for part in found.parts:
            marks = found.are_left[at : at + len(part.frames.rows)]
            at += len(marks)
            if part not in self._parts:
                continue  # dropped meanwhile
            self._drop_first()
            if marks.any() and now_s - part.received_s < _KEPT_S:
                kept.append(part if marks.all() else part.only(marks))
                self._memory.charge(kept[-1].size_bytes)
        self._parts.extendleft(reversed(kept))
        since_s = np.full(len(found.rows), now_s)
        since_s[: len(self._early)] = self._early_since_s
        are_early = found.are_early & (now_s - since_s < _EARLY_S)
        self._early, self._early_since_s = found.rows[are_early], since_s[are_early]

    def take(self) -> list[Frames]:
        """All that is left, and what was received since; nothing is kept any more."""
        self._close()
        taken = [self._drop_first() for _ in range(len(self._parts))]
        self._early, self._early_since_s = _NO_WORDS, np.zeros(0)
        return [frames for frames in taken if len(frames.rows)]

    def _close(self) -> None:
        if (last := self._open) is not None:
            self._open = None
            self._parts.append(Part(self._screen(last.frames), last.size_bytes, last.begun_s))

    def _drop_first(self) -> Frames:
        part = self._parts.popleft()
        self._memory.give_back(part.size_bytes)
        return part.frames
