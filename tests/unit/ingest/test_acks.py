"""Acks: what a JetStream client understands, for a whole commit at once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from natslog.errors import StorageFull
from natslog.ingest import acks
from natslog.ingest.columns import Texts


def parsed(protocol: bytes) -> list[tuple[str, dict]]:
    """(reply subject, body) of each PUB frame."""
    found = []
    while protocol:
        line, _, rest = protocol.partition(b"\r\n")
        verb, subject, length = line.split(b" ")
        assert verb == b"PUB"
        body, protocol = rest[: int(length)], rest[int(length) :]
        assert protocol.startswith(b"\r\n")
        protocol = protocol[2:]
        found.append((subject.decode(), json.loads(body)))
    return found


def test_stored_acks_go_to_those_who_asked_with_sequence_one_above_offset() -> None:
    replies = Texts.of([b"_INBOX.a", b"", b"_INBOX.c"])
    protocol = acks.stored(replies, np.array([41, 42, 43]), stream='or"ders', epoch=3)
    assert parsed(bytes(protocol)) == [
        ("_INBOX.a", {"stream": 'or"ders', "seq": 42}),
        ("_INBOX.c", {"stream": 'or"ders', "seq": 44}),
    ]


def test_full_acks_state_offset_and_epoch_as_well() -> None:
    replies, full = Texts.of([b"a", b"b", b"c"]), np.array([False, True, True])
    duplicate = np.array([False, False, True])
    protocol = acks.stored(replies, np.array([41, 42, 9]), stream="s", epoch=3, full=full, duplicate=duplicate)
    assert [body for _, body in parsed(bytes(protocol))] == [
        {"stream": "s", "seq": 42},
        {"stream": "s", "seq": 43, "offset": 42, "epoch": 3},
        {"stream": "s", "seq": 10, "offset": 9, "epoch": 3, "duplicate": True},
    ]


def test_duplicates_are_marked() -> None:
    replies = Texts.of([b"a", b"b"])
    protocol = acks.stored(replies, np.array([7, 3]), stream="s", epoch=1, duplicate=np.array([False, True]))
    assert [body.get("duplicate", False) for _, body in parsed(bytes(protocol))] == [False, True]


def test_refusals_carry_code_and_reason() -> None:
    ((subject, body),) = parsed(bytes(acks.refused(Texts.of([b"x", b""]), StorageFull("no room"), stream="s")))
    assert subject == "x"
    assert body == {"error": {"code": 503, "err_code": 10047, "description": "no room"}, "stream": "s", "seq": 0}


def test_no_replies_no_bytes() -> None:
    assert acks.stored(Texts.of([b"", b""]), np.array([1, 2]), stream="s", epoch=1) == b""


def messages_of(replies: list[bytes], **given: Any) -> list[tuple[str, int, int]]:
    """(reply subject, offset, number of messages) of each ack."""
    offsets = np.arange(40, 40 + len(replies))
    protocol = acks.stored(Texts.of(replies), offsets, stream="s", epoch=1, **given)
    return [(subject, body["seq"] - 1, body.get("messages", 1)) for subject, body in parsed(bytes(protocol))]


def test_consecutive_numbers_get_one_ack() -> None:
    numbers = [*range(8, 12), 14, 15, 15, 17]
    found = messages_of([b"_INBOX.x.~%d" % number for number in numbers])
    assert found == [("_INBOX.x.~11", 43, 4), ("_INBOX.x.~15", 45, 2), ("_INBOX.x.~15", 46, 1), ("_INBOX.x.~17", 47, 1)]


@pytest.mark.parametrize(
    "replies",
    [
        [b"_INBOX.x.1", b"_INBOX.x.2"],
        [b"_INBOX.x~1", b"_INBOX.x~2"],
        [b"~1", b"~2"],
        [b"_INBOX.x.~1", b"_INBOX.y.~2"],
        [b"_INBOX.x.~1", b"_INBOX.x.z.~2"],
        [b"_INBOX.x.~1", b"_INBOX.x.~3"],
        [b"_INBOX.x.~2", b"_INBOX.x.~1"],
        [b"_INBOX.x.~", b"_INBOX.x.~1"],
        [b"_INBOX.x.~a1", b"_INBOX.x.~a2"],
        [b"_INBOX.x.~999999999999999999999", b"_INBOX.x.~1000000000000000000000"],
        [b"_INBOX.x.~1", b"", b"_INBOX.x.~2"],
        [b"_INBOX.x.~1", b"_INBOX.x."],
    ],
)
def test_all_others_get_an_ack_each(replies: list[bytes]) -> None:
    assert messages_of(replies) == [(reply.decode(), 40 + at, 1) for at, reply in enumerate(replies) if reply]


def test_acks_that_say_different_things_are_separate() -> None:
    replies = [b"_INBOX.x.~%d" % number for number in range(4)]
    assert [ack[1:] for ack in messages_of(replies, duplicate=np.array([True, False, False, True]))] == [
        (40, 1), (42, 2), (43, 1),
    ]  # fmt: skip
    assert [ack[1:] for ack in messages_of(replies, full=np.array([True, True, False, False]))] == [(41, 2), (43, 2)]
    assert [ack[1:] for ack in messages_of(replies, counts=np.array([0, 0, 5, 0]))] == [(41, 2), (42, 1), (43, 1)]
    correlations = Texts.of([b"", b"", b"a", b"b"])
    assert [ack[1:] for ack in messages_of(replies, correlations=correlations)] == [(41, 2), (42, 1), (43, 1)]


def test_correlation_ids_are_returned() -> None:
    replies, correlations = Texts.of([b"a", b"b", b""]), Texts.of([b"17", b"", b"18"])
    stored = parsed(bytes(acks.stored(replies, np.arange(3), stream="s", epoch=1, correlations=correlations)))
    assert [body.get("correlation_id") for _, body in stored] == ["17", None]
    refused = parsed(bytes(acks.refused(replies, StorageFull("no room"), stream="s", correlations=correlations)))
    assert [body.get("correlation_id") for _, body in refused] == ["17", None]
