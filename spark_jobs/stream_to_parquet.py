r"""Writes a stream to a Parquet table by day, in files of about a chosen size; every message once.

    python spark_jobs/stream_to_parquet.py --stream orders --output lake/orders --checkpoint state/orders-lake

Theory of operation. A task of Spark writes one file for each day it has rows of, so the size of a file is that of a
task: the source cuts a micro-batch into tasks of `--file-bytes` (`maxBytesPerPartition`), and admits as many of them as
there are cores (`maxBytesPerTrigger`). While there is a backlog, files have that size; at the end of the stream, a
micro-batch of `--every` is one file, if it is no larger. Bytes are those of the stream; compressed Parquet has fewer.

The guarantee: every message of the stream is in the table exactly once, whatever is killed at whatever time, for
readers that use the table's log, as Spark does (`spark.read.parquet`): it is in `_spark_metadata`, and names the files
of complete batches. It does not name files that a killed batch left; readers that only list the folder would see their
rows twice. The checkpoint belongs to the table: the job refuses one without the other, because Spark would drop data.

For days with many small files, `compact_parquet.py` copies finished days into a few.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from checkpoints import Folder, check_table
from job_support import (
    StopRequest,
    add_streaming_arguments,
    client_of,
    duration_s,
    follow,
    job_parser,
    run_job,
    size_bytes,
    source_options,
    spark_session,
)
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

COLUMNS = "stream,offset,timestamp,subject,key,value"
_MIB = 1024 * 1024


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = job_parser(
        "stream_to_parquet.py",
        "Write a natslog stream to a Parquet table partitioned by day, each message exactly once.",
        "example:\n  stream_to_parquet.py --stream orders --output lake/orders --checkpoint state/orders --every 5m",
    )
    add_streaming_arguments(parser, checkpoint_required=True)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the table, as Spark accesses it")
    parser.add_argument(
        "--file-bytes", type=size_bytes, default=128 * _MIB, metavar="SIZE", help="target size of a file (128MiB)"
    )
    parser.add_argument(
        "--every", type=duration_s, default=60.0, metavar="DURATION", help="time between micro-batches (1m)"
    )
    parser.add_argument("--headers", action="store_true", help="also write the messages' headers")
    return parser


def sizing(file_bytes: int, cores: int) -> dict[str, str]:
    """Options of the source: a task is a file, a micro-batch a task for each core."""
    return {
        "minPartitions": "1",
        "maxBytesPerPartition": str(file_bytes),
        "maxBytesPerTrigger": str(file_bytes * cores),
    }


def started(messages: DataFrame, arguments: argparse.Namespace) -> StreamingQuery:
    """The running query."""
    rows = messages.withColumn("day", f.to_date("timestamp"))
    rows = rows.observe("messages", f.count(f.lit(1)).alias("written"))
    writer = rows.writeStream.format("parquet").outputMode("append").partitionBy("day")
    writer = writer.option("path", arguments.output).option("checkpointLocation", arguments.checkpoint)
    if arguments.available_now:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(arguments.every * 1000)} milliseconds").start()


def report(progress: Any) -> None:
    """One line per micro-batch that had messages."""
    if rows := progress["observedMetrics"]["messages"]["written"]:
        print(f"batch {progress['batchId']}: {rows} messages written", flush=True)


def job(arguments: argparse.Namespace, stop: StopRequest) -> None:
    """Writes until stopped, or until the end as of the start."""
    options = source_options(arguments, f"{COLUMNS},headers" if arguments.headers else COLUMNS)
    with client_of(arguments) as client:
        client.stream(arguments.stream)
    with spark_session(f"natslog: {arguments.stream} to Parquet", arguments, stop) as spark:
        check_table(Folder(spark, arguments.checkpoint), Folder(spark, arguments.output))
        options |= sizing(arguments.file_bytes, spark.sparkContext.defaultParallelism)
        messages = spark.readStream.format("natslog").options(**options).load()
        follow(started(messages, arguments), stop, report)


if __name__ == "__main__":
    sys.exit(run_job(parser(), job))
