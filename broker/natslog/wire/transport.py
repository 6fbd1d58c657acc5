"""From nats-py's connection to columns: its parser and its TCP transport, replaced.

Theory of operation. nats-py executes the handshake through asyncio's stream reader. With its first `read` after that,
natslog reads the bytes of the socket: the asyncio transport (TLS or not) writes them straight into
`FrameParser.room()`, and frames of attached subscriptions go to their receivers before the next system call: nothing is
allocated, copied or scheduled in between. `read` returns only data for nats-py's own parser (PING, INFO, -ERR, replies
to requests). Writing is unchanged. Over a websocket nats-py reads by itself and passes whole chunks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from natslog.log_events import event
from natslog.wire.frames import FrameParser, Frames, MalformedFrame
from natslog.wire.layout import END, SID, START

logger = logging.getLogger("natslog.nats")

Receiver = Callable[[Frames], None]

_CLOSE_S = 1.0


class UnusableConnection(NatsError):
    """A connection cannot be made with these files, or to this server: nats-py tries again."""

    def __init__(self, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.remedy = remedy


class FrameDemux:
    """Replaces nats-py's parser. Frames go to the receiver of their subscription, everything else to nats-py.

    Attributes:
        receivers: by the number of a subscription, which stands for all that were joined to it.
        last_received_s: when bytes came last, by a clock that never jumps.
    """

    def __init__(self, client: Client, *, in_place: bool) -> None:
        self.receivers: dict[int, Receiver] = {}
        self.parser = FrameParser()
        self.last_received_s = time.monotonic()
        self._rest = Parser(client)
        self._in_place = in_place
        self._groups = np.empty(0, np.int64)

    def join(self, sid: int, group: int) -> None:
        """The frames of this subscription go to the receiver `group`, in one order with its other frames."""
        if sid == group and sid >= len(self._groups):
            return  # as it is
        if sid >= len(self._groups):
            known, self._groups = self._groups, np.arange(2 * sid + 1)
            self._groups[: len(known)] = known
        self._groups[sid] = group

    def reset(self) -> None:
        """nats-py calls this when it has reconnected."""
        self._rest.reset()
        self.parser = FrameParser()
        self.last_received_s = time.monotonic()

    async def parse(self, data: bytes = b"") -> None:
        """Data that nats-py has read. In place, this is only the data that was left for it."""
        if not self._in_place:
            self.parser.receive_data(data)
            data = self.take()
        await self._rest.parse(data)

    def take(self) -> bytes:
        """Passes received frames on; returns the bytes for nats-py.

        Raises:
            ProtocolError: this is not NATS, or a receiver failed: nats-py must reconnect.
        """
        self.last_received_s = time.monotonic()
        left: list[bytes] = []
        try:
            for frames in self.parser.frames():
                others = []
                for sid, part in frames.by_group(self._groups):
                    receiver = self.receivers.get(sid)
                    if receiver is not None:
                        receiver(part)
                    else:
                        others.append(sid)
                if others:
                    rows = frames.rows[np.isin(frames.rows[:, SID], others)]  # in the order in which they came
                    left += [frames.buffer[start:end].tobytes() for start, end in rows[:, [START, END]].tolist()]
        except MalformedFrame as error:
            logger.error(
                f"the NATS server sent invalid protocol data ({error}); reconnecting", extra=event("nats.invalid_data")
            )
            raise ProtocolError from error
        except Exception as error:
            logger.critical(
                "a receiver failed; reconnecting", exc_info=error, extra=event("nats.receiver_error")
            )  # otherwise it would not be detected
            raise ProtocolError from error
        return b"".join(left)


class _Landing(asyncio.BufferedProtocol):
    """Takes the bytes of one connection from where the stream reader was."""

    def __init__(self, transport: asyncio.Transport, demux: FrameDemux) -> None:
        self._transport = transport
        self._stream: Any = transport.get_protocol()
        self._demux = demux
        self._for_nats_py = b""
        self._failure: ProtocolError | None = None
        self._arrived = asyncio.Event()
        self._has_ended = False

    @property
    def at_eof(self) -> bool:
        """No more data will arrive, and all received data was read: the last data of a server is processed."""
        return self._has_ended and not self._for_nats_py

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._demux.parser.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._demux.parser.filled(nbytes)
        self.take()

    def take(self) -> None:
        try:
            self._for_nats_py += self._demux.take()
        except ProtocolError as error:
            self._failure = error
            self._transport.pause_reading()
        if self._for_nats_py or self._failure is not None:
            self._arrived.set()

    async def read(self) -> bytes:
        """Data received for nats-py since the last call; empty at the end."""
        if not self._has_ended:
            await self._arrived.wait()
            self._arrived.clear()
        if self._failure is not None:
            raise self._failure
        data, self._for_nats_py = self._for_nats_py, b""
        return data

    def eof_received(self) -> bool | None:
        self.end()
        return cast("bool | None", self._stream.eof_received())

    def connection_lost(self, exc: BaseException | None) -> None:
        self.end()
        self._stream.connection_lost(exc)

    def end(self) -> None:
        self._has_ended = True
        self._arrived.set()

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()


class InPlaceTransport(TcpTransport):
    """Given to a nats-py client before it connects."""

    def __init__(self, demux: FrameDemux) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._demux = demux
        self._landing: _Landing | None = None

    def __bool__(self) -> bool:
        """nats-py makes a transport of its own where this is false."""
        return True

    async def connect(self, *args: Any, **kwargs: Any) -> None:
        self._landing = None
        await super().connect(*args, **kwargs)

    async def connect_tls(self, *args: Any, **kwargs: Any) -> None:
        plain: Any = self._io_reader
        await super().connect_tls(*args, **kwargs)
        assert self._io_writer is not None, "it is connected"
        if plain._buffer:  # its INFO, which would then not come again; or an attacker's, who wants it to be obeyed
            raise UnusableConnection(
                "the server sent data without TLS before the TLS handshake",
                "if the server does not begin with the handshake, remove handshake first",
            )
        protocol: Any = self._io_writer.transport.get_protocol()
        protocol._over_ssl = True  # nats-py does not state it, and asyncio logs a warning when the connection ends

    async def read(self, buffer_size: int) -> bytes:
        if self._landing is None:
            self._landing = self._take_over()
        return await self._landing.read()

    def _take_over(self) -> _Landing:
        reader: Any = self._io_reader
        writer: Any = self._io_writer
        assert reader is not None, "nats-py reads after it has connected"
        assert writer is not None, "and writes as well"
        landing = _Landing(writer.transport, self._demux)
        writer.transport.set_protocol(landing)
        if reader._buffer:  # received with the last line of the handshake
            self._demux.parser.receive_data(bytes(reader._buffer))
            reader._buffer.clear()
            landing.take()
        if reader._paused:
            reader._paused = False
            writer.transport.resume_reading()
        if reader._eof:
            landing.end()
        return landing

    async def wait_closed(self) -> None:
        """The broker does not wait for a server that accepts no more data as long as the kernel does (some 15
        minutes).
        """
        gives_up = asyncio.get_running_loop().call_later(_CLOSE_S, self.abort)
        try:
            await super().wait_closed()  # type: ignore[no-untyped-call]
        finally:
            gives_up.cancel()

    def abort(self) -> None:
        """Ends the connection, and drops what could not be sent."""
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    def at_eof(self) -> bool:
        return self._landing.at_eof if self._landing is not None else bool(super().at_eof())  # type: ignore[no-untyped-call]

    @property
    def has_tls(self) -> bool:
        return self._io_writer is not None and self._io_writer.get_extra_info("ssl_object") is not None

    @property
    def server_certificate(self) -> dict[str, Any] | None:
        """As `ssl` decodes it; None without TLS."""
        tls = None if self._io_writer is None else self._io_writer.get_extra_info("ssl_object")
        return None if tls is None else dict(tls.getpeercert() or {})

    @property
    def unsent_bytes(self) -> int:
        """Written, and not yet taken by the kernel."""
        return 0 if self._io_writer is None else self._io_writer.transport.get_write_buffer_size()
