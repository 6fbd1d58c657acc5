"""Links between brokers: one WebSocket from each broker to each other one, over the brokers' own HTTP servers.

Theory of operation. A broker dials every member it knows and keeps the link up; what it has to say to another it says
on the link it dialled, and what answers a question comes back on the same one. So fetched batches never stand in the
way of Raft's messages, and a link that is gone takes its questions with it. A link is of one life of either side: both
name theirs in the handshake.

Invariants. Nothing but the handshake passes before both sides have proven the secret and belong together. Frames are
bounded, and what waits to be sent is: what does not fit is dropped, as on a bad network, and the sender asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from natslog.errors import BrokerUnavailable, ClusterMismatch, NatslogError, from_json
from natslog.model import BrokerId
from natslog.node.peers.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Answered,
    Ask,
    Challenge,
    FetchResponse,
    Frame,
    Hello,
    Refused,
    Welcome,
    decode_frame,
    encode_frame,
)

logger = logging.getLogger("natslog.links")

LINK_PATH = "/internal/link"
_HANDSHAKE_S = 5.0
_REDIAL_S = (0.1, 1.0)
_PING_S = 5.0
_GUEST_S = 30.0
_WAITING_FRAMES = 4096
_WAITING_BYTES = 64 * 1024 * 1024
_COMPLAIN_EVERY_S = 30.0

Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


class LinkOwner(Protocol):
    """The broker, as links see it."""

    secret: bytes | None
    served: set[web.WebSocketResponse]

    def hello(self, nonce: str) -> Hello: ...

    def check_peer(self, hello: Hello) -> None:
        """Raises ClusterMismatch where the other one does not belong here."""

    def welcome_for(self, hello: Hello) -> Welcome | None: ...

    def received(self, peer: Hello, frame: Frame, reply: Callable[[Frame, list[bytes] | None], None]) -> None:
        """A frame on a link that the other side dialled."""

    def refused(self, error: NatslogError) -> None:
        """A link was refused; it is tried again and again."""

    def link_changed(self, peer: Hello, is_up: bool) -> None: ...


class Outbox:
    """Sends frames over a socket, in order, from a task of its own."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING_FRAMES)
        self._waiting_bytes = 0
        self._task = asyncio.create_task(self._run(), name="link outbox")

    def send(self, frame: Frame, payload: list[bytes] | None = None) -> bool:
        """Whether it was taken: False where too much is waiting already."""
        data = encode_frame(frame, payload)
        if self._waiting.full() or (self._waiting_bytes and self._waiting_bytes + len(data) > _WAITING_BYTES):
            return False
        self._waiting_bytes += len(data)
        self._waiting.put_nowait(data)
        return True

    async def _run(self) -> None:
        try:
            while (data := await self._waiting.get()) is not None:
                self._waiting_bytes -= len(data)
                await self._socket.send_bytes(data)
        except (ConnectionError, aiohttp.ClientError):
            return  # the reading side sees it too

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def _received(socket: Socket, timeout_s: float | None = None) -> tuple[Frame, memoryview] | None:
    """The next frame; None when the link is gone. Raises ClusterMismatch, TimeoutError."""
    message = await socket.receive(timeout_s)
    if message.type is not aiohttp.WSMsgType.BINARY:
        return None
    return decode_frame(message.data)


async def _handshake(socket: Socket) -> Frame:
    received = await _received(socket, _HANDSHAKE_S)
    if received is None:
        raise ConnectionResetError("the other side hung up")
    if isinstance(received[0], Refused):
        raise from_json({"error": received[0].error})
    return received[0]


