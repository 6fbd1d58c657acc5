"""nats-py's TCP transport, reading into the frame parser's own buffer.

Theory of operation. nats-py shakes hands through asyncio's stream reader. With its first `read` after that we take the
socket's bytes over: the asyncio transport (TLS or not) writes them straight into `FrameParser.room()`, and `read`
returns when some are there. Nothing is allocated or copied in between. What concerns writing stays with the stream.
Where the buffer is full, reading pauses until the parser has made room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from nats.aio.transport import TcpTransport

from natslog.wire.frames import FrameParser

IN_PLACE = b""
"""What `read` returns: the bytes are in the parser already."""


class _Landing(asyncio.BufferedProtocol):
    """Takes the bytes of one connection from where the stream reader was."""

    def __init__(self, transport: asyncio.Transport, stream: Any, parser_of: Callable[[], FrameParser]) -> None:
        self._transport = transport
        self._stream = stream
        self._parser_of = parser_of
        self._arrived = asyncio.Event()
        self._paused = False
        self.at_eof = False

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._parser_of().room()

    def buffer_updated(self, nbytes: int) -> None:
        parser = self._parser_of()
        parser.filled(nbytes)
        if not parser.has_room and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._arrived.set()

    async def read(self) -> bytes:
        """Returns when something has come since the last time, or nothing will."""
        if self._paused:  # the parser has had its turn: there is room
            self._paused = False
            self._transport.resume_reading()
        if not self.at_eof:
            await self._arrived.wait()
            self._arrived.clear()
        return IN_PLACE

    def eof_received(self) -> bool | None:
        self._end()
        return cast("bool | None", self._stream.eof_received())

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end()
        self._stream.connection_lost(exc)

    def _end(self) -> None:
        self.at_eof = True
        self._arrived.set()

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()


class InPlaceTransport(TcpTransport):
    """Given to a nats-py client before it connects; `parser_of` is its present parser."""

    def __init__(self, parser_of: Callable[[], FrameParser]) -> None:
        super().__init__()
        self._parser_of = parser_of
        self._landing: _Landing | None = None

    def __bool__(self) -> bool:
        """nats-py makes a transport of its own where this is false."""
        return True

    async def connect(self, *args: Any, **kwargs: Any) -> None:
        self._landing = None
        await super().connect(*args, **kwargs)

    async def read(self, buffer_size: int) -> bytes:
        if self._landing is None:
            self._landing = self._take_over()
        return await self._landing.read()

    def _take_over(self) -> _Landing:
        reader, writer = self._io_reader, self._io_writer
        assert reader is not None, "nats-py reads after it has connected"
        assert writer is not None, "and writes as well"
        transport = writer.transport
        landing = _Landing(transport, transport.get_protocol(), self._parser_of)
        transport.set_protocol(landing)
        if left := bytes(reader._buffer):  # type: ignore[attr-defined]  # came with the handshake's last line
            reader._buffer.clear()  # type: ignore[attr-defined]
            self._parser_of().receive_data(left)
            landing._arrived.set()
        if reader._paused:  # type: ignore[attr-defined]
            reader._paused = False  # type: ignore[attr-defined]
            transport.resume_reading()
        if reader._eof:  # type: ignore[attr-defined]
            landing._end()
        return landing

    def at_eof(self) -> bool:
        return self._landing.at_eof if self._landing is not None else bool(super().at_eof())

    @property
    def unsent_bytes(self) -> int:
        """Written, and not yet taken by the kernel."""
        return 0 if self._io_writer is None else self._io_writer.transport.get_write_buffer_size()
