"""Space for the logs of a broker, checked before each write, so that a full disk causes no torn writes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from natslog.errors import StorageFull

_ROOM_HOLDS_S = 0.1
_UNLIMITED = 2**62


class StoreLimit:
    """The bytes that all logs of a broker may take together. From any thread.

    Theory of operation. The files are measured now and then; meanwhile, what is appended is added. So a check costs an
    addition, however many segments there are.

    Args:
        max_bytes: None: no limit.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """As measured last, and what was appended since."""
        return self._used_bytes

    @property
    def room_bytes(self) -> int:
        return _UNLIMITED if self.max_bytes is None else self.max_bytes - self._used_bytes

    def measured(self, used_bytes: int) -> None:
        """The files take so much now."""
        with self._lock:
            self._used_bytes = used_bytes

    def appended(self, size_bytes: int) -> None:
        with self._lock:
            self._used_bytes += size_bytes


class DiskRoom:
    """For the log's one writer. Args: `min_free_bytes` of the disk stay free. `store`: of the broker."""

    def __init__(self, folder: Path, min_free_bytes: int, store: StoreLimit) -> None:
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._store = store
        self._room_bytes = self._unchecked_bytes = 0
        self._check_at_s = 0.0

    def require(self, incoming_bytes: int) -> None:
        """Reads the free space again when a part of it was used, or other processes had time to use it.

        Raises:
            StorageFull: too little is free.
        """
        if self._store.room_bytes < incoming_bytes:
            raise self.full()
        self._unchecked_bytes += incoming_bytes
        now_s = time.monotonic()
        if now_s >= self._check_at_s or self._unchecked_bytes >= self._room_bytes // 16:
            self._room_bytes = free_bytes(self._folder) - self._min_free_bytes
            self._check_at_s, self._unchecked_bytes = now_s + _ROOM_HOLDS_S, 0
            if self._room_bytes < 2 * incoming_bytes:
                self._check_at_s = 0.0
                raise self.full()
        self._store.appended(incoming_bytes)

    def require_now(self, size_bytes: int) -> None:
        """The same for one file of this size that takes the place of another, whatever was found before. From any
        thread.
        """
        if free_bytes(self._folder) < self._min_free_bytes + size_bytes:
            raise self.full()

    def full(self) -> StorageFull:
        remedy = "free space or lower the retention limits of streams; writes resume automatically"
        if self._store.max_bytes is not None and free_bytes(self._folder) > self._min_free_bytes:
            return StorageFull(
                f"the streams of this broker take {self._store.used_bytes} bytes, and max_store_bytes is "
                f"{self._store.max_bytes}: {remedy}",
                file=str(self._folder),
                max_store_bytes=self._store.max_bytes,
            )
        return StorageFull(
            f"the disk of {self._folder} is full ({self._min_free_bytes} bytes are kept free): {remedy}",
            file=str(self._folder),
        )


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write there."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize
