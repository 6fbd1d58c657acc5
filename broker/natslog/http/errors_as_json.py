"""Every error as the JSON that errors.py describes, with its HTTP status."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable

from aiohttp import web

from natslog.errors import FILE_ERRORS, FileUnavailable, InvalidRequest, NatslogError, NotFound
from natslog.log_events import event

logger = logging.getLogger("natslog.http")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A `NatslogError` becomes a JSON error, and so does a file that cannot be used now; a bug becomes a 500 with the
    traceback in the log.
    """
    try:
        return await handler(request)
    except NatslogError as error:
        return error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        known = NotFound if error.status == 404 else InvalidRequest
        response = error_response(known(f"{request.method} {request.path}: {error.reason}"), error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        raise  # the connection is closed: no answer can be sent
    except web.RequestPayloadError as error:
        response = error_response(InvalidRequest(f"the request body cannot be read completely: {error}"))
        response.force_close()
        return response
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FILE_ERRORS:
            logger.error(
                f"{request.method} {request.path}: {error}",
                extra=event("request.failed", method=request.method, path=request.path),
            )
            return error_response(FileUnavailable.of(error))
        logger.exception(
            f"{request.method} {request.path} failed",
            extra=event("request.failed", method=request.method, path=request.path),
        )
        return error_response(
            NatslogError(f"internal error ({type(error).__name__}); the traceback is in the broker's log")
        )


def error_response(error: NatslogError, status_code: int | None = None) -> web.Response:
    response = web.json_response(error.to_json(), status=status_code or error.status, dumps=_dumps)
    if response.status == 429:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.facts.get("retry_after_s", 1))))
    elif response.status == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="natslog"'
    return response


def _dumps(body: object) -> str:
    return json.dumps(body, default=str)


@web.middleware
async def plain_bodies_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A compressed request body could need far more time and memory than its size suggests, so none is decompressed."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding {encoding[:40]!r} is not supported: send the request body without compression"
        response = error_response(InvalidRequest(message), 415)
        response.force_close()  # the body is not read
        return response
    return await handler(request)
