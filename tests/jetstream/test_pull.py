"""Pull consumers: requests for messages, what ends them, acks, redelivery, and the state after each."""

from __future__ import annotations

import asyncio
from typing import Any

import nats
import pytest

from tests.jetstream.both import Api, Both, Publish, Step
from tests.jetstream.consuming import Ack, Agreed, Collect, Heartbeat, Next, Pull, PullLater, Unsubscribe, Until
from tests.jetstream.test_consumers import SECOND, consumer, ephemeral, state
from tests.jetstream.test_streams import MS, create, info, published, update

NAK, TERM, PROGRESS = b"-NAK", b"+TERM", b"+WPI"
LONG = 5 * SECOND
"""Of requests that end before."""
SUBJECTS = ("a.1", "a.2", "a.1", "a.3.x", "a.2", "a.1")


def pull(batch: int = 1, want: int | None = None, name: str = "C", **request: Any) -> Pull:
    """A request that expires long after its messages have come."""
    return Pull("A", name, {"batch": batch, "expires": LONG} | request, want)


def drain(name: str = "C", **request: Any) -> Pull:
    """All messages that there are, and the status that follows them."""
    return Pull("A", name, {"batch": 100, "no_wait": True} | request)


def later(pull_name: str, batch: int = 1, name: str = "C", **request: Any) -> PullLater:
    return PullLater(pull_name, "A", name, {"batch": batch, "expires": 6 * LONG} | request)


def is_waiting(count: int = 1, name: str = "C") -> Until:
    return Until(f"CONSUMER.INFO.A.{name}", "num_waiting", count)


def are_pending(count: int, name: str = "C") -> Until:
    """Published messages are counted after their ack."""
    return Until(f"CONSUMER.INFO.A.{name}", "num_pending", count)


def acks_pending(count: int, name: str = "C") -> Until:
    return Until(f"CONSUMER.INFO.A.{name}", "num_ack_pending", count)


def filled(*consumers: Api, subjects: tuple[str, ...] = SUBJECTS, **config: Any) -> list[Step]:
    """A stream with messages, then consumers of it."""
    return [create("A", subjects=["a.>"], **config), *published(*subjects), *consumers]


def explicit(name: str = "C", /, **config: Any) -> Api:
    return consumer(name, **{"ack_policy": "explicit"} | config)


@pytest.mark.long
@pytest.mark.parametrize("ack_policy", ["none", "explicit", "all"])
@pytest.mark.parametrize(
    "config",
    [
        {"deliver_policy": "all"},
        {"deliver_policy": "last"},
        {"deliver_policy": "new"},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 4},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 9},
        {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z"},
        {"deliver_policy": "by_start_time", "opt_start_time": "2100-01-01T00:00:00Z"},
        {"deliver_policy": "last_per_subject", "filter_subject": "a.>"},
        {"deliver_policy": "last_per_subject", "filter_subjects": ["a.2", "a.3.*"]},
        {"deliver_policy": "all", "filter_subject": "a.1"},
        {"deliver_policy": "last", "filter_subject": "a.2"},
        {"deliver_policy": "all", "filter_subjects": ["a.2", "a.3.x", "none"]},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 2, "filter_subject": "a.*"},
        {"deliver_policy": "all", "filter_subject": "none"},
    ],
    ids=str,
)
def test_deliver_policies(both: Both, config: dict[str, Any], ack_policy: str) -> None:
    both.compare(
        [
            *filled(consumer("C", ack_policy=ack_policy, **config)),
            state(),
            drain(),
            state(),
            *published("a.1", "a.2", "a.3.x"),
            state(),
            drain(),
            state(),
            drain(),
        ]
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"2",
        b" 3 ",
        b"0",
        b"-1",
        b"text",
        b"1.5",
        b"[]",
        b"{}",
        b"{",
        b'{"batch": "1"}',
        {"batch": 0},
        {"batch": -1},
        {"batch": 2},
        {"batch": 1, "unknown": 1},
        {"batch": 1, "no_wait": True},
        {"batch": 100, "no_wait": True},
        {"batch": 100, "no_wait": True, "expires": LONG},
        {"batch": 1, "expires": SECOND, "idle_heartbeat": SECOND},
        {"batch": 1, "idle_heartbeat": SECOND},
        {"batch": 1, "expires": -1},
        {"batch": 1, "max_bytes": -1},
        {"batch": 1, "group": "g"},
        {"batch": 1, "min_pending": 1},
        {"batch": 1, "min_ack_pending": 1},
        {"batch": 1, "id": "x"},
        {"batch": 1, "priority": 10},
        {"batch": 1, "priority": 3},
    ],
    ids=str,
)
def test_requests(both: Both, body: Any) -> None:
    many = isinstance(body, dict) and body.get("batch") == 100
    want = 100 if many else {b"2": 2, b" 3 ": 3}.get(body, 1) if isinstance(body, bytes) else max(1, body["batch"])
    both.compare([*filled(explicit()), Pull("A", "C", body, want), state(), Ack(0), state()])


