"""Sending responses to clients: the minimum rate of clients, and parts of files by sendfile.

If sendfile fails, the cause may be the file or the network.

An `OSError` of sendfile does not show which of the two failed: a client whose host is unreachable causes ETIMEDOUT,
EHOSTUNREACH or ENETUNREACH, a disk causes EIO, and other causes have other errors. Therefore the range is read once
more. Only where that fails, or is short, is the file damaged. If the connection is closed, aiohttp cancels the handler
meanwhile: this is also a failure of the network.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager

from aiohttp import HttpVersion11, web

from natslog.arrow.ipc import Bytes
from natslog.log_events import event
from natslog.node.threads import in_thread

logger = logging.getLogger("natslog.http")

_PIECE_BYTES = 1024 * 1024
_SLICE_BYTES = 64 * 1024
LEAST_BYTES, WITHIN_S = 64 * 1024, 30.0
"""A client that receives less than so much of an answer, in so long, is disconnected."""
_BYTES_ACKED = struct.Struct("=120xQ")  # `tcpi_bytes_acked` of linux/tcp.h: TCP_INFO


class UnreadableFile(Exception):
    """The file cannot be read to the end of the range; the message gives the reason."""


@contextmanager
def disconnecting_slow_client(request: web.Request) -> Iterator[None]:
    """While an answer is sent: its connection ends where the client acknowledges less than `LEAST_BYTES` in
    `WITHIN_S`, which ends sending with a ConnectionError.
    """
    loop, transport = asyncio.get_running_loop(), request.transport
    if transport is None:
        raise ConnectionResetError("the client disconnected")
    connection: socket.socket = transport.get_extra_info("socket")

    def check(before: int) -> None:
        acked = _acked_bytes(connection)
        if acked - before < LEAST_BYTES and not transport.is_closing():
            logger.info(
                f"the reader at {request.remote} received only {acked - before} bytes in {WITHIN_S:.0f} s and was "
                "disconnected",
                extra=event("reader.disconnected", address=request.remote),
            )
            transport.abort()
        checks[0] = loop.call_later(WITHIN_S, check, acked)

    checks = [loop.call_later(WITHIN_S, check, _acked_bytes(connection))]
    try:
        yield
    finally:
        checks[0].cancel()


def _acked_bytes(connection: socket.socket) -> int:
    """The number of bytes that the client has acknowledged on this connection."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
        return int(_BYTES_ACKED.unpack(info)[0])
    except OSError:
        return 0  # it is closed


class Body:
    """The body of one answer while it is sent, piece by piece: of known length, or in chunks. A chunked body that fails
    midway lacks the chunk that ends it; HTTP/1.0 has no chunks: there, the connection is reset.

    Args:
        readers: its threads read files back after an error.
    """

    def __init__(self, request: web.Request, response: web.StreamResponse, readers: Executor) -> None:
        self._request, self._response, self._readers = request, response, readers

    @classmethod
    async def begun(
        cls, request: web.Request, headers: Mapping[str, str], kind: str, length: int | None, readers: Executor
    ) -> Body:
        """Sends the headers.

        Args:
            kind: the content type. `length`: of the body in bytes; None where it is not known.
        """
        response = web.StreamResponse(headers=headers)
        response.content_type = kind
        if length is not None:
            response.content_length = length
        elif request.version >= HttpVersion11:
            response.enable_chunked_encoding()
        await response.prepare(request)
        return cls(request, response, readers)

    async def send_bytes(self, data: Bytes) -> None:
        """In slices, because data that the client does not accept at once is copied."""
        view = memoryview(data)
        for start in range(0, len(view), _SLICE_BYTES):
            await self._response.write(view[start : start + _SLICE_BYTES])

    async def send_file(self, fd: int, position: int, length: int) -> None:
        """Raises as the function `send_file`. Some bytes must have been sent before, and with them the headers."""
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client disconnected")
        if transport.get_extra_info("ssl_object") is not None:
            await self._send_read(fd, position, length)
            return
        if self._response.chunked:
            transport.write(b"%x\r\n" % length)
        await send_file(self._request, fd, position, length, self._readers)
        if self._response.chunked:
            transport.write(b"\r\n")

    async def _send_read(self, fd: int, position: int, length: int) -> None:
        """With TLS there is no sendfile: asyncio would read the file itself, and would not notice that the client has
        disconnected. Raises as `send_file`.
        """
        end = position + length
        while position < end:
            try:
                data = await in_thread(self._readers, os.pread, fd, min(_PIECE_BYTES, end - position), position)
            except OSError as error:
                self.abort()
                raise UnreadableFile(f"cannot be read at byte {position}: {error}") from error
            if not data:
                self.abort()
                raise UnreadableFile(f"ends at byte {position}, {end - position} bytes too early")
            await self.send_bytes(data)
            position += len(data)

    def abort(self) -> None:
        """Ends the connection: the client is to see that the answer is not whole."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def end(self) -> web.StreamResponse:
        """The response, after all of it has been sent."""
        await self._response.write_eof()
        return self._response


async def send_file(request: web.Request, fd: int, position: int, length: int, readers: Executor) -> None:
    """Sends `[position, position + length)` of an open file, which stays open.

    Args:
        readers: its threads read the file back after an error.

    Raises:
        ConnectionResetError: the client disconnected, or cannot be reached any more. UnreadableFile: the connection is
        closed as well, because an error can no longer be sent on it.
    """
    transport, reader = request.transport, request.remote
    if transport is None:
        raise ConnectionResetError("the client disconnected")
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
    logger.info(
        f"a response to the reader at {reader} was not sent completely: {failure}",
        extra=event("response.interrupted", address=reader),
    )
    problem = await in_thread(readers, _reading_problem, fd, position, length)
    transport.abort()
    if problem is not None:
        raise UnreadableFile(problem)
    raise ConnectionResetError(f"the response cannot be sent: {failure}")


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
