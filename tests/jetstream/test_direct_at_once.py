"""Many direct requests at once: each gets its answer, whatever stands beside it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.harness import with_nats
from tests.jetstream.both import Api, Both, Direct, Publish, Step
from tests.jetstream.test_hostile import natslog
from tests.jetstream.test_streams import create

_ANSWERED_WITHIN_S = 90.0
_LEVEL = {"Nats-Required-Api-Level": "99"}
Request = tuple[str, bytes, dict[str, str] | None]
Answer = tuple[dict[str, str], bytes]


def requested(call: str, body: Any = b"", headers: dict[str, str] | None = None) -> Request:
    return f"$JS.API.DIRECT.GET.{call}", body if isinstance(body, bytes) else json.dumps(body).encode(), headers


class Asking:
    """Requests on one connection, whose answers come to one inbox, by number."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._inbox = connection, connection.new_inbox()
        self.answers: dict[int, Answer] = {}
        self._sent = 0

    async def begin(self) -> None:
        await self._connection.subscribe(f"{self._inbox}.*", cb=self._receive, pending_msgs_limit=0)

    async def _receive(self, message: Any) -> None:
        number = int(message.subject.rpartition(".")[2])
        assert number not in self.answers, "one answer to each request"
        headers = {key: value for key, value in (message.headers or {}).items() if key != "Nats-Time-Stamp"}
        self.answers[number] = headers, message.data

    async def send(self, subject: str, body: bytes, headers: dict[str, str] | None) -> None:
        reply = f"{self._inbox}.{self._sent}"
        self._sent += 1
        await self._connection.publish(subject, body, reply=reply, headers=headers)

    async def all(self) -> list[Answer]:
        deadline_s = time.monotonic() + _ANSWERED_WITHIN_S
        while len(self.answers) < self._sent:
            assert time.monotonic() < deadline_s, f"{len(self.answers)} of {self._sent} requests were answered"
            await asyncio.sleep(0.01)
        return [self.answers[number] for number in range(self._sent)]


def at_once(url: str, requests: Sequence[Request]) -> list[Answer]:
    async def work(connection: Any) -> list[Answer]:
        asking = Asking(connection)
        await asking.begin()
        for one in requests:
            await asking.send(*one)
        return await asking.all()

    return with_nats(url, work)


def bucket(**config: Any) -> Api:
    return create("A", subjects=["a.>"], allow_direct=True, max_msgs_per_subject=1, **config)


@pytest.mark.long
def test_requests_of_all_kinds_get_what_they_get_alone(both: Both) -> None:
    filled: list[Step] = [Publish(f"a.{at}", b"%d" % at, {"k": f"v{at}"} if at % 3 else {}) for at in range(30)]
    filled += [Publish("a.empty", b""), Publish("a.large", bytes(200_000)), Publish("a.é.ü", b"letters")]
    filled += [Api("STREAM.MSG.DELETE.A", {"seq": 5}), Publish("a.7", b"newer")]
    both.answers([bucket(), *filled])
    kinds: list[Request] = [
        *(requested(f"A.a.{at}") for at in (0, 1, 4, 7, 29, "empty", "large", "none", "*", ">", "é.ü", "é")),
        *(requested("A", {"seq": seq}) for seq in (1, 5, 8, 34, 99)),
        *(requested("A", {"last_by_subj": one}) for one in ("a.1", "a.*", "a.é.ü", "none", "")),
        requested("A", b'{"seq":1}'),
        requested("A", b'{"seq":01}'),
        requested("A", {"next_by_subj": "a.1"}),
        requested("A", {"seq": 1, "no_hdr": True}),
        requested("A"),
        requested("A", b"{"),
        requested("A.a.1", {"seq": 1}),
        requested("A.a.1", {"no_hdr": True}),
        requested("A.a.1", b"", _LEVEL),
        requested("A", {"seq": 1}, _LEVEL),
        requested("A.a.1", b"", {"Traceparent": "x"}),
    ]
    expected, alone = ([answer for kind in kinds for answer in at_once(url, [kind])] for url in both.urls)
    assert alone == expected
    count = 10_000 // len(kinds)
    assert at_once(both.urls[1], kinds * count) == alone * count
    statuses = [headers.get("Status") for headers, _ in alone]
    assert statuses.count(None) >= 15
    assert statuses.count("404") >= 6


@pytest.mark.long
def test_ten_thousand_requests_for_as_many_keys(both: Both) -> None:
    async def filled(connection: Any) -> None:
        for at in range(5_000):
            await connection.publish(f"a.{at}", b"%d" % at)
        await connection.request("a.last", b"x", timeout=30)

    natslog(both, [bucket()])
    with_nats(both.urls[1], filled)
    for _ in range(2):
        found = at_once(both.urls[1], [requested(f"A.a.{at}") for at in range(10_000)])
        assert [value for _, value in found[:5_000]] == [b"%d" % at for at in range(5_000)]
        assert {headers["Status"] for headers, _ in found[5_000:]} == {"404"}


