"""Parts of files sent to clients by sendfile, and whose fault it is where that fails: the file's, or the network's.

An `OSError` of sendfile does not say which of its two sides failed: a client whose host is gone ends in ETIMEDOUT,
EHOSTUNREACH or ENETUNREACH, a disk in EIO, and other causes have errors of their own. So what was to be sent is read
once more. Only where that fails, or is short, is the file damaged. Where the connection is gone, aiohttp cancels the
handler meanwhile: that is the network's failure too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import Executor

from aiohttp import web

from natslog.node.threads import in_thread

logger = logging.getLogger("natslog.http")

_PIECE_BYTES = 1024 * 1024


class UnreadableFile(Exception):
    """The file cannot be read to the end of the range; the message says why."""


async def send_file(request: web.Request, fd: int, position: int, length: int, readers: Executor) -> None:
    """Sends `[position, position + length)` of an open file, which stays open.

    Args:
        readers: its threads read the file back after an error.

    Raises:
        ConnectionResetError: the client left, or cannot be reached any more.
        UnreadableFile: the connection is closed as well, as nothing else can be said on it.
    """
    transport, reader = request.transport, request.remote
    if transport is None:
        raise ConnectionResetError("the client left")
    loop = asyncio.get_running_loop()
    try:
        with os.fdopen(fd, "rb", closefd=False) as file:
            sent = await loop.sendfile(transport, file, position, length)
        failure = f"{sent} of {length} bytes were sent"
        if sent == length:
            return
    except ConnectionError:
        raise
    except OSError as error:
        failure = str(error)
    logger.info("an answer to the reader at %s was not sent to its end: %s", reader, failure)
    problem = await in_thread(readers, _reading_problem, fd, position, length)
    transport.abort()
    if problem is not None:
        raise UnreadableFile(problem)
    raise ConnectionResetError(f"the answer cannot be sent: {failure}")


def _reading_problem(fd: int, position: int, length: int) -> str | None:
    """In a thread: why the range cannot be read; None where it can."""
    end = position + length
    while position < end:
        try:
            read = len(os.pread(fd, min(_PIECE_BYTES, end - position), position))
        except OSError as error:
            return f"cannot be read at byte {position}: {error}"
        if not read:
            return f"ends at byte {position}, {end - position} bytes too early"
        position += read
    return None
