"""Bytes of other brokers: frames of links, the handshake, proposals and states of the metadata."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator

import msgspec

from natslog.cluster.commands import BrokerRecord, CreateStream, FinalizeUpgrade, Proposal, RegisterBroker, SetCursor
from natslog.cluster.encoding import decode_proposal, decode_state, encode_proposal, encode_state
from natslog.cluster.metadata import Metadata
from natslog.consensus import AppendRequest, Entry, Index, Term
from natslog.errors import ClusterMismatch, NatslogError, UpgradeRequired
from natslog.model import BrokerId, Offset, StreamId, StreamSettings
from natslog.node.metadata.entries import check_entries, check_message
from natslog.node.peers.handshake import MAX_HELLO_BYTES
from natslog.node.peers.keys import LinkSession
from natslog.node.peers.messages import (
    Answered,
    Ask,
    FetchResponse,
    Forwarded,
    RaftMessages,
    decode_frame,
    decode_value,
    encode_frame,
)
from tests.fuzz import edits
from tests.fuzz.target import target
from tests.unit.node.peers.test_handshake import ONE, RING, TWO, accept, dialling, hello, shaken
from tests.unit.node.peers.test_messages import FRAMES

_ID = StreamId("ab" * 16)


@functools.cache
def _proposals() -> list[bytes]:
    broker = BrokerRecord(id=BrokerId(1), url=ONE, directory="d1", life=1, nonce="a1")
    settings = StreamSettings(subject="orders.>", max_age_s=60.0)
    commands = [
        RegisterBroker(broker=broker, after="d1.0", lives=("d1.1.a1",)),
        CreateStream(name="orders", id=_ID, settings=settings, created_us=1, placement=(BrokerId(1),)),
        SetCursor(consumer="c", stream="orders", stream_id=_ID, offset=Offset(3), set_us=1),
        FinalizeUpgrade(level=2),
    ]
    return [encode_proposal(Proposal(id=f"p{at}", command=command)) for at, command in enumerate(commands)]


@functools.cache
def _states() -> list[bytes]:
    state = Metadata(cluster_id="c")
    found = [encode_state(state)]
    for proposal in _proposals():
        state.decide(decode_proposal(proposal))
        found.append(encode_state(state))
    return found


# ---- frames ----


def _frames() -> Iterator[bytes]:
    entries = tuple(Entry(Index(4 + at), Term(2), "command", data) for at, data in enumerate(_proposals()))
    request = AppendRequest(
        sender=BrokerId(1), to=BrokerId(2), term=Term(2), prev_index=Index(3), prev_term=Term(1), entries=entries,
        commit=Index(3), round=1,
    )  # fmt: skip
    more = [
        (RaftMessages((request,)), b""),
        (Ask(1, "lag", b'{"stream":"orders"}'), b""),
        (Answered(1, b"[1]"), b""),
        *((Forwarded(decode_proposal(one)), b"") for one in _proposals()),
    ]
    for frame, payload in [*FRAMES, *more]:
        yield b"".join(encode_frame(frame, [payload]))


_TAGS = [bytes([0xA0 + len(tag)]) + tag for tag in (b"raft", b"propose", b"fetch?", b"fetch!", b"ask", b"answer")]


@target("peer-frames", _frames, [*_TAGS, b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc0"])
def check_peer_frames(data: bytes) -> None:
    """A frame is refused (ClusterMismatch; UpgradeRequired for an unknown command), or it is one that encodes to a
    frame
    that decodes to the same; its batches fill the payload, and every value in it is JSON, or is refused.
    """
    try:
        frame, payload = decode_frame(memoryview(data))
    except ClusterMismatch:
        return
    again, rest = decode_frame(memoryview(b"".join(encode_frame(frame, [bytes(payload)]))))
    assert (again, bytes(rest)) == (frame, bytes(payload)), "a frame is sent on as another one"
    if isinstance(frame, FetchResponse):
        assert sum(answer.length for answer in frame.answers) == len(payload), "batches do not fill the payload"
    if isinstance(frame, RaftMessages):
        for message in frame.messages:
            with contextlib.suppress(UpgradeRequired):
                check_message(message)
    if isinstance(frame, Ask | Answered):
        with contextlib.suppress(ClusterMismatch):
            decode_value(frame.arguments if isinstance(frame, Ask) else frame.result)


def _sealed() -> tuple[LinkSession, list[bytes]]:
    """The acceptor's side of a new session, and the first frames that the dialler sealed."""
    met, answer = shaken()
    parts = [encode_frame(frame, [payload]) for frame, payload in FRAMES[:3]]
    return answer.session(met.link.partition(":")[2]), [bytes(met.session.sealer.seal(one)) for one in parts]


