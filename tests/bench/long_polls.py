"""Thousands of readers that wait for the same stream by long polls, at 1,000 messages a second, and what that takes.

Delivery counts from when a message was due at its publisher to when all of the answer that holds it has arrived.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from natslog.nats_server import NatsServer
from tests.bench.cluster_sides import natslog_cluster_side
from tests.bench.pairs import Comparison, console
from tests.bench.sides import ROOT, STREAM, natslog_side, raw_publish, resident_mib, scratch
from tests.bench.standing import cpu_seconds
from tests.harness import BrokerProcess

_RATE, _WARM_S, _SECONDS = 1000, 5.0, 30.0
_TOTAL = int(_RATE * (_WARM_S + _SECONDS))
_WITHIN_S = 100.0
_MOST_MS = 3000.0
_MOST_MIB = 600.0


def delivered(readers: int) -> list[Comparison]:
    """With one and with three replicas."""
    found = []
    with natslog_side() as (server, broker):
        found += _delivered(readers, 1, server, [broker])
    with natslog_cluster_side() as (server, brokers):
        leader = brokers[0].client().position(STREAM)["leader"]
        found += _delivered(readers, 3, server, sorted(brokers, key=lambda one: one is not brokers[leader - 1]))
    return found


def _delivered(readers: int, replicas: int, server: NatsServer, brokers: list[BrokerProcess]) -> list[Comparison]:
    """`brokers`: the leader first."""
    client = brokers[0].client()
    with scratch() as folder:
        with _pollers(brokers[0].url, readers, folder / "answers.npy") as pollers:
            time.sleep(2)
            before, began = [cpu_seconds(broker.pid) for broker in brokers], time.perf_counter()
            published = raw_publish(server, "paced", bytes=128, rate=_RATE, seconds=_SECONDS, warm=_WARM_S)
            passed = time.perf_counter() - began
            used = [(cpu_seconds(broker.pid) - was) / passed * 100 for broker, was in zip(brokers, before, strict=True)]
            done = json.loads(pollers.communicate(timeout=_WITHIN_S + 30)[0])
        answers = np.load(folder / "answers.npy")
    assert client.position(STREAM)["high_watermark"] == published["sent"] == _TOTAL
    title = f"{readers:,} long polls, {_RATE:,} messages/s, {replicas} replica{'s' * (replicas > 1)}"
    due = published["started"] + np.arange(_TOTAL) / _RATE
    each = [_latencies_ms(answers[answers[:, 0] == number], due) for number in range(readers)]
    all_ms = np.concatenate(each)
    slowest = max((float(np.percentile(one, 99)) for one in each if len(one)), default=0.0)
    notes = {name: float(np.percentile(all_ms, percent)) for name, percent in (("p50", 50), ("p90", 90), ("max", 100))}
    notes |= {"CPU of each broker, % of a core, the leader first": used, "pollers": done}
    notes |= {"ack p50": published["p50_ms"], "ack p99": published["p99_ms"]}
    memory = [resident_mib(broker.pid) for broker in brokers]
    notes |= {"RSS of each broker, MiB, the leader first": memory, "starved": _starved(answers, readers)}
    console.print(f"  {title}: {json.dumps(_rounded(notes))}")
    return [
        Comparison(
            f"{title}: delivery p99",
            "ms",
            _MOST_MS,
            ours=[float(np.percentile(all_ms, 99))],
            is_bound=True,
            notes=notes,
        ),
        Comparison(f"{title}: delivery p99 of the slowest reader", "ms", _MOST_MS, ours=[slowest], is_bound=True),
        Comparison(f"{title}: readers that missed messages", "", 0.0, ours=[float(notes["starved"])], is_bound=True),
        Comparison(f"{title}: CPU of the busiest broker", "% of a core", 100.0, ours=[max(used)], is_bound=True),
        Comparison(f"{title}: peak resident memory of a broker", "MiB", _MOST_MIB, ours=[max(memory)], is_bound=True),
    ]


@contextmanager
def _pollers(url: str, readers: int, out: Path) -> Iterator[subprocess.Popen[str]]:
    arguments = [url, STREAM, str(readers), str(_TOTAL), str(_WITHIN_S), str(out)]
    command = [sys.executable, "-m", "tests.bench.pollers", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def _latencies_ms(answers: npt.NDArray[np.float64], due: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of one reader, each message's after the warm-up."""
    offsets, arrived = _spread(answers)
    counted = offsets >= _RATE * _WARM_S
    delivered: npt.NDArray[np.float64] = (arrived[counted] - due[offsets[counted]]) * 1000
    return delivered


def _spread(answers: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Offset and time of arrival of each message in these answers."""
    starts, counts = answers[:, 1].astype(np.int64), (answers[:, 2] - answers[:, 1]).astype(np.int64)
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]]) if len(counts) else counts
    offsets = np.arange(counts.sum()) + np.repeat(starts - firsts, counts)
    return offsets, np.repeat(answers[:, 3], counts)


def _starved(answers: npt.NDArray[np.float64], readers: int) -> int:
    """How many readers did not get each message once, in order."""
    every = np.arange(_TOTAL)
    return sum(not np.array_equal(_spread(answers[answers[:, 0] == one])[0], every) for one in range(readers))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 1) if isinstance(value, float) else value
