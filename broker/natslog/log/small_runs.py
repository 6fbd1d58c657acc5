"""Small batches of a file, proven a part of the file at a time."""

from __future__ import annotations

from dataclasses import dataclass

from natslog.arrow.batch_line import BatchHeader, Bytes
from natslog.log.segment import read_at
from natslog.wire import small_batches
from natslog.wire.small_batches import SmallRun

_FIRST_BYTES, _MOST_BYTES = 32 * 1024, 1024 * 1024


@dataclass(slots=True)
class SmallRuns:
    """Of an open file, up to a position."""

    fd: int
    end: int
    _is_likely: bool = False
    _read_bytes: int = _FIRST_BYTES

    def at(self, position: int) -> SmallRun | None:
        """The small batches that begin there. None: others do, or what is there cannot be read, or is damaged."""
        if not self._is_likely:
            return None
        try:
            found = small_batches.run_in(read_at(self.fd, position, min(self._read_bytes, self.end - position)))
        except OSError:
            found = None
        self._is_likely = found is not None
        self._read_bytes = _FIRST_BYTES if found is None else min(2 * self._read_bytes, _MOST_BYTES)
        return found

    def note(self, header: BatchHeader, begin: Bytes) -> None:
        """This batch was read by itself: the next ones may be like it. `begin`: bytes from its header on."""
        self._is_likely = small_batches.learn(header, begin)
