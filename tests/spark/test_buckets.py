"""Key-value buckets as tables in Spark: the bucket, with `view=latest`, and its history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, eventually, with_nats

pytestmark = pytest.mark.spark


async def _filled(connection: Any) -> None:
    """With nats-py, as a service has it."""
    context = connection.jetstream()
    bucket = await context.create_key_value(bucket="settings", history=5)
    for at in range(6):
        await bucket.put(f"eu.{at % 3}", b'{"n": %d}' % at)
    await bucket.put("us.1", b"")
    await bucket.delete("eu.0")
    await bucket.purge("eu.1")


@pytest.mark.long
def test_bucket_is_a_table_with_its_latest_view_and_a_history_without(spark: SparkSession, tmp_path: Path) -> None:
    server = NatsServer(0, tmp_path / "nats.log").start()
    broker = BrokerProcess(tmp_path / "broker", server.url, nats_leaf_url=server.leaf_url).start()
    try:
        eventually(lambda: "serving the JetStream API" in broker.output(), what="the API is served")
        with_nats(server.url, _filled)

        def read(**more: Any) -> DataFrame:
            return spark.read.format("natslog").options(servers=broker.url, bucket="settings", **more).load()

        def rows(frame: DataFrame) -> list[Any]:
            chosen = frame.select("key", "revision", "operation", "value").orderBy("revision").collect()
            return [(row["key"], row["revision"], row["operation"], bytes(row["value"])) for row in chosen]

        table = read(view="latest")
        assert table.columns == ["key", "revision", "timestamp", "operation", "value"]
        assert dict(table.dtypes)["key"] == "string"
        kept = [("eu.2", 6, "PUT", b'{"n": 5}'), ("us.1", 7, "PUT", b"")]
        deleted = [("eu.0", 8, "DEL", b""), ("eu.1", 9, "PURGE", b"")]
        assert rows(table) == kept
        assert rows(read(view="latest", tombstones="true")) == [*kept, *deleted]
        history = rows(read())
        assert [row[1] for row in history] == [1, 3, 4, 6, 7, 8, 9], "the purge removed what was below it"
        assert history[-2:] == deleted
        assert [row["revision"] for row in read(view="latest", columns="revision").collect()] == [6, 7]
        assert read(view="latest", subjectFilter="$KV.settings.us.*").select("key").collect()[0][0] == "us.1"
        typed = read(view="latest", payloadFormat="json", payloadSchema="n INT").orderBy("revision").collect()
        assert [(row["key"], row["n"]) for row in typed] == [("eu.2", 5), ("us.1", None)]
        assert read(view="latest", includeHeaders="true").columns[-1] == "headers"
        out = str(tmp_path / "out")
        stream = spark.readStream.format("natslog").options(servers=broker.url, bucket="settings").load()
        query = (
            stream.writeStream.format("parquet")
            .option("path", out)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
        assert rows(spark.read.parquet(out)) == history
        for wrong, why in (
            ({"tombstones": "true"}, "requires bucket and view=latest"),
            ({"stream": "x"}, "clash"),
            ({"subjectFilter": "a.>"}, "has to begin with"),
            ({"columns": "offset"}, "unknown column"),
        ):
            with pytest.raises(Exception, match=why):
                read(**wrong).count()
    finally:
        broker.kill()
        server.stop()
