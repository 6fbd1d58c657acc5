"""What is left to nats-py of a connection's bytes, also of its last ones."""

from __future__ import annotations

import asyncio
from typing import Any

from nats.aio.client import Client

from natslog.wire.frames import Frames
from natslog.wire.transport import FrameDemux, _Landing


class _Transport:
    """A connection of which only the protocol is asked."""

    def get_protocol(self) -> Any:
        return self

    def eof_received(self) -> None:
        return None


def test_frames_go_to_their_receiver_and_the_last_words_to_nats_py() -> None:
    demux = FrameDemux(Client(), in_place=True)
    received: list[bytes] = []

    def receive(frames: Frames) -> None:
        received.extend(frames.buffer[row[8] : row[8] + row[9]].tobytes() for row in frames.rows)

    demux.receivers[7] = receive
    landing = _Landing(_Transport(), demux)  # type: ignore[arg-type]
    data = b"MSG a 7 1\r\nx\r\nPING\r\nMSG a 8 1\r\ny\r\nMSG a 7 1\r\nz\r\n-ERR 'gone'\r\n"
    landing.get_buffer(-1)[: len(data)] = data
    landing.buffer_updated(len(data))
    landing.eof_received()
    assert received == [b"x", b"z"]
    assert not landing.at_eof, "what came before the end is still to be read"
    assert asyncio.run(landing.read()) == b"PING\r\nMSG a 8 1\r\ny\r\n-ERR 'gone'\r\n"
    assert landing.at_eof
    assert asyncio.run(landing.read()) == b""
