"""Whether the disk still completes writes.

Theory of operation. A disk that hangs (a lost path to it, a frozen file system) reports no error: its writes do not
return. A separate thread repeatedly writes a few bytes to stable storage. While one write takes too long, the broker
sends no Raft messages, as if it had failed: it could not fulfil its acks, and other brokers can. The same thread
maintains the disk reserve.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from natslog.node.disk_reserve import DiskReserve

logger = logging.getLogger("natslog.node")

_EVERY_S = 0.5
_HANGS_AFTER_S = 2.0


class DiskPulse:
    """Args: file: overwritten repeatedly; its content is never read. reserve: used if there is no space for it.

    Attributes:
        hangs: a write has not returned for two seconds.
    """

    def __init__(self, file: Path, reserve: DiskReserve) -> None:
        self.hangs = False
        self.free_bytes = 2**63  # until it is known
        self._file, self._reserve = file, reserve
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pulse")

    async def run(self) -> None:
        while True:
            beat = asyncio.get_running_loop().run_in_executor(self._thread, self._beat)
            await asyncio.wait([beat], timeout=_HANGS_AFTER_S)
            if not beat.done():
                self.hangs = True
                logger.error(
                    "%s: the disk does not complete writes; this broker sends no heartbeats until it does",
                    self._file.parent,
                )
            await beat
            if self.hangs:
                self.hangs = False
                logger.warning("%s: the disk completes writes again", self._file.parent)
            await asyncio.sleep(_EVERY_S)

    def _beat(self) -> None:
        try:
            self._reserve.within(self._write)
            self._reserve.refill()
        except OSError as error:
            logger.debug("%s: %s", self._file, error)  # the disk responds: the next write of data reports the error

    def _write(self) -> None:
        fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_DSYNC | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, b"%20d" % time.monotonic_ns(), 0)
            stats = os.fstatvfs(fd)
            self.free_bytes = int(stats.f_bavail * stats.f_frsize)
        finally:
            os.close(fd)

    def close(self) -> None:
        self._thread.shutdown(wait=False)
