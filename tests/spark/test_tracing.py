"""A trace from a message to the rows of Spark, and from a micro-batch through its tasks to the broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from natslog.nats_server import NatsServer
from pyspark_natslog import DefaultSource
from tests.harness import BrokerProcess, eventually, publish_acked, running, with_nats
from tests.otlp import Collector, Received, collecting

pytestmark = [pytest.mark.spark, pytest.mark.long]

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
EXPORTS = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
Traced = tuple[Collector, NatsServer, BrokerProcess, str]


@pytest.fixture(scope="module")
def traced(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """A collector, a broker, and a stream of 100 messages; processes of `natslog_traced` have variables of their own,
    those of the shared Spark have none.
    """

    class TracedSource(DefaultSource):
        @classmethod
        def name(cls) -> str:
            return "natslog_traced"

    with collecting() as collector:
        variables = EXPORTS | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        environment = spark.sparkContext.environment
        before = dict(environment)
        environment.update(variables)
        spark.dataSource.register(TracedSource)
        environment.clear()
        environment.update(before)
        with running(tmp_path_factory.mktemp("traced"), environment=variables) as (nats, broker):
            with broker.client() as client:
                client.create_stream("traced", "traced")
                with_nats(nats.url, publish_one)
                publish_acked(nats.url, "traced", [b"x"] * 99)
            yield collector, nats, broker, "traced"


async def publish_one(connection: Any) -> None:
    await connection.request("traced", b"x", headers={"traceparent": CONTEXT}, timeout=30)


def named(collector: Collector, name: str, service: str, count: int) -> list[Received]:
    def found() -> list[Received]:
        spans = [span for span in collector.named(name) if span.service == service]
        return spans if len(spans) >= count else []

    return eventually(found, what=f"{count} spans {name} of {service} in {collector.spans}")


def test_rows_have_the_trace_of_their_message_and_micro_batches_those_of_their_reads(
    spark: SparkSession, traced: Traced, tmp_path: Path
) -> None:
    collector, _, broker, stream = traced
    source = spark.readStream.format("natslog_traced").options(
        servers=broker.url, stream=stream, includeHeaders="true", maxOffsetsPerTrigger="60"
    )
    context = F.expr("get(filter(headers, one -> lower(one.key) = 'traceparent'), 0).value")
    rows = source.load().select("offset", F.split_part(context, F.lit("-"), F.lit(2)).alias("trace_id"))
    writer = rows.writeStream.format("memory").queryName("traced_rows").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    query.awaitTermination()
    found = spark.table("traced_rows").filter("trace_id is not null").collect()
    assert [tuple(row) for row in found] == [(0, CONTEXT.split("-")[1])]

    first, second = named(collector, "micro-batch", "natslog-spark", 2)
    assert [(one.kind, one.parent, one.attributes["messaging.batch.message_count"]) for one in (first, second)] == [
        (5, "", 60),
        (5, "", 40),
    ]
    assert first.attributes["natslog.stream"] == stream
    assert (second.attributes["natslog.first_offset"], second.attributes["natslog.last_offset"]) == (60, 99)
    tasks = named(collector, f"fetch {stream}", "natslog-spark", 2)
    assert [(task.trace_id, task.parent) for task in tasks] == [(one.trace_id, one.span_id) for one in (first, second)]
    assert [task.attributes["spark.streaming.batch.id"] for task in tasks] == [0, 1]
    assert {task.attributes["spark.streaming.query.id"] for task in tasks} == {str(query.id)}
    reads = named(collector, f"fetch {stream}", "natslog-broker", 2)
    assert [(read.trace_id, read.parent) for read in reads] == [(task.trace_id, task.span_id) for task in tasks]


@pytest.mark.parametrize("path", ["nats", "http"])
def test_span_of_the_sink_names_the_batch_that_it_writes(
    path: str, spark: SparkSession, traced: Traced, tmp_path: Path
) -> None:
    collector, nats, broker, stream = traced
    with broker.client() as client:
        client.create_stream(f"to-{path}", f"to-{path}")
    options = {"servers": broker.url, "natsServers": nats.url, "subject": f"to-{path}"}
    if path == "http":
        options = {"servers": broker.url, "stream": "to-http", "path": "http"}
    source = spark.readStream.format("natslog_traced").options(servers=broker.url, stream=stream).load("traced")
    writer = source.select("value").writeStream.format("natslog_traced").options(**options).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    query.awaitTermination()
    (span,) = [one for one in named(collector, "publish", "natslog-spark", 1) if stored_in(one) == f"to-{path}"]
    assert (span.attributes["natslog.first_offset"], span.attributes["natslog.last_offset"]) == (0, 99)
    if path == "nats":
        assert span.attributes["spark.streaming.query.id"] == str(query.id)
        assert span.attributes["spark.streaming.batch.id"] == 0
    else:
        assert (span.attributes["natslog.producer"], span.attributes["natslog.batch"]) == (str(query.id), 0)


def stored_in(span: Received) -> str:
    return str(span.attributes["natslog.stream"])


def test_tasks_of_a_batch_read_are_in_one_trace(spark: SparkSession, traced: Traced) -> None:
    collector, _, broker, stream = traced
    del collector.spans[:]
    options = {"servers": broker.url, "stream": stream, "minPartitions": "2"}
    assert spark.read.format("natslog_traced").options(**options).load().select("value").collect()
    (read,) = named(collector, "read", "natslog-spark", 1)
    tasks = named(collector, f"fetch {stream}", "natslog-spark", 2)
    assert {(task.trace_id, task.parent) for task in tasks} == {(read.trace_id, read.span_id)}
    assert (
        sum(task.attributes["natslog.last_offset"] + 1 - task.attributes["natslog.first_offset"] for task in tasks)
        == 100
    )
