"""`natslog bench pub | read`: what it reports is what the stream holds. No figure of time is compared with another."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from natslog.client import NatslogClient
from natslog.nats_server import free_port
from tests.harness import BrokerProcess, eventually, natslog, on_terminal, publish_acked


@pytest.fixture
def stream(client: NatslogClient, name: str) -> str:
    client.create_stream(name, f"{name}.*.x")
    return name


def measured(*arguments: str, broker: BrokerProcess) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(natslog("bench", *arguments, "--json", url=broker.url).stdout)
    return body


def check_latency(latency: dict[str, float]) -> None:
    assert list(latency) == ["p50", "p90", "p99", "max"]
    assert latency["p50"] > 0
    assert all(lower <= higher for lower, higher in pairwise(latency.values()))


@pytest.mark.long
@pytest.mark.parametrize("to", ["stream", "subject"])
def test_pub_reports_what_the_stream_holds(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str, to: str
) -> None:
    target = ["--stream", stream] if to == "stream" else [f"{stream}.own.x"]
    options = ["--count", "5001", "--size", "1KiB", "--publishers", "2", "--in-flight", "300", "--nats-url", nats_url]
    found = measured("pub", *target, *options, broker=broker)
    subject = f"{stream}.{'bench' if to == 'stream' else 'own'}.x"
    assert (found["subject"], found["streams"], found["size_bytes"]) == (subject, [stream], 1024)
    assert (found["messages"], found["acked"]) == (5001, 5001)
    rows = [row for batch in client.read(stream) for row in batch.to_pylist()]
    assert len(rows) == 5001
    assert {row["subject"] for row in rows} == {subject}
    assert {len(row["value"]) for row in rows} == {1024}
    assert found["bytes_per_second"] == pytest.approx(found["messages_per_second"] * 1024, rel=0.01)
    check_latency(found["ack_latency_ms"])


@pytest.mark.long
def test_pub_for_a_time_acks_all_that_it_has_sent(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str
) -> None:
    found = measured(
        "pub", "--stream", stream, "--duration", "300ms", "--in-flight", "1", "--nats-url", nats_url, broker=broker
    )
    assert found["messages"] == found["acked"] == client.position(stream)["high_watermark"] > 0
    assert found["seconds"] >= 0.3


@pytest.mark.long
def test_pub_without_acks_has_no_latency(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str
) -> None:
    found = measured("pub", "--stream", stream, "--count", "5000", "--no-ack", "--nats-url", nats_url, broker=broker)
    assert (found["messages"], found["acked"], found["ack_latency_ms"]) == (5000, None, None)
    eventually(lambda: client.position(stream)["high_watermark"] == 5000)


@pytest.mark.long
def test_pub_where_no_stream_records_says_so_and_creates_none(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    before = client.streams()
    command = ("bench", "pub", f"{name}.x", "--count", "1000", "--nats-url", nats_url)
    refused = natslog(*command, url=broker.url, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: No stream records '{name}.x'. Create one: natslog stream create NAME")
    done = natslog(*command, "--no-ack", "--json", url=broker.url)
    assert done.stderr == f"no stream records '{name}.x': this measures the NATS server alone\n"
    found = json.loads(done.stdout)
    assert (found["streams"], found["messages"]) == ([], 1000)
    assert client.streams() == before


@pytest.mark.long
def test_pub_to_a_stream_that_sends_no_acks_says_so(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name, acks="never")
    refused = natslog("bench", "pub", name, "--nats-url", nats_url, url=broker.url, check=False)
    said = f"error: Stream {name} records '{name}' with the setting acks=never, so it does not ack to reply subjects. "
    assert (refused.returncode, refused.stderr) == (1, f"{said}To publish without waiting for acks, use --no-ack\n")
    assert client.position(name)["high_watermark"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either a SUBJECT or --stream"),
        (["x", "--stream", "y"], "give either a SUBJECT or --stream"),
        (["--stream", "missing"], "there is no stream 'missing'"),
        (
            ["a.*", "--no-ack"],
            "subject 'a.*' contains a wildcard; a message is published to one subject without wildcards",
        ),
        (["x", "--size", "many"], "--size 'many' is not a size above zero: write 500MB, 10GiB or a number of bytes"),
        (["x", "--size", "0"], "--size '0' is not a size above zero: write 500MB, 10GiB or a number of bytes"),
        (["x", "--duration", "soon"], "--duration 'soon' is not a duration: write 90s, 15m, 12h or 7d"),
        (["x", "--count", "3", "--publishers", "4"], "--count 3 is less than a message for each of --publishers 4"),
        (
            ["x", "--size", "2MB", "--no-ack"],
            "--size 2000000 is larger than the 1048576 bytes that the NATS server accepts in a message (max_payload)",
        ),
    ],
)
@pytest.mark.long
def test_pub_refuses_what_it_cannot_measure(
    broker: BrokerProcess, nats_url: str, arguments: list[str], said: str
) -> None:
    refused = natslog("bench", "pub", *arguments, "--nats-url", nats_url, url=broker.url, check=False)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1] == f"error: {said}"


@pytest.mark.long
def test_without_nats_or_a_broker_one_sentence_says_so(broker: BrokerProcess, nats_url: str, stream: str) -> None:
    no_nats = f"nats://127.0.0.1:{free_port()}"
    refused = natslog("bench", "pub", "--stream", stream, "--nats-url", no_nats, url=broker.url, check=False)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith(f"error: no NATS server responds at {no_nats} ")
    nowhere = f"http://127.0.0.1:{free_port()}"
    refused = natslog("bench", "read", stream, url=nowhere, check=False)
    assert refused.returncode == 1
    assert "no broker answered" in refused.stderr
    unknown = natslog("bench", "pub", f"{stream}.a.x", "--count", "10", "--nats-url", nats_url, url=nowhere)
    assert "is unknown: no broker answered" in unknown.stderr
    assert "acked 10" in unknown.stdout


@pytest.mark.parametrize(
    ("options", "first", "count"),
    [([], 0, 100), (["--from", "40"], 40, 60), (["--from", "10", "--to", "30"], 10, 20), (["--count", "7"], 0, 7)],
)
@pytest.mark.long
def test_read_reports_the_range(
    broker: BrokerProcess, client: NatslogClient, filled: str, options: list[str], first: int, count: int
) -> None:
    found = measured("read", filled, "--fetch-size", "512", *options, broker=broker)
    assert (found["stream"], found["from"], found["messages"]) == (filled, first, count)
    values = [
        value for batch in client.read(filled, first, first + count) for value in batch.column("value").to_pylist()
    ]
    size_bytes = sum(map(len, values))
    assert found["bytes_per_second"] * count == pytest.approx(found["messages_per_second"] * size_bytes, rel=0.05)
    assert found["fetches"] >= 1
    check_latency(found["fetch_latency_ms"])
    assert "delivery_latency_ms" not in found


@pytest.mark.long
def test_read_with_follow_reports_the_delivery_of_what_is_new(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, filled: str
) -> None:
    options = ("--follow", "--from", "earliest", "--duration", "5s")
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(measured, "read", filled, *options, broker=broker)
        while not reading.done():  # what is stored before it has begun is not new
            publish_acked(nats_url, f"{filled}.x", [b"new"] * 5)
        found = reading.result()
    assert found["from"] == 0
    assert found["messages"] >= 150
    check_latency(found["delivery_latency_ms"])


def test_read_with_follow_where_nothing_comes_ends_in_time(broker: BrokerProcess, filled: str) -> None:
    done = natslog("bench", "read", filled, "--follow", "--duration", "200ms", url=broker.url)
    assert "read 0 messages" in done.stdout
    assert "no new message came" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from", "100"], "has no messages from offset 100 on"),
        (["--from", "5000"], "has no messages from offset 5000 on"),
        (["--to", "5", "--follow"], "--follow has no end: leave --to out, or --follow"),
        (["--duration", "5s"], "--duration needs --follow; a range ends at --to, or after --count messages"),
        (["--fetch-size", "x"], "--fetch-size 'x' is not a size above zero"),
    ],
)
def test_read_refuses_what_it_cannot_measure(broker: BrokerProcess, filled: str, options: list[str], said: str) -> None:
    refused = natslog("bench", "read", filled, *options, url=broker.url, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert said in refused.stderr


def test_read_of_a_missing_stream(broker: BrokerProcess) -> None:
    refused = natslog("bench", "read", "missing", url=broker.url, check=False)
    assert (refused.returncode, refused.stderr) == (1, "error: there is no stream 'missing'\n")


@pytest.mark.long
def test_people_see_a_bar_and_sentences(broker: BrokerProcess, nats_url: str, stream: str) -> None:
    options = ("--duration", "500ms", "--nats-url", nats_url)
    code, shown = on_terminal("bench", "pub", "--stream", stream, *options, url=broker.url)
    assert code == 0
    assert "━" in shown
    assert "messages of 128 B to" in shown
    assert "ack latency: p50 " in shown
    code, shown = on_terminal("bench", "read", stream, url=broker.url)
    assert code == 0
    assert "fetches: p50 " in shown


@pytest.mark.long
@pytest.mark.parametrize("command", ["pub", "read"])
def test_help_has_examples_that_run(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, command: str
) -> None:
    """Each example of the help, but for a stream, a time and a size of the test's own."""
    shown = natslog("bench", command, "--help").stdout
    examples = [line.split() for line in shown.splitlines() if line.strip().startswith(f"natslog bench {command}")]
    assert len(examples) == 3
    client.create_stream(name, f"{name}.>")
    publish_acked(nats_url, f"{name}.x", [b"a"] * 3)
    other = {
        "orders": name,
        "orders.test": f"{name}.test",
        "2026-11-20T10:00:00Z": "0",
        "1000000": "100",
        "30s": "300ms",
    }
    for words in examples:
        short = ["--duration", "300ms"] if command == "pub" else []
        to = ["--nats-url", nats_url] if command == "pub" else []
        natslog(*(other.get(word, word) for word in words[1:]), *short, *to, url=broker.url)
