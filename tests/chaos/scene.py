"""What a fault is, and where it happens. `Kind.begin` breaks something; the `Fault` it returns knows how to heal.

Each maker picks its own place at random: the stream's leader, a follower, the metadata leader, or several.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tests.chaos.history import History
from tests.chaos.removal_history import RULES
from tests.cluster_harness import Cluster, ClusterBroker

_READY_WITHIN_S = 90.0


@dataclass(slots=True)
class Fault:
    """`heal` returns when nothing is broken any more; `hold_s` is how long it stays broken.

    `keeps_majority`: False where the brokers, or NATS, are cut off from all. `hit`: the brokers that are not whole and
    connected meanwhile: a stream with fewer than `min_isr` others may stop. `broken_s`: when something more broke.
    `orderly_s`: when a broker that was whole, like all others, was asked to stop: acks must go on.
    """

    place: str
    keeps_majority: bool
    heal: Callable[[], None]
    hold_s: float
    notes: list[str] = field(default_factory=list)
    hit: Collection[int] = ()
    broken_s: list[float] = field(default_factory=list)
    orderly_s: list[float] = field(default_factory=list)


class Scene:
    """Where faults happen: the cluster, the stream they aim at, and chance."""

    def __init__(self, cluster: Cluster, history: History, stream: str, chance: random.Random) -> None:
        self.cluster, self.history, self.chance = cluster, history, chance
        self.ids: dict[str, str] = {}
        self.aim(stream)
        self.may_end: set[int] = set()
        self.alive_s = 0.0  # when all processes last answered after a start

    def aim(self, stream: str) -> None:
        """The next faults are about this stream."""
        if stream not in self.ids:
            found = self.cluster.stream(stream)
            assert found is not None, "the stream was created"
            self.ids[stream] = str(found["id"])
        self.stream, self.stream_id = stream, self.ids[stream]

    @property
    def keeps_files(self) -> bool:
        """Whether files of this stream are neither rewritten nor removed."""
        return self.stream not in RULES

    def some(self, most: int | None = None) -> list[ClusterBroker]:
        """A minority, of any size, in random order."""
        most = (len(self.cluster.brokers) - 1) // 2 if most is None else most
        first, _ = self.pick()
        others = [broker for broker in self.cluster.brokers if broker is not first]
        return [first, *self.chance.sample(others, self.chance.randint(0, max(0, most - 1)))]

    def names_of(self, brokers: list[ClusterBroker]) -> str:
        return ", ".join(self.name_of(broker) for broker in brokers)

    def pick(self, *roles: str) -> tuple[ClusterBroker, str]:
        """A broker in one of these roles, and what to call it."""
        role = self.chance.choice(roles or ("leader", "follower", "metadata leader"))
        leader, metadata = self.cluster.leader_of(self.stream), self.cluster.metadata_leader()
        brokers = self.cluster.brokers
        chosen = metadata if role == "metadata leader" else leader
        if role == "follower" or chosen is None:
            chosen = self.chance.choice([broker for broker in brokers if broker is not leader])
        return chosen, self.name_of(chosen)

    def name_of(self, broker: ClusterBroker) -> str:
        """With the roles that it has now."""
        holders = (("leader", self.cluster.leader_of(self.stream)), ("metadata leader", self.cluster.metadata_leader()))
        roles = [name for name, one in holders if one is broker]
        return f"broker {broker.number} ({', '.join(roles) or 'follower'})"

    def others(self, broker: ClusterBroker) -> list[int]:
        return [one.number for one in self.cluster.brokers if one is not broker]

    def hold(self, low_s: float = 2.0, high_s: float = 9.0) -> float:
        return self.chance.uniform(low_s, high_s)

    def start(self, *brokers: ClusterBroker) -> None:
        """Those that are down; returns when all are ready; `alive_s` is when all processes answered."""
        for broker in brokers:
            if not broker.is_up:
                broker.kill()
                broker.spawn()
        self.cluster.wait_alive(_READY_WITHIN_S)
        self.alive_s = time.monotonic()
        self.cluster.wait_ready(_READY_WITHIN_S)

    def unexpected_ends(self) -> None:
        """Called twice a second: a broker that ended unexpectedly."""
        for broker in self.cluster.brokers:
            if broker.is_wanted and broker.exit_code is not None:
                broker.is_wanted = False
                last = " | ".join(broker.output().strip().splitlines()[-3:])
                if broker.number not in self.may_end:
                    self.history.violate("5 ended by itself", f"broker {broker.number}: {last[-600:]}")


@dataclass(frozen=True, slots=True)
class Kind:
    """`needs`: network, disks or clocks. `may_overlap`: the next fault may come before all is in sync again."""

    begin: Callable[[Scene], Fault]
    needs: str = ""
    may_overlap: bool = False

    @property
    def name(self) -> str:
        return self.begin.__name__.replace("_", " ")
