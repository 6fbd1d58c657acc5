r"""Joins each JSON message of a stream with reference data, derives fields, and publishes it: stream to stream, once.

    python spark_jobs/enrich_stream.py --stream orders --fields 'sku string, quantity int' \
        --reference items.csv --reference-schema 'sku string, name string, price double' --on sku \
        --derive 'total=round(price * quantity, 2)' --to-subject 'enriched.>' --checkpoint state/enrich

Theory of operation. `--fields` are read out of each message; the row of `--reference` with the same `--on` is joined to
it (fields are null where there is none), and `--derive` adds SQL expressions over both. The result is a JSON object of
all of them, under the mapped subject, with the message's own key and headers. A message that is no such JSON object is
passed on byte for byte with a header `Enrich-Error`. So every message of the stream becomes one message of the output.

Why exactly one. A message id is `<id of the input stream>:<offset>`: it depends on nothing that a restart changes,
neither batch nor partition nor the order after a join. With `ack=stored` a batch ends only when a stream has stored all
of it. So an output stream that deduplicates drops messages that are sent again after a crash, within its window. The
job refuses to publish to a stream that does not deduplicate, and to repeat a batch that was started longer ago than the
window. Two reference rows with one key would make two messages of one, so they are refused too. Reference data is read
when the job starts.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from checkpoints import Folder, unfinished_for_s
from job_credentials import nats_login
from job_support import (
    StopRequest,
    add_streaming_arguments,
    client_of,
    follow,
    job_parser,
    run_job,
    source_options,
    spark_session,
)
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType
from subject_mapping import SubjectMapping
from targets import (
    MAPPING_HELP,
    add_target_arguments,
    checked_mapping,
    kept_headers,
    nats_url,
    recording_streams,
    shortest_window_s,
)

from natslog.errors import ConfigError
from natslog.units import format_duration

COLUMNS = "offset,subject,key,value,headers"
_CORRUPT = "__corrupt"


@dataclass(frozen=True, slots=True)
class Target:
    """Where results go; their ids begin with the input stream's id, and the output stores them for `window_s`."""

    mapping: SubjectMapping
    stream_id: str
    window_s: float


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = job_parser(
        "enrich_stream.py",
        "Join JSON messages with reference data, derive fields, publish each result exactly once.",
        f"{MAPPING_HELP}\n\nexample:\n"
        "  enrich_stream.py --stream orders --fields 'sku string, quantity int' --reference items.csv --on sku \\\n"
        "      --derive 'large=quantity > 100' --to-subject 'enriched.>' --checkpoint state/enrich",
    )
    add_streaming_arguments(parser, checkpoint_required=True)
    what = parser.add_argument_group("how a message is enriched")
    what.add_argument("--fields", required=True, metavar="DDL", help="fields of the JSON messages: 'sku string, n int'")
    what.add_argument("--reference", metavar="PATH", help="file or folder: .csv (with a header), .json, .parquet")
    what.add_argument(
        "--reference-schema", metavar="DDL", help="types of CSV or JSON (default: CSV all text, JSON as found)"
    )
    what.add_argument("--on", metavar="FIELD", help="what a message and its reference row have in common")
    what.add_argument(
        "--derive",
        action="append",
        default=[],
        metavar="NAME=SQL",
        help="a further field (repeatable); an expression that fails stops the job: try_divide, try_cast",
    )
    add_target_arguments(parser)
    parser.add_argument(
        "--allow-twice",
        action="store_true",
        help="repeat an unfinished batch even if it is older than the output stream's deduplication window",
    )
    return parser


# ---- before the query starts ----


def checked_target(arguments: argparse.Namespace) -> Target:
    """Raises NatslogError: broker or NATS unavailable, no such stream, or a target that may store messages twice."""
    if (arguments.reference is None) != (arguments.on is None):
        raise ConfigError("--reference requires --on, and --on requires --reference: give both or none")
    with client_of(arguments) as client:
        info = client.position(arguments.stream)
        mapping = checked_mapping(arguments, info)
        recording = recording_streams(client, mapping)
    window_s = shortest_window_s(recording)
    if not window_s:
        forgetful = next(one["name"] for one in recording if not one["dedupe_window"])
        raise ConfigError(
            f"stream {forgetful}, which records --to-subject, does not deduplicate, so a batch that is repeated after "
            f"a crash would be stored twice: run natslog stream edit {forgetful} --dedupe-window 1h"
        )
    return Target(mapping, str(info["id"]), window_s)


