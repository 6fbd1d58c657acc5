"""The HTTP server: routes, and errors as JSON."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from natslog.config import BrokerConfig
from natslog.errors import ConfigError, InvalidRequest, NatslogError, NotFound, PayloadTooLarge
from natslog.http import appends, cluster, cursors, messages, openapi, status, streams
from natslog.http.answers import Answers
from natslog.http.context import ANSWERS, BROKER
from natslog.node.broker import Broker

logger = logging.getLogger("natslog.http")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_BODY_BYTES = 64 * 1024
_MAX_LINE_BYTES = 16 * 1024


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What is a `NatslogError` inside is a JSON error outside; a bug is a 500 with its trace in the log."""
    try:
        return await handler(request)
    except NatslogError as error:
        return error_response(error)
    except web.HTTPRequestEntityTooLarge:
        return error_response(PayloadTooLarge(f"a request body has at most {_MAX_BODY_BYTES} bytes"))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        known = NotFound if error.status == 404 else InvalidRequest
        return error_response(known(f"{request.method} {request.path}: {error.reason}"), error.status)
    except ConnectionError:
        raise  # the connection is closed: no answer can be sent
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return error_response(NatslogError(f"internal error ({type(error).__name__}); the broker's log has the trace"))


def error_response(error: NatslogError, status_code: int | None = None) -> web.Response:
    return web.json_response(error.to_json(), status=status_code or error.status, dumps=_dumps)


def _dumps(body: object) -> str:
    return json.dumps(body, default=str)


def make_app(broker: Broker) -> web.Application:
    app = web.Application(middlewares=[_errors_as_json], client_max_size=_MAX_BODY_BYTES)
    app[BROKER] = broker
    app[ANSWERS] = Answers(broker.data_path, broker.readers, min_free_bytes=broker.config.min_free_bytes)
    app.add_routes(
        [
            *streams.routes,
            *cursors.routes,
            *messages.routes,
            *appends.routes,
            *status.routes,
            *cluster.routes,
            *openapi.routes,
        ]
    )
    return app


class HttpServer:
    """Serves one broker. `start` binds; `stop` answers what is under way and closes."""

    def __init__(self, broker: Broker, config: BrokerConfig) -> None:
        self._runner = web.AppRunner(
            make_app(broker),
            access_log=None,
            max_line_size=_MAX_LINE_BYTES,
            handler_cancellation=True,
            shutdown_timeout=2,
        )
        self._config = config

    async def start(self) -> int:
        """Returns the port (useful where 0 asked for any free one).

        Raises:
            ConfigError: the address cannot be bound, with the remedy.
        """
        await self._runner.setup()
        host, port = self._config.http_host, self._config.http_port
        try:
            await web.TCPSite(self._runner, host, port, backlog=512).start()
        except OSError as error:
            await self._runner.cleanup()
            taken = error.errno == errno.EADDRINUSE
            why = "is taken by another program: stop it, or choose another with --http-port" if taken else str(error)
            raise ConfigError(f"HTTP port {port} on {host} {why}", port=port) from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        try:
            await asyncio.wait_for(self._runner.cleanup(), 4)
        except TimeoutError:
            logger.warning("not every connection could be closed in time; they end with this process")
