"""The readers of this version with a broker of 0.2.0, which has no `/v1/plans`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, publish_acked
from tests.released import V0_2_0, use_release

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(900)]
ROWS = {"a": 90, "b": 30, "c": 1}


@pytest.fixture
def older(tmp_path: Path) -> Iterator[BrokerProcess]:
    server = NatsServer(0, tmp_path / "nats.log").start()
    broker = use_release(BrokerProcess(tmp_path / "data", server.url), V0_2_0)
    try:
        client = broker.start().client()
        for name, count in ROWS.items():
            client.create_stream(name, name)
            publish_acked(server.url, name, [b"x" * 100] * count)
        yield broker
    finally:
        broker.kill()
        server.stop()


def expected() -> list[tuple[str, int]]:
    return [(name, at) for name, count in ROWS.items() for at in range(count)]


def rows_of(frame: Any) -> list[tuple[str, int]]:
    return sorted((row["stream"], row["offset"]) for row in frame.select("stream", "offset").collect())


def test_reads_are_planned_by_positions_and_splits(spark: SparkSession, older: BrokerProcess) -> None:
    options = {"servers": older.url, "streamPattern": "*"}
    for limits, least, most in (
        ({}, 1, 1),
        ({"minPartitions": 6}, 6, 12),
        ({"maxRecordsPerPartition": 7}, 18, 40),
        ({"maxBytesPerPartition": 2000}, 3, 60),
    ):
        frame = spark.read.format("natslog").options(**options, **limits).load()
        assert rows_of(frame) == expected(), limits
        assert least <= frame.rdd.getNumPartitions() <= most, limits


@pytest.mark.parametrize(
    "limit", [{"maxOffsetsPerTrigger": 20}, {"maxBytesPerTrigger": 3000}, {"minPartitions": 3}], ids=str
)
def test_a_query_reads_every_row_once_within_its_limits(
    spark: SparkSession, older: BrokerProcess, tmp_path: Path, limit: dict[str, int]
) -> None:
    seen: list[tuple[int, list[Any]]] = []

    def note(batch: DataFrame, number: int) -> None:
        seen.append((number, sorted(batch.select("stream", "offset", F.spark_partition_id()).collect())))

    def drain() -> None:
        stream = spark.readStream.format("natslog").options(servers=older.url, streamPattern="*", **limit).load()
        writer = stream.writeStream.foreachBatch(note).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(240)
        assert query.exception() is None

    drain()
    rows = [len(batch) for _, batch in seen]
    if "maxOffsetsPerTrigger" in limit:
        assert max(rows) <= limit["maxOffsetsPerTrigger"]
        assert len(rows) <= 9
    if "maxBytesPerTrigger" in limit:
        assert 4 <= len(rows) <= 30
    assert sorted(tuple(row[:2]) for _, batch in seen for row in batch) == expected()
    offsets = sorted((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    positions = json.loads(offsets[-1].read_text().splitlines()[-1])
    assert any("tasks" in at for at in positions.values()) == ("minPartitions" in limit)
    for name in (offsets[-1].name, f".{offsets[-1].name}.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    drain()
    assert seen[-1] == seen[-2], "the repeated batch has the same rows in the same tasks"
