"""One leafnode connection: the lines of the server are applied as they arrive, and raw protocol is written.

Theory of operation. asyncio calls `data_received`; each line is applied at once. What other tasks wait for are futures:
the first `INFO`, the answers to PINGs, which come in the order of the PINGs, and the end of the connection. When it
ends, all of them are completed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from natslog.log_events import event
from natslog.wire.interest import Interest
from natslog.wire.leaf_protocol import (
    LeafInfo,
    LeafProtocolError,
    LeafReader,
    Permissions,
    info_of,
    subscription_of,
)

logger = logging.getLogger("natslog.nats")

_DRAIN_ABOVE_BYTES = 1024 * 1024
_MAX_PINGS = 10_000
_CLOSE_S = 1.0
_NO_LINGER = struct.pack("ii", 1, 0)


class LeafRefused(Exception):
    """The server sent an error and closed the connection; the text is the server's."""


class LeafConnection(asyncio.Protocol):
    """From connecting until the end of the connection; for `loop.create_connection`.

    Args:
        interest: is changed by each `LS+` and `LS-` line. on_interest: called after that with the subject.

    Attributes:
        info: the newest of the server. info_received: completed by the first one, with False if there was none.
        ended: completed with the reason when the connection has ended.
        permissions: what the server accepts.
        written_bytes: written so far, sent or not.
        received: how often bytes came; `last_received_s`: when last, by a clock that never jumps.
    """

    def __init__(self, interest: Interest, on_interest: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._interest = interest
        self._on_interest = on_interest
        self._reader = LeafReader()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._unanswered: deque[asyncio.Future[bool]] = deque()
        self._next_ping: asyncio.Future[bool] | None = None
        self._failure: Exception | None = None
        self._lines = 0
        self.info = LeafInfo()
        self.info_received: asyncio.Future[bool] = loop.create_future()
        self.ended: asyncio.Future[Exception] = loop.create_future()
        self.permissions = Permissions()
        self.written_bytes = self.received = 0
        self.last_received_s = time.monotonic()

    # ---- the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._use(cast(asyncio.Transport, transport))

    def _use(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(_DRAIN_ABOVE_BYTES)

    @property
    def has_tls(self) -> bool:
        return self._transport is not None and self._transport.get_extra_info("ssl_object") is not None

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.ended.done() or self._transport is None or self._transport.is_closing()

    async def start_tls(self, context: ssl.SSLContext, host: str) -> None:
        """Raises LeafProtocolError: the server has sent more than its INFO without TLS; or the errors of TLS."""
        assert self._transport is not None, "it is connected"
        if self._lines > 1 or not self._reader.is_between_lines:  # an attacker's, who wants it to be obeyed
            raise LeafProtocolError("the server sent data without TLS before the TLS handshake")
        transport = await self._loop.start_tls(self._transport, self, context, server_hostname=host)
        if transport is None or self.ended.done():
            raise ConnectionResetError("the server closed the connection after the TLS handshake")
        self._use(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = self._failure or exc or ConnectionResetError("the server closed the connection")
        if not self.ended.done():
            self.ended.set_result(reason)
        if not self.info_received.done():
            self.info_received.set_result(False)
        while self._unanswered:
            self._unanswered.popleft().set_result(False)
        self._writable.set()

    def fail(self, error: Exception) -> None:
        """Ends the connection at once. What the server has not received is dropped, also by the kernel: it would be
        sent when the network works again, and messages would be delivered that others have acked meanwhile.
        """
        self._failure = self._failure or error
        if self._transport is not None and not self.ended.done():
            with suppress(OSError):  # the connection has ended
                self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()
        self.connection_lost(None)

    async def close(self) -> None:
        """Sends what was written as long as the server accepts it, and ends the connection."""
        if self._transport is None:
            return
        self._transport.close()
        while not self.ended.done():
            unsent_bytes = self.unsent_bytes
            await asyncio.wait([self.ended], timeout=_CLOSE_S)
            if self.unsent_bytes >= unsent_bytes:
                self.fail(ConnectionAbortedError("closed here"))

    # ---- receiving ----

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        self.received += 1
        self.last_received_s = time.monotonic()
        try:
            for line in self._reader.receive_data(data):
                self._lines += 1
                self._apply(line)
        except LeafProtocolError as error:
            self.fail(error)
        except Exception as error:  # of a callback
            logger.critical(
                "a receiver of leafnode interest failed; reconnecting",
                exc_info=error,
                extra=event("nats.receiver_error"),
            )
            self.fail(error)

    def _apply(self, line: bytes) -> None:
        match line[:4].rstrip():
            case b"LS+":
                subject, group, count = subscription_of(line)
                if self._interest.add(subject, group, count):
                    self._on_interest(subject)
            case b"LS-":
                subject, group, _ = subscription_of(line)
                if self._interest.remove(subject, group):
                    self._on_interest(subject)
            case b"PING":
                self.write(b"PONG\r\n")
            case b"PONG":
                if self._unanswered:
                    self._unanswered.popleft().set_result(True)
            case b"INFO":
                self._apply_info(info_of(line))
            case b"-ERR":
                self._failure = LeafRefused(line[4:].decode(errors="replace").strip(" '"))
            case b"+OK":
                pass
            case _:
                raise LeafProtocolError(f"not the protocol of a leafnode listener: {line[:60]!r}")

    def _apply_info(self, info: LeafInfo) -> None:
        self.info = info
        if not self.info_received.done():
            self.info_received.set_result(True)
        if info.connect_info:  # later ones do not state permissions
            self.permissions = Permissions(info.exported)

    # ---- sending ----

    def write(self, data: bytes | memoryview) -> None:
        if not self.has_ended:
            assert self._transport is not None, "it is connected"
            self.written_bytes += len(data)
            self._transport.write(data)

    @property
    def unsent_bytes(self) -> int:
        """Written, and not yet taken by the kernel."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def is_writable(self) -> bool:
        """Whether the connection is up, and not more than 1 MiB is unsent."""
        return not self.has_ended and self._writable.is_set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def drain(self) -> None:
        """Waits while more than 1 MiB is unsent; returns when the connection has ended."""
        await self._writable.wait()

    def ping(self) -> asyncio.Future[bool]:
        """Completed with True when the server has answered a PING that is sent after this call, with False when the
        connection has ended. Calls in one turn of the event loop share a PING. Not to be cancelled.
        """
        if self._next_ping is None:
            self._next_ping = self._loop.create_future()
            self._loop.call_soon(self._send_ping)
        return self._next_ping

    def _send_ping(self) -> None:
        assert self._next_ping is not None, "set with the call of this"
        answer, self._next_ping = self._next_ping, None
        if self.has_ended or len(self._unanswered) >= _MAX_PINGS:
            answer.set_result(False)
            return
        self._unanswered.append(answer)
        self.write(b"PING\r\n")
