"""Outgoing frames to one peer: sealed and sent in order by a separate task, and bounded in number while they wait."""

from __future__ import annotations

import asyncio
from typing import cast

import aiohttp
from aiohttp import web

from natslog.node.peers.keys import Opener, Sealer
from natslog.node.peers.messages import Frame, decode_frame, encode_frame

Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse

_WAITING_FRAMES = 4096
_WAITING_BYTES = 64 * 1024 * 1024


class Outbox:
    """Sends frames over a socket."""

    def __init__(self, socket: Socket, sealer: Sealer) -> None:
        self._socket = socket
        self._sealer = sealer
        self._waiting: asyncio.Queue[bytearray] = asyncio.Queue(_WAITING_FRAMES)
        self._waiting_bytes = 0
        self._task = asyncio.create_task(self._run(), name="link outbox")

    def send(self, frame: Frame, payload: list[bytes] | None = None) -> bool:
        """Whether it was accepted: False if too much is already waiting. A frame that is not accepted has no number."""
        parts = encode_frame(frame, payload)
        length = sum(map(len, parts))
        if self._waiting.full() or (self._waiting_bytes and self._waiting_bytes + length > _WAITING_BYTES):
            return False
        data = self._sealer.seal(parts)
        self._waiting_bytes += len(data)
        self._waiting.put_nowait(data)
        return True

    async def _run(self) -> None:
        try:
            while True:
                data = await self._waiting.get()
                self._waiting_bytes -= len(data)
                await self._socket.send_bytes(cast(bytes, data))  # aiohttp takes any bytes-like object
        except (ConnectionError, aiohttp.ClientError):
            return  # the reading side detects it too

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def received(socket: Socket, opener: Opener) -> tuple[Frame, memoryview] | None:
    """The next frame; None when the link is lost. Raises ClusterMismatch: it is not authentic, or cannot be decoded."""
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.BINARY:
        return None
    return decode_frame(opener.opened(message.data))
