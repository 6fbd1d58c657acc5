"""Copies a time range of a stream to Parquet: for a data lake, for example, or as training data.

    python spark_jobs/backfill_to_parquet.py --stream orders --from 2026-11-20 --to 2026-11-21 --output lake/orders
    spark-submit spark_jobs/backfill_to_parquet.py --stream orders --output lake/orders --partition-by subject

The range is `[--from, --to)` by the time at which the broker recorded a message; without them it is the whole stream as
of the job's start. It is fixed before the first row is read, so messages that arrive meanwhile are not included. Values
are written as the bytes that were published.
"""

from __future__ import annotations

import argparse
import sys

from job_support import (
    StopRequest,
    client_of,
    job_parser,
    position_option,
    run_cancellable,
    run_job,
    source_options,
    spark_session,
    time_us,
)
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as f

from natslog.errors import InvalidRequest

COLUMNS = "stream,offset,timestamp,subject,key,value"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = job_parser(
        "backfill_to_parquet.py",
        "Copy a time range of a natslog stream to Parquet.",
        "times: ISO-8601 (UTC where no zone is given) or epoch milliseconds\n\n"
        "example:\n  backfill_to_parquet.py --stream orders --from 2026-11-20T10 --to 2026-11-20T11 --output orders",
    )
    parser.add_argument(
        "--from", dest="start", default="earliest", metavar="TIME", help="from this time on (default: earliest)"
    )
    parser.add_argument(
        "--to", dest="end", default="latest", metavar="TIME", help="up to this time, exclusive (default: latest)"
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="folder for the Parquet files, as Spark accesses it"
    )
    parser.add_argument(
        "--partition-by", action="append", choices=["stream", "subject"], metavar="COLUMN", help="subject, or stream"
    )
    parser.add_argument(
        "--mode",
        choices=["error", "append", "overwrite"],
        default="error",
        help="what to do if the output exists (default: error)",
    )
    return parser


def range_options(start: str, end: str) -> dict[str, str]:
    """The ending option of a range that its bounds do not make empty.

    Raises:
        InvalidRequest: a bound is not a time, or the range ends before it starts.
    """
    words = ("earliest", "latest")
    if start not in words and end not in words and time_us(start) >= time_us(end):
        raise InvalidRequest(f"the range is empty: --from {start} is not before --to {end}")
    return position_option("ending", end)


def write(messages: DataFrame, arguments: argparse.Namespace) -> None:
    """Writes the rows and prints their number."""
    written = Observation("written")
    counted = messages.observe(
        written, f.count(f.lit(1)).alias("rows"), f.min("offset").alias("first"), f.max("offset").alias("last")
    )
    writer = counted.write.mode(arguments.mode)
    if arguments.partition_by:
        writer = writer.partitionBy(*arguments.partition_by)
    writer.parquet(arguments.output)
    found = written.get
    span = f" (offsets {found['first']} to {found['last']})" if found["rows"] else ""
    print(f"wrote {found['rows']} rows of stream {arguments.stream}{span} to {arguments.output}", flush=True)


def job(arguments: argparse.Namespace, stop: StopRequest) -> None:
    """Writes the range, or is interrupted by a signal."""
    options = source_options(arguments, COLUMNS) | range_options(arguments.start, arguments.end)
    with client_of(arguments) as client:
        client.stream(arguments.stream)
    with spark_session(f"natslog: {arguments.stream} to Parquet", arguments, stop) as spark:
        messages = spark.read.format("natslog").options(**options).load()
        run_cancellable(spark, stop, lambda: write(messages, arguments))


if __name__ == "__main__":
    sys.exit(run_job(parser(), job))
