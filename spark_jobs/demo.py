"""`make demo`: from NATS through durable streams and Spark back to NATS, with real events.

    python spark_jobs/demo.py                          live telemetry of this host
    python spark_jobs/demo.py --file earthquakes.csv   the rows of a CSV file
    python spark_jobs/demo.py --tls                    with TLS, users, tokens and access rules (`demo_tls`)
    python spark_jobs/demo.py --keep                   keeps the broker and its console until ^C

Theory of operation. Everything is started as a user would start it, as processes of its own on free ports, with state
and logs in a temporary folder:

1. `natslog dev`: a NATS server and a broker. With `--tls`: `nats-server` and `natslog server`.
2. Two streams: `events` records what is published, `alerts` what Spark writes back.
3. Events are published: live, a thread reads psutil and publishes JSON until step 4 ends; with a file, `natslog pub`.
4. `detect_and_publish.py` reads `events` and publishes windows in which a measurement reached the threshold. Live, it
   runs as the endless query that it is, until its alerts are in stream `alerts`, and is then stopped by SIGTERM.
5. `stream_to_console.py` shows the newest events, 6. `backfill_to_parquet.py` copies the first half of them, by time.
7. The alerts are read from their stream and shown. 8. Plots of what was recorded, in the terminal and as an image
   (`demo_plot`), and where to look next.

Without `--threshold`, the threshold is a quantile of the published measurements (live: the highest tenth of the first
cpu measurements; file: the highest hundredth), so that some reach it and there are alerts.

A step that fails ends the demo with one sentence and exit code 1; the logs are then kept. The demo ends every process
that it started, by its id.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
from demo_plot import Plot, bars, can_show_blocks, draw, points_of, windows_of
from demo_stage import STEP_WITHIN_S, DemoFailed, Stage, job, natslog, open_stage
from demo_tls import Secured
from fields import as_number, measurement_field, source_field
from rich.console import Console
from rich.table import Table

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.errors import NatslogError
from natslog.times import format_timestamp_us

EVENTS, ALERTS = "events", "alerts"
ALERT_SUBJECT = "alerts.threshold"
STEPS = 8
SHOWN_ROWS = 8

START_WITHIN_S = 240.0  # the first start on a machine compiles machine code, which takes a minute and more
SAMPLE_EVERY_S = 0.25
SAMPLED_CSV_ROWS = 100_000
IMAGE = Path(__file__).resolve().parents[1] / "build" / "demo.png"

out = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Watch:
    """What the streaming job detects, and the reason for the threshold. `prefix`: how its subjects begin."""

    prefix: str
    field: str
    group_field: str | None
    threshold: float
    why: str


def say(number: int, text: str) -> None:
    """A progress line."""
    out.print(f"[bold cyan][{number}/{STEPS}][/] {text}")


# ---- 1 and 2: broker and streams ----


def start_broker(stage: Stage, secured: Secured | None) -> None:
    """Returns when the broker is ready."""
    data = stage.folder / "data"
    if secured is None:
        name = "natslog-dev"
        command = natslog("dev", "--data-dir", str(data), "--nats-port", "0", "--http-port", "0")
    else:
        secured.start_nats()
        name, command = "natslog-server", secured.broker_command(data)
    child = stage.start(name, command)

    def ready() -> dict[str, str] | None:
        lines = stage.log_path(name).read_text(errors="replace").splitlines()
        said = dict(line.split(maxsplit=1) for line in lines if line.startswith(("NATS ", "HTTP ")))
        return said if "ready" in lines else None

    said = stage.wait_for(name, child, ready, START_WITHIN_S, "it to be ready")
    assert said is not None, "wait_for returns what is true"
    stage.servers, stage.nats_url = said["HTTP"], said["NATS"]


def create_streams(stage: Stage, secured: Secured | None) -> None:
    """Creates `events` and `alerts`; the latter stores one alert per window, however often it is sent."""
    with stage.client() if secured is None else secured.admin() as client:
        client.create_stream(EVENTS, f"{EVENTS}.>")
        client.create_stream(ALERTS, f"{ALERTS}.>", dedupe_window="1h")


# ---- 3: events ----


def telemetry(before: tuple[Any, Any]) -> tuple[list[tuple[str, dict[str, Any]]], tuple[Any, Any]]:
    """Subject and facts of one sample of this host, and the counters for the next one."""
    disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
    cores = psutil.cpu_percent(percpu=True)
    rows: list[tuple[str, dict[str, Any]]] = [
        (f"cpu.{core}", {"metric": f"cpu {core}", "percent": percent}) for core, percent in enumerate(cores)
    ]
    rows.append(("memory", {"metric": "memory", "percent": psutil.virtual_memory().percent}))
    rows.append(("disk.used", {"metric": "disk used", "percent": psutil.disk_usage("/").percent}))
    if disk is not None and before[0] is not None:
        moved = {"read": disk.read_bytes - before[0].read_bytes, "written": disk.write_bytes - before[0].write_bytes}
        rows.append(("disk.io", {"metric": "disk bytes", **moved}))
    if network is not None and before[1] is not None:
        moved = {
            "sent": network.bytes_sent - before[1].bytes_sent,
            "received": network.bytes_recv - before[1].bytes_recv,
        }
        rows.append(("network", {"metric": "network bytes", **moved}))
    return rows, (disk, network)


class TelemetryPublisher:
    """Publishes this host's telemetry from a thread until it is stopped; every row is acked by the stream."""

    def __init__(self, stage: Stage) -> None:
        self.percents: list[float] = []
        self.rows = 0
        self._stage = stage
        self._stop = threading.Event()
        self._failure: NatslogError | None = None
        self._thread = threading.Thread(target=self._work, name="telemetry", daemon=True)

    def __enter__(self) -> TelemetryPublisher:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def wait_for_rows(self, seconds: float | None) -> None:
        """Waits for this time, or without end, while the thread publishes. Raises what stopped it."""
        self._thread.join(seconds)
        self.check()

    def check(self) -> None:
        """Raises what stopped it."""
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            with Publisher(self._stage.nats_url, credentials=self._stage.credentials, name="natslog-demo") as publisher:
                self._publish(publisher)
        except NatslogError as error:
            self._failure = error

    def _publish(self, publisher: Publisher) -> None:
        host, (_, before) = socket.gethostname(), telemetry((None, None))
        while not self._stop.wait(SAMPLE_EVERY_S):
            sample, before = telemetry(before)
            common = {"host": host, "time": format_timestamp_us(time.time_ns() // 1000)}
            subjects = [f"{EVENTS}.{subject}" for subject, _ in sample]
            values = [json.dumps(facts | common).encode() for _, facts in sample]
            publisher.publish(Rows(pa.array(subjects), pa.array(values, pa.binary())), "stored")
            self.rows += len(sample)
            self.percents += [facts["percent"] for subject, facts in sample if subject.startswith("cpu.")]


def quantile(numbers: Sequence[float], part: float) -> float:
    """The smallest of the numbers that `part` of them do not exceed."""
    ordered = sorted(numbers)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def watch_of_csv(path: Path, arguments: argparse.Namespace) -> Watch:
    """What to look for in a CSV file. Raises DemoFailed."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(itertools.islice(csv.DictReader(file), SAMPLED_CSV_ROWS))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DemoFailed(f"cannot read {path}: {error}") from error
    measured = arguments.field or measurement_field(rows)
    numbers = [number for row in rows if (number := as_number(row.get(measured))) is not None]
    if measured is None or not numbers:
        raise DemoFailed(f"{path} has no numeric column{f' {measured}' if measured else ''}: choose one with --field")
    group = arguments.group_field or source_field(rows)
    return Watch(
        f"{EVENTS}.", measured, group, *threshold_of(numbers, 0.99, "99 of 100 rows are below", arguments.threshold)
    )


def threshold_of(numbers: Sequence[float], part: float, why: str, given: float | None) -> tuple[float, str]:
    """The threshold asked for, else a quantile of what was measured, and its reason."""
    if given is not None:
        return given, "as given"
    return quantile(numbers, part), why


def publish_csv(stage: Stage, path: Path, watch: Watch) -> str:
    """Publishes the file's rows, acked; returns the output of `natslog pub`."""
    subject = f"{EVENTS}.{{{watch.group_field}}}" if watch.group_field else f"{EVENTS}.row"
    rows = ("--file", str(path), "--format", "csv", "--in-subject", "escape")
    login = (
        ("--nats-user", stage.credentials.user),
        ("--nats-password-file", stage.credentials.password_file),
        ("--nats-tls-ca-file", stage.credentials.tls_ca_file),
    )
    options = [text for name, value in login if value is not None for text in (name, value)]
    command = natslog("pub", subject, *rows, "--ack", "--nats-url", stage.nats_url, *options)
    return stage.run("natslog-pub", command).strip()


# ---- 4: the streaming job ----


def detect_command(stage: Stage, watch: Watch, *more: str) -> list[str]:
    """The streaming job over `events`."""
    group = ["--group-field", watch.group_field] if watch.group_field else []
    return job(
        "detect_and_publish.py", "--stream", EVENTS, "--field", watch.field, *group,
        "--threshold", str(watch.threshold), "--alert-subject", ALERT_SUBJECT, "--ack", "stored",
        "--checkpoint", str(stage.folder / "checkpoint"), *stage.reading, *stage.publishing, *more,
    )  # fmt: skip


def detect_live(stage: Stage, watch: Watch, publisher: TelemetryPublisher) -> None:
    """Runs the endless query until alerts are recorded, then stops it by SIGTERM."""
    child = stage.start(
        "detect", detect_command(stage, watch, "--subject-filter", f"{watch.prefix}*", "--window", "5s", "--late", "1s")
    )
    with stage.client() as client:

        def alerts_recorded() -> bool:
            publisher.check()
            return int(client.position(ALERTS)["high_watermark"]) > 0

        stage.wait_for("detect", child, alerts_recorded, STEP_WITHIN_S, "alerts in their stream")
    if code := stage.end(child):
        raise DemoFailed(f"detect did not end cleanly on SIGTERM (exit code {code}); see {stage.log_path('detect')}")


# ---- 5 to 7: the results ----


def time_at(client: NatslogClient, offset: int) -> str:
    """When the message at an offset was recorded."""
    moment = client.fetch(EVENTS, offset, offset + 1).batches[0].column("timestamp").cast(pa.int64())[0].as_py()
    return format_timestamp_us(int(moment))


def show_events(stage: Stage) -> None:
    """The newest events, as `stream_to_console.py` shows them."""
    with stage.client() as client:
        start = time_at(client, max(0, int(client.position(EVENTS)["high_watermark"]) - SHOWN_ROWS))
    command = job("stream_to_console.py", "--stream", EVENTS, "--from", start, "--available-now", "--full")
    text = stage.run("console", [*command, "--rows", str(SHOWN_ROWS), *stage.reading])
    table = [line for line in text.splitlines() if line.startswith(("+-", "|"))]
    if len(table) <= 4:
        raise DemoFailed(f"stream_to_console.py showed no rows; see {stage.log_path('console')}")
    for line in table:
        out.print(line, markup=False, no_wrap=True, overflow="ellipsis", soft_wrap=False)


def backfill(stage: Stage) -> str:
    """Copies the first half of the events, by time, and checks the number of rows."""
    with stage.client() as client:
        end = time_at(client, int(client.position(EVENTS)["high_watermark"]) // 2)
        expected = client.offset_at(EVENTS, end)[0]
    output = stage.folder / "parquet"
    command = job("backfill_to_parquet.py", "--stream", EVENTS, "--to", end, "--output", str(output))
    text = stage.run("backfill", [*command, *stage.reading])
    rows = pq.read_table(output).num_rows
    if rows != expected:
        raise DemoFailed(f"Parquet holds {rows} rows instead of {expected}; see {stage.log_path('backfill')}")
    said = [line for line in text.splitlines() if line.startswith("wrote ")]
    return said[-1].partition(f" to {output}")[0] if said else f"{rows} rows"


def show_alerts(stage: Stage) -> list[dict[str, Any]]:
    """The alerts, read from their stream."""
    with stage.client() as client:
        values = [value for batch in client.read(ALERTS) for value in batch.column("value").to_pylist()]
    found = [json.loads(value) for value in values]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("window", "source", "count", "avg", "max", "threshold"):
        table.add_column(name, justify="left" if name in ("window", "source") else "right")
    for alert in found[:SHOWN_ROWS]:
        window = f"{alert['window_start'][11:19]} - {alert['window_end'][11:19]}"
        numbers = [f"{alert[name]:.2f}" for name in ("avg", "max", "threshold")]
        table.add_row(window, alert["source"], str(alert["count"]), *numbers)
    out.print(table)
    if len(found) > SHOWN_ROWS:
        out.print(f"... and {len(found) - SHOWN_ROWS} more")
    return found


def show_plots(stage: Stage, watch: Watch, alerts: list[dict[str, Any]], image: Path) -> None:
    """The measurements with the alerts, in the terminal and as an image."""
    with stage.client() as client:
        points = points_of(client, EVENTS, watch.prefix, watch.field, watch.group_field)
    plot = Plot(points, windows_of(alerts), watch.field, watch.threshold)
    out.print(bars(plot, can_show_blocks(out)))
    draw(plot, image)
    out.print(f"      as an image, with each source: {shown_path(image)}")


def shown_path(path: Path) -> str:
    """As the reader of the terminal can use it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


NEXT = (
    (".venv/bin/natslog dev", "such servers to keep, console: http://127.0.0.1:9292/"),
    ("make demo KEEP=1", "this demo, with its console open until ^C"),
    ("README.md", "the first stream and query, step by step"),
    ("notebooks/", "live stream, backfill and lag, with their plots"),
    ("docs/SPARK.md", "all options and recipes; programs: spark_jobs/"),
    ("docs/OPERATIONS.md", "clusters, security, alerts; make site: as web pages"),
)


def show_next() -> None:
    """Where to look next."""
    table = Table(box=None, pad_edge=False, show_header=False, title="look next at", title_justify="left")
    for place, what in NEXT:
        table.add_row(f"  {place}", what)
    out.print(table)


def keep(stage: Stage, is_live: bool) -> None:
    """Until ^C; telemetry is published meanwhile."""
    out.print(f"[bold]console: {stage.servers}/[/], NATS: {stage.nats_url}; ^C ends them")
    if stage.options.token_file is not None:
        out.print(f"      sign in with {stage.options.token_file}; the CA is {stage.options.tls_ca_file}")
    with contextlib.suppress(KeyboardInterrupt):
        if is_live:
            with TelemetryPublisher(stage) as publisher:
                publisher.wait_for_rows(None)
        else:
            threading.Event().wait()


# ---- all steps ----


def detect_on_file(stage: Stage, arguments: argparse.Namespace) -> Watch:
    """Steps 3 and 4 with a file; what was detected."""
    watch = watch_of_csv(arguments.file, arguments)
    say(3, f"publishing the rows of {arguments.file.name} with natslog pub")
    out.print(f"      {publish_csv(stage, arguments.file, watch)}")
    announce_detection(watch)
    stage.run("detect", detect_command(stage, watch, "--available-now", "--emit", "early"))
    return watch


def detect_on_telemetry(stage: Stage, arguments: argparse.Namespace) -> Watch:
    """Steps 3 and 4 with what this host does now; what was detected."""
    say(3, f"publishing telemetry of this host: cpu, memory, disk, network, every {SAMPLE_EVERY_S:g} s")
    with TelemetryPublisher(stage) as publisher:
        publisher.wait_for_rows(arguments.seconds)
        if not publisher.percents:
            raise DemoFailed(f"no telemetry was stored within {arguments.seconds:g} s: set --seconds 10")
        why = f"the highest tenth of the first {len(publisher.percents)}"
        watch = Watch(
            f"{EVENTS}.cpu.", "percent", None, *threshold_of(publisher.percents, 0.9, why, arguments.threshold)
        )
        out.print(f"      {publisher.rows} events acked so far; publishing continues while Spark reads")
        announce_detection(watch)
        detect_live(stage, watch, publisher)
    return watch


def announce_detection(watch: Watch) -> None:
    """The line of step 4."""
    source = watch.group_field or "subject"
    say(
        4, f"Spark: windows in which {watch.field} per {source} reaches {watch.threshold:g} ({watch.why}) become alerts"
    )


def play(stage: Stage, arguments: argparse.Namespace) -> None:
    """All steps. Raises DemoFailed or NatslogError."""
    secured = Secured(stage, EVENTS, ALERTS) if arguments.tls else None
    if secured is None:
        say(1, "starting a NATS server and a broker (natslog dev)")
    else:
        say(1, "starting a NATS server with TLS and users, and a broker with TLS and security (natslog tls init)")
    start_broker(stage, secured)
    out.print(f"      {stage.nats_url}, {stage.servers}")
    if secured is None:
        say(2, f"creating streams {EVENTS} and {ALERTS}")
        create_streams(stage, secured)
    else:
        say(
            2,
            f"creating streams {EVENTS} and {ALERTS}, tokens and access rules (natslog token create, natslog acl add)",
        )
        create_streams(stage, secured)
        secured.permit()
        for line in [*secured.identities(), *secured.check_refusals()]:
            out.print(f"      {line}")
    watch = (detect_on_file if arguments.file else detect_on_telemetry)(stage, arguments)
    say(5, "Spark: the newest events on the console (stream_to_console.py)")
    show_events(stage)
    say(6, "Spark: the first half of the events, by time, to Parquet (backfill_to_parquet.py)")
    out.print(f"      {backfill(stage)}")
    say(7, f"alerts that Spark published to {ALERT_SUBJECT}, from stream {ALERTS}")
    if not (alerts := show_alerts(stage)):
        raise DemoFailed(
            f"no measurement reached the threshold, so there are no alerts; see {stage.log_path('detect')}"
        )
    say(8, f"{watch.field} while events were recorded (UTC), and where alerts are")
    show_plots(stage, watch, alerts, arguments.plot)
    if arguments.keep:
        keep(stage, is_live=arguments.file is None)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="demo.py",
        description="From NATS through a broker and Spark back to NATS, with live events or those of a file.",
    )
    parser.add_argument("--file", type=Path, help="publish the rows of this CSV file instead of live telemetry")
    parser.add_argument("--field", help="numeric column of the file (default: detected)")
    parser.add_argument("--group-field", help="column that names the source (default: detected)")
    parser.add_argument("--threshold", type=float, help="alert from this value on (default: a quantile of the events)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="how long telemetry is published before Spark starts (default: 5)"
    )
    parser.add_argument("--tls", action="store_true", help="with TLS, users of NATS, tokens and access rules")
    parser.add_argument(
        "--plot", type=Path, default=IMAGE, metavar="FILE",
        help="the image that is written: PNG, SVG or PDF (default: build/demo.png in the checkout)",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="keep the broker and its console until ^C")
    arguments = parser.parse_args()
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    if (arguments.field or arguments.group_field) and not arguments.file:
        parser.error("--field and --group-field are for --file")
    return arguments


def main() -> int:
    """The exit code."""
    arguments = parse_arguments()
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        with open_stage() as stage:
            play(stage, arguments)
    except (DemoFailed, NatslogError, OSError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    out.print(f"[bold green]done[/] in {time.monotonic() - started:.0f} s; all processes of the demo have been stopped")
    show_next()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
