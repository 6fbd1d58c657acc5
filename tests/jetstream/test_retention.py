"""Streams whose messages are removed by acks: the retention policies `workqueue` and `interest`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jetstream.both import Api, Both, Publish, Send, Step
from tests.jetstream.consuming import Ack, Agreed, Collect, Next, Pull, Subscribe, Until
from tests.jetstream.test_consumers import SECOND, consumer, ephemeral, error, state
from tests.jetstream.test_pull import NAK, SUBJECTS, TERM, acks_pending, are_pending, drain, explicit, later, pull
from tests.jetstream.test_streams import MS, create, published, update

KEPT = Agreed("STREAM.INFO.A", {"deleted_details": True, "subjects_filter": ">"})
"""The state of the stream, when both servers agree on it."""


def stream(retention: str = "workqueue", **config: Any) -> Api:
    return create("A", subjects=["a.>"], retention=retention, **config)


def change(retention: str, **config: Any) -> Api:
    return update("A", subjects=["a.>"], retention=retention, **config)


def are_kept(count: int) -> Until:
    return Until("STREAM.INFO.A", "state.messages", count)


@pytest.mark.parametrize("storage", ["file", "memory"])
@pytest.mark.parametrize("retention", ["workqueue", "interest", "limits"])
def test_configuration_is_stored_and_shown(both: Both, retention: str, storage: str) -> None:
    both.compare([stream(retention, storage=storage), KEPT, Api("STREAM.LIST"), stream(retention, storage=storage)])


@pytest.mark.long
@pytest.mark.parametrize("after", ["workqueue", "interest", "limits"])
@pytest.mark.parametrize("before", ["workqueue", "interest", "limits"])
def test_changes_of_the_policy(both: Both, before: str, after: str) -> None:
    both.compare(
        [
            stream(before),
            explicit(),
            *published(*SUBJECTS),
            are_pending(6),
            pull(3),
            Ack(0),
            Ack(2),
            KEPT,
            change(after),
            KEPT,
            Ack(1),
            KEPT,
            Publish("a.1", b"new"),
            are_pending(4),
            drain(),
            state(),
            *(Ack(at) for at in (3, -1)),
            KEPT,
            state(),
        ]
    )


def test_other_settings_change(both: Both) -> None:
    both.compare([stream(), change("workqueue", max_msgs=2, description="text"), *published(*SUBJECTS), KEPT])


def test_acked_messages_are_removed_from_a_queue(both: Both) -> None:
    both.compare(
        [
            stream(),
            *published(*SUBJECTS),
            KEPT,
            explicit(),
            pull(4),
            KEPT,
            *(step for at in (1, 0) for step in (Ack(at), KEPT, state())),
            Ack(2, TERM),
            KEPT,
            Ack(3, NAK),
            KEPT,
            pull(1),
            Ack(-1),
            KEPT,
            Ack(-1),
            Ack(0),
            KEPT,
            state(),
            drain(),
            Ack(-1),
            Ack(-2),
            KEPT,
            state(),
            Publish("a.1", b"new"),
            are_pending(1),
            drain(),
            KEPT,
        ]
    )


def test_acks_without_reply_and_for_the_next_message(both: Both) -> None:
    both.compare(
        [
            stream(),
            *published(*SUBJECTS),
            explicit(),
            pull(2),
            Ack(0, is_request=False),
            Ack(1, is_request=False),
            are_kept(4),
            pull(1),
            Next(),
            are_kept(3),
            Next(-1, {"batch": 2, "expires": 5 * SECOND}, 2),
            are_kept(2),
            state(),
        ]
    )


def test_consumers_of_a_queue_that_are_refused(both: Both) -> None:
    answers = both.compare(
        [
            stream(),
            consumer("C", ack_policy="none"),
            consumer("C", ack_policy="all"),
            consumer("C", ack_policy="none", deliver_subject="to.me"),
            explicit(deliver_policy="new"),
            explicit(deliver_policy="last"),
            explicit(deliver_policy="by_start_sequence", opt_start_seq=1),
            explicit(deliver_policy="last_per_subject", filter_subject="a.1"),
            explicit(num_replicas=1),
            explicit("D"),
            explicit("D", filter_subject="a.1"),
            explicit("C", filter_subject="a.*"),
            explicit("D", filter_subject="a.1"),
            explicit("D", filter_subject="a.>"),
            explicit("D", filter_subjects=["b.1", "a.2"]),
            explicit("D", filter_subject="a.x.y"),
            explicit("E", filter_subject="b.1"),
            explicit("E", filter_subject="a.*.z"),
            explicit("F", filter_subjects=["a.x.z", "a.y.q"]),
            explicit("C", filter_subject="a.1"),
            explicit("C", filter_subject="a.x.y"),
            explicit("C"),
            Api("CONSUMER.NAMES.A"),
        ]
    )
    assert [error(answers[at]) for at in (1, 2, 4, 9, 10, 12)] == [10084, 10098, 10101, 10099, 10100, 10100]


def test_queue_with_filtered_consumers(both: Both) -> None:
    both.compare(
        [
            stream(),
            explicit(filter_subject="a.1"),
            explicit("D", filter_subjects=["a.2", "a.4"]),
            *published(*SUBJECTS),
            Until("CONSUMER.INFO.A.C", "num_pending", 3),
            Until("CONSUMER.INFO.A.D", "num_pending", 2),
            drain(),
            drain(name="D"),
            *(Ack(at) for at in range(5)),
            KEPT,
            state(),
            state("D"),
            explicit("E", filter_subject="a.3.x"),
            drain(name="E"),
            Ack(),
            KEPT,
        ]
    )


def test_queue_keeps_messages_when_its_consumer_is_deleted(both: Both) -> None:
    both.compare(
        [
            stream(),
            *published(*SUBJECTS),
            explicit(),
            pull(2),
            Ack(0),
            Api("CONSUMER.DELETE.A.C"),
            KEPT,
            explicit(),
            state(),
            pull(1),
            Ack(),
            KEPT,
        ]
    )


def test_queue_keeps_messages_that_were_delivered_too_often(both: Both) -> None:
    both.compare(
        [
            stream(),
            explicit(max_deliver=1, ack_wait=50 * MS),
            *published("a.1", "a.2"),
            are_pending(2),
            pull(1),
            acks_pending(0),
            KEPT,
            state(),
            Ack(0),
            KEPT,
            drain(),
            Ack(),
            KEPT,
        ]
    )


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_limits_hold_besides(both: Both, retention: str) -> None:
    both.compare(
        [
            stream(retention, max_msgs=3),
            explicit(),
            *published(*SUBJECTS),
            are_pending(3),
            KEPT,
            state(),
            pull(2),
            Publish("a.1", b"new"),
            KEPT,
            state(),
            Ack(0),
            Ack(1),
            KEPT,
            state(),
        ]
    )


def test_queue_that_refuses_new_messages(both: Both) -> None:
    both.compare(
        [
            stream(max_msgs=2, discard="new"),
            explicit(),
            *published("a.1", "a.2", "a.3"),
            are_pending(2),
            pull(1),
            Ack(),
            are_kept(1),
            *published("a.4", "a.5"),
            KEPT,
        ]
    )


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_deletion_and_purge(both: Both, retention: str) -> None:
    both.compare(
        [
            stream(retention),
            explicit(),
            *published(*SUBJECTS),
            are_pending(6),
            pull(3),
            Api("STREAM.MSG.DELETE.A", {"seq": 1}),
            Api("STREAM.MSG.DELETE.A", {"seq": 5}),
            KEPT,
            state(),
            Ack(0),
            Ack(1),
            Api("STREAM.PURGE.A", {"filter": "a.3.x"}),
            KEPT,
            state(),
            Api("STREAM.PURGE.A"),
            KEPT,
            state(),
            *published("a.1"),
            are_pending(1),
            drain(),
            Ack(),
            KEPT,
        ]
    )


def test_messages_without_interest_are_not_kept(both: Both) -> None:
    both.compare(
        [
            stream("interest"),
            *published(*SUBJECTS[:2]),
            Send("a.1"),
            Publish("a.1", b"x", {"Nats-Msg-Id": "1"}),
            Publish("a.1", b"x", {"Nats-Msg-Id": "1"}),
            Agreed("STREAM.INFO.A"),
            explicit(filter_subject="a.2"),
            state(),
            *published(*SUBJECTS),
            are_pending(2),
            KEPT,
            state(),
            drain(),
            Ack(0),
            Ack(1),
            KEPT,
            state(),
        ]
    )


def test_messages_are_kept_until_all_consumers_have_acked(both: Both) -> None:
    both.compare(
        [
            stream("interest"),
            explicit(),
            explicit("D", filter_subject="a.1"),
            *published(*SUBJECTS),
            are_pending(6),
            are_pending(3, "D"),
            KEPT,
            pull(6),
            *(Ack(at) for at in range(6)),
            KEPT,
            state(),
            pull(3, name="D"),
            Ack(-1, TERM),
            KEPT,
            Ack(-2),
            Ack(-3),
            KEPT,
            state("D"),
        ]
    )


def test_acks_of_all_messages_before(both: Both) -> None:
    both.compare(
        [
            stream("interest"),
            consumer("C", ack_policy="all"),
            explicit("D"),
            *published(*SUBJECTS),
            are_pending(6),
            are_pending(6, "D"),
            pull(4),
            Ack(2),
            KEPT,
            pull(4, name="D"),
            *(Ack(at) for at in (4, 5, 7)),
            KEPT,
            state(),
            state("D"),
            Ack(6),
            KEPT,
        ]
    )


def test_acks_of_all_messages_before_by_one_consumer(both: Both) -> None:
    both.compare(
        [
            stream("interest"),
            consumer("C", ack_policy="all"),
            *published(*SUBJECTS),
            are_pending(6),
            pull(5),
            Ack(2),
            KEPT,
            Ack(4),
            KEPT,
            state(),
        ]
    )


def test_consumers_without_acks_remove_what_is_delivered(both: Both) -> None:
    both.compare(
        [
            stream("interest"),
            consumer("C", ack_policy="none"),
            *published(*SUBJECTS),
            are_pending(6),
            KEPT,
            pull(2),
            are_kept(4),
            KEPT,
            drain(),
            are_kept(0),
            KEPT,
            state(),
        ]
    )


def test_deletion_of_a_consumer_ends_its_interest(both: Both) -> None:
    both.compare(
        [
            stream("interest"),
            explicit(),
            explicit("D", filter_subject="a.1"),
            *published(*SUBJECTS),
            are_pending(6),
            are_pending(3, "D"),
            pull(2),
            Ack(0),
            Ack(1),
            KEPT,
            Api("CONSUMER.DELETE.A.D"),
            are_kept(4),
            KEPT,
            Api("CONSUMER.DELETE.A.C"),
            are_kept(0),
            KEPT,
        ]
    )


def test_new_consumers_of_an_interest_stream(both: Both) -> None:
    """They get what is kept."""
    both.compare(
        [
            stream("interest"),
            explicit(),
            *published(*SUBJECTS),
            are_pending(6),
            pull(2),
            Ack(0),
            Ack(1),
            KEPT,
            explicit("D"),
            explicit("E", deliver_policy="new"),
            consumer("F", ack_policy="none", deliver_policy="last"),
            *(state(name) for name in "DEF"),
            drain(name="D"),
            drain(),
            *(Ack(at) for at in range(2, 10)),
            KEPT,
            drain(name="F"),
            KEPT,
        ]
    )


def test_filter_of_an_interest_consumer_changes(both: Both) -> None:
    both.compare(
        [
            stream("interest"),
            explicit(),
            *published(*SUBJECTS),
            are_pending(6),
            explicit(filter_subject="a.1"),
            are_kept(3),
            KEPT,
            state(),
            explicit(filter_subject="a.2"),
            are_kept(0),
            KEPT,
            state(),
        ]
    )


def test_ephemerals_end_their_interest(both: Both) -> None:
    both.compare(
        [
            stream("interest"),
            ephemeral(ack_policy="explicit", inactive_threshold=100 * MS),
            *published("a.1", "a.2"),
            Until("CONSUMER.INFO.A.GENERATED0", "error.err_code", 10014),
            KEPT,
        ]
    )


def test_push_consumers_of_an_interest_stream(both: Both) -> None:
    both.compare(
        [
            Subscribe("me", "to.me"),
            stream("interest"),
            consumer("C", ack_policy="none", deliver_subject="to.me"),
            explicit("D", deliver_subject="to.you"),
            *(step for subject in ("a.1", "a.2") for step in (*published(subject), Collect("me"))),
            KEPT,
            Subscribe("you", "to.you"),
            Collect("you", 2),
            Ack(-1),
            KEPT,
            Ack(-2),
            KEPT,
            *(state(name) for name in "CD"),
        ]
    )


def test_push_consumer_of_a_queue(both: Both) -> None:
    both.compare(
        [
            Subscribe("members", "to.me", "g"),
            stream(),
            explicit(deliver_subject="to.me", deliver_group="g"),
            *(step for at in range(4) for step in (Publish("a.1", b"%d" % at), Collect("members"), Ack(), KEPT)),
            state(),
        ]
    )


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_request_that_waits(both: Both, retention: str) -> None:
    steps: list[Step] = [stream(retention), explicit(), later("one", 3)]
    for at in range(3):
        steps += [Publish("a.1", b"%d" % at), Collect("one"), Ack(), KEPT]
    both.compare([*steps, state(), Pull("A", "C", {"batch": 1, "no_wait": True})])


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_replicas_of_consumers_match_their_stream(both: Both, replicas: int) -> None:
    both.compare([stream("interest"), explicit(num_replicas=replicas), Agreed("CONSUMER.NAMES.A")])


def test_consumer_of_a_purged_stream_is_deleted(both: Both) -> None:
    """There is no message left to look at."""
    both.compare(
        [
            stream("interest"),
            explicit(),
            *published("a.1", "a.2"),
            are_kept(2),
            Api("STREAM.PURGE.A"),
            are_kept(0),
            Api("CONSUMER.DELETE.A.C"),
            KEPT,
            *published("a.1"),
            are_kept(0),
            KEPT,
        ]
    )


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_acks_of_a_consumer_count_that_is_deleted_at_once(both: Both, retention: str) -> None:
    both.compare(
        [
            stream(retention),
            explicit(),
            *([explicit("D")] if retention == "interest" else []),
            *published("a.1", "a.2", "a.3"),
            are_pending(3),
            pull(3),
            *([pull(3, name="D"), Ack(3), Ack(4)] if retention == "interest" else []),
            Ack(0),
            Ack(1),
            Api("CONSUMER.DELETE.A.C"),
            are_kept(1),
            KEPT,
        ]
    )
