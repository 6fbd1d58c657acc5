"""The socket of a link: a WebSocket whose frames are processed in the call that received them.

Theory of operation. The WebSocket of a web server passes each message to a task, which continues in another turn of the
event loop, and through all handlers of the HTTP request. An ack of several replicas waits for four such frames, so once
the request that opens the WebSocket is answered, this protocol takes over the connection. It uses the part of RFC 6455
that links need: a message is one binary frame, and `ping`, `pong` and `close`. A frame that is larger than the buffer
is received into memory of its own, so that at most the first bytes of it are copied.

Frames are sent in the call of `send`; what the socket does not accept waits in the transport. A masked frame is
accepted; those that are sent by the dialling side have a mask of zeros, which changes nothing.

Invariants. Each frame is verified before it is decoded, and the first one that is not the next frame of the other side
ends the link. At most one frame of `MAX_FRAME_BYTES` is received at once, and at most `_WAITING_BYTES` wait to be sent.

Source: RFC 6455, sections 4, 5 and 7.4.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
import ssl
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import numpy as np

from natslog.errors import BrokerUnavailable, ClusterMismatch
from natslog.node.peers.keys import LinkSession
from natslog.node.peers.messages import MAX_FRAME_BYTES, Frame, Payload, decode_frame, encode_frame

Receiver = Callable[[Frame, memoryview], None]
"""Takes a frame and its payload, which is not used again by the socket."""

PING_S = 5.0
_BUFFER_BYTES = 64 * 1024
_WAITING_BYTES = 64 * 1024 * 1024
_JOINED_BYTES = 16 * 1024
_CLOSE_WITHIN_S = 1.0
_NEXT_ADDRESS_S = 0.25  # as aiohttp, with which the hello is sent
_ACCEPT_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_BINARY, _CLOSE, _PING, _PONG = 0x82, 0x88, 0x89, 0x8A  # as first byte of a frame: it is the whole message
_MASKED, _NO_MASK = 0x80, bytes(4)
_NO_MASKS = (b"", _NO_MASK)
_MOST_CONTROL_BYTES = 125


class LinkSocket(asyncio.BufferedProtocol):
    """One end of a link.

    Args:
        session: the seals of this link.
        is_dialler: whether this side opened the connection.
    """

    def __init__(self, session: LinkSession, *, is_dialler: bool) -> None:
        self._session = session
        self._mask = _NO_MASK if is_dialler else b""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._former: asyncio.BaseProtocol | None = None  # of the web server, which counts the connection
        self._receiver: Receiver | None = None
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._large: memoryview | None = None  # a frame that is longer than the buffer, and its first byte
        self._large_first = self._large_filled = 0
        self._large_mask = b""
        self._has_received = self._has_pinged = False
        self._beat: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._answered: asyncio.Future[bytes] | None = None  # the head of the answer that opens the WebSocket
        self._ended = asyncio.Event()
        self._problem: BaseException | None = None

    # ---- opening ----

    @classmethod
    async def dial(
        cls, url: str, headers: Mapping[str, str], session: LinkSession, tls: ssl.SSLContext | bool
    ) -> LinkSocket:
        """Opens a WebSocket at this URL. Nothing is received before `begin`.

        Raises:
            ClusterMismatch: the server refuses it. OSError: there is no connection.
        """
        parts = urlsplit(url)
        socket, is_tls = cls(session, is_dialler=True), parts.scheme == "https"
        socket._answered = socket._loop.create_future()
        await socket._loop.create_connection(
            lambda: socket,
            parts.hostname or "",
            parts.port or (443 if is_tls else 80),
            ssl=tls if is_tls else None,
            happy_eyeballs_delay=_NEXT_ADDRESS_S,
        )
        assert socket._transport is not None, "it was connected"
        try:
            key = base64.b64encode(secrets.token_bytes(16))
            given = {
                **headers,
                "Host": parts.netloc,
                "Upgrade": "websocket",
                "Connection": "Upgrade",
                "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": key.decode(),
            }
            lines = [f"GET {parts.path or '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
            socket._transport.write("\r\n".join([*lines, "", ""]).encode())
            _require_upgrade(await socket._answered, key)
        except BaseException:
            socket._transport.abort()
            raise
        return socket

    def take_over(self, transport: asyncio.Transport, former: asyncio.BaseProtocol, key: str) -> None:
        """Answers the request that opened the WebSocket, in the place of the web server. Nothing is received before
        `begin`.

        Args:
            former: receives `connection_lost`, as it counts the connection. key: `Sec-WebSocket-Key` of the request.
        """
        accept = _accept(key.encode())
        transport.pause_reading()
        transport.set_protocol(self)
        self._transport, self._former = transport, former
        transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
            + accept
            + b"\r\n\r\n"
        )

    def begin(self, receiver: Receiver) -> None:
        """Passes on what was received, and receives more."""
        assert self._transport is not None, "it is open"
        if self._transport.is_closing():
            return
        self._receiver = receiver
        self._beat = self._loop.call_later(PING_S / 2, self._check_contact)
        self.buffer_updated(0)
        if not self._transport.is_closing():
            self._transport.resume_reading()

    # ---- receiving: called by the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large[self._large_filled :]
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._has_received = True
        if self._large is not None:
            self._large_filled += nbytes
            if self._large_filled == len(self._large):
                try:
                    self._process_large()
                except Exception as error:
                    self._fail(error)
            return
        self._filled += nbytes
        if self._answered is None:
            try:
                self._process()
            except Exception as error:
                self._fail(error)
        elif (end := self._buffer.find(b"\r\n\r\n", 0, self._filled)) >= 0 or self._filled == _BUFFER_BYTES:
            assert self._transport is not None, "it is connected"
            self._transport.pause_reading()
            head = bytes(self._view[: end + 4 if end >= 0 else 0])
            self._drop(len(head))
            answered, self._answered = self._answered, None
            if not answered.done():
                answered.set_result(head)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._beat, self._closing):
            if timer is not None:
                timer.cancel()
        lost = exc or ConnectionResetError("the connection was closed")
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(lost)
        self._ended.set()
        if self._former is not None:  # afterwards: it cancels the handler of the request
            self._loop.call_soon(self._former.connection_lost, exc)

    def _fail(self, error: Exception) -> None:
        """What a frame leads to may be an error that ends the link: `ended` raises it."""
        self._problem = error
        self.close()
        self._ended.set()

    def _process(self) -> None:
        """Every whole frame in the buffer."""
        position, buffer = 0, self._buffer
        while self._filled - position >= 2:
            first, length = buffer[position], buffer[position + 1] & 0x7F
            start = position + 2
            if length >= 126:
                size = 2 if length == 126 else 8
                length = int.from_bytes(buffer[start : start + size], "big")
                start += size
            is_masked = buffer[position + 1] & _MASKED
            start += 4 if is_masked else 0
            if start > self._filled:
                break
            if first != _BINARY or length > MAX_FRAME_BYTES:
                _require_known(first, length)
            mask = bytes(buffer[start - 4 : start]) if is_masked else b""
            if start + length > _BUFFER_BYTES and position == 0:
                self._begin_large(first, start, length, mask)
                return
            if start + length > self._filled:
                break
            data = memoryview(buffer[start : start + length])  # a copy: the buffer is used again
            position = start + length
            self._frame(first, data if mask in _NO_MASKS else _unmasked(data, mask))
            if self._ended.is_set():
                return
        if position == self._filled:
            self._filled = 0
            return
        self._drop(position)
        if position:  # perhaps the first bytes of a large one
            self._process()

    def _drop(self, count: int) -> None:
        """The first bytes of the buffer are processed."""
        if 0 < count < self._filled:
            self._buffer[: self._filled - count] = self._view[count : self._filled].tobytes()
        self._filled -= count

    def _begin_large(self, first: int, start: int, length: int, mask: bytes) -> None:
        large = memoryview(bytearray(length))
        received = self._filled - start
        large[:received] = self._view[start : self._filled]
        self._large, self._large_first, self._large_filled, self._filled = large, first, received, 0
        self._large_mask = mask

    def _process_large(self) -> None:
        large, self._large = self._large, None
        assert large is not None, "one is received"
        mask = self._large_mask
        self._frame(self._large_first, large if mask in _NO_MASKS else _unmasked(large, mask))

    def _frame(self, first: int, data: memoryview) -> None:
        """A pong needs nothing: something was received."""
        if first == _BINARY:
            assert self._receiver is not None, "frames are processed from `begin` on"
            self._receiver(*decode_frame(self._session.opener.opened(data)))
        elif first == _PING:
            self._write(_PONG, bytes(data))
        elif first == _CLOSE:
            self.close()

    # ---- sending ----

    def send(self, frame: Frame, payload: Payload | None = None) -> bool:
        """Whether it was accepted: False if too much is already waiting, or the link is lost. A frame that is not
        accepted has no number.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        parts = encode_frame(frame, payload)
        waiting_bytes = transport.get_write_buffer_size()
        if waiting_bytes and waiting_bytes + sum(map(len, parts)) > _WAITING_BYTES:
            return False
        self._write(_BINARY, self._session.sealer.seal(parts))
        return True

    def _write(self, first: int, data: bytes | bytearray) -> None:
        assert self._transport is not None, "it is open"
        length, is_masked = len(data), _MASKED if self._mask else 0
        if length < 126:
            header = bytes((first, is_masked | length))
        elif length < 65536:
            header = bytes((first, is_masked | 126)) + length.to_bytes(2, "big")
        else:
            header = bytes((first, is_masked | 127)) + length.to_bytes(8, "big")
        if length > _JOINED_BYTES:
            self._transport.write(header + self._mask)
            self._transport.write(data)
        else:
            self._transport.write(b"".join((header, self._mask, data)))

    def _check_contact(self) -> None:
        """Every few seconds. A peer that does not answer a ping is gone."""
        assert self._transport is not None, "it is open"
        self._beat = self._loop.call_later(PING_S / 2, self._check_contact)
        if self._has_received:
            self._has_received = self._has_pinged = False
        elif self._has_pinged:
            self._transport.abort()
        else:
            self._has_pinged = True
            self._write(_PING, b"")

    # ---- the end ----

    def close(self) -> None:
        """Sends what waits, then closes the connection."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._write(_CLOSE, b"")
        transport.close()
        self._closing = self._loop.call_later(_CLOSE_WITHIN_S, transport.abort)

    async def ended(self) -> None:
        """Returns when the connection is closed. Raises the error of a frame that ended it."""
        await self._ended.wait()
        if self._problem is not None:
            raise self._problem


def _accept(key: bytes) -> bytes:
    return base64.b64encode(hashlib.sha1(key + _ACCEPT_GUID, usedforsecurity=False).digest())


def _require_upgrade(head: bytes, key: bytes) -> None:
    """Raises ClusterMismatch, BrokerUnavailable: the server did not open a WebSocket."""
    lines = head.decode("latin-1").split("\r\n")
    status = lines[0].split(" ")[1] if lines[0].startswith("HTTP/1.") and " " in lines[0] else ""
    if status != "101":
        kind = BrokerUnavailable if status.startswith("5") else ClusterMismatch
        raise kind(f"it refused to open the link (HTTP {status})" if status else "its answer is not one of HTTP")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if headers.get("sec-websocket-accept") != _accept(key).decode():
        raise ClusterMismatch("its answer does not open a WebSocket: it is not a broker")


def _require_known(first: int, length: int) -> None:
    """Raises ClusterMismatch: no broker sends such a frame."""
    if first not in (_BINARY, _CLOSE, _PING, _PONG):
        raise ClusterMismatch(f"a frame of a link begins with the byte {first:#x}, as none of a broker does")
    if length > (MAX_FRAME_BYTES if first == _BINARY else _MOST_CONTROL_BYTES):
        raise ClusterMismatch(f"a frame of a link has {length} bytes, which no frame of a broker has")


def _unmasked(data: memoryview, mask: bytes) -> memoryview:
    """In place. `mask`: four bytes."""
    whole = len(data) & ~3
    words = np.frombuffer(data[:whole], np.uint32)
    words ^= np.frombuffer(mask, np.uint32)
    for at in range(whole, len(data)):
        data[at] ^= mask[at - whole]
    return data
