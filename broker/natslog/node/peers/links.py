"""Links between brokers: one WebSocket from each broker to each other one, over the brokers' own HTTP servers.

Theory of operation. A broker dials every known member and keeps the link open. It sends its messages to another broker
on the link that it dialled, and receives answers on the same link. Fetched batches therefore never delay Raft's
messages, and the requests on a lost link fail with it. A link belongs to one life of either side: both name theirs in
the handshake.

Invariants. There is no WebSocket before both sides have proven the secret and belong to one cluster (`handshake`).
Every frame is sealed (`keys`); one that does not verify ends the link. Frames and the queue of frames are bounded:
frames that do not fit are dropped, as on a lossy network, and the sender repeats its request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from natslog.errors import BrokerUnavailable, ClusterMismatch, NatslogError, NotReady, from_json
from natslog.log_events import event
from natslog.model import BrokerId
from natslog.node.peers.handshake import LINK_HEADER, LINK_PATH, Hello
from natslog.node.peers.introduction import introduce
from natslog.node.peers.link_socket import LinkSocket
from natslog.node.peers.messages import Answered, Ask, FetchResponse, Frame, Payload, decode_value
from natslog.node.peers.owner import LinkOwner
from natslog.node.peers.problems import is_refusal, problem_of
from natslog.node.peers.reception import HANDSHAKE_S
from natslog.request_ids import current_request_id
from natslog.security.tls import BrokerTls

logger = logging.getLogger("natslog.links")

_REDIAL_S = (0.1, 1.0)
_GUEST_S = 30.0
_COMPLAIN_EVERY_S = 30.0

OnFetched = Callable[[FetchResponse, memoryview], None]


class DialledLink:
    """The link from this broker to another one, dialled again whenever it is lost."""

    def __init__(
        self, owner: LinkOwner, session: aiohttp.ClientSession, url: str, tls: BrokerTls | None = None
    ) -> None:
        self.url = url
        self.peer: Hello | None = None
        self.problem = "no connection was made yet"
        self.refusal: NatslogError | None = None  # what the last handshake ended with
        self.is_self = False
        self.has_ended = False  # the process that it was up with: no other one is known to run
        self._was_up = False  # since that was found
        self._on_fetched: OnFetched | None = None
        self._owner = owner
        self._session = session
        self._tls = tls
        self._socket: LinkSocket | None = None
        self._is_up = False
        self._numbers = self._introductions = 0
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._complained_s = -_COMPLAIN_EVERY_S
        self._up = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"link to {url}")

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def failure(self) -> NatslogError:
        """Why the link is not up, as an error of the API."""
        is_refusal = self.refusal is not None and self.refusal.message == self.problem
        return self.refusal if self.refusal and is_refusal else BrokerUnavailable(self.problem)

    def begin_fetching(self, on_fetched: OnFetched) -> None:
        """Answers to fetches are passed to this function from now on."""
        self._on_fetched = on_fetched

    def send(self, frame: Frame) -> bool:
        return self._socket is not None and self._is_up and self._socket.send(frame)

    async def wait_until_up(self) -> None:
        await self._up.wait()

    async def ask(self, what: str, timeout_s: float = 5.0, **arguments: Any) -> Any:
        """The other broker's answer.

        Raises:
            BrokerUnavailable: no answer in time. Or the error of its refusal.
        """
        self._numbers += 1
        number, future = self._numbers, asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            if not self.send(Ask(number, what, msgspec.json.encode(arguments), current_request_id())):
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
            dialled_s = time.monotonic()
            try:
                await self._connect_and_read()
                pause_s = _REDIAL_S[0]
                if time.monotonic() - dialled_s > _REDIAL_S[1]:
                    continue  # at once: it is refused where the process has ended
            except (NatslogError, OSError, aiohttp.ClientError, TimeoutError) as error:
                self._note_problem(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _REDIAL_S[1])

    def _note_problem(self, error: BaseException) -> None:
        self.refusal = error if isinstance(error, NatslogError) else None
        self.problem = problem_of(error, HANDSHAKE_S)
        if self._was_up and is_refusal(error):
            assert self.peer is not None, "it was up"
            self._was_up, self.has_ended = False, True
            self._owner.process_ended(self.peer)
        self.is_self = isinstance(error, NatslogError) and bool(error.facts.get("itself"))
        if (
            isinstance(error, NatslogError | aiohttp.ClientSSLError)
            and not self.is_self
            and not isinstance(error, NotReady)  # it starts
            and time.monotonic() - self._complained_s > _COMPLAIN_EVERY_S
        ):
            self._complained_s = time.monotonic()
            logger.error("no link to %s: %s", self.url, self.problem, extra=event("broker_down", address=self.url))

    async def _connect_and_read(self) -> None:
        introductions = self._introductions
        tls = True if self._tls is None else self._tls.dialling  # as it is now: a refresh replaces it
        async with asyncio.timeout(HANDSHAKE_S):
            met = await introduce(self._session, self._owner, self.url, tls)
            headers = {LINK_HEADER: met.link}
            socket = self._socket = await LinkSocket.dial(self.url + LINK_PATH, headers, met.session, tls)
        try:
            if introductions != self._introductions:
                return  # its hello has changed meanwhile
            self.peer, self._is_up, self._was_up, self.has_ended = met.peer, True, True, False
            self._up.set()
            self._owner.admitted(met.peer)
            self._owner.link_changed(met.peer, True)
            socket.begin(self._dispatch)
            await socket.ended()
        finally:
            self._down(socket)

    def _dispatch(self, frame: Frame, payload: memoryview) -> None:
        match frame:
            case FetchResponse() if self._on_fetched is not None:
                self._on_fetched(frame, payload)
            case Answered(number=number, result=result, error=error):
                future = self._asked.get(number)
                if future is not None and not future.done():
                    if error:
                        future.set_exception(from_json({"error": decode_value(error)}))
                    else:
                        future.set_result(decode_value(result))
            case _:
                assert self.peer is not None, "a link that reads has a peer"
                self._owner.received(self.peer, frame, lambda frame, payload: None)

    def _down(self, socket: LinkSocket) -> None:
        was_up, self._is_up, self._socket = self._is_up, False, None
        self._up.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(BrokerUnavailable(f"the link to {self.url} was lost: repeat the request"))
        if was_up:
            self.problem = "the link was lost"
            assert self.peer is not None, "it was up"
            self._owner.link_changed(self.peer, False)
        socket.close()

    def hang_up(self) -> None:
        """Dials again at once with a new hello, also if it is already about to dial."""
        self._introductions += 1
        if self._socket is not None:
            self._socket.close()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def serve_link(owner: LinkOwner, socket: LinkSocket, peer: Hello) -> None:
    """The other end of a dialled link, from its first frame to its end."""

    def reply(frame: Frame, payload: Payload | None) -> None:
        socket.send(frame, payload)  # frames that cannot be sent are lost, and requested again

    owner.served.add(socket)
    try:
        if (welcome := owner.welcome_for(peer)) is not None:
            socket.send(welcome)
        socket.begin(lambda frame, payload: owner.received(peer, frame, reply))
        await socket.ended()
    except ClusterMismatch as error:
        logger.error(
            "the link to broker %d is closed: %s",
            peer.broker,
            error.message,
            extra=event("peer.link_closed", peer=peer.broker, reason=error.code),
        )
    finally:
        owner.served.discard(socket)
        socket.close()


class Links:
    """All links that this broker dials, by the other's URL.

    Args:
        tls: for `https` URLs; None: the authorities of the system.
    """

    def __init__(self, owner: LinkOwner, tls: BrokerTls | None = None) -> None:
        self._owner = owner
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._by_url: dict[str, DialledLink] = {}
        self._guests: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def dial(self, urls: set[str]) -> None:
        """Maintains links to exactly these URLs."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=HANDSHAKE_S)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        self._guests = {url: until for url, until in self._guests.items() if until > time.monotonic()}
        urls = urls | set(self._guests)
        for url in urls - set(self._by_url):
            self._by_url[url] = DialledLink(self._owner, self._session, url, self._tls)
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

    @property
    def ended(self) -> frozenset[BrokerId]:
        """Brokers whose processes have ended since a link to them was up."""
        ended = {link.peer.broker for link in self._by_url.values() if link.has_ended and link.peer is not None}
        return frozenset(broker for broker in ended if self.of(broker) is None)

    def began(self, broker: BrokerId) -> None:
        """A process of this broker runs: it has opened a link to this one, perhaps before it is dialled again."""
        for link in self._by_url.values():
            if link.peer is not None and link.peer.broker == broker:
                link.has_ended = False

    def to(self, url: str) -> DialledLink | None:
        return self._by_url.get(url)

    def redial(self) -> None:
        """The hello of this broker has changed."""
        for link in self._by_url.values():
            link.hang_up()

    def keep(self, url: str) -> None:
        """For a while, and from the next `dial` on: requests of a broker that is not a known member must be
        answered.
        """
        self._guests[url] = time.monotonic() + _GUEST_S

    async def meet(self, url: str) -> Hello:
        """The broker at this URL; the link is kept for a while.

        Raises:
            BrokerUnavailable: no server responds there, or it is not a broker of this cluster.
        """
        self.dial({*self._by_url, url})
        self._guests[url] = time.monotonic() + _GUEST_S
        link = self._by_url[url]
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await link.wait_until_up()
        except TimeoutError as error:
            self._guests.pop(url, None)
            raise BrokerUnavailable(f"no broker could be reached at {url}: {link.problem}", url=url) from error
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
