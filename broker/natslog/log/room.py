"""Space for the logs of a broker, checked before each write, so that a full disk causes no torn writes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from natslog.errors import StorageFull, StorageUnavailable

_ROOM_HOLDS_S = 0.1
_CLEAR_PART = 100
_CLEAR_TIMES = 4  # a write needs room for twice its size
_REMEDY = "free space or lower the retention limits of streams; writes resume automatically"


class StoreLimit:
    """The bytes that all logs of a broker may take together, and whether the disk had room for what was to be written.
    From any thread.

    Theory of operation. The files are measured now and then; meanwhile, what is appended is added. So a check costs an
    addition, however many segments there are.

    Args:
        max_bytes: None: no limit.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._used_bytes = self._refused_bytes = 0
        self._taken_bytes = 0  # ever
        self._disk_refused_bytes, self._disk_refused_s = 0, 0.0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """As measured last, and what was appended since."""
        return self._used_bytes

    @property
    def has_room(self) -> bool:
        """False from a refusal on, until there is room for more than what was refused, or for half of the limit."""
        return not self._refused_bytes and (self.max_bytes is None or self._used_bytes < self.max_bytes)

    def disk_refused(self, size_bytes: int) -> None:
        """The disk had no room for so much."""
        with self._lock:
            self._disk_refused_bytes = max(self._disk_refused_bytes, size_bytes)
            self._disk_refused_s = time.monotonic()

    def disk_has_room(self, free_bytes: int, min_free_bytes: int, measured_s: float) -> bool:
        """False while less than `min_free_bytes` is free; and from a refusal on, which comes before that, until there
        is room for more than what was refused, or for `min_free_bytes`.

        Args:
            measured_s: of the monotonic clock, when `free_bytes` was read.
        """
        with self._lock:
            spare_bytes, wanted_bytes = free_bytes - min_free_bytes, _CLEAR_TIMES * self._disk_refused_bytes
            if measured_s > self._disk_refused_s and spare_bytes >= min(wanted_bytes, min_free_bytes):
                self._disk_refused_bytes = 0
            return free_bytes >= min_free_bytes and not self._disk_refused_bytes

    @property
    def taken_bytes(self) -> int:
        """What was appended in all; a measurement begins with it."""
        return self._taken_bytes

    def measured(self, used_bytes: int, taken_bytes: int) -> None:
        """The files took so much when, or after, so much had been appended in all."""
        with self._lock:
            at_most_bytes = used_bytes + self._taken_bytes - taken_bytes  # of what came since, some was measured too
            used_bytes = min(at_most_bytes, max(used_bytes, self._used_bytes))
            self._used_bytes = used_bytes
            if self.max_bytes is not None:
                wanted_bytes = max(2 * self._refused_bytes, self.max_bytes // _CLEAR_PART)
                wanted_bytes = min(wanted_bytes, self.max_bytes // 2)  # more was asked for at once than may ever fit
                if self.max_bytes - used_bytes >= wanted_bytes:
                    self._refused_bytes = 0

    def add(self, size_bytes: int) -> None:
        """A log was opened; until the next measurement it counts, whatever was measured before."""
        with self._lock:
            self._used_bytes += size_bytes
            self._taken_bytes += size_bytes

    def take(self, size_bytes: int) -> None:
        """So much is about to be appended.

        Raises:
            StorageFull: there is no room for it.
        """
        with self._lock:
            if self.max_bytes is not None and self._used_bytes + size_bytes > self.max_bytes:
                self._refused_bytes = size_bytes
                raise StorageFull(
                    f"the streams of this broker take {self._used_bytes} bytes, {size_bytes} more were refused, and "
                    f"max_store_bytes is {self.max_bytes}: {_REMEDY}",
                    max_store_bytes=self.max_bytes,
                )
            self._used_bytes += size_bytes
            self._taken_bytes += size_bytes


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
            StorageFull: too little is free. StorageUnavailable: how much is free cannot be read.
        """
        self._unchecked_bytes += incoming_bytes
        now_s = time.monotonic()
        if now_s >= self._check_at_s or self._unchecked_bytes >= self._room_bytes // 16:
            self._room_bytes = self._free_bytes() - self._min_free_bytes
            self._check_at_s, self._unchecked_bytes = now_s + _ROOM_HOLDS_S, 0
            if self._room_bytes < 2 * incoming_bytes:
                self._check_at_s = 0.0
                if self._room_bytes < self._min_free_bytes:  # otherwise only one very large message does not fit
                    self._store.disk_refused(incoming_bytes)
                raise self.full()
        self._store.take(incoming_bytes)

    def require_now(self, size_bytes: int) -> None:
        """The same for one file of this size that takes the place of another, whatever was found before. From any
        thread.
        """
        if self._free_bytes() < self._min_free_bytes + size_bytes:
            raise self.full()

    def _free_bytes(self) -> int:
        try:
            return free_bytes(self._folder)
        except OSError as error:
            raise StorageUnavailable(
                f"the free space of {self._folder} cannot be read ({error.strerror or error}), and nothing was "
                "written: check the disk and the kernel log",
                file=str(self._folder),
            ) from error

    def full(self) -> StorageFull:
        return StorageFull(
            f"the disk of {self._folder} is full ({self._min_free_bytes} bytes are kept free): {_REMEDY}",
            file=str(self._folder),
        )


class DiskSpace(NamedTuple):
    """Of one file system. `folder`: on it. `free_bytes`: that this process may still write there."""

    folder: Path
    free_bytes: int
    size_bytes: int


def fullest_disk(data_folder: Path) -> DiskSpace:
    """Of the file systems of a data folder, of which `streams` and `raft` may be mounted on their own, the one with the
    least free space. Raises OSError.
    """
    found = [disk_space(one) for one in (data_folder, data_folder / "streams", data_folder / "raft") if one.is_dir()]
    return min(found or [disk_space(data_folder)], key=lambda one: one.free_bytes)


def disk_space(folder: Path) -> DiskSpace:
    """Raises OSError."""
    stats = os.statvfs(folder)
    return DiskSpace(folder, stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize)


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write there."""
    return disk_space(folder).free_bytes
