"""Order per key over many streams: NATS' `partition()` mapping into four streams, read by `streamPattern`.

The mapping is the one that docs/SPARK.md shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from natslog.client.publisher import Publisher, Rows
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, eventually, running
from tests.pages import page_blocks

pytestmark = [pytest.mark.spark, pytest.mark.long]

STREAMS, PUBLISHERS, KEYS, ROUNDS, ROUND = 4, 3, 8, 12, 5
EACH = ROUNDS * ROUND  # messages of one key
ALL = PUBLISHERS * KEYS * EACH


@pytest.fixture
def partitioned(folder: Path) -> Iterator[tuple[NatsServer, BrokerProcess]]:
    """A NATS server with the mapping, a broker, and a stream for each partition."""
    config = folder / "nats.conf"
    config.write_text(page_blocks("SPARK.md")["Order per key over many streams"].text)
    with running(folder, nats_arguments=("-c", str(config))) as (server, broker):
        for number in range(STREAMS):
            broker.client().create_stream(f"orders-{number}", f"orders.{number}.*")
        yield server, broker


def publish(url: str, publisher: int) -> None:
    """Counts up for each of the publisher's own keys, all keys mixed."""
    keys = [f"customer-{publisher}-{number}" for number in range(KEYS)]
    with Publisher(url) as connection:
        for start in range(0, EACH, ROUND):
            rows = [(key, at) for at in range(start, start + ROUND) for key in keys]
            subjects = pa.array([f"orders.{key}" for key, _ in rows])
            connection.publish(Rows(subjects, pa.array([b"%d" % at for _, at in rows])), "stored")


Row = tuple[str, str, int]
"""Key, stream, and the number that the key's publisher had counted to."""


class Handled:
    """What each of the query's batches had, in order by key. A batch that is repeated takes the place of itself."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Row]] = {}

    def take(self, batch: DataFrame, number: int) -> None:
        customer = F.element_at(F.split("subject", r"\."), -1).alias("customer")
        rows = batch.select(customer, "stream", "offset", F.col("value").cast("string").cast("int").alias("number"))
        ordered = rows.repartition("customer").sortWithinPartitions("customer", "offset")
        self.batches[number] = [(row["customer"], row["stream"], row["number"]) for row in ordered.collect()]

    @property
    def rows(self) -> list[Row]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]


def start(spark: SparkSession, broker: BrokerProcess, handled: Handled, folder: Path) -> StreamingQuery:
    options = {"servers": broker.url, "streamPattern": "orders-*", "maxOffsetsPerTrigger": "150", "minPartitions": "6"}
    orders = spark.readStream.format("natslog").options(**options).load()
    writer = orders.writeStream.foreachBatch(handled.take).option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(processingTime="100 milliseconds").start()


def test_order_per_key_holds_over_many_streams_publishers_and_a_restarted_query(
    spark: SparkSession, partitioned: tuple[NatsServer, BrokerProcess], folder: Path
) -> None:
    nats, broker = partitioned
    handled = Handled()
    query = start(spark, broker, handled, folder)
    with ThreadPoolExecutor(PUBLISHERS) as threads:
        publishing = [threads.submit(publish, nats.url, number) for number in range(PUBLISHERS)]
        eventually(lambda: len(handled.batches) > 2, 120, "some batches are handled")
        query.stop()
        for one in publishing:
            one.result()
    assert len(handled.rows) < ALL, "the second query has something to do"
    query = start(spark, broker, handled, folder)
    query.processAllAvailable()
    query.stop()
    numbers: dict[str, list[int]] = defaultdict(list)
    streams: dict[str, set[str]] = defaultdict(set)
    for customer, stream, number in handled.rows:
        numbers[customer].append(number)
        streams[customer].add(stream)
    customers = [f"customer-{publisher}-{number}" for publisher in range(PUBLISHERS) for number in range(KEYS)]
    assert numbers == {customer: list(range(EACH)) for customer in customers}
    assert all(len(one) == 1 for one in streams.values()), "each key is in one stream"
    assert set.union(*streams.values()) == {f"orders-{number}" for number in range(STREAMS)}
