"""Messages of a log that were requested one by one, in memory, in the form in which they are sent.

Theory of operation. The contents of a committed offset never change, so what is kept needs no check: a caller
determines first which offsets are visible. The contents lie one after another in one array, and a hash table by offset
states where. When the room is used up, the messages of the log that was used least recently are dropped; those of a log
that needs all of the room are dropped together, and it begins again.

Memory: at most `ROOM_BYTES` for all logs of a process, in use or not, and as much again for a moment while an array
grows. Messages of more than `MOST_BYTES` are not kept.

Invariants. What was erased, or removed from the files of the log by rewriting, is not kept: `clear` is called then, and
what was read before it is not added after it (`version`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from natslog.wire import native

__all__ = ["MOST_BYTES", "ROOM_BYTES", "KeptMessages", "KeptRoom"]

Longs = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

ROOM_BYTES = 64 * 1024 * 1024
MOST_BYTES = 32 * 1024

_FEWEST_SLOTS, _FEWEST_BYTES = 256, 16 * 1024
_SLOT_BYTES = 32
_NO_SLOTS, _NO_BYTES = np.zeros((1, 4), np.int64), np.zeros(0, np.uint8)


class KeptRoom:
    """What all logs share: the room, and the lock under which each of them is used, for a millisecond at most."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.lock = threading.Lock()
        self._used: OrderedDict[int, KeptMessages] = OrderedDict()  # the least recently used first

    @property
    def used_bytes(self) -> int:
        return sum(one.nbytes for one in self._used.values())

    def used(self, one: KeptMessages) -> None:
        """Under the lock."""
        self._used[id(one)] = one
        self._used.move_to_end(id(one))

    def left(self, one: KeptMessages) -> None:
        """Under the lock: it takes no memory any more."""
        self._used.pop(id(one), None)

    def make_room(self, one: KeptMessages, size_bytes: int) -> bool:
        """Under the lock: whether it may take so many bytes. Drops what other logs have."""
        left_bytes = self.size_bytes - size_bytes - self.used_bytes + one.nbytes
        for other in list(self._used.values()):
            if left_bytes >= 0:
                break
            if other is not one:
                left_bytes += other.nbytes
                other._drop()
        return left_bytes >= 0


_ROOM = KeptRoom(ROOM_BYTES)


class KeptMessages:
    """See the module. Of one log. Thread-safe.

    Attributes:
        version: how often it was cleared.
    """

    def __init__(self, room: KeptRoom | None = None) -> None:
        self.version = 0
        self._room = room or _ROOM
        self._slots, self._data = _NO_SLOTS, _NO_BYTES
        self._count = self._end = 0

    @property
    def nbytes(self) -> int:
        return 0 if self._slots is _NO_SLOTS else self._slots.nbytes + self._data.nbytes

    def find(self, offsets: Longs) -> tuple[Longs, Bytes, int, int]:
        """Where the messages with these offsets are.

        Returns:
            Where each begins in the second array (-1: the offset is negative, -2: it is not kept), how long its head
            is, and its length, of shape (offsets, 3); the array, which stays as it is; how many are not kept; and the
            length of the others.
        """
        places = np.empty((len(offsets), 3), np.int64)
        with self._room.lock:
            if self._count:
                self._room.used(self)
            missing, size_bytes = native.kept_places(offsets, self._slots, places)
            return places, self._data, missing, size_bytes

    def add(self, offsets: Longs, places: Longs, data: Bytes, version: int) -> None:
        """Messages in the form of `find`, with distinct offsets. `version`: when they were looked up in the log."""
        small = places[:, 2] <= MOST_BYTES
        if not small.all():
            offsets, places = offsets[small], places[small]
        with self._room.lock:
            if not len(offsets) or version != self.version:
                return
            size_bytes = int(places[:, 2].sum())
            if not self._has_room(len(offsets), size_bytes):
                self._drop()  # begins again
                if not self._has_room(len(offsets), size_bytes):
                    return
            self._room.used(self)
            ends = self._end + np.cumsum(places[:, 2])
            starts = ends - places[:, 2]
            moved = np.stack([starts, places[:, 1], places[:, 2]], axis=1)
            edges = np.zeros(len(offsets) + 1, np.int32)
            native.gather(
                data,
                np.ascontiguousarray(places[:, 0]),
                np.ascontiguousarray(places[:, 2]),
                self._data[self._end :],
                edges,
                0,
            )
            self._count += native.keep_places(np.ascontiguousarray(offsets), moved, self._slots)
            self._end += size_bytes

    def clear(self) -> None:
        """What was read until now is not added any more."""
        with self._room.lock:
            self.version += 1
            self._drop()

    def _drop(self) -> None:
        self._slots, self._data = _NO_SLOTS, _NO_BYTES
        self._count = self._end = 0
        self._room.left(self)

    def _has_room(self, count: int, size_bytes: int) -> bool:
        """Enlarges the arrays if necessary. Those that are in use elsewhere stay as they are."""
        slots, room_bytes = len(self._slots), len(self._data)
        if 2 * (self._count + count) > slots:
            slots = max(_FEWEST_SLOTS, 1 << (4 * (self._count + count) - 1).bit_length())
        if self._end + size_bytes > room_bytes:
            room_bytes = max(_FEWEST_BYTES, 2 * room_bytes, self._end + size_bytes)
            most_bytes = self._room.size_bytes - slots * _SLOT_BYTES
            room_bytes = max(min(room_bytes, most_bytes), self._end + size_bytes)
        if (slots, room_bytes) == (len(self._slots), len(self._data)):
            return True
        if not self._room.make_room(self, slots * _SLOT_BYTES + room_bytes):
            return False
        if room_bytes > len(self._data):
            grown = np.empty(room_bytes, np.uint8)
            grown[: self._end] = self._data[: self._end]
            self._data = grown
        if slots > len(self._slots):
            used = self._slots[self._slots[:, 0] > 0]
            self._slots = np.zeros((slots, 4), np.int64)
            native.keep_places(used[:, 0] - 1, np.ascontiguousarray(used[:, 1:]), self._slots)
        return True
