"""Direct requests: messages of a stream, sent as messages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jetstream.both import Api, Both, Direct, Publish, Send, Step
from tests.jetstream.test_streams import create, info, published, update


def direct(**request: Any) -> Direct:
    return Direct("A", request)


def filled(**config: Any) -> list[Step]:
    """A stream with gaps and headers."""
    return [
        create("A", subjects=["a.>"], allow_direct=True, **config),
        Publish("a.1", b"one", {"K": "v", "Empty": ""}),
        *published("a.2", "a.1", "a.3.x", "a.2"),
        Publish("a.1", b""),
        Api("STREAM.MSG.DELETE.A", {"seq": 3}),
    ]


@pytest.mark.long
def test_one_message(both: Both) -> None:
    both.compare(
        [
            *filled(),
            *(direct(seq=seq) for seq in (1, 2, 3, 6, 7, 99)),
            *(direct(last_by_subj=subject) for subject in ("a.1", "a.2", "a.*", ">", "none")),
            *(Direct(f"A.{subject}") for subject in ("a.1", "a.2", "a.3.x", "none", "a.*")),
            Direct("A.a.1", {"no_hdr": True}),
            Direct("A.a.1", {"seq": 1}),
            Direct("A.a.1", {"batch": 1}),
            Direct("A.a.1", b"{"),
            direct(next_by_subj="a.1"),
            *(direct(next_by_subj="a.*", seq=seq) for seq in (1, 3, 6, 7)),
            direct(start_time="2020-01-01T00:00:00Z"),
            direct(start_time="2100-01-01T00:00:00Z"),
            direct(seq=1, no_hdr=True),
        ]
    )


def test_requests_that_say_nothing_or_too_much(both: Both) -> None:
    both.compare(
        [
            *filled(),
            Direct("A"),
            Direct("A", b"{"),
            Direct("A", b"[]"),
            direct(),
            direct(unknown=1),
            direct(seq="1"),
            direct(seq=1, unknown=1),
            direct(seq=1, last_by_subj="a.1"),
            direct(last_by_subj="a.1", next_by_subj="a.1"),
            direct(seq=1, start_time="2020-01-01T00:00:00Z"),
            Direct("A", {"seq": 1}, {"Nats-Required-Api-Level": "99"}),
            Direct("A.a.1", b"", {"Nats-Required-Api-Level": "99"}),
        ]
    )


def test_batches(both: Both) -> None:
    both.compare(
        [
            *filled(),
            *(direct(seq=1, batch=count) for count in (1, 2, 4, 5, 100)),
            direct(seq=4, batch=2),
            direct(seq=9, batch=2),
            direct(next_by_subj="a.1", batch=10),
            direct(next_by_subj="a.*", seq=3, batch=10),
            direct(next_by_subj="none", batch=10),
            direct(seq=1, batch=10, max_bytes=8),
            direct(start_time="2020-01-01T00:00:00Z", batch=3),
        ]
    )


def test_last_messages_of_several_subjects(both: Both) -> None:
    both.compare(
        [
            *filled(),
            direct(multi_last=["a.1", "a.2"]),
            direct(multi_last=["a.2", "none"]),
            direct(multi_last=["none"]),
            direct(multi_last=[">"]),
            direct(multi_last=["a.*"], batch=1),
            direct(multi_last=["a.*", "a.3.>"], up_to_seq=4),
            direct(multi_last=[">"], up_to_seq=2),
            direct(multi_last=[">"], up_to_time="2100-01-01T00:00:00Z"),
            direct(multi_last=[">"], up_to_time="2020-01-01T00:00:00Z"),
            direct(multi_last=[">"], seq=5),
            direct(multi_last=[">"], up_to_seq=2, up_to_time="2100-01-01T00:00:00Z"),
            direct(multi_last=["a.1"], next_by_subj="a.1"),
            direct(multi_last=["a.*"], max_bytes=5),
        ]
    )


def test_only_streams_that_allow_it_answer(both: Both) -> None:
    closed: list[Step] = [Api("DIRECT.GET.A", {"seq": 1}), Api("DIRECT.GET.A.a.1")]
    both.compare([create("A", subjects=["a.>"]), Publish("a.1"), *closed])
    both.compare([update("A", subjects=["a.>"], allow_direct=True), direct(seq=1), info("A")])
    both.compare([update("A", subjects=["a.>"]), *closed, Api("STREAM.DELETE.A"), *closed])


@pytest.mark.long
def test_more_subjects_than_an_answer_may_have(both: Both) -> None:
    messages = [Publish(f"a.{at}", b"") for at in range(1025)]
    both.compare([create("A", subjects=["a.>"], allow_direct=True), *messages, direct(multi_last=["a.*"])])


def test_answers_that_do_not_fit_into_a_message(both: Both) -> None:
    """They would end the connection of the broker; the server has no such limit for its own answers."""
    large = [create("A", subjects=["a.>"], allow_direct=True), Publish("a.x", bytes(900_000)), Publish("a.y")]
    _, found = both.answers([*large, Api("STREAM.MSG.GET.A", {"seq": 1}), direct(seq=1), direct(seq=2), info("A")])
    assert "max_payload" in found[3]["error"]["description"]
    assert len(found[4][0][1]) == 900_000
    assert found[6]["state"]["messages"] == 2
    edge = [Publish("a.x", bytes(1024 * 1024)), direct(seq=3), direct(seq=2)]
    _, found = both.answers(edge)
    assert found[1] == [({"Status": "500", "Description": "Message Exceeds Maximum Payload"}, b"")]
    assert found[2][0][1] == b"x"


def test_subjects_come_in_pages_that_fit_into_a_message(both: Both) -> None:
    long = "x" * 700
    sent: list[Step] = [Send(f"a.{at:04}.{long}") for at in range(1000)]
    both.answers([create("A", subjects=["a.>"]), *sent])
    subjects: dict[str, int] = {}
    while True:
        _, (found,) = both.answers([info("A", subjects_filter=">", offset=len(subjects))])
        assert found["total"] == 1000
        if "subjects" not in found["state"]:
            break
        assert len(found["state"]["subjects"]) < 1000
        subjects |= found["state"]["subjects"]
    assert subjects == {f"a.{at:04}.{long}": 1 for at in range(1000)}
