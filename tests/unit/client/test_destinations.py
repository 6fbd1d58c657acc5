"""Which streams record subjects: how often brokers are asked, and what is concluded."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.client.destinations import Destinations
from natslog.errors import BrokerUnavailable, ConfigError
from natslog.subjects import covers
from natslog.wire.outgoing import BY_HEADER, BY_REPLY


class Brokers:
    """Counts how often it is asked."""

    servers = ("http://a",)

    def __init__(self, *streams: dict[str, Any]) -> None:
        self.listed, self.asked = list(streams), 0

    def streams(self, *, current: bool) -> list[dict[str, Any]]:
        assert current, "a broker without the latest changes could lack a stream"
        self.asked += 1
        return list(self.listed)


def stream(name: str, subject: str, **fields: Any) -> dict[str, Any]:
    stated = {"subject": subject, "subjects": [subject], "acks": "reply", "sealed": False, "envelopes": False}
    return {"name": name} | stated | fields


def ways(
    brokers: Brokers, *subjects: str, known: Destinations | None = None, required: tuple[str, ...] = ()
) -> list[int]:
    asked: Any = brokers
    return (known or Destinations()).ways(asked, pa.array(subjects, pa.string()), required).tolist()


def test_bits_say_how_the_streams_of_a_subject_ack() -> None:
    brokers = Brokers(
        stream("reply", "a.>", acks="reply"),
        stream("header", "a.b", acks="header"),
        stream("never", "never", acks="never"),
        stream("sealed", "sealed", acks="reply", sealed=True),
    )
    told = ways(brokers, "a.x", "a.b", "never", "sealed", "none")
    assert told == [BY_REPLY, BY_REPLY | BY_HEADER, 0, 0, 0]


def test_required_stream_that_does_not_ack_every_subject_is_an_error() -> None:
    brokers = Brokers(stream("all", "a.>"), stream("one", "a.b", acks="header"), stream("never", "a.n", acks="never"))
    assert ways(brokers, "a.b", required=("all", "one")) == [BY_REPLY | BY_HEADER]
    for name, words in (
        ("one", "stream 'one' does not record the subject 'a.n'; streams that do: all, never"),
        ("never", "stream 'never' does not record the subject 'a.b'; streams that do: all, one"),
        ("other", "stream 'other' does not record the subject 'a.b'; streams that do: all, one"),
    ):
        with pytest.raises(ConfigError) as refused:
            ways(brokers, "a.b", "a.n", required=("all", name))
        assert refused.value.message == words
    with pytest.raises(ConfigError, match="does not ack the subject 'a.n': it is sealed, or its setting acks is never"):
        ways(brokers, "a.n", required=("never",))


def test_stream_that_does_not_store_envelopes_as_rows_is_an_error_where_they_are_sent() -> None:
    brokers = Brokers(stream("new", "a.*", envelopes=True), stream("old", "a.b"), stream("other", "b"))
    asked: Any = brokers
    known = Destinations()
    assert known.ways(asked, pa.array(["a.c"]), envelopes=True).tolist() == [BY_REPLY]
    with pytest.raises(ConfigError, match="a stream that records the subject 'a.b' does not store envelopes as rows"):
        known.ways(asked, pa.array(["a.c", "a.b"]), envelopes=True)
    assert brokers.asked == 2, "the brokers may have been upgraded since the list was made"
    assert known.ways(asked, pa.array(["a.b"])).tolist() == [BY_REPLY]


def test_every_subject_of_a_stream_counts() -> None:
    brokers = Brokers(stream("several", "a.*", subjects=["a.*", "b"], acks="header"), stream("one", "c"))
    assert ways(brokers, "a.x", "b", "c", "d") == [BY_HEADER, BY_HEADER, BY_REPLY, 0]
    assert ways(brokers, "a.x", "b", required=("several",)) == [BY_HEADER, BY_HEADER]
    with pytest.raises(ConfigError, match="stream 'one' does not record the subject 'b'; streams that do: several"):
        ways(brokers, "b", required=("one",))


tokens = st.sampled_from(["a", "b", "c"])
patterns = st.lists(tokens | st.just("*"), min_size=1, max_size=4).flatmap(
    lambda some: st.sampled_from([some, [*some, ">"], [">"]])
)


@given(st.lists(patterns, max_size=8), st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=8))
def test_subjects_are_matched_as_nats_matches_them(some: list[list[str]], subjects: list[list[str]]) -> None:
    listed = [
        stream(f"s{number}", ".".join(pattern), acks=("reply", "header")[number % 2])
        for number, pattern in enumerate(some)
    ]
    texts = [".".join(subject) for subject in subjects]
    told = ways(Brokers(*listed), *texts)
    for text, bits in zip(texts, told, strict=True):
        acks = {body["acks"] for body in listed if covers(body["subject"], text)}
        assert bits == BY_REPLY * ("reply" in acks) + BY_HEADER * ("header" in acks)


def test_more_wildcards_than_one_expression_holds() -> None:
    brokers = Brokers(*(stream(f"s{at}", f"a.{at}.*", acks="header") for at in range(450)))
    subjects = [f"a.{at}.x" for at in range(460)]
    assert ways(brokers, *subjects) == [BY_HEADER] * 450 + [0] * 10


def test_many_subjects_cost_one_question() -> None:
    brokers = Brokers(stream("s", "a.*"), stream("plain", "a.7"))
    known = Destinations()
    for first in range(0, 500, 50):
        assert all(ways(brokers, *(f"a.{at}" for at in range(first, first + 50)), known=known))
    assert brokers.asked == 1


def test_brokers_are_asked_again_after_a_minute_or_when_streams_may_have_changed() -> None:
    now = [0.0]
    known, brokers = Destinations(lambda: now[0]), Brokers(stream("s", "a"))
    for at in (0.0, 1.0, 59.0):
        now[0] = at
        ways(brokers, "a", known=known)
    assert brokers.asked == 1
    now[0] = 61.0
    ways(brokers, "a", known=known)
    assert brokers.asked == 2
    known.forget(brokers.servers)
    ways(brokers, "a", known=known)
    assert brokers.asked == 3
    other = Brokers(stream("s", "a"))
    other.servers = ("http://b",)
    ways(other, "a", known=known)
    assert other.asked == 1, "another cluster"


def test_that_nothing_acks_is_concluded_from_a_new_list_only() -> None:
    known, brokers = Destinations(), Brokers(stream("s", "a"))
    assert ways(brokers, "a", "b", known=known) == [BY_REPLY, 0]
    assert brokers.asked == 1, "that list was new"
    brokers.listed.append(stream("new", "b"))
    assert ways(brokers, "a", known=known) == [BY_REPLY]
    assert brokers.asked == 1
    assert ways(brokers, "b", known=known) == [BY_REPLY]
    assert brokers.asked == 2
    brokers.listed.append(stream("audit", "b", acks="header"))
    assert ways(brokers, "b", known=known, required=("audit",)) == [BY_REPLY | BY_HEADER]
    assert brokers.asked == 3


def test_no_answer_is_an_error_and_nothing_is_kept() -> None:
    class Away(Brokers):
        def streams(self, *, current: bool) -> list[dict[str, Any]]:
            raise BrokerUnavailable("away")

    known = Destinations()
    with pytest.raises(BrokerUnavailable):
        ways(Away(), "a", known=known)
    assert ways(Brokers(stream("s", "a")), "a", known=known) == [BY_REPLY]
