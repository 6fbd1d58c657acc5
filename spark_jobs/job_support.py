"""Shared by the jobs in this folder: arguments, a Spark session, a clean stop, and errors of one sentence.

Theory of operation. A job is a function of its arguments and a `StopRequest`. SIGTERM and SIGINT only set the request:
an exception in the middle of a call to the JVM would leave an unread answer on that connection. Streaming jobs check
the request about once a second and stop their query; batch jobs run Spark in a second thread, so that the first one can
cancel it. A failure in operation is one sentence on stderr and exit code 1; wrong usage is exit code 2.

The code runs on the driver only: nothing here or in the jobs is sent to executors, so `spark-submit job.py` needs no
`--py-files`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from job_credentials import add_broker_login, broker_login, client_options
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from natslog.client import NatslogClient
from natslog.errors import InvalidRequest, NatslogError
from natslog.times import format_timestamp_us, parse_timestamp_us
from natslog.units import parse_duration_s, parse_size_bytes

_POLL_S = 1
_CANCEL_WITHIN_S = 10.0
_NATSLOG_ERROR = re.compile(r"^natslog\.errors\.\w+: (.+)$", re.MULTILINE)
_ERROR_CODE = re.compile(r"^\[[A-Z0-9_.]+\] ")


class Interrupted(NatslogError):
    """A batch job was stopped before it was complete."""


class StopRequest:
    """Set by SIGTERM or SIGINT; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def install(self) -> None:
        """Handles both signals; call it again when a Spark session has been created, which handles SIGINT itself."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.requested:
            os._exit(128 + number)
        self.signal = number


Job = Callable[[argparse.Namespace, StopRequest], None]


def run_job(parser: argparse.ArgumentParser, job: Job) -> int:
    """Runs a job from its command line.

    Returns:
        The exit code: 0 complete (or a job without an end stopped), 1 failed, 128 + signal: interrupted.
    """
    arguments = parser.parse_args()
    stop = StopRequest()
    stop.install()
    try:
        job(arguments, stop)
    except Interrupted as error:
        print(f"stopped: {error.message}", file=sys.stderr)
        return 128 + (stop.signal or 0)
    except KeyboardInterrupt:  # PySpark's own handler, while a session begins
        print("stopped before the work was started", file=sys.stderr)
        return 128 + signal.SIGINT
    except (NatslogError, PySparkException, Py4JError, ConnectionError) as error:
        if stop.requested:  # errors of Spark while it stops have no meaning
            return 0
        print(f"error: {one_sentence(error)}", file=sys.stderr)
        return 1
    return 0


def one_sentence(error: Exception) -> str:
    """The reason in an error, without Spark's and Python's traces around it."""
    if isinstance(error, NatslogError):
        return error.message
    if isinstance(error, ConnectionError) or type(error).__name__ == "Py4JNetworkError":
        return "Spark's JVM has ended: its output above gives the reason"
    text = str(error)
    if "JAVA_GATEWAY_EXITED" in text:
        return "Java did not start: install Java 17 or 21, and set JAVA_HOME or PATH to it"
    if said := _NATSLOG_ERROR.findall(text):
        return str(said[-1])
    return _ERROR_CODE.sub("", text.strip().partition("\n")[0])


# ---- arguments ----


def job_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser with the options that every job over a stream has."""
    parser = spark_parser(name, description, epilog)
    parser.add_argument("--stream", required=True, help="the stream to read")
    parser.add_argument(
        "--servers", help="broker URLs, comma-separated (default: NATSLOG_SERVER, else http://127.0.0.1:9292)"
    )
    parser.add_argument("--subject-filter", metavar="SUBJECT", help="only subjects this NATS wildcard covers")
    add_broker_login(parser)
    return parser


