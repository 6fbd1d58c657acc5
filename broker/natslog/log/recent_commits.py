"""The last small commits of a log, in memory as they stand in its file: for all that read its end.

Theory of operation. The writer adds each small commit, without a copy. What is asked for is decoded once, whoever asks
for it: consumers at the end of a log ask for the same rows. Nothing is kept of a log whose commits were not asked for
for a while, and at most `ROOM_BYTES` of all logs of a broker together: then a commit is read from its file.

Invariants. The commits follow one another without a gap, up to the end of the log. What is cut off, or erased, is not
kept (`clear`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import pyarrow as pa

from natslog.errors import CorruptLog
from natslog.log.batch_encoder import EncodedBatch
from natslog.log_events import event
from natslog.wire.small_batches import rows_of

logger = logging.getLogger("natslog.log")

ROOM_BYTES = 32 * 1024 * 1024
_LOG_BYTES = 128 * 1024
_SMALL_BYTES = 16 * 1024
_WANTED_S = 10.0


class RecentRoom:
    """What the recent commits of all logs of a broker take together. Thread-safe."""

    def __init__(self, size_bytes: int = ROOM_BYTES) -> None:
        self.left_bytes = size_bytes
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        with self._lock:
            if size_bytes > self.left_bytes:
                return False
            self.left_bytes -= size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self.left_bytes += size_bytes


class RecentCommits:
    """Of one log. Thread-safe: it is asked while the writer adds.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, room: RecentRoom, clock: Callable[[], float] = time.monotonic) -> None:
        self._room, self._clock = room, clock
        self._lock = threading.Lock()
        self._commits: deque[EncodedBatch] = deque()
        self._size_bytes = 0
        self._wanted_until_s = -_WANTED_S
        self._decoded: tuple[int, int, pa.RecordBatch] | None = None  # from, to
        self._cleared = 0  # how often

    def committed(self, batch: EncodedBatch) -> None:
        """It is the end of the log now. Its pieces stay as they are."""
        size_bytes = batch.header.total_bytes
        is_kept = size_bytes <= _SMALL_BYTES and self._clock() <= self._wanted_until_s
        if not is_kept and not self._commits:
            return
        with self._lock:
            follows = not self._commits or self._commits[-1].header.end_offset == batch.header.base_offset
            if not is_kept or not follows:
                self._clear()
            if not is_kept:
                return
            while self._commits and self._size_bytes + size_bytes > _LOG_BYTES:
                self._drop_first()
            while not (is_taken := self._room.take(size_bytes)) and self._commits:
                self._drop_first()
            if is_taken:
                self._commits.append(batch)
                self._size_bytes += size_bytes

    def stored(self, start: int, end: int) -> bytes | None:
        """The commits in `[start, end)`, which begin and end with one, as they are in the file; None: they are not
        kept. From now on they are.
        """
        with self._lock:
            return self._stored(start, end)

    def commits(self, start: int, end: int) -> Sequence[EncodedBatch] | None:
        """The same, one by one."""
        with self._lock:
            return self._found(start, end)

    def _stored(self, start: int, end: int) -> bytes | None:
        found = self._found(start, end)
        return None if found is None else b"".join(piece for batch in found for piece in batch.pieces)

    def _found(self, start: int, end: int) -> Sequence[EncodedBatch] | None:
        self._wanted_until_s = self._clock() + _WANTED_S
        found = deque[EncodedBatch]()
        for one in reversed(self._commits):  # what is asked for is at the end
            if one.header.base_offset < start:
                break
            if one.header.end_offset <= end:
                found.appendleft(one)
        if not found or (found[0].header.base_offset, found[-1].header.end_offset) != (start, end):
            return None
        return found

    def rows(self, start: int, end: int) -> pa.RecordBatch | None:
        """The rows of `stored`."""
        with self._lock:
            decoded = self._decoded
            if decoded is not None and decoded[:2] == (start, end):
                self._wanted_until_s = self._clock() + _WANTED_S
                return decoded[2]
            data, cleared = self._stored(start, end), self._cleared
        if data is None:
            return None
        try:
            parts = [rows for _, rows in rows_of(data, source="the last commits in memory")]
        except CorruptLog as error:
            logger.error(
                f"the last commits are read from their file: {error.message}", extra=event("log.memory_damaged")
            )
            self.clear()
            return None
        rows = parts[0] if len(parts) == 1 else pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
        with self._lock:
            if cleared == self._cleared:
                self._decoded = start, end, rows
        return rows

    def clear(self) -> None:
        """Commits were cut off or erased, or the log is closed."""
        with self._lock:
            self._clear()

    def drop_unwanted(self) -> None:
        """For maintenance: gives the memory back where commits were not asked for for a while."""
        with self._lock:
            if self._clock() > self._wanted_until_s:
                self._clear()

    def _clear(self) -> None:
        self._commits.clear()
        self._room.give_back(self._size_bytes)
        self._size_bytes, self._decoded = 0, None
        self._cleared += 1

    def _drop_first(self) -> None:
        size_bytes = self._commits.popleft().header.total_bytes
        self._room.give_back(size_bytes)
        self._size_bytes -= size_bytes
