"""Messages by the JetStream API: published with headers, read one by one, deleted, purged, within limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import nats
import pytest

from tests.jetstream.both import Api, Both, Publish, Step
from tests.jetstream.test_streams import create, info, published, update

ID, ROLLUP = "Nats-Msg-Id", "Nats-Rollup"
EXPECTED = "Nats-Expected-"


def get(**request: Any) -> Api:
    return Api("STREAM.MSG.GET.A", request)


def purge(**request: Any) -> Api:
    return Api("STREAM.PURGE.A", request or b"")


@pytest.mark.long
def test_one_message(both: Both) -> None:
    headers = {"B": "2", "a": "1", ID: "x", "Empty": ""}
    both.compare(
        [
            create("A", subjects=["a.>"]),
            get(seq=1),
            Publish("a.b", b"hello", headers),
            Publish("a.c", b""),
            *published("a.b", "a.d.e", "a.c"),
            *(get(seq=seq) for seq in (1, 2, 3, 5, 6, 0)),
            *(get(last_by_subj=subject) for subject in ("a.b", "a.c", "a.*", ">", "a.d.>", "none", "a")),
            *(get(next_by_subj="a.b", seq=seq) for seq in (0, 1, 2, 3, 4, 99)),
            *(get(next_by_subj="a.*", seq=seq) for seq in (1, 4, 5, 6)),
            get(next_by_subj=">"),
            get(seq=1, no_hdr=True),
            get(seq=1, last_by_subj="a.b"),
            get(last_by_subj="a.b", next_by_subj="a.b"),
            get(seq=1, batch=2),
            get(start_time="2020-01-01T00:00:00Z"),
            get(start_time="2100-01-01T00:00:00Z"),
            get(start_time="2020-01-01T00:00:00Z", next_by_subj="a.c"),
            get(start_time="2020-01-01T00:00:00Z", seq=1),
            get(seq="1"),
            Api("STREAM.MSG.DELETE.A", {"seq": 3}),
            get(seq=3),
            get(next_by_subj="a.b", seq=2),
            get(last_by_subj="a.b"),
            Api("STREAM.MSG.DELETE.A", {"seq": 5, "no_erase": True}),
            get(last_by_subj="a.c"),
        ]
    )


@pytest.mark.parametrize("storage", ["file", "memory"])
def test_deletion_of_what_is_not_there(both: Both, storage: str) -> None:
    deletions = [Api("STREAM.MSG.DELETE.A", {"seq": seq}) for seq in (0, 1, 3, 3, 1, 2, 2, 1, 4, 5, 6, 99)]
    both.compare(
        [create("A", storage=storage), *deletions[:2], *published(*["A"] * 5), *deletions, purge(), *deletions]
    )


def test_purge(both: Both) -> None:
    subjects = ["a.1", "a.2", "a.1", "a.3", "a.2", "a.1"]
    steps: list[Step] = [create("A", subjects=["a.>"])]
    requests: list[dict[str, Any]] = [
        {"seq": 3},
        {"keep": 2},
        {"filter": "a.1"},
        {"filter": "a.1", "keep": 1},
        {"filter": "a.*", "seq": 9},
        {"filter": "none"},
        {"filter": ">"},
        {"seq": 1, "keep": 1},
        {"keep": 99},
        {"unknown": 1},
        {},
        {},
    ]
    for request in requests:
        steps += [*published(*subjects), purge(**request), info("A", deleted_details=True)]
    both.compare(steps)


def test_purge_and_deletion_that_the_stream_denies(both: Both) -> None:
    both.compare(
        [
            create("A", deny_delete=True),
            Publish("A"),
            Api("STREAM.MSG.DELETE.A", {"seq": 1}),
            purge(),
            update("A", deny_delete=True, deny_purge=True),
            Publish("A"),
            purge(),
            info("A"),
        ]
    )


@pytest.mark.parametrize("storage", ["file", "memory"])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_msgs": 3},
        {"max_bytes": 200},
        {"max_msgs": 4, "max_bytes": 150},
        {"max_msgs_per_subject": 2},
        {"max_msgs_per_subject": 1, "max_msgs": 2},
        {"max_msg_size": 12},
        {"max_msgs": 3, "discard": "new"},
        {"max_bytes": 200, "discard": "new"},
        {"max_msgs": 3, "max_msgs_per_subject": 1, "discard": "new"},
        {"max_bytes": 150, "max_msgs_per_subject": 2, "discard": "new"},
        {"max_bytes": 30},
        {"max_msgs_per_subject": 1, "discard": "new", "discard_new_per_subject": True},
        {"max_msgs_per_subject": 2, "max_msgs": 5, "discard": "new", "discard_new_per_subject": True},
    ],
)
def test_limits_hold_when_a_message_is_acked(both: Both, limits: dict[str, Any], storage: str) -> None:
    steps: list[Step] = [create("A", subjects=["a.>"], storage=storage, **limits)]
    for at in range(9):
        headers = {"K": "v" * (at % 4)} if at % 2 else {}
        steps += [Publish(f"a.{at % 3}", b"v" * (3 * at), headers), info("A", deleted_details=True)]
    both.compare(steps)


def test_limit_per_subject_that_refuses_new_messages(both: Both) -> None:
    config = {"subjects": ["a.>"], "discard": "new", "discard_new_per_subject": True, "allow_rollup_hdrs": True}
    both.compare(
        [
            create("A", **config, max_msgs_per_subject=1),
            *published("a.1", "a.1", "a.2"),
            Publish("a.1", b"x", {ROLLUP: "sub"}),
            Api("STREAM.MSG.DELETE.A", {"seq": 2}),
            *published("a.1", "a.2", "a.2"),
            info("A", deleted_details=True),
            update("A", **config, max_msgs_per_subject=2),
            *published("a.1", "a.1", "a.2"),
            purge(filter="a.1"),
            *published("a.1"),
            info("A", deleted_details=True),
        ]
    )


def test_headers_of_publishers(both: Both) -> None:
    both.compare(
        [
            create("A", subjects=["a.>"], allow_rollup_hdrs=True),
            Publish("a.1", b"x", {ID: "1"}),
            Publish("a.1", b"x", {ID: "1"}),
            Publish("a.2", b"x", {ID: "1"}),
            Publish("a.1", b"x", {EXPECTED + "Stream": "A"}),
            Publish("a.1", b"x", {EXPECTED + "Stream": "B"}),
            Publish("a.1", b"x", {EXPECTED + "Last-Sequence": "2"}),
            Publish("a.1", b"x", {EXPECTED + "Last-Sequence": "2"}),
            Publish("a.1", b"x", {EXPECTED + "Last-Msg-Id": "1"}),
            Publish("a.1", b"x", {ID: "2", EXPECTED + "Last-Msg-Id": "1"}),
            Publish("a.2", b"x", {EXPECTED + "Last-Subject-Sequence": "0"}),
            Publish("a.2", b"x", {EXPECTED + "Last-Subject-Sequence": "0"}),
            Publish("a.2", b"x", {ROLLUP: "sub"}),
            info("A", deleted_details=True),
            Publish("a.3", b"x", {ROLLUP: "all"}),
            info("A", deleted_details=True),
            Publish("a.3", b"x", {ROLLUP: "other"}),
            update("A", subjects=["a.>"]),
            Publish("a.3", b"x", {ROLLUP: "sub"}),
            info("A"),
        ]
    )


@pytest.mark.parametrize("header", ["Nats-Batch-Id", "Nats-Incr", "Nats-Schedule"])
def test_headers_of_features_that_the_stream_does_not_have(both: Both, header: str) -> None:
    feature = {header: "1", "Nats-Batch-Sequence": "1"}
    both.compare([create("A"), Publish("A", b"", feature), Publish("A"), info("A")])


def test_first_sequence(both: Both) -> None:
    both.compare(
        [
            create("A", first_seq=1000),
            info("A"),
            get(seq=1000),
            Publish("A"),
            Publish("A", b"x", {EXPECTED + "Last-Sequence": "1000"}),
            get(seq=1000),
            get(seq=1),
            purge(),
            info("A"),
            Publish("A"),
            info("A"),
        ]
    )


@pytest.mark.parametrize("before", [(), ("a.1",)])
def test_message_of_a_fast_batch_is_refused(both: Both, before: tuple[str, ...]) -> None:
    """Its reply subject requests more than an ack, which a stream without `allow_batched` does not know."""

    async def answered(url: str) -> tuple[dict[str, Any], int]:
        connection = await nats.connect(url)
        try:
            inbox = connection.new_inbox()
            answers = await connection.subscribe(f"{inbox}.>")
            for subject in before:
                await connection.publish(subject, b"x", reply=f"{inbox}.other")
            await connection.publish("a.2", b"1", reply=f"{inbox}.batch.10.ok.1.0.$FI")
            found = [await answers.next_msg(30) for _ in (*before, "a.2")]
            (refusal,) = (json.loads(one.data) for one in found if one.subject.endswith("$FI"))
            info = json.loads((await connection.request("$JS.API.STREAM.INFO.A", timeout=30)).data)
            return refusal, info["state"]["messages"]
        finally:
            await connection.close()

    both.answers([Api("STREAM.CREATE.A", {"name": "A", "subjects": ["a.>"]})])
    expected, found = (asyncio.run(answered(url)) for url in both.urls)
    assert found == expected
    assert (found[0]["error"]["err_code"], found[1]) == (10205, len(before))
