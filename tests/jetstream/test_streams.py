"""Streams by the JetStream API: created, changed, listed, deleted, and what their state is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import nats
import pytest

from tests.jetstream.both import Api, Both, Publish, Send, Step

MS = 1_000_000


def create(name: str, **config: Any) -> Api:
    return Api(f"STREAM.CREATE.{name}", {"name": name} | config)


def update(name: str, **config: Any) -> Api:
    return Api(f"STREAM.UPDATE.{name}", {"name": name} | config)


def info(name: str, **request: Any) -> Api:
    return Api(f"STREAM.INFO.{name}", request or b"")


def raw(both: Both, call: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer of natslog."""

    async def asked() -> dict[str, Any]:
        connection = await nats.connect(both.urls[1])
        try:
            answer = await connection.request(f"$JS.API.{call}", json.dumps(body).encode(), timeout=10)
            return dict(json.loads(answer.data))
        finally:
            await connection.close()

    return asyncio.run(asked())


def published(*subjects: str) -> list[Step]:
    return [Publish(subject, b"%d" % at) for at, subject in enumerate(subjects)]


def test_life_of_a_stream(both: Both) -> None:
    answers = both.compare(
        [
            info("A"),
            create("A", subjects=["a.>"]),
            info("A"),
            *published("a.b", "a.b", "a.c"),
            info("A"),
            update("A", subjects=["a.>", "d"], description="hi", metadata={"x": "y"}, max_msgs=2),
            info("A"),
            Api("STREAM.DELETE.A"),
            info("A"),
            Publish("a.b"),
        ]
    )
    assert answers[-1] == "no answer"


CONFIGS: list[dict[str, Any]] = [
    {},
    {"description": "of quakes", "metadata": {"a": "1", "_nats.ver": "0"}},
    {"subjects": ["x", "y.*", "z.>"], "storage": "memory", "num_replicas": 0},
    {"max_msgs": 5, "max_bytes": 1000, "max_age": 3600 * 1000 * MS, "max_msgs_per_subject": 2, "max_msg_size": 100},
    {"max_msgs": -1, "max_bytes": 0, "max_msgs_per_subject": -1, "max_msg_size": 0, "max_consumers": 0},
    {"max_msgs": -2, "max_bytes": -2, "max_msgs_per_subject": -7, "max_msg_size": -2, "max_consumers": -9},
    {"discard": "new", "max_msgs": 1, "compression": "s2", "max_consumers": 3},
    {"duplicate_window": 100 * MS, "max_age": 100 * MS},
    {"max_age": 60_000 * MS},
    {"no_ack": True, "subjects": ["*.foo", "bar"]},
    {"deny_delete": True, "deny_purge": True, "allow_direct": True, "allow_msg_ttl": True},
    {"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 3},
    {"allow_rollup_hdrs": True, "first_seq": 1000, "persist_mode": "default"},
    {"consumer_limits": {"inactive_threshold": 5000 * MS, "max_ack_pending": 7}, "placement": {}},
    {"first_seq": None, "subjects": None, "metadata": None, "placement": None, "mirror": None, "sources": None},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_configuration_is_stored_and_shown(both: Both, config: dict[str, Any]) -> None:
    found = both.compare([create("A", **config), info("A"), create("A", **config), Api("STREAM.LIST"), Api("INFO")])
    assert found[0]["did_create"]


REFUSED: list[dict[str, Any]] = [
    {"name": "B"},
    {"name": ""},
    {"name": "A" * 256},
    {"subjects": [""]},
    {"subjects": ["a..b"]},
    {"subjects": ["a b"]},
    {"subjects": ["a", "a"]},
    {"subjects": ["a.*", "a.b"]},
    {"subjects": [">"]},
    {"subjects": ["$JS.API.>"]},
    {"subjects": ["$SYS.>"]},
    {"num_replicas": 6},
    {"num_replicas": -1},
    {"num_replicas": 3},
    {"max_age": -1},
    {"max_age": 1},
    {"duplicate_window": -1},
    {"duplicate_window": 1},
    {"duplicate_window": 2000 * MS, "max_age": 1000 * MS},
    {"deny_purge": True, "allow_rollup_hdrs": True},
    {"discard_new_per_subject": True},
    {"discard_new_per_subject": True, "discard": "new"},
    {"sealed": True},
    {"mirror_direct": True},
    {"description": "d" * 4097},
    {"metadata": {"k": "v" * 131072}},
    {"pedantic": True, "max_msgs": -2},
    {"pedantic": True, "max_age": 1000 * MS},
    {"unknown": 1},
    {"max_msgs": "1"},
    {"max_msgs": 1.5},
    {"retention": "forever"},
    {"storage": "tape"},
    {"subjects": "a"},
    {"first_seq": -1},
]


@pytest.mark.parametrize("config", REFUSED)
def test_configuration_is_refused(both: Both, config: dict[str, Any]) -> None:
    request = Api("STREAM.CREATE.A", {"name": "A"} | config)
    found = both.compare([request, Api("STREAM.NAMES")])
    assert "error" in found[0]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"null", b'{"name": "A"} x', b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_configuration(both: Both, body: bytes) -> None:
    expected, found = both.answers([Api(f"STREAM.{verb}.A", body) for verb in ("CREATE", "UPDATE", "INFO", "PURGE")])
    codes = [[answer.get("error", {}).get("code") for answer in answers] for answers in (expected, found)]
    assert codes[0] == codes[1]


UPDATES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"subjects": ["b"]}),
    ({"max_msgs": 10}, {"max_msgs": 3}),
    ({"max_bytes": 1000}, {"max_bytes": 60}),
    ({}, {"max_msgs_per_subject": 1}),
    ({"max_msgs_per_subject": 1}, {"max_msgs_per_subject": 3}),
    ({"discard": "old"}, {"discard": "new", "max_msgs": 2}),
    ({}, {"storage": "memory"}),
    ({}, {"sealed": True}),
    ({"deny_delete": True}, {}),
    ({"deny_purge": True}, {}),
    ({"deny_purge": True}, {"deny_purge": True, "allow_rollup_hdrs": True}),
    ({"allow_msg_ttl": True}, {}),
    ({"description": "one", "metadata": {"a": "1"}}, {}),
    ({"first_seq": 50}, {}),
    ({}, {"num_replicas": 3}),
    ({}, {"no_ack": True}),
    ({}, {"max_age": 3600_000 * MS}),
    ({}, {"duplicate_window": 500 * MS}),
    ({}, {"compression": "s2"}),
    ({}, {"allow_direct": True}),
    ({}, {"name": "B"}),
    ({}, {"unknown": True}),
]


