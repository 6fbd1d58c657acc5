"""A query goes on with its checkpoint on a stream that was restored in another cluster, and reads each message once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from natslog.backup.exporting import export_stream
from natslog.backup.importing import ImportOptions, checked_export, import_stream
from natslog.client import NatslogClient
from tests.harness import BrokerProcess, publish_acked, running

pytestmark = [pytest.mark.spark, pytest.mark.long]


def drain(spark: SparkSession, broker: BrokerProcess, folder: Path, **options: Any) -> None:
    source = spark.readStream.format("natslog").options(servers=broker.url, stream="s", **options).load()
    writer = source.writeStream.format("parquet").option("path", str(folder / "out"))
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination(120)


def values(spark: SparkSession, folder: Path) -> list[str]:
    return sorted(bytes(row["value"]).decode() for row in spark.read.parquet(str(folder / "out")).collect())


def names(letter: str, count: int) -> list[str]:
    return [f"{letter}{at:03}" for at in range(count)]


def publish(url: str, letter: str, count: int) -> None:
    publish_acked(url, "s", [name.encode() for name in names(letter, count)])


def restore(original: NatslogClient, restored: NatslogClient, folder: Path) -> None:
    export_stream(original, "s", folder)
    import_stream(restored, folder, checked_export(folder), "s", ImportOptions(resume=True))


def test_query_continues_on_the_restored_stream_exactly_once(spark: SparkSession, tmp_path: Path) -> None:
    with running(tmp_path / "a") as (nats, broker), running(tmp_path / "b") as (other_nats, other):
        with broker.client() as client, other.client() as there:
            client.create_stream("s", "s")
            publish(nats.url, "a", 40)
            drain(spark, broker, tmp_path)  # its checkpoint is below the fork
            publish(nats.url, "b", 30)
            restore(client, there, tmp_path / "x")
            publish(other_nats.url, "c", 20)
            drain(spark, other, tmp_path, maxOffsetsPerTrigger="17")
            assert values(spark, tmp_path) == names("a", 40) + names("b", 30) + names("c", 20)
            drain(spark, other, tmp_path)
            publish(other_nats.url, "d", 5)
            drain(spark, other, tmp_path)
            assert len(values(spark, tmp_path)) == 95


def test_batch_that_was_planned_before_is_repeated_on_the_restored_stream(spark: SparkSession, tmp_path: Path) -> None:
    """The query ended within a batch: its end is in the checkpoint, with the id of the original."""
    with running(tmp_path / "a") as (nats, broker), running(tmp_path / "b") as (_, other):
        with broker.client() as client, other.client() as there:
            client.create_stream("s", "s")
            publish(nats.url, "a", 40)
            drain(spark, broker, tmp_path, maxOffsetsPerTrigger="20")
            commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
            commits[-1].unlink()
            (commits[-1].parent / f".{commits[-1].name}.crc").unlink(missing_ok=True)
            restore(client, there, tmp_path / "x")
            drain(spark, other, tmp_path)
            assert values(spark, tmp_path) == names("a", 40)


@pytest.mark.parametrize("fail", ["true", "false"])
def test_query_that_is_beyond_the_fork_is_told_so(spark: SparkSession, tmp_path: Path, fail: str) -> None:
    with running(tmp_path / "a") as (nats, broker), running(tmp_path / "b") as (other_nats, other):
        with broker.client() as client, other.client() as there:
            client.create_stream("s", "s")
            publish(nats.url, "a", 40)
            restore(client, there, tmp_path / "x")
            publish(nats.url, "b", 10)
            drain(spark, broker, tmp_path)
            publish(other_nats.url, "c", 20)
            if fail == "true":
                with pytest.raises(StreamingQueryException, match="an export that ends at offset 40 .* up to 50"):
                    drain(spark, other, tmp_path)
                assert values(spark, tmp_path) == names("a", 40) + names("b", 10)
            else:
                drain(spark, other, tmp_path, failOnDataLoss="false")
                assert values(spark, tmp_path) == names("a", 40) + names("b", 10) + names("c", 20)
