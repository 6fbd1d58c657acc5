"""Reads from three brokers in a real Spark: which of them serve, and one that dies or hangs in mid-scan.

Spark runs each task once here (`local`): a job that finishes shows that no task has failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from natslog.client.publisher import Publisher
from natslog.wire.outgoing_rows import Rows
from tests.cluster_harness import Cluster, ClusterBroker, ClusterOptions
from tests.harness import eventually

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

ROWS = 120_000
VALUE_BYTES = 1000
FETCH_TIMEOUT_S = 3
STREAM = "orders"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers, each in its own rack, and a stream on all of them; row `n` has a value that begins with `n`."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster") / "own", ClusterOptions())
    try:
        for broker in cluster.brokers:
            broker.settings["rack"] = f"rack-{broker.number}"
        cluster.nats.start()
        for broker in cluster.brokers:
            broker.spawn()
        cluster.wait_ready(180)  # beside a Spark that starts, on two cores
        client = cluster.client()
        client.create_stream(STREAM, STREAM, replicas=3)
        with Publisher(cluster.nats.url) as publisher:
            for low in range(0, ROWS, 10_000):
                values = [b"%d " % at + b"." * VALUE_BYTES for at in range(low, low + 10_000)]
                publisher.publish(Rows(pa.repeat(STREAM, len(values)), pa.array(values, pa.binary())), "stored")
        assert client.position(STREAM)["high_watermark"] == ROWS
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(autouse=True)
def _in_sync(cluster: Cluster) -> None:
    """Whatever a test did to a broker, the next one finds all three in sync."""
    for broker in cluster.brokers:
        if broker.is_paused:
            broker.resume()
        elif broker.exit_code is not None or not broker.is_wanted:
            broker.spawn()
    cluster.wait_in_sync(120)


def read(spark: SparkSession, cluster: Cluster, **options: Any) -> DataFrame:
    servers = ",".join(broker.url for broker in cluster.brokers)
    given = {"servers": servers, "stream": STREAM, "fetchTimeout": f"{FETCH_TIMEOUT_S}s"} | options
    return spark.read.format("natslog").options(**given).load()


def exactly(frame: DataFrame) -> dict[str, int]:
    """What only all rows, each once and with its own value, come to."""
    own = F.split(F.col("value").cast("string"), " ")[0].cast("long")
    sums = [F.count("*"), F.countDistinct("offset"), F.min("offset"), F.max("offset"), F.sum("offset")]
    matching = F.sum(F.when(own == F.col("offset"), 1).otherwise(0))
    (row,) = frame.agg(*[column.alias(str(at)) for at, column in enumerate([*sums, matching])]).collect()
    names = ("rows", "distinct", "first", "last", "sum", "matching")
    return dict(zip(names, row, strict=True))


ALL_ROWS = {
    "rows": ROWS,
    "distinct": ROWS,
    "first": 0,
    "last": ROWS - 1,
    "sum": ROWS * (ROWS - 1) // 2,
    "matching": ROWS,
}


def leader(cluster: Cluster) -> ClusterBroker:
    return eventually(lambda: cluster.leader_of(STREAM), 30)


def served(cluster: Cluster, work: Callable[[], object]) -> dict[int, float]:
    """By broker: the share of what was sent to readers while `work` ran."""

    def sent() -> dict[int, float]:
        name = f'natslog_sent_bytes_total{{stream="{STREAM}"}}'
        return {broker.number: broker.metrics()[name] for broker in cluster.brokers}

    before = sent()
    work()
    after = sent()
    total = sum(after.values()) - sum(before.values())
    return {number: (after[number] - before[number]) / total for number in after}


def scan(frame: DataFrame) -> None:
    """Brokers answer `count()` to the columnar reader without sending rows."""
    frame.selectExpr("sum(length(value))").collect()


@pytest.mark.long
def test_read_from_leader_nearest_or_any_replica(spark: SparkSession, cluster: Cluster) -> None:
    number = leader(cluster).number
    options = {"maxBytesPerPartition": "4MiB", "minPartitions": "12"}
    assert served(cluster, lambda: scan(read(spark, cluster, readFrom="leader", **options)))[number] == 1.0
    near = number % 3 + 1
    rack = {"readFrom": "nearest", "rack": f"rack-{near}"}
    assert served(cluster, lambda: scan(read(spark, cluster, **rack, **options)))[near] == 1.0
    shares = served(cluster, lambda: scan(read(spark, cluster, readFrom="any", **options)))
    assert all(0.2 < share < 0.5 for share in shares.values()), f"replicas are read in turn: {shares}"


@pytest.mark.long
@pytest.mark.parametrize("what", ["kill", "pause"])
def test_broker_that_is_lost_in_mid_scan_costs_neither_rows_nor_tasks(
    spark: SparkSession, cluster: Cluster, folder: Path, what: str
) -> None:
    """Two of the tasks read from the leader when it is lost, and the others have yet to begin."""
    lost, marks = leader(cluster), folder / "marks"
    marks.mkdir()

    def slowly(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Leaves a mark for each batch that has come."""
        import uuid

        for batch in batches:
            (marks / uuid.uuid4().hex).touch()
            time.sleep(0.1)
            yield batch

    own = spark.newSession()
    own.conf.set(
        "spark.sql.execution.arrow.maxRecordsPerBatch", "2000"
    )  # so that little is on its way between processes
    frame = read(own, cluster, readFrom="leader", minPartitions="6")
    assert frame.rdd.getNumPartitions() >= 6
    slow = frame.mapInArrow(slowly, frame.schema)
    found: dict[str, int] = {}
    reading = Thread(target=lambda: found.update(exactly(slow)))
    before = lost.metrics()[f'natslog_sent_bytes_total{{stream="{STREAM}"}}']
    reading.start()
    eventually(lambda: len(list(marks.iterdir())) >= 2, 120, "both tasks have begun")
    sent = lost.metrics()[f'natslog_sent_bytes_total{{stream="{STREAM}"}}'] - before
    getattr(lost, what)()
    assert 0 < sent < 0.7 * ROWS * VALUE_BYTES, "it was lost in the middle"
    reading.join(240)
    assert found == ALL_ROWS


@pytest.mark.long
def test_streaming_query_survives_the_loss_of_its_leader(spark: SparkSession, cluster: Cluster, folder: Path) -> None:
    servers = ",".join(broker.url for broker in cluster.brokers)
    options = {"servers": servers, "stream": STREAM, "maxOffsetsPerTrigger": "20000", "fetchTimeout": "5s"}
    frame = spark.readStream.format("natslog").options(**options).load()
    writer = frame.writeStream.format("parquet").option("path", str(folder / "out"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    try:
        eventually(lambda: query.lastProgress is not None, 120, "the first batch is through")
        leader(cluster).kill()
        assert query.isActive
        assert query.awaitTermination(240), "the query ends when all is read"
    finally:
        query.stop()
    assert [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]] == [20_000] * (ROWS // 20_000)
    assert exactly(spark.read.parquet(str(folder / "out"))) == ALL_ROWS
