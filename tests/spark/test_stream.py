"""`spark.readStream.format("natslog")` in a real Spark: checkpoints, limits, restarts, loss."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from natslog.client import NatslogClient
from tests.harness import BrokerProcess, eventually, publish_acked, running, with_nats

pytestmark = pytest.mark.spark

DRIVER_KILLS = int(os.environ.get("NATSLOG_TEST_DRIVER_KILLS", "3"))  # of the long one
WITHIN_S = 200.0  # a Spark that starts beside another one, on a machine that does other things, too
LOOK_EVERY_S = 0.3


def start(
    spark: SparkSession, broker: BrokerProcess, stream: str, folder: Path, available_now: bool = True, **options: Any
) -> StreamingQuery:
    """A query from a stream to Parquet."""
    source = spark.readStream.format("natslog").options(**{"servers": broker.url, "stream": stream} | options).load()
    writer = source.writeStream.format("parquet").option("path", str(folder / "out"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    trigger = {"availableNow": True} if available_now else {"processingTime": "200 milliseconds"}
    return writer.trigger(**trigger).start()


def drain(spark: SparkSession, broker: BrokerProcess, stream: str, folder: Path, **options: Any) -> StreamingQuery:
    query = start(spark, broker, stream, folder, **options)
    query.awaitTermination()
    return query


def offsets(spark: SparkSession, folder: Path) -> list[int]:
    """What the query has written and committed."""
    if not (folder / "out" / "_spark_metadata").exists():
        return []
    return sorted(row["offset"] for row in spark.read.schema("offset long").parquet(str(folder / "out")).collect())


def fill(client: NatslogClient, nats_url: str, stream: str, count: int, size: int = 10) -> None:
    values = [b"%d" % at + b"." * size for at in range(count)]
    for low in range(0, count, 500):
        publish_acked(nats_url, stream, values[low : low + 500])


@pytest.fixture
def stream(client: NatslogClient, name: str) -> str:
    client.create_stream(name, name)
    return name


@pytest.mark.long
def test_available_now_honours_the_limit_and_stops_at_its_target(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str, folder: Path
) -> None:
    fill(client, nats_url, stream, 100)
    query = drain(spark, broker, stream, folder, maxOffsetsPerTrigger="30")
    rows = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    assert rows == [30, 30, 30, 10]
    assert offsets(spark, folder) == list(range(100))


@pytest.mark.long
def test_offsets_in_the_checkpoint_are_half_open_stable_json_with_the_streams_id(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str, folder: Path
) -> None:
    fill(client, nats_url, stream, 10)
    drain(spark, broker, stream, folder, maxOffsetsPerTrigger="5")
    logged = [(folder / "checkpoint" / "offsets" / str(batch)).read_text().splitlines()[-1] for batch in (0, 1)]
    stream_id = client.stream(stream)["id"]
    assert [json.loads(line) for line in logged] == [{stream: {"id": stream_id, "offset": at}} for at in (5, 10)]


def test_restart_from_the_checkpoint_goes_on_where_it_was(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str, folder: Path
) -> None:
    fill(client, nats_url, stream, 40)
    drain(spark, broker, stream, folder)
    drain(spark, broker, stream, folder)  # nothing new
    fill(client, nats_url, stream, 25)
    drain(spark, broker, stream, folder, maxOffsetsPerTrigger="10")
    assert offsets(spark, folder) == list(range(65))


def test_crash_in_batch_zero_repeats_it_exactly(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str, folder: Path
) -> None:
    """Batch 0 was planned and logged, never committed; more came since: the batch has the same range again."""
    fill(client, nats_url, stream, 20)
    drain(spark, broker, stream, folder)
    for part in ("commits/0", "commits/.0.crc"):
        (folder / "checkpoint" / part).unlink()
    for path in (folder / "out").rglob("*"):
        if path.is_file():
            path.unlink()
    fill(client, nats_url, stream, 20)
    query = drain(spark, broker, stream, folder)
    rows = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    assert rows == [20, 20]
    assert offsets(spark, folder) == list(range(40))


@pytest.mark.long
def test_starting_latest_reads_only_what_comes(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str, folder: Path
) -> None:
    fill(client, nats_url, stream, 10)
    query = start(spark, broker, stream, folder, available_now=False, startingOffsets="latest")
    try:
        eventually(lambda: query.lastProgress is not None, 60)
        fill(client, nats_url, stream, 7)
        eventually(lambda: len(offsets(spark, folder)) == 7, WITHIN_S, every_s=LOOK_EVERY_S)
    finally:
        query.stop()
    assert offsets(spark, folder) == list(range(10, 17))


@pytest.mark.long
def test_ending_options_are_for_batch_reads(
    spark: SparkSession, broker: BrokerProcess, stream: str, folder: Path
) -> None:
    with pytest.raises(Exception, match="endingOffsets is for batch reads"):
        drain(spark, broker, stream, folder, endingOffsets="latest")


@pytest.mark.long
def test_deleted_and_recreated_stream_fails_the_query_or_is_accepted(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str, folder: Path
) -> None:
    fill(client, nats_url, stream, 10)
    query = start(spark, broker, stream, folder, available_now=False)
    eventually(lambda: len(offsets(spark, folder)) == 10, WITHIN_S, every_s=LOOK_EVERY_S)
    client.delete_stream(stream)
    client.create_stream(stream, stream)
    fill(client, nats_url, stream, 4)
    with pytest.raises(Exception, match="deleted and created again|was deleted"):
        query.awaitTermination(60)
    with pytest.raises(Exception, match="deleted and created again.*failOnDataLoss"):
        drain(spark, broker, stream, folder)
    drain(spark, broker, stream, folder, failOnDataLoss="false")
    assert offsets(spark, folder) == sorted([*range(10), *range(4)])


def publish_one_by_one(nats_url: str, stream: str, count: int) -> None:
    """Each message its own commit, so that segments roll exactly where their row limit is."""

    async def work(connection: Any) -> None:
        for at in range(count):
            await connection.request(stream, b"%d" % at, timeout=30)

    with_nats(nats_url, work)


@pytest.mark.long
def test_retention_beyond_the_checkpoint_is_loss_and_exactly_at_it_is_none(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    client.create_stream(name, name, max_messages=80)  # segments of ten messages
    publish_one_by_one(nats_url, name, 30)
    exact, late = folder / "exact", folder / "late"
    for position in (exact, late):
        drain(spark, broker, name, position)
    publish_one_by_one(nats_url, name, 80)
    eventually(lambda: client.stream(name)["log_start_offset"] == 30, what="retention reaches the checkpointed offset")
    drain(spark, broker, name, exact)
    assert offsets(spark, exact) == list(range(110))
    publish_one_by_one(nats_url, name, 10)
    eventually(lambda: client.stream(name)["log_start_offset"] == 40, what="retention goes beyond it")
    with pytest.raises(Exception, match="offsets 30 to 39 are lost: retention or a purge removed.*failOnDataLoss"):
        drain(spark, broker, name, late)
    drain(spark, broker, name, late, failOnDataLoss="false")
    assert offsets(spark, late) == [*range(30), *range(40, 120)]


@pytest.mark.long
@pytest.mark.parametrize("restarts", [1, pytest.param(3, marks=pytest.mark.long)])
def test_broker_restarted_under_a_running_query_the_query_goes_on(
    spark: SparkSession, tmp_path: Path, restarts: int
) -> None:
    total = 100 * (restarts + 1)
    with running(tmp_path / "own") as (server, broker):
        client = broker.client()
        client.create_stream("orders", "orders")
        fill(client, server.url, "orders", 100)
        query = start(spark, broker, "orders", tmp_path, available_now=False, maxOffsetsPerTrigger="50")
        try:
            for cycle in range(1, restarts + 1):
                eventually(
                    lambda done=100 * cycle: len(offsets(spark, tmp_path)) == done, WITHIN_S, every_s=LOOK_EVERY_S
                )
                broker.kill() if cycle % 2 else broker.terminate()
                time.sleep(1.5)  # the query asks into the void meanwhile
                broker.start()
                fill(client, server.url, "orders", 100)
            eventually(lambda: len(offsets(spark, tmp_path)) == total, WITHIN_S, every_s=LOOK_EVERY_S)
            assert query.isActive
        finally:
            query.stop()
    assert offsets(spark, tmp_path) == list(range(total))


DRIVER = """
import sys
from pyspark.sql import SparkSession
url, stream, folder = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
source = spark.readStream.format("natslog").options(servers=url, stream=stream, maxOffsetsPerTrigger=700).load()
writer = source.writeStream.format("parquet").option("path", folder + "/out")
query = writer.option("checkpointLocation", folder + "/checkpoint").trigger(processingTime="0 seconds").start()
query.awaitTermination()
"""


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("kills", [DRIVER_KILLS])
def test_driver_killed_in_mid_run_and_restarted_writes_every_offset_exactly_once(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    stream: str,
    tmp_path: Path,
    kills: int,
) -> None:
    total, chance = 1500 * (kills + 1), random.Random(7)
    command = [sys.executable, "-c", DRIVER, broker.url, stream, str(tmp_path)]
    for kill in range(kills + 1):
        fill(client, nats_url, stream, 1500)
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            before = batches(tmp_path)
            if kill < kills:
                eventually(lambda before=before: batches(tmp_path) > before, WITHIN_S, "the query makes progress")
                time.sleep(chance.random() * 0.8)
            else:
                eventually(
                    lambda: len(offsets(spark, tmp_path)) == total,
                    WITHIN_S,
                    "the query drains the stream",
                    every_s=LOOK_EVERY_S,
                )
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    assert offsets(spark, tmp_path) == list(range(total))


def batches(folder: Path) -> int:
    """How many batches the query has logged offsets of."""
    logged = folder / "checkpoint" / "offsets"
    return len([path for path in logged.iterdir() if path.name.isdecimal()]) if logged.exists() else 0
