"""A leader that clients reach and the other brokers do not: it states no positions, and serves what is committed.

Its stream goes on at another leader, so its own high watermark is too low. `STALE` messages were committed under the
old leader, `TRUE` are committed in all.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from natslog.client import ClientOptions, NatslogClient
from natslog.client.publisher import Publisher
from natslog.errors import BrokerUnavailable
from natslog.wire.outgoing_rows import Rows
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.schema import spark_schema
from pyspark_natslog.source.splits import OffsetRange, Task
from pyspark_natslog.source.stream_reader import StreamReader
from tests.chaos.network import missing_for_network
from tests.cluster_harness import Cluster, ClusterBroker, running_cluster
from tests.harness import eventually

STREAM, STALE, TRUE = "orders", 640, 1200
SUCCEEDED_WITHIN_S = 30.0

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]


def publish(cluster: Cluster, first: int, count: int) -> None:
    values = pa.array([b"%d" % at for at in range(first, first + count)])
    with Publisher(cluster.nats_url) as publisher:
        publisher.publish(Rows(pa.repeat(STREAM, count), values), "stored")


def fill(cluster: Cluster) -> ClusterBroker:
    """`STALE` messages, which all replicas know to be committed; returns the leader, which is not the metadata's."""
    with cluster.client() as client:
        client.create_stream(STREAM, STREAM, replicas=3)
        publish(cluster, 0, STALE)
        client.set_cursor("loader", STREAM, 100)
    cluster.wait_replicated(STREAM)
    leader = eventually(lambda: cluster.leader_of(STREAM), 30)
    other = next(broker for broker in cluster.brokers if broker is not leader)
    cluster.operate("POST", "/v1/cluster/transfer", {"metadata": True, "to": other.number})
    eventually(lambda: cluster.metadata_leader() is other, 30, "the metadata leadership moves")
    return leader


def go_on_without(cluster: Cluster, old: ClusterBroker) -> None:
    """Returns when another broker leads, and `TRUE` messages are committed."""

    def is_succeeded() -> bool:
        others = [broker for broker in cluster.brokers if broker is not old]
        shown = [found for broker in others if (found := broker.json(f"/v1/streams/{STREAM}")) is not None]
        return any(one["leader"] not in (None, old.number) and "high_watermark" in one for one in shown)

    eventually(is_succeeded, SUCCEEDED_WITHIN_S, "another broker leads")
    publish(cluster, STALE, TRUE - STALE)


