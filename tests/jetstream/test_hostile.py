"""Requests that harm others, or that a broker must not survive by luck."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.harness import with_nats
from tests.jetstream.both import Api, Both, Direct, Publish, Send, Step, answer_of
from tests.jetstream.test_streams import create, info, update


def natslog(both: Both, steps: list[Step]) -> list[Any]:
    """The answers of natslog alone."""

    async def work(connection: Any) -> list[Any]:
        return [await answer_of(connection, step) for step in steps]

    return with_nats(both.urls[1], work)


def together(both: Both, steps: list[Step]) -> list[Any]:
    """The answers of natslog to requests that are sent at once."""

    async def work(connection: Any) -> list[Any]:
        return list(await asyncio.gather(*(answer_of(connection, step) for step in steps)))

    return with_nats(both.urls[1], work)


@pytest.mark.long
def test_sequences_that_no_log_can_count_are_refused(both: Both) -> None:
    for first in (2**53 + 1, 2**63 - 5, 2**63 - 1):
        (found,) = natslog(both, [create("A", first_seq=first)])
        assert found["error"]["err_code"] == 10052
    found = natslog(both, [create("A", first_seq=2**53), Publish("A"), Publish("A"), info("A")])
    assert found[3]["state"]["last_seq"] == 2**53 + 1


def test_too_many_subjects_and_too_large_bodies_are_refused(both: Both) -> None:
    subjects = [f"s.{at}" for at in range(20_000)]
    found = natslog(both, [create("A", subjects=subjects), update("A", subjects=subjects), Api("STREAM.NAMES")])
    assert [one["error"]["err_code"] for one in found[:2]] == [10052, 10052]
    large = b"[" + b"[]," * 300_000 + b"[]]"
    found = natslog(both, [Api("STREAM.CREATE.A", large), Api("STREAM.NAMES", large), Api("STREAM.NAMES")])
    assert [one["error"]["err_code"] for one in found[:2]] == [10025, 10025]


def test_direct_requests_see_what_the_same_connection_has_sent_before(both: Both) -> None:
    sent: list[Step] = [create("A", subjects=["a.>"], allow_direct=True)]
    for at in range(100):
        sent += [Send("a.x", b"%d" % at), Direct("A.a.x")]
    found = natslog(both, sent)
    assert [one[0][1] for one in found[2::2]] == [b"%d" % at for at in range(100)]


def test_streams_that_are_changed_at_once_do_not_come_to_share_a_subject(both: Both) -> None:
    names = [f"s{at}" for at in range(6)]
    natslog(both, [create(name) for name in names])
    updates: list[Step] = [update(name, subjects=[name, "shared"]) for name in names]
    found = together(both, [*updates, create("new", subjects=["shared"])])
    errors = [one["error"]["err_code"] for one in found if "error" in one]
    assert errors == [10065] * 6


def test_lists_are_cut_into_pages_that_fit_into_a_message(both: Both) -> None:
    metadata = {"k": "v" * 100_000}
    natslog(both, [create(f"s{at}", metadata=metadata) for at in range(12)])
    names: list[str] = []
    while len(names) < 12:
        (found,) = natslog(both, [Api("STREAM.LIST", {"offset": len(names)})])
        assert found["total"] == 12
        assert 0 < len(found["streams"]) < 12
        names += [one["config"]["name"] for one in found["streams"]]
    assert sorted(names) == sorted(f"s{at}" for at in range(12))


def test_lines_in_headers_of_appends_are_no_headers(both: Both) -> None:
    """JSON of this API never has more headers than the message."""
    found = natslog(both, [create("A", allow_direct=True), Publish("A", b"x", {"a": "b"}), Direct("A", {"seq": 1})])
    assert found[2][0][0]["a"] == "b"


@pytest.mark.long
def test_many_creations_leave_room_for_other_requests(both: Both) -> None:
    natslog(both, [create("A")])

    async def work(connection: Any) -> bool:
        bodies = [json.dumps({"name": f"many{at}"}).encode() for at in range(150)]
        creating = [
            asyncio.ensure_future(connection.request(f"$JS.API.STREAM.CREATE.many{at}", body, timeout=30))
            for at, body in enumerate(bodies)
        ]
        await asyncio.sleep(0.05)
        await connection.request("$JS.API.STREAM.INFO.A", b"", timeout=30)
        is_before_the_last = not all(one.done() for one in creating)
        await asyncio.gather(*creating)
        return is_before_the_last

    assert with_nats(both.urls[1], work)
