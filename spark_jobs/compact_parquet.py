r"""Copies the finished days of a table of `stream_to_parquet.py` into few large files, sorted by offset.

    python spark_jobs/compact_parquet.py --input lake/orders --output lake/orders-days

Theory of operation. Files of a streaming table must not be rewritten or removed while its log names them: Spark would
fail, or read rows twice. So the days go into a table of their own. A day is finished when every stream in the table has
a later one there: times never decrease within a stream, and batches come in order, so no row can be added to it. Each
day is written to a staging folder, read back and compared with its source (rows, first and last offset, sum of the
offsets), and then put in place by one rename: readers see all of a day or nothing of it. Days that exist in the output
are skipped, so the job may be run at any time, also after it was killed.

Readers take finished days from here and the rest from the streaming table:

    days = spark.read.parquet("lake/orders-days")
    live = spark.read.parquet("lake/orders")
    rows = days.unionByName(live.join(days.select("day").distinct(), "day", "left_anti"))

On stores without an atomic rename of folders (S3), do not read while the job runs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from checkpoints import Folder, check_is_streaming_table
from job_support import StopRequest, run_cancellable, run_job, size_bytes, spark_parser, spark_session
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from natslog.errors import ConfigError, NatslogError

_MIB = 1024 * 1024
_STAGING = "_staging"


class CopyDiffers(NatslogError):
    """The copy of a day differs from its source; it was not put in place."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = spark_parser(
        "compact_parquet.py",
        "Copy finished days of a streaming Parquet table into few large files.",
        "example:\n  compact_parquet.py --input lake/orders --output lake/orders-days --file-bytes 256MiB",
    )
    parser.add_argument("--input", required=True, metavar="DIR", help="table written by stream_to_parquet.py")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the compacted days")
    parser.add_argument(
        "--file-bytes", type=size_bytes, default=256 * _MIB, metavar="SIZE", help="target size of a file (256MiB)"
    )
    return parser


def finished_days(table: DataFrame) -> list[Any]:
    """Days for which every stream of the table has a later one, oldest first."""
    last_of_each = table.groupBy("stream").agg(f.max("day").alias("last"))
    first_open = last_of_each.agg(f.min("last")).first()
    assert first_open is not None, "an aggregate without groups has one row"
    days = table.where(f.col("day") < f.lit(first_open[0])).select("day").distinct().orderBy("day")
    return [row["day"] for row in days.collect()]


def facts(rows: DataFrame) -> list[tuple[Any, ...]]:
    """The facts that a copy and its source must have in common, by stream."""
    offset = f.col("offset").cast("decimal(20,0)")
    of_each = rows.groupBy("stream").agg(f.count("*"), f.min("offset"), f.max("offset"), f.sum(offset))
    return sorted(tuple(row) for row in of_each.collect())


def compact_day(spark: SparkSession, rows: DataFrame, day: Any, output: Folder, file_bytes: int) -> None:
    """Writes one day to the staging folder, compares it, and puts it in place.

    Raises:
        CopyDiffers: the written rows differ from the source.
    """
    files = rows.select("_metadata.file_path", "_metadata.file_size").distinct()
    found = files.agg(f.count("*"), f.sum("file_size")).first()
    assert found is not None, "an aggregate without groups has one row"
    wanted = max(1, round(found[1] / file_bytes))
    staged = f"{output.path}/{_STAGING}"
    plain = rows.drop("day")
    parts = plain.coalesce(1) if wanted == 1 else plain.repartitionByRange(wanted, "stream", "offset")
    parts.sortWithinPartitions("stream", "offset").write.mode("overwrite").parquet(staged)
    expected, copied = facts(rows), facts(spark.read.parquet(staged))
    if copied != expected:
        raise CopyDiffers(
            f"day {day}: the copy has {copied}, the source has {expected} (stream, rows, first and last offset, sum)"
        )
    output.delete(f"{_STAGING}/_SUCCESS")
    output.rename(_STAGING, f"day={day}")
    print(f"day {day}: copied {sum(one[1] for one in copied)} rows from {found[0]} files into {wanted}", flush=True)


def compact(spark: SparkSession, arguments: argparse.Namespace) -> None:
    """Copies every finished day that the output lacks."""
    source, output = Folder(spark, arguments.input), Folder(spark, arguments.output)
    check_is_streaming_table(source)
    if source.path.rstrip("/") == output.path.rstrip("/"):
        raise ConfigError("--output must not be the folder of --input, whose files must not change")
    table = spark.read.parquet(arguments.input)
    missing = {"stream", "offset", "day"} - {*table.columns}
    if missing:
        raise ConfigError(
            f"{arguments.input} was not written by stream_to_parquet.py: it has no column {', '.join(missing)}"
        )
    there = {name.removeprefix("day=") for name in output.names()}
    days = [day for day in finished_days(table) if str(day) not in there]
    for day in days:
        compact_day(spark, table.where(f.col("day") == f.lit(day)), day, output, arguments.file_bytes)
    print(f"{len(days)} days compacted", flush=True)


def job(arguments: argparse.Namespace, stop: StopRequest) -> None:
    """Compacts, or is interrupted by a signal."""
    with spark_session(f"natslog: compact {arguments.input}", arguments, stop) as spark:
        run_cancellable(spark, stop, lambda: compact(spark, arguments))


if __name__ == "__main__":
    sys.exit(run_job(parser(), job))
