"""An idle streaming query: few requests to the broker, and the next row is in the next batch."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from natslog.client import NatslogClient
from tests.harness import BrokerProcess, eventually, publish_acked

pytestmark = pytest.mark.spark

MOST_PER_S = 4


def requests_at(broker: BrokerProcess) -> int:
    counts = {
        name: count for name, count in broker.metrics().items() if name.startswith("natslog_http_requests_total{")
    }
    return int(sum(count for name, count in counts.items() if "/metrics" not in name))


@pytest.mark.long
@pytest.mark.parametrize("select", ["stream", pytest.param("streamPattern", marks=pytest.mark.long)])
def test_idle_query_sends_few_requests_and_a_row_is_in_its_next_batch(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    name: str,
    folder: Path,
    select: str,
) -> None:
    names = [f"{name}-{at}" for at in range(20)]
    for one in names:
        client.create_stream(one, one)
    publish_acked(nats_url, names[0], [b"first"])
    value = ",".join(names) if select == "stream" else f"{name}-*"
    source = spark.readStream.format("natslog").options(servers=broker.url, **{select: value}).load()
    sink = source.selectExpr("stream", "offset").writeStream.format("memory").queryName(f"idle_{name}")
    query = sink.option("checkpointLocation", str(folder)).start()
    try:
        query.processAllAvailable()
        eventually(lambda: query.status["message"] == "Waiting for data to arrive" or query.status["isTriggerActive"])
        before, began_s = requests_at(broker), time.monotonic()
        eventually(lambda: time.monotonic() - began_s > 5, within_s=30)
        sent, passed_s = requests_at(broker) - before, time.monotonic() - began_s
        assert 0 < sent <= MOST_PER_S * passed_s, f"{sent} requests in {passed_s:.1f} s"
        publish_acked(nats_url, names[7], [b"second"])
        query.processAllAvailable()
        rows = [(row["stream"], row["offset"]) for row in spark.table(f"idle_{name}").collect()]
        assert sorted(rows) == [(names[0], 0), (names[7], 0)]
        batches = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
        assert batches == [1, 1], "one batch for each row, none for the time between"
    finally:
        query.stop()
    assert query.exception() is None
