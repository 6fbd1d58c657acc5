"""The messages between brokers on a link: a msgpack header that names the kind, and raw bytes where there are any.

    frame = header length (4 bytes, big-endian) | header | payload | seal (16 bytes, `keys`)

Decoded messages come from a broker of the cluster; nevertheless, numbers that are too large are refused. Values of any
shape are sent as JSON text of at most 8 MiB within the header, as nested empty lists take eighty times their own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias, assert_never

import msgspec

from natslog.arrow.row_buffers import Buffer
from natslog.cluster.commands import Proposal, RegisterBroker
from natslog.cluster.roles import BeforeStart, Diverging, Fenced, FetchPosition, Matching, Verdict
from natslog.consensus import MAX_BROKER_ID, MAX_COUNT, Message, require_sound, require_storable
from natslog.errors import ClusterMismatch, InvalidRequest
from natslog.model import BrokerId, Epoch, StreamId

MAX_FRAME_BYTES = 96 * 1024 * 1024
_MAX_HEADER_BYTES = 32 * 1024 * 1024
MAX_VALUE_BYTES = 8 * 1024 * 1024
_MAX_FETCH_BYTES = 32 * 1024 * 1024

Payload: TypeAlias = Sequence[Buffer]

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Id = Annotated[BrokerId, msgspec.Meta(ge=1, le=MAX_BROKER_ID)]
EpochCount = Annotated[Epoch, msgspec.Meta(ge=0, le=MAX_COUNT)]
StreamName = Annotated[StreamId, msgspec.Meta(max_length=64)]
RequestId = Annotated[str, msgspec.Meta(max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Json = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome", array_like=True):
    """To a blank broker that is a member of the cluster: it belongs to it now."""

    cluster_id: Text


class RaftMessages(msgspec.Struct, frozen=True, tag="raft", array_like=True):
    messages: tuple[Message, ...]


class Forwarded(msgspec.Struct, frozen=True, tag="propose", array_like=True):
    """To the metadata leader. The outcome is received through the log. `request_id`: as of `Ask`."""

    proposal: Proposal
    request_id: RequestId = ""


class UnresponsiveLeaders(msgspec.Struct, frozen=True, tag="missed", array_like=True):
    """To the metadata leader: these leaders have not responded for a while."""

    replicas: tuple[tuple[StreamName, EpochCount], ...]


class Positioned(msgspec.Struct, frozen=True, tag="positioned", array_like=True):
    """To the metadata leader: (stream, record version, last epoch, log end offset) of replicas to be proven."""

    positions: tuple[tuple[StreamName, Count, EpochCount, Count], ...]


class NatsReachability(msgspec.Struct, frozen=True, tag="hearing", array_like=True):
    """To the metadata leader, twice a second: whether this broker's NATS server responds."""

    reaches_nats: bool


class TransferLeadership(msgspec.Struct, frozen=True, tag="hand over", array_like=True):
    """From the metadata leader to a stream's leader."""

    streams: tuple[tuple[StreamName, Id], ...]


class FetchRequest(msgspec.Struct, frozen=True, tag="fetch?", array_like=True):
    """A follower's request to a leader: only positions that changed since its last request on this link.

    `forget`: streams that it no longer follows here. `incarnation`: the life of the requesting broker. `begins`:
    earlier requests are void. `number` is never used again in that life: an answer belongs to the last request, or is
    ignored.
    """

    number: Count
    incarnation: Text
    changed: tuple[tuple[StreamName, FetchPosition], ...] = ()
    forget: tuple[StreamName, ...] = ()
    max_bytes: Annotated[int, msgspec.Meta(ge=0, le=_MAX_FETCH_BYTES)] = 4 * 1024 * 1024
    begins: bool = False


class FetchAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Of one stream. Its `length` bytes of the payload are whole batches, from the position asked for on. `ids_serial`:
    of the message ids that the leader keeps of removed rows (`kept_ids`); 0: it keeps none, or does not know of this.
    """

    stream_id: StreamName
    epoch: EpochCount
    verdict: Verdict
    high_watermark: Count
    log_start_offset: Count
    length: Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAME_BYTES)] = 0
    ids_serial: Count = 0


class FetchResponse(msgspec.Struct, frozen=True, tag="fetch!", array_like=True):
    number: Count
    answers: tuple[FetchAnswer, ...] = ()


class Ask(msgspec.Struct, frozen=True, tag="ask", array_like=True):
    """`arguments`: a JSON object. `request_id`: of the HTTP request for which this is asked; "" if there is none."""

    number: Count
    what: Text
    arguments: Json = b"{}"
    request_id: RequestId = ""


class Answered(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """The result, or the error in its JSON form; both as JSON text, of which one is empty."""

    number: Count
    result: Json = b""
    error: Json = b""


Frame: TypeAlias = (
    Welcome
    | RaftMessages
    | Forwarded
    | UnresponsiveLeaders
    | Positioned
    | NatsReachability
    | TransferLeadership
    | FetchRequest
    | FetchResponse
    | Ask
    | Answered
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame, payload: Payload | None = None) -> list[Buffer]:
    """In parts, for the seal to join them."""
    header = _encoder.encode(frame)
    return [len(header).to_bytes(4, "big"), header, *(payload or ())]


def decode_frame(data: memoryview) -> tuple[Frame, memoryview]:
    """Header and payload.

    Raises:
        ClusterMismatch: no broker of this version sends such a frame.
    """
    length = int.from_bytes(data[:4], "big")
    if len(data) < 4 + length or length > _MAX_HEADER_BYTES:
        raise ClusterMismatch("a frame between brokers is incomplete: check that both brokers run compatible versions")
    try:
        frame, payload = _decoder.decode(data[4 : 4 + length]), data[4 + length :]
    except (ValueError, RecursionError) as error:  # msgspec's errors, and texts that are not UTF-8
        raise ClusterMismatch(
            f"a frame between brokers cannot be decoded ({error}): upgrade the older broker"
        ) from error
    _require_bounds(frame, payload)
    return frame, payload


def decode_value(text: bytes) -> Any:
    """Raises ClusterMismatch: it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:  # msgspec's errors, and texts that are not UTF-8
        raise ClusterMismatch(f"a value from another broker cannot be decoded: {error}") from error


def _require_bounds(frame: Frame, payload: memoryview) -> None:
    """Conversion of types that msgspec does not support."""
    match frame:
        case RaftMessages(messages=messages):
            for message in messages:
                require_sound(message)
        case FetchRequest(changed=changed):
            for _, position in changed:
                _require_counts(position.epoch, position.offset, position.last_epoch, position.version)
        case FetchResponse(answers=answers):
            for answer in answers:
                _require_sound_verdict(answer.verdict)
            if sum(answer.length for answer in answers) != len(payload):
                raise ClusterMismatch("an answer from another broker does not have the length that its header states")
        case Forwarded(proposal=proposal):
            try:
                require_storable(msgspec.to_builtins(proposal))
            except InvalidRequest as error:
                raise ClusterMismatch(f"a proposal from another broker is invalid: {error.message}") from error
            if isinstance(proposal.command, RegisterBroker):
                _require_counts(proposal.command.broker.life)
        case _:
            pass


def _require_sound_verdict(verdict: Verdict) -> None:
    match verdict:
        case Fenced(epoch=epoch):
            _require_counts(epoch)
        case Diverging(epoch=epoch, end_offset=end_offset):
            _require_counts(epoch, end_offset)
        case BeforeStart(log_start_offset=log_start_offset, epoch=epoch):
            _require_counts(epoch, log_start_offset)
        case Matching():
            pass
        case _:
            assert_never(verdict)


def _require_counts(*counts: int) -> None:
    for count in counts:
        if not 0 <= count <= MAX_COUNT:
            raise ClusterMismatch(f"{count} in a frame between brokers is out of range")
