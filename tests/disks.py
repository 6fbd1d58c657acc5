"""A disk that can lose its power or fill up: ext4 on a loop device, by the real kernel. Needs root."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import time
from pathlib import Path

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878
_UNMOUNT_WITHIN_S = 10.0


class Disk:
    """An ext4 file system that can lose its power."""

    def __init__(self, folder: Path, size_bytes: int = 256 * 1024 * 1024, name: str = "disk") -> None:
        self.image = folder / f"{name}.img"
        self.mounted = folder / name
        self.mounted.mkdir()
        with open(self.image, "wb") as file:
            file.truncate(size_bytes)
        subprocess.run(["mkfs.ext4", "-qF", str(self.image)], check=True)
        self.mount()

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop,commit=300", str(self.image), str(self.mounted)], check=True)

    def cut_power(self) -> None:
        """From here on nothing reaches the disk; what had not been synced never will."""
        self._control(EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))

    def freeze(self) -> None:
        """It hangs: from here on no write to it returns, until `thaw`."""
        self._control(FIFREEZE, 0)

    def thaw(self) -> None:
        """Nothing happens where it does not hang."""
        try:
            self._control(FITHAW, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def _control(self, request: int, argument: int | bytes) -> None:
        fd = os.open(self.mounted, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, request, argument)
        finally:
            os.close(fd)

    def unmount(self) -> None:
        deadline = time.monotonic() + _UNMOUNT_WITHIN_S
        while subprocess.run(["umount", str(self.mounted)], capture_output=True, check=False).returncode != 0:
            assert time.monotonic() < deadline, f"{self.mounted} is still in use"
            time.sleep(0.1)

    def fill(self, leave_bytes: int) -> None:
        """Takes the room there is, but for `leave_bytes`; `free` gives it back."""
        room = os.statvfs(self.mounted)
        size_bytes = room.f_bavail * room.f_frsize - leave_bytes
        with open(self._filler, "wb") as file:
            if size_bytes > 0:
                os.posix_fallocate(file.fileno(), 0, size_bytes)

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.mounted / "filler"

    def close(self) -> None:
        """The image stays; nothing is mounted any more."""
        if os.path.ismount(self.mounted):
            self.unmount()
