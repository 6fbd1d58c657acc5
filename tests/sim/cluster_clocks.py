"""Clocks of the simulation: every machine has a wall clock of its own, and a minority of them may be wrong.

What a broker knows of the others' clocks is asked for as in production; `cluster.stream_time` decides what follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from natslog.cluster.stream_time import ClockReading, ClockSample, agreed_us, beginning_us
from natslog.model import BrokerId

if TYPE_CHECKING:
    from tests.sim.cluster_process import Process

FIRST_US = 1_700_000_000_000_000
SKEW_US = 200_000
"""What right clocks are apart at most."""
ASK_EVERY_MS = 1000.0
WINDOW_US = 20_000_000
"""Of deduplication: longer than any retry takes to arrive, and shorter than any jump of a clock."""
JUMPS_US = (3_600_000_000, 60_000_000, -60_000_000, -3_600_000_000)


def elapsed_us(now_ms: float) -> int:
    return int(now_ms * 1000)


def right_us(now_ms: float) -> int:
    """What a right clock shows, but for its skew."""
    return FIRST_US + elapsed_us(now_ms)


class BrokerClocks:
    """What one life of a broker knows of all clocks."""

    def __init__(self, life: Process) -> None:
        self.life = life
        self.samples: dict[BrokerId, ClockSample] = {}

    @property
    def wall_us(self) -> int:
        return right_us(self.life.world.now_ms) + self.life.cluster.clock_ahead_us[self.life.me]

    def ask(self) -> None:
        for other in self.life.cluster.numbers:
            if other != self.life.me:
                self.life.cluster.send(self.life.me, other, "asked_for_clock", self.life.me)

    def told(self, broker: BrokerId, wall_us: int) -> None:
        self.samples[broker] = ClockSample(wall_us, elapsed_us(self.life.world.now_ms))

    def reading(self) -> ClockReading:
        wall_us, passed_us = self.wall_us, elapsed_us(self.life.world.now_ms)
        brokers = len(self.life.cluster.numbers)
        known = self.samples.values()
        agreed = agreed_us(known, wall_us, passed_us, brokers)
        return ClockReading(wall_us, passed_us, agreed, 0, beginning_us(known, wall_us, passed_us, brokers))


def remembered_from(now_us: int) -> int:
    """The oldest timestamp whose message is remembered: as `ingest.dedupe`."""
    return now_us - WINDOW_US + 1
