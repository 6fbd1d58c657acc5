"""Push consumers: delivery to a subject with and without interest, groups, heartbeats and flow control."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jetstream.both import Api, Both, Publish, Step
from tests.jetstream.consuming import (
    Ack,
    Agreed,
    AnswerFlowControl,
    Collect,
    Heartbeat,
    Pull,
    Subscribe,
    Unsubscribe,
    Until,
)
from tests.jetstream.test_consumers import SECOND, consumer, ephemeral, raw, state
from tests.jetstream.test_pull import NAK, SUBJECTS, TERM, acks_pending, are_pending, filled
from tests.jetstream.test_streams import MS, create, published


def push(name: str = "C", /, **config: Any) -> Api:
    return consumer(name, **{"deliver_subject": "to.me", "ack_policy": "explicit"} | config)


def is_bound(value: bool | None = True, name: str = "C") -> Until:
    """The field is missing where there is no interest."""
    return Until(f"CONSUMER.INFO.A.{name}", "push_bound", value)


ME = Subscribe("me", "to.me")


@pytest.mark.long
@pytest.mark.parametrize("ack_policy", ["none", "explicit", "all"])
@pytest.mark.parametrize(
    "config",
    [
        {"deliver_policy": "all"},
        {"deliver_policy": "last"},
        {"deliver_policy": "new"},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 4},
        {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z"},
        {"deliver_policy": "last_per_subject", "filter_subject": "a.>"},
        {"deliver_policy": "all", "filter_subjects": ["a.2", "a.3.x"]},
    ],
    ids=str,
)
def test_deliver_policies(both: Both, config: dict[str, Any], ack_policy: str) -> None:
    counts = {"all": 6, "last": 1, "new": 0, "by_start_sequence": 3, "by_start_time": 6, "last_per_subject": 3}
    count = 3 if "filter_subjects" in config else counts[config["deliver_policy"]]
    both.compare(
        [
            ME,
            *filled(push(ack_policy=ack_policy, **config)),
            Collect("me", count),
            state(),
            *(step for subject in ("a.2", "a.3.x") for step in (Publish(subject, b"new"), Collect("me"), state())),
        ]
    )


def test_acks(both: Both) -> None:
    both.compare(
        [
            ME,
            *filled(push(max_ack_pending=3)),
            Collect("me", 3),
            state(),
            Ack(0),
            Collect("me"),
            Ack(1, NAK),
            Collect("me"),
            Ack(2, TERM),
            Collect("me"),
            state(),
            Ack(3, b"+WPI"),
            Ack(3),
            Collect("me"),
            state(),
            *(Ack(at) for at in (-1, -2, -3)),
            state(),
        ]
    )


def test_redelivery(both: Both) -> None:
    both.compare(
        [
            ME,
            *filled(push(ack_wait=100 * MS, max_deliver=3), subjects=("a.1",)),
            Collect("me", 3),
            acks_pending(0),
            state(),
            Publish("a.1", b"next"),
            Collect("me"),
            Ack(),
            state(),
        ]
    )


def test_redelivery_with_growing_waits_and_delayed_naks(both: Both) -> None:
    both.compare(
        [
            ME,
            *filled(push(backoff=[50 * MS, 100 * MS], max_deliver=4), subjects=("a.1",)),
            Collect("me", 2),
            Ack(-1, b'-NAK {"delay": 50000000}'),
            Collect("me"),
            Ack(),
            state(),
        ]
    )


def test_delivery_begins_and_ends_with_interest(both: Both) -> None:
    both.compare(
        [
            *filled(push()),
            state(),
            ME,
            Collect("me", 6),
            state(),
            Unsubscribe("me"),
            is_bound(None),
            *published("a.1", "a.2"),
            are_pending(2),
            state(),
            Subscribe("again", "to.me"),
            Collect("again", 2),
            state(),
        ]
    )


def test_members_of_a_group_share_the_messages(both: Both) -> None:
    both.compare(
        [
            Subscribe("members", "to.me", "g"),
            Subscribe("members", "to.me", "g"),
            *filled(push(deliver_group="g")),
            Collect("members", 6, is_sorted=True),
            state(),
            *published("a.1"),
            Collect("members"),
            *published("a.2"),
            Collect("members"),
            state(),
            Unsubscribe("members"),
            is_bound(None),
        ]
    )


def test_only_members_of_the_group_are_interest(both: Both) -> None:
    both.compare(
        [
            *filled(push(deliver_group="g")),
            ME,
            state(),
            Subscribe("others", "to.me", "other"),
            state(),
            Subscribe("members", "to.me", "g"),
            Collect("members", 6),
            state(),
        ]
    )


def test_consumer_without_a_group_delivers_to_all(both: Both) -> None:
    both.compare(
        [
            ME,
            Subscribe("you", "to.me"),
            Subscribe("members", "to.me", "g"),
            *filled(push(ack_policy="none")),
            *(Collect(name, 6) for name in ("me", "you", "members")),
            state(),
        ]
    )


def test_heartbeats(both: Both) -> None:
    both.compare(
        [
            ME,
            *filled(push(idle_heartbeat=100 * MS, filter_subject="a.1")),
            Collect("me", 3),
            Heartbeat("me"),
            Publish("a.1"),
            Collect("me"),
            Heartbeat("me"),
            Ack(),
            Agreed("CONSUMER.INFO.A.C"),
            Heartbeat("me"),
            state(),
        ]
    )


def test_flow_control(both: Both) -> None:
    """A request after half of the window, and nothing after a full one until it is answered."""
    messages = [Publish("a.1", b"%d" % at + bytes(600_000)) for at in range(8)]
    both.compare(
        [
            create("A", subjects=["a.>"]),
            *messages,
            ME,
            push(flow_control=True, idle_heartbeat=200 * MS, ack_policy="none"),
            Collect("me", 4),
            state(),
            Heartbeat("me"),
            AnswerFlowControl("me"),
            Collect("me", 4),
            state(),
            AnswerFlowControl("me"),
        ]
    )


def test_answers_to_other_requests_of_flow_control_are_ignored(both: Both) -> None:
    messages = [Publish("a.1", b"%d" % at + bytes(900_000)) for at in range(4)]
    both.compare(
        [
            create("A", subjects=["a.>"]),
            *messages,
            ME,
            push(flow_control=True, idle_heartbeat=100 * MS, ack_policy="none"),
            Collect("me", 3),
            Ack("$JS.FC.A.C.none", b"", is_request=False),
            Heartbeat("me"),
            state(),
            AnswerFlowControl("me"),
            Collect("me", 1),
        ]
    )


ORDERED: dict[str, Any] = {
    "deliver_subject": "to.me",
    "ack_policy": "none",
    "max_deliver": 1,
    "flow_control": True,
    "idle_heartbeat": SECOND,
    "mem_storage": True,
    "num_replicas": 1,
    "inactive_threshold": 300 * SECOND,
}


def test_ordered_consumers_of_clients(both: Both) -> None:
    both.compare(
        [
            ME,
            *filled(),
            ephemeral(**ORDERED),
            Collect("me", 6),
            state("GENERATED0"),
            Publish("a.1", b"new"),
            Collect("me"),
            Api("CONSUMER.DELETE.A.GENERATED0"),
            raw("A.ordered_1", ORDERED | {"deliver_policy": "by_start_sequence", "opt_start_seq": 6}),
            Collect("me", 2),
            raw("A.watch.a.1", ORDERED | {"deliver_policy": "last_per_subject", "filter_subject": "a.1"}),
            Collect("me"),
            state("watch"),
            raw("A.keys.a.>", ORDERED | {"headers_only": True, "filter_subject": "a.>"}),
            Collect("me", 7),
            state("keys"),
        ]
    )


@pytest.mark.parametrize("config", [{"replay_policy": "original"}, {"rate_limit_bps": 1_000_000}], ids=str)
def test_slower_delivery(both: Both, config: dict[str, Any]) -> None:
    both.compare([ME, *filled(push(**config)), Collect("me", 6), state()])


def test_headers_only(both: Both) -> None:
    both.compare(
        [
            ME,
            create("A", subjects=["a.>"]),
            Publish("a.1", b"payload", {"K": "v"}),
            Publish("a.1", b"text"),
            push(headers_only=True),
            Collect("me", 2),
        ]
    )


@pytest.mark.parametrize("subject", ["a.1", "a.x.y", "a", "b", "b.c", "c.d"])
def test_deliver_subjects_that_form_a_cycle(both: Both, subject: str) -> None:
    both.compare([create("A", subjects=["a.>", "b", "c.*"]), push(deliver_subject=subject), Agreed("CONSUMER.NAMES.A")])


def test_deliver_subject_changes(both: Both) -> None:
    both.compare(
        [
            *filled(push(ack_policy="none")),
            push(ack_policy="none", deliver_subject="to.you"),
            Subscribe("you", "to.you"),
            Collect("you", 6),
            is_bound(),
            push(ack_policy="none", deliver_subject="to.me"),
            push(ack_policy="none", deliver_subject="to.you", description="bound consumers are changed otherwise"),
            Unsubscribe("you"),
            is_bound(None),
            push(ack_policy="none", deliver_subject="to.me"),
            Publish("a.1", b"new"),
            ME,
            Collect("me"),
            state(),
        ]
    )


def test_consumers_that_are_bound_already(both: Both) -> None:
    """What clients send that subscribe twice."""
    both.compare(
        [
            ME,
            *filled(push()),
            Collect("me", 6),
            push(),
            push(deliver_subject="to.you"),
            Api("CONSUMER.DURABLE.CREATE.A.C", push().body),
            Api("CONSUMER.DURABLE.CREATE.A.C", push(deliver_subject="to.you").body),
            Api("CONSUMER.DURABLE.CREATE.A.C", push(ack_policy="all").body),
            push(action="create"),
            state(),
        ]
    )


def test_filter_changes(both: Both) -> None:
    both.compare(
        [
            ME,
            *filled(push(filter_subject="a.1")),
            Collect("me", 3),
            push(filter_subject="a.3.x"),
            state(),
            Publish("a.1", b"excluded"),
            Publish("a.3.x", b"included"),
            Collect("me"),
            state(),
        ]
    )


def test_deletion_ends_delivery(both: Both) -> None:
    both.compare(
        [
            ME,
            *filled(push(idle_heartbeat=100 * MS)),
            Collect("me", 6),
            Api("CONSUMER.DELETE.A.C"),
            Publish("a.1", b"not delivered"),
            push(deliver_policy="new"),
            Publish("a.1", b"delivered"),
            Collect("me"),
            Ack(0),
            Ack(-1),
            state(),
        ]
    )


def test_unused_ephemerals_are_deleted_when_interest_ends(both: Both) -> None:
    config: dict[str, Any] = {"deliver_subject": "to.me", "inactive_threshold": 100 * MS}
    gone = [Until(f"CONSUMER.INFO.A.{name}", "error.err_code", 10014) for name in ("GENERATED0", "D")]
    both.compare(
        [
            ME,
            *filled(ephemeral(**config), consumer("D", **config), consumer("E", deliver_subject="to.me")),
            Collect("me", 18, is_sorted=True),
            state("D"),
            Unsubscribe("me"),
            *gone,
            Agreed("CONSUMER.NAMES.A"),
        ]
    )


def test_messages_of_subscriptions_of_the_delivered_subject(both: Both) -> None:
    """A delivery keeps the subject of the message, but is not a message on it."""
    both.compare(
        [
            create("A", subjects=["a.>"]),
            Subscribe("direct", "a.>"),
            ME,
            *published(*SUBJECTS[:2]),
            Collect("direct", 2),
            push(),
            Collect("me", 2),
            Publish("a.9", b"last"),
            Collect("direct"),
            Collect("me"),
        ]
    )


def test_pull_requests_of_push_consumers(both: Both) -> None:
    steps: list[Step] = [*filled(push()), Pull("A", "C", b""), Pull("A", "C", {"batch": 1, "no_wait": True})]
    both.compare([*steps, state()])
