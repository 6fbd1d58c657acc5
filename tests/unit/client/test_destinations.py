"""Which streams record subjects: how often brokers are asked, and what is concluded."""

from __future__ import annotations

from typing import Any

import pytest

from natslog.client.destinations import _MOST_QUESTIONS, Destination, Destinations
from natslog.errors import BrokerUnavailable
from natslog.subjects import covers
from natslog.wire.outgoing import BY_HEADER, BY_REPLY


class Brokers:
    """Counts what it is asked; `behind`: what a broker without the latest changes lists."""

    servers = ("http://a",)

    def __init__(self, *streams: dict[str, Any], behind: list[dict[str, Any]] | None = None) -> None:
        self._streams, self._behind = list(streams), behind
        self.asked: list[str | None] = []

    def streams(self, *, subject: str | None = None, current: bool = False) -> list[dict[str, Any]]:
        self.asked.append(subject)
        listed = self._streams if current or self._behind is None else self._behind
        return [body for body in listed if subject is None or covers(body["subject"], subject)]


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
    assert found(brokers, "a.x", "a.b", "old", "never", "sealed", "none") == {
        "a.x": Destination(("reply",), BY_REPLY),
        "a.b": Destination(("header", "reply"), BY_REPLY | BY_HEADER),
        "old": Destination(("old",), BY_REPLY),
        "never": Destination(("never",), 0),
        "sealed": Destination(("sealed",), 0),
        "none": Destination((), 0),
    }


@pytest.mark.parametrize("count", [1, _MOST_QUESTIONS, _MOST_QUESTIONS + 1, 500])
def test_many_subjects_cost_few_questions(count: int) -> None:
    brokers = Brokers(stream("s", "a.*"), stream("plain", "a.7"))
    subjects = [f"a.{at}" for at in range(count)]
    destinations = found(brokers, *subjects)
    assert destinations == {one: Destination(("plain", "s") if one == "a.7" else ("s",), BY_REPLY) for one in subjects}
    assert len(brokers.asked) <= _MOST_QUESTIONS


def test_subjects_are_asked_for_again_after_a_minute() -> None:
    now = [0.0]
    known, brokers = Destinations(lambda: now[0]), Brokers(stream("s", "a"))
    for at in (0.0, 1.0, 59.0):
        now[0] = at
        found(brokers, "a", known=known)
    assert brokers.asked == ["a"]
    now[0] = 61.0
    found(brokers, "a", known=known)
    assert brokers.asked == ["a", "a"]
    other = Brokers(stream("s", "a"))
    other.servers = ("http://b",)
    found(other, "a", known=known)
    assert other.asked == ["a"], "another cluster"


def test_that_nothing_acks_is_concluded_from_a_broker_with_all_changes_only() -> None:
    assert found(Brokers(stream("s", "a"), behind=[]), "a")["a"] == Destination(("s",), BY_REPLY)
    subjects = [f"a.{at}" for at in range(500)]
    many = found(Brokers(stream("s", "a.>"), behind=[]), *subjects)
    assert set(many.values()) == {Destination(("s",), BY_REPLY)}


def test_table_is_bounded() -> None:
    known, brokers = Destinations(), Brokers(stream("s", "a.>"))
    for first in range(0, 30_000, 5000):
        found(brokers, *(f"a.{at}" for at in range(first, first + 5000)), known=known)
    assert len(known._known) == 10_000


def test_no_answer_is_an_error_and_nothing_is_kept() -> None:
    class Away(Brokers):
        def streams(self, **_: Any) -> list[dict[str, Any]]:
            raise BrokerUnavailable("away")

    known = Destinations()
    with pytest.raises(BrokerUnavailable):
        found(Away(), "a", known=known)
    assert found(Brokers(stream("s", "a")), "a", known=known)["a"].ack_to == BY_REPLY
