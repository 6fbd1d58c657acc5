"""Every history of three brokers up to a depth (`NATSLOG_EXPLORE_DEPTH`): no promise is broken.

Beside it, rules that are switched off: the exploration finds the shortest history that each of them prevents.
"""

from __future__ import annotations

import os

import pytest

from tests.sim.cluster_mutants import IN_TIME, WALKING
from tests.sim.explore import explore

DEPTH = int(os.environ.get("NATSLOG_EXPLORE_DEPTH", "4"))
MUTATIONS = (
    pytest.param("HW not held back by those of whom nothing is known", IN_TIME, id="of whom nothing is known"),
    pytest.param("KIP-966: HW moves below min_isr", WALKING, id="KIP-966", marks=pytest.mark.long),
)


def test_every_short_history_holds_every_promise() -> None:
    explored = explore(DEPTH, 1_000_000)
    assert explored.violation is None, explored.violation
    assert explored.depth == DEPTH
    assert explored.states > 1000


@pytest.mark.parametrize(("name", "patches"), MUTATIONS)
def test_exploration_finds_the_history_that_a_rule_prevents(
    name: str, patches: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    patches[name](monkeypatch)  # type: ignore[operator]
    explored = explore(5, 3000)
    assert explored.violation is not None, f"{name}: {explored} saw nothing wrong"
