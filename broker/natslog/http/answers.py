"""Responses that are built in memory, for clients that may read slowly.

Theory of operation. A rewritten response has up to some 16 MiB, and its client may need minutes to read it. So three
things are bounded before one is made: how many are made at once (`slot`; clients on different hosts take turns), how
much memory all of them together hold (`IN_MEMORY_BYTES`), and how much of the data disk: responses that do not fit into
memory are stored in an unnamed file, which is deleted with this process, and are sent from there. If other clients wait
for a slot, it stays unused after each response for a multiple of the time that the response took, so that publishing
and reading whole ranges continue meanwhile.

A client that reads its response too slowly is disconnected (`sending`).
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from natslog.errors import Overloaded
from natslog.http.fair_slots import FairSlots
from natslog.http.sending import Body, UnreadableFile
from natslog.log import free_bytes
from natslog.log.checked_file import write_all
from natslog.log_events import event
from natslog.node.threads import Threads, in_thread

logger = logging.getLogger("natslog.http")

IN_MEMORY_BYTES = 64 * 1024 * 1024
ON_DISK_BYTES = 1024 * 1024 * 1024
_USUAL_BYTES = 16 * 1024 * 1024
_FIRST_BYTES = 4096  # of an answer on disk, with the headers
_SLOTS = 1
_PAUSE_FACTOR = 2.0
_MOST_WAITING = 1024
_WAIT_S = 30.0
_MOST_PAUSE_S = 2.0


class Answers:
    """Of one broker; the event loop's.

    Args:
        folder: for responses that do not fit into memory; `min_free_bytes` of its disk stay free.
    """

    def __init__(self, folder: Path, *, min_free_bytes: int) -> None:
        self._builders = Threads(_SLOTS, "answer")
        self.held_bytes = 0
        self.disk_bytes = 0
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._slots = FairSlots(_SLOTS, _MOST_WAITING, _WAIT_S)

    @asynccontextmanager
    async def slot(self, host: str) -> AsyncIterator[Threads]:
        """Held while one response is built, in the given thread, and stored. Raises Overloaded."""
        async with self._slots.slot(host):
            if self.disk_bytes + _USUAL_BYTES > ON_DISK_BYTES:
                raise self._full("the limit is reached")
            started_s = time.monotonic()
            yield self._builders
            if self._slots.waiting:
                await asyncio.sleep(min(_PAUSE_FACTOR * (time.monotonic() - started_s), _MOST_PAUSE_S))

    async def keep(self, body: memoryview) -> Answer:
        """The response to be sent, in memory or on disk; the caller must close it. `body` is the callee's.

        Raises:
            Overloaded: neither memory nor disk has space.
        """
        size_bytes = len(body)
        if self.held_bytes + size_bytes <= IN_MEMORY_BYTES:
            return Answer(self, size_bytes, body)
        try:
            file = await in_thread(self._builders, self._aside, body)
        except OSError as error:
            raise self._full(str(error)) from error
        first = memoryview(bytes(body[:_FIRST_BYTES]))
        body.release()
        return Answer(self, size_bytes, first, file)

    def _full(self, why: str) -> Overloaded:
        return Overloaded(
            f"this broker holds {self.held_bytes} bytes of responses for slow clients in memory and "
            f"{self.disk_bytes} on disk, and no more can be stored on its disk ({why}): repeat the request in a "
            "moment, or request less at once (max_bytes)"
        )

    def _aside(self, body: memoryview) -> BinaryIO:
        """In a thread: the file that holds the answer."""
        if free_bytes(self._folder) < self._min_free_bytes + len(body):
            raise OSError(f"{self._min_free_bytes} bytes of it are kept free")
        with ExitStack() as closing:
            file = closing.enter_context(tempfile.TemporaryFile(dir=self._folder, buffering=0))
            write_all(file.fileno(), [body])
            closing.pop_all()
        return file

    def close(self) -> None:
        """What is not begun is dropped."""
        self._builders.shutdown(wait=False, cancel_futures=True)


class Answer:
    """One that is ready to be sent: all of it in memory, or its first bytes and a file. A context manager; it may be
    entered by several requests that send it, and is given back when the last of them leaves.
    """

    def __init__(self, answers: Answers, size_bytes: int, body: memoryview, file: BinaryIO | None = None) -> None:
        self._answers, self._size_bytes, self._body, self._file = answers, size_bytes, body, file
        self._users = 0
        answers.held_bytes += len(body)
        answers.disk_bytes += size_bytes if file is not None else 0

    def __enter__(self) -> Answer:
        self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if self._users:
            return
        self._answers.held_bytes -= len(self._body)
        if self._file is not None:
            self._answers.disk_bytes -= self._size_bytes
            self._file.close()
        self._body.release()

    @property
    def length(self) -> int:
        """In bytes."""
        return self._size_bytes

    async def send(self, body: Body) -> None:
        """Raises ConnectionResetError: the client has disconnected, or reads too slowly."""
        await body.send_bytes(self._body)
        if self._file is None:
            return
        start = len(self._body)
        try:
            await body.send_file(self._file.fileno(), start, self._size_bytes - start)
        except UnreadableFile as error:  # not a part of a log: a repeated request gets a new one
            logger.error(
                f"a response that was stored in a temporary file was lost: {error}", extra=event("response.lost")
            )
            raise ConnectionResetError("the answer cannot be ended") from error
