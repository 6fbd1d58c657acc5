"""`natslog bench pub | read`: rates and latencies, as this machine sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from natslog.cli.common import Global, JsonFlag, NatsUrl, global_of, position_of
from natslog.cli.nats_options import LOGIN, NatsLogin
from natslog.cli.option_groups import takes
from natslog.cli.output import err, out, print_json
from natslog.config import DEFAULT_NATS_URL
from natslog.errors import InvalidRequest, NatslogError
from natslog.subjects import check_subject, is_wildcard
from natslog.units import format_size, parse_duration_s, parse_size_bytes

if TYPE_CHECKING:
    from natslog.cli.latencies import Latencies
    from natslog.client import Fetched, NatslogClient

app = typer.Typer(help="Measure publishing and reading.", no_args_is_help=True)

Progress = Callable[[float, int], None]
"""Shows which part of the work is done, from 0 to 1, and how many messages that is."""

_USUAL_DURATION = "5s"
_USUAL_FOLLOWED = "10s"
_MOST_PUBLISHERS = 64
_MOST_IN_FLIGHT = 1_000_000
_WAIT_MS = 20_000

Count = Annotated[int | None, typer.Option("--count", min=1, help="Stop after so many messages.")]


def _examples(*commands: str) -> str:
    return "\n\n".join(["Examples:", *commands])


@app.command(
    epilog=_examples(
        "natslog bench pub --stream orders",
        "natslog bench pub orders.test --size 1KiB --count 1000000 --publishers 2",
        "natslog bench pub orders.test --in-flight 1 --json",
    )
)
@takes(login=LOGIN)
def pub(
    context: typer.Context,
    subject: Annotated[
        str | None, typer.Argument(metavar="[SUBJECT]", help="Where to publish; or give --stream.")
    ] = None,
    stream: Annotated[
        str | None, typer.Option("--stream", help="Publish to a subject that this stream records.")
    ] = None,
    size: Annotated[str, typer.Option("--size", help="Of each message: 128, 1KiB.")] = "128",
    count: Count = None,
    duration: Annotated[
        str | None, typer.Option("--duration", help=f"Stop after this time: {_USUAL_DURATION} without --count.")
    ] = None,
    publishers: Annotated[
        int, typer.Option("--publishers", min=1, max=_MOST_PUBLISHERS, help="Connections that publish at once.")
    ] = 1,
    in_flight: Annotated[
        int,
        typer.Option("--in-flight", min=1, max=_MOST_IN_FLIGHT, help="Messages of a publisher that may wait for acks."),
    ] = 4000,
    ack: Annotated[
        bool, typer.Option("--ack/--no-ack", help="Wait until a stream has each message on disk, or do not.")
    ] = True,
    ack_timeout: Annotated[
        float, typer.Option("--ack-timeout", help="Give up after so many seconds without an ack.")
    ] = 30,
    nats_url: NatsUrl = DEFAULT_NATS_URL,
    *,
    login: NatsLogin,
    as_json: JsonFlag = False,
) -> None:
    """Publish generated messages; print the rate and, with acks, their latency.

    Streams that record the subject store the messages; none is created.
    An ack's latency counts from when its message was sent (--in-flight 1: of
    single messages).
    """
    size_bytes = parse_size_bytes(size, "--size")
    seconds = _seconds("--duration", duration, None if count is not None else _USUAL_DURATION)
    if count is not None and count < publishers:
        raise InvalidRequest(f"--count {count} is less than a message for each of --publishers {publishers}")
    to, streams = _target(global_of(context), subject, stream, ack)
    from natslog.cli.bench_load import Load

    load = Load(
        nats_url,
        login.credentials(),
        subject=to,
        size_bytes=size_bytes,
        in_flight=in_flight,
        ack="stored" if ack else "flush",
        ack_timeout_s=ack_timeout,
    )
    with _progress() as progress:
        done = load.run(publishers, count, seconds, progress)
    figures: dict[str, Any] = {
        "subject": to,
        "streams": streams,
        "publishers": publishers,
        "in_flight": in_flight if ack else None,
    }
    figures |= {"size_bytes": size_bytes, "messages": done.sent, "acked": done.acked if ack else None}
    figures |= _rates(done.sent, done.sent * size_bytes, done.seconds)
    figures["ack_latency_ms"] = done.latencies.to_json()
    if as_json:
        print_json(figures)
        return
    recorded = f" (stream {', '.join(streams)})" if streams else ""
    acked = f", acked {done.acked:,}" if ack else ""
    out.print(f"sent {done.sent:,} messages of {format_size(size_bytes)} to {to}{recorded}{acked}")
    _show(figures, "ack latency", done.latencies)


@app.command(
    epilog=_examples(
        "natslog bench read orders",
        "natslog bench read orders --from 2026-11-20T10:00:00Z --count 1000000",
        "natslog bench read orders --follow --duration 30s --json",
    )
)
def read(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    start: Annotated[
        str | None,
        typer.Option(
            "--from", help="An offset, a time (ISO-8601), earliest or latest; earliest, with --follow latest."
        ),
    ] = None,
    end: Annotated[str, typer.Option("--to", help="Where to stop: as --from; this one is not read.")] = "latest",
    count: Count = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new messages, and measure their delivery.")
    ] = False,
    duration: Annotated[
        str | None, typer.Option("--duration", help=f"With --follow, stop after this time: {_USUAL_FOLLOWED}.")
    ] = None,
    fetch_size: Annotated[str, typer.Option("--fetch-size", help="What one fetch takes at most.")] = "8MiB",
    as_json: JsonFlag = False,
) -> None:
    """Read a range of a stream; print the rate and the latency of fetches.

    With --follow, the latency of delivery as well: from when the broker recorded
    a message to its arrival here, by the clocks of both machines.
    """
    if follow and end != "latest":
        raise InvalidRequest("--follow has no end: leave --to out, or --follow")
    if duration is not None and not follow:
        raise InvalidRequest("--duration needs --follow; a range ends at --to, or after --count messages")
    seconds = _seconds("--duration", duration, _USUAL_FOLLOWED if follow else None)
    reading = _Reading(global_of(context).client(), stream, parse_size_bytes(fetch_size, "--fetch-size"))
    first = position_of(reading.client, stream, start or ("latest" if follow else "earliest"))
    upto = position_of(reading.client, stream, end)
    with _progress() as progress:
        if seconds is None:
            reading.read_range(first, upto if count is None else min(upto, first + count), progress)
        else:
            reading.follow(first, upto, count, seconds, progress)
    _report_reading(reading, first, as_json)


class _Reading:
    """Fetches of one stream, one after another, and what was measured of them."""

    def __init__(self, client: NatslogClient, stream: str, fetch_bytes: int) -> None:
        from natslog.cli.latencies import Latencies

        self.client, self.stream, self.fetch_bytes = client, stream, fetch_bytes
        self.fetches, self.deliveries = Latencies(), Latencies()
        self.messages = self.value_bytes = 0
        self.seconds = 0.0
        self.is_followed = False

    def read_range(self, start: int, end: int, progress: Progress) -> None:
        """Raises InvalidRequest: there is nothing in it."""
        if start >= end:
            raise InvalidRequest(f"stream {self.stream!r} has no messages from offset {start} on")
        at, began = start, time.perf_counter()
        while at < end:
            asked = time.perf_counter()
            fetched = self.client.fetch(self.stream, at, end, max_bytes=self.fetch_bytes)
            self.fetches.add(time.perf_counter() - asked)
            if fetched.next_offset <= at:
                raise InvalidRequest(f"stream {self.stream!r} ends at offset {at}, before {end}: it became shorter")
            at = fetched.next_offset
            self._count(fetched)
            progress((at - start) / (end - start), self.messages)
        self.seconds = time.perf_counter() - began

    def follow(self, start: int, new_from: int, count: int | None, within_s: float, progress: Progress) -> None:
        """Deliveries are measured of what is stored at `new_from` and later."""
        self.is_followed = True
        at, began = start, time.perf_counter()
        while (left_s := began + within_s - time.perf_counter()) > 0 and (count is None or self.messages < count):
            wait_ms = min(_WAIT_MS, max(1, round(left_s * 1000)))
            asked, is_waiting = time.perf_counter(), at >= new_from
            fetched = self.client.fetch(self.stream, at, max_bytes=self.fetch_bytes, wait_ms=wait_ms)
            arrived_us = time.time_ns() / 1000
            if not is_waiting:  # otherwise most of the time is that until a message came
                self.fetches.add(time.perf_counter() - asked)
            at = fetched.next_offset
            self._count(fetched)
            self._measure_deliveries(fetched, new_from, arrived_us)
            progress(max(1 - left_s / within_s, self.messages / count if count else 0), self.messages)
        self.seconds = time.perf_counter() - began

    def _count(self, fetched: Fetched) -> None:
        import pyarrow.compute as pc

        for batch in fetched.batches:
            self.messages += batch.num_rows
            self.value_bytes += pc.sum(pc.binary_length(batch.column("value"))).as_py() or 0

    def _measure_deliveries(self, fetched: Fetched, new_from: int, arrived_us: float) -> None:
        import numpy as np

        for batch in fetched.batches:
            is_new = batch.column("offset").to_numpy() >= new_from
            stored_us = batch.column("timestamp").to_numpy(zero_copy_only=False).astype("datetime64[us]")
            self.deliveries.add_each((arrived_us - stored_us[is_new].astype(np.int64)) / 1e6)


def _report_reading(reading: _Reading, first: int, as_json: bool) -> None:
    figures: dict[str, Any] = {"stream": reading.stream, "from": first, "messages": reading.messages}
    figures |= _rates(reading.messages, reading.value_bytes, reading.seconds)
    figures["fetches"] = reading.fetches.count
    figures["fetch_latency_ms"] = reading.fetches.to_json()
    if reading.is_followed:
        figures["delivery_latency_ms"] = reading.deliveries.to_json()
    if as_json:
        print_json(figures)
        return
    out.print(f"read {reading.messages:,} messages of stream {reading.stream} from offset {first}")
    _show(figures, f"latency of {reading.fetches.count:,} fetches", reading.fetches)
    if reading.deliveries.count:
        _show_latency(f"latency of {reading.deliveries.count:,} deliveries", reading.deliveries)
    elif reading.is_followed:
        out.print("no new message came")


def _seconds(name: str, given: str | None, usual: str | None) -> float | None:
    text = given or usual
    return None if text is None else parse_duration_s(text, name)


def _target(options: Global, subject: str | None, stream: str | None, ack: bool) -> tuple[str, list[str] | None]:
    """The subject to publish to, and the streams that record it; None: no broker could be asked.

    Raises:
        InvalidRequest: there is none that would ack. StreamNotFound.
    """
    from natslog.cli.recording import streams_on, why_never_acked

    if (subject is None) == (stream is None):
        raise InvalidRequest("give either a SUBJECT or --stream")
    with options.client() as client:
        if stream is not None:
            subject = _plain(client.stream(stream)["subject"])
        assert subject is not None, "one of both is given"
        check_subject(subject, wildcards=False)
        try:
            found = streams_on(client, subject)
        except NatslogError as error:
            err.print(f"whether a stream records {subject!r} is unknown: {error.message}")
            return subject, None
    if ack and (why := why_never_acked(found, subject)) is not None:
        raise InvalidRequest(f"{why} To publish without waiting for acks, use --no-ack")
    if not found:
        err.print(f"no stream records {subject!r}: this measures the NATS server alone")
    return subject, [body["name"] for body in found]


def _plain(pattern: str) -> str:
    """A subject that the pattern covers."""
    return ".".join("bench" if is_wildcard(token) else token for token in pattern.split("."))


def _rates(messages: int, size_bytes: int, seconds: float) -> dict[str, float]:
    per_second = 1 / max(seconds, 1e-9)
    return {
        "seconds": round(seconds, 3),
        "messages_per_second": round(messages * per_second),
        "bytes_per_second": round(size_bytes * per_second),
    }


def _show(figures: dict[str, Any], name: str, latencies: Latencies) -> None:
    out.print(
        f"in {figures['seconds']:.2f} s: {figures['messages_per_second']:,} messages/s, "
        f"{figures['bytes_per_second'] / 1e6:,.2f} MB/s"
    )
    _show_latency(name, latencies)


def _show_latency(name: str, latencies: Latencies) -> None:
    if found := latencies.to_json():
        out.print(f"{name}: " + ", ".join(f"{which} {value:,.2f} ms" for which, value in found.items()))


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal, nothing elsewhere."""
    if not err.is_terminal:
        yield lambda done, messages: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda done, messages: bar.update(task, completed=min(done, 1.0), description=f"{messages:,} messages")