def test_requests_that_expire(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(max_ack_pending=4)),
            Pull("A", "C", {"batch": 3, "expires": 1}, 4),
            Pull("A", "C", {"batch": 5, "expires": 50 * MS}),
            Pull("A", "C", {"batch": 5, "expires": 50 * MS, "max_bytes": 1000}),
            Pull("A", "C", {"batch": 5, "expires": 50 * MS, "no_wait": True}),
            Pull("A", "C", {"batch": 1, "expires": 250 * MS, "idle_heartbeat": 100 * MS}),
            state(),
            Ack(0),
            Ack(1),
            Pull("A", "C", {"batch": 5, "expires": 50 * MS}),
            state(),
        ]
    )


def test_request_that_does_not_wait_ends_with_its_heartbeat_where_acks_are_waited_for(both: Both) -> None:
    request = {"batch": 5, "expires": LONG, "no_wait": True, "idle_heartbeat": 100 * MS}
    both.compare([*filled(explicit(max_ack_pending=2)), Pull("A", "C", request), state(), Ack(0), Ack(1), state()])


def test_acks_of_a_consumer_without_acks_have_no_receiver(both: Both) -> None:
    kinds = [b"", b"+ACK", b"-NAK", b"+TERM", b"+WPI"]
    answers = both.compare([*filled(consumer("C", ack_policy="none")), pull(2), *(Ack(0, kind) for kind in kinds)])
    assert answers[-5:] == ["no answer"] * 5


def test_answer_to_an_ack_is_never_a_request(both: Both) -> None:
    """A subscriber to `$…` sees nothing of natslog, whatever an ack names as its reply subject."""

    async def seen() -> int:
        connection = await nats.connect(both.urls[1])
        try:
            watching = await connection.subscribe("$TEST.reply")
            for kind in (b"+ACK", b"-NAK", b"+TERM", b"+WPI"):
                await connection.publish("$JS.ACK.A.C.1.1.1.1.0", kind, reply="$TEST.reply")
            await connection.request("$JS.API.CONSUMER.INFO.A.C", timeout=30)
            await asyncio.sleep(0.3)
            return int(watching.pending_msgs)
        finally:
            await connection.close()

    both.answers([*filled(consumer("C", ack_policy="none")), pull(1)])
    assert asyncio.run(seen()) == 0


def test_requests_of_an_empty_stream(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(), subjects=()),
            Pull("A", "C", {"batch": 1, "no_wait": True}),
            Pull("A", "C", {"batch": 1, "no_wait": True, "expires": 50 * MS}),
            Pull("A", "C", {"batch": 9, "expires": 50 * MS}),
            Pull("A", "C", {"batch": 9, "expires": 50 * MS, "max_bytes": 10}),
            PullLater("one", "A", "C", {"batch": 2, "no_wait": True, "expires": LONG}),
            is_waiting(),
            Publish("a.1"),
            Collect("one", 3),
            state(),
        ]
    )


def test_heartbeats_of_a_waiting_request(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(), subjects=("a.1",)),
            later("one", 3, idle_heartbeat=100 * MS),
            Collect("one"),
            Heartbeat("one"),
            Publish("a.2"),
            Collect("one"),
            Heartbeat("one"),
            state(),
        ]
    )


