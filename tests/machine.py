"""A machine whose clocks a test sets: what `natslog.node.cluster_clock` reads there."""

from __future__ import annotations

from pathlib import Path

import pytest

from natslog.model import BrokerId
from natslog.node import cluster_clock
from natslog.node.cluster_clock import ClusterClock

TRUE_S = 1_800_000_000.0
"""The right time when the machine was started."""


class Machine:
    """Attributes: `elapsed_s`: since it was started; `ahead_s`: its wall clock, of the right time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.elapsed_s, self.ahead_s = 1000.0, 0.0
        monkeypatch.setattr(cluster_clock, "now_us", lambda: int(self.wall_s * 1e6))
        monkeypatch.setattr(cluster_clock, "elapsed_us", lambda: int(self.elapsed_s * 1e6))

    @property
    def true_s(self) -> float:
        return TRUE_S + self.elapsed_s

    @property
    def wall_s(self) -> float:
        return self.true_s + self.ahead_s

    def broker(self, folder: Path, *others: int) -> Ticking:
        """Number 1 of a cluster with these others."""
        return Ticking(self, folder, others)


class Ticking:
    """Its clock, and what happens once a second there. Attributes: `others_s`: how far the others' clocks are ahead."""

    def __init__(self, machine: Machine, folder: Path, others: tuple[int, ...]) -> None:
        self.machine = machine
        self.clock = ClusterClock(BrokerId(1), folder / "clock")
        self.others_s: dict[int, float | None] = dict.fromkeys(others, 0.0)
        self.tick()

    def tick(self) -> None:
        if self.clock.refresh([BrokerId(1), *map(BrokerId, self.others_s)]):
            self.clock.store()
        for number, ahead_s in self.others_s.items():
            if ahead_s is not None:
                wall_us = int((self.machine.true_s + ahead_s) * 1e6)
                self.clock.note(BrokerId(number), wall_us, int(self.machine.elapsed_s * 1e6))

    def after(self, seconds: float) -> None:
        """So much later."""
        until = self.machine.elapsed_s + seconds
        while self.machine.elapsed_s < until:
            self.machine.elapsed_s = min(until, self.machine.elapsed_s + max(1.0, seconds / 50))
            self.tick()
