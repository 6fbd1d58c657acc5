"""Cluster nodes that are dialled over real sockets, and a wire in between that an attacker holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from natslog.config import BrokerConfig
from natslog.http.bodies import BODIES, Bodies
from natslog.http.connections import Connection, Connections
from natslog.http.context import BROKER
from natslog.http.errors_as_json import errors_as_json
from natslog.http.table import ENDPOINTS
from natslog.nats_server import free_port
from natslog.node.cluster_node import ClusterNode
from natslog.node.data_dir import DataDir
from natslog.node.peers.handshake import LINK_PATH, Hello
from natslog.node.peers.messages import Frame

SECRET = b"the secret of this cluster"


_BROKER: Any = SimpleNamespace(
    answerers={}, hosting=SimpleNamespace(reconcile=lambda: None), halt=lambda name, error: None
)


class Node(ClusterNode):
    """A node of a blank folder that keeps what it receives."""

    frames: list[tuple[int, Frame]]
    peer: Hello
    replies: Callable[[Frame], tuple[Frame, list[bytes]] | None]

    def received(self, peer: Hello, frame: Frame, reply: Callable[[Frame, list[bytes] | None], None]) -> None:
        self.frames.append((peer.broker, frame))
        self.peer = peer
        if (answer := self.replies(frame)) is not None:
            reply(*answer)


@asynccontextmanager
async def node(
    folder: Path, number: int, *, secrets: Sequence[bytes] = (SECRET,), port: int = 0, **settings: Any
) -> AsyncIterator[Node]:
    """Serves the cluster's routes; gone afterwards."""
    config = BrokerConfig(broker_id=number, http_port=port or free_port(), **settings)
    data_dir = DataDir(folder / f"broker-{number}", number)
    one = Node(config, data_dir, _BROKER, secrets=secrets)
    one.frames, one.replies = [], lambda frame: None
    app = web.Application(middlewares=[errors_as_json])
    app[BODIES] = Bodies()
    app[BROKER] = SimpleNamespace(cluster=one)  # type: ignore[assignment]
    app.add_routes([one.route for one in ENDPOINTS if one.path == LINK_PATH])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    server, connections = runner.server, Connections(1000)
    assert server is not None
    listening = await asyncio.get_running_loop().create_server(
        lambda: Connection(connections, server), "127.0.0.1", config.http_port
    )
    try:
        yield one
    finally:
        listening.close()
        await one.stop()
        await runner.cleanup()
        data_dir.release()


@asynccontextmanager
async def two(folder: Path, **settings: Any) -> AsyncIterator[tuple[Node, Node]]:
    async with AsyncExitStack() as stack:
        yield (
            await stack.enter_async_context(node(folder, 1)),
            await stack.enter_async_context(node(folder, 2, **settings)),
        )


async def until(holds: Callable[[], Any], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Wire:
    """A TCP connection's way to `port` that an attacker holds: `changed` sees what the dialler sends, in pieces."""

    def __init__(self, port: int) -> None:
        self.port, self.connections = 0, 0
        self.changed: Callable[[bytes], bytes] = lambda data: data
        self._target = port

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        forth = asyncio.create_task(_pump(reader, far_writer, lambda data: self.changed(data)))
        await _pump(far_reader, writer, lambda data: data)
        forth.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Callable[[bytes], bytes]) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(change(data))
            await writer.drain()
    writer.close()
