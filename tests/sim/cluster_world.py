"""A whole cluster of pure cores under one seed: Raft with the metadata state machine, the controller, and the replicas
of one to three streams, on disks that lose what was not synced (and one disk that loses more), in a network that fails;
publishers that retry, readers, an operator. `cluster_checker` says what must never be.

Of five brokers three keep each stream, which is moved about. In a reckless seed disks are damaged beyond what is
tolerated: the stream may stop then, and must not lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from natslog.cluster.commands import (
    BrokerRecord,
    Command,
    CreateStream,
    DrainBroker,
    EditStream,
    MoveReplicas,
    PauseStream,
    Proposal,
    RegisterBroker,
    ResizeReplicas,
)
from natslog.cluster.epochs import NO_EPOCH
from natslog.cluster.features import LATEST_LEVEL
from natslog.cluster.metadata import Metadata
from natslog.cluster.roles import quorum_position
from natslog.consensus import HardState, Index, Member, Membership, Snapshot, Term
from natslog.model import BrokerId, Epoch, StreamId, StreamSettings, companion_id
from tests.sim.cluster_broker import Broker
from tests.sim.cluster_checker import PUBLISHERS, Checker, StreamChecker, publisher_of
from tests.sim.cluster_clocks import SKEW_US
from tests.sim.cluster_ends import Ends
from tests.sim.cluster_faults import Faults
from tests.sim.cluster_process import IDS, NAMES, Disk, Log, encode, listed_lives
from tests.sim.cluster_removals import edited_rules
from tests.sim.cluster_replica import SimReplica
from tests.sim.raft_checker import Violation, require
from tests.sim.world import World

PUBLISH_EVERY_MS = 70.0
RETRY_AFTER_MS = 700.0
CHANGE_EVERY_MS = 350.0
CHANGE_TRIES = 6
TRIES = 4
READ_EVERY_MS = 100.0
OPERATE_EVERY_MS = 400.0
FAULTS_UNTIL_MS = 16_000.0
RESUME_WITHIN_MS = 10_000.0
RESIZED_SHARE = 0.3
HEALTHY_EVERY, FIRST_HEALTHY = 16, 3
HEALTHY_INTERVAL_MS = 6_000.0
SILENT_AFTER, SILENCE_MS = 40, 4_000.0
REMOVING_SHARE = 0.35
HANDOVER_MS = 2_000.0
RECEIVED_WITHIN_MS = 500.0
END_MS = FAULTS_UNTIL_MS + 12_000.0
CLIENT = 0
SLOW_MS = {"step": 300.0, "proposed": 6000.0}
"""Delays of what goes through Raft, while that is slow."""


class Cluster:
    """Args: `resizes`: in some seeds the number of replicas and `min_isr` are edited. `is_healthy`: brokers are stopped
    and started in order, leadership is transferred, publishers are silent now and then; nothing else happens.
        `notices_ends`: whether brokers notice the ends of others (`Ends`); None: in half of the seeds.
    """

    def __init__(
        self,
        seed: int,
        *,
        faults_until_ms: float = FAULTS_UNTIL_MS,
        resizes: bool = True,
        is_healthy: bool = False,
        notices_ends: bool | None = None,
    ) -> None:
        self.is_healthy = is_healthy
        self.world = World(seed)
        chance = self.world.random
        self.world.late_ms = (50.0, chance.choice((1000.0, 6000.0)))
        self.world.delay_ms = (1.0, chance.choice((12.0, 12.0, 90.0)))
        self.numbers = tuple(BrokerId(one) for one in range(1, chance.choice((4, 4, 4, 6))))
        min_isr = self.least_min_isr = 1 if chance.random() < 0.15 else 2
        names = NAMES[: chance.choice((1, 1, 2, 3))]
        state, snapshot = founding(self.numbers, names, replicas=3, min_isr=min_isr)
        hard_state = HardState(term=Term(1), commit=Index(1))
        self.stream_ids = tuple(IDS[name] for name in names)
        self.disks = {
            number: Disk(hard_state=hard_state, snapshot=snapshot, logs=founding_logs(state, number))
            for number in self.numbers
        }
        self.is_reckless = chance.random() < 0.1
        self.resizes = resizes and chance.random() < RESIZED_SHARE
        has_liar = min_isr > 1 and not self.is_reckless and chance.random() < 0.6
        self.liar = chance.choice(self.numbers) if has_liar else None
        self.checker = Checker(self, state)
        self.faults = Faults(self, faults_until_ms)
        if is_healthy:
            self.is_reckless, self.resizes, self.liar = False, False, None
            self.faults.kinds, self.faults.blow_share = ["stop", "transfer"], 0.0
            self.faults.interval_ms = HEALTHY_INTERVAL_MS
        self.ends = Ends(self, seed, notices_ends)
        self.slow_disk: BrokerId | None = None
        self.loses_folder: set[BrokerId] = set()
        self.copies: dict[BrokerId, Disk] = {}
        self.copied = 0
        self.newest_disks: dict[BrokerId, Disk] = {}  # of those that run on a restored copy
        self.is_restored: set[BrokerId] = set()
        self.clock_skew_us = {number: chance.randint(-SKEW_US, SKEW_US) for number in self.numbers}
        self.clock_ahead_us = dict(self.clock_skew_us)
        self.unreliable_clocks = chance.sample(self.numbers, (len(self.numbers) - 1) // 2)
        self.proposals = self.published = self.changed = 0
        self.ack_ms = 0.0  # when a change was acked last
        self.changes_from_ms = chance.choice((1200.0, 3000.0, 8000.0, 2 * END_MS))  # in some seeds there are none
        self.removes = self.changes_from_ms < END_MS and chance.random() < REMOVING_SHARE
        self.resumed_ms: dict[StreamId, float] = {}
        self.heard_acks: set[int] = set()
        self.arrivals: dict[tuple[int, int], float] = {}
        self.operation: Proposal | None = None
        self.brokers = {number: Broker(self, number, self.disks[number]) for number in self.numbers}

    def stream_of(self, message: int) -> StreamId:
        return self.stream_ids[message // PUBLISHERS % len(self.stream_ids)]

    def send(self, sender: int, to: int, method: str, message: Any) -> None:
        asks, asked = self.brokers[BrokerId(sender)], self.brokers[BrokerId(to)]
        if not asks.admits(asked.me, asked.listed):
            return
        listed = asks.listed

        def deliver(message: Any) -> None:
            broker = self.brokers[BrokerId(to)]
            if broker.admits(asks.me, listed):
                broker.when_awake(lambda: getattr(broker, method)(message))

        if sender == to:
            self.world.after(0.0, lambda: deliver(message))
        elif method in SLOW_MS and self.faults.is_metadata_slow:
            delay_ms = self.world.random.uniform(0, SLOW_MS[method])
            self.world.after(delay_ms, lambda: self.world.send(sender, to, deliver, message))
        else:
            self.world.send(sender, to, deliver, message)

    # ---- publishers ----

    def publish(self) -> None:
        self.published += 1
        self.try_to_publish(self.published, TRIES)
        if self.world.now_ms < END_MS - 3000:
            pause_ms = self.world.random.expovariate(len(self.stream_ids) / PUBLISH_EVERY_MS)
            if self.is_healthy and self.published % SILENT_AFTER == 0:
                pause_ms += SILENCE_MS
            self.world.after(pause_ms, self.publish)

    def try_to_publish(self, message: int, tries: int) -> None:
        """To all that lead, or believe so, on one connection: in order, and lost at times; again until it is acked."""
        if message in self.heard_acks or tries == 0:
            return
        stream_id = self.stream_of(message)
        self.checker.streams[stream_id].publishes(message)
        chance, world = self.world.random, self.world
        for number in self.numbers:
            replica = self.brokers[number].replicas.get(stream_id)
            if replica is not None and replica.leader is not None and chance.random() >= world.drop_share:
                line = publisher_of(message), number
                at_ms = max(world.now_ms + chance.uniform(*world.delay_ms), self.arrivals.get(line, 0.0))
                self.arrivals[line] = at_ms + 0.001
                world.after(at_ms - world.now_ms, lambda number=number: self.arrive(number, message))
        world.after(RETRY_AFTER_MS * chance.uniform(0.7, 1.5), lambda: self.try_to_publish(message, tries - 1))

    # ---- changes, stored in the companion logs ----

    def change(self) -> None:
        """Somebody requests a change, and repeats it until it is acked."""
        self.changed += 1
        self.try_to_change(self.changed, CHANGE_TRIES)
        if self.world.now_ms < END_MS - 3000:
            self.world.after(self.world.random.expovariate(1 / CHANGE_EVERY_MS), self.change)

    def try_to_change(self, number: int, tries: int) -> None:
        stream_id = self.stream_ids[number % len(self.stream_ids)]
        if tries == 0 or number in self.checker.companions[stream_id].acked:
            return
        for broker in self.brokers.values():
            self.world.send(
                CLIENT, broker.me, lambda n, b=broker: b.when_awake(lambda: b.requested(n, stream_id)), number
            )
        delay_ms = RETRY_AFTER_MS * self.world.random.uniform(0.7, 1.5)
        self.world.after(delay_ms, lambda: self.try_to_change(number, tries - 1))

    def ack_change(self, stream_id: StreamId, offset: int, number: int) -> None:
        self.ack_ms = self.world.now_ms
        self.checker.companions[stream_id].acks(offset, number)

    def arrive(self, number: BrokerId, message: int) -> None:
        broker = self.brokers[number]
        broker.when_awake(lambda: broker.published(message, self.stream_of(message)))

    def ack(self, stream_id: StreamId, offset: int, message: int) -> None:
        """A leader's ack; the publisher may receive it or not."""
        self.checker.streams[stream_id].acks(offset, message)
        if self.world.now_ms > self.faults.until_ms:
            self.resumed_ms.setdefault(stream_id, self.world.now_ms)
        self.world.send(CLIENT, CLIENT, self.heard_acks.add, message)

    # ---- readers, and an operator ----

    def read(self) -> None:
        broker, stream_id = self.brokers[self.faults.any()], self.world.random.choice(self.stream_ids)
        replica = broker.replicas.get(stream_id)
        if broker.is_up and not broker.is_paused and replica is not None:
            self.read_from(replica)
        self.world.after(self.world.random.expovariate(1 / READ_EVERY_MS), self.read)

    def read_from(self, replica: SimReplica) -> None:
        """One reader takes what there is, another one asks where the stream ends, a third one has read everything and
        asks for what comes next.
        """
        checker = self.checker.streams[replica.id]
        if (end := replica.readable_end()) is not None:
            checker.reads(replica, end)
        if not replica.machine.is_leading or not replica.life.may_state_positions:
            return  # asks again, elsewhere
        checker.states(replica, replica.high_watermark, self.world.now_ms)
        start = len(checker.read)
        if start > replica.high_watermark:
            epoch = replica.leader.epoch if replica.leader is not None else 0
            replica.life.barrier(lambda: self.refuse(replica, start, epoch))

    def refuse(self, replica: SimReplica, start: int, epoch: int) -> None:
        """All that was agreed on before the question is known there now."""
        is_still = replica.machine.is_leading and replica.leader is not None and replica.leader.epoch == epoch
        if is_still and start > replica.high_watermark:
            self.checker.streams[replica.id].refuses(replica, start)

    def operate(self) -> None:
        """One command after another, each asked for until some broker knows its outcome."""
        if self.operation is None:
            self.proposals += 1
            self.operation = Proposal(id=f"operator:{self.proposals}", command=self.next_operation())
        broker = self.brokers[self.faults.any()]
        if broker.state.outcome_of(self.operation.id) is not None:
            self.operation = None
        elif broker.is_up:
            operation = self.operation
            broker.when_awake(lambda: broker.propose(operation))
        if self.world.now_ms < self.faults.until_ms or self.operation is not None:
            self.world.after(self.world.random.expovariate(1 / OPERATE_EVERY_MS), self.operate)

    def next_operation(self) -> Command:
        chance = self.world.random
        kind, name = chance.random(), NAMES[chance.randrange(len(self.stream_ids))]
        if self.is_healthy:
            return PauseStream(name=name, paused=kind < 0.5)
        if len(self.numbers) > 3 and kind < 0.3:
            count = chance.choice((2, 3, 3, 4)) if self.resizes else 3
            return MoveReplicas(name=name, target=tuple(chance.sample(self.numbers, count)))
        if len(self.numbers) > 3 and kind < 0.5:
            return DrainBroker(broker=chance.choice(self.numbers), is_draining=chance.random() < 0.3)
        if self.resizes and kind < 0.65:
            return resized(name, self.numbers, self.least_min_isr, chance)
        if self.resizes and kind < 0.75:
            return edited_min_isr(name, chance.randint(self.least_min_isr, 3))
        if self.removes and kind < 0.9:
            return edited_rules(chance, name)
        return PauseStream(name=name, paused=chance.random() < 0.5)

    # ---- lives ----

    def stop(self, number: BrokerId) -> None:
        """In order."""
        broker = self.brokers[number]
        if broker.is_up and not broker.is_stopping and self.world.now_ms < self.faults.until_ms:
            self.world.note(f"{number} is asked to stop")
            broker.when_awake(broker.leave)

    def crash(self, number: BrokerId, *, is_clean: bool = False, down_ms: float | None = None) -> None:
        broker, chance = self.brokers[number], self.world.random
        if not broker.is_up or (self.world.now_ms >= self.faults.until_ms and not is_clean):
            return
        broker.is_up = False
        self.ends.ended(number)
        self.world.note(f"{number} crashes, clean {is_clean}")
        if is_clean and not broker.is_paused:
            broker.disk.clean_life = broker.incarnation
        elif number == self.liar and chance.random() < 0.6:
            lost = chance.randrange(0, 12)
            self.world.note(f"the disk of {number} loses {lost} synced records")
            for log in broker.disk.logs.values():
                log.keep(max(0, log.synced - lost))
        for log in broker.disk.logs.values():
            log.keep(log.synced)
        downtimes = (80, 500, 4500) if self.world.now_ms < self.faults.until_ms else (80, 500)
        after_ms = down_ms or chance.choice(downtimes) * chance.uniform(0.5, 1.5)
        self.world.after(after_ms, lambda: self.start(number))

    def start(self, number: BrokerId) -> None:
        if self.brokers[number].is_up:
            return
        disk, chance = self.disks[number], self.world.random
        if (number == self.liar or self.is_reckless) and chance.random() < 0.2:
            self.damage(number, disk)
        if number in self.loses_folder:
            self.loses_folder.discard(number)
            self.world.note(f"a folder of {number} is lost")
            lost = chance.choice(self.stream_ids)
            is_part = disk.log_of(companion_id(lost)).exists and chance.random() < 0.4
            disk.log_of(companion_id(lost)).delete()
            if not is_part:
                disk.log_of(lost).delete()
        disk = self.restored(number, disk)
        self.brokers[number] = Broker(self, number, disk)
        self.ends.began(number)
        self.world.note(f"{number} starts with {[log.synced for log in disk.logs.values()]} records")
        self.brokers[number].look_at_records()

    def copy(self, number: BrokerId) -> None:
        self.copied += 1
        self.copies[number] = self.disks[number].copied(self.copied)

    def restored(self, number: BrokerId, disk: Disk) -> Disk:
        """The disk to start on: the older copy, where it is to be restored and the others can tell that it is one."""
        if number not in self.is_restored:
            return disk
        self.is_restored.discard(number)
        if number in self.newest_disks:
            self.world.note(f"{number} has its newest disk again")
            self.disks[number] = self.newest_disks.pop(number)
        elif number in self.copies and all(
            self.knows_newer_life(other, number) for other in self.numbers if other != number
        ):
            self.world.note(f"a copy of the disk of {number} is restored")
            self.newest_disks[number], self.disks[number] = disk, self.copies.pop(number)
        return self.disks[number]

    def knows_newer_life(self, other: BrokerId, number: BrokerId) -> bool:
        """Than any in the copy of the other one's disk."""
        known, listed = self.brokers[other].state.brokers.get(number), listed_lives(number, self.copies[number])
        return self.brokers[other].is_up and known is not None and known.incarnation not in listed

    def damage(self, number: BrokerId, disk: Disk) -> None:
        """A hole in a log, found at the start: what follows is quarantined, and it must neither lead nor count."""
        damaged = self.world.random.choice(self.stream_ids)
        is_companion = disk.log_of(companion_id(damaged)).exists and self.world.random.random() < 0.4
        log = disk.log_of(companion_id(damaged) if is_companion else damaged)
        if log.synced and not disk.clean_life:
            log.keep(self.world.random.randrange(log.synced))
            log.is_damaged = True
            self.world.note(f"broker {number} finds damage at {log.synced}")

    # ---- from beginning to end ----

    def run(self) -> None:
        self.begin()
        self.faults.begin()
        self.ends.begin()
        self.world.run_until(self.faults.until_ms)
        self.heal()
        self.world.run_until(END_MS)
        while (self.is_changing() or self.has_just_acked) and self.world.now_ms < END_MS + HANDOVER_MS:
            self.world.run_until(self.world.now_ms + 200)
        for checker in self.checker.streams.values():
            if not self.has_stopped(checker):
                self.check_healed(checker)

    @property
    def has_just_acked(self) -> bool:
        """Whether a change is so new that not every follower can have received it."""
        return self.world.now_ms - self.ack_ms < RECEIVED_WITHIN_MS

    def is_changing(self) -> bool:
        """Whether a leadership passes on, or replicas move: nothing is quiet enough then to be judged."""
        replicas = [one for broker in self.brokers.values() for one in broker.replicas.values()]
        newest = {checker.id: checker.record.version for checker in self.checker.streams.values()}
        led = {
            one.id
            for one in replicas
            if one.leader is not None and one.is_subscribed and one.leader.record.version == newest[one.id]
        }
        is_moving = any(checker.record.target for checker in self.checker.streams.values())
        return is_moving or len(led) < len(newest) or any(one.machine.is_transferring for one in replicas)

    def begin(self) -> None:
        self.world.after(1000, self.publish)
        self.world.after(1500, self.read)
        self.world.after(2000, self.operate)
        if self.changes_from_ms < END_MS:
            self.world.after(self.changes_from_ms, self.change)

    def heal(self) -> None:
        self.faults.heal()
        self.world.note("healed")
        self.is_restored = set(self.newest_disks)
        for number in self.is_restored:
            self.brokers[number].is_up = False
        for number in self.numbers:
            self.brokers[number].wake()
            self.start(number)
            drain = DrainBroker(broker=number, is_draining=False)
            self.brokers[number].every(1000, lambda n=number, c=drain: self.undrain(n, c))

    def undrain(self, number: BrokerId, command: DrainBroker) -> None:
        if (known := self.brokers[number].state.brokers.get(number)) and known.is_draining:
            self.brokers[number].command(command)

    def has_stopped(self, checker: StreamChecker) -> bool:
        """Beyond what is tolerated: everyone who could lead is damaged, or says that its log was contradicted."""
        return self.is_undecided(checker) or (
            self.is_reckless and any(self.is_unfit(one, checker.id) for one in checker.record.candidates)
        )

    def is_undecided(self, checker: StreamChecker) -> bool:
        """Of an even number of candidates all have restarted uncleanly, and half of them have the longer one of another
        log than the other half: a disk may have lost committed records, or nothing was lost and each has a record that
        was never committed. Nobody can tell, so an operator decides.
        """
        record = checker.record
        if record.leader is not None or len(record.candidates) % 2 or set(record.candidates) - set(record.unproven):
            return False
        messages, companions = (
            {one: last_of(self.disks[one].log_of(log_id)) for one in record.candidates}
            for log_id in (checker.id, companion_id(checker.id))
        )
        return quorum_position(messages, record.candidates, companions) is None

    def is_unfit(self, number: BrokerId, stream_id: StreamId) -> bool:
        replica, log = self.brokers[number].replicas.get(stream_id), self.disks[number].log_of(stream_id)
        companion = self.disks[number].log_of(companion_id(stream_id))
        record = self.checker.streams[stream_id].record
        is_lost = companion.is_damaged or (not companion.exists and number in record.companion_holders)
        return is_lost or log.is_damaged or not log.exists or (replica is not None and replica.is_halted)

    def check_healed(self, checker: StreamChecker) -> None:
        version = checker.record.version
        replicas = [
            one.replicas[checker.id] for one in self.brokers.values() if one.is_up and checker.id in one.replicas
        ]
        leaders = [one for one in replicas if one.leader is not None and one.leader.record.version == version]
        require(len(leaders) == 1 and leaders[0].is_subscribed, f"after healing there are {len(leaders)} leaders")
        checker.healed(leaders[0].me)
        resumed_ms = self.resumed_ms.get(checker.id)
        require(resumed_ms is not None, "after healing nothing is acked")
        assert resumed_ms is not None
        took_ms = resumed_ms - self.faults.until_ms
        require(took_ms <= RESUME_WITHIN_MS, f"writes resumed {took_ms:.0f} ms after healing")