def spark_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser with the options that every job has."""
    parser = argparse.ArgumentParser(
        prog=name, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--spark-log-level",
        default="FATAL",
        choices=["INFO", "WARN", "ERROR", "FATAL"],
        help="what Spark logs to stderr (default: FATAL, because the job itself reports errors; ERROR adds traces)",
    )
    return parser


def add_streaming_arguments(parser: argparse.ArgumentParser, *, checkpoint_required: bool) -> None:
    """Where a streaming job starts, where it stores its position, and whether it ends."""
    parser.add_argument(
        "--from",
        dest="start",
        default="earliest",
        metavar="WHERE",
        help="where the first run starts: earliest, latest, or a time (default: earliest)",
    )
    parser.add_argument(
        "--checkpoint", required=checkpoint_required, metavar="DIR", help="where Spark stores the position between runs"
    )
    parser.add_argument(
        "--max-offsets-per-trigger", type=positive, metavar="N", help="the maximum of messages in one micro-batch"
    )
    parser.add_argument(
        "--available-now",
        action="store_true",
        help="read up to the current end, then stop (default: run until stopped)",
    )


def positive(text: str) -> int:
    """A whole number above zero, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def size_bytes(text: str) -> int:
    """A number of bytes above zero (`64MiB`), for argparse."""
    try:
        return parse_size_bytes(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(error.message) from error


def duration_s(text: str) -> float:
    """Seconds above zero of a duration (`30s`, `5m`), for argparse."""
    try:
        return parse_duration_s(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(error.message) from error


def client_of(arguments: argparse.Namespace) -> NatslogClient:
    """A client for checks before Spark starts, so that errors are reported at once."""
    return NatslogClient(arguments.servers, client_options(arguments))


def source_options(arguments: argparse.Namespace, columns: str) -> dict[str, str]:
    """Options of the source that follow from the job's arguments."""
    asked = {
        "stream": arguments.stream,
        "servers": arguments.servers,
        "subjectFilter": arguments.subject_filter,
        "columns": columns,
    }
    if "start" in arguments:
        asked |= position_option("starting", arguments.start)
    if "max_offsets_per_trigger" in arguments:
        asked["maxOffsetsPerTrigger"] = arguments.max_offsets_per_trigger
    return {name: str(value) for name, value in asked.items() if value is not None} | broker_login(arguments)


def position_option(which: str, text: str) -> dict[str, str]:
    """`startingOffsets` or `startingTimestamp` (and likewise `ending…`) for a word or a time.

    Raises:
        InvalidRequest: neither.
    """
    if text in ("earliest", "latest"):
        return {f"{which}Offsets": text}
    return {f"{which}Timestamp": format_timestamp_us(time_us(text))}


def time_us(text: str) -> int:
    """Microseconds since 1970 UTC. Raises InvalidRequest."""
    try:
        return parse_timestamp_us(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error.message}, earliest or latest") from error


# ---- Spark ----


@contextmanager
def spark_session(
    name: str, arguments: argparse.Namespace, stop: StopRequest, settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[SparkSession]:
    """A session for one job: local unless spark-submit sets a master, times in UTC, a shuffle partition per core.

    Args:
        settings: where spark-submit sets nothing else.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder, given = SparkSession.builder.appName(name), SparkConf()
    for key, value in settings.items():
        if not given.contains(key):
            builder = builder.config(key, value)
    spark = builder.getOrCreate()
    stop.install()
    try:
        spark.sparkContext.setLogLevel(arguments.spark_log_level)
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        if not spark.sparkContext.getConf().contains("spark.sql.shuffle.partitions"):
            spark.conf.set("spark.sql.shuffle.partitions", spark.sparkContext.defaultParallelism)
        yield spark
    finally:
        spark.stop()


def follow(query: StreamingQuery, stop: StopRequest, report: Callable[[Any], None] = lambda progress: None) -> None:
    """Returns when the query has ended, or was stopped by a signal.

    Args:
        report: called once with the progress of each executed micro-batch.

    Raises:
        StreamingQueryException: the query failed.
    """
    reported = -1
    while True:
        ended = query.awaitTermination(_POLL_S)
        for progress in query.recentProgress:
            if progress["batchId"] > reported and "addBatch" in progress["durationMs"]:  # not while idle
                report(progress)
                reported = progress["batchId"]
        if ended:
            return
        if stop.requested:
            query.stop()
            return


def _make_active(spark: SparkSession) -> None:
    """Spark looks for sources and sinks in Python in the session that is active in the calling thread, and only there:
    in another thread the source of `df.write.format("natslog")` would not be found.
    """
    jvm: Any = spark._jvm
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)


def run_cancellable(spark: SparkSession, stop: StopRequest, work: Callable[[], None]) -> None:
    """Runs a batch action in a thread; a signal cancels it.

    Raises:
        Interrupted: a signal came first. Whatever `work` raised.
    """
    raised: list[Exception] = []

    def guarded() -> None:
        try:
            _make_active(spark)
            work()
        except Exception as error:  # the waiting thread raises it
            raised.append(error)

    worker = threading.Thread(target=guarded, name="spark-action", daemon=True)
    worker.start()
    while worker.is_alive() and not stop.requested:
        worker.join(0.2)
    if worker.is_alive():
        spark.sparkContext.cancelAllJobs()
        worker.join(_CANCEL_WITHIN_S)
        raise Interrupted("the work is not complete")
    if raised:
        raise raised[0]
