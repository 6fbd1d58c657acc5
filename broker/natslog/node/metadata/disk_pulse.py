"""Whether the disk still takes writes.

Theory of operation. A disk that hangs (a lost path to it, a frozen file system) fails nothing: its writes just do not
return. A thread of its own writes a few bytes to stable storage again and again. While one has been under way for too
long, the broker is to be as silent as if it were dead: it cannot keep what it would promise, and others can. The same
thread keeps the disk reserve whole.
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
    """Args: file: written over and over; it holds nothing that anyone reads. reserve: where there is no room for it.

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
            logger.debug("%s: %s", self._file, error)  # it answers: who has something to keep will say what is wrong

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