def last_of(log: Log) -> tuple[Epoch, int]:
    """The epoch of its last record, and where it ends."""
    return (Epoch(log.records[-1][0]) if log.synced else NO_EPOCH), log.synced


def founding(
    numbers: Iterable[BrokerId], names: Iterable[str], *, replicas: int, min_isr: int
) -> tuple[Metadata, Snapshot]:
    """The metadata of a cluster whose first brokers keep the streams, and the Raft snapshot that holds it."""
    state, numbers = Metadata(cluster_id="sim", feature_level=LATEST_LEVEL), tuple(numbers)
    for number in numbers:
        state.apply(RegisterBroker(broker=BrokerRecord(id=number, url="", directory=str(number), nonce="n0")))
    for name in names:
        settings = StreamSettings(subject=name, replicas=replicas, min_isr=min_isr, standby=True)
        placement = numbers[:replicas]
        state.apply(CreateStream(name=name, id=IDS[name], settings=settings, created_us=0, placement=placement))
        state.streams[name] = msgspec.structs.replace(state.streams[name], holders=placement)
    members = tuple(Member(id=one, directory=str(one), url="") for one in numbers)
    membership = Membership(members=members)
    return state, Snapshot(index=Index(1), term=Term(1), membership=membership, data=encode(state))


def resized(name: str, numbers: Sequence[BrokerId], least_min_isr: int, chance: Random) -> ResizeReplicas:
    """Two to four replicas, some of which may be there already."""
    target = tuple(chance.sample(numbers, chance.randint(2, min(4, len(numbers)))))
    return ResizeReplicas(name=name, target=target, min_isr=chance.randint(least_min_isr, len(target)))


