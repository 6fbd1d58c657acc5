"""How many cursors a second one broker commits: many in each request, beside one PUT after another."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from natslog.client import NatslogClient
from tests.bench.pairs import Comparison, compare
from tests.bench.sides import STREAM, natslog_side

_CURSORS = 1000
_SECONDS = 3.0
_CLIENTS = 8


def commits(pairs: int) -> list[Comparison]:
    """Bars: 10,000 a second in requests of 1,000, which is 100 ms for each request of one client."""
    with natslog_side() as (_, broker):
        client = broker.client()
        many = compare(
            f"cursors committed, {_CURSORS} in a request, one client",
            "cursors/s",
            0.0,
            ours=lambda: _in_requests(client),
            peer="one PUT after another, one client",
            theirs=lambda: _one_by_one([client]),
            pairs=pairs,
        )
        clients = [broker.client() for _ in range(_CLIENTS)]
        many.notes[f"PUTs/s of {_CLIENTS} clients at once"] = round(_one_by_one(clients))
    bound = Comparison(f"a request that commits {_CURSORS} cursors", "ms", 100.0, is_bound=True)
    bound.ours = [1000 * _CURSORS / rate for rate in many.ours]
    return [many, bound]


def _in_requests(client: NatslogClient) -> float:
    started, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - started) < _SECONDS:
        count += client.set_cursors((f"c{at}", STREAM, count + at) for at in range(_CURSORS))
    return count / taken


def _one_by_one(clients: list[NatslogClient]) -> float:
    """All clients together."""

    def work(number: int) -> float:
        started, count = time.perf_counter(), 0
        while (taken := time.perf_counter() - started) < _SECONDS:
            clients[number].set_cursor(f"c{number}", STREAM, count)
            count += 1
        return count / taken

    with ThreadPoolExecutor(len(clients)) as pool:
        return sum(pool.map(work, range(len(clients))))
