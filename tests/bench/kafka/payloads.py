"""JSON rows: three columns aggregated by city, and all seven columns; Kafka's with Spark's own `from_json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from natslog.client.publisher import Publisher, Rows
from tests.bench.json_decoding import FLAT, flat_order
from tests.bench.kafka.reading import to_noop
from tests.bench.kafka.sides import DEFAULT, MAPPED, OURS, TUNED, TUNED_CONSUMER, Sides, both_sides, compared
from tests.bench.pairs import Comparison, Measured
from tests.bench.sides import STREAM, SUBJECT
from tests.harness import eventually

_DIFFERENT_ROWS = 200_000
_ROWS_SHARE = 0.3  # of the rows of 128 bytes
_BATCH_ROWS = 50_000
_THREE = ("city", "price", "quantity")
_MAPPED_FILE = "typed.arrow"
_STORED_WITHIN_S = 60.0


def _publish(sides: Sides, values: list[bytes], rows: int) -> None:
    body = pa.array(values)
    with Publisher(sides.server.url) as publisher:
        for start in range(0, rows, len(values)):
            part = body.slice(0, min(len(values), rows - start))
            publisher.publish(Rows(pa.array([SUBJECT] * len(part)), part), "stored")
    eventually(lambda: sides.stored(STREAM) == rows, _STORED_WITHIN_S, "every row is stored")
    sides.kafka.fill(SUBJECT, values, rows)


def _write_mapped(sides: Sides, values: list[bytes], rows: int) -> None:
    """The decoded rows as they would be without JSON: the least that a source in Python can do."""
    schema = to_arrow_schema(StructType.fromDDL(FLAT))
    table = pa.Table.from_pylist([json.loads(value) for value in values], schema)
    with pa.OSFile(str(sides.folder / _MAPPED_FILE), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, rows, len(values)):
            writer.write_table(table.slice(0, min(len(values), rows - start)), _BATCH_ROWS)


def _ours(sides: Sides, **options: str) -> DataFrame:
    return sides.stream(STREAM, payloadFormat="json", payloadSchema=FLAT, **options)


def _theirs(sides: Sides, consumer: Mapping[str, str], fields: str) -> DataFrame:
    """Only the members that are used are in `fields`: `from_json` decodes each of them."""
    decoded = F.from_json(F.col("value").cast("string"), fields)
    return sides.topic(SUBJECT, consumer).select(decoded.alias("row")).select("row.*")


def _by_city(frame: DataFrame, rows: int) -> None:
    found = frame.groupBy("city").agg(F.count("*").alias("rows"), F.sum("price"), F.sum("quantity")).collect()
    assert sum(row["rows"] for row in found) == rows, "every row was read"
    assert None not in {row["city"] for row in found}, "every row was decoded"


def _runs(
    sides: Sides, rows: int, action: Callable[[DataFrame], None], fields: str, columns: str = ""
) -> dict[str, Callable[[], Measured]]:
    """Args:
    fields: DDL of those that Kafka's side decodes. `columns`: those that natslog's side decodes; "" for all.
    """
    ours = {"columns": columns} if columns else {}
    frames: dict[str, Callable[[], DataFrame]] = {
        OURS: lambda: _ours(sides, **ours),
        TUNED: lambda: _theirs(sides, TUNED_CONSUMER, fields),
        DEFAULT: lambda: _theirs(sides, {}, fields),
        MAPPED: lambda: sides.mapped(_MAPPED_FILE, fields),
    }

    def run(side: str) -> Measured:
        frame = frames[side]()
        return sides.measured(side, rows, lambda: action(frame))

    return {side: lambda side=side: run(side) for side in frames}


def json_rows(pairs: int, all_rows: int) -> list[Comparison]:
    rows = int(all_rows * _ROWS_SHARE)
    random = Random(7)
    values = [flat_order(random, number) for number in range(min(rows, _DIFFERENT_ROWS))]
    names = [field.split()[0] for field in FLAT.split(", ")]
    three = ", ".join(field for field in FLAT.split(", ") if field.split()[0] in _THREE)
    with both_sides() as sides:
        _publish(sides, values, rows)
        _write_mapped(sides, values, rows)
        sides.wait_until_sealed()

        def aggregate(frame: DataFrame) -> None:
            _by_city(frame, rows)

        lines: list[tuple[str, float, dict[str, Callable[[], Measured]]]] = [
            ("JSON, three columns by city", 3.0, _runs(sides, rows, aggregate, three)),
            (f"the same, columns={','.join(_THREE)}", 3.0, _runs(sides, rows, aggregate, three, ",".join(_THREE))),
            ("JSON, seven columns to noop", 1.7, _runs(sides, rows, to_noop, FLAT, ",".join(names))),
        ]
        return [
            line
            for title, bar, runs in lines
            for line in compared(title, bar, runs, pairs, notes={"rows": rows}, is_limited_by_mapped=False)
        ]
