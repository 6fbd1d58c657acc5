"""Frames of deliveries and received acks: the kernels, against what Python makes of one message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.schema import HEADERS_TYPE
from natslog.wire.deliveries import ACK, NAK, NEXT, OTHER, PROGRESS, TERM, UNKNOWN, Messages, acks_of, status_frame
from natslog.wire.frames import FrameParser, Frames

PREFIX = b"$JS.ACK.S.C."
TEXTS = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=12)
HEADERS = st.none() | st.lists(st.tuples(TEXTS, TEXTS), max_size=3)
NUMBERS = st.integers(0, 10**18 - 1)
MESSAGES = st.tuples(TEXTS, st.binary(max_size=40), HEADERS, st.tuples(*[NUMBERS] * 5), st.integers(0, 2))


def batch_of(messages: list[Any]) -> pa.RecordBatch:
    headers = [None if one[2] is None else [{"key": key, "value": value} for key, value in one[2]] for one in messages]
    columns = [
        pa.array([one[0] for one in messages], pa.string()),
        pa.array([one[1] for one in messages], pa.binary()),
        pa.array(headers, HEADERS_TYPE),
    ]
    return pa.RecordBatch.from_arrays(columns, names=["subject", "value", "headers"])


def expected(message: Any, replies: list[str], groups: list[str], *, headers_only: bool) -> bytes:
    subject, value, headers, numbers, reply = message
    block = b""
    if headers is not None or headers_only:
        lines = "".join(f"{key}: {text}\r\n" for key, text in headers or [])
        size = f"Nats-Msg-Size: {len(value)}\r\n" if headers_only else ""
        block = f"NATS/1.0\r\n{lines}{size}\r\n".encode()
    body = b"" if headers_only else value
    target = f"{replies[reply]} + " if groups else f"{replies[reply]} "
    ack = f"{PREFIX.decode()}{'.'.join(map(str, numbers))}@{subject}"
    named = "".join(f" {group}" for group in groups)
    sizes = f" {len(block)} {len(block) + len(body)}" if block else f" {len(body)}"
    verb = "HMSG" if block else "LMSG"
    return f"{verb} {target}{ack}{named}{sizes}\r\n".encode() + block + body + b"\r\n"


@pytest.mark.long
@given(
    messages=st.lists(MESSAGES, min_size=1, max_size=12),
    groups=st.lists(st.sampled_from(["g", "workers"]), max_size=2, unique=True),
    headers_only=st.booleans(),
    data=st.data(),
)
@settings(deadline=None)
def test_frames_are_those_of_single_messages(
    messages: list[Any], groups: list[str], headers_only: bool, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(messages) - 1))
    count = data.draw(st.integers(1, len(messages) - first))
    replies, chosen = ["_INBOX.a", "b", "to.somebody.else"], messages[first : first + count]
    found = Messages(batch_of(messages)).frames(
        first,
        count,
        prefix=PREFIX,
        numbers=np.array([one[3] for one in chosen], np.int64).T,
        replies=replies,
        reply_of=np.array([one[4] for one in chosen], np.int64),
        groups=groups,
        headers_only=headers_only,
    )
    assert bytes(found) == b"".join(expected(one, replies, groups, headers_only=headers_only) for one in chosen)


def test_line_ends_in_headers_begin_no_header() -> None:
    messages = Messages(batch_of([("a", b"1", [("K", "v\r\nX: y")], (1, 1, 1, 1, 1), 0), ("a", b"2", None, (), 0)]))
    frame = bytes(
        messages.frames(
            0, 1, prefix=PREFIX, numbers=np.ones((5, 1), np.int64), replies=["r"], reply_of=np.zeros(1, int)
        )
    )
    assert b"NATS/1.0\r\nK: v  X: y\r\n\r\n1" in frame


def test_sizes_count_subject_headers_and_value() -> None:
    messages = Messages(
        batch_of([("a.b", b"123", None, (), 0), ("a", b"", [("K", "v")], (), 0), ("a", b"1", [], (), 0)])
    )
    sizes = messages.sizes(headers_only=False).tolist()
    assert sizes == [6, 1 + len("NATS/1.0\r\nK: v\r\n\r\n"), 2 + len("NATS/1.0\r\n\r\n")]
    assert messages.payload_sizes().tolist() == [3, sizes[1] - 1, sizes[2] - 1]
    stated = len("NATS/1.0\r\nNats-Msg-Size: 3\r\n\r\n")
    assert messages.sizes(headers_only=True).tolist() == [3 + stated, 1 + stated + len("K: v\r\n"), 1 + stated]


def received(*messages: tuple[str, bytes, str]) -> Frames:
    parser = FrameParser()
    for subject, payload, reply in messages:
        parser.receive_data(f"MSG {subject} 1 {reply} {len(payload)}\r\n".encode() + payload + b"\r\n")
    (frames,) = parser.frames()
    return frames


ACK_SUBJECT = "$JS.ACK.S.C.2.30.400.1795629019806377000.5"


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"", ACK),
        (b"+ACK", ACK),
        (b"+OK", ACK),
        (b"-NAK", NAK),
        (b'-NAK {"delay": 5}', NAK),
        (b"+TERM", TERM),
        (b"+TERM because", TERM),
        (b"+WPI", PROGRESS),
        (b"+WPI ", UNKNOWN),
        (b"+NXT", NEXT),
        (b'+NXT {"batch": 2}', NEXT),
        (b"+ACKS", UNKNOWN),
        (b"-", UNKNOWN),
    ],
)
def test_kinds_of_acks(payload: bytes, kind: int) -> None:
    found, runs = acks_of(received((ACK_SUBJECT, payload, "")), PREFIX)
    assert found.tolist() == [[kind, 2, 30, 400]]
    assert runs == [[1, kind, 0]]


@pytest.mark.parametrize(
    "subject",
    [
        "$JS.ACK.S.C.1.2.3.4",
        "$JS.ACK.S.C.1.2.3.4.5.6",
        "$JS.ACK.S.C.1.x.3.4.5",
        "$JS.ACK.S.C.1.-2.3.4.5",
        "$JS.ACK.S.C.1.99999999999999999999.3.4.5",
        "$JS.ACK.S.C.1..3.4.5",
    ],
)
def test_forged_numbers_are_no_sequence(subject: str) -> None:
    found, _ = acks_of(received((subject, b"+ACK", "")), PREFIX)
    assert found[0, 0] == ACK
    assert found[0, 2] == 0


def test_other_subjects_are_no_acks_and_replies_are_noted() -> None:
    frames = received(("$JS.ACK.S.C", b"", ""), ("$JS.API.CONSUMER.MSG.NEXT.S.C", b"", "r"), (ACK_SUBJECT, b"", "r"))
    found, runs = acks_of(frames, PREFIX)
    assert found[:, 0].tolist() == [OTHER, OTHER, ACK]
    assert runs == [[2, OTHER, 1], [3, ACK, 1]]


def test_runs_of_one_kind() -> None:
    kinds = [(b"", ""), (b"+ACK", "r"), (b"+ACK", "r"), (b"-NAK", ""), (b"+OK", ""), (b"+OK", "r")]
    _, runs = acks_of(received(*((ACK_SUBJECT, payload, reply) for payload, reply in kinds)), PREFIX)
    assert runs == [[3, ACK, 2], [4, NAK, 0], [6, ACK, 1]]


def test_statuses_name_queue_groups() -> None:
    block = b"NATS/1.0 100 Idle Heartbeat\r\n\r\n"
    size = len(block)
    assert status_frame("a", block) == b"HMSG a %d %d\r\n%b\r\n" % (size, size, block)
    assert status_frame("a", block, "r") == b"HMSG a r %d %d\r\n%b\r\n" % (size, size, block)
    assert status_frame("a", block, "r", ["g", "h"]) == b"HMSG a + r g h %d %d\r\n%b\r\n" % (size, size, block)
    assert status_frame("a", block, "", ["g"]) == b"HMSG a | g %d %d\r\n%b\r\n" % (size, size, block)
