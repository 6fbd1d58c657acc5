"""Room on the disk that is kept for what a broker cannot go on without: its Raft store, its identity, its pulse.

Theory of operation. A file of some MiB is really allocated. Where a write of these meets a full disk (or quota), the
file is shortened, one step after another, until the write succeeds. Twice a second it is tried to make it whole again.
While that fails, `has_room` is false, and whoever asks for more on this disk is refused (`MetadataGroup.propose`).
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

logger = logging.getLogger("natslog.node")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
RESERVE_BYTES = 4 * 1024 * 1024
_STEP_BYTES = 256 * 1024
_MARGIN_BYTES = 1024 * 1024

Result = TypeVar("Result")


class DiskReserve:
    """A thread may `release` while another one calls `refill`. Both block.

    Attributes:
        has_room: at the last check, the reserve was whole, and beside it there was a margin of 1 MiB.
    """

    def __init__(self, file: Path) -> None:
        self.has_room = True
        self._file = file
        self._lock = threading.Lock()

    def release(self) -> bool:
        """Gives one step of it back to the file system; False if nothing is left."""
        with self._lock:
            self._note(has_room=False)
            held_bytes = self._file.stat().st_size if self._file.exists() else 0
            if held_bytes > 0:
                self._resize(max(held_bytes - _STEP_BYTES, 0), 0)
            return held_bytes > 0

    def within(self, write: Callable[[], Result]) -> Result:
        """What `write` returns, which is called again, after a release, while the disk is full. Raises OSError."""
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in NO_ROOM or not self.release():
                    raise

    def has_room_now(self) -> bool:
        """Does not block, and does not notice a quota."""
        return self.has_room and self._free_bytes() >= _MARGIN_BYTES

    def refill(self) -> None:
        """Makes it whole if there is room for it and for the margin. Raises OSError, not for lack of room."""
        with self._lock:
            held_bytes = self._file.stat().st_size if self._file.exists() else 0
            try:
                if self._free_bytes() < RESERVE_BYTES + _MARGIN_BYTES - held_bytes:
                    raise OSError(errno.ENOSPC, "too little disk space is free")
                if held_bytes < RESERVE_BYTES or not self.has_room:  # a quota is not in the figures: it is tried
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
            )
        elif has_room and not self.has_room:
            logger.warning("%s: the disk has free space again, and the reserve was restored", self._file.parent)
        self.has_room = has_room


def write_checked(path: Path, kind: str, version: int, content: Any) -> None:
    """As `checked_file.write_checked`, of a file of the data folder itself: with its reserve on a full disk."""
    reserve = DiskReserve(path.parent / "raft" / "reserve")
    reserve.within(lambda: checked_file.write_checked(path, kind, version, content))
