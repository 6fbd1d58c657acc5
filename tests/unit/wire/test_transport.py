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


def test_frames_of_joined_subscriptions_go_to_one_receiver_in_their_order() -> None:
    demux = FrameDemux(Client(), in_place=True)
    received: dict[int, list[bytes]] = {2: [], 5: []}

    def receiver(group: int) -> Any:
        def receive(frames: Frames) -> None:
            received[group].extend(frames.buffer[row[8] : row[8] + row[9]].tobytes() for row in frames.rows)

        return receive

    for group, sids in ((5, (5, 9, 3)), (2, (2,))):
        demux.receivers[group] = receiver(group)
        for sid in sids:
            demux.join(sid, group)
    landing = _Landing(_Transport(), demux)  # type: ignore[arg-type]
    sids = [5, 9, 2, 3, 77, 3, 5, 1, 9]
    data = b"PING\r\n" + b"".join(b"MSG a %d 1\r\n%d\r\n" % (sid, at) for at, sid in enumerate(sids))
    landing.get_buffer(-1)[: len(data)] = data
    landing.buffer_updated(len(data))
    assert received == {5: [b"0", b"1", b"3", b"5", b"6", b"8"], 2: [b"2"]}
    assert asyncio.run(landing.read()) == b"PING\r\nMSG a 77 1\r\n4\r\nMSG a 1 1\r\n7\r\n"
