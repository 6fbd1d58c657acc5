"""Whether the disk still completes writes.

Theory of operation. A disk that hangs (a lost path to it, a frozen file system) reports no error: its writes do not
return. A separate thread repeatedly writes a few bytes to stable storage, and maintains the disk reserve. While one
write takes too long, the broker sends no Raft messages, as if it had failed: it could not fulfil its acks, and other
brokers can. A second thread notes and logs that. Neither needs the event loop, which writes small commits itself (ADR
3): on a disk that hangs, the loop usually waits in such a write.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from natslog.log import fullest_disk
from natslog.log_events import event
from natslog.node.disk_reserve import DiskReserve

logger = logging.getLogger("natslog.node")

_EVERY_S = 0.5
_HANGS_AFTER_S = 2.0


class DiskPulse:
    """Args: file: in a folder of the data folder; overwritten repeatedly, and never read. reserve: used if there is no
    space for it.

    Attributes:
        hangs: a write has not returned for two seconds.
        free_bytes: of the fullest file system of the data folder, at the last write; `measured_s`: when that was, of
            the monotonic clock.
    """

    def __init__(self, file: Path, reserve: DiskReserve) -> None:
        self.hangs = False  # written by the watching thread only
        self.free_bytes = 2**63  # until it is known
        self.measured_s = 0.0
        self._file, self._reserve = file, reserve
        self._writing_since_s: float | None = None
        self._is_closed = threading.Event()

    def start(self, on_bug: Callable[[str, BaseException], None]) -> None:
        """In the event loop, where `on_bug` is called with the error that ends one of the threads: without them nothing
        is known of the disk. Otherwise they end after `close`, or with the process: one may wait in a write.
        """
        loop = asyncio.get_running_loop()

        def until_closed(work: Callable[[], None]) -> None:
            try:
                work()
            except Exception as error:
                loop.call_soon_threadsafe(on_bug, "disk pulse", error)

        for work in (self._write_repeatedly, self._watch):
            threading.Thread(target=until_closed, args=(work,), name=f"pulse {work.__name__}", daemon=True).start()

    def _write_repeatedly(self) -> None:
        while True:
            self._beat()
            if self._is_closed.wait(_EVERY_S):
                return

    def _watch(self) -> None:
        while not self._is_closed.wait(_HANGS_AFTER_S / 4):
            since_s = self._writing_since_s  # read once: the other thread may end its write now
            hangs = since_s is not None and time.monotonic() - since_s >= _HANGS_AFTER_S
            if hangs == self.hangs:
                continue
            self.hangs = hangs
            if hangs:
                logger.error(
                    "%s: the disk does not complete writes; this broker sends no heartbeats until it does, and may "
                    "respond to no request",
                    self._file.parent,
                    extra=event("disk.hangs", path=self._file.parent),
                )
            else:
                logger.warning(
                    "%s: the disk completes writes again",
                    self._file.parent,
                    extra=event("disk.responds", path=self._file.parent),
                )

    def _beat(self) -> None:
        self._writing_since_s = time.monotonic()
        try:
            self._reserve.within(self._write)
            self._reserve.refill()
        except OSError as error:
            logger.debug("%s: %s", self._file, error)  # the disk responds: the next write of data reports the error
        finally:
            self._writing_since_s = None

    def _write(self) -> None:
        fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_DSYNC | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, b"%20d" % time.monotonic_ns(), 0)
            now_s = time.monotonic()
            self.free_bytes = fullest_disk(self._file.parents[1]).free_bytes
            self.measured_s = now_s
        finally:
            os.close(fd)

    def close(self) -> None:
        self._is_closed.set()
