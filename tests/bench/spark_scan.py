"""Scanning into Spark's `noop` sink: sealed segments against a mapped file, tuples, and nats-py's pull consumer."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import nats
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from natslog.nats_server import NatsServer
from pyspark_natslog.source.schema import to_spark
from tests.bench.pairs import Comparison, compare
from tests.bench.scan_sources import BENCH_COLUMNS
from tests.bench.sides import STREAM, SUBJECT, jetstream_side, natslog_side, raw_publish, scratch
from tests.bench.spark_session import spark_session
from tests.harness import BrokerProcess, eventually

_FLOOD_SECONDS = 8.0
_TUPLE_SHARE = 8
_PULLED = 40_000


def fill(server: NatsServer, broker: BrokerProcess) -> int:
    """A stream of sealed segments; returns its rows."""
    raw_publish(server, "flood", bytes=128, seconds=_FLOOD_SECONDS)
    eventually(lambda: broker.metrics()["natslog_uncommitted_bytes"] == 0, 60, "everything is committed")
    eventually(lambda: is_sealed(broker.folder), 120, "every segment is sealed")
    return int(broker.client().stream(STREAM)["high_watermark"])


def is_sealed(folder: Path) -> bool:
    """Whether the active segment of each stream is as good as empty."""
    active = list(folder.glob("streams/[!_]*/*.active"))
    return bool(active) and all(path.stat().st_size < 4096 for path in active)


def write_mapped(broker: BrokerProcess, path: Path, end: int, stream: str = STREAM) -> None:
    """The stream's very batches up to `end` in one Arrow file, already in the shape Spark wants."""
    with pa.OSFile(str(path), "wb") as sink:
        writer = None
        for batch in broker.client().read(stream, 0, end):
            shaped = to_spark(batch, stream, BENCH_COLUMNS)
            writer = writer or pa.ipc.new_file(sink, shaped.schema)
            writer.write_batch(shaped)
        assert writer is not None, "the stream has rows"
        writer.close()


def rows_per_second(frame: DataFrame, rows: int) -> float:
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return rows / (time.perf_counter() - started)


def streamed_per_second(spark: SparkSession, url: str, rows: int, folder: Path) -> float:
    """`availableNow` from the first offset to the last."""
    source = spark.readStream.format("natslog").option("servers", url).option("stream", STREAM)
    frame = source.option("startingOffsets", "earliest").load()
    started = time.perf_counter()
    query = (
        frame.writeStream.format("noop")
        .option("checkpointLocation", str(folder / f"checkpoint-{time.monotonic_ns()}"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    taken = time.perf_counter() - started
    assert sum(progress.numInputRows for progress in query.recentProgress) == rows, "every row was read"
    return rows / taken


def pulled_per_second(server: NatsServer) -> float:
    """nats-py's pull consumer, batches of 1,000, acked as a whole (`ack_policy=none`): the quickest way it offers."""

    async def pull() -> float:
        connection = await nats.connect(server.url)
        consumer = nats.js.api.ConsumerConfig(ack_policy=nats.js.api.AckPolicy.NONE)
        subscription = await connection.jetstream().pull_subscribe(SUBJECT, stream=STREAM, config=consumer)
        done, started = 0, time.perf_counter()
        while done < _PULLED:
            done += len(await subscription.fetch(1000, timeout=10))
        rate = done / (time.perf_counter() - started)
        await connection.close()
        return rate

    return asyncio.run(pull())


def client_rows_per_second(broker: BrokerProcess, rows: int) -> float:
    """natslog's own client, without Spark."""
    started = time.perf_counter()
    with broker.client() as client:
        assert sum(batch.num_rows for batch in client.read(STREAM)) == rows
    return rows / (time.perf_counter() - started)


def scans(pairs: int) -> list[Comparison]:
    settings: dict[str, Any] = {"segment_bytes": "64MiB", "segment_age": "1s", "retention_interval": "500ms"}
    with natslog_side(**settings) as (server, broker), scratch() as folder, spark_session() as spark:
        rows = fill(server, broker)
        few = rows // _TUPLE_SHARE
        write_mapped(broker, folder / "mapped.arrow", rows)
        write_mapped(broker, folder / "few.arrow", few)

        def ours(count: int = rows) -> float:
            reader = spark.read.format("natslog").option("servers", broker.url).option("stream", STREAM)
            return rows_per_second(reader.option("endingOffsets", json.dumps({STREAM: count})).load(), count)

        def peer(name: str, file: str, count: int) -> float:
            reader = spark.read.format(name).option("path", str(folder / file)).option("parts", "2")
            return rows_per_second(reader.load(), count)

        for _ in range(3):  # Spark's own warm-up
            ours(), peer("benchmapped", "mapped.arrow", rows)
        found = [
            compare(
                "batch scan, sealed segments",
                "rows/s",
                0.7,
                ours=ours,
                peer="mapped Arrow file",
                theirs=lambda: peer("benchmapped", "mapped.arrow", rows),
                pairs=pairs,
            ),
            compare(
                "batch scan of an eighth of it",
                "rows/s",
                8,
                ours=lambda: ours(few),
                peer="tuple-yielding source",
                theirs=lambda: peer("benchtuples", "few.arrow", few),
                pairs=pairs,
            ),
            compare(
                "streaming scan, availableNow",
                "rows/s",
                0.6,
                ours=lambda: streamed_per_second(spark, broker.url, rows, folder),
                peer="natslog's batch scan",
                theirs=ours,
                pairs=pairs,
            ),
        ]
        found[0].notes["rows"] = rows
        with jetstream_side() as jetstream:
            raw_publish(jetstream, "acked", bytes=128, window=4000, seconds=1.0)
            pulled = compare(
                "read with the client, no Spark",
                "rows/s",
                1,
                ours=lambda: client_rows_per_second(broker, rows),
                peer="nats-py pull consumer",
                theirs=lambda: pulled_per_second(jetstream),
                pairs=min(pairs, 3),
            )
        return [*found, pulled]
