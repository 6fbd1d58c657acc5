"""Plain messages are encoded and acked straight from their frames: bytes and acks are those of the way over columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from natslog.wire.header_parts import split_headers

BLOCK = b"NATS/1.0\r\n%b\r\n"
token = st.text("abcXYZ019_-", min_size=1, max_size=6)
subject = st.lists(token, min_size=1, max_size=4).map(".".join)
reply = st.just("") | subject.map(lambda text: f"_INBOX.{text}")
numbered = st.integers(1, 12).map(lambda number: f"_INBOX.x.~{number}")
text = st.text(st.characters(max_codepoint=127, exclude_characters="\r\n"), max_size=12)
ids = st.text("ab-_9", min_size=16, max_size=16).map("~".__add__) | text | st.just("~" + 16 * "a")
header = st.one_of(
    st.tuples(st.just("Natslog-Key"), text),
    st.tuples(st.just("Nats-Msg-Id"), ids),
    st.tuples(text.filter(lambda name: not name.startswith("Nats")), text),
)
written = header.map(": ".join) | header.map(":".join) | text.filter(lambda line: not line.startswith("Nats"))
blocks = st.just(b"") | st.lists(written, max_size=4).map(
    lambda lines: BLOCK % b"".join(line.encode() + b"\r\n" for line in lines)
)
Message = tuple[str, str, bytes, bytes]
contents = st.tuples(subject, reply | numbered, st.binary(max_size=300), blocks)
messages = st.lists(contents, min_size=1, max_size=40) | st.lists(
    st.tuples(subject, reply | numbered, st.binary(max_size=300), st.just(b"")), min_size=1, max_size=40
)


def frames_of(content: Sequence[tuple[Any, ...]]) -> Frames:
    parser = FrameParser()
    parser.receive_data(b"".join(msg(*one) for one in content))
    (frames,) = parser.frames()
    return Frames(frames.buffer.copy(), frames.rows.copy())


def msg(subject: str, reply: str, payload: bytes, block: bytes = b"") -> bytes:
    sizes = [str(len(block)), str(len(block + payload))] if block else [str(len(payload))]
    words = ["HMSG" if block else "MSG", subject, "7", *([reply] if reply else []), *sizes]
    return " ".join(words).encode() + b"\r\n" + block + payload + b"\r\n"


def rules(kind: Acks = "reply", subjects: tuple[str, ...] = ("a.>",)) -> AckRules:
    return AckRules.of(kind, subjects, ("_INBOX.",))


def plain_bytes(frames: Frames, of: AckRules | None = None, most_bytes: int = 1000) -> int:
    return (of or rules()).survey_plain(frames, most_bytes)[0]


@settings(deadline=None, max_examples=150)
@given(messages, st.integers(0, 2**62), st.integers(0, 2**52), st.integers(1, 2**40))
def test_bytes_and_acks_are_those_of_the_way_over_columns(
    content: list[Message], base_offset: int, timestamp_us: int, epoch: int
) -> None:
    content = [(subject, reply, payload.replace(b"\xf5", b""), block) for subject, reply, payload, block in content]
    frames = frames_of(content)
    size_bytes, header_lines = rules().survey_plain(frames, 1000)
    assert size_bytes == sum(len(msg(*one)) for one in content)
    assert bool(header_lines) == any(block for *_, block in content)
    headers = split_headers(frames, header_lines) if header_lines else None
    stated = {"base_offset": base_offset, "timestamp_us": timestamp_us, "epoch": epoch}
    encoded = encode_plain(frames, headers, size_bytes, **stated)
    builder = BatchBuilder()
    builder.add(frames)
    batch = builder.taken()
    expected = encode_rows(batch.rows, **stated)
    assert encoded.header == expected.header
    assert b"".join(encoded.pieces) == b"".join(expected.pieces)
    offsets = np.arange(base_offset, base_offset + len(content))
    others = b"" if batch.replies is None else acks.stored(batch.replies, offsets, stream='or"d', epoch=epoch)
    assert (batch.ids is None) == (headers is None or not headers.hashes.any())
    assert headers is None or batch.ids is None or np.array_equal(headers.hashes, batch.ids)
    assert acks.of_plain(frames, size_bytes, base_offset, stream='or"d') == others


PLAIN = ("a.b", "_INBOX.x", b"value")


@pytest.mark.parametrize(
    "other",
    [
        *[
            ("a.b", "_INBOX.x", b"", BLOCK % line)
            for line in (
                b"Nats-Expected-Last-Sequence: 1\r\n",
                b"A: b\r\nNats-TTL: 1s\r\n",
                b"Nats-Rollup:sub\r\n",
                b"Nats-Batch-Id: 1\r\n",
                b"Nats-Schedule: @at\r\n",
                b"Nats-Incr: 1\r\n",
                b"Natslog-Ack: full\r\n",
                b"Natslog-Ack-To: _INBOX.y\r\n",
                b"Natslog-Correlation-Id: 1\r\n",
                b"Natslog-Envelope: 1\r\n",
                b"Nats-Msg-Id2: 1\r\n",
                "A: é\r\n".encode(),
            )
        ],
        ("a.b", "_INBOX.x", b"v" * 990, BLOCK % b""),
        ("a.*", "_INBOX.x", b""),
        ("a..b", "_INBOX.x", b""),
        ("a." + "b" * MAX_SUBJECT_BYTES, "", b""),
        ("a.é", "_INBOX.x", b""),
        ("a.b", "other.x", b""),
        ("a.b", "$JS.ACK.s.c.1.1.1.1.0", b""),
        ("a.b", "_INBOX.x", OPENING + b"rows"),
        ("a.b", "_INBOX.x", MESSAGE_OPENING + b"message"),
        ("a.b", "_INBOX.x", b"v" * 1001),
    ],
)
def test_what_needs_more_takes_the_way_over_columns(other: tuple[Any, ...]) -> None:
    assert plain_bytes(frames_of([PLAIN, PLAIN])) > 0
    for content in ([other, PLAIN], [PLAIN, other]):
        assert plain_bytes(frames_of(content)) == 0


@pytest.mark.parametrize(("kind", "is_plain"), [("reply", True), ("any", True), ("header", False), ("never", False)])
def test_only_acks_at_the_reply_subject_are_plain(kind: Acks, is_plain: bool) -> None:
    assert bool(plain_bytes(frames_of([PLAIN]), rules(kind))) == is_plain


@pytest.mark.parametrize("internal", ["$KV.a.b", "_INBOX.a"])
def test_internal_subjects_are_plain_only_where_the_stream_names_them(internal: str) -> None:
    frames = frames_of([(internal, "_INBOX.x", b"v")])
    assert plain_bytes(frames, rules(subjects=(">",))) == 0
    assert plain_bytes(frames, rules(subjects=("$KV.a.>", "_INBOX.a"))) > 0


@pytest.mark.parametrize(
    ("lines", "has_headers"),
    [(b"", True), (b"Nats-Msg-Id: ~bbcdefghijklmnop\r\n", False), (b"Nats-Msg-Id: b\r\n", True), (b"A: b\r\n", True)],
)
def test_an_id_of_natslogs_own_form_is_no_header(lines: bytes, has_headers: bool) -> None:
    parts = split_headers(frames_of([("a.b", "", b"v", BLOCK % lines), PLAIN]), 3)
    assert parts.has_headers.tolist() == [has_headers, False]
