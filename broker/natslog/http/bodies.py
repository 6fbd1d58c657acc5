"""Request bodies that are read into memory: their size, number and time are limited; `gate` charges for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import HttpVersion11, web

from natslog.errors import Overloaded, PayloadTooLarge

MAX_BODY_BYTES = 64 * 1024
"""Of all requests but uploads and commits."""
_LARGE_BYTES = 80 * 1024 * 1024
_WITHIN_S = 30.0


async def chunks_of(request: web.Request) -> AsyncIterator[bytes]:
    """What is received of a body. Raises ConnectionResetError: the client has disconnected; web.RequestPayloadError."""
    try:
        async for chunk in request.content.iter_any():
            yield chunk
    except RuntimeError as error:  # of aiohttp, which has no type for it
        if request.transport is not None and not request.transport.is_closing():
            raise
        raise ConnectionResetError("the client disconnected while its request was received") from error


class Bodies:
    """Of one broker; the event loop's. Beyond their first `MAX_BODY_BYTES`, all bodies together have `_LARGE_BYTES`."""

    def __init__(self) -> None:
        self._large_bytes = 0

    async def read(self, request: web.Request, most_bytes: int = MAX_BODY_BYTES) -> bytes:
        """Raises PayloadTooLarge; Overloaded; web.HTTPRequestTimeout: it was not sent to its end in time."""
        body, large_bytes = bytearray(), 0
        try:
            async with asyncio.timeout(_WITHIN_S):
                async for chunk in chunks_of(request):
                    body += chunk
                    if len(body) > most_bytes:
                        raise PayloadTooLarge(
                            f"the body of this request may have at most {most_bytes} bytes: send less at once"
                        )
                    more_bytes = max(0, len(body) - MAX_BODY_BYTES) - large_bytes
                    if self._large_bytes + more_bytes > _LARGE_BYTES:
                        raise Overloaded("too many large requests are being received: repeat this request in a moment")
                    large_bytes += more_bytes
                    self._large_bytes += more_bytes
        except TimeoutError:
            raise web.HTTPRequestTimeout(
                reason=f"the body was not received completely within {_WITHIN_S:.0f} s"
            ) from None
        finally:
            self._large_bytes -= large_bytes
        return bytes(body)


BODIES = web.AppKey("bodies", Bodies)


async def read_body(request: web.Request, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Raises as `Bodies.read`."""
    return await request.app[BODIES].read(request, most_bytes)


def ignore_unknown_expectations(app: web.Application) -> None:
    """Of requests with the header `Expect`. By default aiohttp refuses all but `100-continue` with a text that is no
    error of this API. Source: RFC 9110, 10.1.1.
    """
    for route in app.router.routes():
        route._expect_handler = _let_body_be_sent


async def _let_body_be_sent(request: web.Request) -> None:
    if request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
