r"""Publishes a time range of a stream again, to other subjects: to test a new consumer, or to repair earlier results.

    python spark_jobs/replay_range.py --stream orders --from 2026-11-20T10 --to 2026-11-20T11 \
        --to-subject 'replay.>' --rate 500 --dry-run

Theory of operation. Times are turned into offsets `[first, end)` before the first row is read, so messages that arrive
meanwhile are not included. The range is replayed in portions, one after another and each by one task, so messages keep
the order of the stream. Between portions the job waits as `--rate` requires, prints its progress, and checks for
signals. A replay that is stopped prints where to continue (`--from-offset`).

Value, key and headers are unchanged, and the subject is mapped. Headers of the first publication (`Nats-Msg-Id`,
`Nats-Expected-…`) are left out: a message's id is `replay:<id of the stream>:<offset>`, so that a stream that
deduplicates stores a repeated replay once, within its window. `--again NAME` makes it another replay.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

from job_credentials import nats_login
from job_support import (
    Interrupted,
    StopRequest,
    client_of,
    job_parser,
    positive,
    run_cancellable,
    run_job,
    source_options,
    spark_session,
    time_us,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from subject_mapping import SubjectMapping
from targets import MAPPING_HELP, add_target_arguments, checked_mapping, kept_headers, nats_url, recording_streams

from natslog.client import NatslogClient
from natslog.errors import ConfigError, InvalidRequest
from natslog.times import format_timestamp_us
from natslog.units import offsets_between

COLUMNS = "offset,timestamp,subject,key,value,headers"
_PORTION_ROWS = 50_000
_PORTION_S = 2.0
_ONE_TASK = {"minPartitions": "1", "maxBytesPerPartition": "1TiB"}
_SHOWN_SUBJECTS = 10


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = job_parser(
        "replay_range.py",
        "Publish a time range of a natslog stream again, to other subjects, in order.",
        f"times: ISO-8601 (UTC where no zone is given) or epoch milliseconds\n{MAPPING_HELP}\n\n"
        "example:\n  replay_range.py --stream orders --from 2026-11-20T10 --to 2026-11-20T11 --to-subject 'replay.>'",
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--from", dest="start", default="earliest", metavar="TIME", help="from this time on (earliest)")
    start.add_argument(
        "--from-offset", type=offset, metavar="N", help="from this offset on, which a stopped replay has printed"
    )
    parser.add_argument(
        "--to", dest="end", default="latest", metavar="TIME", help="up to this time, exclusive (default: latest)"
    )
    add_target_arguments(parser)
    parser.add_argument(
        "--ack", choices=["flush", "stored"], help="default: stored if a stream records --to-subject, else flush"
    )
    parser.add_argument("--rate", type=positive, metavar="N", help="the maximum of messages per second")
    parser.add_argument(
        "--again", metavar="NAME", help="another replay: messages of earlier replays are no duplicates of it"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be published")
    return parser


def offset(text: str) -> int:
    """An offset, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an offset")
    return int(text)


@dataclass(frozen=True, slots=True)
class Replay:
    """What is published: offsets `[first, end)` of a stream, mapped, under ids that begin with `id_prefix`."""

    options: dict[str, str]
    stream: str
    first: int
    end: int
    mapping: SubjectMapping
    id_prefix: str
    sink: dict[str, str]

    def rows(self, spark: SparkSession, first: int, end: int) -> DataFrame:
        """Messages of a part of the range."""
        ends = {"startingOffsets": f'{{"{self.stream}": {first}}}', "endingOffsets": f'{{"{self.stream}": {end}}}'}
        return spark.read.format("natslog").options(**self.options, **_ONE_TASK, **ends).load()

    def outgoing(self, messages: DataFrame) -> DataFrame:
        """Columns of the sink."""
        return messages.select(
            "value",
            "key",
            self.mapping.column(f.col("subject")).alias("subject"),
            kept_headers(f.col("headers")).alias("headers"),
            f.concat(f.lit(self.id_prefix), f.col("offset")).alias("id"),
        )


# ---- before Spark starts ----


def planned(arguments: argparse.Namespace) -> Replay:
    """Raises NatslogError: broker or NATS unavailable, no such stream, or a range or target that cannot work."""
    words, start, end = ("earliest", "latest"), arguments.start, arguments.end
    if start not in words and end not in words and time_us(start) >= time_us(end):
        raise InvalidRequest(f"the range is empty: --from {start} is not before --to {end}")
    with client_of(arguments) as client:
        info = client.position(arguments.stream)
        mapping = checked_mapping(arguments, info)
        if arguments.ack == "stored":
            recording_streams(client, mapping)  # otherwise no ack would arrive
        first, last = bounds(client, info, arguments)
        ack = arguments.ack or _best_ack(client, mapping)
    again = f"{arguments.again}:" if arguments.again else ""
    vars(arguments).pop("start")  # from here on offsets are used
    return Replay(
        options=source_options(arguments, COLUMNS),
        stream=arguments.stream,
        first=first,
        end=last,
        mapping=mapping,
        id_prefix=f"replay:{again}{info['id']}:",
        sink={
            "natsServers": nats_url(arguments),
            "ack": ack,
            "msgIdColumn": "id",
            "ackTimeout": f"{arguments.ack_timeout}s",
            **nats_login(arguments),
        },
    )


