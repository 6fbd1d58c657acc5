"""Random walks over one stream without time: any message may arrive at any later moment, twice, or never; every broker
learns of the metadata when chance will have it; sessions lapse, processes die and begin anew.

Smaller than the world of `cluster_world` (no Raft, the metadata is one list of commands) and much worse: what needs three
rare delays in a row there happens here every few walks. The checker is the same; only safety is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from natslog.cluster.controller import Controller
from natslog.cluster.metadata import MoveReplicas, Proposal
from natslog.model import BrokerId, StreamSettings
from tests.sim.cluster_broker import Roles
from tests.sim.cluster_checker import Checker
from tests.sim.cluster_process import NAME, STREAM, Disk, Life
from tests.sim.cluster_world import Result, founding, result_of
from tests.sim.world import World

STEPS = 1000
MOST_IN_FLIGHT = (30, 30, 120)
COPY_SHARE = 0.25
DEEDS = {
    "learn": 5,
    "deliver": 20,
    "finish": 14,
    "fetch": 8,
    "publish": 3,
    "lead": 3,
    "decide": 5,
    "tick": 2,
    "catch_up": 4,
}
SPREAD = (0.2, 1, 1, 1, 3)
RARE_DEEDS = {"crash": 0.3, "bounce": 0.5, "move": 0.4, "restart_decider": 0.2}
RARE_SPREAD = (0, 0, 0, 1, 3)
"""What is done, and how often; each walk does some of it more, or less, or not at all."""


class Learner(Life):
    """Learns of the metadata command by command, late."""

    has_session = True

    def __init__(self, walk: Walk, me: int, disk: Disk) -> None:
        super().__init__(walk, me, disk)
        self.applied = 0

    def every(self, interval_ms: float, work: Callable[[], None]) -> None:
        """Chance calls it."""

    def tick(self) -> None:
        if not self.is_registered:
            self.propose(self.registration)

    def propose(self, proposal: Proposal) -> None:
        self.cluster.send(self.me, 0, "commit", proposal)

    def report(self, method: str, message: Any) -> None:
        self.cluster.send(self.me, 0, method, message)

    def sync(self, done: Callable[[], None]) -> None:
        self.inbox.append(done)

    def learn(self, count: int) -> None:
        log = self.cluster.commands
        for proposal in log[self.applied : self.applied + count]:
            self.applied += 1
            self.cluster.checker.applied(self, self.applied, proposal, self.state.decide(proposal))
        self.look_at_record()


class Walker(Roles, Learner):
    """One life of one broker, without time."""


class Walk:
    """Stands where `Cluster` stands, for the brokers and for the checker."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        chance = self.world.random
        self.numbers = tuple(BrokerId(one) for one in range(1, chance.choice((4, 4, 5))))
        self.disks = {}
        self.min_isr = chance.choice((1, 2, 2, 2))
        settings = StreamSettings(subject=NAME, replicas=3, min_isr=self.min_isr)
        self.state, snapshot = founding(self.numbers, settings)
        self.disks = {number: Disk(snapshot=snapshot) for number in self.numbers}
        self.checker = Checker(self, self.state)
        self.faults = self
        self.is_reckless = False
        self.promptness = chance.choice((0.2, 0.7, 0.9))
        self.most_in_flight = chance.choice(MOST_IN_FLIGHT)
        self.liar = chance.choice(self.numbers) if self.min_isr > 1 and chance.random() < 0.6 else None
        self.commands: list[Proposal] = []
        self.controller = Controller(0.0)
        self.proposals = self.published = 0
        self.in_flight: list[tuple[int, str, Any]] = []
        self.brokers = {number: Walker(self, number, self.disks[number]) for number in self.numbers}
        for walker in self.brokers.values():
            self.commit(walker.registration)
        self.weights = [share * chance.choice(SPREAD) for share in DEEDS.values()]
        self.weights += [share * chance.choice(RARE_SPREAD) for share in RARE_DEEDS.values()]

    def run(self, steps: int = STEPS) -> None:
        chance = self.world.random
        for name in chance.choices((*DEEDS, *RARE_DEEDS), self.weights, k=steps):
            self.world.now_ms += chance.uniform(0, 150)
            self.world.events += 1
            getattr(self, name)(self.brokers[chance.choice(self.numbers)])

    # ---- what brokers and the checker ask for ----

    def send(self, sender: int, to: int, method: str, message: Any) -> None:
        chance = self.world.random
        if len(self.in_flight) >= self.most_in_flight:
            self.in_flight.pop(chance.randrange(self.most_in_flight))
        self.in_flight.append((to, method, message))

    def ack(self, offset: int, message: int) -> None:
        self.checker.acks(offset, message)

    def record_changed(self, old: Any, new: Any) -> None:
        """Chance does enough already."""

    # ---- the metadata ----

    def commit(self, proposal: Proposal) -> None:
        self.commands.append(proposal)
        self.checker.applied(self, len(self.commands), proposal, self.state.decide(proposal))

    me = 0

    def positioned(self, where: tuple[Any, ...]) -> None:
        by, version, last_epoch, end = where
        self.controller.positioned(STREAM, version, by, last_epoch, end, self.world.now_ms)

    def reported(self, report: tuple[Any, ...]) -> None:
        self.controller.missed(STREAM, report[1], report[0], self.world.now_ms)

    # ---- deeds ----

    def learn(self, walker: Walker) -> None:
        walker.learn(self.world.random.choice((1, 1, 2, 100)))

    def catch_up(self, walker: Walker) -> None:
        """Everything as it should be, for a moment: it learns, its disk is done, it asks and is answered."""
        walker.learn(1000)
        self.finish(walker)
        leader = walker.follower and self.brokers[walker.follower.record.leader]
        if leader:
            leader.learn(1000)
            for method, to in (("fetched", leader), ("answered", walker)):
                if method == "fetched":
                    walker.fetching_since_ms = -1e9
                    walker.fetch()
                if self.in_flight and self.in_flight[-1][1] == method:
                    getattr(to, method)(self.in_flight.pop()[2])
            self.finish(walker)

    def deliver(self, walker: Walker) -> None:
        chance = self.world.random
        if self.in_flight:
            oldest = max(0, len(self.in_flight) - 4) if chance.random() < self.promptness else 0
            at = chance.randrange(oldest, len(self.in_flight))
            to, method, message = self.in_flight[at] if chance.random() < COPY_SHARE else self.in_flight.pop(at)
            getattr(self.brokers[BrokerId(to)] if to else self, method)(message)

    def finish(self, walker: Walker) -> None:
        """A disk is done."""
        if walker.inbox:
            walker.inbox.pop(0)()

    def fetch(self, walker: Walker) -> None:
        walker.fetch()

    def publish(self, walker: Walker) -> None:
        self.published += 1
        self.checker.publishes(self.published)
        for one in self.brokers.values():
            one.published(self.published)

    def lead(self, walker: Walker) -> None:
        for one in self.brokers.values():
            if one.leader is not None:
                one.heard_ms = dict.fromkeys(self.numbers, self.world.now_ms)
                one.lead(one.leader)

    def tick(self, walker: Walker) -> None:
        walker.tick()

    def decide(self, walker: Walker) -> None:
        """Whoever is of a registered life has a session, or has not."""
        chance = self.world.random
        registered = self.state.brokers
        alive = [
            number
            for number, one in self.brokers.items()
            if registered[number].incarnation == one.incarnation and chance.random() < 0.8
        ]
        for command in self.controller.decide(self.state, alive, self.world.now_ms).commands:
            self.proposals += 1
            self.send(0, 0, "commit", Proposal(id=f"controller:{self.proposals}", command=command))

    def restart_decider(self, walker: Walker) -> None:
        self.controller = Controller(self.world.now_ms)

    def move(self, walker: Walker) -> None:
        walker.command(MoveReplicas(name=NAME, target=tuple(self.world.random.sample(self.numbers, 3))))

    def crash(self, walker: Walker) -> None:
        chance, disk = self.world.random, walker.disk
        if chance.random() < 0.3 and not walker.is_writing:
            disk.clean_life = walker.incarnation
        elif walker.me == self.liar:
            disk.log.keep(max(0, disk.log.synced - chance.randrange(1, 8)))
        self.brokers[walker.me] = Walker(self, walker.me, disk)

    def bounce(self, walker: Walker) -> None:
        """It begins a new life, and is registered at once."""
        liar = self.liar if self.liar and self.world.random.random() < 0.5 else walker.me
        self.crash(self.brokers[liar])
        self.commit(self.brokers[liar].registration)


def run_walk(seed: int, trace: list[str] | None = None) -> Result:
    """One walk. Raises Violation, or an AssertionError of the core itself."""
    walk = Walk(seed)
    walk.world.trace = trace
    walk.run()
    return result_of(seed, walk.world, walk.checker)


def first_red_walk(seeds: range) -> tuple[int, str] | None:
    """The first walk that fails, and how."""
    for seed in seeds:
        try:
            run_walk(seed)
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}"
    return None