def test_messages_are_delivered_to_requests_that_wait(both: Both) -> None:
    """In turns: a request goes to the end of the queue with each message."""
    both.compare(
        [
            *filled(explicit(), subjects=()),
            later("one", 2),
            is_waiting(1),
            later("two", 3),
            is_waiting(2),
            later("three", 1),
            is_waiting(3),
            state(),
            *(
                step
                for at, name in enumerate(("one", "two", "three", "one", "two", "two"))
                for step in (Publish("a.1", b"%d" % at), Collect(name), state())
            ),
            Publish("a.1", b"rest"),
            are_pending(1),
            drain(),
        ]
    )


def test_requests_whose_client_has_gone(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(), subjects=()),
            later("one"),
            is_waiting(1),
            later("two"),
            is_waiting(2),
            Unsubscribe("one"),
            is_waiting(1),
            Publish("a.1"),
            Collect("two"),
            state(),
        ]
    )


def test_requests_beyond_the_limits_of_the_consumer(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(max_batch=3, max_expires=10 * SECOND, max_bytes=300)),
            pull(4),
            Pull("A", "C", b"4"),
            pull(1, expires=11 * SECOND),
            pull(1, expires=90 * 60 * SECOND),
            pull(1, max_bytes=301),
            pull(3, max_bytes=300),
            pull(3),
            state(),
            explicit(max_batch=3, max_expires=1500 * MS, max_bytes=300),
            pull(1, expires=2 * SECOND),
            drain(batch=1),
        ]
    )


def test_more_requests_than_may_wait(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(max_waiting=2), subjects=()),
            later("one"),
            later("two"),
            is_waiting(2),
            pull(1),
            Publish("a.1", b"1"),
            Collect("one"),
            later("three"),
            is_waiting(2),
            pull(1),
            state(),
        ]
    )


def test_limit_of_bytes(both: Both) -> None:
    """Subject, reply subject, headers and payload count."""
    both.compare(
        [
            create("A", subjects=["a.>"]),
            *(Publish("a.1", b"v" * size) for size in (0, 10, 200, 10, 10)),
            Publish("a.2", b"v", {"K": "v" * 50}),
            explicit(),
            pull(10, max_bytes=30),
            pull(10, max_bytes=120),
            pull(10, max_bytes=120),
            pull(10, max_bytes=1000, want=4),
            explicit("D"),
            pull(2, name="D", max_bytes=1000, want=3),
            pull(1, name="D", max_bytes=1000, want=2),
            pull(5, name="D", max_bytes=50),
            Pull("A", "D", {"batch": 5, "max_bytes": 500, "no_wait": True}, 6),
            state(),
            state("D"),
        ]
    )


@pytest.mark.parametrize("slack", range(-2, 3))
def test_limit_of_bytes_is_exact(both: Both, slack: int) -> None:
    """One message has 51 bytes: "a.1", a reply subject with 19 digits of time, and "payload"."""
    size = len("a.1") + len(b"payload") + len("$JS.ACK.A.C.1.1.1.") + 19 + len(".2")
    steps: list[Step] = [Publish("a.1", b"payload") for _ in range(3)]
    both.compare(
        [
            create("A", subjects=["a.>"]),
            *steps,
            explicit(),
            PullLater("one", "A", "C", {"batch": 5, "max_bytes": 2 * size + slack, "expires": 6 * LONG}),
            Collect("one", 3 if slack else 2),
            state(),
        ]
    )


def test_consumers_that_do_not_exist_or_push(both: Both) -> None:
    both.compare(
        [
            *filled(consumer("push", deliver_subject="to.me")),
            pull(name="none"),
            Pull("none", "C", b""),
            pull(name="push"),
            Pull("A", "push", b"{"),
            Ack("$JS.ACK.A.none.1.1.1.1700000000000000000.0"),
        ]
    )


def test_level_that_a_request_requires(both: Both) -> None:
    levels = ("0", "99", "x")
    both.compare(
        [
            *filled(explicit()),
            *(Pull("A", "C", b"", headers={"Nats-Required-Api-Level": level}) for level in levels),
            state(),
        ]
    )


def test_deletion_while_requests_wait(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(), explicit("D"), subjects=()),
            later("one"),
            later("two"),
            is_waiting(2),
            later("three", name="D"),
            is_waiting(1, "D"),
            Api("CONSUMER.DELETE.A.C"),
            Collect("one"),
            Collect("two"),
            state(),
            pull(),
            Api("STREAM.DELETE.A"),
            Collect("three"),
            pull(name="D"),
        ]
    )


