"""Batch reads of 128-byte rows: all columns, grouped, and one column; of rows from plain clients and from the sinks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pyspark.sql import DataFrame

from tests.bench.kafka.sides import (
    COLUMNAR,
    DEFAULT,
    MAPPED,
    OURS,
    TUNED,
    TUNED_CONSUMER,
    TUNED_PRODUCER,
    VALUE_BYTES,
    Sides,
    both_sides,
    compared,
    different_rows,
)
from tests.bench.pairs import Comparison, Measured, against, in_turn
from tests.bench.raw_nats import payload
from tests.bench.sides import STREAM, SUBJECT, raw_publish
from tests.bench.spark_scan import write_mapped

_SINK = "sunk"
_FILE = "mapped.arrow"
_SINGLY, _IN_FLIGHT, _PUBLISHED_WITHIN_S = "singly", 8, 1800.0
_IN_WINDOWS = ", in windows"


def to_noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _count_by(frame: DataFrame, rows: int, *columns: str) -> None:
    counted = sum(row["count"] for row in frame.groupBy(*columns).count().collect())
    assert counted == rows, f"{counted} rows were read of {rows}"


def _scan(sides: Sides, stream: str, topic: str, rows: int) -> dict[str, Callable[[], Measured]]:
    return {
        OURS: lambda: _noop(sides, OURS, rows, sides.stream(stream)),
        TUNED: lambda: _noop(sides, TUNED, rows, sides.topic(topic, TUNED_CONSUMER)),
        DEFAULT: lambda: _noop(sides, DEFAULT, rows, sides.topic(topic, {})),
        MAPPED: lambda: _noop(sides, MAPPED, rows, sides.mapped(_FILE)),
    }


def _noop(sides: Sides, side: str, rows: int, frame: DataFrame) -> Measured:
    return sides.measured(side, rows, lambda: to_noop(frame))


def _group(sides: Sides, rows: int, columns: str = "") -> dict[str, Callable[[], Measured]]:
    """By subject; in Kafka by topic and partition, which each of its rows has."""

    def run(side: str, frame: DataFrame, *by: str) -> Measured:
        return sides.measured(side, rows, lambda: _count_by(frame, rows, *by))

    ours = {"columns": columns} if columns else {}
    return {
        OURS: lambda: run(OURS, sides.stream(STREAM, **ours), "subject"),
        TUNED: lambda: run(TUNED, sides.topic(SUBJECT, TUNED_CONSUMER), "topic", "partition"),
        DEFAULT: lambda: run(DEFAULT, sides.topic(SUBJECT, {}), "topic", "partition"),
        MAPPED: lambda: run(MAPPED, sides.mapped(_FILE, f"{columns} STRING" if columns else ""), "subject"),
    }


def _plain_rows(sides: Sides, rows: int) -> None:
    sides.publish_plainly(rows)
    sides.wait_until_sealed()
    write_mapped(sides.broker, sides.folder / _FILE, rows)


def _sink_rows(sides: Sides, rows: int) -> None:
    """A stream and a topic, each written by its own sink for Spark."""
    frame = different_rows(sides.spark, rows)
    sides.broker.client().create_stream(_SINK, _SINK)
    sides.to_stream(frame, _SINK, natsServers=sides.server.url)
    assert sides.stored(_SINK) == rows, f"{sides.stored(_SINK)} rows are stored of {rows}"
    sides.kafka.create_topic(_SINK)
    sides.to_topic(frame, _SINK, TUNED_PRODUCER)
    assert sides.kafka.stored(_SINK) == rows, f"{sides.kafka.stored(_SINK)} rows are stored of {rows}"
    sides.wait_until_sealed()
    write_mapped(sides.broker, sides.folder / _FILE, rows, _SINK)


def scans(pairs: int, rows: int) -> list[Comparison]:
    with both_sides() as sides:
        _plain_rows(sides, rows)
        runs = _scan(sides, STREAM, SUBJECT, rows)
        return compared("scan to noop", 1.1, runs, pairs, warm_ups=2, notes={"rows": rows})


def scans_of_sink_rows(pairs: int, rows: int) -> list[Comparison]:
    with both_sides() as sides:
        _sink_rows(sides, rows)
        runs = _scan(sides, _SINK, _SINK, rows)
        return compared("scan of rows written by the sink", 1.1, runs, pairs, notes={"rows": rows})


def groups(pairs: int, rows: int) -> list[Comparison]:
    with both_sides() as sides:
        _plain_rows(sides, rows)
        return [
            *compared("groupBy(subject).count()", 1.1, _group(sides, rows), pairs, warm_ups=2, notes={"rows": rows}),
            *compared("the same, columns=subject", 2.0, _group(sides, rows, "subject"), pairs, notes={"rows": rows}),
        ]


def scans_of_single_messages(pairs: int, rows: int) -> list[Comparison]:
    """Published one by one, eight in flight, beside the same rows in windows; read with the broker's own settings."""
    with both_sides({}) as sides:
        sides.publish_plainly(rows)
        sides.broker.client().create_stream(_SINGLY, _SINGLY)
        options = {"window": _IN_FLIGHT, "seconds": _PUBLISHED_WITHIN_S, "warm": 0, "count": rows}
        raw_publish(sides.server, "acked", _SINGLY, bytes=VALUE_BYTES, **options)
        assert sides.stored(_SINGLY) == rows, f"{sides.stored(_SINGLY)} rows are stored of {rows}"
        sides.kafka.create_topic(_SINGLY)
        sides.kafka.fill(_SINGLY, [payload(VALUE_BYTES)], rows, is_singly=True)
        runs = {
            side + how: partial(_noop_of_stream, sides, side, rows, stream)
            for side in (OURS, COLUMNAR)
            for how, stream in (("", _SINGLY), (_IN_WINDOWS, STREAM))
        }
        runs[TUNED] = lambda: _noop(sides, TUNED, rows, sides.topic(_SINGLY, TUNED_CONSUMER))
        title = f"scan of {rows:,} rows published singly"
        for run in list(runs.values()) * 2:
            run()
        done = in_turn(title, runs, pairs)
        return [
            against(f"{title}, {ours}", "rows/s", bar, done[ours], theirs, done[theirs])
            for ours, bar_of_kafka in ((OURS, 1.0), (COLUMNAR, 2.0))
            for theirs, bar in ((TUNED, bar_of_kafka), (ours + _IN_WINDOWS, 0.7))
        ]


def _noop_of_stream(sides: Sides, side: str, rows: int, stream: str) -> Measured:
    return _noop(sides, side, rows, sides.stream(stream, "natslog" if side == COLUMNAR else "natslog_in_python"))
