"""Which JetStream consumers have series of their own in the metrics: however many there are, few."""

from __future__ import annotations

from natslog.http.metrics import MOST_CONSUMERS, shown_singly
from natslog.node.replicas.consumer_records import ConsumerPosition


def consumers(count: int) -> list[ConsumerPosition]:
    return [ConsumerPosition(f"c{at}", at, 0, True) for at in range(count)]


def test_streams_with_the_fewest_consumers_come_first_up_to_the_limit() -> None:
    durable = {"big": consumers(1000), "b": consumers(30), "a": consumers(30), "none": []}
    assert shown_singly(durable) == ["none", "a", "b"]
    assert shown_singly({"all": consumers(MOST_CONSUMERS)}) == ["all"]
    assert shown_singly({"all": consumers(MOST_CONSUMERS), "one": consumers(1)}) == ["one"]
    many = {f"s{at:03}": consumers(3) for at in range(1000)}
    assert shown_singly(many) == [f"s{at:03}" for at in range(MOST_CONSUMERS // 3)]


def test_what_is_shown_does_not_depend_on_the_lag() -> None:
    durable = {"a": consumers(150), "b": consumers(151)}
    moved = {name: [one._replace(offset=10**6) for one in found] for name, found in durable.items()}
    assert shown_singly(durable) == shown_singly(moved) == ["a"]
