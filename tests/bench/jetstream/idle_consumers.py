"""What 1,000 durable pull consumers of one stream cost while nothing happens: processor time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.bench.jetstream.connection import Api
from tests.bench.jetstream.sides import SIDES, Figures, Side, fill, in_pairs, line
from tests.bench.pairs import Comparison
from tests.bench.processor_time import processor_seconds
from tests.bench.sides import STREAM
from tests.bench.standing import resident_now_mib

_CONSUMERS = 1000
_FIRST = 10
_STORED = 1000
_SETTLE_S = 3.0
_IDLE_S = 10.0


def idle(pairs: int) -> list[Comparison]:
    """Bounds of the whole server side: the NATS server, and the broker."""
    title = f"{_CONSUMERS:,} durable consumers of one stream, idle"
    runs = in_pairs(title, {name: lambda side=side: _run(side) for name, side in SIDES.items()}, pairs)
    cpu = line(f"{title}: CPU", "% of a core", 2.0, runs, "core_percent", is_bound=True)
    memory = line(f"{title}: memory of each", "KB", 20.0, runs, "kilobytes_each", is_bound=True)
    memory.notes["created_per_s"] = {name: [run["created_per_s"] for run in side] for name, side in runs.items()}
    return [cpu, memory]


def _run(side: Callable[[], AbstractContextManager[Side]]) -> Figures:
    """Memory is not counted of the first consumers, which load what all of them need."""
    with side() as running:
        fill(running, _STORED)
        api = Api(running.server.port)
        _create(api, range(_FIRST))
        before = _resident_bytes(running)
        started = time.perf_counter()
        _create(api, range(_FIRST, _CONSUMERS))
        created_s = time.perf_counter() - started
        after = _resident_bytes(running)
        used = processor_seconds(running.pids)
        time.sleep(_IDLE_S)
        used = processor_seconds(running.pids) - used
        count = api.request(f"STREAM.INFO.{STREAM}")["state"]["consumer_count"]
        assert count == _CONSUMERS, f"there are {count} consumers"
        return {
            "core_percent": used / _IDLE_S * 100,
            "kilobytes_each": (after - before) / 1000 / (_CONSUMERS - _FIRST),
            "created_per_s": (_CONSUMERS - _FIRST) / created_s,
        }


def _create(api: Api, numbers: range) -> None:
    for number in numbers:
        config = {"durable_name": f"c{number}", "ack_policy": "explicit", "deliver_policy": "all"}
        api.request(f"CONSUMER.CREATE.{STREAM}.c{number}", {"stream_name": STREAM, "config": config})


def _resident_bytes(side: Side) -> float:
    """Of all processes, after what was started has come to rest."""
    time.sleep(_SETTLE_S)
    return sum(resident_now_mib(pid) for pid in side.pids) * 2**20
