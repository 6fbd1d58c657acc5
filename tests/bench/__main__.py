"""`make bench`: every comparison, or some (`--only publish,scan`), with `--pairs` of each."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from natslog.units import parse_size_bytes
from tests.bench import (
    cluster,
    cluster_losses,
    console_pages,
    cursors,
    failover,
    lag_overhead,
    long_polls,
    publishing,
    real_time,
    removal,
    report,
    security,
    singly,
    skewed_read,
    spark_append,
    spark_scan,
    spark_sink,
    standing,
    subjects,
    typed_payloads,
)
from tests.bench.jetstream import api_overhead, buckets, consuming, idle_consumers
from tests.bench.kafka import columnar, payloads, reading, sinks, streaming
from tests.bench.kafka import publishing as kafka_publishing
from tests.bench.kafka.sides import versions as kafka_versions
from tests.bench.pairs import Comparison, console
from tests.bench.sides import ROOT

_MEMORY_BOUND_MIB = 400.0
_KAFKA, _JETSTREAM, _CONSOLE, _REAL_TIME = "kafka", "jetstream", "console", "realtime"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--only",
        default="",
        help="comma-separated: publish, few, few-replicated, latency, flood, scan, singly, skew, typed, sink, append, "
        "streams, start, replicas, failover, idle, unacked, catchup, lag, polls, security, removal, subjects, "
        "cursors; or, run only if it is named, kafka or a part of it: kafka-columnar, kafka-scan, kafka-scan-singly, "
        "kafka-sunk, kafka-group, kafka-json, kafka-stream, kafka-sink, kafka-publish; or, likewise, jetstream: "
        "jetstream-pull, jetstream-push, jetstream-queue, each also with -singly, jetstream-kv, jetstream-idle, "
        "jetstream-publish; or realtime, beside Kafka; or console, which "
        "takes the screenshots of docs/console, too",
    )
    parser.add_argument("--kills", type=int, default=5, help="of the leader, by failover: of each kind")
    parser.add_argument("--transfers", type=int, default=10, help="planned ones, by failover: of each kind")
    parser.add_argument("--behind", default="2GiB", help="how much a broker catches up with, by catchup")
    parser.add_argument("--readers", type=int, default=2000, help="of one stream, by polls")
    parser.add_argument("--rows", type=int, default=5_000_000, help="of 128 bytes, by kafka")
    parser.add_argument("--messages", type=int, default=400_000, help="of 128 bytes in each run, by jetstream")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "bench", help="folder of results.json and the plot")
    given = parser.parse_args()
    peaks: list[float] = []
    parts: dict[str, Callable[[], list[Comparison]]] = {
        "publish": lambda: publishing.acked(given.pairs, peaks.append),
        "few": lambda: publishing.few_in_flight(given.pairs),
        "few-replicated": lambda: publishing.few_in_flight_replicated(given.pairs),
        "latency": lambda: publishing.latency(given.pairs),
        "flood": lambda: [publishing.flood(min(given.pairs, 3), peaks.append)],
        "scan": lambda: spark_scan.scans(given.pairs),
        "singly": lambda: singly.singly(given.pairs),
        "skew": lambda: skewed_read.skewed(given.pairs),
        "typed": lambda: typed_payloads.typed(given.pairs),
        "sink": lambda: spark_sink.sinks(given.pairs),
        "append": lambda: spark_append.appends(given.pairs),
        "streams": standing.many_streams,
        "start": lambda: [standing.start_with_a_large_log()],
        "replicas": lambda: cluster.replicated(given.pairs),
        "failover": lambda: failover.failover(given.kills, given.transfers),
        "idle": cluster.idle_replicas,
        "unacked": lambda: cluster_losses.without_acks(min(given.pairs, 3)),
        "catchup": lambda: cluster_losses.catching_up(parse_size_bytes(given.behind), given.pairs),
        "lag": lambda: lag_overhead.overhead(given.pairs),
        "polls": lambda: long_polls.delivered(given.readers),
        "security": lambda: security.costs(given.pairs),
        "removal": lambda: removal.removal(given.pairs),
        "subjects": subjects.subjects,
        "cursors": lambda: cursors.commits(given.pairs),
    }
    beside_kafka: dict[str, Callable[[], list[Comparison]]] = {
        "kafka-columnar": lambda: columnar.reads(given.pairs, given.rows),
        "kafka-scan": lambda: reading.scans(given.pairs, given.rows),
        "kafka-scan-singly": lambda: reading.scans_of_single_messages(given.pairs, given.rows),
        "kafka-sunk": lambda: reading.scans_of_sink_rows(given.pairs, given.rows),
        "kafka-group": lambda: reading.groups(given.pairs, given.rows),
        "kafka-json": lambda: payloads.json_rows(given.pairs, given.rows),
        "kafka-stream": lambda: streaming.streams(given.pairs, given.rows),
        "kafka-sink": lambda: sinks.writes(given.pairs, given.rows),
        "kafka-publish": lambda: kafka_publishing.publishes(given.pairs),
    }
    few = min(given.messages, 160_000)
    beside_jetstream: dict[str, Callable[[], list[Comparison]]] = {
        "jetstream-pull": lambda: consuming.pulled(given.pairs, given.messages),
        "jetstream-pull-singly": lambda: consuming.pulled(given.pairs, few, is_singly=True),
        "jetstream-push-singly": lambda: consuming.pushed(given.pairs, few, is_singly=True),
        "jetstream-queue-singly": lambda: consuming.queued(given.pairs, few, is_singly=True),
        "jetstream-push": lambda: consuming.pushed(given.pairs, given.messages),
        "jetstream-queue": lambda: consuming.queued(given.pairs, given.messages),
        "jetstream-kv": lambda: buckets.buckets(given.pairs, given.messages),
        "jetstream-idle": lambda: idle_consumers.idle(min(given.pairs, 3)),
        "jetstream-publish": lambda: api_overhead.published(given.pairs),
    }
    in_a_browser: dict[str, Callable[[], list[Comparison]]] = {"console": console_pages.pages}
    chosen = given.only.split(",") if given.only else list(parts)
    in_real_time: dict[str, Callable[[], list[Comparison]]] = {"realtime": lambda: real_time.real_time(given.pairs)}
    groups = {_KAFKA: beside_kafka, _JETSTREAM: beside_jetstream, _CONSOLE: in_a_browser, _REAL_TIME: in_real_time}
    group = next((one for one in groups if any(name.startswith(one) for name in chosen)), "")
    if group:
        if not all(name.startswith(group) for name in chosen):
            parser.error(f"--only {group}: it and its parts run without others, and have a file of their own")
        parts = groups[group]
        chosen = list(parts) if group in chosen else chosen
    for name in chosen:
        if name not in parts:
            parser.error(f"--only {name}: there are {', '.join(parts)}")
    started = time.monotonic()
    about = report.machine(ROOT)
    if group in (_KAFKA, _REAL_TIME):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends Kafka and its peer, too
        about["packages"] |= kafka_versions()
    found: list[Comparison] = []
    for name in chosen:
        console.print(f"{name} ({time.monotonic() - started:.0f} s so far)")
        found += parts[name]()
    if peaks:
        title = "peak resident memory at full load"
        found.append(Comparison(title, "MiB", _MEMORY_BOUND_MIB, ours=[max(peaks)], is_bound=True))
    seconds = time.monotonic() - started
    report.print_table(found)
    given.out.mkdir(parents=True, exist_ok=True)
    name = group or "results"
    report.write_json(found, about, seconds, given.out / f"{name}.json")
    report.plot(found, about, given.out / f"{name}.png")
    console.print(f"{len(found)} comparisons in {seconds:.0f} s; written to {given.out}")


if __name__ == "__main__":
    main()
