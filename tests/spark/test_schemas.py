"""Schemas that are inferred, members that they do not name, and headers as a map, in a real Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from natslog.client import NatslogClient
from tests.harness import BrokerProcess, publish_acked, with_nats

pytestmark = pytest.mark.spark

RUN_WITHIN_S = 120


@pytest.fixture
def readings(client: NatslogClient, nats_url: str, name: str) -> str:
    """Ten JSON objects of two versions."""
    client.create_stream(name, f"{name}.>")
    documents = [{"id": at, "at": {"lat": 1.5}} for at in range(8)]
    later = [{"id": at, "at": {"lat": 2, "lon": 3}, "unit": "C"} for at in range(8, 10)]
    publish_acked(nats_url, f"{name}.new", [json.dumps(one).encode() for one in [*documents, *later]])
    return name


@pytest.mark.long
def test_schema_is_inferred_once_and_read_in_batches_and_streams(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, readings: str, folder: Path
) -> None:
    options = {"servers": broker.url, "stream": readings, "payloadFormat": "json", "payloadSchema": "infer"}
    frame = spark.read.format("natslog").options(**options, columns="offset,id,at,unit").load()
    assert (
        frame.drop("offset").schema.simpleString() == "struct<id:bigint,at:struct<lat:double,lon:bigint>,unit:string>"
    )
    publish_acked(nats_url, f"{readings}.new", [b'{"id": 10, "colour": "red"}'])
    last = frame.orderBy("offset").collect()[-2:]
    assert [(row["id"], row["at"], row["unit"]) for row in last] == [(9, (2.0, 3), "C"), (10, None, None)]
    assert frame.select("offset").count() == 11, "without columns of the payload"
    stream = spark.readStream.format("natslog").options(**options, payloadColumn="payload").load()
    assert "colour" in stream.schema["payload"].dataType.fieldNames()  # type: ignore[attr-defined]
    writer = stream.select("offset", "payload.*").writeStream.format("parquet").option("path", str(folder / "rows"))
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    assert query.awaitTermination(RUN_WITHIN_S)
    assert spark.read.parquet(str(folder / "rows")).filter("colour = 'red'").count() == 1


def test_stream_without_objects_has_no_schema(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"hello", b"[1]"])
    options = {"servers": broker.url, "stream": name, "payloadFormat": "json", "payloadSchema": "infer"}
    with pytest.raises(Exception, match="has no message with a JSON object to infer a schema from: give"):
        spark.read.format("natslog").options(**options).load()
    with pytest.raises(Exception, match="infer requires payloadFormat json"):
        spark.read.format("natslog").options(**options | {"payloadFormat": "arrow"}).load()


@pytest.mark.long
def test_members_beside_the_schema_are_rescued_and_counted_in_the_progress(
    spark: SparkSession, broker: BrokerProcess, readings: str, folder: Path
) -> None:
    options = {"servers": broker.url, "stream": readings, "payloadFormat": "json", "rescuedColumn": "_rescued"}
    options["payloadSchema"] = "id BIGINT, at STRUCT<lat: DOUBLE>"
    rows = spark.read.format("natslog").options(**options).load().orderBy("offset").collect()
    assert [row["_rescued"] for row in rows] == [None] * 8 + ['{"at":{"lon": 3},"unit":"C"}'.replace(": ", ":")] * 2
    stream = spark.readStream.format("natslog").options(**options).load().observe("unnamed", _count("_rescued"))
    query = stream.writeStream.format("noop").trigger(availableNow=True).start()
    assert query.awaitTermination(RUN_WITHIN_S)
    observed = [one.observedMetrics["unnamed"]["rows"] for one in query.recentProgress if one.numInputRows]
    assert observed == [2]


def _count(column: str):  # type: ignore[no-untyped-def]
    from pyspark.sql.functions import col, count

    return count(col(column)).alias("rows")


@pytest.mark.long
def test_headers_as_a_map_are_read_and_written_again(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, f"{name}.>")

    async def work(connection) -> None:  # type: ignore[no-untyped-def]
        await connection.request(f"{name}.a", b"1", headers={"trace": "x", "lang": "de"}, timeout=30)
        await connection.request(f"{name}.a", b"2", timeout=30)

    with_nats(nats_url, work)
    options = {"servers": broker.url, "stream": name, "headersAs": "map"}
    frame = spark.read.format("natslog").options(**options).load().orderBy("offset")
    assert frame.schema["headers"].dataType.simpleString() == "map<string,string>"
    read = frame.selectExpr("offset", "headers['trace'] AS trace", "headers").collect()
    assert [row["trace"] for row in read] == ["x", None]
    assert read[0]["headers"] == {"trace": "x", "lang": "de"}
    writer = frame.selectExpr(f"'{name}.b' AS subject", "value", "headers").write.format("natslog")
    writer.options(servers=broker.url, natsServers=nats_url).mode("append").save()
    again = spark.read.format("natslog").options(**options, subjectFilter=f"{name}.b").load().orderBy("offset")
    assert [row["headers"]["trace"] if row["headers"] else None for row in again.collect()] == ["x", None]
    with pytest.raises(Exception, match="options includeHeaders and headersAs clash"):
        spark.read.format("natslog").options(**options, includeHeaders="false").load()
