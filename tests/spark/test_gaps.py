"""A stream from which messages were removed: Spark reads the others, in batches and in micro-batches, without loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.gaps import remove_offsets
from tests.harness import publish_acked, running

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
