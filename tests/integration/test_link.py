"""The NATS link: what `flush` promises, and that `close` comes to an end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from natslog.nats_server import NatsServer
from natslog.urls import without_secrets
from natslog.wire.link import NatsLink

COUNT, SIZE = 1000, 8192


def received_by_now(raw: socket.socket) -> int:
    """Messages the server had routed to this subscriber when it answers a PING sent now."""
    raw.sendall(b"PING\r\n")
    data = b""
    while not data.endswith(b"PONG\r\n"):
        data += raw.recv(1 << 20)
    return data.count(b"MSG flushed ")


@pytest.mark.long
def test_flush_returns_when_the_server_has_processed_everything_sent(nats_url: str) -> None:
    with socket.create_connection(("127.0.0.1", int(nats_url.rsplit(":", 1)[1]))) as raw:
        raw.settimeout(20)
        raw.sendall(b'CONNECT {"verbose":false}\r\nSUB flushed 1\r\n')
        assert received_by_now(raw) == 0

        async def send_and_flush() -> int:
            link = NatsLink(nats_url, name="test")
            await link.open()
            await link.wait_until_up(10)
            await link.send(b"PUB flushed %d\r\n%s\r\n" % (SIZE, b"x" * SIZE) * COUNT)
            await link.flush(10)
            count = await asyncio.to_thread(received_by_now, raw)
            await link.close()
            return count

        assert asyncio.run(send_and_flush()) == COUNT


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://user:SECRET@a:4222,nats://b:4222", "nats://…@a:4222,nats://b:4222"),
        ("nats://user:SEC@RET@a:4222", "nats://…@a:4222"),
        ("nats://a:4222", "nats://a:4222"),
        ("nats://user:SEC/RET@a:4222", "nats://…@a:4222"),
        ("nats://user:SEC//RET@a:4222, tls://SECRET@b", "nats://…@a:4222, tls://…@b"),
        ("nats://user:SEC,RET@a:4222", "nats://…@a:4222"),
        ("user:SECRET@a:4222", "…@a:4222"),
    ],
)
def test_urls_are_shown_without_what_opens_the_door(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def fill(link: NatsLink) -> None:
    """Sends until the link takes nothing more."""
    while link.send_now(b"PUB stuck %d\r\n%s\r\n" % (SIZE, b"x" * SIZE) * COUNT):
        pass


def test_close_ends_a_link_whose_connection_is_refused_in_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`asyncio.wait_for` loses a cancellation that meets the end of what it waits for (Python before 3.12), and
    nats-py then tries for ever.
    """

    async def refused_then_closed() -> None:
        answer = asyncio.get_running_loop().create_future()
        is_asked = asyncio.Event()

        async def open_connection(**where: object) -> None:
            is_asked.set()
            await answer

        monkeypatch.setattr(asyncio, "open_connection", open_connection)
        link = NatsLink("nats://127.0.0.1:1", name="test")
        await link.open()
        await is_asked.wait()
        await asyncio.sleep(0)
        answer.set_exception(ConnectionRefusedError())
        async with asyncio.timeout(10):
            await link.close()
        assert link._supervisor is not None
        assert link._supervisor.done(), "nobody tries any more"

    asyncio.run(refused_then_closed())


@pytest.mark.long
def test_close_ends_a_link_whose_server_takes_nothing_any_more(tmp_path: Path) -> None:
    async def fill_and_close(server: NatsServer) -> None:
        link = NatsLink(server.url, name="test")
        await link.open()
        await link.wait_until_up(10)
        os.kill(server.pid, signal.SIGSTOP)
        fill(link)
        async with asyncio.timeout(10):
            await link.close()
        assert not link.is_up

    server = NatsServer(0, tmp_path / "nats.log").start()
    try:
        asyncio.run(fill_and_close(server))
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.stop()


@pytest.mark.long
def test_a_server_that_takes_nothing_any_more_is_left_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("natslog.wire.link._PINGS_UNANSWERED", 2)  # a minute else
    servers = [NatsServer(0, tmp_path / f"nats{n}.log").start() for n in range(2)]

    async def fill_and_look_elsewhere() -> None:
        came_back = asyncio.Event()
        link = NatsLink(
            ",".join(server.url for server in servers), name="test", on_state=lambda up: came_back.set() if up else None
        )
        await link.open()
        await link.wait_until_up(10)
        came_back.clear()
        connected = link._client
        assert connected is not None
        assert connected.connected_url is not None
        frozen = next(server for server in servers if server.port == connected.connected_url.port)
        os.kill(frozen.pid, signal.SIGSTOP)
        fill(link)
        async with asyncio.timeout(20):
            await came_back.wait()
        await link.flush()
        assert link.is_reachable
        await link.close()

    try:
        asyncio.run(fill_and_look_elsewhere())
    finally:
        for server in servers:
            os.kill(server.pid, signal.SIGCONT)
            server.stop()
