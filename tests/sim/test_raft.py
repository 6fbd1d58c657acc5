"""Raft under many seeds (`NATSLOG_SIM_SEEDS`, 400 of them unless told), the first tenth in `make test`, the others in
`make test-all`: see `raft_world`.

To replay one: `run_seed(seed, trace=[])`.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.sim.raft_world import Result, run_seed

SEEDS = int(os.environ.get("NATSLOG_SIM_SEEDS", "400"))
PARTS = [
    pytest.param(range(SEEDS // 10), id="first"),
    pytest.param(range(SEEDS // 10, SEEDS), id="others", marks=pytest.mark.long),
]
CHUNK_SEEDS = 20
TAIL_LINES = 60


def outcomes(seeds: range) -> list[tuple[int, Result | str]]:
    """The result of each seed, or how it failed."""
    return [(seed, outcome(seed)) for seed in seeds]


def outcome(seed: int) -> Result | str:
    trace: list[str] = []
    try:
        return run_seed(seed, trace=trace)
    except Exception as error:
        return "\n".join([*trace[-TAIL_LINES:], f"seed {seed}: {type(error).__name__}: {error}"])


@pytest.mark.parametrize("seeds", PARTS)
def test_seeds_hold_every_promise(seeds: range) -> None:
    chunks = [seeds[at : at + CHUNK_SEEDS] for at in range(0, len(seeds), CHUNK_SEEDS)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [one for chunk in pool.map(outcomes, chunks) for one in chunk]
    failures = [told for _, told in found if isinstance(told, str)]
    assert not failures, f"{len(failures)} of {len(seeds)} seeds failed, the first:\n{failures[0]}"
    results = [result for _, result in found if isinstance(result, Result)]
    for wanted in ("terms", "committed", "commands", "reads", "snapshots", "memberships"):
        assert sum(getattr(result, wanted) for result in results) >= len(results), f"too little happens: {wanted}"


def test_same_seed_gives_same_world() -> None:
    for seed in (1, 2, 3):
        assert run_seed(seed) == run_seed(seed)


def test_who_learns_late_that_it_leads_an_earlier_term_may_lack_what_was_committed_later() -> None:
    """Raft promises committed entries to leaders of later terms only. In this world a vote of term 9 arrives when an
    entry is committed in term 10.
    """
    assert run_seed(31369).committed