def test_acks_after_the_consumer_was_deleted(both: Both) -> None:
    both.compare(
        [
            *filled(explicit()),
            pull(2),
            Api("CONSUMER.DELETE.A.C"),
            Ack(0),
            explicit(),
            state(),
            pull(1),
            state(),
            Ack(0),
            state(),
        ]
    )


@pytest.mark.parametrize("config", [{}, {"filter_subject": "a.1"}], ids=str)
def test_headers_only(both: Both, config: dict[str, Any]) -> None:
    both.compare(
        [
            create("A", subjects=["a.>"]),
            Publish("a.1", b"payload", {"K": "v", "Nats-Msg-Id": "1"}),
            Publish("a.1", b""),
            Publish("a.1", b"text"),
            explicit(headers_only=True, **config),
            drain(),
            explicit(**config),
            Ack(0, NAK),
            Ack(2, NAK),
            drain(),
            state(),
        ]
    )


@pytest.mark.parametrize("max_bytes", [60, 75, 76, 77, 150, 1000])
def test_requests_for_bytes_of_headers_only(both: Both, max_bytes: int) -> None:
    """Counted is what is delivered."""
    steps = [
        create("A", subjects=["a.>"]),
        Publish("a.1", b"x"),
        Publish("a.1", b"x" * 300, {"K": "v"}),
        Publish("a.1", b""),
        explicit(headers_only=True),
        pull(3, max_bytes=max_bytes),
        explicit("D"),
        explicit("D", headers_only=True),
        pull(3, max_bytes=max_bytes, name="D"),
    ]
    both.compare(steps)


def test_headers_of_messages(both: Both) -> None:
    headers = {"B": "2", "a": "1", "Nats-Msg-Id": "x", "Empty": "", "Nats-Expected-Stream": "A"}
    both.compare([create("A"), Publish("A", b"hello", headers), Publish("A", b"", headers), explicit(), drain()])


def test_explicit_acks(both: Both) -> None:
    """In any order: the floor moves when all messages before it are acked."""
    both.compare(
        [
            *filled(explicit()),
            pull(5),
            state(),
            *(step for at in (1, 3, 0, 0, 4, 2) for step in (Ack(at), state())),
            Ack(2),
            Ack(1, NAK),
            Ack(1, TERM),
            state(),
            drain(),
            state(),
            Ack(-1),
            state(),
        ]
    )


def test_acks_of_all_messages_before(both: Both) -> None:
    both.compare(
        [
            *filled(consumer("C", ack_policy="all")),
            pull(5),
            state(),
            *(step for at in (1, 0, 3) for step in (Ack(at), state())),
            Ack(-1, NAK),
            pull(1),
            state(),
            Ack(-1),
            state(),
            drain(),
            Ack(-1, TERM),
            state(),
        ]
    )


def test_filtered_acks(both: Both) -> None:
    """Sequences of the stream between those of the filter count for the floor when nothing is pending."""
    both.compare(
        [
            *filled(explicit(filter_subject="a.1"), consumer("D", ack_policy="all", filter_subjects=["a.2", "a.3.x"])),
            pull(3),
            state(),
            *(step for at in (1, 0, 2) for step in (Ack(at), state())),
            pull(2, name="D"),
            state("D"),
            Ack(-1),
            state("D"),
            drain(name="D"),
            drain(),
            state(),
            state("D"),
        ]
    )


def test_acks_of_consumers_without_acks(both: Both) -> None:
    both.compare(
        [
            *filled(consumer("C", ack_policy="none"), explicit("D")),
            pull(2),
            *(Ack(0, payload, is_request=False) for payload in (b"+ACK", NAK, TERM, PROGRESS)),
            state(),
            drain(),
            state(),
        ]
    )


@pytest.mark.parametrize(
    "payload", [b"", b"+ACK", b"+OK", NAK, TERM, PROGRESS, b"-NAK {", b"-NAK x", b"+TERM because", b"other", b"+ACK "]
)
def test_payloads_of_acks(both: Both, payload: bytes) -> None:
    both.compare([*filled(explicit()), pull(2), Ack(0, payload), state(), Ack(0, payload), drain(), state()])