class DialledLink:
    """The link from this broker to another one, dialled again whenever it is gone."""

    def __init__(self, owner: LinkOwner, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self.peer: Hello | None = None
        self.problem = "it was never reached"
        self.is_self = False
        self.on_fetched: Callable[[FetchResponse, memoryview], None] | None = None
        self._owner = owner
        self._session = session
        self._outbox: Outbox | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._numbers = 0
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._complained_s = -_COMPLAIN_EVERY_S
        self._up = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"link to {url}")

    @property
    def is_up(self) -> bool:
        return self._outbox is not None

    def send(self, frame: Frame) -> bool:
        return self._outbox is not None and self._outbox.send(frame)

    async def wait_until_up(self) -> None:
        await self._up.wait()

    async def ask(self, what: str, timeout_s: float = 5.0, **arguments: Any) -> Any:
        """The other broker's answer.

        Raises:
            BrokerUnavailable: none in time. Whatever it refused with.
        """
        self._numbers += 1
        number, future = self._numbers, asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            if not self.send(Ask(number, what, arguments)):
                raise BrokerUnavailable(f"the broker at {self.url} cannot be reached: {self.problem}")
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise BrokerUnavailable(f"the broker at {self.url} did not answer within {timeout_s:g} s") from error
        finally:
            del self._asked[number]

    async def _run(self) -> None:
        pause_s = _REDIAL_S[0]
        while not self.is_self:
            try:
                await self._connect_and_read()
                pause_s = _REDIAL_S[0]
            except (NatslogError, OSError, aiohttp.ClientError, TimeoutError) as error:
                self._note_problem(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _REDIAL_S[1])

    def _note_problem(self, error: BaseException) -> None:
        self.problem = error.message if isinstance(error, NatslogError) else f"{type(error).__name__}: {error}"
        self.is_self = isinstance(error, NatslogError) and bool(error.facts.get("itself"))
        if (
            isinstance(error, NatslogError)
            and not self.is_self
            and time.monotonic() - self._complained_s > _COMPLAIN_EVERY_S
        ):
            self._complained_s = time.monotonic()
            logger.error("no link to %s: %s", self.url, self.problem)

    async def _connect_and_read(self) -> None:
        address = self.url + LINK_PATH
        connecting = self._session.ws_connect(
            address, max_msg_size=MAX_FRAME_BYTES, compress=0, heartbeat=_PING_S, autoping=True
        )
        async with asyncio.timeout(_HANDSHAKE_S):
            socket = self._socket = await connecting
        try:
            self.peer = await self._introduce(socket)
            self._outbox = Outbox(socket)
            self._up.set()
            self._owner.link_changed(self.peer, True)
            while (received := await _received(socket)) is not None:
                self._dispatch(*received)
        finally:
            await self._down(socket)

    async def _introduce(self, socket: aiohttp.ClientWebSocketResponse) -> Hello:
        secret = self._owner.secret
        if secret is None:
            raise ClusterMismatch("this broker has no cluster secret: give it cluster_secret_file")
        challenge = await _handshake(socket)
        if not isinstance(challenge, Challenge):
            raise ClusterMismatch(f"{self.url} does not answer as a broker of this version does")
        nonce = secrets.token_hex(16)
        await socket.send_bytes(encode_frame(self._owner.hello(nonce).signed(secret, challenge.nonce)))
        hello = await _handshake(socket)
        if not isinstance(hello, Hello):
            raise ClusterMismatch(f"{self.url} does not answer as a broker of this version does")
        hello.check(secret, nonce)
        self._owner.check_peer(hello)
        return hello

    def _dispatch(self, frame: Frame, payload: memoryview) -> None:
        match frame:
            case FetchResponse() if self.on_fetched is not None:
                self.on_fetched(frame, payload)
            case Answered(number=number, result=result, error=error):
                future = self._asked.get(number)
                if future is not None and not future.done():
                    if error is None:
                        future.set_result(result)
                    else:
                        future.set_exception(from_json({"error": error}))
            case _:
                assert self.peer is not None, "a link that reads has a peer"
                self._owner.received(self.peer, frame, lambda frame, payload: None)

    async def _down(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        outbox, self._outbox = self._outbox, None
        self._socket = None
        self._up.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(BrokerUnavailable(f"the link to {self.url} was lost: ask again"))
        if outbox is not None:
            self.problem = "the link was lost"
            assert self.peer is not None, "it was up"
            self._owner.link_changed(self.peer, False)
            await outbox.close()
        await socket.close()

    def hang_up(self) -> None:
        """Dials again at once, and introduces itself anew."""
        if self._socket is not None:
            self._hanging_up = asyncio.create_task(self._socket.close(), name=f"hanging up on {self.url}")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def serve_link(owner: LinkOwner, socket: web.WebSocketResponse) -> None:
    """The other end of a dialled link, from handshake to its end."""
    try:
        hello = await _admit(owner, socket)
    except NatslogError as error:
        if not error.facts.get("itself"):
            owner.refused(error)
        with contextlib.suppress(ConnectionError):  # it may have hung up already
            await socket.send_bytes(encode_frame(Refused(error=error.to_json()["error"])))
        return
    except (TimeoutError, ConnectionError):
        return
    outbox = Outbox(socket)

    def reply(frame: Frame, payload: list[bytes] | None) -> None:
        outbox.send(frame, payload)  # what cannot be sent is lost, and asked for again

    owner.served.add(socket)
    try:
        if (welcome := owner.welcome_for(hello)) is not None:
            outbox.send(welcome)
        while (received := await _received(socket)) is not None:
            owner.received(hello, received[0], reply)
    except ClusterMismatch as error:
        logger.error("the link of broker %d is cut: %s", hello.broker, error.message)
    finally:
        owner.served.discard(socket)
        await outbox.close()


async def _admit(owner: LinkOwner, socket: web.WebSocketResponse) -> Hello:
    if owner.secret is None:
        raise ClusterMismatch("this broker has no cluster secret and takes no links: give it cluster_secret_file")
    nonce = secrets.token_hex(16)
    await socket.send_bytes(encode_frame(Challenge(nonce=nonce)))
    hello = await _handshake(socket)
    if not isinstance(hello, Hello):
        raise ClusterMismatch("a link begins with who is calling")
    if hello.protocol != PROTOCOL:
        raise ClusterMismatch(
            f"broker {hello.broker} ({hello.version}) speaks protocol {hello.protocol}, this one {PROTOCOL}: upgrade "
            "the older one",
            broker=hello.broker,
        )
    hello.check(owner.secret, nonce)
    owner.check_peer(hello)
    await socket.send_bytes(encode_frame(owner.hello("").signed(owner.secret, hello.nonce)))
    return hello


class Links:
    """All links that this broker dials, by the other's URL."""

    def __init__(self, owner: LinkOwner) -> None:
        self._owner = owner
        self._session: aiohttp.ClientSession | None = None
        self._by_url: dict[str, DialledLink] = {}
        self._guests: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def dial(self, urls: set[str]) -> None:
        """Keeps links to exactly these."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=_HANDSHAKE_S))
        self._guests = {url: until for url, until in self._guests.items() if until > time.monotonic()}
        urls = urls | set(self._guests)
        for url in urls - set(self._by_url):
            self._by_url[url] = DialledLink(self._owner, self._session, url)
        for url in set(self._by_url) - urls:
            closing = asyncio.create_task(self._by_url.pop(url).close(), name=f"closing the link to {url}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def of(self, broker: BrokerId) -> DialledLink | None:
        """The link to a broker, where it is up."""
        for link in self._by_url.values():
            if link.is_up and link.peer is not None and link.peer.broker == broker:
                return link
        return None

    def to(self, url: str) -> DialledLink | None:
        return self._by_url.get(url)

    def redial(self) -> None:
        """What this broker says of itself has changed."""
        for link in self._by_url.values():
            link.hang_up()

    def keep(self, url: str) -> None:
        """For a while, and from the next `dial` on: what a broker says that is no known member must be answered."""
        self._guests[url] = time.monotonic() + _GUEST_S

    async def meet(self, url: str) -> Hello:
        """Who is at this URL; the link stays for a while.

        Raises:
            BrokerUnavailable: nobody answers there, or not as a broker of this cluster would.
        """
        self.dial({*self._by_url, url})
        self._guests[url] = time.monotonic() + _GUEST_S
        link = self._by_url[url]
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await link.wait_until_up()
        except TimeoutError as error:
            raise BrokerUnavailable(f"no broker could be met at {url}: {link.problem}", url=url) from error
        assert link.peer is not None, "a link that is up has a peer"
        return link.peer

    @property
    def all(self) -> list[DialledLink]:
        return list(self._by_url.values())

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._by_url.values()))
        self._by_url = {}
        if self._session is not None:
            await self._session.close()
