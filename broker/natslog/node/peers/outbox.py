"""Outgoing frames to one peer: sealed and sent in order, and bounded in number while they wait.

Theory of operation. A frame is sent within `send` (see `begun`). Only if the socket accepts no more data, a task
continues, and sends what has been queued meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import cast

import aiohttp
from aiohttp import web

from natslog.node.begun import Begun
from natslog.node.peers.keys import Opener, Sealer
from natslog.node.peers.messages import Frame, decode_frame, encode_frame

Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse

_LOST = (ConnectionError, aiohttp.ClientError)
_WAITING_FRAMES = 4096
_WAITING_BYTES = 64 * 1024 * 1024


class Outbox:
    """Sends frames over a socket."""

    def __init__(self, socket: Socket, sealer: Sealer) -> None:
        self._socket = socket
        self._sealer = sealer
        self._waiting: asyncio.Queue[bytearray | Begun[None]] = asyncio.Queue(_WAITING_FRAMES)
        self._waiting_bytes = 0
        self._is_behind = False  # the task sends
        self._task = asyncio.create_task(self._run(), name="link outbox")

    def send(self, frame: Frame, payload: list[bytes] | None = None) -> bool:
        """Whether it was accepted: False if too much is already waiting, or the link is lost. A frame that is not
        accepted because of what waits has no number.
        """
        parts = encode_frame(frame, payload)
        length = sum(map(len, parts))
        if self._waiting.full() or (self._waiting_bytes and self._waiting_bytes + length > _WAITING_BYTES):
            return False
        data = self._sealer.seal(parts)
        if self._is_behind:
            self._waiting_bytes += len(data)
            self._waiting.put_nowait(data)
            return True
        sending = self._sending(data)
        try:
            awaited = sending.send(None)
        except StopIteration:
            return True
        except _LOST:
            return False  # the reading side detects it too
        self._is_behind = True
        self._waiting.put_nowait(Begun(sending, awaited))
        return True

    async def _sending(self, data: bytearray) -> None:
        await self._socket.send_bytes(cast(bytes, data))  # aiohttp takes any bytes-like object

    async def _run(self) -> None:
        try:
            while True:
                begun = await self._waiting.get()
                if isinstance(begun, Begun):
                    await begun
                else:
                    self._waiting_bytes -= len(begun)
                    await self._sending(begun)
                self._is_behind = not self._waiting.empty()
        except _LOST:
            return

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def received(socket: Socket, opener: Opener) -> tuple[Frame, memoryview] | None:
    """The next frame; None when the link is lost. Raises ClusterMismatch: it is not authentic, or cannot be decoded."""
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.BINARY:
        return None
    return decode_frame(opener.opened(message.data))
