"""Direct requests as a kernel takes them, and the frames of answers, against plain Python."""

from __future__ import annotations

import json
from bisect import bisect_left
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.jetstream import direct
from natslog.jetstream.direct import frame
from natslog.subjects import has_wildcard
from natslog.wire import native
from natslog.wire.direct_frames import (
    Answers,
    Limits,
    Requests,
    frames_at_once,
    frames_of,
    most_frame_bytes,
    rendered,
    taken_requests,
)
from natslog.wire.frames import FrameParser, Frames
from natslog.wire.layout import PAYLOAD, PAYLOAD_LEN, SUBJECT, SUBJECT_LEN
from natslog.wire.outgoing import TextBuffers, texts_of

API, DOMAIN = b"$JS.API.DIRECT.GET.A", b"$JS.natslog.API.DIRECT.GET.A"
LIMITS = Limits(10_000, np.frombuffer(b"too large", np.uint8), np.frombuffer(b"not found", np.uint8))

subjects = st.text("ab.*>é", min_size=1, max_size=6).filter(lambda text: "\x7f" not in text)
bodies = st.one_of(
    st.just(b""),
    st.integers(-2, 10**19).map(lambda seq: b'{"seq":%d}' % seq),
    st.integers(0, 99).map(lambda seq: json.dumps({"seq": seq}).encode()),
    subjects.map(lambda text: json.dumps({"last_by_subj": text}).encode()),
    subjects.map(lambda text: json.dumps({"last_by_subj": text}, separators=(",", ":"), ensure_ascii=False).encode()),
    st.sampled_from(
        [
            b"{",
            b"{}",
            b'{"seq":05}',
            b'{"seq":1,"no_hdr":true}',
            b'{"seq":1}}',
            b'{"seq":}',
            b'{"seq": }',
            b'{"last_by_subj":""}',
            b'{"last_by_subj":"}',
            b'{"last_by_subj":"a"b"}',
            b'{"last_by_subj":"a","seq":1,"x":"b"}',
            b'{"last_by_subj":"a\\u002eb"}',
            b'{"last_by_subj":a}',
            b'{"last_by_subj" :"a"}',
            b'{"next_by_subj":"a"}',
            b"[]",
            b"\xff}",
        ]
    ),
)
requests = st.tuples(
    st.sampled_from([API, DOMAIN]),
    st.one_of(st.just(""), subjects),
    st.sampled_from([b"", b"r", b"_INBOX.x.y", b"$r", b"r$"]),
    bodies,
    st.sampled_from([b"", b"NATS/1.0\r\nNats-Required-Api-Level: 1\r\n\r\n"]),
)


def received(given_: list[tuple[bytes, str, bytes, bytes, bytes]]) -> Frames:
    parser = FrameParser()
    for prefix, key, reply, body, headers in given_:
        subject = prefix + (b"." + key.encode() if key else b"")
        words = [subject, b"1", *([reply] if reply else []), *([b"%d" % len(headers)] if headers else [])]
        head = b"%b %b %d\r\n" % (b"HMSG" if headers else b"MSG", b" ".join(words), len(headers + body))
        parser.receive_data(head + headers + body + b"\r\n")
    (frames,) = parser.frames()
    return frames


def listed(texts: TextBuffers) -> list[bytes]:
    offsets, data = texts
    return [data[offsets[at] : offsets[at + 1]].tobytes() for at in range(len(offsets) - 1)]


def modelled(key: str, body: bytes) -> tuple[bytes, int] | None:
    """The subject and sequence of a request for one message; None: it is another one, or none."""
    try:
        request = direct.request_of(key, body)
    except direct.Status:
        return None
    only = direct.MessageGetRequest(seq=request.seq, last_by_subj=request.last_by_subj)
    if request != only or has_wildcard(request.last_by_subj):
        return None
    return request.last_by_subj.encode(), request.seq


@settings(deadline=None, max_examples=120)
@given(st.lists(requests, min_size=1, max_size=8))
def test_requests_that_are_taken_are_those_of_the_model(
    given_: list[tuple[bytes, str, bytes, bytes, bytes]],
) -> None:
    given_ = [(*one[:2], one[2] and one[2] + b"%d" % number, *one[3:]) for number, one in enumerate(given_)]
    frames = received(given_)
    taken, others = taken_requests(frames, len(API), len(DOMAIN))
    found = list(zip(listed(taken.subjects), taken.sequences.tolist(), listed(taken.replies), strict=True))
    left = [] if others is None else others.rows.tolist()
    for _, key, reply, body, headers in given_:
        if not reply or reply.startswith(b"$"):
            continue
        expected = None if headers else modelled(key, body)
        if found and expected is not None and found[0] == (*expected, reply):
            found.pop(0)
            continue
        row = left.pop(0)
        assert frames.buffer[row[PAYLOAD] :][: row[PAYLOAD_LEN]].tobytes() == body
        assert frames.buffer[row[SUBJECT] :][: row[SUBJECT_LEN]].tobytes().endswith(key.encode())
        assert body or headers or expected is None, "a request without a body is taken"
    assert not found
    assert not left


