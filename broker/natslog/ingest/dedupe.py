"""Deduplication by `Nats-Msg-Id`: a publisher's retry is stored once if it arrives within the stream's window.

Theory of operation. Stream time is divided into periods as long as the window, counted from its zero. Ids are 128-bit
hashes in two open-addressing tables, with the offsets and timestamps of their messages: those stored in the present
period, and those of the one before. A lookup asks both, and compares the timestamp with the window; an insert goes to
the present one; when a period ends, its table becomes the one before.

Invariants. An id is found while its message is younger than the window, and not after it. It is inserted only after its
row is on stable storage. Which ids are found depends on the stored rows, their timestamps and the timestamp that the
message asked for would get, and on nothing else: a replica that fills its window from the log gets the same results as
the leader that stored the rows. Memory is bounded: at `MAX_IDS` a table is full and becomes the one before early; then
the window is shorter than configured (`known_from_us`).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from natslog.wire import native
from natslog.wire.message_ids import MAX_IDS, Ids

Offsets = npt.NDArray[np.int64]
Times = npt.NDArray[np.int64]

_SMALLEST_SLOTS = 1024

NEW = -1
"""`DedupeWindow.find`: an id that is not stored, or no id."""
REPEATED = -2
"""`DedupeWindow.find`: an id that stands earlier in the same call."""


class _Table:
    """Args: first_us: of the oldest id that may be in it."""

    def __init__(self, period: int, first_us: int = 0) -> None:
        self.period = period
        self.first_us = first_us
        self.slots = np.zeros((0, 2), np.uint64)
        self.offsets = np.zeros(0, np.int64)
        self.times = np.zeros(0, np.int64)
        self.count = 0

    def find(self, ids: Ids, oldest_us: int, found: Offsets) -> None:
        if self.count:
            native.find_ids(self.slots, self.offsets, self.times, oldest_us, ids, found)

    def insert(self, ids: Ids, offsets: Offsets, times: Times, window_us: int) -> None:
        if 2 * (self.count + len(ids)) > len(self.slots):
            self._grow(self.count + len(ids))
        self.count += native.insert_ids(self.slots, self.offsets, self.times, window_us, ids, offsets, times)

    def emptied(self, period: int, first_us: int) -> _Table:
        """An empty table in the same memory: to fill it with zeros costs less than new pages from the system."""
        table = _Table(period, first_us)
        self.slots.fill(0)
        table.slots, table.offsets, table.times = self.slots, self.offsets, self.times
        return table

    def _grow(self, count: int) -> None:
        """Room for twice as many; at most half of the slots are ever used."""
        size = max(_SMALLEST_SLOTS, 1 << (4 * count - 1).bit_length())
        old = self.slots, self.offsets, self.times
        self.slots, self.offsets, self.times = np.zeros((size, 2), np.uint64), *np.zeros((2, size), np.int64)
        native.insert_ids(self.slots, self.offsets, self.times, 0, *old)


class DedupeWindow:
    """Remembers each id for `window_s`. Times are stream time.

    Args:
        window_s: zero switches deduplication off.

    Attributes:
        known_from_us: ids of older messages may have been forgotten, although the window asks for them; 0: none was.
    """

    def __init__(self, window_s: float) -> None:
        self.window_us = int(window_s * 1_000_000)
        self.known_from_us = 0
        self._present = _Table(0)
        self._before = _Table(-1)

    def find(self, ids: Ids, now_us: int) -> Offsets:
        """The offset each id is stored at, `NEW`, or `REPEATED` for the later ones of an id that is new here.

        Args:
            now_us: the timestamp that these messages get.
        """
        found = np.full(len(ids), NEW, np.int64)
        if not self.window_us:
            return found
        self._turn(now_us)
        oldest_us = now_us - self.window_us + 1
        self._before.find(ids, oldest_us, found)
        self._present.find(ids, oldest_us, found)
        slots = np.full(1 << max(4, (2 * len(ids)).bit_length()), NEW, np.int64)
        native.mark_repeated(ids, found, slots, NEW, REPEATED)
        return found

    def remember(self, ids: Ids, offsets: Offsets, timestamp_us: int) -> None:
        """Of rows that are stored, with this timestamp; not older than any before."""
        if self.window_us and len(ids):
            self._remember(ids, offsets, np.full(len(ids), timestamp_us, np.int64))

    def remember_stored(self, ids: Ids, offsets: Offsets, timestamps_us: Times) -> None:
        """Of stored rows, which may be of several periods; oldest first."""
        if not self.window_us or not len(ids):
            return
        ends = np.flatnonzero(np.diff(timestamps_us // self.window_us)) + 1
        for start, end in pairwise([0, *ends.tolist(), len(timestamps_us)]):
            self._remember(ids[start:end], offsets[start:end], timestamps_us[start:end])

    def shortened_to_us(self, now_us: int) -> int | None:
        """How long ids are remembered now, where that is less than the window: more than `MAX_IDS` were stored within
        it, or some could not be read. None: for the whole window.
        """
        known_us = now_us - self.known_from_us
        return known_us if known_us < self.window_us else None

    def _remember(self, ids: Ids, offsets: Offsets, times: Times) -> None:
        """All of one period."""
        self._turn(int(times[0]))
        self._present.insert(ids, offsets, times, self.window_us)

    def _turn(self, now_us: int) -> None:
        present, period = self._present, now_us // self.window_us
        if period > present.period:
            self._before = present if period == present.period + 1 else _Table(period - 1)
            self._present = _Table(period, now_us)
        elif present.count >= MAX_IDS:
            self.known_from_us = present.first_us
            self._before, self._present = present, self._before.emptied(present.period, now_us)
