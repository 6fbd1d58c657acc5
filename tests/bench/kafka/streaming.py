"""Streaming queries with `availableNow`, from the first row to the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pyspark.sql import DataFrame

from tests.bench.kafka.sides import DEFAULT, MAPPED, OURS, TUNED, TUNED_CONSUMER, Sides, both_sides, compared
from tests.bench.pairs import Comparison, Measured
from tests.bench.sides import STREAM, SUBJECT
from tests.bench.spark_scan import write_mapped

_MANY = 4  # times the rows
_FILE = "mapped.arrow"


def _drain(sides: Sides, frame: DataFrame, rows: int) -> None:
    checkpoint = sides.folder / f"checkpoint-{time.monotonic_ns()}"
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    read = sum(progress.numInputRows for progress in query.recentProgress)
    assert read == rows, f"{read} rows were read of {rows}"


def _runs(sides: Sides, rows: int) -> dict[str, Callable[[], Measured]]:
    def ours() -> Measured:
        reader = sides.spark.readStream.format("natslog_in_python").options(servers=sides.broker.url, stream=STREAM)
        frame = reader.option("startingOffsets", "earliest").load()
        return sides.measured(OURS, rows, lambda: _drain(sides, frame, rows))

    def theirs(side: str, consumer: Mapping[str, str]) -> Measured:
        options = {"kafka.bootstrap.servers": sides.kafka.servers, "subscribe": SUBJECT, **consumer}
        reader = sides.spark.readStream.format("kafka").options(**options)
        frame = reader.option("startingOffsets", "earliest").load()
        return sides.measured(side, rows, lambda: _drain(sides, frame, rows))

    def mapped() -> Measured:
        frame = sides.mapped_stream(_FILE)
        return sides.measured(MAPPED, rows, lambda: _drain(sides, frame, rows))

    write_mapped(sides.broker, sides.folder / _FILE, rows)
    return {
        OURS: ours,
        TUNED: lambda: theirs(TUNED, TUNED_CONSUMER),
        DEFAULT: lambda: theirs(DEFAULT, {}),
        MAPPED: mapped,
    }


def streams(pairs: int, rows: int) -> list[Comparison]:
    with both_sides() as sides:
        sides.publish_plainly(rows)
        sides.wait_until_sealed()
        few = compared(f"availableNow, {rows:,} rows", 0, _runs(sides, rows), pairs)
        sides.publish_plainly((_MANY - 1) * rows)
        sides.wait_until_sealed()
        many = compared(f"availableNow, {_MANY * rows:,} rows", 0.9, _runs(sides, _MANY * rows), pairs, warm_ups=0)
        return [*few, *many]
