"""Ten queries that append over HTTP while every broker is restarted in turn: none of them ends, no row is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from tests.cluster_harness import running_cluster
from tests.harness import all_values, eventually

pytestmark = [pytest.mark.spark, pytest.mark.extended, pytest.mark.timeout(900)]

QUERIES = 10
ROUNDS = 2


class Feeding(threading.Thread):
    """Publishes numbered messages until it is told to stop."""

    def __init__(self, nats_url: str, subject: str) -> None:
        super().__init__(daemon=True)
        self._nats_url, self._subject = nats_url, subject
        self.stopping = threading.Event()
        self.count = 0

    def run(self) -> None:
        with Publisher(self._nats_url, ack_timeout_s=60) as publisher:
            while not self.stopping.is_set():
                texts = pa.array([str(number) for number in range(self.count, self.count + 20)])
                rows = Rows(pa.repeat(self._subject, len(texts)), texts.cast(pa.binary()), ids=texts)
                publisher.publish(rows, "stored")
                self.count += len(texts)
                time.sleep(0.5)


def started(spark: SparkSession, servers: str, target: str, checkpoint: Path) -> StreamingQuery:
    source = spark.readStream.format("natslog").options(servers=servers, stream="orders").load()
    writer = source.select("value").writeStream.format("natslog").options(path="http", servers=servers, stream=target)
    return writer.option("checkpointLocation", str(checkpoint)).trigger(processingTime="1 second").start()


def test_rolling_restart_ends_no_query(spark: SparkSession, folder: Path) -> None:
    with running_cluster(folder / "cluster") as cluster, cluster.client() as client:
        targets = [f"out-{number}" for number in range(QUERIES)]
        for name in ("orders", *targets):
            client.create_stream(name, name, replicas=3)
        servers = ",".join(broker.url for broker in cluster.brokers)
        queries = [started(spark, servers, target, folder / target) for target in targets]
        feeding = Feeding(cluster.nats_url, "orders")
        feeding.start()
        try:
            eventually(lambda: all(_rows(client, target) for target in targets), 120, "every query appends")
            for _ in range(ROUNDS):
                for broker in cluster.brokers:
                    before = feeding.count
                    broker.terminate()
                    broker.start()
                    cluster.wait_in_sync(120)
                    eventually(lambda before=before: feeding.count > before, 60, "messages come all the time")
                    assert [query.exception() for query in queries] == [None] * QUERIES
            feeding.stopping.set()
            feeding.join()
            eventually(lambda: all(_rows(client, target) >= feeding.count for target in targets), 120, "all is copied")
            assert all(query.isActive for query in queries)
        finally:
            feeding.stopping.set()
            for query in queries:
                query.stop()
        for target in targets:
            assert sorted(map(int, all_values(client, target))) == list(range(feeding.count)), target


def _rows(client: NatslogClient, stream: str) -> int:
    return int(client.position(stream)["high_watermark"])
