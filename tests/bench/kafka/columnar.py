"""Reads by the columnar reader beside Kafka's connector: all columns, one, none, and streaming queries."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import DataFrame

from tests.bench.kafka.mapped import SOURCE, write_answers
from tests.bench.kafka.reading import to_noop
from tests.bench.kafka.sides import (
    COLUMNAR,
    DEFAULT,
    MAPPED,
    MAPPED_SHARE,
    OURS,
    TUNED,
    TUNED_CONSUMER,
    Sides,
    both_sides,
)
from tests.bench.pairs import Comparison, Measured, against, in_turn, processor_times
from tests.bench.sides import STREAM, SUBJECT

_MANY = 4  # times the rows
_FIRST_ROWS = 1000
USUAL = ("stream", "offset", "timestamp", "subject", "key", "value")
Runs = Mapping[str, Callable[[], Measured]]


def reads(pairs: int, rows: int) -> list[Comparison]:
    with both_sides() as sides:
        sides.publish_plainly(rows)
        sides.wait_until_sealed()
        _write_mapped(sides, "all", USUAL)
        _write_mapped(sides, "offset", ["offset"])
        found = [
            *_compared("scan to noop", 3, pairs, _batches(sides, rows, to_noop, "all")),
            *_compared(
                "one column (offset)",
                6,
                pairs,
                _batches(sides, rows, lambda frame: to_noop(frame.select("offset")), "offset"),
            ),
            *_compared("first trigger of a query", 1, pairs, _queries(sides, _FIRST_ROWS, limit=True)),
        ]
        sides.publish_plainly((_MANY - 1) * rows)
        sides.wait_until_sealed()
        many = _MANY * rows
        _write_mapped(sides, "many", USUAL)
        return [
            *found,
            *_compared(f"count of {many:,} rows", 50, pairs, _batches(sides, many, lambda frame: _count(frame, many))),
            *_compared(f"availableNow, {many:,} rows", 1.5, pairs, _queries(sides, many, limit=False, mapped="many")),
        ]


def _write_mapped(sides: Sides, name: str, columns: Sequence[str]) -> None:
    stored = [column for column in columns if column != "stream"]
    write_answers(sides.broker.client(), sides.broker.url, STREAM, stored, sides.folder / name)


def _mapped(sides: Sides, name: str) -> dict[str, str]:
    """Options of the source of mapped files, with as many tasks as the columnar reader has."""
    columns = ["offset"] if name == "offset" else USUAL
    parts = sides.stream(STREAM, "natslog").select(*columns).rdd.getNumPartitions()
    return {"path": str(sides.folder / name), "columns": ",".join(columns), "parts": str(parts)}


def _compared(title: str, bar: float, pairs: int, runs: Runs) -> list[Comparison]:
    """The bar is against Kafka tuned, or nine tenths of the same reader over mapped files where that was measured; and
    for the processor time of a row half of Kafka's.
    """
    for run in list(runs.values()) * 2:
        run()
    done = in_turn(title, dict(runs), pairs)
    title = f"{title}, columnar reader"
    found = [
        against(title, "rows/s", bar if peer == TUNED else 0, done[COLUMNAR], peer, done[peer])
        for peer in (TUNED, DEFAULT, OURS, MAPPED)
        if peer in runs
    ]
    if MAPPED in runs:
        found[0].alternative = against(title, "rows/s", MAPPED_SHARE, done[COLUMNAR], MAPPED, done[MAPPED])
        found.append(processor_times(title, MAPPED_SHARE, done[COLUMNAR], MAPPED, done[MAPPED]))
    return found


def _count(frame: DataFrame, rows: int) -> None:
    found = frame.count()
    assert found == rows, f"{found} rows were counted of {rows}"


def _batches(sides: Sides, rows: int, work: Callable[[DataFrame], None], mapped: str = "") -> Runs:
    """Args: mapped: the folder of the same columns as files; empty for none."""

    def run(side: str, frame: Callable[[], DataFrame]) -> Callable[[], Measured]:
        return lambda: sides.measured(side, rows, lambda: work(frame()))

    return {
        COLUMNAR: run(COLUMNAR, lambda: sides.stream(STREAM, "natslog")),
        TUNED: run(TUNED, lambda: sides.topic(SUBJECT, TUNED_CONSUMER)),
        DEFAULT: run(DEFAULT, lambda: sides.topic(SUBJECT, {})),
        OURS: run(OURS, lambda: sides.stream(STREAM)),
    } | (
        {MAPPED: run(MAPPED, lambda: sides.spark.read.format(SOURCE).options(**_mapped(sides, mapped)).load())}
        if mapped
        else {}
    )


def _queries(sides: Sides, rows: int, *, limit: bool, mapped: str = "") -> Runs:
    """From the start of a query to its end; with `limit`, of its first trigger only."""
    ours = {"servers": sides.broker.url, "stream": STREAM}
    theirs = {"kafka.bootstrap.servers": sides.kafka.servers, "subscribe": SUBJECT}

    def run(side: str, source: str, options: Mapping[str, str]) -> Callable[[], Measured]:
        limits = {"maxOffsetsPerTrigger": str(rows)} if limit else {}
        reader = sides.spark.readStream.format(source).options(**options, **limits)
        frame = (reader if side == MAPPED else reader.option("startingOffsets", "earliest")).load()
        return lambda: sides.measured(side, rows, lambda: _drain(sides, frame, rows, is_first=limit))

    return {
        COLUMNAR: run(COLUMNAR, "natslog", ours),
        TUNED: run(TUNED, "kafka", theirs | TUNED_CONSUMER),
        DEFAULT: run(DEFAULT, "kafka", theirs),
        OURS: run(OURS, "natslog_in_python", ours),
    } | ({MAPPED: run(MAPPED, SOURCE, _mapped(sides, mapped))} if mapped else {})


def _drain(sides: Sides, frame: DataFrame, rows: int, *, is_first: bool) -> None:
    """`once` reads all that there is, so the first trigger of a query with a limit is waited for."""
    checkpoint = sides.folder / f"checkpoint-{time.monotonic_ns()}"
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    if not is_first:
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        read = sum(progress.numInputRows for progress in query.recentProgress)
        assert read == rows, f"{read} rows were read of {rows}"
        return
    query = writer.trigger(processingTime="1 hour").start()
    deadline = time.monotonic() + 60
    while not query.recentProgress:
        assert time.monotonic() < deadline, "there is no first trigger"
        time.sleep(0.005)
    read = query.recentProgress[0].numInputRows
    query.stop()
    assert rows - 2 < read <= rows, f"{read} rows were read of {rows}: Kafka divides the limit among its partitions"
