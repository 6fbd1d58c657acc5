r"""Copies a stream into a table of Delta Lake or Iceberg, each message exactly once, on a Spark cluster.

    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 spark_jobs/stream_to_table.py --stream orders \
        --table delta:lake/orders --checkpoint state/orders --payload-format json --payload-schema 'id BIGINT'

Theory of operation. Each micro-batch is one commit (`foreachBatch`). Before it, the job asks the table for the newest
`_offset` that it has, and leaves out rows at or below it; so a batch that Spark repeats adds nothing twice, and a job
whose checkpoint is lost begins behind the table's last row. What does not fit (malformed payloads; with `--late` rows
that are too old) is committed first, to the table of dead letters, in the same way.

One job for a table. `natslog table run` does the same without Spark, infers columns, and is enough for most streams;
this job also decodes Avro and Protobuf, and has a cluster's cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from checkpoints import Folder
from job_support import (
    StopRequest,
    add_streaming_arguments,
    client_of,
    duration_s,
    follow,
    job_parser,
    run_job,
    source_options,
    spark_session,
)
from lake_tables import LakeTable, Place
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from natslog.errors import ConfigError
from natslog.model import TOMBSTONE_HEADER

_OWN = ("offset", "timestamp", "subject", "key")
_CORRUPT, _PAYLOAD = "_corrupt", "payload"
_OF_SOURCE = ("schemaRegistry", "schemaRegistryAuthFile", "schemaRegistryCaFile", "descriptorFile", "messageName")
_OF_SOURCE_TOO = ("payloadFraming", "rescuedColumn")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = job_parser(
        "stream_to_table.py",
        "Copy a natslog stream into a table of Delta Lake or Iceberg, each message exactly once.",
        "example:\n  stream_to_table.py --stream orders --table delta:lake/orders --checkpoint state/orders \\\n"
        "      --payload-format json --payload-schema 'id BIGINT, at TIMESTAMP' --event-time at --partition-by _day",
    )
    add_streaming_arguments(parser, checkpoint_required=True)
    parser.add_argument(
        "--table", required=True, metavar="TARGET", help="delta:FOLDER, or iceberg:CATALOG.NAMESPACE.NAME"
    )
    parser.add_argument(
        "--payload-format", default="binary", choices=["binary", "string", "json", "avro", "protobuf"],
        help="typed formats: one column for each field (default: binary, the column value)",
    )  # fmt: skip
    parser.add_argument("--payload-schema", metavar="SCHEMA", help="as the source's payloadSchema (json and avro)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help=f"a further option of the source: {', '.join((*_OF_SOURCE, *_OF_SOURCE_TOO))}",
    )  # fmt: skip
    parser.add_argument("--partition-by", action="append", default=[], metavar="COLUMN", help="of a new table, or _day")
    parser.add_argument("--event-time", metavar="COLUMN", help="the timestamp that _day and --late refer to")
    parser.add_argument(
        "--late",
        type=duration_s,
        metavar="DURATION",
        help="rows so much older than the table's newest are dead letters",
    )
    parser.add_argument("--merge", action="store_true", help="one row for each key, the newest; tombstones delete it")
    parser.add_argument(
        "--every", type=duration_s, default=60.0, metavar="DURATION", help="time between micro-batches (1m)"
    )
    parser.add_argument(
        "--compact-every", type=int, default=0, metavar="N", help="compact after so many micro-batches (0: never)"
    )
    return parser


class TableJob:
    """One table and its dead letters."""

    def __init__(self, spark: SparkSession, arguments: argparse.Namespace, stream: Mapping[str, Any]) -> None:
        place = Place.parse(arguments.table)
        self._arguments, self._stream, self._stream_id = arguments, arguments.stream, str(stream["id"])
        self.table = LakeTable(spark, place, arguments.partition_by)
        self._dead_letters = LakeTable(spark, place.dead_letters)
        self.table.check(self._stream, self._stream_id)
        self._dead_letters.check(self._stream, self._stream_id)

    def append(self, batch: DataFrame, number: int) -> None:
        """One micro-batch."""
        newest = batch.agg(f.max("offset")).collect()[0][0]
        if newest is None:
            return
        self.table.create(self._rows(batch), self._stream, self._stream_id, grows=not self._arguments.merge)
        reason = self._reason(batch)
        self._keep_misfits(batch.withColumn("reason", reason).where("reason IS NOT NULL"), newest + 1)
        fits = batch.where(reason.isNull())
        if self._arguments.merge:
            self.table.merge(self._changes(fits))
        else:
            self.table.append(self._rows(fits).where(f.col("_offset") >= self.table.end()), self._stream, newest + 1)
        if self._arguments.compact_every and (number + 1) % self._arguments.compact_every == 0:
            self.table.compact()

    def _rows(self, batch: DataFrame) -> DataFrame:
        """With the columns of the table."""
        columns = [f.col(name).alias(f"_{name}") for name in _OWN]
        if "_day" in self._arguments.partition_by:
            event_time = self._event_time()
            time = f.col("timestamp") if event_time is None else f.coalesce(event_time, f.col("timestamp"))
            columns.append(f.to_date(time).alias("_day"))
        if _PAYLOAD not in batch.columns:
            return batch.select(*columns, "value")
        rescued = [name for name in batch.columns if name == self._rescued]
        return batch.select(*columns, f"{_PAYLOAD}.*", *rescued)

    @property
    def _rescued(self) -> str | None:
        return options_of(self._arguments.option).get("rescuedColumn")

    def _event_time(self) -> Column | None:
        name = self._arguments.event_time
        return None if name is None else f.col(f"{_PAYLOAD}.{name}")

    def _reason(self, batch: DataFrame) -> Column:
        """Why a row does not fit; null where it does."""
        reason: Column = f.lit(None).cast("string")
        event_time = self._event_time()
        if event_time is not None and self._arguments.late is not None and self.table.exists():
            first = batch.agg(f.min("offset")).collect()[0][0]
            before = self.table.rows().where(f.col("_offset") < first)  # not those of this batch, if it is repeated
            newest = before.agg(f.max(self._arguments.event_time)).collect()[0][0]
            if newest is not None:
                edge = f.lit(newest) - f.expr(f"INTERVAL {round(self._arguments.late * 1e6)} MICROSECOND")
                late = f.lit("its event time is older than the watermark allows")
                reason = f.when(event_time < edge, late)
        if self._arguments.merge:
            reason = f.when(f.col("key").isNull(), "it has no key").otherwise(reason)
        if _CORRUPT in batch.columns:
            reason = f.when(f.col(_CORRUPT).isNotNull(), "the payload is malformed").otherwise(reason)
        return reason

    def _keep_misfits(self, misfits: DataFrame, end: int) -> None:
        if not misfits.take(1):
            return
        if _PAYLOAD not in misfits.columns:
            value = f.col("value").cast("binary")
        else:  # a late row is well-formed, and its fields are all that is left of it
            text = f.col(_CORRUPT)
            malformed = text.cast("binary") if self._arguments.payload_format == "json" else f.unbase64(text)
            value = f.coalesce(malformed, f.to_json(_PAYLOAD).cast("binary"))
        columns = [f.col(name).alias(f"_{name}") for name in _OWN]
        rows = misfits.select(*columns, value.alias("value"), "reason")
        self._dead_letters.create(rows, self._stream, self._stream_id)
        self._dead_letters.append(rows.where(f.col("_offset") >= self._dead_letters.end()), self._stream, end)

    def _changes(self, batch: DataFrame) -> DataFrame:
        """The newest row of each key, and whether it is a tombstone."""
        gone = f.exists(f.coalesce("headers", f.array()), lambda one: f.lower(one["key"]) == TOMBSTONE_HEADER.lower())
        rows = self._rows(batch)
        marked = batch.select(f.col("offset").alias("_offset"), gone.alias("_gone"))
        newest = rows.groupBy("_key").agg(f.max("_offset").alias("_offset")).select("_offset")
        return rows.join(newest, "_offset", "left_semi").join(marked, "_offset")


def options_of(given: list[str]) -> dict[str, str]:
    """Raises ConfigError."""
    found: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or name not in (*_OF_SOURCE, *_OF_SOURCE_TOO):
            raise ConfigError(
                f"--option {one!r} is not NAME=VALUE with one of {', '.join((*_OF_SOURCE, *_OF_SOURCE_TOO))}"
            )
        found[name] = value
    return found


def payload_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Options of the source: fields are in one column, so that none has the name of a message's own column."""
    if arguments.payload_format in ("binary", "string"):
        return {"payloadFormat": arguments.payload_format}
    found = {"payloadFormat": arguments.payload_format, "payloadColumn": _PAYLOAD}
    found |= {"columnNameOfCorruptRecord": _CORRUPT} | options_of(arguments.option)
    if arguments.payload_schema is not None:
        found["payloadSchema"] = _with_corrupt(arguments)
    return found


