"""From a plain NATS publisher to the log: acks, wildcards, groups, headers, bad input, lost servers."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import nats.js.errors
import pytest

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, all_values, eventually, flushed, natslog, publish_acked, running, with_nats


@pytest.mark.long
def test_jetstream_publish_gets_a_valid_ack(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.>")

    async def work(connection: Any) -> list[Any]:
        js = connection.jetstream()
        return [await js.publish(f"{name}.new", b"%d" % at, headers={"Nats-Msg-Id": f"id-{at % 2}"}) for at in range(3)]

    acks = with_nats(nats_url, work)
    assert [(ack.stream, ack.seq, ack.duplicate) for ack in acks] == [(name, 1, None), (name, 2, None), (name, 1, True)]
    assert all_values(client, name) == [b"0", b"1"]


def test_ack_has_the_fields_of_jetstream_and_on_request_offset_and_epoch(
    client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, f"{name}.>")

    async def work(connection: Any) -> list[dict[str, Any]]:
        wishes = (None, {"Natslog-Ack": "full"}, {"Natslog-Ack": "other"})
        return [json.loads((await connection.request(f"{name}.a", b"x", headers=wish)).data) for wish in wishes]

    assert with_nats(nats_url, work) == [
        {"stream": name, "seq": 1},
        {"stream": name, "seq": 2, "offset": 1, "epoch": 1},
        {"stream": name, "seq": 3},
    ]


def test_subjects_headers_and_payloads_are_kept_as_sent(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.>")
    payloads = [b"", b"\r\n", b"MSG a 1 5\r\nhello\r\n", bytes(range(256)), "grüße".encode()]

    async def work(connection: Any) -> None:
        for at, payload in enumerate(payloads):
            headers = {"Natslog-Key": f"k{at}", "Trace": "a b"} if at % 2 else None
            await connection.publish(f"{name}.s{at}", payload, headers=headers)
        await flushed(connection)

    with_nats(nats_url, work)
    eventually(lambda: client.stream(name)["high_watermark"] == len(payloads))
    rows = [row for batch in client.read(name) for row in batch.to_pylist()]
    assert [row["value"] for row in rows] == payloads
    assert [row["subject"] for row in rows] == [f"{name}.s{at}" for at in range(5)]
    assert [row["key"] for row in rows] == [None, b"k1", None, b"k3", None]
    assert rows[1]["headers"] == [{"key": "Natslog-Key", "value": "k1"}, {"key": "Trace", "value": "a b"}]
    assert rows[0]["headers"] is None


def test_largest_payload_is_stored(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    payload = bytes(range(256)) * 4096  # the server's default limit, 1 MiB
    assert publish_acked(nats_url, name, [payload])[0]["offset"] == 0
    assert all_values(client, name) == [payload]


def test_several_streams_on_one_subject_each_sequence_their_own_copy(
    client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(f"{name}-a", f"{name}.>")
    client.create_stream(f"{name}-b", f"{name}.*.new")
    for subject in ("x.new", "y.old", "z.new"):
        publish_acked(nats_url, f"{name}.{subject}", [subject.encode()])
    eventually(lambda: [client.stream(f"{name}-{one}")["high_watermark"] for one in "ab"] == [3, 2])
    assert all_values(client, f"{name}-a") == [b"x.new", b"y.old", b"z.new"]
    assert all_values(client, f"{name}-b") == [b"x.new", b"z.new"]


def test_streams_of_one_group_share_their_subject(client: NatslogClient, nats_url: str, name: str) -> None:
    for at in range(3):
        client.create_stream(f"{name}-{at}", name, group=f"{name}-group")
    sent = [b"%d" % at for at in range(300)]
    answers = publish_acked(nats_url, name, sent)
    parts = [all_values(client, f"{name}-{at}") for at in range(3)]
    assert sorted(value for part in parts for value in part) == sorted(sent)
    assert all(parts)
    assert {answer["stream"] for answer in answers} == {f"{name}-{at}" for at in range(3)}


@pytest.mark.parametrize("rest", ["x" * 1100, "a.*", "a.>", "*.a"])
def test_subject_that_direct_append_refuses_is_refused_over_nats_too(
    client: NatslogClient, broker: BrokerProcess, nats_url: str, name: str, rest: str
) -> None:
    client.create_stream(name, f"{name}.>")
    wrong = f"{name}.{rest}".encode()
    with socket.create_connection(("127.0.0.1", int(nats_url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(b'CONNECT {"verbose":false,"protocol":1}\r\nSUB _INBOX.t 1\r\n')
        raw.sendall(b"PUB " + wrong + b" _INBOX.t 1\r\nx\r\nPING\r\n")
        raw.settimeout(10)
        answer = b""
        while b"seq" not in answer:
            answer += raw.recv(65536)
    assert b"no wildcard as a token" in answer
    publish_acked(nats_url, f"{name}.right", [b"y"])
    [batch] = client.read(name)
    assert batch.column("subject").to_pylist() == [f"{name}.right"]
    assert broker.metrics()[f'natslog_messages_refused_total{{reason="bad_subject",stream="{name}"}}'] == 1


def test_header_that_is_not_utf8_is_refused_counted_and_nothing_else_is_lost(
    client: NatslogClient, broker: BrokerProcess, nats_url: str, name: str
) -> None:
    client.create_stream(name, name)
    block = b"NATS/1.0\r\nBad: \xff\xfe\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(nats_url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(b'CONNECT {"verbose":false,"headers":true,"protocol":1}\r\nSUB _INBOX.answer 1\r\n')
        bad = b"HPUB %s _INBOX.answer %d %d\r\n" % (name.encode(), len(block), len(block) + 1) + block + b"x\r\n"
        raw.sendall(b"PUB %s 1\r\na\r\n" % name.encode() + bad + b"PUB %s 1\r\nb\r\nPING\r\n" % name.encode())
        raw.settimeout(10)
        answer = b""
        while b"UTF-8" not in answer:
            answer += raw.recv(65536)
    assert b'"code": 400' in answer
    eventually(lambda: all_values(client, name) == [b"a", b"b"])
    assert broker.metrics()[f'natslog_messages_refused_total{{reason="not_utf8",stream="{name}"}}'] == 1


def test_payload_over_the_servers_limit_is_an_error_before_it_is_sent(nats_url: str, name: str, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"x" * (1024 * 1024 + 1))
    done = natslog("pub", name, "--file", str(big), "--nats-url", nats_url, check=False)
    assert done.returncode == 1
    assert "larger than the 1048576 bytes that the NATS server accepts" in done.stderr


def test_paused_stream_refuses_and_resumed_takes(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    client.edit_stream(name, paused=True)
    refused = publish_acked(nats_url, name, [b"x"])[0]
    assert refused["error"]["code"] == 503
    assert "paused" in refused["error"]["description"]
    client.edit_stream(name, paused=False)
    assert publish_acked(nats_url, name, [b"y"])[0]["offset"] == 0


def test_refused_publish_is_an_api_error_for_jetstream_clients(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    client.edit_stream(name, paused=True)

    async def work(connection: Any) -> None:
        await connection.jetstream().publish(name, b"x")

    with pytest.raises(nats.js.errors.ServiceUnavailableError, match="paused"):
        with_nats(nats_url, work)


def test_edited_subject_is_recorded_from_then_on(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.a")
    publish_acked(nats_url, f"{name}.a", [b"1"])
    client.edit_stream(name, subject=f"{name}.b")
    publish_acked(nats_url, f"{name}.b", [b"2"])
    assert all_values(client, name) == [b"1", b"2"]


def test_window_switched_on_later_knows_what_is_stored(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name, dedupe_window=None)
    header = {"Nats-Msg-Id": "one"}
    assert [answer["offset"] for answer in publish_acked(nats_url, name, [b"x", b"x"], header)] == [0, 1]
    client.edit_stream(name, dedupe_window="1m")
    assert publish_acked(nats_url, name, [b"x"], header)[0]["duplicate"]
    client.edit_stream(name, dedupe_window="0")
    assert publish_acked(nats_url, name, [b"x"], header)[0]["offset"] == 2


@pytest.mark.long
def test_deduplication_survives_a_killed_broker(own: Path) -> None:
    with running(own) as (server, broker):
        broker.client().create_stream("orders", "orders")
        assert publish_acked(server.url, "orders", [b"x"], {"Nats-Msg-Id": "one"})[0]["offset"] == 0
        broker.kill()
        broker.start()
        again = publish_acked(server.url, "orders", [b"x"], {"Nats-Msg-Id": "one"})[0]
        assert (again["offset"], again["duplicate"]) == (0, True)
        assert all_values(broker.client(), "orders") == [b"x"]


@pytest.mark.long
def test_nats_lost_and_back_is_said_and_the_subject_subscribed_again(own: Path) -> None:
    with running(own) as (server, broker):
        client = broker.client()
        client.create_stream("orders", "orders.>")
        publish_acked(server.url, "orders.a", [b"before"])
        server.stop()
        eventually(lambda: not broker.ready(), what="readyz says that NATS is gone")
        assert client.stream("orders")["high_watermark"] == 1, "reads go on without NATS"
        server.start()
        eventually(broker.ready)
        publish_acked(server.url, "orders.a", [b"after"])
        assert all_values(client, "orders") == [b"before", b"after"]
        assert "the connection to NATS at" in broker.output()
        assert "all connections to NATS are re-established" in broker.output()


def test_broker_starts_without_nats_says_so_and_connects_when_it_comes(own: Path) -> None:
    own.mkdir()
    server = NatsServer(0, own / "nats.log")
    broker = BrokerProcess(own / "data", server.url).spawn()
    try:
        eventually(lambda: f"cannot connect to NATS at {server.url}" in broker.output(), 60)
        assert not broker.ready()
        server.start()
        eventually(broker.ready)
    finally:
        broker.kill()
        server.stop()


@pytest.mark.long
def test_sigterm_commits_and_acks_what_was_received_and_leaves_in_time(own: Path) -> None:
    with running(own) as (server, broker):
        broker.client().create_stream("orders", "orders")

        async def work(connection: Any) -> tuple[list[Any], float]:
            inbox = connection.new_inbox()
            answers = await connection.subscribe(inbox)
            for at in range(20_000):
                await connection.publish("orders", b"%d" % at, reply=inbox)
            await flushed(connection)
            seconds = await asyncio.to_thread(broker.terminate)
            await flushed(connection)
            return [message.data for message in iter_pending(answers)], seconds

        answers, seconds = with_nats(server.url, work)
        assert seconds < 5
        acked = sum(b'"error"' not in answer for answer in answers)
        broker.start()
        stored = broker.client().stream("orders")["high_watermark"]
        assert (acked, stored) == (20_000, 20_000), [answer for answer in answers if b"error" in answer][:1]


def iter_pending(subscription: Any) -> list[Any]:
    """What has arrived."""
    queue = subscription._pending_queue
    return [queue.get_nowait() for _ in range(queue.qsize())]


@pytest.mark.long
def test_flood_that_does_not_fit_into_memory_is_counted_not_lost_silently(own: Path) -> None:
    with running(own, ingest_memory_bytes="64KiB") as (server, broker):
        client = broker.client()
        client.create_stream("orders", "orders")

        async def work(connection: Any) -> None:
            for _ in range(30_000):
                await connection.publish("orders", b"x" * 200)
            await flushed(connection)

        with_nats(server.url, work)

        def all_counted() -> bool:
            metrics = broker.metrics()
            refused = metrics.get('natslog_messages_refused_total{reason="overloaded",stream="orders"}', 0)
            committed = metrics['natslog_messages_committed_total{stream="orders"}']
            return refused > 0 and committed + refused == 30_000

        eventually(all_counted, what="every message is either committed or counted as refused")
        assert client.stream("orders")["high_watermark"] > 0


def test_thousand_idle_messages_are_acked_one_by_one_without_delay(
    client: NatslogClient, nats_url: str, name: str
) -> None:
    """No gathering delay: at one message at a time, an ack takes about one fsync."""
    client.create_stream(name, name)

    async def work(connection: Any) -> list[float]:
        seconds = []
        for _ in range(50):
            started = time.perf_counter()
            await connection.request(name, b"x", timeout=30)
            seconds.append(time.perf_counter() - started)
        return sorted(seconds)

    assert with_nats(nats_url, work)[25] < 0.25, "a fixed delay would show"
