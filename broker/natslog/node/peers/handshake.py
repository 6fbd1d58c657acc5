"""The mutual authentication of two brokers, before there is a link. Sans-IO; `links` and `reception` use it.

    dialler                                       acceptor
    POST /internal/link
      body: Hello                                 the hello is of a holder of the secret, of this protocol,
      Natslog-Proof: key id and "hello" proof,    dialled an address of this broker, and belongs here
        one for each key of the dialler
                                                  200, body: Hello
    the acceptor is a holder of the secret          Natslog-Proof: key id and "acceptor" proof of both bodies
    and has seen this very hello
    GET /internal/link (WebSocket)
      Natslog-Link: the acceptor's nonce and      a holder of the secret has seen this very answer; then 101,
        "dialler" proof of both bodies            and every frame is sealed with the keys of this session

A proof is an HMAC-SHA256 over the bytes of the bodies as they were sent. It therefore covers the role, both brokers
with their folders, lives and random numbers, the address that was dialled, the protocol and the key. Before the last
step there is no WebSocket: bodies have at most 64 KiB.

A dialled server that relays the messages to a broker gains nothing: the address that was dialled is not the
broker's, and with another address the proofs are of other bytes. ADR 9 has the reasons.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated

import msgspec

from natslog.consensus import MAX_BROKER_ID, MAX_COUNT
from natslog.errors import ClusterMismatch, InvalidRequest, natslog_version
from natslog.model import BrokerId
from natslog.node.peers.keys import Key, KeyRing, LinkSession
from natslog.urls import MAX_URL_CHARS, normal_url

PROTOCOL = 2
LINK_PATH = "/internal/link"
MAX_HELLO_BYTES = 64 * 1024
PROOF_HEADER, LINK_HEADER = "Natslog-Proof", "Natslog-Link"
_MAX_KEYS = 16
_MAX_LIVES = 256

Name = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[0-9A-Za-z_.:+-]*$")]
Url = Annotated[str, msgspec.Meta(max_length=MAX_URL_CHARS, pattern=r"^([!-~]*)$")]
Nonce = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Level = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of the sender, as JSON. New fields are added with a default; an older broker ignores them, but its
    proof covers them.

    Attributes:
        cluster_id: "" while its folder is blank.
        min_level, max_level: the feature levels that this version of natslog supports.
        wall_us: its clock, to warn of wrong ones.
        dialled: the address that the dialler used; "" from the acceptor.
        keys: ids of the dialler's keys, the preferred one first.
        lives: the incarnations that its folder had, this one last, with its nonce.
    """

    protocol: Count
    version: Name
    broker: Annotated[BrokerId, msgspec.Meta(ge=1, le=MAX_BROKER_ID)]
    url: Url
    directory: Name
    life: Count
    cluster_id: Name
    min_level: Level
    max_level: Level
    wall_us: Annotated[int, msgspec.Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
    nonce: Nonce = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    dialled: Url = ""
    keys: Annotated[tuple[Name, ...], msgspec.Meta(max_length=_MAX_KEYS)] = ()
    lives: Annotated[tuple[Name, ...], msgspec.Meta(max_length=_MAX_LIVES)] = ()

    @property
    def incarnation(self) -> str:
        return self.lives[-1] if self.lives else f"{self.directory}.{self.life}"

    def supports(self, level: int) -> bool:
        return self.min_level <= level <= self.max_level


class _Version(msgspec.Struct, frozen=True):
    """What every protocol's hello has."""

    protocol: Count
    version: Name = "?"
    broker: Count = 0


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Hello).decode
_decode_version = msgspec.json.Decoder(_Version).decode


def _decoded(body: bytes) -> Hello:
    """Raises ClusterMismatch: another protocol, or no hello."""
    try:
        found = _decode_version(body)
        if found.protocol != PROTOCOL:
            raise other_protocol(f"broker {found.broker}", found.protocol, found.version)
        return _decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's errors, and texts that are not UTF-8
        raise ClusterMismatch(f"the hello of a broker cannot be decoded: {error}") from error


