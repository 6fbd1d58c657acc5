"""The HTTP server: routes, and from start to stop."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter

from aiohttp import web

from natslog.config import BrokerConfig
from natslog.errors import ConfigError
from natslog.http import (
    appends,
    cluster,
    console,
    copies,
    cursors,
    erasures,
    imports,
    many_streams,
    messages,
    metrics,
    openapi,
    overview,
    plans,
    publishing,
    read_plans,
    search,
    security,
    sessions,
    status,
    streams,
)
from natslog.http import subjects as subject_lists
from natslog.http.access import GUARD, LIMITS, require_declared
from natslog.http.answers import Answers
from natslog.http.bodies import BODIES, Bodies, ignore_unknown_expectations
from natslog.http.connections import (
    MOST_CONNECTIONS,
    REQUESTS,
    Connection,
    Connections,
    count_requests,
    raise_file_limit,
)
from natslog.http.context import ANSWERS, BROKER
from natslog.http.errors_as_json import errors_as_json, plain_bodies_only
from natslog.http.forwarding import forward
from natslog.http.gate import GATE, Gate, name_requests, state_request_id
from natslog.http.metrics import SCRAPES, Scrapes
from natslog.http.overview import LIVE, Live
from natslog.http.polls import POLLS, Polls
from natslog.http.sessions import SESSIONS, Sessions
from natslog.http.subjects import SUBJECT_LISTS, SubjectLists
from natslog.http.tls_port import TlsPort
from natslog.node.broker import Broker
from natslog.security.limits import Limits
from natslog.security.tls import BrokerTls

logger = logging.getLogger("natslog.http")

_MAX_LINE_BYTES = 16 * 1024
_FINISH_WITHIN_S = 0.5
_REFRESH_TLS_S = 2.0
_LINGER_S = 2.0  # for which a refused body is read, so that the client reads the answer
_BACKLOG = 512
_ACCEPTED_AT_ONCE = 32


ROUTES = [
    *streams.routes,
    *subject_lists.routes,
    *many_streams.routes,
    *read_plans.routes,
    *cursors.routes,
    *messages.routes,
    *search.routes,
    *publishing.routes,
    *copies.routes,
    *appends.routes,
    *imports.routes,
    *erasures.routes,
    *status.routes,
    *metrics.routes,
    *cluster.routes,
    *plans.routes,
    *overview.routes,
    *security.routes,
    *sessions.routes,
    *openapi.routes,
    *console.routes,
]
"""Every call of the server."""


def make_app(broker: Broker) -> web.Application:
    limits, guard = Limits(), broker.guard
    gate = Gate(guard, limits, broker.audit, broker.activity.report_request)
    app = web.Application(
        middlewares=[name_requests, count_requests, errors_as_json, forward, gate.middleware, plain_bodies_only]
    )
    app.on_response_prepare.append(state_request_id)
    app[GUARD], app[LIMITS], app[GATE] = guard, limits, gate
    requests: Counter[str] = Counter()
    app[BODIES], app[REQUESTS], app[SCRAPES] = Bodies(), requests, Scrapes(broker, requests, limits)
    app[BROKER] = broker
    app[ANSWERS] = Answers(broker.data_path, min_free_bytes=broker.config.min_free_bytes)
    app[SUBJECT_LISTS] = SubjectLists()
    app[LIVE], app[SESSIONS] = Live(broker), Sessions(broker.data_path / "sessions.json")
    app[POLLS] = Polls(app[ANSWERS], broker.readers, broker.halt)
    app.add_routes(ROUTES)
    require_declared(app)
    ignore_unknown_expectations(app)
    return app


class HttpServer:
    """Serves one broker. `start` binds; `stop` answers what is under way and closes."""

    def __init__(self, broker: Broker, config: BrokerConfig) -> None:
        app = make_app(broker)
        self._broker = broker
        self._answers, self._gate = app[ANSWERS], app[GATE]
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_FINISH_WITHIN_S)
        self._connections = Connections(min(MOST_CONNECTIONS, raise_file_limit() // 2))
        self._listening: asyncio.Server | None = None
        self._config = config
        self._tls = broker.cluster.tls
        self._tls_port: TlsPort | None = None
        self._refreshing: asyncio.TimerHandle | None = None

    async def start(self) -> int:
        """Returns the port (useful where 0 asked for any free one).

        Raises:
            ConfigError: the address cannot be bound, with the remedy.
        """
        await self._runner.setup()
        host, port = self._config.http_host, self._config.http_port
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                self._connection,
                host,
                port,
                backlog=_ACCEPTED_AT_ONCE,
                start_serving=self._tls is None,
            )
        except OSError as error:
            await self._runner.cleanup()
            taken = error.errno == errno.EADDRINUSE
            why = (
                "is used by another program: stop that program, or choose another port with --http-port"
                if taken
                else str(error)
            )
            raise ConfigError(f"HTTP port {port} on {host} {why}", port=port) from error
        if self._tls is not None:
            self._tls_port = TlsPort(self._tls, [one.dup() for one in self._listening.sockets], self._connection)
            self._tls_port.start()
            self._refresh_tls(self._tls)
        else:
            for listening in self._listening.sockets:
                with listening.dup() as same:  # otherwise asyncio accepts a whole backlog in one turn, uncounted
                    same.listen(_BACKLOG)
        self._gate.start(lambda: self._broker.state.version)
        return int(self._listening.sockets[0].getsockname()[1])

    def _refresh_tls(self, tls: BrokerTls) -> None:
        self._refreshing = asyncio.get_running_loop().call_later(_REFRESH_TLS_S, self._refresh_tls, tls)
        tls.refresh()

    def _connection(self) -> Connection:
        server = self._runner.server
        assert server is not None, "the runner is set up"
        return Connection(
            self._connections,
            server,
            access_log=None,
            max_line_size=_MAX_LINE_BYTES,
            auto_decompress=False,
            lingering_time=_LINGER_S,
        )

    async def stop(self) -> None:
        """Answers that take longer than `_FINISH_WITHIN_S` are cut off."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        if self._tls_port is not None:
            self._tls_port.close()
        if self._listening is not None:
            self._listening.close()
        asyncio.get_running_loop().call_later(_FINISH_WITHIN_S, self._connections.abort)
        self._answers.close()
        self._gate.stop()
        await self._runner.cleanup()
