"""Requests that another broker must answer, passed on for clients that cannot follow a redirect to it.

A page in a browser may only talk to the broker that served it. With the header `Natslog-Forward: true` a broker sends
the request on to where it would redirect it, with the same credentials, and returns what is answered. Only to brokers
of its cluster, and once: the other broker answers itself, or with an error.
"""

from __future__ import annotations

import logging

import aiohttp
from aiohttp import web
from yarl import URL

from natslog.errors import BrokerUnavailable, NotLeader
from natslog.http.bodies import read_body
from natslog.http.context import BODY, BROKER, READING, REQUEST_ID, require_used_id
from natslog.http.errors_as_json import Handler
from natslog.http.sending import disconnecting_slow_client
from natslog.http.sessions import authorization_of
from natslog.node.peers.problems import problem_of
from natslog.request_ids import HEADER as REQUEST_ID_HEADER

logger = logging.getLogger("natslog.http")

HEADER = "Natslog-Forward"
_MOST_BODY_BYTES = 4 * 1024 * 1024
_WITHIN_S = 60.0
_PIECE_BYTES = 64 * 1024
_PASSED_ON = ("Accept", "Content-Type", "Natslog-Batches", "Natslog-Columns")
_PASSED_BACK = ("Content-Type", "Content-Length", "Retry-After")


@web.middleware
async def forward(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Where the handler would redirect, and the client asks for it, the answer of the other broker."""
    try:
        return await handler(request)
    except web.HTTPTemporaryRedirect as redirect:
        if request.headers.get(HEADER) != "true":
            raise
        return await _forwarded(request, str(redirect.location))


async def _forwarded(request: web.Request, location: str) -> web.StreamResponse:
    if request.method not in READING:
        require_used_id(request)
    broker = request.app[BROKER]
    url = URL(location, encoded=True)
    members = {str(URL(known.url).origin()) for known in broker.state.brokers.values()}
    if str(url.origin()) not in members:
        raise NotLeader(f"the broker at {url.origin()} is not a member of the cluster", url=str(url.origin()))
    authorization = authorization_of(request)
    if broker.guard.is_on and not authorization:  # a certificate is that of this connection
        raise NotLeader(
            f"the broker at {url.origin()} answers this: a request that is identified by a client certificate cannot "
            "be sent on to it; use a token, or send the request there",
            url=str(url.origin()),
        )
    headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    headers |= {REQUEST_ID_HEADER: request[REQUEST_ID], "Natslog-Redirected": "true", "Accept-Encoding": "identity"}
    if authorization:
        headers["Authorization"] = authorization[0]
    body = request.get(BODY)
    if body is None and request.can_read_body:
        body = await read_body(request, _MOST_BODY_BYTES)
    tls = broker.cluster.tls
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=3.0, sock_read=_WITHIN_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.request(
                request.method,
                url,
                data=body,
                headers=headers,
                allow_redirects=False,
                ssl=True if tls is None else tls.dialling,
            ) as found,
        ):
            return await _passed_back(request, found)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BrokerUnavailable(
            f"the broker at {url.origin()} did not answer: {problem_of(error, _WITHIN_S)}"
        ) from error


async def _passed_back(request: web.Request, found: aiohttp.ClientResponse) -> web.StreamResponse:
    kept = {
        name: value
        for name, value in found.headers.items()
        if name in _PASSED_BACK or (name.startswith("Natslog-") and name != REQUEST_ID_HEADER)
    }
    response = web.StreamResponse(status=found.status, headers=kept)
    await response.prepare(request)
    try:
        with disconnecting_slow_client(request):
            async for piece in found.content.iter_chunked(_PIECE_BYTES):
                await response.write(piece)
            await response.write_eof()
    except (aiohttp.ClientError, TimeoutError) as error:  # no error can follow what was sent
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the other broker did not complete its response") from error
    return response
