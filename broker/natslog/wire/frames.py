"""The columnar frame parser: received bytes in, rows of positions out.

Theory of operation. Bytes land in one buffer that is used again and again: the socket writes into `room()` and reports
the length with `filled`. One scan finds all complete frames in it; the caller processes them immediately (they are
views of the buffer), and the next scan begins after them. The length of an incomplete frame is known, and nothing is
scanned again until all of it was received: a 64 MiB payload costs one scan, not thousands. Then the remaining bytes,
less than a frame, are moved to the front.

Invariant: while `frames()` is being read, bytes may be added at the end but nothing in the buffer moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from natslog.wire import native
from natslog.wire.layout import FRAME_COLUMNS, MAX_FRAME_BYTES, SID, ScanResult

Scan = Callable[[npt.NDArray[np.uint8], int, int, npt.NDArray[np.int64]], tuple[int, int, int, bool]]

RECEIVE_BYTES = 1024 * 1024
_LEAST_ROOM_BYTES = RECEIVE_BYTES // 4
_ROWS_AT_ONCE = 8192


class MalformedFrame(Exception):
    """The bytes are not NATS protocol: the connection cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Rows of `layout.FRAME_COLUMNS` over `buffer`; both are valid until the parser is asked for more."""

    buffer: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int64]

    def select(self, mask: npt.NDArray[np.bool_]) -> Frames:
        return Frames(self.buffer, self.rows[mask])

    def by_group(self, groups: npt.NDArray[np.int64]) -> Iterator[tuple[int, Frames]]:
        """The frames of each group of subscriptions, in order; most often all are of one.

        Args:
            groups: the number that replaces that of a subscription, which is its index; beyond the end, its own.
        """
        if native.group_rows(self.rows, groups):
            yield int(self.rows[0, SID]), self
            return
        sids = self.rows[:, SID]
        order = np.argsort(sids, kind="stable")
        edges = np.flatnonzero(np.diff(sids[order])) + 1
        for rows in np.split(self.rows[order], edges):
            yield int(rows[0, SID]), Frames(self.buffer, rows)


class FrameParser:
    """One per connection. `room` and `filled` (or `receive_data`), then exhaust `frames()`."""

    def __init__(self, scan: Scan = native.scan) -> None:
        self._scan = scan
        self._buffer = np.empty(RECEIVE_BYTES, np.uint8)
        self._start = 0
        self._end = 0
        self._needed = 0
        self._out = np.zeros((_ROWS_AT_ONCE, FRAME_COLUMNS), np.int64)

    @property
    def has_room(self) -> bool:
        """Whether reading on is worth a system call; `frames()` makes room."""
        return len(self._buffer) - self._end >= _LEAST_ROOM_BYTES

    def room(self) -> memoryview:
        """Where the next bytes go."""
        return self._buffer.data[self._end :]

    def filled(self, count: int) -> None:
        """So many bytes were written to the start of `room()`."""
        self._end += count

    def receive_data(self, data: bytes) -> None:
        """The same for bytes that come in a piece of their own; not while `frames()` is being read."""
        if len(data) > len(self._buffer) - self._end:
            self._move_to_front(self._end - self._start + len(data))
        self.room()[: len(data)] = data
        self.filled(len(data))

    def frames(self) -> Iterator[Frames]:
        """Whole frames, a chunk at a time.

        Raises:
            MalformedFrame: the next bytes are not NATS protocol.
        """
        while self._end > self._start and self._end - self._start >= self._needed:
            result = ScanResult(*self._scan(self._buffer, self._start, self._end, self._out))
            self._start = result.consumed
            self._needed = result.needed
            if result.frames:
                yield Frames(self._buffer, self._out[: result.frames])
            if result.malformed or result.needed > MAX_FRAME_BYTES:
                rest = self._buffer[self._start : self._start + 60].tobytes()
                raise MalformedFrame(f"not NATS protocol: {rest!r}")
            if not result.frames:
                break
        self._make_room()

    def _make_room(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > RECEIVE_BYTES:  # a large message was processed
                self._buffer = np.empty(RECEIVE_BYTES, np.uint8)
        elif not self.has_room or self._start + self._needed > len(self._buffer):
            self._move_to_front(max(self._needed, self._end - self._start) + _LEAST_ROOM_BYTES)

    def _move_to_front(self, size: int) -> None:
        """The bytes not yet handled to the start of a buffer of at least that size."""
        rest = self._buffer[self._start : self._end]
        if size > len(self._buffer):
            self._buffer = np.empty(max(size, 2 * len(self._buffer)), np.uint8)
        self._buffer[: len(rest)] = rest.copy() if len(rest) > self._start else rest
        self._start, self._end = 0, len(rest)
