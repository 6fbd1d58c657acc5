"""What a client of NATS can send so as to harm others: odd bytes in subjects and queue groups, long texts."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.harness import eventually, with_nats
from tests.jetstream.both import Api, Both, Step
from tests.jetstream.consuming import Pull
from tests.jetstream.test_consumers import consumer, error
from tests.jetstream.test_hostile import natslog
from tests.jetstream.test_streams import create, published


def ours(both: Both, steps: list[Step]) -> list[Any]:
    """The answers of natslog; steps that receive are among them."""
    return both.answers(steps)[1]


@contextmanager
def raw(both: Both, protocol: bytes) -> Iterator[socket.socket]:
    """A client of NATS that has sent this, and stays connected."""
    address = urlsplit(both.urls[1])
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b'CONNECT {"verbose":false}\r\n' + protocol + b"PING\r\n")
        received = b""
        while b"PONG\r\n" not in received:
            received += connection.recv(65536)
        yield connection


def delivers(both: Both) -> None:
    """A consumer gets its messages, and an ack is answered."""
    names = iter("DEFGH")
    assert natslog(both, [create("A", subjects=["a.>"])])[0].get("config")
    for name in (next(names), next(names)):
        steps = [*published("a.1"), consumer(name, ack_policy="explicit"), Pull("A", name, {"batch": 1}, 1)]
        assert [subject for subject, *_ in ours(both, steps)[-1]] == ["a.1"]


@pytest.mark.long
@pytest.mark.parametrize(
    "line",
    [
        b"SUB _INBOX.> \xff 1",
        b"SUB > \xe4pp 1",
        b"SUB odd\xc2\xa0a\xc2\xa0b\xc2\xa0c 1",
        b"SUB odd\xe2\x80\xa8x 1",
        b"SUB odd.x a\x0bb\x0cc\x1cd 1",
        b"SUB \xff\xfe 1",
    ],
    ids=repr,
)
def test_subscriptions_with_odd_bytes_harm_nobody(both: Both, line: bytes) -> None:
    with raw(both, line + b"\r\n"):
        delivers(both)


def test_names_of_consumers_with_odd_blanks_harm_nobody(both: Both) -> None:
    name = "my\u00a0long\u2003name"
    natslog(both, [create("A", subjects=["a.>"])])

    async def work(connection: Any) -> Any:
        body = json.dumps({"stream_name": "A", "config": {"durable_name": name, "ack_policy": "explicit"}}).encode()
        return json.loads((await connection.request("$JS.API.CONSUMER.CREATE.A." + name, body, timeout=30)).data)

    with_nats(both.urls[1], work)
    delivers(both)


@pytest.mark.parametrize(
    "payload",
    [
        b"-NAK " + b"1" * 500_000,
        b"-NAK " + b"1." * 200_000,
        b'-NAK {"x":' + b"[" * 100_000,
        b'-NAK {"x":' + b"[" * 1000,
        b"-NAK " + b"1ns" * 100_000,
    ],
    ids=["digits", "dots", "brackets", "few brackets", "parts"],
)
def test_negative_acks_with_long_texts_hold_nobody(both: Both, payload: bytes) -> None:
    ours(both, [create("A", subjects=["a.>"]), *published("a.1"), consumer("C", ack_policy="explicit")])
    (found,) = ours(both, [Pull("A", "C", {"batch": 1}, 1)])
    assert found[0][0] == "a.1"
    ack = b"PUB $JS.ACK.A.C.1.1.1.1.0 %d\r\n%b\r\n" % (len(payload), payload)
    with raw(both, ack):
        assert ours(both, [Api("CONSUMER.INFO.A.C")])[0]["num_ack_pending"] == 1, "it took hours"


@pytest.mark.parametrize(
    "config",
    [
        {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00." + "0" * 100_000 + "1Z"},
        {"filter_subjects": [f"a.{at}" for at in range(20_000)]},
    ],
    ids=["fraction", "filters"],
)
def test_configurations_with_long_texts_hold_nobody(both: Both, config: dict[str, Any]) -> None:
    found = natslog(both, [create("A", subjects=["a.>"]), consumer("C", ack_policy="explicit", **config)])
    assert "error" in found[1] or "config" in found[1], "it took minutes"


@pytest.mark.parametrize("call", ["CONSUMER.INFO.A.C", "CONSUMER.DELETE.A.C", "STREAM.DELETE.A"])
def test_requests_that_are_no_text_are_refused(both: Both, call: str) -> None:
    found = natslog(both, [create("A", subjects=["a.>"]), consumer("C"), Api(call, b'{"a":"\xff"}')])
    assert error(found[2]) == 10038


def test_requests_of_inboxes_that_are_no_text_are_answered(both: Both) -> None:
    ours(both, [create("A", subjects=["a.>"]), *published("a.1"), consumer("C", ack_policy="explicit")])
    asked = b"PUB $JS.API.CONSUMER.MSG.NEXT.A.C _INB\xffOX.q 1\r\n1\r\n"
    with raw(both, b"SUB _INB\xffOX.q 7\r\n") as connection:
        connection.sendall(asked)
        connection.settimeout(20)
        assert connection.recv(65536).startswith(b"MSG a.1 7 $JS.ACK.A.C.1.1.1.")


def test_deliveries_to_subjects_that_are_recorded_are_not_recorded(both: Both) -> None:
    """Else a message would go around for ever, and each stream would have messages on subjects of the other."""

    def to(stream: str, subject: str) -> Api:
        config = {"durable_name": "X", "deliver_subject": subject, "ack_policy": "none"}
        return Api(f"CONSUMER.CREATE.{stream}.X", {"stream_name": stream, "config": config})

    steps = [create("CA", subjects=["ca.>"]), create("CB", subjects=["cb.>"]), to("CA", "cb.x"), to("CB", "ca.x")]
    assert not any("error" in answer for answer in natslog(both, [*steps, *published("ca.1")]))

    def delivered() -> bool:
        return bool(natslog(both, [Api("CONSUMER.INFO.CA.X")])[0]["delivered"]["stream_seq"] >= 1)

    eventually(delivered, what="the message is delivered to the subject of the other stream")
    natslog(both, published(*["cb.own"] * 20))
    found = natslog(both, [Api("STREAM.INFO.CA"), Api("STREAM.INFO.CB")])
    assert [one["state"]["messages"] for one in found] == [1, 20]
