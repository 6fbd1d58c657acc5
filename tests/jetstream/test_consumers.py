"""Consumers by the JetStream API: created, changed, listed, deleted, and what their state is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jetstream.both import Api, Both, Step
from tests.jetstream.consuming import Agreed, Until
from tests.jetstream.test_streams import MS, create, info, published, update

SECOND = 1000 * MS


def consumer(
    name: str, /, *, stream: str = "A", action: str | None = None, pedantic: bool | None = None, **config: Any
) -> Api:
    """Creates or updates a consumer, which is durable."""
    extra = {name: value for name, value in (("action", action), ("pedantic", pedantic)) if value is not None}
    return raw(f"{stream}.{name}", {"durable_name": name} | config, stream=stream, **extra)


def ephemeral(*, stream: str = "A", **config: Any) -> Api:
    """A consumer whose name the server generates."""
    return raw(stream, config, stream=stream)


def raw(call: str, config: Any, *, stream: str = "A", **extra: Any) -> Api:
    return Api(f"CONSUMER.CREATE.{call}", {"stream_name": stream, "config": config} | extra)


def state(name: str = "C", stream: str = "A") -> Agreed:
    """The state of a consumer, when both servers agree on it."""
    return Agreed(f"CONSUMER.INFO.{stream}.{name}")


def error(answer: Any) -> int:
    return int(answer["error"]["err_code"])


def test_life_of_a_consumer(both: Both) -> None:
    answers = both.compare(
        [
            create("A", subjects=["a.>"]),
            state(),
            consumer("C", ack_policy="explicit"),
            state(),
            info("A"),
            Api("INFO"),
            consumer("C", ack_policy="explicit"),
            consumer("C", ack_policy="explicit", description="changed"),
            state(),
            Api("CONSUMER.NAMES.A"),
            Api("CONSUMER.LIST.A"),
            Api("CONSUMER.DELETE.A.C"),
            Api("CONSUMER.DELETE.A.C"),
            state(),
            info("A"),
            Api("INFO"),
        ]
    )
    assert error(answers[1]) == 10014
    assert answers[4]["state"]["consumer_count"] == 1
    assert answers[5]["consumers"] == 1


CONFIGS: list[dict[str, Any]] = [
    {},
    {"ack_policy": "explicit"},
    {"ack_policy": "all"},
    {"ack_policy": "none"},
    {"description": "of quakes", "metadata": {"a": "1"}},
    {"metadata": {"_nats.ver": "0", "_nats.req.level": "7", "_nats.other": "x"}},
    {"deliver_policy": "last"},
    {"deliver_policy": "new"},
    {"deliver_policy": "by_start_sequence", "opt_start_seq": 3},
    {"deliver_policy": "by_start_sequence", "opt_start_seq": 99},
    {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z"},
    {"deliver_policy": "by_start_time", "opt_start_time": "2100-01-01T00:00:00.5+02:00"},
    {"pause_until": "0001-01-01T00:00:00Z"},
    {"deliver_policy": "last_per_subject", "filter_subject": "a.*"},
    {"deliver_policy": "last_per_subject", "filter_subjects": ["a.1", "a.2"]},
    {"deliver_policy": "undefined"},
    {"filter_subject": "a.1"},
    {"filter_subject": "other"},
    {"filter_subject": ""},
    {"filter_subjects": ["a.1"]},
    {"filter_subjects": ["a.1", "b", "c.>"]},
    {"filter_subjects": []},
    {"ack_policy": "explicit", "ack_wait": 1},
    {"ack_policy": "none", "ack_wait": 7 * SECOND},
    {"ack_policy": "explicit", "ack_wait": 7 * SECOND, "max_deliver": 4, "max_ack_pending": 3},
    {"ack_policy": "explicit", "max_deliver": 0, "max_ack_pending": 0},
    {"ack_policy": "explicit", "max_deliver": -5, "max_ack_pending": -5, "max_waiting": -5},
    {"ack_policy": "explicit", "backoff": [SECOND, 2 * SECOND], "ack_wait": 7 * SECOND, "max_deliver": 3},
    {"ack_policy": "explicit", "backoff": [SECOND, 2 * SECOND], "max_deliver": 2},
    {"ack_policy": "explicit", "backoff": [SECOND, 2 * SECOND]},
    {"ack_policy": "explicit", "backoff": [0, 0]},
    {"ack_policy": "explicit", "backoff": []},
    {"ack_policy": "none", "backoff": [SECOND]},
    {"ack_policy": "none", "max_ack_pending": 5},
    {"max_batch": 5, "max_expires": SECOND, "max_bytes": 1000, "max_waiting": 7},
    {"max_batch": -5, "max_expires": -5, "max_bytes": -5, "inactive_threshold": -5, "idle_heartbeat": -5},
    {"inactive_threshold": 3600 * SECOND},
    {"num_replicas": 1, "mem_storage": True},
    {"num_replicas": 0, "mem_storage": False},
    {"headers_only": True, "sample_freq": "100%", "replay_policy": "original"},
    {"sample_freq": "10"},
    {"sample_freq": ""},
    {"replay_policy": "instant"},
    {"name": "C"},
    {"name": "D"},
    {"name": "D", "durable_name": ""},
    {"deliver_group": "g"},
    {"metadata": None, "backoff": None, "opt_start_time": None, "filter_subjects": None, "description": None},
    {"deliver_subject": "to.me"},
    {"deliver_subject": "to.me", "deliver_group": "g", "ack_policy": "all", "max_ack_pending": 5},
    {"deliver_subject": "to.me", "idle_heartbeat": 100 * MS},
    {"deliver_subject": "to.me", "idle_heartbeat": SECOND, "flow_control": True, "rate_limit_bps": 1024},
    {"deliver_subject": "to.me", "max_batch": 5, "max_expires": 1, "max_bytes": 7},
    {"deliver_subject": "to.me", "ack_policy": "none", "max_ack_pending": -1, "replay_policy": "original"},
]


@pytest.mark.long
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configuration_is_stored_and_shown(both: Both, config: dict[str, Any]) -> None:
    found = both.compare(
        [
            create("A", subjects=["a.>", "b"]),
            *published("a.1", "a.2", "a.1", "a.3.x", "b"),
            consumer("C", **config),
            state(),
            consumer("C", **config),
            consumer("C", action="create", **config),
            consumer("C", action="update", **config),
            Api("CONSUMER.LIST.A"),
        ]
    )
    assert found[6].get("name") == "C" or config == {"deliver_policy": "undefined"}


REFUSED: list[tuple[dict[str, Any], int]] = [
    ({"durable_name": "D"}, 10017),
    ({"deliver_policy": "all", "opt_start_seq": 1}, 10094),
    ({"deliver_policy": "all", "opt_start_time": "2020-01-01T00:00:00Z"}, 10094),
    ({"deliver_policy": "last", "opt_start_seq": 1}, 10094),
    ({"deliver_policy": "last", "opt_start_time": "2020-01-01T00:00:00Z"}, 10094),
    ({"deliver_policy": "new", "opt_start_seq": 1}, 10094),
    ({"deliver_policy": "new", "opt_start_time": "2020-01-01T00:00:00Z"}, 10094),
    ({"deliver_policy": "last_per_subject"}, 10094),
    ({"deliver_policy": "last_per_subject", "filter_subject": "a.*", "opt_start_seq": 1}, 10094),
    ({"deliver_policy": "last_per_subject", "opt_start_time": "2020-01-01T00:00:00Z"}, 10094),
    ({"deliver_policy": "by_start_sequence"}, 10094),
    ({"deliver_policy": "by_start_sequence", "opt_start_seq": 1, "opt_start_time": "2020-01-01T00:00:00Z"}, 10094),
    ({"deliver_policy": "by_start_time"}, 10094),
    ({"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z", "opt_start_seq": 1}, 10094),
    ({"deliver_policy": "by_start_time", "opt_start_time": "yesterday"}, 10025),
    ({"deliver_policy": "sometimes"}, 10025),
    ({"ack_policy": "sometimes"}, 10025),
    ({"replay_policy": "sometimes"}, 10025),
    ({"priority_policy": "sometimes"}, 10025),
    ({"unknown": 1}, 10025),
    ({"max_deliver": "1"}, 10025),
    ({"filter_subjects": "a"}, 10025),
    ({"opt_start_seq": -1}, 10025),
    ({"num_replicas": 2}, 10074),
    ({"num_replicas": -1}, 10133),
    ({"ack_wait": -1}, 10183),
    ({"backoff": [SECOND, -1]}, 10184),
    ({"backoff": [SECOND, SECOND, SECOND], "max_deliver": 2}, 10116),
    ({"description": "d" * 4097}, 10107),
    ({"metadata": {"k": "v" * 131072}}, 10135),
    ({"filter_subject": "a.1", "filter_subjects": ["a.2"]}, 10136),
    ({"filter_subjects": ["a.1", "a.*"]}, 10138),
    ({"filter_subjects": ["a.1", "a.1"]}, 10138),
    ({"filter_subjects": [""]}, 10139),
    ({"filter_subjects": ["a.1", ""]}, 10139),
    ({"filter_subjects": ["a..1"]}, 10052),
    ({"filter_subject": "a..1"}, 10052),
    ({"filter_subject": "a b"}, 10052),
    ({"sample_freq": "often"}, 10095),
    ({"sample_freq": "-1"}, 10095),
    ({"rate_limit_bps": 1024}, 10086),
    ({"idle_heartbeat": SECOND}, 10088),
    ({"flow_control": True}, 10089),
    ({"max_expires": 1000}, 10115),
    ({"direct": True}, 10090),
    ({"deliver_subject": "to.me", "direct": True}, 10091),
    ({"deliver_subject": "to.*"}, 10079),
    ({"deliver_subject": "to..me"}, 10112),
    ({"deliver_subject": "to me"}, 10112),
    ({"deliver_subject": "a.1"}, 10081),
    ({"deliver_subject": "to.me", "max_waiting": 5}, 10080),
    ({"deliver_subject": "to.me", "ack_policy": "none", "max_ack_pending": 5}, 10082),
    ({"deliver_subject": "to.me", "idle_heartbeat": 99 * MS}, 10083),
    ({"deliver_subject": "to.me", "flow_control": True}, 10108),
]


@pytest.mark.long
@pytest.mark.parametrize(("config", "code"), REFUSED, ids=lambda value: str(value)[:80])
def test_configuration_is_refused(both: Both, config: dict[str, Any], code: int) -> None:
    found = both.compare([create("A", subjects=["a.>"]), consumer("C", **config), Api("CONSUMER.NAMES.A")])
    assert error(found[1]) == code


PEDANTIC: list[dict[str, Any]] = [
    {"max_deliver": -2},
    {"max_waiting": -2},
    {"max_ack_pending": -2},
    {"max_batch": -2},
    {"max_expires": -2},
    {"max_bytes": -2},
    {"idle_heartbeat": -2},
    {"inactive_threshold": -2},
    {"backoff": [SECOND]},
    {"backoff": [SECOND], "ack_wait": 2 * SECOND},
    {"backoff": [SECOND], "ack_wait": SECOND},
    {"max_ack_pending": 3, "inactive_threshold": SECOND},
    {"max_ack_pending": 3},
    {"inactive_threshold": SECOND},
    {},
]


@pytest.mark.long
@pytest.mark.parametrize("config", PEDANTIC, ids=str)
def test_pedantic_requests_are_not_corrected(both: Both, config: dict[str, Any]) -> None:
    limits = {"max_ack_pending": 5, "inactive_threshold": 10 * SECOND}
    both.compare(
        [
            create("A"),
            consumer("C", pedantic=True, **config),
            state(),
            create("B", consumer_limits=limits),
            consumer("C", stream="B", pedantic=True, **config),
            state(stream="B"),
            consumer("D", stream="B", **config),
            state("D", stream="B"),
        ]
    )


def test_limits_of_the_stream_hold_for_its_consumers(both: Both) -> None:
    limits = {"max_ack_pending": 5, "inactive_threshold": 10 * SECOND}
    answers = both.compare(
        [
            create("A", consumer_limits=limits, max_consumers=3),
            consumer("C", ack_policy="explicit", max_ack_pending=6),
            consumer("C", ack_policy="explicit", inactive_threshold=11 * SECOND),
            consumer("C", ack_policy="explicit", max_ack_pending=-1),
            consumer("C", ack_policy="none"),
            consumer("D", ack_policy="explicit", max_ack_pending=5),
            ephemeral(deliver_subject="to.me", ack_policy="none"),
            ephemeral(),
            state("GENERATED0"),
            consumer("E"),
            consumer("D", ack_policy="explicit", max_ack_pending=4),
            info("A"),
            Api("CONSUMER.DELETE.A.D"),
            consumer("E", ack_policy="all"),
            Api("CONSUMER.DELETE.A.GENERATED0"),
            update("A", consumer_limits={"max_ack_pending": 2}, max_consumers=3),
            info("A"),
        ]
    )
    assert error(answers[9]) == 10026


def test_subjects_of_requests(both: Both) -> None:
    explicit = {"ack_policy": "explicit"}
    named = {"durable_name": "C"}
    body = {"stream_name": "A", "config": explicit | named}
    both.compare(
        [
            create("A", subjects=["a.>"]),
            # a consumer without a name
            raw("A", explicit),
            raw("A", explicit | named),
            raw("A", explicit | {"name": "E"}),
            raw("B", explicit),
            raw("B", explicit, stream="B"),
            # durable ones of old clients
            Api("CONSUMER.DURABLE.CREATE.A.C", body),
            Api("CONSUMER.DURABLE.CREATE.A.D", body),
            Api("CONSUMER.DURABLE.CREATE.A.D", {"stream_name": "A", "config": explicit}),
            Api("CONSUMER.DURABLE.CREATE.A.D", {"stream_name": "A", "config": {"name": "E", "durable_name": "D"}}),
            Api("CONSUMER.DURABLE.CREATE.A.D", {"config": {"durable_name": "D"}}),
            Api("CONSUMER.DURABLE.CREATE.B.D", {"stream_name": "B", "config": {"durable_name": "D"}}),
            # those of new clients, with a filter in the subject
            raw("A.F", explicit),
            raw("A.F", explicit | {"name": "G"}),
            raw("A.H.a.1", explicit | {"filter_subject": "a.1"}),
            raw("A.I.a.1", explicit | {"filter_subject": "a.2"}),
            raw("A.J.a.1", explicit),
            raw("A.K.a.*", explicit | {"filter_subjects": ["a.1", "a.2"]}),
            raw("A.L.a.1", explicit | {"filter_subjects": ["a.1"]}),
            raw("A.M.>", explicit | {"filter_subject": ">"}),
            raw("A.N", explicit, stream="B"),
            raw("none.N", explicit, stream="none"),
            Api("CONSUMER.DELETE.A.GENERATED0"),
            Api("CONSUMER.NAMES.A"),
            info("A"),
        ]
    )


@pytest.mark.parametrize("name", ["a b", "a*", "a/b", "a\\b", ">", "*", "n" * 255, "ü", "-_1"])
def test_names(both: Both, name: str) -> None:
    safe = name if " " not in name else "x"
    both.compare(
        [
            create("A"),
            Api(f"CONSUMER.CREATE.A.{safe}", {"stream_name": "A", "config": {"name": name}}),
            Api(f"CONSUMER.DURABLE.CREATE.A.{safe}", {"stream_name": "A", "config": {"durable_name": name}}),
            Api("CONSUMER.NAMES.A"),
        ]
    )


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"null", b"{}", b'{"stream_name": "A"} x', b"\xff"])
def test_bodies_that_are_no_configuration(both: Both, body: bytes) -> None:
    calls = ("CREATE.A", "CREATE.A.C", "DURABLE.CREATE.A.C", "NAMES.A", "LIST.A", "INFO.A.C", "DELETE.A.C")
    expected, found = both.answers([create("A"), *(Api(f"CONSUMER.{call}", body) for call in calls)])
    codes = [[answer.get("error", {}).get("err_code") for answer in answers] for answers in (expected, found)]
    assert codes[0] == codes[1]


def test_names_that_are_too_long(both: Both) -> None:
    name = "n" * 256
    body = {"stream_name": "A", "config": {"durable_name": name}}
    answers = both.compare([create("A"), Api(f"CONSUMER.DURABLE.CREATE.A.{name}", body), Api("CONSUMER.NAMES.A")])
    assert error(answers[1]) == 10102


FEATURES: list[dict[str, Any]] = [
    {"priority_policy": "overflow", "priority_groups": ["g"]},
    {"priority_policy": "pinned_client", "priority_groups": ["g"], "priority_timeout": SECOND},
    {"priority_policy": "prioritized", "priority_groups": ["g"]},
    {"ack_policy": "flow_control", "deliver_subject": "to.me", "flow_control": True, "idle_heartbeat": SECOND}
    | {"max_ack_pending": 5},
]


@pytest.mark.parametrize("config", FEATURES, ids=str)
def test_features_that_natslog_does_not_have_are_refused(both: Both, config: dict[str, Any]) -> None:
    _, found = both.answers([create("A"), consumer("C", **config), consumer("D"), consumer("D", **config)])
    for answer in (found[1], found[3]):
        assert (error(answer), answer["error"]["description"][:25]) == (10052, "natslog does not support ")


def test_actions(both: Both) -> None:
    config: dict[str, Any] = {"ack_policy": "explicit"}
    answers = both.compare(
        [
            create("A"),
            consumer("C", action="update", **config),
            consumer("C", action="create", **config),
            consumer("C", action="create", **config),
            consumer("C", action="create", description="changed", **config),
            consumer("C", action="create", metadata={"k": "v"}, **config),
            consumer("C", action="update", description="changed", **config),
            consumer("C", action="", description="", **config),
            consumer("C", action="other", **config),
            raw("A.C", config, action="create"),
            raw("A.C", config, action="update"),
            state(),
            raw("A", config, action="update"),
            raw("A", config, action="create"),
        ]
    )
    assert (error(answers[1]), error(answers[4])) == (10149, 10148)


UPDATES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"description": "text", "metadata": {"k": "v"}}),
    ({"metadata": {"k": "v"}}, {}),
    ({}, {"ack_policy": "explicit"}),
    ({"ack_policy": "explicit"}, {"ack_policy": "explicit", "ack_wait": SECOND}),
    ({"ack_policy": "explicit"}, {"ack_policy": "explicit", "max_deliver": 5}),
    ({"ack_policy": "explicit"}, {"ack_policy": "explicit", "max_ack_pending": 5}),
    ({"ack_policy": "explicit"}, {"ack_policy": "explicit", "max_ack_pending": -1}),
    ({"ack_policy": "explicit"}, {"ack_policy": "explicit", "backoff": [SECOND]}),
    ({"ack_policy": "explicit"}, {"ack_policy": "explicit", "backoff": [SECOND, SECOND], "max_deliver": 1}),
    ({}, {"deliver_policy": "new"}),
    ({"deliver_policy": "by_start_sequence", "opt_start_seq": 2}, {}),
    (
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 2},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 3},
    ),
    (
        {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z"},
        {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T01:00:00+01:00"},
    ),
    (
        {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z"},
        {"deliver_policy": "by_start_time", "opt_start_time": "2021-01-01T00:00:00Z"},
    ),
    ({}, {"replay_policy": "original"}),
    ({}, {"filter_subject": "a.1"}),
    ({"filter_subject": "a.1"}, {}),
    ({"filter_subject": "a.1"}, {"filter_subjects": ["a.2", "b"]}),
    ({"filter_subjects": ["a.2", "b"]}, {"filter_subjects": ["b", "a.2"]}),
    ({"filter_subjects": ["a.2", "b"]}, {"filter_subject": "b"}),
    ({}, {"max_waiting": 5}),
    ({}, {"max_batch": 5, "max_expires": SECOND, "max_bytes": 500}),
    ({}, {"inactive_threshold": 60 * SECOND}),
    ({}, {"mem_storage": True}),
    ({}, {"num_replicas": 1}),
    ({}, {"num_replicas": 3}),
    ({}, {"headers_only": True, "sample_freq": "50%"}),
    ({}, {"deliver_subject": "to.me"}),
    ({"deliver_subject": "to.me"}, {}),
    ({"deliver_subject": "to.me"}, {"deliver_subject": "to.you"}),
    ({"deliver_subject": "to.me"}, {"deliver_subject": "to.me", "deliver_group": "g"}),
    ({"deliver_subject": "to.me"}, {"deliver_subject": "to.me", "idle_heartbeat": SECOND}),
    (
        {"deliver_subject": "to.me", "idle_heartbeat": SECOND},
        {"deliver_subject": "to.me", "idle_heartbeat": SECOND, "flow_control": True},
    ),
    ({"deliver_subject": "to.me"}, {"deliver_subject": "to.me", "rate_limit_bps": 1_000_000}),
    ({}, {"direct": True}),
    ({}, {"unknown": 1}),
]


@pytest.mark.long
@pytest.mark.parametrize(("before", "change"), UPDATES, ids=str)
def test_updates(both: Both, before: dict[str, Any], change: dict[str, Any]) -> None:
    both.compare(
        [
            create("A", subjects=["a.>", "b"]),
            *published("a.1", "a.2", "a.1", "b"),
            consumer("C", **before),
            consumer("C", **change),
            state(),
            consumer("C", action="update", **change),
            consumer("C", action="create", **change),
            state(),
        ]
    )


def test_pages_of_names_and_lists(both: Both) -> None:
    requests: list[Any] = [b"", {"offset": 1}, {"offset": 3}, {"offset": 99}, {"offset": -1}, {"unknown": 1}, b"text"]
    both.compare(
        [
            create("A"),
            Api("CONSUMER.NAMES.A"),
            Api("CONSUMER.LIST.A"),
            *(consumer(name) for name in ("z", "a", "m")),
            *(Api(f"CONSUMER.{verb}.A", request) for verb in ("NAMES", "LIST") for request in requests),
            Api("CONSUMER.NAMES.none"),
            Api("CONSUMER.LIST.none"),
        ]
    )


@pytest.mark.long
def test_list_is_limited(both: Both) -> None:
    many = [consumer(f"c{at:03}", mem_storage=True) for at in range(258)]
    answers = both.compare(
        [
            create("A", storage="memory"),
            *many,
            Api("CONSUMER.LIST.A"),
            Api("CONSUMER.LIST.A", {"offset": 250}),
            Api("CONSUMER.NAMES.A"),
            info("A"),
        ]
    )
    assert (len(answers[-4]["consumers"]), len(answers[-3]["consumers"]), answers[-4]["total"]) == (256, 8, 258)


def test_requests_about_nothing(both: Both) -> None:
    both.compare(
        [
            consumer("C"),
            Api("CONSUMER.INFO.A.C"),
            Api("CONSUMER.DELETE.A.C"),
            Api("CONSUMER.NAMES.A"),
            Api("CONSUMER.LIST.A"),
            create("A"),
            Api("CONSUMER.INFO.A.C"),
            Api("CONSUMER.DELETE.A.C"),
            consumer("C"),
            Api("CONSUMER.INFO.A.C", {"a": 1}),
            Api("CONSUMER.INFO.A.C", b"text"),
            Api("CONSUMER.INFO.A.C", b" { } "),
            Api("CONSUMER.DELETE.A.C", {"a": 1}),
            Api("CONSUMER.DELETE.A.C", b"text"),
            Api("CONSUMER.DELETE.A.C", b" { } "),
            *(
                Api(f"CONSUMER.{call}", b"", {"Nats-Required-Api-Level": "99"})
                for call in ("CREATE.A.D", "INFO.A.C", "DELETE.A.C", "NAMES.A", "LIST.A")
            ),
            Api("CONSUMER.CREATE.A.D", {"stream_name": "A", "config": {}}, {"Nats-Required-Api-Level": "99"}),
        ]
    )


def test_consumers_end_with_their_stream(both: Both) -> None:
    both.compare(
        [
            create("A"),
            consumer("C"),
            ephemeral(),
            Api("STREAM.DELETE.A"),
            Api("CONSUMER.INFO.A.C"),
            Api("INFO"),
            create("A"),
            Api("CONSUMER.NAMES.A"),
            Api("CONSUMER.INFO.A.C"),
            Api("CONSUMER.INFO.A.GENERATED0"),
            info("A"),
        ]
    )


def test_unused_ephemerals_are_deleted(both: Both) -> None:
    gone = [Until(f"CONSUMER.INFO.A.{name}", "error.err_code", 10014) for name in ("GENERATED0", "GENERATED1", "D")]
    both.compare(
        [
            create("A"),
            ephemeral(inactive_threshold=100 * MS),
            ephemeral(inactive_threshold=100 * MS, deliver_subject="to.me"),
            consumer("D", inactive_threshold=100 * MS),
            consumer("C"),
            *gone,
            Agreed("CONSUMER.NAMES.A"),
            Agreed("STREAM.INFO.A"),
        ]
    )


@pytest.mark.long
def test_start_of_each_deliver_policy(both: Both) -> None:
    """The first state of consumers on streams that are empty, filled, purged, and do not begin at 1."""
    policies: list[dict[str, Any]] = [
        {"deliver_policy": "all"},
        {"deliver_policy": "last"},
        {"deliver_policy": "new"},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 2},
        {"deliver_policy": "by_start_sequence", "opt_start_seq": 20},
        {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z"},
        {"deliver_policy": "by_start_time", "opt_start_time": "2100-01-01T00:00:00Z"},
        {"deliver_policy": "last_per_subject", "filter_subject": "a.*"},
        {"deliver_policy": "last_per_subject", "filter_subject": "none"},
        {"deliver_policy": "all", "filter_subject": "a.2"},
        {"deliver_policy": "last", "filter_subject": "a.1"},
        {"deliver_policy": "last", "filter_subjects": ["a.1", "a.2"]},
        {"deliver_policy": "last", "filter_subject": "none"},
        {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z", "filter_subject": "a.3"},
    ]

    def states(prefix: str) -> list[Step]:
        made: list[Step] = [consumer(f"{prefix}{at}", **policy) for at, policy in enumerate(policies)]
        return [*made, *(state(f"{prefix}{at}") for at in range(len(policies)))]

    both.compare(
        [
            create("A", subjects=["a.*"]),
            *states("empty"),
            *published("a.1", "a.2", "a.1", "a.3", "a.2"),
            *states("filled"),
            Api("STREAM.MSG.DELETE.A", {"seq": 1}),
            Api("STREAM.MSG.DELETE.A", {"seq": 5}),
            *states("holes"),
            Api("STREAM.PURGE.A"),
            *states("purged"),
        ]
    )
