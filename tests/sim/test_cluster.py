"""The cluster under many seeds (`NATSLOG_SIM_SEEDS`, 240 of them unless told) and three times as many walks: the first
sixteenth in `make test`, the others in `make test-all`.

See `cluster_world` and `cluster_walk`. To replay one: `python -m tests.sim SEED`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest

from natslog.model import BrokerId
from tests.sim.cluster_process import STREAM
from tests.sim.cluster_walk import run_walk
from tests.sim.cluster_world import RESUME_WITHIN_MS, Cluster, Result, run_seed

SEEDS = int(os.environ.get("NATSLOG_SIM_SEEDS", "240"))
PARTS = [
    pytest.param(range(SEEDS // 16), id="first"),
    pytest.param(range(SEEDS // 16, SEEDS), id="others", marks=pytest.mark.long),
]
WALKS_PER_SEED = 3
CHUNK_SEEDS = 5
TAIL_LINES = 60

Run = Callable[..., Result]


def outcomes(run: Run, seeds: range) -> list[Result | str]:
    """The result of each seed, or how it failed."""
    return [outcome(run, seed) for seed in seeds]


def outcome(run: Run, seed: int) -> Result | str:
    try:
        return run(seed)
    except Exception as error:
        trace: list[str] = []
        with_trace = partial(run, seed, trace=trace)
        try:
            with_trace()
        except Exception:
            return "\n".join([*trace[-TAIL_LINES:], f"seed {seed}: {type(error).__name__}: {error}"])
        return f"seed {seed} failed once and not again: {type(error).__name__}: {error}"


def results_of(run: Run, seeds: range) -> list[Result]:
    chunks = [seeds[at : at + CHUNK_SEEDS] for at in range(0, len(seeds), CHUNK_SEEDS)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [one for chunk in pool.map(partial(outcomes, run), chunks) for one in chunk]
    failures = [told for told in found if isinstance(told, str)]
    assert not failures, f"{len(failures)} of {len(seeds)} seeds failed, the first:\n{failures[0]}"
    return [result for result in found if isinstance(result, Result)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", PARTS)
def test_seeds_hold_every_promise(seeds: range) -> None:
    results = results_of(run_seed, seeds)
    for wanted, least in (("acked", 150), ("committed", 150), ("read", 150), ("versions", 8)):
        mean = sum(getattr(result, wanted) for result in results) / len(results)
        assert mean >= least, f"too little happens: {wanted} {mean:.0f} in a seed"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", PARTS)
def test_walks_hold_every_promise_but_progress(seeds: range) -> None:
    walks = range(seeds.start * WALKS_PER_SEED, seeds.stop * WALKS_PER_SEED)
    results = results_of(run_walk, walks)
    for wanted, least in (("acked", 4), ("committed", 4), ("versions", 8)):
        mean = sum(getattr(result, wanted) for result in results) / len(results)
        assert mean >= least, f"too little happens: {wanted} {mean:.0f} in a walk"


def test_same_seed_gives_same_world_in_any_process() -> None:
    code = (
        "from tests.sim.cluster_world import run_seed; from tests.sim.cluster_walk import run_walk; "
        "print(*[run(seed).digest for run in (run_seed, run_walk) for seed in (1, 2, 3)])"
    )
    here = [run(seed).digest for run in (run_seed, run_walk) for seed in (1, 2, 3)]
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert told.stdout.split() == here


def lose_leader(cluster: Cluster, lost: BrokerId, deed: str) -> None:
    """The leader of the first stream dies, parts, stands still, or has no room, for good."""
    leader = cluster.brokers[lost]
    match deed:
        case "killed":
            leader.is_up = False
        case "cut off":
            cluster.world.cut |= {pair for one in cluster.numbers for pair in ((leader.me, one), (one, leader.me))}
        case "stopped":
            leader.is_paused = True
        case "full":
            leader.disk.is_full = True


@pytest.mark.parametrize("deed", ["killed", "cut off", "stopped", "full"])
def test_writes_resume_while_a_majority_lives(deed: str) -> None:
    """Promise 6, also where the leader never comes back; nothing else fails."""
    writes_resume_without_leader(deed)


def writes_resume_without_leader(deed: str) -> None:
    for seed in range(8):
        cluster = Cluster(seed, faults_until_ms=5000.0, resizes=False)
        cluster.faults.blow_share = 0.0
        cluster.begin()
        cluster.world.run_until(4000.0)
        checker = cluster.checker.streams[STREAM]
        lost = BrokerId(checker.record.leader or 0)
        lose_leader(cluster, lost, deed)
        cluster.world.run_until(5000.0 + RESUME_WITHIN_MS)
        record, resumed_ms = checker.record, cluster.resumed_ms.get(STREAM)
        assert resumed_ms is not None, f"seed {seed}: nothing is acked after broker {lost} was {deed}: {record}"
        assert record.leader != lost, f"seed {seed}: {record}"
        assert resumed_ms <= 4000.0 + RESUME_WITHIN_MS, f"seed {seed}: writes resumed at {resumed_ms:.0f} ms"


def test_last_replica_dies_after_two_have_stopped_in_order() -> None:
    """Two of three are stopped at once, and the third dies for good: the two that are back hold everything."""
    two_stop_and_the_last_dies()


def two_stop_and_the_last_dies() -> None:
    for seed in range(8):
        cluster = Cluster(seed, faults_until_ms=6000.0, resizes=False)
        cluster.faults.blow_share, cluster.faults.kinds = 0.0, ["heal"]
        cluster.begin()
        cluster.world.run_until(4000.0)
        checker = cluster.checker.streams[STREAM]
        last = BrokerId(checker.record.leader or 0)
        others = [number for number in cluster.numbers if number != last]
        for number in others:
            cluster.stop(number)
        while any(cluster.brokers[number].is_up for number in others) and cluster.world.now_ms < 9000:
            cluster.world.run_until(cluster.world.now_ms + 5)
        cluster.brokers[last].is_up = False
        cluster.faults.until_ms = back_ms = cluster.world.now_ms + 5000
        for number in others:
            cluster.world.after(5000, lambda number=number, cluster=cluster: cluster.start(number))
        cluster.world.run_until(back_ms + RESUME_WITHIN_MS)
        resumed_ms = cluster.resumed_ms.get(STREAM)
        assert resumed_ms is not None, f"seed {seed}: nothing is acknowledged without broker {last}: {checker.record}"
