"""Disk space that is reserved for data that a broker cannot run without: its Raft store, its identity, its pulse.

Theory of operation. A file of some MiB is allocated. If a write of this data fails because of a full disk (or quota),
the file is shortened step by step until the write succeeds. Twice a second the broker tries to restore its full size.
While that fails, `has_room` is false, and requests that need more space on this disk are refused
(`MetadataGroup.propose`).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from natslog.log import checked_file
from natslog.log_events import event

logger = logging.getLogger("natslog.node")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
RESERVE_BYTES = 4 * 1024 * 1024
_STEP_BYTES = 256 * 1024
_MARGIN_BYTES = 1024 * 1024

Result = TypeVar("Result")


class DiskReserve:
    """A thread may `release` while another one calls `refill`. Both block.

    Attributes:
        has_room: at the last check, the reserve had its full size, and a margin of 1 MiB was free beside it.
    """

    def __init__(self, file: Path) -> None:
        self.has_room = True
        self._file = file
        self._lock = threading.Lock()

    def release(self) -> bool:
        """Releases one step of it to the file system; False if nothing is left."""
        with self._lock:
            self._note(has_room=False)
            held_bytes = self._file.stat().st_size if self._file.exists() else 0
            if held_bytes > 0:
                self._resize(max(held_bytes - _STEP_BYTES, 0), 0)
            return held_bytes > 0

    def within(self, write: Callable[[], Result]) -> Result:
        """The result of `write`, which is called again after each release while the disk is full. Raises OSError."""
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in NO_ROOM or not self.release():
                    raise

    def has_room_now(self) -> bool:
        """Does not block, and does not notice a quota."""
        try:
            return self.has_room and self._free_bytes() >= _MARGIN_BYTES
        except OSError:  # the figure is missing, and perhaps not the space: a write will show that
            return self.has_room

    def refill(self) -> None:
        """Restores its full size if there is space for it and for the margin. Raises OSError, but not for lack of
        space.
        """
        with self._lock:
            held_bytes = self._file.stat().st_size if self._file.exists() else 0
            try:
                if self._free_bytes() < RESERVE_BYTES + _MARGIN_BYTES - held_bytes:
                    raise OSError(errno.ENOSPC, "too little disk space is free")
                if held_bytes < RESERVE_BYTES or not self.has_room:  # a quota is not in the figures: try it
                    self._resize(held_bytes, RESERVE_BYTES + _MARGIN_BYTES)
                    self._resize(RESERVE_BYTES, 0)
                self._note(has_room=True)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self._note(has_room=False)

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._file.parent)
        return disk.f_bavail * disk.f_frsize

    def _resize(self, length: int, allocated: int) -> None:
        """To `length`, or with all of `allocated` on the disk; as before if that fails."""
        fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, length)
            if allocated:
                os.posix_fallocate(fd, 0, allocated)
        except OSError:
            os.ftruncate(fd, length)
            raise
        finally:
            os.fsync(fd)  # freed blocks can be used when the change is committed
            os.close(fd)

    def _note(self, *, has_room: bool) -> None:
        if self.has_room and not has_room:
            logger.error(
                "%s: the disk is full; vital writes use the reserve, and changes that need space are refused",
                self._file.parent,
                extra=event("disk.full", path=self._file.parent),
            )
        elif has_room and not self.has_room:
            logger.warning(
                "%s: the disk has free space again, and the reserve was restored",
                self._file.parent,
                extra=event("disk.has_space", path=self._file.parent),
            )
        self.has_room = has_room


def write_checked(path: Path, kind: str, version: int, content: Any) -> None:
    """As `checked_file.write_checked`, of a file of the data folder itself: with its reserve on a full disk."""
    reserve = DiskReserve(path.parent / "raft" / "reserve")
    reserve.within(lambda: checked_file.write_checked(path, kind, version, content))
