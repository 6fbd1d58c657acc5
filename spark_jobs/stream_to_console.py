"""Shows the messages of a stream on the console, micro-batch by micro-batch, as they are recorded.

Run it first against a new stream: it shows that messages arrive from NATS through the broker in Spark.

    python spark_jobs/stream_to_console.py --stream orders
    spark-submit spark_jobs/stream_to_console.py --stream orders --available-now --rows 50

Values are shown as text. Without `--checkpoint` every run starts at `--from`.
"""

from __future__ import annotations

import argparse
import sys

from job_support import (
    StopRequest,
    add_streaming_arguments,
    client_of,
    follow,
    job_parser,
    positive,
    run_job,
    source_options,
    spark_session,
)
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

COLUMNS = "offset,timestamp,subject,key,value"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = job_parser(
        "stream_to_console.py",
        "Show the messages of a natslog stream on the console as they are recorded.",
        "example:\n  stream_to_console.py --stream orders --subject-filter 'orders.*.new' --from latest",
    )
    add_streaming_arguments(parser, checkpoint_required=False)
    parser.add_argument("--rows", type=positive, default=20, metavar="N", help="rows to show of each batch (20)")
    parser.add_argument(
        "--full", action="store_true", help="show long values completely instead of their first 20 characters"
    )
    return parser


def readable(messages: DataFrame) -> DataFrame:
    """Messages with key and value as text."""
    return messages.withColumns({name: f.col(name).cast("string") for name in ("key", "value")})


def job(arguments: argparse.Namespace, stop: StopRequest) -> None:
    """Prints until stopped, or until the end as of the start."""
    options = source_options(arguments, COLUMNS)
    with client_of(arguments) as client:
        client.stream(arguments.stream)
    with spark_session(f"natslog: {arguments.stream} to console", arguments, stop) as spark:
        messages = spark.readStream.format("natslog").options(**options).load()
        writer = readable(messages).writeStream.format("console").outputMode("append")
        writer = writer.option("numRows", arguments.rows).option("truncate", not arguments.full)
        if arguments.checkpoint:
            writer = writer.option("checkpointLocation", arguments.checkpoint)
        if arguments.available_now:
            writer = writer.trigger(availableNow=True)
        follow(writer.start(), stop)


if __name__ == "__main__":
    sys.exit(run_job(parser(), job))