def _best_ack(client: NatslogClient, mapping: SubjectMapping) -> str:
    try:
        recording_streams(client, mapping)
    except ConfigError:
        return "flush"
    return "stored"


def bounds(client: NatslogClient, info: dict[str, Any], arguments: argparse.Namespace) -> tuple[int, int]:
    """The offsets `[first, end)` that are meant; end is not below first. Raises InvalidRequest."""
    low, high = int(info["log_start_offset"]), int(info["high_watermark"])

    def at(text: str) -> int:
        if text in ("earliest", "latest"):
            return low if text == "earliest" else high
        return client.offset_at(arguments.stream, format_timestamp_us(time_us(text)))[0]

    first = at(arguments.start) if arguments.from_offset is None else arguments.from_offset
    if not low <= first <= high:
        raise InvalidRequest(f"--from-offset {first}: stream {arguments.stream} has {offsets_between(low, high)}")
    return first, max(first, min(at(arguments.end), high))


# ---- the replay ----


def show(spark: SparkSession, replay: Replay) -> None:
    """Prints what would be published."""
    messages = replay.rows(spark, replay.first, replay.end)
    of_each = replay.outgoing(messages).groupBy("subject").count().orderBy(f.desc("count"), "subject").collect()
    seen = messages.agg(f.min("timestamp"), f.max("timestamp"), f.sum(f.length("value"))).first()
    assert seen is not None, "an aggregate without groups has one row"
    rows = sum(row["count"] for row in of_each)
    span = f", recorded {seen[0]} to {seen[1]} UTC, {seen[2]} bytes of values" if rows else ""
    print(f"would publish {rows} messages to {len(of_each)} subjects{span}:")
    for row in of_each[:_SHOWN_SUBJECTS]:
        print(f"  {row['count']:>9}  {row['subject']}")
    if len(of_each) > _SHOWN_SUBJECTS:
        print(f"  … and {len(of_each) - _SHOWN_SUBJECTS} more subjects")


def publish(spark: SparkSession, replay: Replay, rate: int | None, stop: StopRequest) -> None:
    """Publishes portion after portion.

    Raises:
        Interrupted: by a signal; the message contains the offset to continue with.
    """
    portion_rows = min(_PORTION_ROWS, max(1, round(rate * _PORTION_S))) if rate else _PORTION_ROWS
    started, total = time.monotonic(), replay.end - replay.first
    for first in range(replay.first, replay.end, portion_rows):
        end = min(first + portion_rows, replay.end)
        due = started + (first - replay.first) / rate if rate else started
        while not stop.requested and (left_s := due - time.monotonic()) > 0:
            time.sleep(min(0.2, left_s))
        if stop.requested:
            replayed = offsets_between(replay.first, first)
            raise Interrupted(f"{replayed} were replayed; continue with --from-offset {first}")
        rows = replay.outgoing(replay.rows(spark, first, end))
        try:
            run_cancellable(spark, stop, rows.write.format("natslog").mode("append").options(**replay.sink).save)
        except Interrupted as error:
            raise Interrupted(
                f"in the middle of {offsets_between(first, end)}; continue with --from-offset {first}"
            ) from error
        done, passed_s = end - replay.first, time.monotonic() - started
        print(f"{done} of {total} ({done / total:.0%}), {done / passed_s:.0f}/s, up to offset {end}", flush=True)


def job(arguments: argparse.Namespace, stop: StopRequest) -> None:
    """Replays the range, or prints what it would publish."""
    replay = planned(arguments)
    what = offsets_between(replay.first, replay.end)
    where = f"{what} of stream {replay.stream} to {replay.mapping.target_wildcard}"
    print(f"{where}, ack={replay.sink['ack']}", flush=True)
    if replay.first == replay.end:
        print("the range is empty: nothing to replay")
        return
    with spark_session(f"natslog: replay {replay.stream}", arguments, stop) as spark:
        if arguments.dry_run:
            run_cancellable(spark, stop, lambda: show(spark, replay))
        else:
            publish(spark, replay, arguments.rate, stop)
            print(f"replayed {replay.end - replay.first} offsets", flush=True)


if __name__ == "__main__":
    sys.exit(run_job(parser(), job))
