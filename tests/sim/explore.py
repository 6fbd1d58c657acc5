"""Every order of events, up to a depth: three brokers, one stream, no chance. The smallest histories come first.

A state is what can be told apart later: logs, high watermarks, roles, the record, and who has learned how much of it.
States that were met before are not explored again. A history is replayed from its beginning, so nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from natslog.model import BrokerId
from tests.sim.cluster_process import NAME
from tests.sim.cluster_stage import Stage, Walker
from tests.sim.world import World

SILENCE_MS = 5000.0


class Small(Stage):
    """Three brokers; broker 1 leads, and one message is committed everywhere."""

    def __init__(self) -> None:
        super().__init__(World(0), brokers=3, replicas=3, min_isr=2)
        self.publish(self.brokers[BrokerId(1)])
        for _ in range(3):
            for number in (2, 3):
                self.fetch(self.brokers[BrokerId(number)])

    def publish(self, walker: Walker) -> None:
        self.published += 1
        self.stream.publishes(self.published)
        walker.published(self.published)
        self.finish(walker)

    def fetch(self, walker: Walker) -> None:
        """Asks its leader, as far as it knows, and takes the answer."""
        if walker.follower is None or (question := self.ask(walker)) is None:
            return
        leader = self.brokers[BrokerId(walker.follower.record.leader or 0)]
        if (answer := self.answer(leader, question)) is not None:
            walker.answered(answer)
            self.finish(walker)

    def learn(self, walker: Walker) -> None:
        walker.learn(1000)
        self.finish(walker)

    def crash(self, walker: Walker) -> None:
        self.brokers[walker.me] = self.begin_life(walker.me)
        self.commit(self.brokers[walker.me].registration)

    def hears_all(self, walker: Walker) -> None:
        self.change_isr(walker, self.numbers)

    def hears_none(self, walker: Walker) -> None:
        self.world.now_ms += SILENCE_MS
        self.change_isr(walker, ())

    def change_isr(self, walker: Walker, heard: tuple[BrokerId, ...]) -> None:
        if walker.first is not None and walker.leader is not None:
            walker.contact_ms = dict.fromkeys(heard, self.world.now_ms)
            walker.first.tick()
            self.commit_all()

    def lapses(self, walker: Walker) -> None:
        """The others have a session, and tell where their logs end; this one has none."""
        alive = [number for number in self.numbers if number != walker.me]
        for number in alive:
            if (first := self.brokers[number].first) is not None:
                first.report()
        self.deliver_reports()
        for proposal in self.proposed_by_controller(alive):
            self.commit(proposal)

    def deliver_reports(self) -> None:
        for _, method, message in self.in_flight:
            if method == "positioned":
                self.positioned(message)
        self.in_flight.clear()

    def commit_all(self) -> None:
        for _, method, message in self.in_flight:
            if method == "commit":
                self.commit(message)
        self.in_flight.clear()

    # ---- what can be told apart ----

    def state_of(self, walker: Walker) -> tuple[object, ...]:
        log, first = walker.log, walker.first
        role = None if first is None else (first.leader or first.follower)
        return (
            tuple(log.records),
            log.synced,
            first.high_watermark if first is not None else log.checkpoint,
            type(role).__name__,
            role.epoch if role is not None else 0,
            len(self.commands) - walker.applied,
        )

    @property
    def fingerprint(self) -> tuple[object, ...]:
        record = self.state.streams[NAME]
        agreed = record.leader, record.leader_epoch, record.isr, record.eligible, record.unproven
        return agreed, *(self.state_of(self.brokers[number]) for number in self.numbers)

    def check(self) -> None:
        for walker in self.brokers.values():
            if walker.first is not None and (end := walker.first.readable_end()) is not None:
                self.stream.reads(walker.first, end)


Deed = tuple[str, int]
DEEDS: tuple[Deed, ...] = tuple(
    (name, number)
    for name in ("publish", "fetch", "learn", "crash", "hears_all", "hears_none", "lapses")
    for number in (1, 2, 3)
)


def replayed(history: tuple[Deed, ...]) -> Small:
    """The state after this history. Raises Violation, or an AssertionError of the core itself."""
    stage = Small()
    for name, number in history:
        deed: Callable[[Walker], None] = getattr(stage, name)
        deed(stage.brokers[BrokerId(number)])
        stage.check()
    return stage


@dataclass(frozen=True, slots=True)
class Explored:
    """`violation`: the first history that broke a promise, and how; None where none did."""

    states: int
    depth: int
    violation: tuple[tuple[Deed, ...], str] | None = None


def explore(depth: int, most_states: int) -> Explored:
    """Breadth first, up to so many deeds and states."""
    seen = {Small().fingerprint}
    waiting: deque[tuple[Deed, ...]] = deque([()])
    reached = 0
    while waiting and len(seen) < most_states:
        history = waiting.popleft()
        if len(history) == depth:
            break
        for deed in DEEDS:
            longer = (*history, deed)
            try:
                fingerprint = replayed(longer).fingerprint
            except AssertionError as error:
                return Explored(len(seen), len(longer), (longer, f"{type(error).__name__}: {error}"))
            if fingerprint not in seen:
                seen.add(fingerprint)
                waiting.append(longer)
                reached = len(longer)
    return Explored(len(seen), reached)
