"""The listening sockets of a broker with TLS: it accepts connections itself, and reports handshakes that fail.

Theory of operation. `asyncio.Server` keeps the context that it was started with, and reports failed handshakes in its
debug mode only. Here each accepted connection gets the context of that moment, so that a CA that was removed from the
file is not trusted any more: a context cannot forget one, and would resume sessions that began before. Handshakes are
tasks, so they are counted exactly.

Invariants. At most `MOST_HANDSHAKES` are in progress, and `MOST_OF_ONE_ADDRESS` of one address, each for at most
`HANDSHAKE_S`. One more ends the oldest one: a client needs milliseconds, so many slow ones do not block it. At most one
line a minute is logged about those that failed, and about those that were ended.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from natslog.log_events import event
from natslog.node.peers.places import Places
from natslog.security.tls import BrokerTls

logger = logging.getLogger("natslog.http")

HANDSHAKE_S = 5.0
MOST_HANDSHAKES, MOST_OF_ONE_ADDRESS = 512, 64
_SHUTDOWN_S = 1.0  # for which a closed connection waits for the client's own end
_BACKLOG = 512
_ACCEPTED_AT_ONCE = 32
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_AGAIN_S = 1.0
_REPORT_EVERY_S = 60.0
_MOST_SHOWN_CHARS = 120


class _Clock(Protocol):
    """The part of an event loop that is used for reports."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Any: ...


class FailedHandshakes:
    """Counts them. The first one is logged at once, later ones in one line a minute."""

    def __init__(self, loop: _Clock) -> None:
        self._loop = loop
        self._count = 0
        self._last = ""
        self._next: Any = None

    def note(self, address: str, error: BaseException) -> None:
        """A client that only disconnects is no failure: monitoring does it."""
        shown = f"{_line(address)}: {_line(_reason(error))}"
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            logger.debug("a client disconnected before the end of its TLS handshake: %s", shown)
            return
        logger.debug("the TLS handshake of a client failed: %s", shown)
        self._count += 1
        self._last = shown
        if self._next is None:
            self._report()

    def _report(self) -> None:
        self._next = None
        if self._count == 0:
            return
        logger.warning(
            f"{self._count} TLS handshakes of clients failed in the last minute; the last one, of {self._last}",
            extra=event("tls.handshakes_failed", count=self._count),
        )
        self._count = 0
        self._next = self._loop.call_later(_REPORT_EVERY_S, self._report)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._report()
        if self._next is not None:
            self._next.cancel()


class TlsPort:
    """Args: `make`: the protocol of one more connection. `sockets`: bound; `close` closes them."""

    def __init__(
        self, tls: BrokerTls, sockets: Sequence[socket.socket], make: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._tls = tls
        self._sockets = sockets
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._handshakes = Places[asyncio.Task[None]](MOST_HANDSHAKES, MOST_OF_ONE_ADDRESS)
        self._failed = FailedHandshakes(self._loop)
        self._warned_s = -_REPORT_EVERY_S
        self._is_closed = False

    def start(self) -> None:
        for listening in self._sockets:
            listening.setblocking(False)
            listening.listen(_BACKLOG)
            self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Accepts no more; handshakes that are in progress are ended."""
        self._is_closed = True
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        while (handshake := self._handshakes.take_oldest()) is not None:
            handshake.cancel()
        self._failed.close()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    raise
                logger.error(
                    f"no connection can be accepted ({error.strerror}): trying again in a second",
                    extra=event("connection.not_accepted"),
                )
                self._loop.remove_reader(listening)
                self._loop.call_later(_ACCEPT_AGAIN_S, self._accept_again, listening)
                return
            source = str(address[0])
            handshake = self._loop.create_task(self._handshake(connection, source), name="a TLS handshake")
            handshake.add_done_callback(self._handshakes.take)
            if (lost := self._handshakes.put(handshake, source, handshake)) is not None:
                self._end(lost, source)

    def _accept_again(self, listening: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listening, self._accept, listening)

    def _end(self, handshake: asyncio.Task[None], address: str) -> None:
        handshake.cancel()
        if self._loop.time() - self._warned_s >= _REPORT_EVERY_S:
            self._warned_s = self._loop.time()
            logger.warning(
                f"{len(self._handshakes)} TLS handshakes are in progress, and one more of {address} has reached a "
                f"limit ({MOST_HANDSHAKES} in all, {MOST_OF_ONE_ADDRESS} of one address): the oldest one is ended",
                extra=event("tls.handshakes_limited", count=len(self._handshakes), address=address),
            )

    async def _handshake(self, connection: socket.socket, address: str) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make,
                connection,
                ssl=self._tls.accepting,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError as error:
            self._failed.note(address, error)


def _reason(error: BaseException) -> str:
    """Of OpenSSL's own words: nothing that a client sent."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the client is not accepted, {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or type(error).__name__).lower().replace("_", " ")
        if reason == "http request":
            return "the client sent HTTP without TLS"
        return f"the client ended the handshake, {reason}" if "alert" in reason else reason
    if isinstance(error, ConnectionAbortedError):
        return f"it was not completed within {HANDSHAKE_S:g} s"
    return type(error).__name__


def _line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)[:_MOST_SHOWN_CHARS]