@pytest.mark.parametrize("body", [b'{"seq":5}', b'{"seq": 5}', b'{"last_by_subj":"a.b"}', b'{"last_by_subj": "a.b"}'])
def test_what_clients_send_is_taken(body: bytes) -> None:
    taken, others = taken_requests(received([(API, "", b"r", body, b"")]), len(API), len(DOMAIN))
    assert others is None
    assert (taken.sequences.tolist(), listed(taken.subjects)) in (([5], [b""]), ([0], [b"a.b"]))


texts = st.text(max_size=4)


@settings(deadline=None)
@given(st.sets(texts, max_size=12), st.lists(texts, max_size=12))
def test_texts_are_found_among_ascending_ones(known: set[str], wanted: list[str]) -> None:
    ascending = sorted(one.encode() for one in known)
    found = np.empty(len(wanted), np.int64)
    native.find_sorted(
        *texts_of(pa.array([one.encode() for one in wanted], pa.binary())),
        *texts_of(pa.array(ascending, pa.binary())),
        found,
    )
    assert found.tolist() == [
        at if (at := bisect_left(ascending, one.encode())) < len(ascending) and ascending[at] == one.encode() else -1
        for one in wanted
    ]


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
pairs = st.lists(st.fixed_dictionaries({"key": words, "value": words}), max_size=3)
rows = st.fixed_dictionaries(
    {
        "offset": st.integers(0, 2**62),
        "timestamp": st.integers(0, 253402300799999999) | st.integers(0, 2**33).map(lambda s: s * 1_000_000),
        "subject": st.text("ab.é", min_size=1, max_size=8),
        "key": st.none(),
        "headers": st.none() | pairs,
        "value": st.binary(max_size=60),
    }
)


@pytest.mark.long
@settings(deadline=None, max_examples=120)
@given(
    st.lists(rows, min_size=1, max_size=8),
    st.integers(1, 400),
    st.integers(100, 300),
    st.data(),
)
def test_frames_of_answers_are_those_of_the_plain_path(
    content: list[dict[str, Any]], room_bytes: int, most_bytes: int, data: st.DataObject
) -> None:
    columns = [pa.array([row[name] for row in content], type_) for name, type_ in
               zip(MESSAGE_SCHEMA.names, MESSAGE_SCHEMA.types, strict=True)]  # fmt: skip
    batch = pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)
    answers = rendered(batch, np.array([row["offset"] for row in content]), "A")
    plain = [direct._answer(row, "A", with_headers=True) for row in content]
    number = np.array(data.draw(st.lists(st.integers(-1, len(content) - 1), min_size=1, max_size=12)))
    asked_by = np.array(data.draw(st.permutations(range(len(number)))))
    replies = [b"_INBOX.%d" % at**3 for at in range(len(number))]
    limits = Limits(most_bytes, LIMITS.too_large, LIMITS.not_found)
    expected = []
    for at, which in zip(asked_by.tolist(), number.tolist(), strict=True):
        answer = direct.Answer(b"not found") if which < 0 else plain[which]
        if len(answer.headers) + len(answer.payload) > most_bytes:
            answer = direct.Answer(b"too large")
        expected.append(frame(replies[at], answer))
    places = np.where(number[:, None] < 0, np.array([-1, 0, 0]), answers.places[number])
    texts = texts_of(pa.array(replies, pa.binary()))
    chosen = Answers(places, answers.data)
    parts = list(frames_of(texts, asked_by, chosen, limits, room_bytes))
    assert b"".join(parts) == b"".join(expected)
    assert len(parts) == 1 or all(len(part) <= room_bytes or part.tobytes() in expected for part in parts)
    asking = Requests((np.zeros(len(number) + 1, np.int32), np.zeros(0, np.uint8)), np.ones(len(number), int), texts)
    most = most_frame_bytes(asking, int(places[:, 2].sum()), limits)
    assert frames_at_once(texts, asked_by, chosen, limits, most) == b"".join(expected)


def test_header_values_that_are_null_are_empty() -> None:
    headers = [[{"key": "a", "value": None}, {"key": "b", "value": "c"}]]
    columns = [pa.array(one, type_) for one, type_ in
               zip([[0], [0], ["s"], [None], headers, [b"x"]], MESSAGE_SCHEMA.types, strict=True)]  # fmt: skip
    batch = pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)
    assert bytes(rendered(batch, np.array([0]), "A").data).startswith(b"NATS/1.0\r\na: \r\nb: c\r\nNats-Stream: A\r\n")


def test_requests_are_joined_and_taken_apart() -> None:
    keys = ["a", "bc", "def", "g"]
    parts = [taken_requests(received([(API, key, b"r" + key.encode(), b"", b"")]), len(API), len(DOMAIN))[0]
             for key in keys]  # fmt: skip
    joined = Requests.joined(parts)
    assert listed(joined.subjects) == [key.encode() for key in keys]
    some = joined.take(np.array([3, 1]))
    assert (listed(some.subjects), listed(some.replies)) == ([b"g", b"bc"], [b"rg", b"rbc"])
    assert joined.nbytes == sum(part.nbytes for part in parts)