def test_acks_that_name_no_message(both: Both) -> None:
    """They are ignored; the last one shows that all have been processed."""
    subjects = [
        "$JS.ACK.A.C.1.99.99.1700000000000000000.0",
        "$JS.ACK.A.C.1.3.3.1700000000000000000.0",
        "$JS.ACK.A.C.1.0.0.1700000000000000000.0",
        "$JS.ACK.A.C.1.x.y.1700000000000000000.0",
        "$JS.ACK.A.C.1.99999999999999999999999.1.1.0",
        "$JS.ACK.A.C.1.1",
        "$JS.ACK.A.C",
    ]
    payloads = (b"+ACK", NAK, TERM, PROGRESS)
    both.compare(
        [
            *filled(explicit()),
            pull(2),
            *(Ack(subject, payload, is_request=False) for subject in subjects for payload in payloads),
            Ack(1),
            state(),
            # only the sequence of the stream counts
            Ack("$JS.ACK.A.C.7.1.2.1.0"),
            state(),
            drain(),
        ]
    )


def test_ack_of_a_message_that_was_not_delivered_yet(both: Both) -> None:
    both.compare(
        [
            *filled(consumer("C", ack_policy="all")),
            pull(2),
            Ack("$JS.ACK.A.C.1.4.4.1700000000000000000.0", is_request=False),
            Ack(0),
            state(),
            drain(),
            state(),
        ]
    )


def test_naks_redeliver_at_once(both: Both) -> None:
    both.compare(
        [
            *filled(explicit()),
            pull(4),
            Ack(2, NAK),
            Ack(0, NAK),
            Ack(0, NAK),
            state(),
            pull(3),
            state(),
            Ack(4, NAK),
            Ack(2),
            pull(1),
            Ack(-1),
            drain(),
            state(),
        ]
    )


def test_naks_redeliver_to_a_request_that_waits(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(), subjects=("a.1",)),
            pull(),
            later("one"),
            is_waiting(),
            Ack(0, NAK),
            Collect("one"),
            Ack(0),
            state(),
            drain(),
        ]
    )


@pytest.mark.parametrize("payload", [b'-NAK {"delay": 100000000}', b"-NAK 100ms", b'-NAK {"delay": 0}', b"-NAK{}"])
def test_naks_redeliver_after_a_delay(both: Both, payload: bytes) -> None:
    both.compare([*filled(explicit(), subjects=("a.1",)), pull(), Ack(0, payload), pull(), state(), Ack(), state()])


def test_messages_are_redelivered_without_an_ack(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(ack_wait=100 * MS), subjects=("a.1", "a.2")),
            pull(),
            pull(1),
            Ack(-1),
            pull(1),
            pull(1),
            Ack(-1),
            Ack(-2),
            state(),
            drain(),
        ]
    )


def test_progress_and_longer_waits_after_an_update(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(ack_wait=LONG), subjects=("a.1", "a.2")),
            pull(2),
            Ack(0, PROGRESS),
            Ack(1, PROGRESS),
            state(),
            explicit(ack_wait=100 * MS),
            pull(2),
            explicit(ack_wait=LONG),
            Ack(-1, PROGRESS),
            Ack(-1),
            Ack(-2),
            state(),
            drain(),
        ]
    )


def test_deliveries_are_limited(both: Both) -> None:
    """The message stays pending until the next request would deliver it."""
    both.compare(
        [
            *filled(explicit(max_deliver=2, ack_wait=100 * MS), subjects=("a.1",)),
            pull(1),
            pull(1),
            later("one"),
            acks_pending(0),
            state(),
            Ack(0),
            Ack(-1),
            state(),
            drain(),
        ]
    )


def test_deliveries_are_limited_after_naks(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(max_deliver=2), subjects=("a.1", "a.2")),
            pull(1),
            Ack(-1, NAK),
            pull(1),
            Ack(-1, NAK),
            drain(),
            state(),
            Ack(0),
            state(),
            Ack(-1),
            state(),
            drain(),
        ]
    )


