"""Writing a DataFrame to NATS: the sink against a publish of each row with nats-py, in the same tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import nats
from pyspark.sql import DataFrame, Row, SparkSession

from tests.bench.pairs import Comparison, compare
from tests.bench.sides import STREAM, SUBJECT, natslog_side, raw_publish
from tests.bench.spark_session import spark_session
from tests.harness import eventually, flushed

_ROWS = 600_000


def _rows(spark: SparkSession) -> DataFrame:
    """128-byte values, in memory before anything is measured."""
    frame = spark.range(_ROWS, numPartitions=2).selectExpr(
        "cast(rpad(cast(id AS string), 128, 'x') AS binary) AS value"
    )
    frame = frame.cache()
    assert frame.count() == _ROWS
    return frame


def _published_flushed(url: str) -> Callable[[Iterator[Row]], None]:
    """A task that publishes each row, then flushes."""

    async def publish(rows: Iterator[Row]) -> None:
        connection = await nats.connect(url)
        for row in rows:
            await connection.publish(SUBJECT, bytes(row.value))
        await flushed(connection)
        await flushed(connection)
        await connection.close()

    return lambda rows: asyncio.run(publish(rows))


def _published_stored(url: str) -> Callable[[Iterator[Row]], None]:
    """A task that publishes each row with nats-py's own windowed publish (4,000 unacked), and checks every ack."""

    async def publish(rows: Iterator[Row]) -> None:
        connection = await nats.connect(url)
        context = connection.jetstream()
        acks = [await context.publish_async(SUBJECT, bytes(row.value)) for row in rows]
        await asyncio.wait_for(context.publish_async_completed(), 60)
        assert all(ack.result().seq for ack in acks), "a row was refused"
        await connection.close()

    return lambda rows: asyncio.run(publish(rows))


def sinks(pairs: int) -> list[Comparison]:
    with natslog_side() as (server, broker), spark_session() as spark:
        frame = _rows(spark)

        def stored() -> int:
            return int(broker.client().stream(STREAM)["high_watermark"])

        def final_count() -> int | None:
            """The rows stored so far, once their number stops growing."""
            count = stored()
            time.sleep(0.4)
            return count if count == stored() else None

        def timed(write: Callable[[], None], *, waits_for_acks: bool) -> float:
            before = eventually(final_count, what="what was flushed before is stored")
            started = time.perf_counter()
            write()
            taken = time.perf_counter() - started
            if waits_for_acks:
                assert stored() - before == _ROWS, f"{stored() - before} rows are stored of {_ROWS}"
            return _ROWS / taken

        def ours(ack: str) -> float:
            writer = (
                frame.write.format("natslog")
                .mode("append")
                .option("natsServers", server.url)
                .option("subject", SUBJECT)
            )
            return timed(writer.option("ack", ack).save, waits_for_acks=ack == "stored")

        def theirs(task: Callable[[str], Callable[[Iterator[Row]], None]], ack: str) -> float:
            return timed(lambda: frame.rdd.foreachPartition(task(server.url)), waits_for_acks=ack == "stored")

        raw_publish(server, "acked", bytes=128, window=100, seconds=0.1, warm=0)
        for ack in ("flush", "stored"):
            ours(ack)
        return [
            compare(
                f"sink, 128-byte rows, ack={ack}",
                "rows/s",
                bar,
                ours=lambda ack=ack: ours(ack),
                peer=f"nats-py, {task.__name__.removeprefix('_published_')} row by row",
                theirs=lambda task=task, ack=ack: theirs(task, ack),
                pairs=pairs,
            )
            for ack, bar, task in (("flush", 4.0, _published_flushed), ("stored", 3.0, _published_stored))
        ]
