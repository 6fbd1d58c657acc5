"""The messages that a consumer has delivered and that are not acked, as columns.

Theory of operation. Rows ascend by stream sequence, since messages are delivered for the first time in that order. New
rows are appended; an ack marks its row as gone; rows that are gone at the start are passed over, and the columns are
copied together when more than half of them is gone. So a batch of acks costs a binary search each, in numpy, whatever
the number of pending messages. Messages that are to be delivered again are in a queue of sequences; a row is marked
while it is in there, and entries of rows without the mark are stale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from natslog.wire import native

Longs = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]

_LEAST_ROOM = 16
_COMPACT_FROM = 1024
_MOST_PIECES = 1000
_NONE = np.empty(0, np.int64)

SEQ, DELIVERED_AS, TIME_US, REDELIVERED = range(4)
"""Columns: the stream sequence; the consumer sequence of the first delivery; when it was delivered last; how often it
was delivered again.
"""
COLUMNS = 4

_NO_COLUMNS = np.empty((COLUMNS, 0), np.int64)
_NO_MARKS = np.empty(0, np.bool_)
"""Of all consumers that wait for no ack: each would take memory for empty ones."""


class Pending:
    """See the module. Positions are valid until rows are appended or taken away."""

    __slots__ = (
        "_alive",
        "_columns",
        "_count",
        "_end",
        "_fresh",
        "_queue",
        "_queued",
        "_start",
    )

    def __init__(self) -> None:
        self._columns = _NO_COLUMNS
        self._alive = self._queued = _NO_MARKS
        self._start = self._end = 0
        self._count = 0
        self._queue = _NONE
        self._fresh: list[Longs] = []  # what follows in the queue, in pieces

    def __len__(self) -> int:
        return self._count

    # ---- rows ----

    @property
    def redelivered(self) -> int:
        """How many of them were delivered more than once."""
        return int(np.count_nonzero(self.column(REDELIVERED) > 0))

    def positions(self) -> Longs:
        """Of all rows."""
        return np.flatnonzero(self._alive[self._start : self._end]) + self._start

    def column(self, which: int) -> Longs:
        """Of all rows."""
        window = self._columns[which, self._start : self._end]
        return window if self._count == len(window) else window[self._alive[self._start : self._end]]

    def at(self, which: int, positions: Longs) -> Longs:
        found: Longs = self._columns[which, positions]
        return found

    def first(self) -> tuple[int, int]:
        """Stream sequence and consumer sequence of the first row."""
        row = self._columns[:, self._start]
        return int(row[SEQ]), int(row[DELIVERED_AS])

    def append(self, seqs: Longs, delivered_as: Longs, time_us: int, redelivered: Longs | None = None) -> None:
        """Delivered for the first time: above all that was delivered before."""
        count = len(seqs)
        if not count:
            return
        self._make_room(count)
        into = slice(self._end, self._end + count)
        self._columns[SEQ, into], self._columns[DELIVERED_AS, into] = seqs, delivered_as
        self._columns[TIME_US, into] = time_us
        self._columns[REDELIVERED, into] = 0 if redelivered is None else redelivered
        self._alive[into], self._queued[into] = True, False
        self._end += count
        self._count += count

    def find(self, seqs: Longs) -> Longs:
        """The positions of these sequences; -1 where a sequence is not pending."""
        window = self._columns[SEQ, self._start : self._end]
        if not len(window):
            return np.full(len(seqs), -1, np.int64)
        at = np.minimum(np.searchsorted(window, seqs), len(window) - 1)
        found = (window[at] == seqs) & self._alive[at + self._start]
        return np.where(found, at + self._start, -1)

    def position_of(self, seq: int) -> Longs | None:
        """The position of one sequence; None if it is not pending."""
        at = self.find(np.array([seq], np.int64))
        return at if at[0] >= 0 else None

    def found(self, seqs: Longs) -> Longs:
        """The positions of those of these sequences that are pending, each once and ascending."""
        at = np.empty(len(seqs), np.int64)
        wanted = np.ascontiguousarray(seqs)
        count, ascends = native.find_rows(wanted, self._columns, self._alive, self._start, self._end, at)
        return at[:count] if ascends else np.unique(at[:count])

    def remove(self, positions: Longs) -> None:
        """Each of them once."""
        self.take(positions, 0)

    def take(self, positions: Longs, follows: int) -> tuple[Longs, bool]:
        """Removes these rows, each of which is named once. Returns their sequences, and whether one of them has the
        consumer sequence `follows`.
        """
        seqs = np.empty(len(positions), np.int64)
        start, is_among = native.take_rows(
            positions, self._columns, self._alive, self._queued, self._start, self._end, follows, seqs
        )
        self._count -= len(positions)
        self._forget(start)
        return seqs, bool(is_among)

    def _forget(self, start: int) -> None:
        """Rows that are gone: `start` is the first that is left."""
        if not self._count:
            self._start = self._end = 0
            self._queue, self._fresh = _NONE, []
            if len(self._alive) > _COMPACT_FROM:
                self._columns = _NO_COLUMNS
                self._alive = self._queued = _NO_MARKS
            return
        self._start = start
        gone = self._end - self._start - self._count
        if gone > self._count + _COMPACT_FROM:
            self._copy_together(0)

    def upto(self, seq: int) -> Longs:
        """The positions of the rows up to a stream sequence."""
        end = int(np.searchsorted(self._columns[SEQ, self._start : self._end], seq, "right")) + self._start
        return np.flatnonzero(self._alive[self._start : end]) + self._start

    def touch(self, positions: Longs, time_us: int | Longs) -> None:
        """They count as delivered at this time."""
        self._columns[TIME_US, positions] = time_us

    def count_again(self, positions: Longs, redelivered: Longs) -> None:
        self._columns[REDELIVERED, positions] = redelivered

    def _make_room(self, count: int) -> None:
        if self._end + count > len(self._alive):
            self._copy_together(count)

    def _copy_together(self, more: int) -> None:
        kept = self.positions()
        room = max(_LEAST_ROOM, 2 * (len(kept) + more))
        columns = np.empty((COLUMNS, room), np.int64)
        alive, queued = np.zeros(room, np.bool_), np.zeros(room, np.bool_)
        columns[:, : len(kept)] = self._columns[:, kept]
        alive[: len(kept)], queued[: len(kept)] = True, self._queued[kept]
        self._columns, self._alive, self._queued = columns, alive, queued
        self._start, self._end = 0, len(kept)

    # ---- redelivery ----

    @property
    def has_queued(self) -> bool:
        return bool(self._queued[self._start : self._end].any()) if len(self._queue) or self._fresh else False

    @property
    def queued(self) -> int:
        """How many rows are to be delivered again."""
        has_entries = len(self._queue) or self._fresh
        return int(np.count_nonzero(self._queued[self._start : self._end])) if has_entries else 0

    def queue(self, positions: Longs) -> None:
        """They are to be delivered again, in this order, after those that are to be already."""
        fresh = positions[~self._queued[positions]]
        if len(fresh):
            self._queued[fresh] = True
            self._fresh.append(self._columns[SEQ, fresh])
            if len(self._fresh) > _MOST_PIECES:
                self._join()

    def unqueue(self, positions: Longs) -> None:
        """They are not to be delivered again now."""
        if self._queued[positions].any():
            self._queued[positions] = False
            self._join()
            self._queue = self._queue[~np.isin(self._queue, self._columns[SEQ, positions])]

    def next_queued(self, count: int) -> Longs:
        """The sequences of the first rows to be delivered again; they stay in the queue."""
        self._join()
        queue = self._queue[: 2 * count + _LEAST_ROOM]
        found = self._still_queued(queue)
        if len(found) < count and len(self._queue) > len(queue):
            self._queue = self._still_queued(self._queue)
            found = self._queue
        return found[:count]

    def take_queued(self, seqs: Longs) -> None:
        """These are being delivered."""
        at = self.find(seqs)
        at = at[at >= 0]
        self._queued[at] = False
        self._join()
        self._queue = self._queue[~np.isin(self._queue, seqs)] if len(self._queue) else self._queue

    def _join(self) -> None:
        if self._fresh:
            self._queue, self._fresh = np.concatenate((self._queue, *self._fresh)), []

    def _still_queued(self, queue: Longs) -> Longs:
        at = self.find(queue)
        found: Longs = queue[(at >= 0) & self._queued[at]]
        return found

    def waiting_positions(self) -> Longs:
        """Of the rows that are not to be delivered again yet."""
        window = slice(self._start, self._end)
        return np.flatnonzero(self._alive[window] & ~self._queued[window]) + self._start

    # ---- as it is stored ----

    def to_columns(self) -> Any:
        """The columns of all rows, of shape (4, rows)."""
        return self._columns[:, self.positions()]

    @classmethod
    def of_columns(cls, columns: Any) -> Pending:
        found = cls()
        count = columns.shape[1]
        found._columns = np.array(columns, np.int64, order="C")
        found._alive, found._queued = np.ones(count, np.bool_), np.zeros(count, np.bool_)
        found._end = found._count = count
        return found
