"""Damage of replicas under many seeds, and each of its rules switched off."""

from __future__ import annotations

from typing import Any

import pytest

from natslog.cluster.damage import Losses, RangeRepair, Remedy
from natslog.errors import CorruptLog, NatslogError
from tests.sim import damage_world
from tests.sim.damage_world import first_red

SEEDS = 1500
_refused = RangeRepair.refused


def silent_as_damaged(self: RangeRepair, error: NatslogError) -> None:
    """A replica that does not answer counts as damaged."""
    _refused(self, CorruptLog(error.message))


def from_one_only(self: RangeRepair, error: NatslogError) -> None:
    """Only the best replica is requested."""
    del self._left[1:]
    _refused(self, error)


def longest_damage(self: RangeRepair, error: NatslogError) -> None:
    """What is lost ends where the longest damage of any replica does."""
    _refused(self, error)
    if self.without_copy is not None:
        ends = [one.facts.get("end", self._end) for one in self._refusals]
        self.without_copy = self.without_copy[0], max(ends)


def as_one_round(self: RangeRepair, error: NatslogError) -> None:
    """What a replica lacks is not requested from those that lacked something before."""
    self._round_start = self._start
    _refused(self, error)


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "a replica that does not answer counts as damaged": (RangeRepair, "refused", silent_as_damaged),
    "only one replica is requested": (RangeRepair, "refused", from_one_only),
    "the longest damage is given up": (RangeRepair, "refused", longest_damage),
    "one round of requests": (RangeRepair, "refused", as_one_round),
    "every damage is final for clients": (Losses, "cover", lambda self, error: True),
    "damage of the only replica is referred to others": (Losses, "is_final", lambda self, error, **_: False),
    "damage in a sealed segment costs the role": (damage_world, "remedy_for", lambda *_, **__: Remedy.LOG),
    "damage of the only replica waits for another": (damage_world, "remedy_for", lambda *_, **__: Remedy.RANGE),
}


def test_damage_is_repaired_and_only_what_no_replica_has_is_lost() -> None:
    assert first_red(SEEDS) is None


@pytest.mark.parametrize("name", MUTATIONS)
def test_rule_switched_off_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, value = MUTATIONS[name]
    monkeypatch.setattr(target, attribute, value)
    assert first_red(SEEDS) is not None, f"{name}: {SEEDS} seeds saw nothing wrong"
