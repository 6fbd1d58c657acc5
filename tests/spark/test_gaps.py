"""A stream from which messages were removed: Spark reads the others, in batches and in micro-batches, without loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from natslog.client import NatslogClient
from tests.gaps import remove_offsets
from tests.harness import BrokerProcess, publish_acked, running

pytestmark = pytest.mark.spark
REMOVED = {0, 3, *range(10, 17), 30, 39}


@pytest.mark.long
def test_removed_messages_are_no_loss(spark: SparkSession, tmp_path: Path) -> None:
    with running(tmp_path) as (nats, broker):
        with broker.client() as client:
            client.create_stream("s", "a")
        for first in range(0, 40, 5):
            publish_acked(nats.url, "a", [b"%d" % at for at in range(first, first + 5)])
        broker.terminate()
        (active,) = broker.folder.glob("streams/[!_]*/*.active")
        remove_offsets(active, REMOVED)
        broker.start()
        options: dict[str, Any] = {"servers": broker.url, "stream": "s", "maxRecordsPerPartition": 7}
        left = [at for at in range(40) if at not in REMOVED]
        frame = spark.read.format("natslog").options(**options).load()
        assert sorted(row["offset"] for row in frame.collect()) == left
        some = spark.read.format("natslog").options(**options, columns="value").load()
        assert sorted(int(bytes(row["value"])) for row in some.collect()) == left
        stream = spark.readStream.format("natslog").options(**options, maxOffsetsPerTrigger=9).load()
        query = (
            stream.writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        assert query.exception() is None
        assert sorted(row["offset"] for row in spark.read.parquet(str(tmp_path / "out")).collect()) == left


def test_limits_count_messages_that_exist(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    """One message that stays, and one that is replaced all the time: a gap costs no batch and no task."""
    client.create_stream(name, f"{name}.>", max_messages_per_subject=1)
    publish_acked(nats_url, f"{name}.pinned", [b"x"])
    publish_acked(nats_url, f"{name}.hot", [b"x"] * 1000)
    options = {"servers": broker.url, "stream": name}
    frame = spark.read.format("natslog").options(**options, maxRecordsPerPartition=100).load()
    assert frame.rdd.getNumPartitions() == 1
    assert sorted(row["offset"] for row in frame.collect()) == [0, 1000]
    stream = spark.readStream.format("natslog").options(**options, maxOffsetsPerTrigger=10).load()
    writer = stream.writeStream.format("parquet").option("path", str(folder / "out"))
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    assert sorted(row["offset"] for row in spark.read.parquet(str(folder / "out")).collect()) == [0, 1000]
    (batch,) = [one for one in (folder / "checkpoint" / "offsets").iterdir() if one.name.isdecimal()]
    assert json.loads(batch.read_text().splitlines()[-1])[name]["offset"] == 1001
