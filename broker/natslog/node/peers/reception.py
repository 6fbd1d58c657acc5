"""The start of links on the acceptor's side: few and short-lived places for unauthenticated clients.

Invariants. At most 64 hellos are being read and at most 64 are answered and not yet a link, 16 of each from one
address; each is released after 5 s. If there is no free place, the oldest one is released: a broker needs milliseconds,
so many slow clients do not block it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from natslog.errors import ClusterMismatch, NatslogError
from natslog.node.peers.handshake import Greeted, Hello, checked_hello, greeted
from natslog.node.peers.keys import KeyRing, LinkSession
from natslog.node.peers.owner import LinkOwner
from natslog.node.peers.places import Places
from natslog.urls import normal_url

HANDSHAKE_S = 5.0
MAX_PLACES = 64
MAX_PLACES_OF_ONE_ADDRESS = 16


@dataclass(frozen=True, slots=True)
class _Ticket:
    greeted: Greeted
    expires_s: float


class Reception:
    """Of one broker."""

    def __init__(self, owner: LinkOwner, keys: KeyRing) -> None:
        self._owner = owner
        self._keys = keys
        self._reading: Places[asyncio.Timeout] = Places(MAX_PLACES, MAX_PLACES_OF_ONE_ADDRESS)
        self._tickets: Places[_Ticket] = Places(MAX_PLACES, MAX_PLACES_OF_ONE_ADDRESS)
        self._numbers = 0

    @asynccontextmanager
    async def place(self, address: str) -> AsyncIterator[None]:
        """For a connection that is not authenticated yet.

        Raises:
            TimeoutError: it took longer than 5 s, or new ones arrived and it was the oldest.
        """
        self._numbers += 1
        name = str(self._numbers)
        async with asyncio.timeout(HANDSHAKE_S) as limit:
            lost = self._reading.put(name, address, limit)
            if lost is not None and not lost.expired():
                lost.reschedule(asyncio.get_running_loop().time())
            try:
                yield
            finally:
                self._reading.take(name)

    def introduced(self, body: bytes, proof: str, address: str) -> tuple[bytes, str]:
        """The answer to a hello, and its proof.

        Raises:
            ClusterMismatch: the sender of the hello does not belong to this cluster.
        """
        try:
            hello, key = checked_hello(body, proof, self._required_keys(), self._addresses())
            answered = greeted(hello, body, key, self._owner.hello())
            try:
                self._owner.check_peer(hello)
            except NatslogError as error:
                if error.facts.get("itself"):  # the dialler sees it in the answer
                    return answered.answer, answered.proof
                raise
        except NatslogError as error:
            self._owner.refused(error)
            raise
        expires_s = asyncio.get_running_loop().time() + HANDSHAKE_S
        self._tickets.put(answered.nonce, address, _Ticket(answered, expires_s))
        return answered.answer, answered.proof

    def admitted(self, link: str) -> tuple[Hello, LinkSession]:
        """The broker that opens a link with this header, and its seals. A header is valid for one link.

        Raises:
            ClusterMismatch: the header is not the one of a hello that was answered a moment ago.
        """
        nonce, _, proof = link.partition(":")
        ticket = self._tickets.take(nonce)
        if ticket is None or ticket.expires_s < asyncio.get_running_loop().time():
            raise ClusterMismatch(
                "a link must begin with a hello and be opened once, within 5 s of the answer to the hello"
            )
        session = ticket.greeted.session(proof)
        self._owner.check_peer(ticket.greeted.peer)
        self._owner.admitted(ticket.greeted.peer)
        return ticket.greeted.peer, session

    def _required_keys(self) -> KeyRing:
        if not self._keys.keys:
            raise ClusterMismatch("this broker has no cluster secret and accepts no links: set cluster_secret_file")
        return self._keys

    def _addresses(self) -> frozenset[str]:
        return frozenset(map(normal_url, self._owner.addresses))