@contextmanager
def cut_off(cluster: Cluster) -> Iterator[ClusterBroker]:
    """The old leader, while it is partitioned from the brokers only."""
    old, network = fill(cluster), cluster.network
    assert network is not None, "these have hosts"
    network.separate(old.number, [broker.number for broker in cluster.brokers if broker is not old])
    try:
        go_on_without(cluster, old)
        yield old
    finally:
        network.heal()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (lacking := missing_for_network()) is not None:
        pytest.skip(lacking)
    with running_cluster(tmp_path_factory.mktemp("cluster") / "own", network=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def old(cluster: Cluster) -> Iterator[ClusterBroker]:
    with cut_off(cluster) as old:
        yield old


def servers(cluster: Cluster, old: ClusterBroker) -> list[str]:
    """The old leader is asked first, each time."""
    return [old.url, *(broker.url for broker in cluster.brokers if broker is not old)]


def reader_of(cluster: Cluster, old: ClusterBroker, **options: Any) -> StreamReader:
    given = {"servers": ",".join(servers(cluster, old)), "stream": STREAM} | options
    parsed = SourceOptions.parse(given, streaming=True)
    return StreamReader(parsed, spark_schema(parsed.selected_columns()))


# ---- what the broker answers ----

POSITIONS = [
    f"/v1/streams/{STREAM}/messages?start={TRUE}",
    f"/v1/streams/{STREAM}/messages?start={TRUE}&end={TRUE + 10}",
    f"/v1/streams/{STREAM}/messages?start={STALE}",
    f"/v1/streams/{STREAM}/messages?start=0",
    f"/v1/streams/{STREAM}/messages?start=0&end=latest",
    f"/v1/streams/{STREAM}/messages?start=earliest&end=10",
    f"/v1/streams/{STREAM}/messages?start=0&end={TRUE}",
    f"/v1/streams/{STREAM}/offsets?timestamp=0",
    f"/v1/streams/{STREAM}/extent?start=0&end={STALE}",
    f"/v1/streams/{STREAM}/splits?start=0&end={STALE}",
    f"/v1/streams/{STREAM}/lag?offset=10",
    f"/v1/streams/{STREAM}/lag?cursor=loader",
    f"/v1/streams/{STREAM}/appends/loader",
    "/v1/cursors",
    f"/v1/cursors/loader/{STREAM}",
    "/v1/streams/created-meanwhile",
]


@pytest.mark.parametrize("path", POSITIONS)
def test_call_that_states_a_position_is_answered_with_a_retriable_503(old: ClusterBroker, path: str) -> None:
    answer = old.ask("GET", path, timeout_s=10)
    assert answer is not None
    assert (answer.status, answer.json()["error"]["retriable"]) == (503, True), answer.data


@pytest.mark.parametrize(("start", "end"), [(0, STALE), (100, 101), (STALE - 1, STALE)])
def test_range_that_is_committed_is_served(old: ClusterBroker, start: int, end: int) -> None:
    answer = old.ask("GET", f"/v1/streams/{STREAM}/messages?start={start}&end={end}&columns=value")
    assert answer is not None
    assert answer.status == 200
    values = pa.ipc.open_stream(answer.data).read_all().column("value").to_pylist()
    assert values == [b"%d" % at for at in range(start, end)]


def test_stream_is_shown_with_its_problem_and_without_positions(old: ClusterBroker) -> None:
    shown = [old.json(f"/v1/streams/{STREAM}"), *old.json("/v1/streams", timeout_s=10)]
    assert [one["name"] for one in shown] == [STREAM, STREAM]
    for one in shown:
        assert not {"high_watermark", "log_start_offset"} & set(one)
        assert (one["problem"]["code"], one["problem"]["retriable"]) == ("no_leader", True)


def test_lags_are_null(old: ClusterBroker) -> None:
    answer = old.ask("POST", "/v1/lags", {STREAM: 10}, timeout_s=10)
    assert answer is not None
    assert answer.json() == {STREAM: None}


def test_list_and_readiness_say_that_the_broker_is_not_current(old: ClusterBroker) -> None:
    listed, ready = old.ask("GET", "/v1/streams", timeout_s=10), old.ask("GET", "/readyz")
    assert listed is not None
    assert listed.headers["Natslog-Current"] == "false"
    assert ready is not None
    assert ready.status == 503


# ---- what clients make of it ----


def test_client_that_asks_the_old_leader_first_finds_the_true_end(cluster: Cluster, old: ClusterBroker) -> None:
    with NatslogClient(servers(cluster, old)) as client:
        assert client.position(STREAM)["high_watermark"] == TRUE
        assert client.fetch(STREAM, TRUE).batches == [], "at the end there is nothing, and no error"
        rows = [value for batch in client.read(STREAM) for value in batch.column("value").to_pylist()]
        assert rows == [b"%d" % at for at in range(TRUE)]
        assert client.lag(STREAM, 0)["rows"] == TRUE
        assert client.offset_at(STREAM, "2100-01-01T00:00:00Z")[0] == TRUE
        assert client.splits(STREAM, 0, TRUE)[-1].end == TRUE
        assert client.cursor("loader", STREAM)["lag"]["rows"] == TRUE - 100


def test_client_that_knows_only_the_old_leader_is_told_to_try_again(old: ClusterBroker) -> None:
    with NatslogClient(old.url, ClientOptions(retries=0)) as client, pytest.raises(BrokerUnavailable) as refused:
        client.splits(STREAM, 0, TRUE)
    assert refused.value.retriable


@pytest.mark.parametrize("lenient", ["true", "false"])
def test_query_whose_checkpoint_is_ahead_of_the_old_leader_loses_nothing(
    cluster: Cluster, old: ClusterBroker, lenient: str
) -> None:
    reader = reader_of(cluster, old, failOnDataLoss=lenient)
    stream_id = old.json(f"/v1/streams/{STREAM}")["id"]
    start = {STREAM: {"id": stream_id, "offset": 1100}}
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end[STREAM]["offset"] == TRUE, "neither back to what the old leader knows, nor an error"
    batches = [batch for part in reader.partitions(start, end) for batch in reader.read(part)]
    assert [at for batch in batches for at in batch.column("offset").to_pylist()] == list(range(1100, TRUE))
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_task_that_is_sent_to_the_old_leader_reads_its_whole_range(cluster: Cluster, old: ClusterBroker) -> None:
    stream_id = old.json(f"/v1/streams/{STREAM}")["id"]
    task = Task([OffsetRange(STREAM, stream_id, 600, TRUE, tuple(servers(cluster, old)))])
    batches = list(reader_of(cluster, old).read(task))
    assert [at for batch in batches for at in batch.column("offset").to_pylist()] == list(range(600, TRUE))


# ---- a process that was stopped ----


@pytest.mark.long
def test_leader_that_was_stopped_does_not_answer_from_before(tmp_path: Path) -> None:
    """Questions wait in its sockets, beside the heartbeats of before; it reads all of them at once when it goes on."""
    with running_cluster(tmp_path / "own") as cluster:
        old = fill(cluster)
        asked = [*POSITIONS[:2], f"/v1/streams/{STREAM}/lag?offset=10", f"/v1/streams/{STREAM}", "/v1/streams"] * 8
        sockets = [socket.create_connection(("127.0.0.1", old.http_port)) for _ in asked]
        old.ask("GET", "/healthz")
        old.pause()
        try:
            go_on_without(cluster, old)
            time.sleep(0.5)
            for connection, path in zip(sockets, asked, strict=True):
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        finally:
            old.resume()
        for connection, path in zip(sockets, asked, strict=True):
            check_not_stale(path, *answered(connection))
        with NatslogClient(old.url, ClientOptions(patience_s=15)) as client:
            assert client.position(STREAM)["high_watermark"] == TRUE


def answered(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    connection.settimeout(20)
    with connection, connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = {}
        while (line := file.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, file.read()


def check_not_stale(path: str, status: int, headers: dict[str, str], body: bytes) -> None:
    assert status in (200, 307, 503), f"{path}: {status} {body!r}"
    assert int(headers.get("natslog-high-watermark", TRUE)) == TRUE, path
    if status == 200 and headers["content-type"].startswith("application/json"):
        shown = json.loads(body)
        for one in shown if isinstance(shown, list) else [shown]:
            assert one.get("high_watermark", TRUE) == TRUE, f"{path}: {one}"
