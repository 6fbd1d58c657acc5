"""Typed JSON payloads into Spark's `noop` sink, against `json.loads` a row in a Python source, and the reference."""

from __future__ import annotations

import statistics
from random import Random
from typing import Any

import pyarrow as pa
from pyspark.sql import functions as F

from natslog.client.publisher import Publisher, Rows
from tests.bench.json_decoding import FLAT, decoding, flat_order
from tests.bench.pairs import Comparison, compare
from tests.bench.sides import STREAM, SUBJECT, natslog_side, scratch
from tests.bench.spark_scan import rows_per_second, write_mapped
from tests.bench.spark_session import spark_session
from tests.harness import eventually

_MAP = "none MAP<STRING, INT>"  # a type that goes to the reference kernel; payloads have no such member
_DIFFERENT_ROWS = 200_000
_ROWS = 1_200_000  # so many that the start of a job is a small part
_LEAST_RATIO = 5.0


def _publish(url: str) -> None:
    random = Random(7)
    values = pa.array([flat_order(random, number) for number in range(_DIFFERENT_ROWS)])
    rows = Rows(pa.array([SUBJECT] * _DIFFERENT_ROWS), values)
    with Publisher(url) as publisher:
        for _ in range(_ROWS // _DIFFERENT_ROWS):
            publisher.publish(rows, "stored")


def typed(pairs: int) -> list[Comparison]:
    settings: dict[str, Any] = {"segment_bytes": "64MiB", "segment_age": "1s", "retention_interval": "500ms"}
    with natslog_side(**settings) as (server, broker), scratch() as folder, spark_session() as spark:
        _publish(server.url)
        eventually(lambda: broker.client().stream(STREAM)["high_watermark"] == _ROWS, 60, "every row is stored")
        write_mapped(broker, folder / "mapped.arrow", _ROWS)
        source = spark.read.format("natslog").options(servers=broker.url, stream=STREAM)
        names = [field.split()[0] for field in FLAT.split(", ")]
        columns = ",".join(["offset", *names])

        def ours() -> float:
            typed_source = source.options(payloadFormat="json", payloadSchema=FLAT, columns=columns)
            return rows_per_second(typed_source.load(), _ROWS)

        def by_kernel() -> float:
            options = {"payloadFormat": "json", "payloadSchema": f"{FLAT}, {_MAP}", "columns": f"{columns},none"}
            return rows_per_second(source.options(**options).load(), _ROWS)

        def rows() -> float:
            reader = spark.read.format("benchjsonrows").option("path", str(folder / "mapped.arrow"))
            return rows_per_second(reader.options(parts="2", fields=FLAT).load(), _ROWS)

        def from_json() -> float:
            frame = spark.read.format("natslog").options(servers=broker.url, stream=STREAM).load()
            decoded = F.from_json(F.col("value").cast("string"), FLAT)
            return rows_per_second(frame.select("offset", decoded.alias("row")).select("offset", "row.*"), _ROWS)

        for _ in range(2):  # Spark's own warm-up, and the kernels'
            ours(), by_kernel(), from_json()
        found = compare(
            "typed JSON, seven columns",
            "rows/s",
            _LEAST_RATIO,
            ours=ours,
            peer="json.loads a row into tuples, in a Python source",
            theirs=rows,
            pairs=pairs,
        )
        found.notes["rows"] = _ROWS
        found.notes["value column and Spark's from_json, rows/s"] = statistics.median(from_json() for _ in range(pairs))
        peer = "the reference kernel, by a map among the columns"
        paths = compare(
            "typed JSON by the kernel for usual JSON",
            "rows/s",
            0.9,
            ours=ours,
            peer=peer,
            theirs=by_kernel,
            pairs=pairs,
        )
        return [found, paths, *decoding(pairs)]
