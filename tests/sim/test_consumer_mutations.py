"""Each rule of a consumer, switched off, turns the simulation red: otherwise the simulation would prove nothing."""

from __future__ import annotations

import pytest

from tests.sim.consumer_mutants import MUTATIONS
from tests.sim.consumer_world import Rules, first_red

SEEDS = 400
NOTICED_LATE = (
    "flow: any confirmation counts",
    "no alarm after a redelivery",
    "ack: of all before, by the number of the delivery",
    "last of each subject: one after the other is skipped",
    "stored: where to skip to is forgotten",
    "acks are answered when the start was moved",
    "interest: messages go while a consumer is damaged",
    "kept: what was acked during a store",
    "queue: messages with a delay stay in it",
    "gone: stays pending",
    "pull: gets all",
    "pull: gets messages when it has expired",
)
"""Rules that many seeds do not need: these take seconds."""


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.long) if one in NOTICED_LATE else one for one in MUTATIONS]
)
def test_rule_switched_off_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    assert first_red(Rules(), range(SEEDS)) is not None, f"{name}: {SEEDS} seeds saw nothing wrong"
