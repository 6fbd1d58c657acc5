"""Publishing by a request, and dead letters that are published again; and what the API states of files and copies."""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
from typing import Any

import nats
import pytest
import urllib3

from natslog.client import NatslogClient
from natslog.errors import InvalidRequest, NatslogError
from tests.harness import BrokerProcess, flushed, natslog, with_nats
from tests.pages import runs
from tests.readme import Block

Headers = dict[str, str]


def publish(nats_url: str, subject: str, *messages: tuple[bytes, Headers]) -> None:
    async def sent(connection: nats.NATS) -> None:
        for value, headers in messages:
            await connection.request(subject, value, headers=headers or None, timeout=30)

    with_nats(nats_url, sent)


def ask(broker: BrokerProcess, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    answer = urllib3.request("POST", f"{broker.url}/v1/streams/{path}", json=body, timeout=30.0)
    return answer.status, answer.json()


def rows(client: NatslogClient, stream: str) -> list[dict[str, Any]]:
    return [row for batch in client.read(stream) for row in batch.to_pylist()]


@pytest.fixture
def letters(client: NatslogClient, nats_url: str, name: str) -> str:
    """Dead letters at offsets 0 to 4; the message at 5 is none. Those of 0 and 1 fit the stream `NAME-to`."""
    client.create_stream(name, f"{name}.dead")
    client.create_stream(f"{name}-to", f"{name}.to.>")
    origin = {"Natslog-Stream": "orders", "Natslog-Offset": "7"}
    publish(
        nats_url,
        f"{name}.dead",
        (b"first", {"Natslog-Error": "no responders", "Natslog-Subject": f"{name}.to.a", "Natslog-Key": "k"} | origin),
        (b"second", {"Natslog-Error": "no responders", "Natslog-Subject": f"{name}.to.b", "own": "x"} | origin),
        (b"third", {"Natslog-Error": "no stream", "Natslog-Subject": f"{name}.nowhere"}),
        (b"fou", {"Natslog-Error": "too large", "Natslog-Subject": f"{name}.to.c", "Natslog-Truncated": "9000000"}),
        (b"fifth", {"Natslog-Error": "bad subject", "Natslog-Subject": '"a b"'}),
        (b"not a letter", {}),
    )
    return name


def test_letters_are_stored_by_the_streams_that_they_were_meant_for(client: NatslogClient, letters: str) -> None:
    found = client.redrive(letters, [0, 1, 2, 3, 4, 5, 99])
    shown = {one["offset"]: one for one in found["messages"]}
    assert [(shown[at]["stream"], shown[at]["stored_at"]) for at in (0, 1)] == [
        (f"{letters}-to", 0),
        (f"{letters}-to", 1),
    ]
    assert [shown[at]["problem"] is None for at in range(6)] == [True, True, False, False, False, False]
    assert "no stream records this subject" in shown[2]["problem"]
    assert "it had 9000000 bytes" in shown[3]["problem"]
    assert "Natslog-Subject is missing" in shown[5]["problem"]
    assert (found["missing"], found["left"]) == ([99], [])
    first, second = rows(client, f"{letters}-to")
    assert (first["subject"], first["value"], first["key"]) == (f"{letters}.to.a", b"first", b"k")
    assert {one["key"] for one in first["headers"]} == {"Natslog-Key", "Nats-Msg-Id"}, "nothing of the dead letter"
    assert {one["key"]: one["value"] for one in second["headers"]}["own"] == "x"


def test_a_second_run_stores_nothing_again_and_a_dry_run_nothing_at_all(
    client: NatslogClient, letters: str, broker: BrokerProcess
) -> None:
    tried = json.loads(natslog("redrive", letters, "--dry-run", "--json", url=broker.url, check=False).stdout)
    assert (tried["letters"], tried["sent"], tried["failed"]) == (5, 0, 3)
    assert rows(client, f"{letters}-to") == []
    first = natslog("redrive", letters, "--reason", "NO RESPONDERS", "--rate", "50", url=broker.url)
    assert "2 letters; 2 sent, of which 0 were stored before; 0 not sent" in first.stdout
    second = natslog("redrive", letters, url=broker.url, check=False)
    assert second.returncode == 1
    assert "5 letters; 2 sent, of which 2 were stored before; 3 not sent" in second.stdout
    assert "no stream records this subject" in second.stdout
    assert len(rows(client, f"{letters}-to")) == 2


@runs("OPERATIONS.md", block="Dead letters")
def test_commands_of_the_page(client: NatslogClient, nats_url: str, broker: BrokerProcess, block: Block) -> None:
    client.create_stream("letters", "letters")
    client.create_stream("target", "target.>")
    letter = (b"x", {"Natslog-Error": "no responders", "Natslog-Subject": "target.a"})
    publish(nats_url, "letters", letter, letter, letter)
    publish(nats_url, "letters", (b"x", {"Natslog-Error": "no stream", "Natslog-Subject": "nowhere"}))
    for command, code in zip(block.commands, (1, 0), strict=True):
        done = natslog(*shlex.split(command.text)[1:], url=broker.url, check=False)
        assert done.returncode == code
        assert command.is_answered_by(done.stderr + done.stdout), done.stderr + done.stdout


def test_streams_that_would_send_no_ack_get_no_letter(client: NatslogClient, letters: str) -> None:
    client.edit_stream(f"{letters}-to", paused=True)
    (paused,) = client.redrive(letters, [0])["messages"]
    assert "is paused: resume it first" in paused["problem"]
    client.edit_stream(f"{letters}-to", paused=False)
    client.edit_stream(f"{letters}-to", acks="never")
    (silent,) = client.redrive(letters, [0])["messages"]
    assert "its setting acks is never" in silent["problem"]
    client.edit_stream(f"{letters}-to", acks="header")
    assert client.redrive(letters, [0])["messages"][0]["stored_at"] == 0


def test_many_letters_beyond_the_bytes_of_one_request(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.dead")
    client.create_stream(f"{name}-to", f"{name}.to")
    headers = {"Natslog-Error": "x", "Natslog-Subject": f"{name}.to"}
    publish(nats_url, f"{name}.dead", *[(b"v" * 900_000, headers)] * 25)
    offsets, rounds = list(range(25)), 0
    while offsets:
        answer = client.redrive(name, offsets)
        assert all(one["problem"] is None for one in answer["messages"])
        offsets, rounds = answer["left"], rounds + 1
    assert rounds == 2
    assert len(rows(client, f"{name}-to")) == 25


def test_a_message_is_published_by_a_request(
    client: NatslogClient, broker: BrokerProcess, nats_url: str, name: str
) -> None:
    client.create_stream(name, f"{name}.one")
    received: list[bytes] = []

    async def subscribed(connection: nats.NATS) -> None:
        subscription = await connection.subscribe(f"{name}.>")
        await flushed(connection)
        body = {"value": "grün", "key": "k", "headers": [{"key": "a", "value": "b"}], "message_id": "m1"}
        stored = {"name": name, "subject": f"{name}.one", "offset": 0, "duplicate": False}
        assert await asyncio.to_thread(ask, broker, f"{name}/publish", body) == (201, stored)
        received.append((await subscription.next_msg(30)).data)
        again = await asyncio.to_thread(ask, broker, f"{name}/publish", body)
        assert again[1]["duplicate"] is True

    with_nats(nats_url, subscribed)
    assert received == ["grün".encode()], "subscribers of NATS get it, too"
    (row,) = rows(client, name)
    assert (row["value"], row["key"]) == ("grün".encode(), b"k")
    status, _ = ask(broker, f"{name}/publish", {"value_base64": base64.b64encode(bytes(range(256))).decode()})
    assert status == 201
    assert rows(client, name)[1]["value"] == bytes(range(256))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"value": "x", "subject": "elsewhere"}, 400, "not the subject"),
        ({"value": "x", "subject": "a.>"}, 400, "subject"),
        ({"value": "x", "value_base64": "eA=="}, 400, "either value or value_base64"),
        ({}, 400, "either value or value_base64"),
        ({"value_base64": "?"}, 400, "cannot be sent"),
        ({"value": "x", "headers": [{"key": "a\r\nb", "value": "c"}]}, 400, "header name or value"),
        ({"value": "x", "headers": [{"key": "a", "value": "c\r\nNats-Msg-Id: 1"}]}, 400, "header name or value"),
        ({"value": "x", "key": "a\nb"}, 400, "key is not one line"),
        ({"value": "x" * 1_100_000}, 400, "larger than the server's limit"),
        ({"value": "x", "more": 1}, 400, "more"),
    ],
)
def test_what_cannot_be_published_is_refused(
    client: NatslogClient, broker: BrokerProcess, name: str, body: Any, status: int, message: str
) -> None:
    client.create_stream(name, [f"{name}.one"])
    found = ask(broker, f"{name}/publish", body)
    assert found[0] == status, found
    assert message in found[1]["error"]["message"]
    assert rows(client, name) == []