def other_protocol(who: str, protocol: int, version: str) -> ClusterMismatch:
    return ClusterMismatch(
        f"{who} runs natslog {version}, which uses link protocol {protocol}, but this broker runs natslog "
        f"{natslog_version()}, which uses link protocol {PROTOCOL}: stop all brokers and start them with one version"
    )


def _proof_of(header: str, keys: KeyRing) -> tuple[Key, str] | None:
    """The first key of the header that is known here, and the proof."""
    for each in header.split(",")[:_MAX_KEYS]:
        id, _, proof = each.strip().partition(":")
        if (key := keys.find(id)) is not None:
            return key, proof
    return None


def another_secret(who: str) -> ClusterMismatch:
    return ClusterMismatch(f"{who} has another cluster secret: give all brokers the same cluster_secret_file")


# ---- the dialler ----


@dataclass(frozen=True, slots=True)
class Met:
    """The acceptor has proven itself. `link` is the header that opens the WebSocket, once."""

    peer: Hello
    session: LinkSession
    link: str


class Dialling:
    """One attempt of a dialler. `body` and `proof` are sent first; `met` takes the answer."""

    def __init__(self, keys: KeyRing, hello: Hello) -> None:
        self._keys = keys
        self.body = _encode(hello)
        self.proof = ",".join(f"{key.id}:{key.proof('hello', self.body)}" for key in keys.keys)

    def met(self, body: bytes, proof: str) -> Met:
        """Raises ClusterMismatch: the other side does not have the secret, or answers another hello than this one."""
        found = _proof_of(proof, self._keys)
        if found is None or not found[0].proves(found[1], "acceptor", self.body, body):
            raise ClusterMismatch(
                "it did not prove that it has the cluster secret: it is not a broker of this cluster, or it has "
                "another cluster_secret_file"
            )
        key, peer = found[0], _decoded(body)
        session = key.session("dialler", self.body, body)
        return Met(peer, session, f"{peer.nonce}:{key.proof('dialler', self.body, body)}")


# ---- the acceptor ----


@dataclass(frozen=True, slots=True)
class Greeted:
    """A hello that was answered, against which the last step is checked. Valid for one link."""

    peer: Hello
    nonce: str
    answer: bytes
    proof: str
    _body: bytes
    _key: Key

    def session(self, proof: str) -> LinkSession:
        """Raises ClusterMismatch: the sender has not received the answer, or does not have the secret."""
        if not self._key.proves(proof, "dialler", self._body, self.answer):
            raise another_secret(f"the sender that opens a link as broker {self.peer.broker}")
        return self._key.session("acceptor", self._body, self.answer)


def checked_hello(body: bytes, proof: str, keys: KeyRing, addresses: frozenset[str]) -> tuple[Hello, Key]:
    """The hello of a dialler that has the secret and addressed this broker.

    Args:
        addresses: the normal form of every address that this broker is reached by.

    Raises:
        ClusterMismatch: another protocol, another secret, or another address was dialled.
    """
    hello = _decoded(body)
    found = _proof_of(proof, keys)
    if found is None or not found[0].proves(found[1], "hello", body):
        raise another_secret(f"broker {hello.broker} at {hello.url}")
    if _normal(hello.dialled) not in addresses:
        raise ClusterMismatch(
            f"broker {hello.broker} connected to {hello.dialled}, but the addresses of this broker are "
            f"{', '.join(sorted(addresses))}: correct the seeds, or add the address to the advertise_url or "
            "peer_urls of this broker",
            broker=hello.broker,
        )
    return hello, found[0]


def greeted(hello: Hello, body: bytes, key: Key, mine: Hello) -> Greeted:
    """The answer to a hello."""
    answer = _encode(mine)
    return Greeted(hello, mine.nonce, answer, f"{key.id}:{key.proof('acceptor', body, answer)}", body, key)


def _normal(url: str) -> str:
    try:
        return normal_url(url)
    except InvalidRequest:
        return ""
