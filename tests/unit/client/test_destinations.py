"""Which streams record subjects: how often brokers are asked, and what is concluded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.client.destinations import Destination, Destinations
from natslog.errors import BrokerUnavailable
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
    return {"name": name, "subject": subject} | fields


def found(brokers: Brokers, *subjects: str, known: Destinations | None = None) -> dict[str, Destination]:
    return (known or Destinations()).of(brokers, subjects)  # type: ignore[arg-type]


def test_streams_are_told_with_how_they_ack() -> None:
    brokers = Brokers(
        stream("reply", "a.>", acks="reply"),
        stream("header", "a.b", acks="header"),
        stream("old", "old"),
        stream("never", "never", acks="never"),
        stream("sealed", "sealed", acks="reply", sealed=True),
    )
    told = found(brokers, "a.x", "a.b", "old", "never", "sealed", "none")
    assert {subject: one.streams for subject, one in told.items()} == {
        "a.x": (("reply", BY_REPLY),),
        "a.b": (("header", BY_HEADER), ("reply", BY_REPLY)),
        "old": (("old", BY_REPLY),),
        "never": (("never", 0),),
        "sealed": (("sealed", 0),),
        "none": (),
    }
    assert [one.ack_to for one in told.values()] == [BY_REPLY, BY_REPLY | BY_HEADER, BY_REPLY, 0, 0, 0]
    assert (told["never"].acks_of("never"), told["never"].acks_of("other")) == (0, None)


tokens = st.sampled_from(["a", "b", "c"])
patterns = st.lists(tokens | st.just("*"), min_size=1, max_size=4).flatmap(
    lambda some: st.sampled_from([some, [*some, ">"], [">"]])
)


@given(st.lists(patterns, max_size=8), st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=8))
def test_subjects_are_matched_as_nats_matches_them(some: list[list[str]], subjects: list[list[str]]) -> None:
    listed = [stream(f"s{number}", ".".join(pattern)) for number, pattern in enumerate(some)]
    texts = [".".join(subject) for subject in subjects]
    told = found(Brokers(*listed), *texts)
    for text in texts:
        expected = {body["name"] for body in listed if covers(body["subject"], text)}
        assert {name for name, _ in told[text].streams} == expected


def test_many_subjects_cost_one_question() -> None:
    brokers = Brokers(stream("s", "a.*"), stream("plain", "a.7"))
    known = Destinations()
    for first in range(0, 500, 50):
        told = found(brokers, *(f"a.{at}" for at in range(first, first + 50)), known=known)
        assert all(one.acks_of("s") for one in told.values())
    assert brokers.asked == 1


def test_brokers_are_asked_again_after_a_minute_or_when_streams_may_have_changed() -> None:
    now = [0.0]
    known, brokers = Destinations(lambda: now[0]), Brokers(stream("s", "a"))
    for at in (0.0, 1.0, 59.0):
        now[0] = at
        found(brokers, "a", known=known)
    assert brokers.asked == 1
    now[0] = 61.0
    found(brokers, "a", known=known)
    assert brokers.asked == 2
    known.forget(brokers.servers)
    found(brokers, "a", known=known)
    assert brokers.asked == 3
    other = Brokers(stream("s", "a"))
    other.servers = ("http://b",)
    found(other, "a", known=known)
    assert other.asked == 1, "another cluster"


def test_that_nothing_acks_is_concluded_from_a_new_list_only() -> None:
    known, brokers = Destinations(), Brokers(stream("s", "a"))
    assert found(brokers, "a", "b", known=known)["b"].ack_to == 0
    assert brokers.asked == 1, "that list was new"
    brokers.listed.append(stream("new", "b"))
    assert found(brokers, "a", known=known)["a"].ack_to == BY_REPLY
    assert brokers.asked == 1
    assert found(brokers, "b", known=known)["b"].ack_to == BY_REPLY
    assert brokers.asked == 2
    brokers.listed.append(stream("audit", "b"))
    assert known.of(brokers, ["b"], ["audit"])["b"].acks_of("audit") == BY_REPLY  # type: ignore[arg-type]
    assert brokers.asked == 3


def test_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("natslog.client.destinations._MOST_SUBJECTS", 1000)
    known, brokers = Destinations(), Brokers(stream("s", "a.>"))
    for first in range(0, 3000, 500):
        found(brokers, *(f"a.{at}" for at in range(first, first + 500)), known=known)
    (streams,) = known._lists.values()
    assert len(streams._known) <= 1000


def test_no_answer_is_an_error_and_nothing_is_kept() -> None:
    class Away(Brokers):
        def streams(self, *, current: bool) -> list[dict[str, Any]]:
            raise BrokerUnavailable("away")

    known = Destinations()
    with pytest.raises(BrokerUnavailable):
        found(Away(), "a", known=known)
    assert found(Brokers(stream("s", "a")), "a", known=known)["a"].ack_to == BY_REPLY
