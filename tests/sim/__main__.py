"""`python -m tests.sim SEED`: one seed of every simulation with its trace; `--seeds N`: many, without."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from tests.sim import cluster_walk, cluster_world, consumer_world, raft_world

SIMULATIONS: dict[str, Callable[..., Any]] = {
    "raft": raft_world.run_seed,
    "cluster": cluster_world.run_seed,
    "walk": cluster_walk.run_walk,
    "consumer": consumer_world.run_seed,
}
CHUNK_SEEDS = 20
_PROGRESS_EVERY = 1000


def run_one(name: str, seed: int, *, has_trace: bool) -> bool:
    """Prints how it went. Returns whether every promise was held."""
    trace: list[str] | None = [] if has_trace else None
    try:
        told, is_green = str(SIMULATIONS[name](seed, trace=trace)), True
    except Exception as error:
        told, is_green = f"{type(error).__name__}: {error}", False
    for line in trace or ():
        print(line)
    if has_trace or not is_green:
        print(f"{name} seed {seed} is {'green' if is_green else 'RED'}: {told}", flush=True)
    return is_green


def run_chunk(name: str, seeds: range) -> int:
    """How many were red."""
    return sum(not run_one(name, seed, has_trace=False) for seed in seeds)


def run_many(names: list[str], start: int, count: int) -> bool:
    chunks = [range(at, min(at + CHUNK_SEEDS, start + count)) for at in range(start, start + count, CHUNK_SEEDS)]
    red = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name in names:
            found = 0
            for chunk, reds in zip(chunks, pool.map(partial(run_chunk, name), chunks), strict=True):
                found += reds
                if chunk.stop % _PROGRESS_EVERY < CHUNK_SEEDS:
                    print(f"{name}: {chunk.stop - start} of {count} seeds done, {found} red", flush=True)
            print(f"{name}: {count - found} of {count} seeds from {start} on are green", flush=True)
            red += found
    return not red


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the seed, or the first one of many")
    parser.add_argument("--seeds", type=int, help="so many from SEED on, in all processors, without traces")
    parser.add_argument("--only", choices=SIMULATIONS, action="append", help="of the simulations, this one")
    given = parser.parse_args()
    names = given.only or list(SIMULATIONS)
    if given.seeds:
        return not run_many(names, given.seed, given.seeds)
    greens = [run_one(name, given.seed, has_trace=True) for name in names]
    return not all(greens)


if __name__ == "__main__":
    sys.exit(main())
