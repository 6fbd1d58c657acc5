"""Free space on the disk of a log, checked before each write, so that a full disk causes no torn writes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from natslog.errors import StorageFull

_ROOM_HOLDS_S = 0.1


class DiskRoom:
    """For the log's one writer. Args: `min_free_bytes` of the disk stay free."""

    def __init__(self, folder: Path, min_free_bytes: int) -> None:
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._room_bytes = self._unchecked_bytes = 0
        self._check_at_s = 0.0

    def require(self, incoming_bytes: int) -> None:
        """Reads the free space again when a part of it was used, or other processes had time to use it.

        Raises:
            StorageFull: too little is free.
        """
        self._unchecked_bytes += incoming_bytes
        now_s = time.monotonic()
        if now_s < self._check_at_s and self._unchecked_bytes < self._room_bytes // 16:
            return
        self._room_bytes = free_bytes(self._folder) - self._min_free_bytes
        self._check_at_s, self._unchecked_bytes = now_s + _ROOM_HOLDS_S, 0
        if self._room_bytes < 2 * incoming_bytes:
            self._check_at_s = 0.0
            raise self.full()

    def require_now(self, size_bytes: int) -> None:
        """The same for one file of this size, whatever was found before. From any thread."""
        if free_bytes(self._folder) < self._min_free_bytes + size_bytes:
            raise self.full()

    def full(self) -> StorageFull:
        return StorageFull(
            f"the disk of {self._folder} is full ({self._min_free_bytes} bytes are kept free): free space or lower "
            "the retention limits of streams; writes resume automatically",
            file=str(self._folder),
        )


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write there."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize
