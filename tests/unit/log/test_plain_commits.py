"""Plain messages are encoded and acked straight from their frames: bytes and acks are those of the way over columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.ingest import acks
from natslog.ingest.ack_rules import AckRules
from natslog.ingest.batches import BatchBuilder
from natslog.log.batch_encoder import encode_plain, encode_rows
from natslog.model import Acks
from natslog.subjects import MAX_SUBJECT_BYTES
from natslog.wire.envelope import MESSAGE_OPENING, OPENING
from natslog.wire.frames import FrameParser, Frames

token = st.text("abcXYZ019_-", min_size=1, max_size=6)
subject = st.lists(token, min_size=1, max_size=4).map(".".join)
reply = st.just("") | subject.map(lambda text: f"_INBOX.{text}")
messages = st.lists(st.tuples(subject, reply, st.binary(max_size=300)), min_size=1, max_size=40)


def frames_of(content: list[tuple[str, str, bytes]]) -> Frames:
    parser = FrameParser()
    parser.receive_data(b"".join(msg(*one) for one in content))
    (frames,) = parser.frames()
    return Frames(frames.buffer.copy(), frames.rows.copy())


def msg(subject: str, reply: str, payload: bytes) -> bytes:
    words = [subject, "7", *([reply] if reply else []), str(len(payload))]
    return f"MSG {' '.join(words)}\r\n".encode() + payload + b"\r\n"


def rules(kind: Acks = "reply", subjects: tuple[str, ...] = ("a.>",)) -> AckRules:
    return AckRules.of(kind, subjects, ("_INBOX.",))


def plain_bytes(frames: Frames, of: AckRules | None = None, most_bytes: int = 1000) -> int:
    return (of or rules()).plain_bytes(frames, most_bytes)


@settings(deadline=None, max_examples=150)
@given(messages, st.integers(0, 2**62), st.integers(0, 2**52), st.integers(1, 2**40))
def test_bytes_and_acks_are_those_of_the_way_over_columns(
    content: list[tuple[str, str, bytes]], base_offset: int, timestamp_us: int, epoch: int
) -> None:
    content = [(subject, reply, payload.replace(b"\xf5", b"")) for subject, reply, payload in content]
    frames = frames_of(content)
    size_bytes = sum(len(msg(*one)) for one in content)
    assert plain_bytes(frames) == size_bytes
    stated = {"base_offset": base_offset, "timestamp_us": timestamp_us, "epoch": epoch}
    encoded = encode_plain(frames, size_bytes, **stated)
    builder = BatchBuilder()
    builder.add(frames)
    batch = builder.taken()
    expected = encode_rows(batch.rows, **stated)
    assert encoded.header == expected.header
    assert b"".join(encoded.pieces) == b"".join(expected.pieces)
    offsets = np.arange(base_offset, base_offset + len(content))
    others = b"" if batch.replies is None else acks.stored(batch.replies, offsets, stream='or"d', epoch=epoch)
    assert acks.of_plain(frames, size_bytes, base_offset, stream='or"d') == others


PLAIN = ("a.b", "_INBOX.x", b"value")


@pytest.mark.parametrize(
    "other",
    [
        ("a.*", "_INBOX.x", b""),
        ("a..b", "_INBOX.x", b""),
        ("a." + "b" * MAX_SUBJECT_BYTES, "", b""),
        ("a.é", "_INBOX.x", b""),
        ("a.b", "other.x", b""),
        ("a.b", "$JS.ACK.s.c.1.1.1.1.0", b""),
        ("a.b", "_INBOX.x.~1", b""),
        ("a.b", "_INBOX.x", OPENING + b"rows"),
        ("a.b", "_INBOX.x", MESSAGE_OPENING + b"message"),
        ("a.b", "_INBOX.x", b"v" * 1001),
    ],
)
def test_what_needs_more_takes_the_way_over_columns(other: tuple[str, str, bytes]) -> None:
    assert plain_bytes(frames_of([PLAIN, PLAIN])) > 0
    for content in ([other, PLAIN], [PLAIN, other]):
        assert plain_bytes(frames_of(content)) == 0


def test_a_numbered_reply_subject_of_one_message_gets_its_own_ack() -> None:
    assert plain_bytes(frames_of([("a.b", "_INBOX.x.~1", b"")])) > 0


def test_messages_with_headers_take_the_way_over_columns() -> None:
    parser = FrameParser()
    block = b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n"
    parser.receive_data(b"HMSG a.b 7 %d %d\r\n%sv\r\n" % (len(block), len(block) + 1, block))
    (frames,) = parser.frames()
    assert plain_bytes(frames) == 0


@pytest.mark.parametrize(("kind", "is_plain"), [("reply", True), ("any", True), ("header", False), ("never", False)])
def test_only_acks_at_the_reply_subject_are_plain(kind: Acks, is_plain: bool) -> None:
    assert bool(plain_bytes(frames_of([PLAIN]), rules(kind))) == is_plain


@pytest.mark.parametrize("internal", ["$KV.a.b", "_INBOX.a"])
def test_internal_subjects_are_plain_only_where_the_stream_names_them(internal: str) -> None:
    frames = frames_of([(internal, "_INBOX.x", b"v")])
    assert plain_bytes(frames, rules(subjects=(">",))) == 0
    assert plain_bytes(frames, rules(subjects=("$KV.a.>", "_INBOX.a"))) > 0