def _with_corrupt(arguments: argparse.Namespace) -> str:
    """The schema of JSON payloads names the column of malformed ones."""
    text = str(arguments.payload_schema)
    if arguments.payload_format != "json" or text.strip().lower() == "infer":
        return text
    from pyspark_natslog.payload.schema_text import parse_payload_schema

    return parse_payload_schema(text).columns.add(_CORRUPT, "string").json()


def started(spark: SparkSession, arguments: argparse.Namespace, table: TableJob) -> StreamingQuery:
    """The running query."""
    options = source_options(arguments, "") | payload_options(arguments)
    del options["columns"]
    if arguments.merge:
        options["includeHeaders"] = "true"
    if not Folder(spark, arguments.checkpoint).numbered_files("offsets") and (end := table.table.end()):
        options.pop("startingTimestamp", None)
        options["startingOffsets"] = json.dumps({arguments.stream: end})
    messages = spark.readStream.format("natslog").options(**options).load()
    writer = messages.writeStream.foreachBatch(table.append).option("checkpointLocation", arguments.checkpoint)
    if arguments.available_now:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(arguments.every * 1000)} milliseconds").start()


def report(progress: Any) -> None:
    """One line per micro-batch that had messages."""
    if progress["numInputRows"]:
        print(f"batch {progress['batchId']}: {progress['numInputRows']} messages", flush=True)


def job(arguments: argparse.Namespace, stop: StopRequest) -> None:
    """Copies until stopped, or until the end as of the start."""
    place = Place.parse(arguments.table)
    with client_of(arguments) as client:
        stream = client.stream(arguments.stream)
    if arguments.late is not None and arguments.event_time is None:
        raise ConfigError("--late requires --event-time: lateness is measured in event time")
    with spark_session(f"natslog: {arguments.stream} to a table", arguments, stop, place.settings) as spark:
        table = TableJob(spark, arguments, stream)
        has_query = bool(Folder(spark, arguments.checkpoint).numbered_files("commits"))
        if has_query and not table.table.exists():
            raise ConfigError(
                f"the query of --checkpoint {arguments.checkpoint} has written batches, and there is no table "
                f"{arguments.table}: give its own table, or a new checkpoint"
            )
        follow(started(spark, arguments, table), stop, report)


if __name__ == "__main__":
    sys.exit(run_job(parser(), job))
