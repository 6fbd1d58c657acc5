"""Frames from a broker of the cluster that is wrong or lies: no absurd number and no nested bomb gets in."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from natslog.cluster.commands import BrokerRecord as Record
from natslog.cluster.commands import CreateStream, Proposal, RegisterBroker, SetCursor
from natslog.cluster.roles import BeforeStart, Diverging, Fenced, FetchPosition, Matching
from natslog.consensus import Term, TimeoutNow
from natslog.errors import ClusterMismatch
from natslog.model import BrokerId, Epoch, Offset, StreamId, StreamSettings
from natslog.node.peers.messages import (
    Answered,
    Ask,
    FetchAnswer,
    FetchRequest,
    FetchResponse,
    Forwarded,
    Frame,
    NatsReachability,
    Positioned,
    RaftMessages,
    TransferLeadership,
    UnresponsiveLeaders,
    Welcome,
    decode_frame,
    decode_value,
    encode_frame,
)

S, E = StreamId("0" * 32), Epoch(3)
ONE, TWO = BrokerId(1), BrokerId(2)
PAYLOAD = b"12345678"


def positions(frame: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the numbers of an encoded frame are."""
    if isinstance(frame, bool) or not isinstance(frame, list | dict | int):
        return []
    if isinstance(frame, int):
        return [path]
    items = frame.items() if isinstance(frame, dict) else enumerate(frame)
    return [place for key, value in items for place in positions(value, (*path, key))]


def replaced(frame: Any, path: tuple[Any, ...], value: int) -> Any:
    copy: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(frame))
    target = copy
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return copy


def read(header: Any, payload: bytes = b"") -> Frame:
    encoded = msgspec.msgpack.encode(header)
    return decode_frame(memoryview(len(encoded).to_bytes(4, "big") + encoded + payload))[0]


def answer(verdict: Any) -> FetchResponse:
    return FetchResponse(4, (FetchAnswer(S, E, verdict, 9, 2, len(PAYLOAD)),))


FRAMES: list[tuple[Frame, bytes]] = [
    (RaftMessages((TimeoutNow(sender=ONE, to=TWO, term=Term(4)),)), b""),
    (UnresponsiveLeaders(((S, E),)), b""),
    (Positioned(((S, 4, E, 9),)), b""),
    (TransferLeadership(((S, TWO),)), b""),
    (FetchRequest(5, "d.1", ((S, FetchPosition(E, 9, E, 2)),), (S,)), b""),
    (answer(Matching()), PAYLOAD),
    (answer(Fenced(E)), PAYLOAD),
    (answer(Diverging(E, 8)), PAYLOAD),
    (answer(BeforeStart(8, E)), PAYLOAD),
    (Ask(6, "ready"), b""),
    (Answered(6, b"1"), b""),
    (Forwarded(Proposal(id="p", command=RegisterBroker(broker=Record(id=ONE, url="http://x", life=4)))), b""),
    (Welcome(cluster_id="c"), b""),
    (NatsReachability(True), b""),
]


@pytest.mark.parametrize(("frame", "payload"), FRAMES, ids=lambda value: type(value).__name__)
def test_absurd_number_anywhere_in_a_frame_is_refused(frame: Frame, payload: bytes) -> None:
    header = msgspec.msgpack.decode(msgspec.msgpack.encode(frame))
    assert read(header, payload) == frame
    places = positions(header)
    assert bool(places) == (type(frame) not in (Welcome, NatsReachability))
    for place in places:
        if place[-1] == "id":
            continue  # a broker's id in a proposal: the state machine looks it up
        for absurd in (2**64 - 1, 2**53, -1):
            with pytest.raises(ClusterMismatch):
                read(replaced(header, place, absurd), payload)


def test_proposal_with_a_number_that_cannot_be_stored_is_refused() -> None:
    cursor = SetCursor(consumer="c", stream="s", stream_id=S, offset=Offset(2**63), set_us=1)
    stream = CreateStream(
        name="s", id=S, settings=StreamSettings(subject="s", max_bytes=2**64 - 1), created_us=1, placement=(ONE,)
    )
    for command in (cursor, stream):
        frame = Forwarded(Proposal(id="p", command=command))
        with pytest.raises(ClusterMismatch, match="64 bits"):
            decode_frame(memoryview(b"".join(encode_frame(frame))))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x93\xa4raft",
        msgspec.msgpack.encode(["never heard of", 1]),
        msgspec.msgpack.encode(["welcome", "c" * 300]),
        msgspec.msgpack.encode(["missed", [["s" * 65, 1]]]),
        msgspec.msgpack.encode(["fetch?", 1, "x", [], [], 2**40]),
        msgspec.msgpack.encode(["ask", 1, "x", bytes(8 * 1024 * 1024 + 1)]),
    ],
    ids=lambda header: repr(header[:20]),
)
def test_nonsense_is_refused(header: bytes) -> None:
    with pytest.raises(ClusterMismatch):
        decode_frame(memoryview(len(header).to_bytes(4, "big") + header))


def test_header_longer_than_its_frame_is_refused() -> None:
    for length in (1, 2**32 - 1):
        with pytest.raises(ClusterMismatch, match="is incomplete"):
            decode_frame(memoryview(length.to_bytes(4, "big")))


def test_answer_with_fewer_or_more_bytes_than_it_announces_is_refused() -> None:
    for payload in (PAYLOAD[:-1], PAYLOAD + b"9", b""):
        with pytest.raises(ClusterMismatch, match="length that its header states"):
            decode_frame(memoryview(b"".join(encode_frame(answer(Matching()), [payload]))))


def test_values_of_any_shape_are_bounded_in_depth() -> None:
    assert decode_value(b'{"a":[1,null]}') == {"a": [1, None]}
    for text in (b"[" * 100_000, b"", b"{", b'{"a":' * 50_000):
        with pytest.raises(ClusterMismatch):
            decode_value(text)


_BOMB = """
import msgspec, resource, sys
from natslog.errors import ClusterMismatch
from natslog.node.peers.messages import decode_frame
def array(size): return b"\\xdd" + size.to_bytes(4, "big")
filler = bytes(16 * 1024 * 1024)
headers = [
    b"\\x94\\xa3ask\\x01\\xa1x\\x81\\xa1a" + array(len(filler)) + b"\\x90" * len(filler),
    array(len(filler)) * 900 + filler,                                   # lists in lists
    b"\\x94\\xa3ask\\x01\\xa1x" + array(len(filler)) * 900 + filler,      # where values of any shape were
    b"\\x92\\xa4raft" + array(len(filler)) + b"\\x81\\xa7entries" + array(len(filler)) + filler,
    b"\\x92\\xa7propose\\x82\\xa2id\\xa1x\\xa7command" + array(len(filler)) * 900 + filler,
]
decode_frame  # compiled by now
for header in headers:
    try:
        decode_frame(memoryview(len(header).to_bytes(4, "big") + header))
    except ClusterMismatch:
        continue
    sys.exit("it was taken")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_lists_that_announce_far_more_than_they_hold_take_little_memory() -> None:
    """In a process of its own, whose memory is limited: 4 GiB of address space."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    done = subprocess.run([sys.executable, "-c", _BOMB], capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 600, "MiB"


def test_text_that_is_not_utf8_is_refused() -> None:
    header = msgspec.msgpack.encode(["welcome", "cluster"]).replace(b"cluster", b"clu\xffter")
    with pytest.raises(ClusterMismatch, match="cannot be decoded"):
        decode_frame(memoryview(len(header).to_bytes(4, "big") + header))
    with pytest.raises(ClusterMismatch, match="cannot be decoded"):
        decode_value(b'"\xff"')
