"""How brokers of the simulation notice that the process of another one has ended: its kernel closes the connections,
and refuses new ones. Who is cut off notices nothing, and now and then one broker is wrong. In a healthy cluster only
one is, for as long as its report counts: two of them are a majority of three.

Chance is that of a generator of its own, so that seeds without this are as they were.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from natslog.cluster.controller import REPORT_HOLDS_MS
from natslog.model import BrokerId

if TYPE_CHECKING:
    from tests.sim.cluster_world import Cluster

NOTICED_AFTER_MS = (1.0, 30.0)
MISTAKEN_EVERY_MS = 3000.0
MISTAKEN_FOR_MS = 1000.0


class Ends:
    """Args: is_noticed: None: in half of the seeds."""

    def __init__(self, cluster: Cluster, seed: int, is_noticed: bool | None) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.chance = Random(f"ends of {seed}")
        by_chance = self.chance.random() < 0.5
        self.is_noticed = by_chance if is_noticed is None else is_noticed

    def begin(self) -> None:
        if self.is_noticed:
            self.world.after(self.chance.expovariate(1 / MISTAKEN_EVERY_MS), self.mistake)

    def ended(self, number: BrokerId) -> None:
        """By all that are connected with it."""
        for other in self.cluster.numbers if self.is_noticed else ():
            if other != number and not {(other, number), (number, other)} & self.world.cut:
                self.world.after(self.chance.uniform(*NOTICED_AFTER_MS), lambda o=other: self.notice(o, number))

    def notice(self, by: BrokerId, ended: BrokerId) -> None:
        if not self.cluster.brokers[ended].is_up:
            self.take_as_ended(by, ended)

    def take_as_ended(self, by: BrokerId, ended: BrokerId) -> None:
        broker = self.cluster.brokers[by]
        self.world.note(f"{by} notices the end of {ended}")
        broker.when_awake(lambda: broker.process_ended(ended))

    def began(self, number: BrokerId) -> None:
        """The others are connected with it again."""
        for broker in self.cluster.brokers.values():
            broker.ended.discard(number)

    def mistake(self) -> None:
        """One broker takes another one for ended, which lives."""
        if self.world.now_ms < self.cluster.faults.until_ms:
            by, ended = self.chance.sample(self.cluster.numbers, 2)
            self.take_as_ended(by, ended)
            self.world.after(MISTAKEN_FOR_MS * self.chance.random(), lambda: self.correct(by, ended))
            alone_ms = MISTAKEN_FOR_MS + REPORT_HOLDS_MS if self.cluster.is_healthy else 0.0
            self.world.after(alone_ms + self.chance.expovariate(1 / MISTAKEN_EVERY_MS), self.mistake)

    def correct(self, by: BrokerId, ended: BrokerId) -> None:
        if self.cluster.brokers[ended].is_up:
            self.cluster.brokers[by].ended.discard(ended)
