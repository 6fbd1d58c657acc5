"""What it costs a query to report its lag: micro-batches a second with and without, always behind, so always asked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadMaxRows

from natslog.nats_server import NatsServer
from pyspark_natslog.schema import spark_schema
from pyspark_natslog.source_options import SourceOptions
from pyspark_natslog.watched_reader import WatchedStreamReader
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
            0.95,
            ours=lambda: batches_per_second("true"),
            peer="the same with lag=false",
            theirs=lambda: batches_per_second("false"),
            pairs=pairs,
        )
        found.notes["rows a batch"] = -(-rows // _BATCHES)
        found.notes["one report, ms"] = _report_ms(broker.url)
    return [found]


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
    parsed = SourceOptions.parse({"servers": url, "stream": STREAM}, streaming=True)
    reader = WatchedStreamReader(parsed, spark_schema(parsed.selected_columns()))
    start = reader.initialOffset()
    found = {}
    for name, limit in (("behind", 100), ("nothing behind", 2**60)):
        reader.latestOffset(start, ReadMaxRows(limit))
        found[name] = round(statistics.median(_taken_ms(reader.reportLatestOffset) for _ in range(_ASKED)), 3)
    reader.stop()
    return found


def _taken_ms(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000
