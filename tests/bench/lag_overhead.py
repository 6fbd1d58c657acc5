"""What it costs a query to report its lag: micro-batches a second with and without, always behind, so always asked.

A report takes a hundredth of a micro-batch, less than the batches differ from each other: so it is also timed alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from natslog.nats_server import NatsServer
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.schema import spark_schema
from pyspark_natslog.source.watched_reader import WatchedStreamReader
from tests.bench.pairs import Comparison, compare
from tests.bench.sides import STREAM, natslog_side, raw_publish, scratch
from tests.bench.spark_session import spark_session
from tests.harness import BrokerProcess, eventually

_BATCHES = 60
_ASKED = 500


def overhead(pairs: int) -> list[Comparison]:
    with natslog_side() as (server, broker), scratch() as folder, spark_session() as spark:
        rows = _fill(server, broker)

        def batches_per_second(lag: str) -> float:
            return _batches_per_second(spark, broker.url, rows, folder, lag=lag)

        batches_per_second("true")  # Spark's own warm-up
        found = compare(
            "micro-batches, their lag reported",
            "batches/s",
            0.9,
            ours=lambda: batches_per_second("true"),
            peer="the same with lag=false",
            theirs=lambda: batches_per_second("false"),
            pairs=pairs,
        )
        found.notes["rows a batch"] = -(-rows // _BATCHES)
        report_ms = _report_ms(broker.url)
    alone = Comparison("a report of lag alone", "ms", 5.0, ours=[report_ms["behind"]], is_bound=True)
    alone.notes = report_ms
    return [found, alone]


def _fill(server: NatsServer, broker: BrokerProcess) -> int:
    raw_publish(server, "acked", bytes=128, window=1000, seconds=2.0)
    eventually(lambda: broker.metrics()["natslog_uncommitted_bytes"] == 0, 60, "everything is committed")
    return int(broker.client().stream(STREAM)["high_watermark"])


def _batches_per_second(spark: SparkSession, url: str, rows: int, folder: Path, **options: str) -> float:
    source = spark.readStream.format("natslog").options(servers=url, stream=STREAM, **options)
    writer = source.option("maxOffsetsPerTrigger", str(-(-rows // _BATCHES))).load().writeStream.format("noop")
    writer = writer.option("checkpointLocation", str(folder / f"checkpoint-{time.monotonic_ns()}"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    taken_ms = [one.batchDuration for one in query.recentProgress if one.numInputRows]
    assert len(taken_ms) >= _BATCHES - 1, f"there were {len(taken_ms)} batches"
    return 1000 / statistics.median(taken_ms[5:])  # the first ones compile


def _report_ms(url: str) -> dict[str, float]:
    """Median of a report alone: where something waits, and where nothing does."""
    given = {"servers": url, "stream": STREAM, "maxOffsetsPerTrigger": "100"}
    parsed = SourceOptions.parse(given, streaming=True)
    reader = WatchedStreamReader(parsed, spark_schema(parsed.selected_columns()))
    start, found = reader.initialOffset(), {}
    for name, limit in (("behind", reader.getDefaultReadLimit()), ("nothing behind", ReadAllAvailable())):
        reader.latestOffset(start, limit)
        found[name] = statistics.median(_taken_ms(reader.reportLatestOffset) for _ in range(_ASKED))
    reader.stop()
    return found


def _taken_ms(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000
