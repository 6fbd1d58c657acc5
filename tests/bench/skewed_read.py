"""One huge stream among small ones: cut into even tasks, beside a task a stream and beside streams of one size.

A task a stream is what Kafka's source makes of partitions unless `minPartitions` is given. Both sides read with the
same connector, so only the cutting differs.
"""

from __future__ import annotations

from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from natslog.client.publisher import Publisher, Rows
from natslog.nats_server import NatsServer
from tests.bench.pairs import Comparison, compare
from tests.bench.sides import natslog_side
from tests.bench.spark_scan import rows_per_second
from tests.bench.spark_session import spark_session
from tests.harness import BrokerProcess, eventually

_STREAMS = 20
_ROWS = 4_000_000
_HUGE_SHARE = 0.9
_ROW_BYTES = 128
_SENT_AT_ONCE = 20_000


def skewed(pairs: int) -> list[Comparison]:
    huge = int(_ROWS * _HUGE_SHARE)
    uneven = {f"uneven-{at}": huge if at == 0 else (_ROWS - huge) // (_STREAMS - 1) for at in range(_STREAMS)}
    even = {f"even-{at}": sum(uneven.values()) // _STREAMS for at in range(_STREAMS)}
    with natslog_side() as (server, broker), spark_session() as spark:
        for name, rows in (uneven | even).items():
            _fill(server, broker, name, rows)

        def read(pattern: str, rows: dict[str, int]) -> float:
            reader = spark.read.format("natslog").option("servers", broker.url).option("streamPattern", pattern)
            return rows_per_second(reader.load(), sum(rows.values()))

        def task_a_stream() -> float:
            return rows_per_second(_task_a_stream(spark, broker, list(uneven)), sum(uneven.values()))

        for _ in range(2):  # Spark's own warm-up
            read("uneven-*", uneven), task_a_stream()
        title = f"read of {_STREAMS} streams, one with {_HUGE_SHARE:.0%} of the rows"
        return [
            compare(
                title,
                "rows/s",
                1.0,
                ours=lambda: read("uneven-*", uneven),
                peer="the same in a task a stream, as Kafka's source cuts",
                theirs=task_a_stream,
                pairs=pairs,
            ),
            compare(
                title,
                "rows/s",
                0.8,
                ours=lambda: read("uneven-*", uneven),
                peer="as many rows in streams of one size",
                theirs=lambda: read("even-*", even),
                pairs=pairs,
            ),
        ]


def _fill(server: NatsServer, broker: BrokerProcess, name: str, rows: int) -> None:
    broker.client().create_stream(name, name)
    values = pa.array([b"x" * _ROW_BYTES] * _SENT_AT_ONCE)
    with Publisher(server.url, ack_timeout_s=60) as publisher:
        for start in range(0, rows, _SENT_AT_ONCE):
            part = values.slice(0, min(_SENT_AT_ONCE, rows - start))
            publisher.send(Rows(pa.array([name] * len(part)), part), "stored")
        publisher.wait_for_ack("stored")
    eventually(lambda: broker.client().stream(name)["high_watermark"] == rows, 60, f"{name} holds {rows} rows")


def _task_a_stream(spark: SparkSession, broker: BrokerProcess, names: list[str]) -> DataFrame:
    reader = spark.read.format("natslog").options(servers=broker.url, minPartitions="1", maxBytesPerPartition="8g")
    return reduce(DataFrame.union, [reader.option("stream", name).load() for name in names])
