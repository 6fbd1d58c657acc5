"""A disk that can lose its power or fill up: ext4 on a loop device, by the real kernel; or one that can be enlarged.
Needs root.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878
_UNMOUNT_WITHIN_S = 30.0
_BLKIO = Path("/sys/fs/cgroup/blkio")


def can_slow_down() -> bool:
    return os.access(_BLKIO / "blkio.throttle.write_iops_device", os.W_OK)


class Disk:
    """An ext4 file system that can lose its power. Args: at: where it is mounted, `folder / name` by default."""

    def __init__(
        self, folder: Path, size_bytes: int = 256 * 1024 * 1024, name: str = "disk", at: Path | None = None
    ) -> None:
        self.image = folder / f"{name}.img"
        self.mounted = at or folder / name
        self.mounted.mkdir(parents=True)
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

    def slow_down(self, pid: int, writes_a_second: int) -> None:
        """Until `speed_up`, for what this process writes: its fsyncs wait for it."""
        assert can_slow_down(), "slow disks need cgroup v1 with blkio"
        self._slow.mkdir()
        device = subprocess.run(
            ["findmnt", "-no", "MAJ:MIN", str(self.mounted)], capture_output=True, text=True, check=True
        ).stdout.strip()
        (self._slow / "blkio.throttle.write_iops_device").write_text(f"{device} {writes_a_second}\n")
        (self._slow / "cgroup.procs").write_text(str(pid))

    def speed_up(self) -> None:
        """Nothing happens where it is not slow."""
        if not self._slow.is_dir():
            return
        for pid in (self._slow / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (_BLKIO / "cgroup.procs").write_text(pid)
        deadline = time.monotonic() + _UNMOUNT_WITHIN_S
        while True:
            try:
                self._slow.rmdir()
                break
            except OSError:  # a process that was killed is not gone yet
                assert time.monotonic() < deadline, f"{self._slow} is still in use"
                time.sleep(0.1)

    @property
    def _slow(self) -> Path:
        return _BLKIO / f"natslog{os.getpid()}-{self.mounted.name}"

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
        self.speed_up()
        if os.path.ismount(self.mounted):
            self.unmount()


class GrowingDisk(Disk):
    """A file system that can be enlarged while it is in use. It is in memory: to enlarge ext4 in use, a process must
    have CAP_SYS_RESOURCE, which root in a container usually has not.
    """

    def __init__(self, folder: Path, size_bytes: int, name: str = "disk") -> None:
        self.mounted, self._size_bytes = folder / name, size_bytes
        self.mounted.mkdir()
        self.mount()

    def mount(self) -> None:
        options = f"size={self._size_bytes}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.mounted)], check=True)

    def enlarge(self, size_bytes: int) -> None:
        """All files stay, and are in use."""
        assert size_bytes > self._size_bytes
        self._size_bytes = size_bytes
        subprocess.run(["mount", "-o", f"remount,size={size_bytes}", str(self.mounted)], check=True)
