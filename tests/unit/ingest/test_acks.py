"""Acks: what a JetStream client understands, for a whole commit at once."""

from __future__ import annotations

import json

import numpy as np

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
        ("_INBOX.a", {"stream": 'or"ders', "seq": 42, "offset": 41, "epoch": 3}),
        ("_INBOX.c", {"stream": 'or"ders', "seq": 44, "offset": 43, "epoch": 3}),
    ]


def test_duplicates_are_marked() -> None:
    replies = Texts.of([b"a", b"b"])
    protocol = acks.stored(replies, np.array([7, 3]), stream="s", epoch=1, duplicate=np.array([False, True]))
    assert [body.get("duplicate", False) for _, body in parsed(bytes(protocol))] == [False, True]


def test_refusals_carry_code_and_reason() -> None:
    ((subject, body),) = parsed(bytes(acks.refused(Texts.of([b"x", b""]), StorageFull("no room"), stream="s")))
    assert subject == "x"
    assert body == {"error": {"code": 503, "err_code": 10047, "description": "no room"}, "stream": "s"}


def test_no_replies_no_bytes() -> None:
    assert acks.stored(Texts.of([b"", b""]), np.array([1, 2]), stream="s", epoch=1) == b""