def test_one_delivery(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(max_deliver=1, ack_wait=50 * MS), subjects=("a.1", "a.2")),
            pull(2),
            acks_pending(0),
            state(),
            Ack(0),
            Ack(1, NAK),
            state(),
            drain(),
        ]
    )


def test_waits_that_grow(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(backoff=[50 * MS, 100 * MS, 50 * MS], max_deliver=3), subjects=("a.1",)),
            pull(),
            pull(),
            pull(),
            later("one"),
            acks_pending(0),
            state(),
            Ack(),
            state(),
        ]
    )


def test_termination(both: Both) -> None:
    both.compare(
        [
            *filled(explicit()),
            pull(3),
            Ack(1, TERM),
            state(),
            Ack(0, b"+TERM reason"),
            state(),
            Ack(2, NAK),
            Ack(2, TERM),
            state(),
            drain(),
        ]
    )


def test_acks_that_ask_for_the_next_message(both: Both) -> None:
    both.compare(
        [
            *filled(explicit()),
            pull(1),
            Next(),
            state(),
            Next(-1, {"batch": 2, "expires": LONG}, 2),
            state(),
            Next(-1, b" 1"),
            Next(0, {"batch": 1, "no_wait": True}),
            Next(-1, {"batch": 1, "no_wait": True}),
            Next(-1, b" {"),
            state(),
            Ack(2),
            state(),
        ]
    )


def test_acks_that_may_be_pending_are_limited(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(max_ack_pending=2)),
            pull(2),
            later("one", 3),
            is_waiting(),
            state(),
            Ack(0),
            Collect("one"),
            Ack(1, TERM),
            Collect("one"),
            # a redelivery is not limited
            Ack(-1, NAK),
            Collect("one"),
            state(),
            Pull("A", "C", {"batch": 2, "expires": 50 * MS}),
            Pull("A", "C", {"batch": 2, "expires": 50 * MS, "no_wait": True}),
            state(),
        ]
    )


def test_limit_of_pending_acks_changes_while_a_request_waits(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(max_ack_pending=1)),
            pull(1),
            later("one", 4),
            is_waiting(),
            explicit(max_ack_pending=3),
            Collect("one", 2),
            state(),
            explicit(max_ack_pending=1),
            Ack(0),
            Ack(1),
            state(),
            Ack(2),
            Collect("one", 1),
            state(),
            explicit(max_ack_pending=-1),
            Collect("one", 1),
            drain(),
            state(),
        ]
    )


def test_filters_change_while_messages_are_delivered(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(filter_subject="a.1")),
            pull(1),
            explicit(filter_subjects=["a.2", "a.3.x"]),
            state(),
            pull(1),
            explicit(),
            state(),
            pull(1),
            state(),
            *(Ack(at) for at in (0, 1, 2)),
            explicit(filter_subject="none"),
            state(),
            drain(),
            state(),
            explicit(filter_subject="a.1"),
            drain(),
            state(),
        ]
    )


def test_filter_changes_while_a_request_waits(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(filter_subject="b")),
            later("one"),
            is_waiting(),
            explicit(filter_subject="a.3.x"),
            state(),
            Publish("a.3.x", b"new"),
            Collect("one"),
            state(),
        ]
    )


def test_messages_are_deleted_under_the_consumer(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(), explicit("D", filter_subject="a.1")),
            pull(3),
            *(step for seq in (2, 4, 1, 6) for step in (Api("STREAM.MSG.DELETE.A", {"seq": seq}), state(), state("D"))),
            Ack(2),
            state(),
            drain(),
            drain(name="D"),
            state(),
            state("D"),
        ]
    )


@pytest.mark.long
@pytest.mark.parametrize("request_", [{}, {"seq": 4}, {"keep": 2}, {"filter": "a.1"}, {"filter": "a.2"}], ids=str)
def test_purge_under_the_consumer(both: Both, request_: dict[str, Any]) -> None:
    both.compare(
        [
            *filled(explicit(), explicit("D", filter_subject="a.1"), explicit("E")),
            pull(3),
            pull(1, name="D"),
            Api("STREAM.PURGE.A", request_ or b""),
            state(),
            state("D"),
            state("E"),
            *published("a.1", "a.2"),
            state(),
            drain(),
            drain(name="D"),
            drain(name="E"),
            state(),
            state("D"),
            state("E"),
        ]
    )


