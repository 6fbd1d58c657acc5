"""Random walks over one stream without time: any message may arrive at any later moment, twice, or never; every broker
learns of the metadata when chance will have it; sessions lapse, processes die and begin anew.

Smaller than the world of `cluster_world` (no Raft, the metadata is one list of commands) and much worse: what needs
three rare delays in a row there happens here every hundred walks. The checker is the same; only safety is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from natslog.cluster.commands import MoveReplicas
from natslog.cluster.controller import Controller
from tests.sim.cluster_messages import LONG_AGO_MS
from tests.sim.cluster_process import NAME
from tests.sim.cluster_removals import edited_rules
from tests.sim.cluster_stage import METADATA, Stage, Walker
from tests.sim.cluster_world import REMOVING_SHARE, Result, edited_min_isr, resized, result_of
from tests.sim.world import World

STEPS = 1000
MOST_IN_FLIGHT = (30, 30, 120)
COPY_SHARE = 0.25
DEEDS = {
    "learn": 5,
    "deliver": 20,
    "finish_one": 14,
    "fetch": 8,
    "publish": 3,
    "change": 2,
    "lead": 3,
    "decide": 5,
    "read": 3,
    "tick": 2,
    "catch_up": 4,
}
SPREAD = (0.2, 1, 1, 1, 3)
RARE_DEEDS = {"crash": 0.3, "bounce": 0.5, "move": 0.4, "resize": 0.3, "edit": 0.3, "restart_decider": 0.2}
RARE_SPREAD = (0, 0, 0, 1, 3)
"""What is done, and how often; each walk does some of it more, or less, or not at all."""


class Walk(Stage):
    """Args: seed: of all chance."""

    def __init__(self, seed: int) -> None:
        world = World(seed)
        chance = world.random
        self.least_min_isr = chance.choice((1, 2, 2, 2))
        super().__init__(world, brokers=chance.choice((3, 3, 4)), replicas=3, min_isr=self.least_min_isr)
        self.changed = 0
        self.removes = chance.random() < REMOVING_SHARE
        self.promptness = chance.choice((0.2, 0.7, 0.9))
        self.most_in_flight = chance.choice(MOST_IN_FLIGHT)
        if self.state.streams[NAME].settings.min_isr > 1 and chance.random() < 0.6:
            self.liar = chance.choice(self.numbers)
        self.weights = [share * chance.choice(SPREAD) for share in DEEDS.values()]
        self.weights += [share * chance.choice(RARE_SPREAD) for share in RARE_DEEDS.values()]

    def run(self, steps: int = STEPS) -> None:
        chance = self.world.random
        for name in chance.choices((*DEEDS, *RARE_DEEDS), self.weights, k=steps):
            self.world.now_ms += chance.uniform(0, 150)
            self.world.events += 1
            getattr(self, name)(self.brokers[chance.choice(self.numbers)])

    def send(self, sender: int, to: int, method: str, message: Any) -> None:
        if len(self.in_flight) >= self.most_in_flight:
            self.in_flight.pop(self.world.random.randrange(self.most_in_flight))
        super().send(sender, to, method, message)

    # ---- deeds ----

    def learn(self, walker: Walker) -> None:
        walker.learn(self.world.random.choice((1, 1, 2, 100)))

    def catch_up(self, walker: Walker) -> None:
        """Everything as it should be, for a moment: it learns, its disk is done, it asks and is answered."""
        walker.learn(1000)
        self.finish(walker)
        question = self.ask(walker)
        if question is not None and walker.follower is not None:
            leader = self.brokers[walker.follower.record.leader or 0]
            leader.learn(1000)
            if (answer := self.answer(leader, question)) is not None:
                walker.answered(answer)
            self.finish(walker)
            if self.world.random.random() < 0.6:
                self.catch_up_companion(walker, leader)

    def catch_up_companion(self, walker: Walker, leader: Walker) -> None:
        self.finish(leader)
        if (question := self.ask_for_companion(walker)) is not None:
            if (answer := self.answer(leader, question)) is not None:
                walker.answered(answer)
            self.finish(walker)

    def deliver(self, walker: Walker) -> None:
        chance = self.world.random
        if self.in_flight:
            oldest = max(0, len(self.in_flight) - 4) if chance.random() < self.promptness else 0
            at = chance.randrange(oldest, len(self.in_flight))
            to, method, message = self.in_flight[at] if chance.random() < COPY_SHARE else self.in_flight.pop(at)
            self.arrive(to, method, message)

    def finish_one(self, walker: Walker) -> None:
        """A disk is done with one thing."""
        if walker.inbox:
            walker.inbox.pop(0)()

    def fetch(self, walker: Walker) -> None:
        walker.fetch()

    def read(self, walker: Walker) -> None:
        if walker.first is not None and (end := walker.first.readable_end()) is not None:
            self.stream.reads(walker.first, end)

    def publish(self, walker: Walker) -> None:
        self.published += 1
        self.stream.publishes(self.published)
        for one in self.brokers.values():
            one.published(self.published)

    def change(self, walker: Walker) -> None:
        self.changed += 1
        for one in self.brokers.values():
            one.requested(self.changed)

    def lead(self, walker: Walker) -> None:
        for one in self.brokers.values():
            if one.first is not None and one.leader is not None:
                one.contact_ms = dict.fromkeys(self.numbers, self.world.now_ms)
                one.first.tick()

    def tick(self, walker: Walker) -> None:
        walker.tick()

    def decide(self, walker: Walker) -> None:
        """A broker of a registered life has a session, or has none."""
        chance = self.world.random
        registered = self.state.brokers
        alive = [
            number
            for number, one in self.brokers.items()
            if registered[number].incarnation == one.incarnation and chance.random() < 0.8
        ]
        for proposal in self.proposed_by_controller(alive):
            self.send(METADATA, METADATA, "commit", proposal)

    def restart_decider(self, walker: Walker) -> None:
        self.controller = Controller(LONG_AGO_MS)  # all have reported

    def move(self, walker: Walker) -> None:
        count = len(self.state.streams[NAME].target) or self.state.streams[NAME].settings.replicas
        walker.command(MoveReplicas(name=NAME, target=tuple(self.world.random.sample(self.numbers, count))))

    def resize(self, walker: Walker) -> None:
        walker.command(resized(NAME, self.numbers, self.least_min_isr, self.world.random))

    def edit(self, walker: Walker) -> None:
        chance = self.world.random
        if self.removes and chance.random() < 0.7:
            walker.command(edited_rules(chance, NAME))
        else:
            walker.command(edited_min_isr(NAME, chance.randint(self.least_min_isr, 3)))

    def crash(self, walker: Walker) -> None:
        self.end_life(walker, is_clean=self.world.random.random() < 0.3)

    def end_life(self, walker: Walker, *, is_clean: bool) -> None:
        disk = walker.disk
        if is_clean and not walker.is_writing:
            disk.clean_life = walker.incarnation
        elif walker.me == self.liar:
            for log in walker.disk.logs.values():
                log.keep(max(0, log.synced - self.world.random.choice((0, 0, self.world.random.randrange(1, 8)))))
        self.begin_life(walker.me)

    def bounce(self, walker: Walker) -> None:
        """It begins a new life that is registered at once; or one that ends gracefully before it was registered, and
        another.
        """
        chance = self.world.random
        number = self.liar if self.liar and chance.random() < 0.5 else walker.me
        self.crash(self.brokers[number])
        if chance.random() < 0.3:
            self.end_life(self.brokers[number], is_clean=True)
        self.commit(self.brokers[number].registration)


def run_walk(seed: int, trace: list[str] | None = None) -> Result:
    """One walk. Raises Violation, or an AssertionError of the core itself."""
    walk = Walk(seed)
    walk.world.trace = trace
    walk.run()
    return result_of(seed, walk.world, walk.checker)


def first_red_walk(seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first walk that fails, and how."""
    for seed in seeds:
        try:
            run_walk(seed)
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}"
    return None
