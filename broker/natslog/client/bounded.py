"""Responses of bounded size and least speed: whatever answers a request may be anything but a natslog broker.

Theory of operation. Both bounds are checked where bytes leave the socket, so they hold for bodies of a stated length,
in chunks, and until the connection is closed, and nothing is copied once more. A response whose stated length is too
large ends before its body is received.
"""

from __future__ import annotations

import io
import socket
import time
from contextvars import ContextVar
from http.client import HTTPResponse
from typing import Any

import urllib3

from natslog.errors import CorruptAnswer

LEAST_BYTES_PER_S = 1024
"""What a broker sends at least, on average over the time limit of one response."""

MOST_BODY_BYTES = 136 * 1024 * 1024
"""Of a response: what is asked for at once (8 MiB), and one batch more (128 MiB at most)."""

most_bytes: ContextVar[int] = ContextVar("most_bytes", default=MOST_BODY_BYTES)
"""Of the next response in this context, with its head."""


def _too_large() -> CorruptAnswer:
    return CorruptAnswer(
        f"the response has more than {most_bytes.get()} bytes, which is more than was asked for: check that the URL is "
        "that of a natslog broker. The request is repeated at another broker if there is one"
    )


class _Measured(io.RawIOBase):
    """What a socket receives for one response. The first bytes may take the time limit; then they have to arrive."""

    def __init__(self, raw: io.RawIOBase, limit_s: float | None) -> None:
        self._raw, self._limit_s = raw, limit_s
        self._received, self._since = 0, (0.0, 0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        """Raises CorruptAnswer: it is too large. ConnectionAbortedError: it is too slow."""
        count = self._raw.readinto(buffer)
        if count:
            self._received += count
            if self._received > most_bytes.get():
                raise _too_large()
            self._check_speed()
        return count

    def _check_speed(self) -> None:
        now_s, (since_s, before) = time.monotonic(), self._since
        if not since_s:
            self._since = now_s, self._received
        elif self._limit_s is not None and now_s - since_s >= self._limit_s:
            if self._received - before < LEAST_BYTES_PER_S * (now_s - since_s):
                raise ConnectionAbortedError(f"the response arrived at less than {LEAST_BYTES_PER_S} bytes per second")
            self._since = now_s, self._received

    def close(self) -> None:
        self._raw.close()
        super().close()


class _BoundedResponse(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        self.fp = io.BufferedReader(_Measured(self.fp.detach(), sock.gettimeout()))

    def begin(self) -> None:
        super().begin()
        if self.length is not None and self.length > most_bytes.get():
            raise _too_large()


class _Connection(urllib3.connection.HTTPConnection):
    response_class = _BoundedResponse


class _TlsConnection(urllib3.connection.HTTPSConnection):
    response_class = _BoundedResponse


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


class BoundedPools(urllib3.PoolManager):
    """Connections whose responses are bounded; `most_bytes` must be set for each request."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