def check_unfinished(spark: SparkSession, arguments: argparse.Namespace, window_s: float) -> None:
    """Raises ConfigError if the last run left a batch that is older than the deduplication window."""
    age_s = unfinished_for_s(Folder(spark, arguments.checkpoint))
    if age_s is not None and age_s > window_s and not arguments.allow_twice:
        raise ConfigError(
            f"the last run left a batch unfinished {age_s:.0f} s ago, and the output stream deduplicates for "
            f"{format_duration(window_s)} only: messages of that batch may be stored twice; --allow-twice accepts that"
        )


def reference_rows(spark: SparkSession, arguments: argparse.Namespace) -> DataFrame:
    """The reference data, in memory.

    Raises:
        ConfigError: its format is not known, or `--on` does not name one row each.
    """
    path = str(arguments.reference)
    kind = path.rstrip("/").rpartition(".")[2].lower()
    reader = spark.read if arguments.reference_schema is None else spark.read.schema(arguments.reference_schema)
    if kind == "csv":
        rows = reader.option("enforceSchema", False).csv(path, header=True, mode="FAILFAST")
    elif kind in ("json", "jsonl", "ndjson"):
        rows = reader.json(path, mode="FAILFAST")
    elif kind == "parquet":
        rows = spark.read.parquet(path)
    else:
        raise ConfigError(f"--reference {path}: its name must end in .csv, .json, .jsonl, .ndjson or .parquet")
    if arguments.on not in rows.columns:
        raise ConfigError(f"--reference {path} has no column {arguments.on!r}; it has {', '.join(rows.columns)}")
    rows = rows.where(f.col(arguments.on).isNotNull()).cache()
    several = rows.groupBy(arguments.on).count().where("count > 1").orderBy(arguments.on).head(3)
    if several:
        named = ", ".join(f"{row[0]} ({row[1]} rows)" for row in several)
        raise ConfigError(
            f"--reference {path}: several rows have the same {arguments.on}, which must be unique: {named}"
        )
    return rows


def derived(arguments: argparse.Namespace, taken: list[str]) -> dict[str, Column]:
    """Name → expression. Raises ConfigError."""
    found: dict[str, Column] = {}
    for text in arguments.derive:
        name, equals, expression = text.partition("=")
        name = name.strip()
        if not (name and equals and expression.strip()):
            raise ConfigError(f"--derive {text!r} is not NAME=SQL")
        if name in taken or name in found:
            raise ConfigError(f"--derive {text!r}: the field {name} exists already")
        found[name] = f.expr(expression)
    return found


# ---- the query ----


def message_fields(arguments: argparse.Namespace) -> StructType:
    """`--fields`. Raises ConfigError: a name twice, or one that this job uses itself."""
    fields = StructType.fromDDL(arguments.fields)
    if not isinstance(fields, StructType):
        raise ConfigError(f"--fields {arguments.fields!r} is not names and types: 'sku string, quantity int'")
    for name in fields.names:
        if name.startswith("__") or fields.names.count(name) > 1:
            raise ConfigError(f"--fields: {name!r} must occur once, and must not begin with __")
    return fields


def enriched(
    messages: DataFrame, fields: StructType, reference: DataFrame | None, arguments: argparse.Namespace
) -> DataFrame:
    """Columns `__message` (all that was read), `value` (binary), `problem` (null where there is none), `is_unmatched`.

    Raises:
        ConfigError: names clash, or types that are to be equal differ.
    """
    schema = StructType([*fields.fields]).add(_CORRUPT, "string")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    rows = messages.select(f.struct("*").alias("__message"))
    rows = rows.withColumn("__fields", f.from_json(f.col("__message.value").cast("string"), schema, options))
    is_usable = f.col("__fields").isNotNull() & f.col(f"__fields.{_CORRUPT}").isNull()
    rows = rows.select("*", is_usable.alias("__usable"), *(f.col(f"__fields.`{name}`") for name in fields.names))
    names, is_unmatched = list(fields.names), f.lit(False)
    if reference is not None:
        check_join(fields, reference, arguments.on)
        rows = rows.join(f.broadcast(reference.withColumn("__found", f.lit(True))), arguments.on, "left")
        names += [name for name in reference.columns if name != arguments.on]
        is_unmatched = f.col("__usable") & f.col("__found").isNull()
    additions = derived(arguments, names)
    rows = rows.withColumns(additions) if additions else rows
    members = f.struct(*(f.col(f"`{name}`") for name in (*names, *additions)))
    text = f.to_json(members, {"ignoreNullFields": "false"}).cast("binary")
    return rows.select(
        "__message",
        f.when(f.col("__usable"), text).otherwise(f.col("__message.value")).alias("value"),
        f.when(~f.col("__usable"), f.lit("the value is not a JSON object of --fields")).alias("problem"),
        is_unmatched.alias("is_unmatched"),
    )