@pytest.mark.long
def test_a_connection_gets_what_it_has_sent_before_also_without_waiting(both: Both) -> None:
    natslog(both, [bucket()])

    async def work(connection: Any) -> list[Answer]:
        asking = Asking(connection)
        await asking.begin()
        for at in range(3_000):
            await connection.publish(f"a.{at % 7}", b"%d" % at)
            await asking.send(*requested(f"A.a.{at % 7}"))
        return await asking.all()

    for at, (headers, value) in enumerate(with_nats(both.urls[1], work)):
        assert "Status" not in headers, f"key {at % 7} exists"
        assert int(value) >= at
        assert int(value) % 7 == at % 7


def test_only_answers_that_do_not_fit_get_the_error(both: Both) -> None:
    most = 1024 * 1024
    filled: list[Step] = [
        Publish("a.small", b"s"),
        Publish("a.fits", bytes(most - 400)),
        Publish("a.large", bytes(most)),
    ]
    natslog(both, [bucket(), *filled])
    for _ in range(2):
        found = at_once(both.urls[1], [requested(f"A.a.{one}") for one in ("small", "large", "fits", "none") * 20])
        assert [len(value) for _, value in found] == [1, 0, most - 400, 0] * 20
        assert {headers["Description"] for headers, _ in found[1::4]} == {"Message Exceeds Maximum Payload"}
        assert {headers["Status"] for headers, _ in found[3::4]} == {"404"}


def test_answers_larger_than_what_the_server_takes_at_once(both: Both) -> None:
    natslog(both, [bucket(), Publish("a.x", bytes(250_000))])
    found = at_once(both.urls[1], [requested("A.a.x")] * 200)
    assert [len(value) for _, value in found] == [250_000] * 200


def test_answers_to_reply_subjects_of_the_api_are_not_sent(both: Both) -> None:
    natslog(both, [bucket(), Publish("a.x", b"1")])

    async def work(connection: Any) -> bytes:
        for reply in ("$JS.API.STREAM.PURGE.A", "$x"):
            await connection.publish("$JS.API.DIRECT.GET.A.a.x", b"", reply=reply)
        await connection.publish("$JS.API.DIRECT.GET.A.a.x", b"")
        return bytes((await connection.request("$JS.API.DIRECT.GET.A.a.x", b"", timeout=30)).data)

    assert with_nats(both.urls[1], work) == b"1"


def test_a_purge_and_deletions_meanwhile(both: Both) -> None:
    """What was purged before a request is not found, and all else is."""
    keys = [f"a.{at}" for at in range(50)]
    natslog(both, [bucket(allow_rollup_hdrs=True), *(Publish(key, b"1") for key in keys)])

    async def work(connection: Any) -> list[Answer]:
        asking = Asking(connection)
        await asking.begin()
        for _ in range(40):
            for key in keys:
                await asking.send(*requested(f"A.{key}"))
        purging = connection.request("$JS.API.STREAM.PURGE.A", json.dumps({"filter": "a.7"}).encode(), timeout=30)
        deleting = connection.request("$JS.API.STREAM.MSG.DELETE.A", json.dumps({"seq": 10}).encode(), timeout=30)
        await asyncio.gather(purging, deleting)
        for key in keys:
            await asking.send(*requested(f"A.{key}"))
        await connection.request("$JS.API.STREAM.PURGE.A", json.dumps({"keep": 5}).encode(), timeout=30)
        for key in keys:
            await asking.send(*requested(f"A.{key}"))
        return await asking.all()

    found = with_nats(both.urls[1], work)
    for at, (headers, value) in enumerate(found[:2000]):
        assert "Status" not in headers or at % 50 in (7, 9)
        assert value == b"1" or at % 50 in (7, 9)
    assert [at for at, (headers, _) in enumerate(found[2000:2050]) if "Status" in headers] == [7, 9]
    assert [at for at, (headers, _) in enumerate(found[2050:]) if "Status" not in headers] == list(range(45, 50))


@pytest.mark.long
def test_more_requests_than_may_wait_are_dropped_and_the_others_answered(both: Both) -> None:
    natslog(both, [create("A", subjects=["a.>"], allow_direct=True), Publish("a.x", b"1")])

    async def work(connection: Any) -> int:
        asking = Asking(connection)
        await asking.begin()
        for _ in range(60_000):
            await asking.send(*requested("A.a.x"))
        await connection.flush(20)
        before = -1
        while before != len(asking.answers):
            before = len(asking.answers)
            await asyncio.sleep(0.5)
        assert {value for _, value in asking.answers.values()} == {b"1"}
        return before

    assert 10_000 <= with_nats(both.urls[1], work) <= 60_000
    assert natslog(both, [Direct("A.a.x")])[0][0][1] == b"1"
