"""Publishing: acked at two windows and sizes, paced for latency, and flooded without acks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from natslog.nats_server import NatsServer
from tests.bench.cluster_sides import jetstream_cluster_side, natslog_cluster_side
from tests.bench.pairs import Comparison, compare, console
from tests.bench.sides import (
    ROOT,
    STREAM,
    SUBJECT,
    jetstream_side,
    jetstream_stored,
    natslog_side,
    raw_publish,
    resident_mib,
    scratch,
)
from tests.harness import BrokerProcess, eventually

Peak = Callable[[float], None]

_SECONDS, _WARM = 2.0, 0.7
_FLOOD_SECONDS = 10.0


def _stored(broker: BrokerProcess) -> int:
    return int(broker.client().stream(STREAM)["high_watermark"])


def _natslog_rate(size: int, window: int, peak: Peak) -> float:
    """Acked messages a second into an empty stream; every ack is compared with what is stored."""
    with natslog_side() as (server, broker):
        done = raw_publish(server, "acked", bytes=size, window=window, seconds=_SECONDS, warm=_WARM)
        assert _stored(broker) == done["sent"], "what was answered is stored"
        peak(resident_mib(broker.pid))
        return done["rate"]


def _jetstream_rate(size: int, window: int, *, sync_always: bool = False) -> float:
    with jetstream_side(sync_always=sync_always) as server:
        done = raw_publish(server, "acked", bytes=size, window=window, seconds=_SECONDS, warm=_WARM)
        assert jetstream_stored(server) == done["sent"], "what was answered is stored"
        return done["rate"]


def acked(pairs: int, peak: Peak) -> list[Comparison]:
    lazy = "JetStream, default (fsync every 2 minutes)"
    cases = [(128, 4000, 1.7), (128, 40_000, 2.5), (1024, 4000, 1.0)]
    found = [
        compare(
            f"acked publish, {size} B, window {window:,}",
            "messages/s",
            bar,
            ours=lambda size=size, window=window: _natslog_rate(size, window, peak),
            peer=lazy,
            theirs=lambda size=size, window=window: _jetstream_rate(size, window),
            pairs=pairs,
        )
        for size, window, bar in cases
    ]
    always = compare(
        "acked publish, 128 B, window 40,000",
        "messages/s",
        80,
        ours=lambda: _natslog_rate(128, 40_000, peak),
        peer="JetStream, sync_interval: always",
        theirs=lambda: _jetstream_rate(128, 40_000, sync_always=True),
        pairs=pairs,
    )
    limit = compare(
        "share of what this server can answer, 128 B, window 40,000",
        "messages/s",
        0.8,
        ours=lambda: _natslog_rate(128, 40_000, peak),
        peer="a subscriber that stores nothing and acks at once",
        theirs=_echo_rate,
        pairs=min(pairs, 3),
    )
    return [*found, always, limit]


@contextmanager
def _echo(*, syncs: bool = False, copies: int = 0) -> Iterator[NatsServer]:
    """Our own ingest without a log: what remains is nats-server, the publisher and the two sockets; with `syncs`, also
    a write and a sync for what came together; with `copies`, the same in so many other processes.
    """
    with scratch() as folder:
        server = NatsServer(0, folder / "nats.log").start()
        file = [str(folder / "synced"), str(copies)] if syncs else []
        command = [sys.executable, "-m", "tests.bench.echo", str(server.port), SUBJECT, *file]
        echo = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        try:
            assert echo.stdout is not None
            assert echo.stdout.readline() == b"ready\n"
            yield server
        finally:
            echo.kill()
            echo.wait()
            server.stop()


def _echo_rate(window: int = 40_000, *, syncs: bool = False, copies: int = 0) -> float:
    with _echo(syncs=syncs, copies=copies) as server:
        return raw_publish(server, "acked", bytes=128, window=window, seconds=_SECONDS, warm=_WARM)["rate"]


def few_in_flight(pairs: int) -> list[Comparison]:
    """One connection that waits for acks: a commit is a message, or a few."""
    return _few(
        pairs,
        "",
        {
            "natslog": lambda window: _natslog_rate(128, window, lambda peak: None),
            "always": lambda window: _jetstream_rate(128, window, sync_always=True),
            "limit": lambda window: _echo_rate(window, syncs=True),
        },
    )


def few_in_flight_replicated(pairs: int) -> list[Comparison]:
    """The same with three replicas, on one machine: three brokers, three servers, three processes."""
    return _few(
        pairs,
        ", three replicas",
        {
            "natslog": _replicated_natslog_rate,
            "always": _replicated_jetstream_rate,
            "limit": lambda window: _echo_rate(window, syncs=True, copies=2),
        },
    )


def _replicated_natslog_rate(window: int) -> float:
    with natslog_cluster_side() as (server, _):
        return raw_publish(server, "acked", bytes=128, window=window, seconds=_SECONDS, warm=_WARM)["rate"]


def _replicated_jetstream_rate(window: int) -> float:
    with jetstream_cluster_side(sync_always=True) as server:
        return raw_publish(server, "acked", bytes=128, window=window, seconds=_SECONDS, warm=_WARM)["rate"]


def _few(pairs: int, where: str, sides: dict[str, Callable[[int], float]]) -> list[Comparison]:
    found = []
    for window in (1, 8, 64):
        title = f"acked publish, 128 B, {window} in flight{where}"
        runs: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(pairs):
            for name, rate in sides.items():
                runs[name].append(rate(window))
            shown = ", ".join(f"{name} {rates[-1]:,.0f}" for name, rates in runs.items())
            console.print(f"  {title}: pair {number + 1} of {pairs}: {shown} messages/s")
        always, limit = "JetStream, sync_interval: always", "a subscriber that writes and syncs, and nothing else"
        found += [
            Comparison(title, "messages/s", 0, always, runs["natslog"], runs["always"]),
            Comparison(f"{title}: natslog and the limit", "messages/s", 0, limit, runs["natslog"], runs["limit"]),
        ]
    return found


def latency(pairs: int) -> list[Comparison]:
    """Ack latency at 10,000 messages a second, one message each 100 µs."""
    options = {"bytes": 128, "rate": 10_000, "seconds": 3.0, "warm": 1.0}
    p99: dict[str, list[float]] = {"ours": [], "theirs": []}

    def ours() -> float:
        with natslog_side() as (server, _):
            done = raw_publish(server, "paced", **options)
        p99["ours"].append(done["p99_ms"])
        return done["p50_ms"]

    def theirs() -> float:
        with jetstream_side(sync_always=True) as server:
            done = raw_publish(server, "paced", **options)
        p99["theirs"].append(done["p99_ms"])
        return done["p50_ms"]

    always = "JetStream, sync_interval: always"
    title = "ack latency at 10,000 messages/s"
    median = compare(
        f"{title}, p50", "ms", 1.0, ours=ours, peer=always, theirs=theirs, pairs=pairs, lower_is_better=True
    )
    tail = Comparison(f"{title}, p99", "ms", 1.0, always, p99["ours"], p99["theirs"], lower_is_better=True)
    return [median, tail]


def _flooded_natslog(peak: Peak) -> dict[str, float]:
    with natslog_side() as (server, broker):
        done = raw_publish(server, "flood", bytes=128, seconds=_FLOOD_SECONDS)
        refused = 0.0
        until = time.monotonic() + 60
        while (stored := _stored(broker)) + refused < done["sent"] and time.monotonic() < until:
            time.sleep(0.2)
            refused = sum(count for name, count in broker.metrics().items() if "messages_refused" in name)
        peak(resident_mib(broker.pid))
        return {"sent": done["sent"], "rate": done["rate"], "stored": stored, "counted": refused}


def _flooded_jetstream() -> dict[str, float]:
    with jetstream_side() as server:
        done = raw_publish(server, "flood", bytes=128, seconds=_FLOOD_SECONDS)
        stored = eventually(lambda: _final_count(server), 60, "JetStream stores no more")
        return {"sent": done["sent"], "rate": done["rate"], "stored": stored}


def _final_count(server: NatsServer) -> int:
    before = jetstream_stored(server)
    time.sleep(1)
    return before if before == jetstream_stored(server) else 0


def flood(pairs: int, peak: Peak) -> Comparison:
    """Per cent of messages lost without waiting for acks; natslog counts those it refuses."""
    found = Comparison("flood without acks, 10 s: lost", "%", 0.0, "JetStream, default", is_bound=True)
    for number in range(pairs):
        runs = {"natslog": lambda: _flooded_natslog(peak), "JetStream": _flooded_jetstream}
        done = {name: runs[name]() for name in (list(runs) if number % 2 == 0 else reversed(list(runs)))}
        lost = {name: 100 * (1 - run["stored"] / run["sent"]) for name, run in done.items()}
        uncounted = done["natslog"]["sent"] - done["natslog"]["stored"] - done["natslog"]["counted"]
        assert uncounted == 0, f"{uncounted} messages are neither stored nor counted"
        found.ours.append(lost["natslog"])
        found.theirs.append(lost["JetStream"])
        found.notes.setdefault("runs", []).append(done)
        texts = [f"{name} lost {lost[name]:.2f} % of {run['rate']:,.0f}/s" for name, run in done.items()]
        console.print(f"  flood: pair {number + 1} of {pairs}: {'; '.join(texts)}")
    return found
