"""Spark reads what is visible, and the latest view of a stream as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.harness import publish_acked, running

pytestmark = pytest.mark.spark


@pytest.mark.long
def test_the_latest_view_is_the_table_side_of_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    with running(tmp_path) as (nats, broker):
        client = broker.client()
        client.create_stream("s", "a.>", compact=True)
        for at in range(60):
            publish_acked(nats.url, f"a.{at % 7}", [b"%d" % at], {"Natslog-Key": f"k{at % 5}"})
        options: dict[str, Any] = {"servers": broker.url, "stream": "s", "minPartitions": 3}

        def read(**more: str) -> DataFrame:
            return spark.read.format("natslog").options(**options, **more).load()

        table = read(view="latest").select("key", "value").collect()
        assert {(bytes(row["key"]), bytes(row["value"])) for row in table} == {
            (b"k%d" % (at % 5), b"%d" % at) for at in range(55, 60)
        }
        assert len(table) == 5
        client.delete_message("s", 59)
        assert read(view="latest").count() == 4
        assert read().count() == 4
        with pytest.raises(Exception, match="must be latest"):
            read(view="newest").count()
        with pytest.raises(Exception, match="clash"):
            read(view="latest", endingOffsets='{"s": 7}').count()
        with pytest.raises(Exception, match="batch reads"):
            spark.readStream.format("natslog").options(**options, view="latest").load().writeStream.format(
                "noop"
            ).option("checkpointLocation", str(tmp_path / "c")).start().awaitTermination(30)


@pytest.mark.long
def test_a_streaming_query_passes_over_removed_messages(spark: SparkSession, tmp_path: Path) -> None:
    with running(tmp_path) as (nats, broker):
        client = broker.client()
        client.create_stream("s", "a.>", max_messages_per_subject=2)
        for first in range(0, 40, 4):
            publish_acked(nats.url, f"a.{first % 3}", [b"%d" % at for at in range(first, first + 4)])
        client.purge("s", subject="a.1")
        left = [int(one) for batch in client.read("s") for one in batch.column("value").to_pylist()]
        assert 0 < len(left) <= 4
        stream = spark.readStream.format("natslog").options(servers=broker.url, stream="s", maxOffsetsPerTrigger=9)
        query = (
            stream.load()
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        assert query.exception() is None
        rows = spark.read.parquet(str(tmp_path / "out")).collect()
        assert sorted(int(bytes(row["value"])) for row in rows) == left


def _written(frame: DataFrame, **options: str) -> None:
    frame.write.format("natslog").mode("append").options(**options).save()


@pytest.mark.long
@pytest.mark.parametrize("path", ["nats", *(pytest.param(one, marks=pytest.mark.long) for one in ("envelope", "http"))])
def test_null_values_are_written_as_tombstones(path: str, spark: SparkSession, tmp_path: Path) -> None:
    with running(tmp_path) as (nats, broker):
        broker.client().create_stream("s", "a.b", compact=True)
        to_nats = {"natsServers": nats.url, "servers": broker.url, "subject": "a.b"}
        to: dict[str, str] = {"path": "http", "servers": broker.url, "stream": "s"} if path == "http" else to_nats
        to |= {"envelope": "true"} if path == "envelope" else {}
        _written(
            spark.sql("select concat('k', id) as key, cast(id as string) as value from range(6)").coalesce(1), **to
        )
        changed = "select concat('k', id) as key, if(id % 2 = 0, null, 'new') as value from range(4)"
        with pytest.raises(Exception, match="value is null"):
            _written(spark.sql(changed), **to)
        _written(spark.sql(changed).coalesce(1), **to, tombstones="true")
        with pytest.raises(Exception, match="value is null.*row"):
            _written(
                spark.sql("select cast(null as string) as key, cast(null as string) as value"), **to, tombstones="true"
            )
        with pytest.raises(Exception, match="requires a column key"):
            _written(spark.sql("select 'x' as value"), **to, tombstones="true")

        def read(**more: str) -> dict[str, tuple[bytes, bool]]:
            frame = spark.read.format("natslog").options(servers=broker.url, stream="s", includeHeaders="true", **more)
            rows = frame.load().select("key", "value", "headers").collect()
            marks = [any(one["key"] == "Natslog-Tombstone" for one in row["headers"] or []) for row in rows]
            return {
                bytes(row["key"]).decode(): (bytes(row["value"]), mark) for row, mark in zip(rows, marks, strict=True)
            }

        kept = {"k1": (b"new", False), "k3": (b"new", False), "k4": (b"4", False), "k5": (b"5", False)}
        assert read(view="latest") == kept
        assert read() == kept | {"k0": (b"", True), "k2": (b"", True)}