def test_purge_of_one_of_several_filters_skips_nothing(both: Both) -> None:
    """Positions may differ, as docs/JETSTREAM.md states; what is delivered may not."""
    filters = {"filter_subjects": ["a.1", "a.2"]}
    steps = [
        *filled(explicit(**filters)),
        Api("STREAM.PURGE.A", {"filter": "a.1"}),
        drain(),
        *published("a.1", "a.2"),
        drain(),
    ]
    shown = both.answers(steps)[1]
    delivered = [[subject for subject, *_ in answer if subject != "inbox"] for answer in (shown[-4], shown[-1])]
    expected = [subject for subject in SUBJECTS if subject == "a.2"]
    assert delivered == [expected, ["a.1", "a.2"]]


def test_limits_remove_messages_under_the_consumer(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(), explicit("D"), max_msgs=6),
            pull(3),
            *published("a.1", "a.1"),
            state(),
            state("D"),
            Ack(0),
            Ack(2),
            state(),
            *published("a.1", "a.1"),
            drain(),
            drain(name="D"),
            state(),
            state("D"),
            update("A", subjects=["a.>"], max_msgs=2),
            state(),
            state("D"),
        ]
    )


def test_redelivery_of_a_message_that_is_deleted(both: Both) -> None:
    both.compare(
        [
            *filled(explicit()),
            pull(3),
            Ack(0, NAK),
            Ack(1, NAK),
            Api("STREAM.MSG.DELETE.A", {"seq": 1}),
            acks_pending(2),
            pull(2),
            state(),
        ]
    )


def test_several_consumers_are_independent(both: Both) -> None:
    both.compare(
        [
            *filled(explicit(), explicit("D"), consumer("E", ack_policy="none", filter_subject="a.2")),
            pull(2),
            pull(3, name="D"),
            Ack(0),
            Ack(4, NAK),
            drain(name="E"),
            state(),
            state("D"),
            state("E"),
            drain(name="D"),
            drain(),
            Api("CONSUMER.LIST.A"),
        ]
    )


def test_streams_that_do_not_begin_at_one(both: Both) -> None:
    both.compare(
        [
            create("A", subjects=["a.>"], first_seq=1000),
            explicit("before"),
            state("before"),
            *published("a.1", "a.2"),
            explicit(),
            consumer("D", deliver_policy="by_start_sequence", opt_start_seq=5),
            *(state(name) for name in ("before", "C", "D")),
            *(drain(name=name) for name in ("before", "C", "D")),
            Ack(-1, is_request=False),
            Ack(0),
            Ack(1),
            state("before"),
        ]
    )


def test_a_request_keeps_an_ephemeral(both: Both) -> None:
    gone = Until("CONSUMER.INFO.A.GENERATED0", "error.err_code", 10014)
    both.compare(
        [
            create("A", subjects=["a.>"]),
            ephemeral(inactive_threshold=200 * MS, ack_policy="explicit", ack_wait=50 * MS),
            PullLater("one", "A", "GENERATED0", {"batch": 2, "expires": SECOND}),
            Collect("one"),
            gone,
            Pull("A", "GENERATED0", b""),
            info("A"),
        ]
    )


def test_paused_consumers_deliver_nothing(both: Both) -> None:
    pause = "CONSUMER.PAUSE.A.C"
    both.compare(
        [
            *filled(explicit()),
            Api(pause, {"pause_until": "2100-01-01T00:00:00Z"}),
            state(),
            Pull("A", "C", {"batch": 1, "expires": 50 * MS}),
            later("one"),
            is_waiting(),
            Api(pause, {}),
            later("two"),
            Collect("one"),
            Collect("two"),
            state(),
            Api(pause, {"pause_until": "2020-01-01T00:00:00Z"}),
            Api(pause, b"{"),
            Api(pause),
            Api("CONSUMER.PAUSE.A.none", {}),
            Api("CONSUMER.PAUSE.none.C", {}),
            explicit("D", pause_until="2100-01-01T00:00:00Z"),
            state("D"),
            Api("CONSUMER.PAUSE.A.D"),
            Agreed("CONSUMER.LIST.A"),
        ]
    )