def check_join(fields: StructType, reference: DataFrame, on: str) -> None:
    """Raises ConfigError if the join cannot work as intended."""
    types, others = (
        {one.name: one.dataType.simpleString() for one in schema.fields} for schema in (fields, reference.schema)
    )
    if on not in types:
        raise ConfigError(f"--on {on!r} is not one of --fields: {', '.join(types)}")
    if types[on] != others[on]:
        raise ConfigError(
            f"--on {on}: it is {types[on]} in --fields and {others[on]} in --reference: make them the same "
            "(--reference-schema sets the types of CSV and JSON)"
        )
    if clash := sorted(types.keys() & others.keys() - {on}):
        raise ConfigError(f"--fields and --reference both have {', '.join(clash)}: rename it in one of them")


def outgoing(rows: DataFrame, target: Target) -> DataFrame:
    """Columns of the sink."""
    kept = kept_headers(f.col("__message.headers"))
    problem = f.array(f.struct(f.lit("Enrich-Error").alias("key"), f.col("problem").alias("value")))
    return rows.select(
        "value",
        target.mapping.column(f.col("__message.subject")).alias("subject"),
        f.col("__message.key").alias("key"),
        f.when(f.col("problem").isNull(), kept).otherwise(f.concat(kept, problem)).alias("headers"),
        f.concat(f.lit(f"{target.stream_id}:"), f.col("__message.offset")).alias("id"),
    )


def started(
    messages: DataFrame, reference: DataFrame | None, target: Target, arguments: argparse.Namespace
) -> StreamingQuery:
    """The running query."""
    rows = enriched(messages, message_fields(arguments), reference, arguments)
    rows = rows.observe(
        "messages",
        f.count(f.lit(1)).alias("read"),
        f.count_if(f.col("problem").isNotNull()).alias("unread"),
        f.count_if("is_unmatched").alias("unmatched"),
    )
    sink = {
        "natsServers": nats_url(arguments),
        "ack": "stored",
        "msgIdColumn": "id",
        "ackTimeout": f"{arguments.ack_timeout}s",
        **nats_login(arguments),
    }
    writer = outgoing(rows, target).writeStream.outputMode("append").format("natslog").options(**sink)
    writer = writer.option("checkpointLocation", arguments.checkpoint)
    return (writer.trigger(availableNow=True) if arguments.available_now else writer).start()


def report(progress: Any) -> None:
    """One line per micro-batch that had messages."""
    seen = progress["observedMetrics"]["messages"]
    if seen["read"]:
        notes = [f"{seen['unmatched']} without a reference row"] if seen["unmatched"] else []
        notes += [f"{seen['unread']} passed on unchanged"] if seen["unread"] else []
        print(f"batch {progress['batchId']}: " + ", ".join([f"{seen['read']} messages", *notes]), flush=True)


def job(arguments: argparse.Namespace, stop: StopRequest) -> None:
    """Enriches until stopped, or until the end as of the start."""
    options = source_options(arguments, COLUMNS)
    target = checked_target(arguments)
    print(f"enriching {arguments.stream} into {target.mapping.target_wildcard}", flush=True)
    with spark_session(f"natslog: enrich {arguments.stream}", arguments, stop) as spark:
        check_unfinished(spark, arguments, target.window_s)
        reference = None if arguments.reference is None else reference_rows(spark, arguments)
        messages = spark.readStream.format("natslog").options(**options).load()
        follow(started(messages, reference, target, arguments), stop, report)


if __name__ == "__main__":
    sys.exit(run_job(parser(), job))
