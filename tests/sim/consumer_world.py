"""A consumer of the JetStream API in a bad world: its stream, its clients and its leaders, under one seed. The leaders
run the code of the broker (`jetstream.consumers`) over a real log, in virtual time.

Leaders crash and continue from the last state that was stored; acks are lost, late, doubled and reordered; messages are
removed and purged; subscribers go; the configuration changes; the connection on which messages go out and the session
with the metadata are lost; reads are slow, and fail, and so does storing; disks are full; what is stored of a consumer
is damaged until the leader changes; consumers are deleted. After every step `Checker` asks what must always hold:

- no message is skipped: what the consumer reads is delivered in order, once each, before it is delivered again
- no message is forgotten: what was delivered is pending until it is acked, given up, or gone
- what was acked is not delivered again by the same leader, and what was answered by none
- deliveries of a message are counted without a gap, at most `max_deliver` of them; consumer sequences are dense
- a message is not delivered again before its time, nor new ones while `max_ack_pending` are pending
- the ack floor never goes back and never passes a pending message
- the number of messages that are left, in each delivery, is that of the stream
- a request gets at most the messages and bytes that it asks for, none after it has ended, and ends in its time
- a subscriber with flow control gets at most so much that it has not confirmed; rates and replays keep their pace
- messages that are not needed any more (for work queues and interest) are acked, and removed; none that a consumer
  reads is while what is stored of it is damaged
- nothing is assigned while it cannot be sent, or while another broker may lead
- an ack is answered as soon as it is stored, and never before

And when everything is healed: every message is delivered, and acked or given up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from natslog.jetstream.consumers.pulls import Status
from tests.sim.consumer_broker import Host
from tests.sim.consumer_checker import Checker, Lineage, Violation, require
from tests.sim.consumer_client import Client
from tests.sim.consumer_stream import SUBJECTS, Stream, plan_of
from tests.sim.world import World

_MS = 1_000_000
_MOST_MESSAGES = 250
_BEGAN_US = 1_790_000_000_000_000
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True, slots=True)
class Rules:
    """What the simulation runs: the classes are replaced by mutations."""

    host: type[Host] = Host
    chaos_ms: float = 6_000
    heal_ms: float = 90_000
    fault_every_ms: tuple[float, float] = (20.0, 500.0)


@dataclass(frozen=True, slots=True)
class Result:
    digest: str
    events: int
    lives: int
    deliveries: int
    again: int
    acks: int
    confirmations: int
    given_up: int
    pulls: int


class Scene:
    """The stream, a leader, a client, and what is done to them."""

    def __init__(self, world: World, rules: Rules, folder: Path) -> None:
        self.world, self.rules = world, rules
        self.is_healed = False
        chance = world.random
        self.plan = plan_of(chance)
        self.config = self.plan.config
        self.stream = Stream(self.plan.filters, folder, self.plan.retention)
        for _ in range(chance.choice((0, 5, 40))):
            self._publish_one()
        self.start, self.skip, self.resume = self._where_to_begin()
        self.checker = Checker(self.stream, self.start, self.skip, self.resume)
        world.drop_share, world.double_share, world.late_share = (chance.choice((0, 0.05, 0.2)) for _ in "123")
        self.client = Client(self)
        self.host = rules.host(self)
        world.after(1, self.publish)
        world.after(50, self.chaos)
        world.after(1, self.client.act)

    def _where_to_begin(self) -> tuple[int, list[int], int]:
        last = self.stream.last
        match self.plan.deliver:
            case "new":
                return last + 1, [], last + 1
            case "by_start_sequence":
                start = self.world.random.randint(1, last + 5)
                return start, [], last + 1
            case "last_per_subject":
                skip = self.stream.last_of_each()
                return (skip[0] if skip else last + 1), skip, last + 1
            case _:
                return 1, [], last + 1

    def begin_again(self) -> None:
        """Another consumer is created: it begins with the first message."""
        self.start, self.skip, self.resume = 1, [], self.stream.last + 1
        self.checker.begin_again(self.start)

    # ---- messages ----

    def publish(self) -> None:
        chance = self.world.random
        if self.is_healed or self.stream.last >= _MOST_MESSAGES:
            return
        self.world.after(chance.uniform(*self.plan.publish_ms), self.publish)
        for _ in range(chance.choice((1, 1, 3, 12))):
            self._publish_one()
        self.host.published()

    def _publish_one(self) -> None:
        chance = self.world.random
        size_bytes = chance.randint(*self.plan.sizes)
        self.stream.publish(chance.randrange(SUBJECTS), size_bytes, _BEGAN_US + int(self.world.now_ms * 1000))

    # ---- what goes out ----

    def told(self, one: Status) -> None:
        """A status arrives."""
        code = one.headers.decode().split()[1]
        now_us = self.host.us
        if not self.config.is_push:
            if one.to in self.client.interest:
                self.checker.told(one.to, code, now_us)
            if code != "100":
                self.client.ended(one.to)
        elif one.reply:
            self.checker.flow.ask(one.reply)
            self.client.asked(one.reply)
        else:
            self.client.heartbeat(one)

    def answered(self, answers: list[tuple[str, int]], stored: Lineage | None) -> None:
        if stored is not None:
            self.checker.answered([seq for _, seq in answers], stored)
        for reply, _ in answers:
            self.client.answered(reply)

    # ---- faults ----

    def chaos(self) -> None:
        chance = self.world.random
        if self.is_healed:
            return
        self.world.after(chance.uniform(*self.rules.fault_every_ms), self.chaos)
        deeds: list[Callable[[], None]] = [
            self.crash,
            self.crash,
            self.crash_soon,
            self.leave,
            self.remove,
            self.remove,
        ]
        deeds += [self.purge, self.limit, self.host.reconcile, self.host.reconcile, self.client.leave, self.change]
        deeds += [self.lose_link, self.lose_session, self.fill_disk, self.damage]
        if self.plan.retention != "limits":
            deeds += [self.host.delete, self.host.delete_at_store, self.host.delete_at_store]
        deed = chance.choice(deeds)
        self.world.note(deed.__name__)
        deed()

    def crash(self) -> None:
        if self.host.is_up and not self.is_healed:
            self.host.crash()
            self._start_later()

    def crash_soon(self) -> None:
        """While something is stored, perhaps."""
        self.world.after(self.world.random.uniform(0, 30), self.crash)

    def leave(self) -> None:
        if self.host.is_up:
            self.host.leave()
            self._start_later()

    def _start_later(self) -> None:
        delay_ms = self.world.random.choice((0.0, self.world.random.uniform(0, 1000)))
        self.world.after(delay_ms, lambda: None if self.host.is_up else self.host.start())

    def remove(self) -> None:
        chance = self.world.random
        for _ in range(chance.choice((1, 1, 5))):
            if self.stream.order:
                self.stream.remove(chance.choice(self.stream.order[-20:]))

    def purge(self) -> None:
        """Of which the leader is told."""
        upto = self._oldest()
        if upto and self.world.random.random() < 0.5:
            self.stream.purge(upto)
            self.host.purged()

    def limit(self) -> None:
        """The oldest messages are past a limit, of which nobody is told."""
        if upto := self._oldest():
            self.stream.limit(upto)

    def lose_link(self) -> None:
        """The connection on which messages go out."""
        chance = self.world.random
        lose = chance.choice((self.host.lose_link, self.host.lose_link_at_read))
        lose(chance.choice((1.0, 20.0, 400.0)))

    def fill_disk(self) -> None:
        self.host.fill_disk(self.world.random.choice((30.0, 1500.0)))

    def damage(self) -> None:
        """What is stored of the consumer: the next leader cannot read it."""
        if self.host.is_up:
            self.host.damage()
            self.crash()
            self.world.after(self.world.random.uniform(1100, 3000), self.crash)

    def lose_session(self) -> None:
        """Of the leader with the metadata."""
        self.host.lose_session(self.world.random.choice((5.0, 300.0)))

    def _oldest(self) -> int:
        stream, chance = self.stream, self.world.random
        upto = stream.first + chance.choice((1, 3, 10, 60)) - 1
        return min(upto, stream.last)

    def change(self) -> None:
        """How long acks may take, and how many messages may be pending: never fewer than now."""
        chance, config = self.world.random, self.config
        if config.ack_policy == "none" or config.backoff:
            return
        more = config.max_ack_pending + chance.choice((0, 5)) if config.max_ack_pending > 0 else -1
        wait = chance.choice((100, 300, 1000)) * _MS
        self.config = msgspec.structs.replace(config, ack_wait=wait, max_ack_pending=more)
        self.checker.changed_us = self.host.us
        self.host.change()

    # ---- the end ----

    def heal(self) -> None:
        world = self.world
        self.is_healed = True
        world.note("healed")
        world.drop_share = world.double_share = world.late_share = 0
        self.host.full_until_us = 0
        self.host.deletes_at_store = False  # it may not have stored anything since that was chosen
        if self.host.is_up and self.host.undamaged is not None:
            self.host.crash()
        self.host.is_damaged = False
        if not self.host.is_up:
            self.host.start()
        self.client.heal()

    def is_done(self) -> bool:
        return (
            self.host.machine is not None
            and self.checker.is_done()
            and not self._pending_in_stream()
            and not self.unneeded()
        )

    def unneeded(self) -> list[int]:
        """Messages that are to go, and have not."""
        if self.plan.retention == "limits":
            return []
        stream = self.stream
        unread = [seq for seq in stream.messages if not stream.has(seq)] if self.plan.retention == "interest" else []
        return unread + [seq for seq in stream.order if seq in self.checker.lineage.acked]

    def _pending_in_stream(self) -> bool:
        return any(
            self.stream.has(seq) for seq in self.checker.lineage.delivered if self.checker.lineage.is_pending(seq)
        )

    def check(self) -> None:
        if self.host.is_up and self.host.machine is not None:
            self.checker.watch(self.host.machine, self.host.us, is_served=self.host.is_served)


def run_seed(seed: int, rules: Rules = Rules(), trace: list[str] | None = None) -> Result:
    """One consumer. Raises Violation, or an error of the consumer itself."""
    with TemporaryDirectory(dir=_MEMORY, prefix="natslog-sim-") as folder:
        world = World(seed)
        world.trace = trace
        scene = Scene(world, rules, Path(folder) / "log")
        try:
            return _run(world, scene, rules)
        finally:
            scene.host.crash()
            scene.stream.log.close()


def _run(world: World, scene: Scene, rules: Rules) -> Result:
    world.note(json.dumps(msgspec.to_builtins(scene.config)))
    world.run_until(rules.chaos_ms, scene.check)
    scene.heal()
    end_ms = rules.chaos_ms + rules.heal_ms
    while not scene.is_done():
        left = f"{scene.checker.standing()}, not removed are {scene.unneeded()[:8]}"
        require(world.now_ms < end_ms, f"no progress within {rules.heal_ms} ms: {left}")
        world.run_until(world.now_ms + 250, scene.check)
    checker = scene.checker
    scene.host.reconcile()
    world.run_until(world.now_ms + 1000, scene.check)
    scene.host.note_exceeded()
    checker.compare(scene.host.machine)
    machine = scene.host.machine
    require(not len(machine.pending), f"{len(machine.pending)} are pending in the end")
    if scene.config.ack_policy != "none" and not checker.given_up:
        require(machine.floor[1] >= max(checker.lineage.acked, default=0), f"the floor stays at {machine.floor}")
    return Result(
        digest=world.digest,
        events=world.events,
        lives=scene.host.life,
        deliveries=checker.deliveries,
        again=checker.again,
        acks=checker.acks,
        confirmations=checker.confirmations,
        given_up=checker.given_up,
        pulls=checker.ended_pulls,
    )


def first_red(rules: Rules, seeds: range) -> tuple[int, str] | None:
    """The first seed that fails, and how. Raises what is no violation: a simulation that does not fit the code."""
    for seed in seeds:
        try:
            run_seed(seed, rules)
        except (Violation, AssertionError) as error:
            return seed, f"{type(error).__name__}: {error}"
    return None


__all__ = ["Result", "Rules", "Scene", "Violation", "first_red", "run_seed"]
