r"""Aggregates a stream of JSON messages over windows, and publishes an alert to NATS if a window reaches a threshold.

    python spark_jobs/detect_and_publish.py --stream telemetry --field percent --threshold 90 --window 10s \
        --alert-subject alerts.cpu --checkpoint state/cpu --ack stored

Theory of operation. Each message is a JSON object; `--field` names its measurement and `--group-field` its source
(otherwise the source is the subject, or one token of it). Per source and time window - by the time the broker recorded
the message - Spark keeps count, average and maximum; where the one named by `--on` is at or above `--threshold`, the
window is an alert:

    {"stream": "telemetry", "source": "telemetry.cpu.0", "field": "percent", "on": "max", "threshold": 90.0,
     "window_start": "2026-11-20T10:30:00.000Z", "window_end": "2026-11-20T10:30:10.000Z",
     "count": 40, "avg": 63.2, "max": 97.0}

`--emit final` (default) publishes a window once, when it is over and `--late` has passed, with its final numbers. Time
is that of the messages, so the newest windows stay open until later messages arrive. `--emit early` publishes a window
in the micro-batch in which it reaches the threshold, with the numbers so far, and again when later messages change
them; that is Spark's update mode, which sinks in Python do not have, so each micro-batch is written as a batch.

Invariant: an alert's message id depends on nothing but stream, field, threshold, source and window. So a natslog stream
that records the alerts keeps the first one of each window, however often a batch is retried or a window changes, within
its `--dedupe-window`: make that longer than `--window`.

Messages without a finite number in the field, or without the group field, are counted and skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any

from fields import as_number, json_rows, measurement_field
from job_credentials import add_nats_login, nats_credentials, nats_login
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
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher
from natslog.config import DEFAULT_NATS_URL
from natslog.errors import ConfigError
from natslog.model import subjects_of
from natslog.subjects import check_subject, cover
from natslog.units import parse_duration_s

COLUMNS = "timestamp,subject,value"
_SAMPLE_BYTES = 256 * 1024
_TIME_FORMAT = "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = job_parser(
        "detect_and_publish.py",
        "Aggregate a JSON field per source and time window; publish windows at or above a threshold to NATS.",
        "durations: 500ms, 10s, 5m, 1h, 1d\n\n"
        "example:\n  detect_and_publish.py --stream quakes --field Magnitude --group-field Source --threshold 6.5 \\\n"
        "      --window 1h --alert-subject alerts.quakes --checkpoint state/quakes --available-now",
    )
    add_streaming_arguments(parser, checkpoint_required=True)
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--field", metavar="NAME", help="numeric field (default: detected in the stream's first messages)"
    )
    source = what.add_mutually_exclusive_group()
    source.add_argument("--group-field", metavar="NAME", help="field that names the source")
    source.add_argument(
        "--group-token", type=_token, metavar="N", help="token of the subject that does: 1 the first, -1 the last"
    )
    what.add_argument("--window", default="10s", metavar="DURATION", help="length of a window (default: 10s)")
    what.add_argument(
        "--late", default="10s", metavar="DURATION", help="how long a window waits for late messages (default: 10s)"
    )
    alerts = parser.add_argument_group("what is an alert")
    alerts.add_argument("--threshold", type=_finite, required=True, metavar="NUMBER", help="alert from this value on")
    alerts.add_argument("--on", choices=["max", "avg", "count"], default="max", help="what is compared (default: max)")
    alerts.add_argument(
        "--emit",
        choices=["final", "early"],
        default="final",
        help="when the window is over, or as soon as it reaches the threshold (default: final)",
    )
    alerts.add_argument("--alert-subject", required=True, metavar="SUBJECT", help="where alerts are published")
    alerts.add_argument("--nats", metavar="URL", help="NATS servers (default: NATS_URL, else nats://127.0.0.1:4222)")
    alerts.add_argument(
        "--ack",
        choices=["none", "flush", "stored"],
        default="flush",
        help="a batch is done when alerts are sent; the server has them; a stream has stored them (default: flush)",
    )
    add_nats_login(parser)
    return parser


def _finite(text: str) -> float:
    number = as_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return number


def _token(text: str) -> int:
    if not re.fullmatch(r"-?[1-9]\d{0,2}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a position: 1 is the first token, -1 the last")
    return int(text)


# ---- before Spark starts ----


def check_before_start(arguments: argparse.Namespace) -> str:
    """The field to aggregate; checks everything that would fail later.

    Raises:
        NatslogError: broker or NATS unavailable, no such stream, or arguments that cannot work.
    """
    for name in ("window", "late"):
        parse_duration_s(getattr(arguments, name), f"--{name}")
    subject = check_subject(arguments.alert_subject, wildcards=False, what="--alert-subject")
    with client_of(arguments) as client:
        info = client.position(arguments.stream)
        if cover(recorded := subjects_of(info), subject):
            raise ConfigError(
                f"--alert-subject {subject} is recorded by stream {arguments.stream} itself ({', '.join(recorded)}): "
                "alerts would be read as messages; choose another subject"
            )
        field = arguments.field or _found_field(client, info, arguments.subject_filter)
    with Publisher(arguments.nats, credentials=nats_credentials(arguments)):
        return field


def _found_field(client: NatslogClient, info: dict[str, Any], subject_filter: str | None) -> str:
    name = info["name"]
    fetched = client.fetch(name, info["log_start_offset"], max_bytes=_SAMPLE_BYTES, subject=subject_filter)
    values = [value for batch in fetched.batches for value in batch.column("value").to_pylist()]
    field = measurement_field(json_rows(values))
    if field is None:
        raise ConfigError(
            f"the first {len(values)} messages of stream {name} have no numeric field: name a field with --field"
        )
    return field


# ---- the query ----


def measurements(messages: DataFrame, field: str, group_field: str | None, group_token: int | None) -> DataFrame:
    """Rows of `timestamp`, `source` and `measured` (both null where the message has none).

    Args:
        group_field: names the source; `group_token`: else this token of the subject does, else all of it.
    """
    fields = f.from_json(f.col("value").cast("string"), "map<string,string>")
    number = f.try_element_at(fields, f.lit(field)).try_cast("double")
    finite = f.when(f.abs(number) < float("inf"), number)  # Spark sorts NaN above all numbers
    if group_field is not None:
        named = f.try_element_at(fields, f.lit(group_field))
    elif group_token is not None:
        named = f.try_element_at(f.split("subject", r"\."), f.lit(group_token))
    else:
        named = f.col("subject")
    return messages.select("timestamp", named.alias("source"), finite.alias("measured"))


def windows(measured: DataFrame, window: str, late: str) -> DataFrame:
    """Rows of `window`, `source`, `count`, `avg` and `max`."""
    return (
        measured.where("measured is not null and source is not null")
        .withWatermark("timestamp", _interval(late))
        .groupBy(f.window("timestamp", _interval(window)), "source")
        .agg(
            f.count(f.lit(1)).alias("count"),
            f.round(f.avg("measured"), 6).alias("avg"),
            f.max("measured").alias("max"),
        )
    )


def alerts(found: DataFrame, stream: str, field: str, on: str, threshold: float) -> DataFrame:
    """Columns `value` (JSON) and `id` of the windows at or above the threshold."""
    start = f.date_format("window.start", _TIME_FORMAT)
    facts = {
        "stream": f.lit(stream),
        "source": f.col("source"),
        "field": f.lit(field),
        "on": f.lit(on),
        "threshold": f.lit(threshold),
        "window_start": start,
        "window_end": f.date_format("window.end", _TIME_FORMAT),
        "count": f.col("count"),
        "avg": f.col("avg"),
        "max": f.col("max"),
    }
    identity = [facts[name] for name in ("stream", "field", "on", "threshold", "source", "window_start", "window_end")]
    return found.where(f.col(on) >= threshold).select(
        f.to_json(f.struct(*(column.alias(name) for name, column in facts.items()))).alias("value"),
        f.sha2(f.to_json(f.array(*(column.cast("string") for column in identity))), 256).alias("id"),
    )


def _interval(duration: str) -> str:
    return f"{round(parse_duration_s(duration) * 1000)} milliseconds"


def started(messages: DataFrame, arguments: argparse.Namespace, field: str) -> StreamingQuery:
    """The running query."""
    measured = measurements(messages, field, arguments.group_field, arguments.group_token)
    unusable = f.col("measured").isNull() | f.col("source").isNull()
    measured = measured.observe("messages", f.count(f.lit(1)).alias("read"), f.count_if(unusable).alias("skipped"))
    found = windows(measured, arguments.window, arguments.late)
    rows = alerts(found, arguments.stream, field, arguments.on, arguments.threshold)
    rows = rows.observe("alerts", f.count(f.lit(1)).alias("published"))
    sink = {
        "natsServers": arguments.nats,
        "subject": arguments.alert_subject,
        "ack": arguments.ack,
        "msgIdColumn": "id",
        **nats_login(arguments),
    }

    def publish(batch: DataFrame, _batch_id: int) -> None:
        batch.write.format("natslog").mode("append").options(**sink).save()

    if arguments.emit == "early":
        writer = rows.writeStream.outputMode("update").foreachBatch(publish)
    else:
        writer = rows.writeStream.outputMode("append").format("natslog").options(**sink)
    writer = writer.option("checkpointLocation", arguments.checkpoint)
    return (writer.trigger(availableNow=True) if arguments.available_now else writer).start()


def report(progress: Any) -> None:
    """One line per micro-batch that had messages or alerts."""
    seen = progress["observedMetrics"]
    messages, published = seen["messages"], seen["alerts"]["published"]
    if messages["read"] or published:
        skipped = f" ({messages['skipped']} without a measurement skipped)" if messages["skipped"] else ""
        batch = f"batch {progress['batchId']}: {messages['read']} messages{skipped}"
        print(f"{batch}, {published} alerts published", flush=True)


def _introduction(arguments: argparse.Namespace, field: str) -> str:
    token = f"subject token {arguments.group_token}" if arguments.group_token else "subject"
    return (
        f"watching {arguments.stream}: {arguments.on} of {field} per {arguments.group_field or token} and "
        f"{arguments.window}, alert from {arguments.threshold:g} on, to {arguments.alert_subject}"
    )


def job(arguments: argparse.Namespace, stop: StopRequest) -> None:
    """Publishes alerts until stopped, or until the end as of the start."""
    arguments.nats = arguments.nats or os.environ.get("NATS_URL") or DEFAULT_NATS_URL
    options = source_options(arguments, COLUMNS)
    field = check_before_start(arguments)
    print(_introduction(arguments, field), flush=True)
    with spark_session(f"natslog: detect on {arguments.stream}", arguments, stop) as spark:
        messages = spark.readStream.format("natslog").options(**options).load()
        follow(started(messages, arguments, field), stop, report)


if __name__ == "__main__":
    sys.exit(run_job(parser(), job))