def edited_min_isr(name: str, min_isr: int) -> EditStream:
    return EditStream(name=name, settings=StreamSettings(subject=name, min_isr=min_isr), changed=("min_isr",))


def founding_logs(state: Metadata, number: BrokerId) -> dict[StreamId, Log]:
    """Empty, and there where the metadata says so."""
    return {one.id: Log(exists=number in one.holders) for one in state.streams.values()}


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    digest: str
    events: int
    acked: int
    committed: int
    read: int
    versions: int
    changes: int


def result_of(seed: int, world: World, checker: Checker) -> Result:
    streams = checker.streams.values()
    return Result(
        seed=seed,
        digest=world.digest,
        events=world.events,
        acked=sum(len(one.acked) for one in streams),
        committed=sum(len(one.committed) for one in streams),
        read=sum(len(one.read) for one in streams),
        versions=sum(len(one.records) for one in streams),
        changes=sum(len(one.acked) for one in checker.companions.values()),
    )


def run_seed(seed: int, trace: list[str] | None = None) -> Result:
    """One life of a cluster. Raises Violation, or an AssertionError of the core itself."""
    cluster = Cluster(seed, is_healthy=seed % HEALTHY_EVERY == FIRST_HEALTHY)
    cluster.world.trace = trace
    cluster.run()
    return result_of(seed, cluster.world, cluster.checker)


def first_red(seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first seed that fails, and how."""
    for seed in seeds:
        try:
            run_seed(seed)
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}"
    return None


__all__ = ["Broker", "Cluster", "Result", "Violation", "first_red", "founding", "result_of", "run_seed"]
