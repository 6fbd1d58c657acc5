"""Answers that were made in memory, and clients that take their time with them.

Theory of operation. A rewritten answer has up to 16 MiB, and its client may need minutes for it. All of them together
hold up to `IN_MEMORY_BYTES` of memory; what comes beyond that waits in a file without a name on the data disk, which
goes with this process, and is sent from there.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from natslog.errors import Overloaded
from natslog.http.sending import UnreadableFile, send_file
from natslog.log import free_bytes
from natslog.log.checked_file import write_all

logger = logging.getLogger("natslog.http")

IN_MEMORY_BYTES = 64 * 1024 * 1024
_SLICE_BYTES = 256 * 1024
_FIRST_BYTES = 4096  # of an answer on disk, with the headers


class Answers:
    """Of one broker; the event loop's.

    Args:
        folder: where answers wait that memory has no room for; `min_free_bytes` of its disk stay free.
        executor: its threads write them there.
    """

    def __init__(self, folder: Path, executor: Executor, *, min_free_bytes: int) -> None:
        self.held_bytes = 0
        self._folder = folder
        self._executor = executor
        self._min_free_bytes = min_free_bytes

    async def send(
        self, request: web.Request, body: memoryview, content_type: str, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Args: `body` is the callee's: it is released when it lies on disk.

        Raises:
            Overloaded: neither memory nor disk have room.
        """
        response = web.StreamResponse(headers=headers)
        response.content_type, response.content_length = content_type, len(body)
        if self.held_bytes + len(body) <= IN_MEMORY_BYTES:
            await self._send_from_memory(request, response, body)
        else:
            await self._send_from_disk(request, response, body)
        return response

    async def _send_from_memory(self, request: web.Request, response: web.StreamResponse, body: memoryview) -> None:
        size_bytes = len(body)
        self.held_bytes += size_bytes
        try:
            await response.prepare(request)
            for start in range(0, size_bytes, _SLICE_BYTES):  # what is handed over at once is copied at once
                await response.write(body[start : start + _SLICE_BYTES])
            await response.write_eof()
        finally:
            self.held_bytes -= size_bytes

    async def _send_from_disk(self, request: web.Request, response: web.StreamResponse, body: memoryview) -> None:
        loop = asyncio.get_running_loop()
        size_bytes, first = len(body), bytes(body[:_FIRST_BYTES])
        try:
            file = await loop.run_in_executor(self._executor, self._aside, body)
        except OSError as error:
            raise Overloaded(
                f"this broker holds {self.held_bytes} bytes of answers for slow clients, and its disk takes no more "
                f"({error}): ask again in a moment, or for less at once (max_bytes)"
            ) from error
        with file:
            body.release()
            await response.prepare(request)
            await response.write(first)  # with the headers
            try:
                await send_file(request, file.fileno(), len(first), size_bytes - len(first), self._executor)
            except UnreadableFile as error:  # no part of a log: whoever asks again has a new one
                logger.error("an answer that waited in a file of %s was lost: %s", self._folder, error)
                raise ConnectionResetError("the answer cannot be ended") from error
            await response.write_eof()

    def _aside(self, body: memoryview) -> BinaryIO:
        """In a thread: the file that holds the answer."""
        if free_bytes(self._folder) < self._min_free_bytes + len(body):
            raise OSError(f"{self._min_free_bytes} bytes of it are kept free")
        with ExitStack() as closing:
            file = closing.enter_context(tempfile.TemporaryFile(dir=self._folder, buffering=0))
            write_all(file.fileno(), [body])
            closing.pop_all()
        return file