def test_redrive_refuses_what_it_cannot_read(client: NatslogClient, broker: BrokerProcess, name: str) -> None:
    client.create_stream(name, name)
    assert ask(broker, f"{name}/redrive", {"offsets": []})[0] == 400
    assert ask(broker, f"{name}/redrive", {"offsets": [0] * 1001})[0] == 400
    assert ask(broker, f"{name}/redrive", {"offsets": [-1]})[0] == 400
    assert ask(broker, "none/redrive", {"offsets": [0]})[0] == 404
    assert ask(broker, "__activity/redrive", {"offsets": [0]})[0] == 400
    assert ask(broker, "__activity/publish", {"value": "x"})[0] == 400
    with pytest.raises(InvalidRequest):
        client.redrive("__activity", [0])
    done = natslog("redrive", "none", url=broker.url, check=False)
    assert done.returncode == 1
    assert "none" in done.stderr


def test_a_check_finds_what_a_sending_would_refuse(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.dead")
    client.create_stream(f"{name}-to", f"{name}.to.>")
    publish(nats_url, f"{name}.dead", (b"x", {"Natslog-Error": "x", "Natslog-Subject": f"{name}.to.*"}))
    (shown,) = client.redrive(name, [0], dry_run=True)["messages"]
    assert "not one plain NATS subject" in shown["problem"]


def test_letters_far_apart_are_read_in_few_steps(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.dead")
    client.create_stream(f"{name}-to", f"{name}.to")
    headers = {"Natslog-Error": "x", "Natslog-Subject": f"{name}.to"}
    publish(nats_url, f"{name}.dead", *[(b"%d" % at, headers) for at in range(300)])
    found = client.redrive(name, range(0, 300, 3))
    assert [one["stored_at"] for one in found["messages"]] == list(range(100))
    assert [row["value"] for row in rows(client, f"{name}-to")] == [b"%d" % at for at in range(0, 300, 3)]


@pytest.mark.parametrize("answer", [b'{"seq":1e999}', b"[" * 200_000, b'{"seq":"1"}', b'{"seq":-5}', b"\xff", b"null"])
def test_whatever_comes_as_an_ack_is_at_most_an_error_of_its_message(
    client: NatslogClient, broker: BrokerProcess, nats_url: str, name: str, answer: bytes
) -> None:
    """A subscriber of the subject answers before the stream does; the connection of the broker survives it."""
    client.create_stream(name, f"{name}.one")

    async def forged(connection: nats.NATS) -> tuple[int, Any]:
        async def respond(message: Any) -> None:
            await message.respond(answer)

        await connection.subscribe(f"{name}.one", cb=respond)
        await flushed(connection)
        return await asyncio.to_thread(ask, broker, f"{name}/publish", {"value": "x"})

    found: list[Any] = []

    async def work(connection: nats.NATS) -> None:
        found.append(await forged(connection))

    lost = "the connection to NATS"
    before = broker.output().count(lost)
    with_nats(nats_url, work)
    assert found[0][0] in (201, 502), found
    assert broker.output().count(lost) == before
    assert ask(broker, f"{name}/publish", {"value": "y"})[0] == 201


@pytest.mark.parametrize("header", ["Nats-Rollup", "nats-expected-last-sequence", "Natslog-Ack-To", "Nats-Msg-Id"])
def test_headers_that_are_requests_to_a_stream_are_refused(
    client: NatslogClient, broker: BrokerProcess, name: str, header: str
) -> None:
    client.create_stream(name, f"{name}.one")
    status, body = ask(broker, f"{name}/publish", {"value": "x", "headers": [{"key": header, "value": "all"}]})
    assert (status, header in body["error"]["message"]) == (400, True)
    assert rows(client, name) == []


def test_values_are_not_in_the_log(client: NatslogClient, broker: BrokerProcess, name: str) -> None:
    client.create_stream(name, f"{name}.one")
    assert ask(broker, f"{name}/publish", {"value": "a personal secret", "key": "another one"})[0] == 201
    assert "a personal secret" not in broker.output()
    assert "another one" not in broker.output()


def test_files_of_a_stream_and_its_replicas(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    assert [(one["start"], one["end"]) for one in client.segments(name)["segments"]] == [(0, 0)]
    publish(nats_url, name, *[(b"x" * 1000, {})] * 20)
    client.roll(name)
    publish(nats_url, name, (b"y", {}))
    found = client.segments(name)
    assert [(one["start"], one["end"], one["sealed"]) for one in found["segments"]] == [(20, 21, False), (0, 20, True)]
    assert all(one["bytes"] > 0 for one in found["segments"])
    assert found["total"] == 2
    shown = client.replicas(name)
    assert (shown["end"], shown["high_watermark"]) == (21, 21)
    assert [(one["leads"], one["in_sync"], one["behind"]) for one in shown["replicas"]] == [(True, True, 0)]
    with pytest.raises(NatslogError):
        client.segments("none")
