"""The NATS link: what `flush` promises."""

from __future__ import annotations

import asyncio
import socket

from natslog.wire.link import NatsLink

COUNT, SIZE = 1000, 8192


def received_by_now(raw: socket.socket) -> int:
    """Messages the server had routed to this subscriber when it answers a PING sent now."""
    raw.sendall(b"PING\r\n")
    data = b""
    while not data.endswith(b"PONG\r\n"):
        data += raw.recv(1 << 20)
    return data.count(b"MSG flushed ")


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