@pytest.mark.long
@pytest.mark.parametrize(("before", "change"), UPDATES)
def test_updates(both: Both, before: dict[str, Any], change: dict[str, Any]) -> None:
    messages = [Publish("A", b"%d" % at) for at in range(5)]
    after = info("A")
    both.compare([create("A", **before), *messages, Api("STREAM.UPDATE.A", {"name": "A"} | change), after])


def test_sealed_stream_takes_nothing_and_loses_nothing(both: Both) -> None:
    steps: list[Step] = [
        create("A", allow_rollup_hdrs=True),
        Publish("A"),
        update("A", sealed=True),
        Publish("A"),
        Api("STREAM.PURGE.A"),
        Api("STREAM.MSG.DELETE.A", {"seq": 1}),
        update("A", sealed=True, discard="new", deny_delete=True, deny_purge=True),
        update("A"),
        info("A"),
        Api("STREAM.DELETE.A"),
    ]
    both.compare(steps)


def test_subjects_belong_to_one_stream(both: Both) -> None:
    both.compare(
        [
            create("A", subjects=["a.>"]),
            create("B", subjects=["a.b"]),
            create("B", subjects=["*.b"]),
            create("B", subjects=["b"]),
            update("B", subjects=["b", "a.c"]),
            create("A", subjects=["a.>"]),
            create("A", subjects=["a.*"]),
            Api("STREAM.NAMES"),
            Api("STREAM.NAMES", {"subject": "a.b"}),
            Api("STREAM.NAMES", {"subject": "*"}),
            Api("STREAM.NAMES", {"subject": "z"}),
            Api("STREAM.NAMES", {"offset": 1}),
            Api("STREAM.NAMES", {"offset": 7}),
            Api("STREAM.NAMES", {"offset": -1}),
            Api("STREAM.NAMES", {"unknown": 1}),
            Api("STREAM.LIST", {"offset": 1}),
            Api("STREAM.LIST", {"subject": "b"}),
            Api("STREAM.LIST", {"subject": "z"}),
            Api("STREAM.LIST", b"text"),
        ]
    )


