"""Deduplication by `Nats-Msg-Id`: a publisher's retry is stored once if it arrives within the stream's window.

Theory of operation. Stream time is divided into periods as long as the window, counted from its zero. Ids are 128-bit
hashes in two open-addressing tables: those stored in the present period, and those of the one before. A lookup asks
both; an insert goes to the present one; when a period ends, its table becomes the one before. So an id is found for at
least the window and for less than twice as long.

Invariants. An id is inserted only after its row is on stable storage. Which ids are found depends on the stored rows,
their timestamps and the timestamp that the message asked for would get, and on nothing else: a replica that fills its
window from the log gets the same results as the leader that stored the rows. Memory is bounded: at `MAX_IDS` a table is
full and becomes the one before early; the window is shorter than configured (counted in `shortened`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.row_buffers import offsets_of
from natslog.arrow.schema import rows_of_items
from natslog.wire import native

Ids = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]

MAX_IDS = 512 * 1024
_SMALLEST_SLOTS = 1024

NEW = -1
"""`DedupeWindow.find`: an id that is not stored, or no id."""
REPEATED = -2
"""`DedupeWindow.find`: an id that stands earlier in the same call."""


class _Table:
    def __init__(self, period: int) -> None:
        self.period = period
        self.slots = np.zeros((0, 2), np.uint64)
        self.offsets = np.zeros(0, np.int64)
        self.count = 0

    def find(self, ids: Ids, found: Offsets) -> None:
        if self.count:
            native.find_ids(self.slots, self.offsets, ids, found)

    def insert(self, ids: Ids, offsets: Offsets) -> None:
        if 2 * (self.count + len(ids)) > len(self.slots):
            self._grow(self.count + len(ids))
        self.count += native.insert_ids(self.slots, self.offsets, ids, offsets)

    def emptied(self, period: int) -> _Table:
        """An empty table in the same memory: to fill it with zeros costs less than new pages from the system."""
        table = _Table(period)
        self.slots.fill(0)
        table.slots, table.offsets = self.slots, self.offsets
        return table

    def _grow(self, count: int) -> None:
        """Room for twice as many; at most half of the slots are ever used."""
        size = max(_SMALLEST_SLOTS, 1 << (4 * count - 1).bit_length())
        old_slots, old_offsets = self.slots, self.offsets
        self.slots, self.offsets = np.zeros((size, 2), np.uint64), np.zeros(size, np.int64)
        native.insert_ids(self.slots, self.offsets, old_slots, old_offsets)


class DedupeWindow:
    """Remembers each id for at least `window_s`, and for less than twice as long. Times are stream time.

    Args:
        window_s: zero switches deduplication off.
    """

    def __init__(self, window_s: float) -> None:
        self.window_us = int(window_s * 1_000_000)
        self.shortened = 0
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
        self._before.find(ids, found)
        self._present.find(ids, found)
        slots = np.full(1 << max(4, (2 * len(ids)).bit_length()), NEW, np.int64)
        native.mark_repeated(ids, found, slots, NEW, REPEATED)
        return found

    def remember(self, ids: Ids, offsets: Offsets, timestamp_us: int) -> None:
        """Of rows that are stored, with this timestamp; not older than any before."""
        if not self.window_us:
            return
        self._turn(timestamp_us)
        self._present.insert(ids, offsets)

    def remember_stored(self, ids: Ids, offsets: Offsets, timestamps_us: npt.NDArray[np.int64]) -> None:
        """Of a stored batch, whose rows may be of several periods; oldest first."""
        if not self.window_us:
            return
        ends = np.flatnonzero(np.diff(timestamps_us // self.window_us)) + 1
        for start, end in pairwise([0, *ends.tolist(), len(timestamps_us)]):
            self.remember(ids[start:end], offsets[start:end], int(timestamps_us[start]))

    def oldest_us(self, now_us: int) -> int:
        """Older ids are no longer found."""
        return (now_us // self.window_us - 1) * self.window_us

    def _turn(self, now_us: int) -> None:
        present, period = self._present, now_us // self.window_us
        if period > present.period:
            self._before = present if period == present.period + 1 else _Table(period - 1)
            self._present = _Table(period)
        elif present.count >= MAX_IDS:
            self.shortened += 1
            self._before, self._present = present, self._before.emptied(present.period)


def ids_of_headers(headers: pa.Array[Any]) -> Ids | None:
    """Hashes of the `Nats-Msg-Id` of stored rows, shape (rows, 2); None where no row has one."""
    pairs = headers.flatten()
    is_id = pc.and_(pc.equal(pairs.field("key"), "Nats-Msg-Id"), pc.greater(pc.binary_length(pairs.field("value")), 0))
    is_id = pc.fill_null(is_id, False)
    if not pc.any(is_id).as_py():
        return None
    rows = rows_of_items(headers)[is_id.to_numpy(zero_copy_only=False)]
    texts = pairs.field("value").filter(is_id)
    first_rows, first = np.unique(rows, return_index=True)
    texts = texts.take(pa.array(first))
    offsets = offsets_of(texts).astype(np.int64)
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    hashes = np.zeros((len(texts), 2), np.uint64)
    native.hash_ids(data, offsets[:-1], np.diff(offsets), hashes)
    ids = np.zeros((len(headers), 2), np.uint64)
    ids[first_rows] = hashes
    return ids
