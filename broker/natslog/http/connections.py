"""The connections of clients: how many there are, what happens to one more, and errors of the protocol as JSON.

Theory of operation. A connection is an open file, and so are logs, links between brokers and NATS. Of the files that
this process may open, connections get at most `MOST_CONNECTIONS` and at most one half. For one more than that, the
connection that has been idle for the longest time is closed; clients open a new one when they need it. If every
connection has a request in progress, new ones are still accepted, up to `_RESERVED` of them, but only requests of
brokers and operators (`ALWAYS_ANSWERED`) are answered on them; all others get 503. Beyond that it is closed at once.
TLS handshakes are not counted as open yet: `tls_port` limits them.

A connection is a newcomer until a request on it has shown that its client may do something here (`proved`). Newcomers
have half of the places, and those of one address an eighth; one more ends the oldest of them, also while its request is
being received. One that is idle is closed after `_NEWCOMER_S`.

All of this belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from typing import Any

from aiohttp import web

from natslog.errors import InvalidRequest, NatslogError, Overloaded
from natslog.http.context import REQUEST_ID
from natslog.http.errors_as_json import error_response
from natslog.log_events import event
from natslog.node.peers.handshake import LINK_PATH
from natslog.node.peers.places import Places
from natslog.security.limits import Limits, Usage
from natslog.security.records import Quota
from natslog.security.tokens import without_secrets

logger = logging.getLogger("natslog.http")

REQUESTS: web.AppKey[Counter[str]] = web.AppKey("requests", Counter)
"""How many requests were received, by the path of the API."""

MOST_CONNECTIONS = 8192
ALWAYS_ANSWERED = frozenset({LINK_PATH, "/healthz", "/readyz", "/metrics"})
_MOST_FILES = 1024 * 1024
_RESERVED = 64
_SHARE, _SHARE_OF_ONE_ADDRESS = 2, 8
_NEWCOMER_S = 30.0
_WARN_EVERY_S = 60.0
_FULL = (
    "%d HTTP connections are open, which is the limit: idle connections are closed to accept new ones; if no "
    "connection is idle, new ones are refused. The limit is half of the files that this process may open, at most %d"
)


def raise_file_limit() -> int:
    """Lets this process open as many files as the system permits it to. Returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Connections:
    """Those of one server.

    Args:
        most: how many there may be, apart from the reserved ones.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the one that has been idle for the longest time first
        self._newcomers = Places[Connection](max(1, most // _SHARE), max(1, most // _SHARE_OF_ONE_ADDRESS))
        self._warned_s = -_WARN_EVERY_S

    def __len__(self) -> int:
        return len(self._all)

    def opened(self, connection: Connection, address: str) -> bool:
        """Returns whether it may stay."""
        if len(self._all) >= self._most:
            self._warn(_FULL % (len(self._all), MOST_CONNECTIONS))
            if (oldest := self._newcomers.take_oldest() or next(iter(self._idle), None)) is not None:
                self._end(oldest)
            elif len(self._all) >= self._most + _RESERVED:
                return False
            else:
                connection.is_reserved = True
        self._all.add(connection)
        self._idle[connection] = None
        if (lost := self._newcomers.put(connection, address, connection)) is not None:
            self._end(lost)
        asyncio.get_running_loop().call_later(_NEWCOMER_S, self._expire, connection)
        return True

    def _end(self, connection: Connection) -> None:
        self.closed(connection)
        connection.force_close()

    def _expire(self, connection: Connection) -> None:
        """A newcomer whose request is being received has the time that its body has."""
        if connection in self._newcomers and connection in self._idle:
            self._end(connection)

    def proved(self, connection: Connection) -> None:
        """A request on it has shown that its client may do something here."""
        self._newcomers.take(connection)

    def closed(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._idle.pop(connection, None)
        self._newcomers.take(connection)

    def begun(self, connection: Connection) -> None:
        """A request has come on it."""
        self._idle.pop(connection, None)

    def ended(self, connection: Connection) -> None:
        """Its request is answered."""
        if connection in self._all:
            self._idle[connection] = None

    def abort(self) -> None:
        """Closes all of them at once, including those with a request in progress."""
        for connection in list(self._all):
            if connection.transport is not None:
                connection.transport.abort()

    def _warn(self, what: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            logger.warning("%s", what, extra=event("connection.limit"))


class Connection(web.RequestHandler):
    """One client's. `is_reserved`: it came when there was no room."""

    def __init__(self, connections: Connections, server: web.Server, **settings: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **settings)
        self.is_reserved = False
        self._counted: tuple[str, Usage] | None = None  # the identity whose quota counts it
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        name = transport.get_extra_info("peername")
        if not self._connections.opened(self, str(name[0]) if isinstance(name, tuple) else ""):
            transport.abort()  # type: ignore[attr-defined]
            return
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.closed(self)
        self._leave()
        super().connection_lost(exc)

    def proved(self) -> None:
        """As `Connections.proved`."""
        self._connections.proved(self)

    def belongs_to(self, name: str, limits: Limits, quota: Quota) -> None:
        """A request of this identity has come on it. Raises QuotaExceeded: it has too many connections."""
        if self._counted is not None and self._counted[0] == name:
            return
        usage = limits.connected(name, quota)
        self._leave()
        self._counted = name, usage

    def _leave(self) -> None:
        """No identity's quota counts it any more."""
        if self._counted is not None:
            self._counted[1].connections -= 1
            self._counted = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A request that is not valid HTTP, or a failure outside of all handlers. The connection is closed."""
        if isinstance(exc, ConnectionError):
            raise exc  # the error was logged where it was raised
        if status >= 500:
            logger.error(
                f"{request.method} {request.path} failed",
                exc_info=exc,
                extra=event(
                    "request.failed", method=request.method, path=request.path, request_id=request.get(REQUEST_ID)
                ),
            )
            error = NatslogError("internal error; the traceback is in the broker's log")
        else:
            said = without_secrets(" ".join((message or "it cannot be parsed").split()))[:200]
            logger.debug("request from %s refused: %s", request.remote, said)
            error = InvalidRequest(f"the request is not valid HTTP: {said}")
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has been begun, so no error can be sent")
        response = error_response(error, status)
        response.force_close()
        return response


def connection_of(request: web.Request) -> Connection:
    connection = request.protocol
    assert isinstance(connection, Connection), "the server makes no others"
    return connection


@web.middleware
async def count_requests(request: web.Request, handler: Any) -> web.StreamResponse:
    """Counts requests, and tracks which connections are idle. Refuses requests on connections that exceed the limit."""
    connection = connection_of(request)
    connections = connection._connections
    if connection.is_reserved and request.path not in ALWAYS_ANSWERED:
        response = error_response(
            Overloaded("this broker has too many open connections: repeat the request in a moment")
        )
        response.force_close()
        return response
    connections.begun(connection)
    found = request.match_info.route.resource
    request.app[REQUESTS]["unknown" if found is None else found.canonical] += 1
    try:
        answer: web.StreamResponse = await handler(request)
        return answer
    finally:
        connections.ended(connection)
