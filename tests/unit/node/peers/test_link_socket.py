"""The WebSocket of a link, over a real pair of sockets; the other end is written by hand."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from natslog.errors import ClusterMismatch
from natslog.node.peers.keys import Key, LinkSession
from natslog.node.peers.link_socket import LinkSocket
from natslog.node.peers.messages import MAX_FRAME_BYTES, FetchRequest, FetchResponse, NatsReachability, encode_frame

KEY = Key(b"secret")


class Far(asyncio.Protocol):
    """The other end: what it received, and whether the connection has ended."""

    def __init__(self) -> None:
        self.received = b""
        self.is_over = False

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True


Story = Callable[[LinkSocket, asyncio.Transport, Far, LinkSession, list[tuple[object, bytes]]], Awaitable[None]]


def linked(story: Story) -> None:
    """The acceptor's end, open; frames that it receives are noted."""

    async def told() -> None:
        loop = asyncio.get_running_loop()
        near_end, far_end = socket.socketpair()
        link = LinkSocket(KEY.session("acceptor", b"a"), is_dialler=False)
        server, _ = await loop.create_connection(asyncio.Protocol, sock=near_end)
        transport, far = await loop.create_connection(Far, sock=far_end)
        link.take_over(server, server.get_protocol(), "key")
        frames: list[tuple[object, bytes]] = []
        link.begin(lambda frame, payload: frames.append((frame, bytes(payload))))
        await until(lambda: far.received.endswith(b"\r\n\r\n"))
        assert far.received.startswith(b"HTTP/1.1 101 ")
        far.received = b""
        await story(link, transport, far, KEY.session("dialler", b"a"), frames)
        link.close()
        transport.close()
        await until(lambda: far.is_over)

    asyncio.run(told())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def framed(data: bytes, *, first: int = 0x82, mask: bytes = b"") -> bytes:
    is_masked = 0x80 if mask else 0
    if len(data) < 126:
        length = bytes([is_masked | len(data)])
    elif len(data) < 65536:
        length = bytes([is_masked | 126]) + len(data).to_bytes(2, "big")
    else:
        length = bytes([is_masked | 127]) + len(data).to_bytes(8, "big")
    shown = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data)) if mask else data
    return bytes([first]) + length + mask + shown


def requests(session: LinkSession, sizes: list[int], mask: bytes) -> tuple[bytes, list[FetchRequest]]:
    """Frames of about these sizes."""
    frames = [
        FetchRequest(at, "i" * min(size, 200), forget=("s" * 60,) * (size // 60)) for at, size in enumerate(sizes)
    ]  # type: ignore[arg-type]
    return b"".join(framed(bytes(session.sealer.seal(encode_frame(one))), mask=mask) for one in frames), frames


@pytest.mark.parametrize("mask", [b"", bytes(4), b"\x01\x82\x03\xff"])
@pytest.mark.parametrize("piece_bytes", [1, 7, 4096, 1 << 30])
def test_frames_of_any_size_are_received_in_any_pieces(mask: bytes, piece_bytes: int) -> None:
    """As the web server of an older broker sends them, too: with a mask."""

    async def story(
        link: LinkSocket, to: asyncio.Transport, far: Far, session: LinkSession, frames: list[tuple[object, bytes]]
    ) -> None:
        sizes = [0, 30, 90, 120, 300, 900] if piece_bytes == 1 else [0, 120, 65_000, 65_600, 300_000, 10, 66_000, 0]
        data, sent = requests(session, sizes, mask)
        for start in range(0, len(data), piece_bytes):
            to.write(data[start : start + piece_bytes])
            if piece_bytes < 4096 and start % 64 == 0:
                await asyncio.sleep(0)
        await until(lambda: len(frames) == len(sent))
        assert [frame for frame, _ in frames] == sent

    linked(story)


def test_a_ping_is_answered_and_a_pong_is_not() -> None:
    async def story(
        link: LinkSocket, to: asyncio.Transport, far: Far, session: LinkSession, frames: list[tuple[object, bytes]]
    ) -> None:
        to.write(framed(b"hello", first=0x89, mask=b"abcd") + framed(b"", first=0x8A))
        await until(lambda: len(far.received) >= 7)
        to.write(framed(b"again", first=0x89))
        await until(lambda: len(far.received) >= 14)
        assert far.received == framed(b"hello", first=0x8A) + framed(b"again", first=0x8A)

    linked(story)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (framed(b"text", first=0x81), "begins with the byte 0x81"),
        (framed(b"part", first=0x02), "begins with the byte 0x2"),
        (b"\x82\x7f" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"), "no frame of a broker has"),
        (framed(b"p" * 126, first=0x89), "no frame of a broker has"),
        (framed(b"not sealed"), "not authentic"),
    ],
)
def test_what_no_broker_sends_ends_the_link(data: bytes, problem: str) -> None:
    async def story(
        link: LinkSocket, to: asyncio.Transport, far: Far, session: LinkSession, frames: list[tuple[object, bytes]]
    ) -> None:
        to.write(data)
        with pytest.raises(ClusterMismatch, match=problem):
            await asyncio.wait_for(link.ended(), 20)
        await until(lambda: far.received.endswith(framed(b"", first=0x88)))
        assert not link.send(NatsReachability(True))
        assert frames == []

    linked(story)


def test_a_peer_that_answers_no_ping_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natslog.node.peers.link_socket.PING_S", 0.1)

    async def story(
        link: LinkSocket, to: asyncio.Transport, far: Far, session: LinkSession, frames: list[tuple[object, bytes]]
    ) -> None:
        await until(lambda: far.received == framed(b"", first=0x89))
        to.write(framed(b"", first=0x8A))
        await until(lambda: far.received == framed(b"", first=0x89) * 2)
        await asyncio.wait_for(link.ended(), 20)
        assert not link.send(NatsReachability(True))
        await until(lambda: far.is_over)
        assert far.received == framed(b"", first=0x89) * 2, "nothing is sent to a peer that is gone"

    linked(story)


def test_a_frame_for_which_there_is_no_room_is_not_accepted_and_the_next_one_verifies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("natslog.node.peers.link_socket._WAITING_BYTES", 8 * 1024 * 1024)

    async def story(
        link: LinkSocket, to: asyncio.Transport, far: Far, session: LinkSession, frames: list[tuple[object, bytes]]
    ) -> None:
        to.pause_reading()
        sent = 0
        while link.send(FetchResponse(sent), [bytes(1024 * 1024)]):
            sent += 1
        assert 8 <= sent < 16
        to.resume_reading()
        await until(lambda: link._transport is not None and not link._transport.get_write_buffer_size())
        assert link.send(FetchResponse(sent))
        data, opened = far, 0
        await until(lambda: len(far.received) > sent * 1024 * 1024)
        await asyncio.sleep(0.05)
        rest = memoryview(data.received)
        while len(rest):
            size = {126: 2, 127: 8}.get(rest[1], 0)
            length = int.from_bytes(rest[2 : 2 + size], "big") if size else rest[1]
            session.opener.opened(rest[2 + size : 2 + size + length])
            rest, opened = rest[2 + size + length :], opened + 1
        assert opened == sent + 1

    linked(story)
