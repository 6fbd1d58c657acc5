"""Spark's real-time mode: from the producer's clock, through a source, Spark and a sink, to a consumer of the target.

natslog syncs both streams before anything is read from them; Kafka syncs neither, as it comes, and each append with
`flush.messages=1`. The other system is stopped meanwhile. The echo is the same way without Spark: a floor.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from natslog.client import NatslogClient
from tests.bench.jetstream.sides import natslog_beside
from tests.bench.kafka.broker import kafka_side
from tests.bench.pairs import Comparison, console
from tests.bench.real_time_clients import READY
from tests.bench.sides import ROOT, scratch

OURS, KAFKA, KAFKA_SYNCED = "natslog", "Kafka, without fsync", "Kafka, fsync for each append"
_WARM_S, _MEASURED_S = 8.0, 20.0
_ENDS_WITHIN_S = 120.0

Times = dict[str, float]


@contextmanager
def _process(module: str, *arguments: object, is_ready: bool = True) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", f"tests.bench.{module}", *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            while is_ready and (line := process.stdout.readline().strip()) != READY:  # type: ignore[union-attr]
                assert line or process.poll() is None, f"{module} has ended"
            yield process
            process.communicate(timeout=_ENDS_WITHIN_S)
        finally:
            process.kill()


def _times(kind: str, servers: str, target: str, rate: int) -> Times:
    """From `in` to `target`."""
    seconds = _WARM_S + _MEASURED_S
    count = int(rate * seconds)
    with _process("real_time_clients", "consume", kind, servers, target, count, _WARM_S) as consumer:
        with _process("real_time_clients", "produce", kind, servers, "in", rate, seconds, is_ready=False):
            pass
        found: Times = json.loads(consumer.communicate(timeout=_ENDS_WITHIN_S)[0].splitlines()[-1])
        assert found["messages"] == count, f"{found['messages']} of {count} messages arrived"
    return found


@contextmanager
def _ours() -> Iterator[tuple[str, str, str]]:
    with natslog_beside() as side:
        client = NatslogClient([side.broker_url])
        for name in ("in", "out"):
            client.create_stream(name, name)
        yield "nats", side.server.url, side.broker_url


@contextmanager
def _kafka(folder: Path, **settings: str) -> Iterator[tuple[str, str, str]]:
    with kafka_side(folder) as broker:
        for name in ("in", "out"):
            broker.create_topic(name, partitions=1, **settings)
        yield "kafka", broker.servers, broker.servers


def _measured(side: str, rate: int, trigger: str | None) -> Times:
    """Without a trigger: the echo."""
    with scratch() as folder, ExitStack() as held:
        synced = {"flush_messages": "1"} if side == KAFKA_SYNCED else {}
        system = _ours() if side == OURS else _kafka(folder / "kafka", **synced)
        kind, servers, http_url = held.enter_context(system)
        if trigger is None:
            return _times(kind, servers, "in", rate)
        name = "natslog" if side == OURS else "kafka"
        with _process("real_time_query", name, http_url, servers, trigger, folder / "checkpoint"):
            return _times(kind, servers, "out", rate)


def real_time(pairs: int) -> list[Comparison]:
    found: list[Comparison] = []
    for title, rate, trigger, bars in (
        ("echo without Spark", 1_000, None, {}),
        ("stateless, batches of 5 minutes", 1_000, "5 minutes", {"p50": 0, "p99": 2}),
        ("stateless, batches of 5 seconds", 1_000, "5 seconds", {}),
        ("stateless, batches of 5 minutes", 20_000, "5 minutes", {"p50": 2, "p99": 2}),
    ):
        found += _compared(
            f"{title}, {rate:,} rows/s", bars, pairs, lambda side, r=rate, t=trigger: _measured(side, r, t)
        )
    synced = _measured(KAFKA_SYNCED, 1_000, "5 minutes")
    console.print(f"  {KAFKA_SYNCED}: {synced}")
    found[2].notes[KAFKA_SYNCED] = synced
    return found


def _compared(title: str, bars: dict[str, float], pairs: int, run: Callable[[str], Times]) -> list[Comparison]:
    lines = {
        name: Comparison(f"real time, {title}: {name}", "ms", bars.get(name, 0), KAFKA, lower_is_better=True)
        for name in ("p50", "p99")
    }
    runs: dict[str, list[Times]] = {OURS: [], KAFKA: []}
    for number in range(pairs):
        for side in [OURS, KAFKA] if number % 2 == 0 else [KAFKA, OURS]:
            runs[side].append(run(side))
            console.print(f"  {title}: {side}: {_shown(runs[side][-1])}")
    for name, line in lines.items():
        line.ours, line.theirs = ([one[name] for one in runs[side]] for side in (OURS, KAFKA))
        line.notes["runs"] = runs
    return list(lines.values())


def _shown(times: Times) -> str:
    return ", ".join(f"{name} {value:.2f} ms" for name, value in times.items() if name.startswith("p"))


def main() -> None:
    """One side, by hand: `python -m tests.bench.real_time natslog 1000 "5 minutes"`."""
    side, rate, *trigger = sys.argv[1:]
    sides: dict[str, Any] = {"natslog": OURS, "kafka": KAFKA, "kafka-fsync": KAFKA_SYNCED}
    print(_measured(sides[side], int(rate), trigger[0] if trigger else None))


if __name__ == "__main__":
    main()
