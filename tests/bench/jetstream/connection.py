"""A NATS client that is not the limit: frames are parsed and built for a whole read at once, never for one message.

Theory of operation. A connection never blocks on sending: what the socket does not take is kept and sent before the
next read, so that a server that waits for the client to read is read from. `received` gives frames in columns (see
`natslog.wire.frames`), which are views of the receive buffer; PING is answered here, and an error line of the server
ends the run.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from natslog.ingest.columns import Column
from natslog.wire.frames import FrameParser, Frames
from natslog.wire.layout import (
    CONTROL_SID,
    END,
    HEADER_LEN,
    PAYLOAD,
    PAYLOAD_LEN,
    REPLY,
    REPLY_LEN,
    SID,
    START,
    SUBJECT,
    SUBJECT_LEN,
)
from natslog.wire.outgoing import publish_frames

_CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n'
_SEND_BYTES = 256 * 1024
_ANSWERED_WITHIN_S = 20.0
_ACKS = pa.repeat(pa.scalar(b"+ACK", pa.binary()), 8192)
"""As many as the parser gives frames at once."""


class Connection:
    """One socket. Subscriptions are by number, from 1."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.inbox = f"_INBOX.{secrets.token_hex(6)}"
        self._parser = FrameParser()
        self._unsent: deque[memoryview] = deque()
        self._subscriptions = 0
        self._await(b"\r\n")
        self.socket.sendall(_CONNECT)
        self.ping()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def subscribe(self, subject: str) -> None:
        """Returns when the server has it; the first message may not come before."""
        self._subscriptions += 1
        self.socket.sendall(f"SUB {subject} {self._subscriptions}\r\n".encode())
        self.ping()

    def ping(self) -> None:
        """Returns when the server has processed all that was sent. Only while nothing else is received."""
        self.socket.setblocking(True)
        self.socket.sendall(b"PING\r\n")
        self._await(b"PONG\r\n")
        self.socket.setblocking(False)

    def _await(self, text: bytes) -> None:
        found = b""
        while text not in found:
            chunk = self.socket.recv(65536)
            assert chunk, f"the server closed the connection: {found!r}"
            found += chunk
        assert b"-ERR" not in found, found

    def send(self, data: bytes | memoryview) -> None:
        """All of it, in order, as soon as the socket takes it. The caller does not change it afterwards."""
        if data:
            self._unsent.append(memoryview(data))
            self._send_some()

    def _send_some(self) -> None:
        while self._unsent:
            try:
                count = self.socket.send(self._unsent[0][:_SEND_BYTES])
            except BlockingIOError:
                return
            rest = self._unsent[0][count:]
            if rest:
                self._unsent[0] = rest
            else:
                self._unsent.popleft()

    def received(self) -> Iterator[Frames]:
        """Messages of one read, which are valid until the next step; exhaust it. Nothing where nothing came."""
        self._send_some()
        try:
            count = self.socket.recv_into(self._parser.room())
        except BlockingIOError:
            return
        assert count, "the server closed the connection"
        self._parser.filled(count)
        for frames in self._parser.frames():
            is_message = frames.rows[:, SID] != CONTROL_SID
            if is_message.all():
                yield frames
                continue
            self._answer(frames.select(~is_message))
            if is_message.any():
                yield frames.select(is_message)

    def _answer(self, lines: Frames) -> None:
        for row in lines.rows:
            line = lines.buffer[row[START] : row[END]].tobytes()
            assert not line.startswith(b"-ERR"), line
            if line.startswith(b"PING"):
                self.send(b"PONG\r\n")


def wait(connections: Collection[Connection], seconds: float) -> None:
    """Until one of them can be read, or can take what it has not sent."""
    sockets, unsent = [one.socket for one in connections], [one.socket for one in connections if one.has_unsent]
    select.select(sockets, unsent, [], seconds)


class Api:
    """Requests to `$JS.API`, one at a time, on a connection of their own."""

    def __init__(self, port: int) -> None:
        self._connection = Connection(port)
        self._connection.subscribe(f"{self._connection.inbox}.*")
        self._asked = 0

    def is_served(self) -> bool:
        """Whether the API is served at all: without a subscriber the NATS server answers with a status."""
        return self._answer_to("INFO", b"", 2.0) != b""

    def request(self, call: str, body: Any = None) -> dict[str, Any]:
        """The answer, which must not be an error."""
        payload = b"" if body is None else json.dumps(body).encode()
        answer = self._answer_to(call, payload, _ANSWERED_WITHIN_S)
        assert answer, f"no broker answers {call}"
        found: dict[str, Any] = json.loads(answer)
        assert "error" not in found, f"{call}: {found['error']}"
        return found

    def _answer_to(self, call: str, payload: bytes, within_s: float) -> bytes:
        """Empty where no answer came."""
        self._asked += 1
        reply = f"{self._connection.inbox}.{self._asked}".encode()
        self._connection.send(b"PUB $JS.API.%s %s %d\r\n%s\r\n" % (call.encode(), reply, len(payload), payload))
        deadline = time.monotonic() + within_s
        answers: list[bytes] = []
        while not answers and time.monotonic() < deadline:
            wait([self._connection], 0.1)
            for frames in self._connection.received():
                answers += [payload_of(frames, at) for at in range(len(frames.rows)) if subject_is(frames, at, reply)]
        return answers[0] if answers else b""


def subject_is(frames: Frames, at: int, subject: bytes) -> bool:
    start, length = frames.rows[at, SUBJECT], frames.rows[at, SUBJECT_LEN]
    return frames.buffer[start : start + length].tobytes() == subject


def payload_of(frames: Frames, at: int) -> bytes:
    start, length = frames.rows[at, PAYLOAD], frames.rows[at, PAYLOAD_LEN]
    return frames.buffer[start : start + length].tobytes()


def headers_of(frames: Frames, at: int) -> bytes:
    end, length = frames.rows[at, PAYLOAD], frames.rows[at, HEADER_LEN]
    return frames.buffer[end - length : end].tobytes()


def reply_of(frames: Frames, at: int) -> bytes:
    start, length = frames.rows[at, REPLY], frames.rows[at, REPLY_LEN]
    return frames.buffer[start : start + length].tobytes()


def acks_of(frames: Frames) -> memoryview:
    """Protocol bytes that ack each of these messages, at most 8,192, built in one step."""
    rows, replies = frames.rows, Column()
    replies.extend(frames.buffer, np.ascontiguousarray(rows[:, REPLY]), np.ascontiguousarray(rows[:, REPLY_LEN]))
    return publish_frames(replies.texts.to_arrow(pa.binary()), _ACKS.slice(0, len(rows)))


def stream_sequence(frames: Frames, at: int) -> int:
    """Of a message, from its reply subject `$JS.ACK.<stream>.<consumer>.<deliveries>.<sequence>.…`."""
    return int(reply_of(frames, at).split(b".")[5])
