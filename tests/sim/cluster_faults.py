"""What is done to the cluster of the simulation: by chance, and just when it hurts (when a record has changed).

Each seed has faults of some kinds only, so that what they do together is not lost among all the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from natslog.model import BrokerId, StreamRecord
from tests.sim.cluster_clocks import JUMPS_US

if TYPE_CHECKING:
    from tests.sim.cluster_broker import Broker
    from tests.sim.cluster_replica import SimReplica
    from tests.sim.cluster_world import Cluster

KINDS = (
    *("crash", "crash_leader", "crash_two", "crash_all", "leave_one", "storm", "stop", "stop_two", "transfer"),
    *("cut", "isolate", "isolate_leader", "part", "one_way", "pause", "pause_leader"),
    *("slow_disk", "slow_metadata", "full_disk", "full_disk_of_leader", "lose_folder", "loss", "lateness"),
    *("restore_copy", "jump_clock"),
)
KINDS_OF_A_SEED = (4, 7, 12)


class Faults:
    """Args: `until_ms`: nothing is done from then on."""

    def __init__(self, cluster: Cluster, until_ms: float) -> None:
        self.cluster, self.world, self.until_ms = cluster, cluster.world, until_ms
        self.counts: dict[str, int] = {}
        self.is_metadata_slow = False
        chance = self.world.random
        self.kinds = chance.sample(KINDS, chance.choice(KINDS_OF_A_SEED))
        self.blow_share = chance.choice((0.0, 0.1, 0.4))
        self.interval_ms = chance.choice((800.0, 2400.0))

    def begin(self) -> None:
        self.world.after(2500, self.next)

    def next(self) -> None:
        if self.world.now_ms < self.until_ms:
            chance = self.world.random
            self.do("heal" if chance.random() < 0.2 else chance.choice(self.kinds))
            self.world.after(chance.uniform(50, self.interval_ms), self.next)

    def do(self, kind: str) -> None:
        if self.world.now_ms < self.until_ms:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.world.note(f"fault {kind}")
            getattr(self, kind)()

    def record_changed(self, old: StreamRecord, new: StreamRecord) -> None:
        """Some changes are not survived by those whom they concern."""
        chance = self.world.random
        if self.world.now_ms < self.until_ms and chance.random() < self.blow_share:
            blow = chance.choice(self.kinds)
            self.world.after(chance.uniform(0, chance.choice((20, 200))), lambda: self.do(blow))

    def any(self) -> BrokerId:
        return self.world.random.choice(self.cluster.numbers)

    def victim(self) -> BrokerId:
        """Whose disk lies is met more often."""
        liar = self.cluster.liar
        return liar if liar is not None and self.world.random.random() < 0.3 else self.any()

    @property
    def leaders(self) -> list[Broker]:
        """Those that lead any stream; stale ones too."""
        return [broker for broker in self.cluster.brokers.values() if broker.is_up and any(self.led_by(broker))]

    @staticmethod
    def led_by(broker: Broker) -> list[SimReplica]:
        return [replica for replica in broker.replicas.values() if replica.leader is not None]

    # ---- crashes ----

    def crash(self) -> None:
        self.cluster.crash(self.victim())

    def crash_leader(self) -> None:
        for broker in self.leaders:
            self.cluster.crash(broker.me)

    def crash_two(self) -> None:
        self.crash()
        self.crash()

    def crash_all(self) -> None:
        for number in self.cluster.numbers:
            self.cluster.crash(number)

    def leave_one(self) -> None:
        left = self.any()
        for number in self.cluster.numbers:
            if number != left:
                self.cluster.crash(number, down_ms=self.world.random.uniform(200, 6000))

    def storm(self) -> None:
        """A broker that starts and ends repeatedly, sometimes gracefully, sometimes before it is registered."""
        number, chance, at_ms = self.victim(), self.world.random, 0.0
        for _ in range(4):
            is_clean, down_ms = chance.random() < 0.5, chance.uniform(10, 150)
            self.world.after(at_ms, lambda c=is_clean, d=down_ms: self.cluster.crash(number, is_clean=c, down_ms=d))
            at_ms += down_ms + chance.uniform(5, chance.choice((60, 600)))

    def stop(self) -> None:
        """Gracefully, as on SIGTERM."""
        self.cluster.stop(self.victim())

    def stop_two(self) -> None:
        """Both at once: each of them leaves in-sync replicas that the other one counts on."""
        for number in self.world.random.sample(self.cluster.numbers, 2):
            self.cluster.stop(number)

    # ---- network, time, disk ----

    def cut(self) -> None:
        one, other = self.any(), self.any()
        self.world.cut |= {(one, other), (other, one)}

    def isolate(self) -> None:
        self._isolate(self.any())

    def isolate_leader(self) -> None:
        for broker in self.leaders:
            self._isolate(broker.me)

    def _isolate(self, one: BrokerId) -> None:
        numbers = self.cluster.numbers
        self.world.cut |= {(one, other) for other in numbers} | {(other, one) for other in numbers}

    def part(self) -> None:
        """A leader and one follower part; both see the others."""
        for broker in self.leaders:
            other = self.any()
            self.world.cut |= {(broker.me, other), (other, broker.me)}

    def one_way(self) -> None:
        self.world.cut.add((self.any(), self.any()))

    def pause(self) -> None:
        self.cluster.brokers[self.any()].pause(self.world.random.uniform(300, 6000))

    def pause_leader(self) -> None:
        for broker in self.leaders:
            broker.pause(self.world.random.choice((300, 1500, 5000)))

    def slow_disk(self) -> None:
        self.cluster.slow_disk = self.any()

    def full_disk(self) -> None:
        self.cluster.disks[self.any()].is_full = True

    def full_disk_of_leader(self) -> None:
        for broker in self.leaders:
            broker.disk.is_full = True

    def lose_folder(self) -> None:
        """For the one disk that loses more than it may: after a graceful stop a folder is missing."""
        if (liar := self.cluster.liar) is not None:
            self.cluster.stop(liar)
            self.cluster.loses_folder.add(liar)

    def restore_copy(self) -> None:
        """Of the one disk that loses more than it may: it is copied, another life begins on it, and after that one the
        copy is restored; or the newest disk again where a copy is in its place.
        """
        cluster, liar, chance = self.cluster, self.cluster.liar, self.world.random
        if liar is None:
            return
        if liar not in cluster.newest_disks:
            cluster.copy(liar)
            cluster.crash(liar, is_clean=chance.random() < 0.5, down_ms=chance.uniform(20, 200))
        is_clean, down_ms = chance.random() < 0.7, chance.uniform(20, 200)

        def restore() -> None:
            if self.world.now_ms < self.until_ms:
                cluster.is_restored.add(liar)
                cluster.crash(liar, is_clean=is_clean, down_ms=down_ms)

        self.world.after(chance.uniform(500, 2500), restore)

    def jump_clock(self) -> None:
        """Always of the same minority: what was asked of a wrong clock counts for a while after it was set right."""
        cluster, chance = self.cluster, self.world.random
        broker = chance.choice(cluster.unreliable_clocks)
        cluster.clock_ahead_us[broker] = chance.choice(JUMPS_US)

    def slow_metadata(self) -> None:
        self.is_metadata_slow = True

    def loss(self) -> None:
        self.world.drop_share = self.world.random.choice((0.02, 0.2))
        self.world.double_share = self.world.random.choice((0.0, 0.2))
        self.world.late_share = self.world.random.choice((0.0, 0.1, 0.1))

    def lateness(self) -> None:
        """Nothing is lost; much comes late, and twice."""
        self.world.drop_share, self.world.double_share = 0.0, 0.5
        self.world.late_share = 0.25

    def transfer(self) -> None:
        """An operator, or the controller, moves leadership by hand."""
        to = self.any()
        for broker in self.leaders:
            for replica in self.led_by(broker):
                broker.when_awake(lambda replica=replica: replica.hand_over(to))

    def heal(self) -> None:
        self.world.cut = set()
        self.cluster.slow_disk, self.is_metadata_slow = None, False
        for disk in (*self.cluster.disks.values(), *self.cluster.newest_disks.values()):
            disk.is_full = False
        self.cluster.clock_ahead_us |= self.cluster.clock_skew_us
        self.world.drop_share = self.world.double_share = self.world.late_share = 0.0