def test_the_other_stream_of_a_subject_is_named(both: Both) -> None:
    assert raw(both, "STREAM.CREATE.A", {"name": "A", "subjects": ["a.>"]})["config"]["name"] == "A"
    error = raw(both, "STREAM.CREATE.B", {"name": "B", "subjects": ["a.b"]})["error"]
    assert error["description"] == "subjects overlap with an existing stream: A"


def test_snapshots_name_the_alternative(both: Both) -> None:
    """Instead of "no responders"."""
    raw(both, "STREAM.CREATE.A", {"name": "A", "subjects": ["a"]})
    refused = [
        raw(both, call, {"deliver_subject": "x"})["error"]
        for call in ("STREAM.SNAPSHOT.A", "STREAM.SNAPSHOT.B", "STREAM.RESTORE.B")
    ]
    assert [error["err_code"] for error in refused] == [10064, 10059, 10062]
    assert "natslog export" in refused[0]["description"]
    assert "natslog import" in refused[2]["description"]


def test_state_with_subjects_and_deleted_sequences(both: Both) -> None:
    both.compare(
        [
            create("A", subjects=["a.>"]),
            *published("a.1", "a.2", "a.1", "a.3.x", "a.2", "a.1"),
            info("A", subjects_filter=">"),
            info("A", subjects_filter="a.*"),
            info("A", subjects_filter="a.1"),
            info("A", subjects_filter="none"),
            info("A", subjects_filter=">", offset=1),
            info("A", subjects_filter=">", offset=9),
            *(Api("STREAM.MSG.DELETE.A", {"seq": seq}) for seq in (2, 4, 1, 2, 9, 0)),
            info("A", deleted_details=True, subjects_filter=">"),
            Api("STREAM.MSG.DELETE.A", {"seq": 6}),
            info("A", deleted_details=True),
            *published("a.1"),
            info("A", deleted_details=True),
        ]
    )


def test_messages_without_acks_are_in_the_state_that_is_asked_for_next(both: Both) -> None:
    """JetStream answers before it has stored them."""
    sent: list[Step] = [Send("a.x", b"%d" % at) for at in range(300)]
    _, found = both.answers([create("A", subjects=["a.>"]), *sent, info("A"), *sent, info("A")])
    assert [found[at]["state"]["messages"] for at in (301, 602)] == [300, 600]


def test_requests_about_nothing(both: Both) -> None:
    verbs = ("INFO", "PURGE", "DELETE", "MSG.GET", "MSG.DELETE")
    steps: list[Step] = [Api(f"STREAM.{verb}.none", {"seq": 1} if "MSG" in verb else b"") for verb in verbs]
    both.compare([*steps, update("none"), Api("CONSUMER.NAMES.none"), Api("CONSUMER.INFO.none.c")])


def test_delete_takes_no_body_and_others_need_one(both: Both) -> None:
    both.compare(
        [
            create("A"),
            Api("STREAM.DELETE.A", {"a": 1}),
            Api("STREAM.DELETE.A", b"text"),
            Api("STREAM.MSG.GET.A"),
            Api("STREAM.MSG.GET.A", {}),
            Api("STREAM.MSG.DELETE.A"),
            Api("STREAM.MSG.DELETE.A", b" { } "),
            Api("STREAM.DELETE.A", b" { } "),
        ]
    )


def test_level_that_a_request_requires(both: Both) -> None:
    levels = ("0", "5", "6", "x", "")
    both.compare([Api("INFO", b"", {"Nats-Required-Api-Level": level}) for level in levels])


def test_answers_are_of_the_types_of_the_public_schema(both: Both) -> None:
    (found,) = both.compare([Api("STREAM.NAMES")])
    assert json.loads(json.dumps(found)) == {
        "type": "io.nats.jetstream.api.v1.stream_names_response",
        "total": 0,
        "offset": 0,
        "limit": 1024,
        "streams": None,
    }
