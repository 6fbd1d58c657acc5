"""The overview of a cluster, its events and its history, and requests that are passed on to another broker."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from natslog.http.findings import CODES
from natslog.http.overview import LIVE_EVERY_S
from natslog.node.history import EVERY_S, SAMPLES, _Ring
from tests.cluster_harness import Cluster, ClusterBroker, running_cluster
from tests.harness import eventually, publish_acked

OPERATIONS = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("overview")) as found:
        client = found.client()
        for at in range(6):
            client.create_stream(f"s{at}", f"s{at}", replicas=3)
        found.wait_in_sync()
        yield found


def rows(overview: dict[str, Any]) -> dict[str, dict[str, Any]]:
    table = overview["streams"]
    return {name: {column: table[column][at] for column in table} for at, name in enumerate(table["name"])}


def events(broker: ClusterBroker, count: int) -> Iterator[dict[str, Any]]:
    answer = urllib3.request("GET", f"{broker.url}/v1/live?events={count}", timeout=30.0, preload_content=False)
    assert answer.headers["Content-Type"] == "text/event-stream"
    for line in io.BufferedReader(answer):
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


@pytest.mark.long
def test_overview_has_every_stream_at_every_broker(cluster: Cluster) -> None:
    publish_acked(cluster.nats_url, "s0", [b"x"] * 10)
    for broker in cluster.brokers:
        found = broker.json("/v1/overview")
        shown = rows(found)
        assert sorted(shown) == [f"s{at}" for at in range(6)]
        assert (shown["s0"]["high_watermark"], shown["s0"]["messages"]) == (10, 10)
        assert {(one["replicas"], one["in_sync"]) for one in shown.values()} == {(3, 3)}
        assert (found["findings"], [one["id"] for one in found["broker_stats"]]) == ([], [1, 2, 3])
        assert all(one["disk_free_bytes"] > 0 and one["memory_bytes"] > 0 for one in found["broker_stats"])


@pytest.mark.long
def test_live_events_have_what_has_changed(cluster: Cluster) -> None:
    client, live = cluster.client(), events(cluster.brokers[0], 20)
    first = next(live)
    assert first["is_whole"]
    assert len(rows(first)) == 6
    client.create_stream("later", "later")
    shown: set[str] = set()
    while "later" not in shown:
        event = next(live)
        assert not event["is_whole"]
        shown |= set(rows(event))
    assert shown <= {"later", "s0"}, "and nothing that has not changed"
    client.delete_stream("later")
    while (event := next(live))["removed"] != ["later"]:
        assert event["removed"] == []


@pytest.mark.long
def test_a_new_page_waits_for_no_round(cluster: Cluster) -> None:
    """Pages that come one after another get a whole event each, at once, while another page listens."""
    listening = events(cluster.brokers[0], 50)
    next(listening)
    started_s = time.monotonic()
    for _ in range(4):
        assert next(events(cluster.brokers[0], 1))["is_whole"]
    assert time.monotonic() - started_s < 2 * LIVE_EVERY_S
    assert not next(listening)["is_whole"]


@pytest.mark.long
def test_history_of_brokers_and_of_a_stream(cluster: Cluster) -> None:
    def stored() -> list[float]:
        publish_acked(cluster.nats_url, "s1", [b"x"] * 100)
        found = cluster.brokers[0].json("/v1/history?stream=s1")
        return [rate for rate in found["stream"].get("messages_per_s", []) if rate > 0]

    eventually(stored, 4 * EVERY_S, "the rate of the stream is recorded")
    found = cluster.brokers[0].json("/v1/history")
    assert (found["every_s"], sorted(found["brokers"])) == (EVERY_S, ["1", "2", "3"])
    assert any(sum(series["messages_per_s"]) > 0 for series in found["brokers"].values())
    assert {len(series["cpu_share"]) <= SAMPLES for series in found["brokers"].values()} == {True}
    assert cluster.brokers[0].json("/v1/history?stream=s5")["stream"] == {}, "it has not changed"


def test_the_first_messages_of_a_new_stream_are_in_its_history(cluster: Cluster) -> None:
    cluster.client().create_stream("fresh", "fresh")
    publish_acked(cluster.nats_url, "fresh", [b"x"] * 1000)

    def stored() -> float:
        series = cluster.brokers[0].json("/v1/history?stream=fresh")["stream"]
        return EVERY_S * sum(series.get("messages_per_s", []))

    eventually(lambda: round(stored()) == 1000, 4 * EVERY_S, "all of them are recorded")
    cluster.client().delete_stream("fresh")


@pytest.mark.long
def test_a_stream_that_was_created_again_has_a_history_of_its_own(cluster: Cluster) -> None:
    client, broker = cluster.client(), cluster.brokers[0]

    def grown(more: int) -> list[float]:
        publish_acked(cluster.nats_url, "again", [b"x"] * more)
        rates: list[float] = broker.json("/v1/history?stream=again")["stream"].get("messages_per_s", [])
        return rates

    client.create_stream("again", "again")
    eventually(lambda: grown(1000), 6 * EVERY_S, "its rate is recorded")
    client.delete_stream("again")
    client.create_stream("again", "again")
    eventually(lambda: len(grown(1)) > 2, 8 * EVERY_S, "so is that of the new one")
    assert max(grown(1)) < 100, "the rate of the former stream is not in it"
    client.delete_stream("again")


def test_every_code_is_in_the_docs() -> None:
    row = r"^\| `(\w+)` \| (error|warning) \| [^|]+ \| [^|]+ \| [^|]+ \|$"
    documented = re.findall(row, OPERATIONS.read_text(), re.MULTILINE)
    assert dict(documented) == CODES


def test_requests_are_passed_on_to_the_leader(cluster: Cluster) -> None:
    publish_acked(cluster.nats_url, "s2", [b"to be found"])
    leader = cluster.leader_of("s2")
    for broker in cluster.brokers:
        plain = urllib3.request("GET", f"{broker.url}/v1/streams/s2/search?grep=found", redirect=False)
        assert plain.status == (200 if broker is leader else 307)
        passed = urllib3.request(
            "GET", f"{broker.url}/v1/streams/s2/search?grep=found", headers={"Natslog-Forward": "true"}, redirect=False
        )
        assert passed.status == 200
        assert [one["value"] for one in passed.json()["messages"]] == ["to be found"]
        assert "Natslog-Leader-Epoch" in passed.headers
        wrong = urllib3.request(
            "GET", f"{broker.url}/v1/streams/s2/search?regex=true", headers={"Natslog-Forward": "true"}, redirect=False
        )
        assert (wrong.status, wrong.json()["error"]["code"]) == (400, "invalid_request")


def test_changes_are_passed_on_with_their_body(cluster: Cluster) -> None:
    leader = cluster.leader_of("s3")
    for broker in cluster.brokers:
        for call, body, status in (("purge", {"keep": 0}, 200), ("erase", {"subject": "s3.nothing"}, 202)):
            answer = urllib3.request(
                "POST",
                f"{broker.url}/v1/streams/s3/{call}",
                body=json.dumps(body),
                headers={"Natslog-Forward": "true"},
                redirect=False,
            )
            assert answer.status == status, (call, broker is leader, answer.data)


@pytest.mark.long
def test_nothing_follows_a_forwarded_response_that_breaks_off(cluster: Cluster) -> None:
    """An error that is written into its body would be taken for messages, or for the next response."""
    publish_acked(cluster.nats_url, "s4", [b"x" * 500_000] * 80)
    cluster.wait_in_sync()
    leader = cluster.leader_of("s4")
    assert leader is not None
    asked = next(one for one in cluster.brokers if one is not leader)
    with socket.create_connection(("127.0.0.1", asked.http_port), timeout=60) as connection:
        connection.sendall(b"GET /v1/streams/s4/messages HTTP/1.1\r\nHost: localhost\r\nNatslog-Forward: true\r\n\r\n")
        data = connection.recv(1_000_000)
        assert data.startswith(b"HTTP/1.1 200")
        leader.kill()
        with contextlib.suppress(ConnectionResetError):
            while more := connection.recv(1_000_000):
                data += more
    leader.spawn()
    cluster.wait_ready()
    assert len(data) < 40_000_000, "it broke off"
    assert data.count(b"HTTP/1.1") == 1
    assert not data.endswith(b"0\r\n\r\n")


@pytest.mark.long
def test_a_dead_broker_is_found_and_forgotten_again(cluster: Cluster) -> None:
    cluster.wait_in_sync()
    alive, dead = cluster.brokers[0], cluster.brokers[2]
    dead.kill()

    def codes() -> set[str]:
        return {one["code"] for one in next(events(alive, 1))["findings"]}

    eventually(lambda: "broker_down" in codes(), 30, "it is shown within seconds")

    def behind() -> list[dict[str, Any]]:
        found = alive.json("/v1/overview")["findings"]
        return [one for one in found if one["code"] == "stream_under_replicated" and one["count"] == 6]

    (streams,) = eventually(behind, 40, "so are the replicas, as one finding")
    assert streams["streams"] == [f"s{at}" for at in range(6)]
    (down,) = (one for one in alive.json("/v1/overview")["findings"] if one["code"] == "broker_down")
    assert "Start broker 3" in down["remedy"]
    dead.spawn()
    eventually(lambda: codes() == set(), 40, "and disappears by itself")


def test_ring_has_the_last_hour_of_a_stream() -> None:
    ring = _Ring(10, 0, 0)
    ring.write(11, 5, 50)
    ring.write(14, 8, 80)
    assert ring.newest(15).tolist() == [[0, 5, 5, 5, 8, 8], [0, 50, 50, 50, 80, 80]]
    ring.write(14 + SAMPLES, 9, 90)
    ends, _ = ring.newest(14 + SAMPLES)
    assert (len(ends), ends[-1], set(ends[:-1].tolist())) == (SAMPLES, 9, {8})
    assert len(ring.newest(14 + 10 * SAMPLES)[0]) == SAMPLES
