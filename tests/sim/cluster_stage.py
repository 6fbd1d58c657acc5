"""The brokers of one stream without time, Raft or chance: the metadata is one list of commands, and messages lie about
until somebody delivers them. `cluster_walk` does so by chance, `transcript` by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from natslog.cluster.commands import Proposal
from natslog.cluster.controller import Controller
from natslog.cluster.roles import FollowerReplica, LeaderReplica
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord
from tests.sim.cluster_broker import Roles
from tests.sim.cluster_checker import Checker
from tests.sim.cluster_messages import LONG_AGO_MS, Answer, Fetch
from tests.sim.cluster_process import NAME, STREAM, Disk, Life
from tests.sim.cluster_world import founding, founding_logs
from tests.sim.world import World

METADATA = 0
"""The number of the metadata leader."""


class Learner(Life):
    """Learns of the metadata command by command, late."""

    has_session = may_state_positions = True

    def __init__(self, stage: Stage, me: int, disk: Disk) -> None:
        super().__init__(stage, me, disk)
        self.applied = 0

    def every(self, interval_ms: float, work: Callable[[], None]) -> None:
        """Chance calls it."""

    def tick(self) -> None:
        if not self.is_registered:
            self.propose(self.registration)

    def propose(self, proposal: Proposal) -> None:
        self.cluster.send(self.me, METADATA, "commit", proposal)

    def report(self, method: str, message: Any) -> None:
        self.cluster.send(self.me, METADATA, method, message)

    def sync(self, done: Callable[[], None]) -> None:
        self.inbox.append(done)

    def learn(self, count: int) -> None:
        log = self.cluster.commands
        for proposal in log[self.applied : self.applied + count]:
            self.applied += 1
            self.cluster.checker.applied(self, self.applied, proposal, self.state.decide(proposal))
        self.look_at_records()

    def barrier(self, then: Callable[[], None]) -> None:
        self.learn(1000)
        then()


class Walker(Roles, Learner):
    """One life of one broker, without time; it keeps one stream."""

    @property
    def leader(self) -> LeaderReplica | None:
        return self.first.leader if self.first is not None else None

    @property
    def follower(self) -> FollowerReplica | None:
        return self.first.follower if self.first is not None else None

    @property
    def is_writing(self) -> bool:
        return self.first is not None and (self.first.is_writing or self.first.is_stepping)


class Stage:
    """Stands where `Cluster` stands, for the brokers and for the checker."""

    def __init__(self, world: World, *, brokers: int, replicas: int, min_isr: int) -> None:
        self.world = world
        self.numbers = tuple(BrokerId(one) for one in range(1, brokers + 1))
        self.state, snapshot = founding(self.numbers, (NAME,), replicas=replicas, min_isr=min_isr)
        self.disks = {
            one: Disk(snapshot=snapshot, clean_life=f"{one}.0.n0", logs=founding_logs(self.state, one))
            for one in self.numbers
        }
        self.checker = Checker(self, self.state)
        self.stream = self.checker.streams[STREAM]
        self.faults = self
        self.me = METADATA
        self.is_reckless = self.removes = self.is_healthy = False
        self.liar: BrokerId | None = None
        self.commands: list[Proposal] = []
        self.controller = Controller(LONG_AGO_MS)
        self.proposals = self.published = 0
        self.in_flight: list[tuple[int, str, Any]] = []
        self.brokers = {number: Walker(self, number, self.disks[number]) for number in self.numbers}
        for walker in self.brokers.values():
            self.commit(walker.registration)
        for walker in self.brokers.values():
            walker.learn(1000)
            self.finish(walker)

    def send(self, sender: int, to: int, method: str, message: Any) -> None:
        self.in_flight.append((to, method, message))

    def arrive(self, to: int, method: str, message: Any) -> None:
        getattr(self if to == METADATA else self.brokers[BrokerId(to)], method)(message)

    def ask(self, walker: Walker) -> Fetch | None:
        """The question a follower has now, taken from its hand."""
        if walker.first is not None:
            walker.first.fetching_since_ms = LONG_AGO_MS
        walker.fetch()
        return self._taken("fetched")

    def ask_for_companion(self, walker: Walker) -> Fetch | None:
        """The same, of the companion log."""
        if walker.first is not None:
            walker.first.companion.fetching_since_ms = LONG_AGO_MS
            walker.first.companion.fetch()
        return self._taken("fetched")

    def answer(self, leader: Walker, question: Fetch) -> Answer | None:
        leader.fetched(question)
        return self._taken("answered")

    def _taken(self, method: str) -> Any:
        return self.in_flight.pop()[2] if self.in_flight and self.in_flight[-1][1] == method else None

    def ack(self, stream_id: StreamId, offset: int, message: int) -> None:
        self.stream.acks(offset, message)

    def ack_change(self, stream_id: StreamId, offset: int, number: int) -> None:
        self.checker.companions[stream_id].acks(offset, number)

    def record_changed(self, old: StreamRecord, new: StreamRecord) -> None:
        """The checker says so; nothing is done about it."""

    def begin_life(self, number: BrokerId) -> Walker:
        self.brokers[number] = Walker(self, number, self.disks[number])
        return self.brokers[number]

    # ---- the metadata ----

    def commit(self, proposal: Proposal) -> None:
        self.commands.append(proposal)
        self.checker.applied(self, len(self.commands), proposal, self.state.decide(proposal))

    def finish(self, walker: Walker) -> None:
        """Its disk is done with everything."""
        while walker.inbox:
            walker.inbox.pop(0)()

    def positioned(self, where: tuple[StreamId, BrokerId, int, Epoch, int]) -> None:
        log_id, by, version, last_epoch, end = where
        self.controller.reported_position(log_id, version, by, last_epoch, end, self.world.now_ms)

    def reported(self, report: tuple[StreamId, BrokerId, Epoch]) -> None:
        self.controller.reported_unresponsive(STREAM, report[2], report[1], self.world.now_ms)

    def fit(self, report: tuple[BrokerId, bool]) -> None:
        """Every disk has room here."""

    def proposed_by_controller(self, alive: list[BrokerId]) -> list[Proposal]:
        """What it wants while these have a session."""
        proposals = []
        for command in self.controller.decide(self.state, alive, self.world.now_ms).commands:
            self.proposals += 1
            proposals.append(Proposal(id=f"controller:{self.proposals}", command=command))
        return proposals
