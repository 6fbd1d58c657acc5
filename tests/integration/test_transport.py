"""The receive path over each kind of connection: plain, TLS, websocket; and a server that stops reading."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from natslog.ingest.batches import BatchBuilder
from natslog.nats_server import NatsServer, free_port
from natslog.wire.frames import RECEIVE_BYTES, Frames
from natslog.wire.link import _PENDING_BYTES, NatsLink

SIZES = (0, 1, 100, 5000, RECEIVE_BYTES - 10, 3 * RECEIVE_BYTES)


def server_of(kind: str, folder: Path) -> tuple[NatsServer, str]:
    port, config = free_port(), folder / "nats.conf"
    text, url = "max_payload: 8MB\n", f"nats://127.0.0.1:{port}"
    if kind == "tls":
        _self_signed(folder)
        text += f'tls {{ cert_file: "{folder}/cert.pem", key_file: "{folder}/key.pem" }}\n'
        url = f"tls://localhost:{port}"
    if kind == "websocket":
        websocket_port = free_port()
        text += f'websocket {{ host: "127.0.0.1", port: {websocket_port}, no_tls: true }}\n'
        url = f"ws://127.0.0.1:{websocket_port}"
    config.write_text(text)
    return NatsServer(port, folder / "nats.log", arguments=("--config", str(config))), url


def _self_signed(folder: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(params=["plain", "tls", "websocket"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server, url = server_of(request.param, tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    server.start()
    yield url
    server.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_messages_of_every_size_arrive_whole_and_in_order(url: str) -> None:
    values = [bytes([65 + at % 26]) * size for at, size in enumerate(SIZES * 3)]

    async def work() -> list[bytes]:
        link, builder = NatsLink(url, name="test"), BatchBuilder()
        await link.open()
        await link.wait_until_up(10)
        await link.attach(("s",), builder.add)
        for value in values:
            assert await link.send(b"PUB s %d\r\n%s\r\n" % (len(value), value))
        await link.flush(10)
        await until(lambda: builder.rows == len(values))
        await link.close()
        found: list[bytes] = builder.taken().rows.to_arrow().column("value").to_pylist()
        return found

    assert asyncio.run(work()) == values


def test_a_failing_receiver_costs_the_connection_and_nothing_else(url: str) -> None:
    async def work() -> int:
        link, seen = NatsLink(url, name="test"), []

        def receive(frames: Frames) -> None:
            seen.append(len(frames.rows))
            if len(seen) == 1:
                raise RuntimeError("a bug")

        await link.open()
        await link.wait_until_up(10)
        await link.attach(("s",), receive)
        assert await link.send(b"PUB s 1\r\nx\r\n")
        await until(lambda: link.connections == 2 and link.is_up)
        assert await link.send(b"PUB s 1\r\ny\r\n")
        await until(lambda: len(seen) == 2)
        await link.close()
        return link.connections

    assert asyncio.run(work()) == 2


def test_the_last_words_of_a_server_are_heard() -> None:
    async def work() -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576,"headers":true}\r\n')
            for _ in range(2):
                while (await reader.readline()) != b"PING\r\n":
                    pass
                writer.write(b"PONG\r\n")
            writer.write(b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        link = NatsLink(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", name="test")
        await link.open()
        await link.wait_until_up(10)
        await until(lambda: link.forbidden > 0)
        server.close()
        await link.close()
        return link.last_refusal

    assert "permissions violation" in asyncio.run(work()).lower()


@pytest.mark.long
def test_memory_for_what_a_server_does_not_take_is_bounded() -> None:
    """A server that shakes hands and then reads nothing more: sending is refused, not heaped up."""

    async def work() -> tuple[int, bool]:
        done = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576,"headers":true}\r\n')
            for _ in range(2):  # the handshake's PING, and that of the first flush
                while (await reader.readline()) != b"PING\r\n":
                    pass
                writer.write(b"PONG\r\n")
            await done.wait()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        link = NatsLink(f"nats://127.0.0.1:{port}", name="test")
        await link.open()
        await link.wait_until_up(10)
        sent, message = 0, b"x" * (1 << 20)
        while link.send_now(message) and sent < 4 * _PENDING_BYTES:
            sent += len(message)
        still_up = link.is_up
        done.set()
        server.close()
        await link.close()
        return sent, still_up

    sent, still_up = asyncio.run(work())
    assert _PENDING_BYTES <= sent < 2 * _PENDING_BYTES
    assert still_up