@target("sealed-frames", lambda: edits.seeds([b"\0" * 100, b"\0" * 20, b""]))
def check_sealed_frames(script: bytes) -> None:
    """Only the next frame that the other side sent is opened: no changed, cut, repeated, moved or empty one."""
    session, frames = _sealed()
    for frame in frames:
        changed = edits.edited(b"\0" + script[1:], [frame, *frames])
        try:
            opened = session.opener.opened(changed)
        except ClusterMismatch:
            return
        assert changed == frame, "a frame was opened that is not the next one"
        assert bytes(opened) == frame[: len(opened)]


# ---- the handshake ----


def _hellos() -> Iterator[bytes]:
    dialled = dialling()
    yield b"\0" + dialled.body
    yield b"\1" + dialled.body
    yield b"\2" + dialled.proof.encode() + b"\n" + dialled.body
    yield b"\2" + dialled.proof.encode() + b",\xff:\xff\n" + dialled.body
    yield b"\3" + accept(dialled.body, dialled.proof).answer
    yield b"\0" + json.dumps(msgspec.to_builtins(hello(1, dialled="http://two:x"))).encode()
    yield b"\0" + json.dumps({"protocol": 1, "version": "0.1.0", "broker": 3}).encode()


_HELLO_WORDS = [
    b'"protocol":2', b'"broker":', b'"dialled":"http://two:9292"', b'"lives":[', b'"nonce":"', b'"keys":["', b"[" * 64,
    b"http://[", b"\xed\xa0\x80", b"1e999", b"9007199254740992",
]  # fmt: skip


@target("hello", _hellos, _HELLO_WORDS)
def check_hello(data: bytes) -> None:
    """A hello, an answer or a proof is refused (ClusterMismatch), or it was proven with the secret and addressed this
    broker; all numbers and texts in it are within their limits.
    """
    kind, body = (data[0] if data else 0) % 4, data[1:]
    if len(body) > MAX_HELLO_BYTES:
        return
    (key,) = RING.keys
    try:
        if kind < 2:  # of a holder of the secret
            peer = accept(body, f"{key.id}:{key.proof('hello', body)}").peer
            assert peer.dialled.rstrip("/").lower().startswith(TWO), "another address was dialled"
        elif kind == 2:  # a proof in a header, as aiohttp decodes it
            stated, _, body = body.partition(b"\n")
            peer = accept(body, stated.decode("utf-8", "surrogateescape")).peer
            assert key.proof("hello", body).encode() in stated, "a hello without a proof was accepted"
        else:
            dialled = dialling()
            peer = dialled.met(body, f"{key.id}:{key.proof('acceptor', dialled.body, body)}").peer
    except ClusterMismatch:
        return
    assert 1 <= peer.broker <= 2**31
    assert 0 <= peer.life < 2**53
    assert all(len(text) <= 512 for text in (peer.url, peer.version, peer.directory, peer.cluster_id, *peer.lives))
    str(peer)


# ---- metadata ----


def _metadata() -> Iterator[bytes]:
    yield from (b"\0" + proposal for proposal in _proposals())
    yield from (b"\1" + state for state in _states())


_METADATA_WORDS = [
    b"\xa4type", b"\xacCreateStream", b"\xa9SetCursor", b"\xafFinalizeUpgrade", b"\xa5level", b"\xa7streams",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\x91" * 64, b"\xc1", b"\xc0", b"\x80",
]  # fmt: skip


@target("metadata-state", _metadata, _METADATA_WORDS)
def check_metadata(data: bytes) -> None:
    """A proposal or a state is refused (UpgradeRequired), or it is stored again as bytes that mean the same; applying a
    proposal is decided, and a refused one changes nothing.
    """
    body = data[1:]
    if data[:1] == b"\1":
        try:
            state = decode_state(body)
        except UpgradeRequired:
            return
        assert decode_state(encode_state(state)) == state
        return
    try:
        proposal = decode_proposal(body)
        check_entries([Entry(Index(1), Term(1), "command", body), Entry(Index(2), Term(1), "membership", body)])
    except UpgradeRequired:
        return
    assert decode_proposal(encode_proposal(proposal)) == proposal
    state = decode_state(_states()[-1])
    try:
        state.apply(proposal.command)
    except NatslogError:
        assert encode_state(state) == _states()[-1], "a command that is refused has changed the state"
    else:
        assert decode_state(encode_state(state)) == state, "the state cannot be stored"
