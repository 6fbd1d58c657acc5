"""What brokers say to each other over a link: a msgpack header that names the kind, and raw bytes where there are any.

    frame = header length (4 bytes, big-endian) | header | payload

A link opens with a handshake (`Challenge`, `Hello`, `Hello` back) in which both sides prove that they know the
cluster's secret without sending it: HMAC-SHA256 over what they say of themselves and the other's random number.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, TypeAlias

import msgspec

from natslog.cluster.commands import Proposal
from natslog.cluster.roles import FetchPosition, Verdict
from natslog.consensus import Message
from natslog.errors import ClusterMismatch
from natslog.model import BrokerId, Epoch, StreamId

PROTOCOL = 1
MAX_FRAME_BYTES = 96 * 1024 * 1024
_MAX_HEADER_BYTES = 32 * 1024 * 1024


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge", array_like=True):
    nonce: str


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello", array_like=True):
    """Who is speaking. `cluster_id` is "" while its folder is blank; `wall_us` is its clock, to warn of wrong ones.
    `lives`: the incarnations that its folder had, this one last, with its nonce.
    """

    broker: BrokerId
    url: str
    directory: str
    life: int
    cluster_id: str
    protocol: int
    version: str
    wall_us: int
    nonce: str
    mac: str = ""
    lives: tuple[str, ...] = ()

    @property
    def incarnation(self) -> str:
        return self.lives[-1] if self.lives else f"{self.directory}.{self.life}"

    def signed(self, secret: bytes, challenge: str) -> Hello:
        """For the one who sent this challenge."""
        return msgspec.structs.replace(self, mac=self._mac(secret, challenge))

    def check(self, secret: bytes, challenge: str) -> None:
        """Raises ClusterMismatch: the other side does not know this cluster's secret."""
        if not hmac.compare_digest(self.mac, self._mac(secret, challenge)):
            raise ClusterMismatch(
                f"broker {self.broker} at {self.url} has another cluster secret: give all brokers the same "
                "cluster_secret_file",
                broker=self.broker,
            )

    def _mac(self, secret: bytes, challenge: str) -> str:
        said = msgspec.msgpack.encode((challenge, msgspec.structs.replace(self, mac="")))
        return hmac.new(secret, said, hashlib.sha256).hexdigest()


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused", array_like=True):
    """The handshake's end; `error` in its JSON form."""

    error: dict[str, Any]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome", array_like=True):
    """To a blank broker that the cluster counts as a member: it belongs to it now."""

    cluster_id: str


class RaftMessages(msgspec.Struct, frozen=True, tag="raft", array_like=True):
    messages: tuple[Message, ...]


class Forwarded(msgspec.Struct, frozen=True, tag="propose", array_like=True):
    """To the metadata leader. What became of it comes back through the log."""

    proposal: Proposal


class Missed(msgspec.Struct, frozen=True, tag="missed", array_like=True):
    """To the metadata leader: these leaders have not answered for a while."""

    replicas: tuple[tuple[StreamId, Epoch], ...]


class Positioned(msgspec.Struct, frozen=True, tag="positioned", array_like=True):
    """To the metadata leader: (stream, record version, last epoch, log end offset) of replicas to be proven."""

    positions: tuple[tuple[StreamId, int, Epoch, int], ...]


class Hearing(msgspec.Struct, frozen=True, tag="hearing", array_like=True):
    """To the metadata leader, twice a second: whether this broker's NATS server answers it."""

    hears_nats: bool


class HandOver(msgspec.Struct, frozen=True, tag="hand over", array_like=True):
    """From the metadata leader to a stream's leader."""

    streams: tuple[tuple[StreamId, BrokerId], ...]


class FetchRequest(msgspec.Struct, frozen=True, tag="fetch?", array_like=True):
    """What a follower wants from a leader: only positions that changed since its last request on this link.

    `forget`: streams that it does not follow here any more. `incarnation`: the asking broker's life. `begins`: what
    was said before counts no more. `number` is never used again in that life: an answer is to the last question, or to
    none.
    """

    number: int
    incarnation: str
    changed: tuple[tuple[StreamId, FetchPosition], ...] = ()
    forget: tuple[StreamId, ...] = ()
    max_bytes: int = 4 * 1024 * 1024
    begins: bool = False


class FetchAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Of one stream. Its `length` bytes of the payload are whole batches, from the position asked for on."""

    stream_id: StreamId
    epoch: Epoch
    verdict: Verdict
    high_watermark: int
    log_start_offset: int
    length: int = 0


class FetchResponse(msgspec.Struct, frozen=True, tag="fetch!", array_like=True):
    number: int
    answers: tuple[FetchAnswer, ...] = ()


class Ask(msgspec.Struct, frozen=True, tag="ask", array_like=True):
    number: int
    what: str
    arguments: dict[str, Any] = {}


class Answered(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """`error` in its JSON form, or the result."""

    number: int
    result: Any = None
    error: dict[str, Any] | None = None


Frame: TypeAlias = (
    Challenge
    | Hello
    | Refused
    | Welcome
    | RaftMessages
    | Forwarded
    | Missed
    | Positioned
    | Hearing
    | HandOver
    | FetchRequest
    | FetchResponse
    | Ask
    | Answered
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame, payload: list[bytes] | None = None) -> bytes:
    header = _encoder.encode(frame)
    return b"".join([len(header).to_bytes(4, "big"), header, *(payload or ())])


def decode_frame(data: bytes) -> tuple[Frame, memoryview]:
    """Header and payload.

    Raises:
        ClusterMismatch: not such a frame: another version, or not a broker.
    """
    length = int.from_bytes(data[:4], "big")
    if len(data) < 4 + length or length > _MAX_HEADER_BYTES:
        raise ClusterMismatch("a frame between brokers is cut short: is that a broker of this version?")
    try:
        return _decoder.decode(memoryview(data)[4 : 4 + length]), memoryview(data)[4 + length :]
    except msgspec.DecodeError as error:
        raise ClusterMismatch(f"a frame between brokers is not understood ({error}): upgrade the older one") from error
