"""A whole cluster of pure cores under one seed: Raft with the metadata state machine, the controller, leaders and
followers of one stream, on disks that lose what was not synced (and one disk that loses more), in a network that fails.

What stands here in place of files, sockets and tasks is as thin as it can be; what decides is the production code.
Checked at every step: no offset is ever committed twice with different records, every leader holds all that was
committed, nothing is acked that is not. After healing: all replicas are in sync and hold every acked message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from natslog.cluster import replica as replica_module
from natslog.cluster.controller import Controller
from natslog.cluster.epochs import EpochHistory
from natslog.cluster.metadata import (
    AppointLeaders,
    Appointment,
    BrokerRecord,
    ChangeIsrs,
    Command,
    CreateStream,
    DisableReplicas,
    Metadata,
    Proposal,
    RegisterBroker,
)
from natslog.cluster.replica import (
    Append,
    BeginAt,
    CutTo,
    FetchPosition,
    FollowerReplica,
    Halt,
    LeaderReplica,
    Matching,
    Verdict,
)
from natslog.consensus import HardState, Index, Member, Membership, Raft, Snapshot, Term
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings
from tests.sim.world import World

STREAM = StreamId("ab" * 16)
TICK_MS = 100.0
SESSION_TICKS = 30
FETCH_EVERY_MS = 60.0
FETCH_TIMEOUT_MS = 500.0
PUBLISH_EVERY_MS = 45.0
FAULTS_UNTIL_MS = 20_000.0
END_MS = 34_000.0
MOST_RECORDS = 8

_decode = msgspec.msgpack.Decoder(Proposal).decode
_encode = msgspec.msgpack.encode


class Violation(AssertionError):
    """What must never be, was."""


@dataclass(slots=True)
class Log:
    """One replica's log on its disk: `synced` records survive a crash."""

    records: list[tuple[int, int]] = field(default_factory=list)
    synced: int = 0
    checkpoint: int = 0

    def epochs(self) -> EpochHistory:
        history = EpochHistory()
        for at, (epoch, _) in enumerate(self.records):
            history.begin(Epoch(epoch), at)
        return history


@dataclass(slots=True)
class Disk:
    hard_state: HardState = field(default_factory=HardState)
    snapshot: Snapshot = field(default_factory=Snapshot)
    entries: list[Any] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    lives: int = 0
    clean_life: str = ""


@dataclass(slots=True)
class Fetch:
    sender: int
    incarnation: str
    position: FetchPosition
    number: int


@dataclass(slots=True)
class Answer:
    epoch: Epoch
    verdict: Verdict
    records: list[tuple[int, int]]
    offset: int
    high_watermark: int
    number: int


class Broker:
    """One life of one broker."""

    def __init__(self, cluster: Cluster, me: int, disk: Disk) -> None:
        self.cluster, self.world, self.me, self.disk = cluster, cluster.world, BrokerId(me), disk
        disk.lives += 1
        self.incarnation = f"{me}.{disk.lives}"
        self.is_up = True
        self.paused_until = 0.0
        log = disk.log
        del log.records[log.synced :]
        self.epochs = log.epochs()
        self.raft = Raft(
            me=self.me,
            hard_state=disk.hard_state,
            snapshot=disk.snapshot,
            entries=tuple(disk.entries),
            seed=cluster.world.random.getrandbits(32),
        )
        self.state = _state_of(disk.snapshot)
        self.record: StreamRecord | None = None
        self.leader: LeaderReplica | None = None
        self.follower: FollowerReplica | None = None
        self.high_watermark = min(log.checkpoint, log.synced)
        self.controller: tuple[Term, Controller] | None = None
        self.heard_ms: dict[BrokerId, float] = {}
        self.lives = {self.me: self.incarnation}
        self.waiting: list[tuple[int, int]] = []  # (offset, value) of appended messages not acked yet
        self.is_writing = False
        self.gathered: list[int] = []
        self.fetch_number = 0
        self.fetching_since = -1e9
        self.handing_over_to: BrokerId | None = None
        self.is_damaged = False
        after, disk.clean_life = disk.clean_life, ""
        self.registration = Proposal(
            id=self.incarnation,
            command=RegisterBroker(
                broker=BrokerRecord(id=self.me, url="", directory=str(me), life=disk.lives), after=after
            ),
        )
        self.every(TICK_MS, self.tick)
        self.every(FETCH_EVERY_MS, self.fetch)

    # ---- time ----

    def every(self, interval_ms: float, work: Callable[[], None]) -> None:
        def again() -> None:
            if self.is_up:
                if self.world.now_ms >= self.paused_until:
                    work()
                self.world.after(interval_ms, again)

        self.world.after(self.world.random.uniform(0, interval_ms), again)

    def when_awake(self, work: Callable[[], None]) -> None:
        """Now, or when the process is continued; never in another life."""
        if not self.is_up:
            return
        if self.world.now_ms < self.paused_until:
            self.world.after(self.paused_until - self.world.now_ms, lambda: self.when_awake(work))
        else:
            work()

    def sync(self, done: Callable[[], None]) -> None:
        """An fsync that takes its time."""
        slow = self.cluster.slow_disk == self.me
        self.world.after(self.world.random.uniform(0.2, 400.0 if slow else 4.0), lambda: self.when_awake(done))

    # ---- metadata ----

    def tick(self) -> None:
        self.raft.tick()
        if not self.is_registered:
            self.propose(self.registration)
        if self.raft.role == "leader":
            self.control()
        self.pump()
        if self.leader is not None:
            self.lead()
        self.look_after_position()

    @property
    def is_registered(self) -> bool:
        known = self.state.brokers.get(self.me)
        return known is not None and known.incarnation == self.incarnation

    def pump(self) -> None:
        while (ready := self.raft.ready()) is not None:
            disk = self.disk
            if ready.snapshot is not None:
                disk.snapshot, disk.entries = ready.snapshot, []
                self.state = _state_of(ready.snapshot)
            if ready.truncate_from is not None:
                disk.entries = [entry for entry in disk.entries if entry.index < ready.truncate_from]
            disk.entries += ready.entries
            if ready.hard_state is not None:
                disk.hard_state = ready.hard_state
            for message in ready.messages:
                self.cluster.send(self.me, message.to, "step", (self.incarnation, message))
            for entry in ready.committed:
                if entry.kind == "command":
                    self.state.decide(_decode(entry.data))
            self.raft.advance(ready)
            if ready.committed or ready.snapshot is not None:
                self.look_at_record()

    def step(self, received: tuple[str, Any]) -> None:
        incarnation, message = received
        self.lives[message.sender] = incarnation  # a connection is of one life of either side
        self.raft.step(message)
        self.pump()

    def propose(self, proposal: Proposal) -> None:
        if self.raft.role == "leader":
            self.proposed(proposal)
        elif self.raft.leader is not None:
            self.cluster.send(self.me, self.raft.leader, "proposed", proposal)
        if self.world.late_share and self.world.random.random() < 0.3:  # as a request that is retried
            to = self.world.random.choice(self.cluster.numbers)
            late_ms = self.world.random.uniform(100, 3000)
            self.world.after(late_ms, lambda: self.cluster.send(self.me, to, "proposed", proposal))

    def command(self, command: Command) -> None:
        self.cluster.proposals += 1
        self.propose(Proposal(id=f"{self.incarnation}:{self.cluster.proposals}", command=command))

    def proposed(self, proposal: Proposal) -> None:
        if self.raft.role == "leader" and self.raft._successor is None:
            self.raft.propose(_encode(proposal))
            self.pump()

    def control(self) -> None:
        if self.controller is None or self.controller[0] != self.raft.term:
            self.controller = (self.raft.term, Controller(self.world.now_ms))
        active = self.raft.active_within(SESSION_TICKS)
        known = self.state.brokers
        alive = {one for one in active if one in known and known[one].incarnation == self.lives.get(one)}
        decisions = self.controller[1].decide(self.state, alive, self.world.now_ms)
        for command in decisions.commands:
            self.command(command)
        for handover in decisions.handovers:
            self.cluster.send(self.me, handover.leader, "hand_over", handover.to)

    def reported(self, report: tuple[int, Epoch]) -> None:
        if self.controller is not None and self.raft.role == "leader":
            self.controller[1].missed(STREAM, report[1], BrokerId(report[0]), self.world.now_ms)

    def positioned(self, where: tuple[int, int, Epoch, int]) -> None:
        if self.controller is not None and self.raft.role == "leader":
            by, version, last_epoch, end = where
            self.controller[1].positioned(STREAM, version, BrokerId(by), last_epoch, end, self.world.now_ms)

    # ---- roles ----

    def look_at_record(self) -> None:
        record = self.state.streams.get("orders")
        if record is None or not self.is_registered or record == self.record:
            return
        if self.is_damaged:
            if self.me in record.candidates and set(record.candidates) != {self.me}:
                return  # says so in tick until it is heard
            self.is_damaged = False
        old, self.record = self.record, record
        self.world.note(
            f"{self.me} sees v{record.version} leader {record.leader} epoch {record.leader_epoch} isr {record.isr} "
            f"eligible {record.eligible} unproven {record.unproven}"
        )
        if old is not None and (old.leader, old.leader_epoch) == (record.leader, record.leader_epoch):
            if self.leader is not None:
                self.advance(self.leader.update(record, self.world.now_ms))
            elif self.follower is not None:
                self.follower.record = record
            return
        self.leader = self.follower = self.handing_over_to = None
        self.waiting, self.gathered = [], []
        if self.is_writing:
            self.record = old and msgspec.structs.replace(old, leader=None)  # again when the disk is done
        elif record.leader == self.me:
            self.become_leader(record)
        elif record.leader is not None and self.me in record.replicas:
            self.follower = FollowerReplica(self.me, record, self.high_watermark, self.world.now_ms)

    def become_leader(self, record: StreamRecord) -> None:
        log = self.disk.log
        self.cluster.check_leader(self, record)
        self.epochs.cut_to(log.synced)
        self.epochs.begin(record.leader_epoch, log.synced)
        self.leader = LeaderReplica(
            self.me,
            record,
            log_end_offset=log.synced,
            high_watermark=self.high_watermark,
            now_ms=self.world.now_ms,
        )
        self.heard_ms = {}
        self.world.note(f"{self.me} leads epoch {record.leader_epoch} from {log.synced}, isr {record.isr}")
        self.advance(self.leader.high_watermark)

    def look_after_position(self) -> None:
        """What a replica says to the metadata leader while it has no leader, or does not hear it."""
        if self.raft.leader is None:
            return
        if self.is_damaged:
            self.command(DisableReplicas(broker=self.me, incarnation=self.incarnation, stream_ids=(STREAM,)))
            self.look_at_record()
        record = self.record
        if record is None or self.is_writing:
            return
        if self.me in record.unproven and record.leader != self.me:
            last = self.epochs.last_epoch_before(self.disk.log.synced)
            where = (self.me, record.version, last, self.disk.log.synced)
            self.cluster.send(self.me, self.raft.leader, "positioned", where)
        if self.follower is not None and self.follower.misses_leader(self.world.now_ms, 0.0):
            self.cluster.send(self.me, self.raft.leader, "reported", (self.me, record.leader_epoch))

    # ---- leading ----

    @property
    def is_subscribed(self) -> bool:
        has_session = self.raft.ticks_since_leader() < SESSION_TICKS
        return self.leader is not None and has_session and self.handing_over_to is None

    def lead(self) -> None:
        assert self.leader is not None
        change = self.leader.isr_change(self.world.now_ms, self.heard_ms)
        if change is not None:
            self.world.note(f"{self.me} proposes isr {change.isr} of version {change.version}")
            self.command(ChangeIsrs(broker=self.me, changes=(change,)))
        to = self.handing_over_to
        if to is not None and to not in self.leader.record.isr:
            self.handing_over_to = to = None
        if to is not None and not self.is_writing and self.leader.is_caught_up(to):
            isr = tuple(self.leader.record.isr)
            appointment = Appointment(stream_id=STREAM, version=self.leader.record.version, leader=to, isr=isr)
            self.command(AppointLeaders(appointments=(appointment,)))
            self.handing_over_to = None

    def hand_over(self, to: BrokerId) -> None:
        if self.leader is not None and to in self.leader.record.isr:
            self.handing_over_to = to

    def published(self, value: int) -> None:
        if not self.is_subscribed:
            return
        assert self.leader is not None
        if self.leader.refusal() is None:
            self.gathered.append(value)
            self.write()

    def write(self) -> None:
        if self.is_writing or not self.gathered or self.leader is None or self.leader.refusal() is not None:
            return
        if len(self.leader.record.isr) < self.leader.record.settings.min_isr:
            raise Violation("appended below min_isr")
        values, self.gathered = self.gathered, []
        log, leader = self.disk.log, self.leader
        base = len(log.records)
        log.records += [(leader.epoch, value) for value in values]
        self.is_writing = True

        def done() -> None:
            self.is_writing = False
            log.synced = len(log.records)
            if self.leader is leader:
                self.waiting += [(base + at, value) for at, value in enumerate(values)]
                self.advance(leader.appended(log.synced))
                self.write()
            else:
                self.look_at_record()

        self.sync(done)

    def advance(self, high_watermark: int) -> None:
        """HW is known to be this."""
        if high_watermark <= self.high_watermark:
            return
        self.cluster.committed_by(self, self.high_watermark, high_watermark)
        self.high_watermark = high_watermark
        if self.world.random.random() < 0.02:
            self.disk.log.checkpoint = high_watermark
        while self.waiting and self.waiting[0][0] < high_watermark:
            self.cluster.ack(*self.waiting.pop(0))

    def fetched(self, fetch: Fetch) -> None:
        sender = BrokerId(fetch.sender)
        self.heard_ms[sender] = self.world.now_ms
        leader, log = self.leader, self.disk.log
        if leader is None:
            return
        verdict = replica_module.judge(
            fetch.position, epoch=leader.epoch, epochs=self.epochs, log_start_offset=0, log_end_offset=log.synced
        )
        records: list[tuple[int, int]] = []
        if isinstance(verdict, Matching):
            self.advance(leader.fetched(sender, fetch.position.offset, fetch.incarnation, self.world.now_ms))
            records = log.records[fetch.position.offset : min(log.synced, fetch.position.offset + MOST_RECORDS)]
        answer = Answer(leader.epoch, verdict, records, fetch.position.offset, leader.high_watermark, fetch.number)
        self.cluster.send(self.me, sender, "answered", answer)

    # ---- following ----

    def fetch(self) -> None:
        now_ms = self.world.now_ms
        follower = self.follower
        if follower is None or self.is_writing or now_ms - self.fetching_since < FETCH_TIMEOUT_MS:
            return
        assert follower.record.leader is not None
        self.fetch_number += 1
        self.fetching_since = now_ms
        position = follower.position(self.epochs, self.durable_end())
        self.cluster.send(
            self.me, follower.record.leader, "fetched", Fetch(self.me, self.incarnation, position, self.fetch_number)
        )

    def durable_end(self) -> int:
        return self.disk.log.synced

    def answered(self, answer: Answer) -> None:
        follower, log = self.follower, self.disk.log
        if follower is None or self.is_writing or answer.number != self.fetch_number:
            return
        self.fetching_since = -1e9
        step = follower.answered(
            answer.epoch, answer.verdict, self.world.now_ms, epochs=self.epochs, log_end_offset=log.synced
        )
        match step:
            case Append() if answer.offset == len(log.records):
                self.append(follower, answer)
            case CutTo(end_offset=end):
                self.world.note(f"{self.me} cuts to {end} of {len(log.records)}")
                self.cut(end)
            case BeginAt(log_start_offset=start):
                self.cut(start)
            case Halt(why=why):
                raise Violation(f"broker {self.me} halts: {why}")
            case _:
                pass

    def cut(self, end: int) -> None:
        log = self.disk.log
        if end < self.high_watermark:
            raise Violation(f"broker {self.me} cuts committed records: to {end}, HW {self.high_watermark}")
        del log.records[end:]
        log.synced = end
        self.epochs.cut_to(end)

    def append(self, follower: FollowerReplica, answer: Answer) -> None:
        log = self.disk.log
        for at, (epoch, _) in enumerate(answer.records):
            self.epochs.begin(Epoch(epoch), answer.offset + at)
        log.records += answer.records

        def done() -> None:
            self.is_writing = False
            log.synced = len(log.records)
            if self.follower is follower:
                self.advance(follower.advanced(answer.high_watermark, log.synced))
                self.fetch() if answer.records else None
            else:
                self.look_at_record()

        if answer.records:
            self.is_writing = True
            self.after_append(done)
        else:
            done()

    def after_append(self, done: Callable[[], None]) -> None:
        self.sync(done)


def _state_of(snapshot: Snapshot) -> Metadata:
    if not snapshot.data:
        return Metadata(cluster_id="sim")
    return msgspec.msgpack.decode(snapshot.data, type=Metadata)


class Cluster:
    """Args: `broker_type`: for mutations, a broker with a rule switched off."""

    def __init__(self, seed: int, brokers: int = 3, broker_type: type[Broker] = Broker) -> None:
        self.world = World(seed)
        self.broker_type = broker_type
        self.numbers = tuple(BrokerId(number) for number in range(1, brokers + 1))
        membership = Membership(members=tuple(Member(id=one, directory=str(one), url="") for one in self.numbers))
        state = Metadata(cluster_id="sim")
        for number in self.numbers:
            state.apply(RegisterBroker(broker=BrokerRecord(id=number, url="")))
        min_isr = 1 if self.world.random.random() < 0.15 else 2
        settings = StreamSettings(subject="orders", replicas=3, min_isr=min_isr)
        state.apply(CreateStream(name="orders", id=STREAM, settings=settings, created_us=0, placement=self.numbers[:3]))
        snapshot = Snapshot(index=Index(1), term=Term(1), membership=membership, data=_encode(state))
        self.disks = {
            number: Disk(hard_state=HardState(term=Term(1), commit=Index(1)), snapshot=snapshot)
            for number in self.numbers
        }
        self.committed: list[tuple[int, int]] = []
        self.acked: dict[int, int] = {}
        self.proposals = 0
        self.published = 0
        self.slow_disk: BrokerId | None = None
        self.liar = self.world.random.choice(self.numbers) if min_isr > 1 and self.world.random.random() < 0.6 else None
        self.faults: dict[str, int] = {}
        self.brokers = {number: broker_type(self, number, self.disks[number]) for number in self.numbers}

    def send(self, sender: int, to: int, method: str, message: Any) -> None:
        def deliver(message: Any) -> None:
            broker = self.brokers[BrokerId(to)]
            broker.when_awake(lambda: getattr(broker, method)(message))

        if sender == to:
            self.world.after(0.0, lambda: deliver(message))
        else:
            self.world.send(sender, to, deliver, message)

    # ---- checkers ----

    def committed_by(self, broker: Broker, start: int, end: int) -> None:
        records = broker.disk.log.records
        if end > broker.disk.log.synced:
            raise Violation(f"broker {broker.me} has HW {end} beyond its own log {broker.disk.log.synced}")
        for offset in range(start, end):
            if offset < len(self.committed):
                if self.committed[offset] != records[offset]:
                    raise Violation(
                        f"offset {offset} is {records[offset]} on broker {broker.me}, committed as "
                        f"{self.committed[offset]}"
                    )
            else:
                self.committed.append(records[offset])

    def check_leader(self, broker: Broker, record: StreamRecord) -> None:
        seen = [other.record.leader_epoch for other in self.brokers.values() if other.record is not None]
        if max(seen) > record.leader_epoch:
            return  # late: it will be told so by everyone
        records = broker.disk.log.records[: broker.disk.log.synced]
        if records[: len(self.committed)] != self.committed:
            raise Violation(
                f"leader {broker.me} of epoch {record.leader_epoch} lacks committed records: it has {len(records)}, "
                f"committed are {len(self.committed)}"
            )

    def ack(self, offset: int, value: int) -> None:
        if offset >= len(self.committed) or self.committed[offset][1] != value:
            raise Violation(f"message {value} is acked at offset {offset} and not committed there")
        self.acked[value] = offset

    # ---- load and faults ----

    def publish(self) -> None:
        self.published += 1
        for number in self.numbers:
            self.send(0, number, "published", self.published)
        if self.world.now_ms < END_MS - 3000:
            self.world.after(self.world.random.expovariate(1 / PUBLISH_EVERY_MS), self.publish)

    def run(self) -> None:
        self.world.after(1000, self.publish)
        self.world.after(2500, self.fault)
        self.world.run_until(FAULTS_UNTIL_MS)
        self.heal()
        self.world.run_until(END_MS)
        self.check_healed()

    def fault(self) -> None:
        world, chance = self.world, self.world.random
        if world.now_ms >= FAULTS_UNTIL_MS:
            return
        kinds = ["crash", "crash", "crash leader", "crash all", "stop", "cut", "isolate", "one way", "pause"]
        kinds += ["slow disk", "loss", "loss", "heal", "heal", "transfer", "two", "leave one", "leave one"]
        kind = chance.choice(kinds)
        self.faults[kind] = self.faults.get(kind, 0) + 1
        world.note(f"fault {kind}")
        getattr(self, "fault_" + kind.replace(" ", "_"))()
        world.after(chance.uniform(150, 2600), self.fault)

    def any(self) -> BrokerId:
        return self.world.random.choice(self.numbers)

    def crash(self, number: BrokerId, *, is_clean: bool = False, down_ms: float | None = None) -> None:
        broker, chance = self.brokers[number], self.world.random
        if not broker.is_up:
            return
        broker.is_up = False
        log = broker.disk.log
        self.world.note(f"{number} crashes, clean {is_clean}, {len(log.records)} records")
        if is_clean:
            broker.disk.clean_life = broker.incarnation
            log.synced = len(log.records) if not broker.is_writing else log.synced
        elif number == self.liar and chance.random() < 0.6:
            lost = chance.randrange(0, 12)
            self.world.note(f"the disk of {number} loses {lost} synced records")
            log.synced = max(0, log.synced - lost)
        del log.records[log.synced :]
        self.world.after(
            down_ms or chance.choice([80, 500, 4500]) * chance.uniform(0.5, 1.5), lambda: self.start(number)
        )

    def start(self, number: BrokerId) -> None:
        if self.brokers[number].is_up:
            return
        self.brokers[number] = self.broker_type(self, number, self.disks[number])
        self.world.note(f"{number} starts with {self.disks[number].log.synced} records")
        if number == self.liar and self.world.random.random() < 0.3:
            self.find_damage(self.brokers[number])
        self.brokers[number].look_at_record()

    def find_damage(self, broker: Broker) -> None:
        """A hole in its log: what follows is quarantined, and it must neither lead nor count."""
        log = broker.disk.log
        if log.synced:
            log.synced = self.world.random.randrange(0, log.synced)
            del log.records[log.synced :]
            broker.epochs.cut_to(log.synced)
            broker.high_watermark = min(broker.high_watermark, log.synced)
            log.checkpoint = min(log.checkpoint, log.synced)
            broker.is_damaged = True
            self.world.note(f"broker {broker.me} finds damage at {log.synced}")

    def fault_crash(self) -> None:
        self.crash(self.any())

    def fault_crash_leader(self) -> None:
        for broker in self.brokers.values():
            if broker.leader is not None:
                self.crash(broker.me)

    def fault_two(self) -> None:
        self.crash(self.any())
        self.crash(self.any())

    def fault_leave_one(self) -> None:
        left = self.any()
        for number in self.numbers:
            if number != left:
                self.crash(number, down_ms=self.world.random.uniform(200, 6000))

    def fault_crash_all(self) -> None:
        for number in self.numbers:
            self.crash(number)

    def fault_stop(self) -> None:
        self.crash(self.any(), is_clean=True)

    def fault_cut(self) -> None:
        one, other = self.any(), self.any()
        self.world.cut |= {(one, other), (other, one)}

    def fault_isolate(self) -> None:
        one = self.any()
        self.world.cut |= {(one, other) for other in self.numbers} | {(other, one) for other in self.numbers}

    def fault_one_way(self) -> None:
        self.world.cut.add((self.any(), self.any()))

    def fault_pause(self) -> None:
        broker = self.brokers[self.any()]
        broker.paused_until = self.world.now_ms + self.world.random.uniform(300, 6000)

    def fault_slow_disk(self) -> None:
        self.slow_disk = self.any()

    def fault_loss(self) -> None:
        self.world.drop_share = self.world.random.choice([0.02, 0.2])
        self.world.double_share = self.world.random.choice([0.0, 0.2])
        self.world.late_share = self.world.random.choice([0.0, 0.1, 0.1])

    def fault_transfer(self) -> None:
        """An operator, or the controller, moves leadership by hand."""
        to = self.any()
        for broker in self.brokers.values():
            if broker.leader is not None:
                broker.when_awake(lambda broker=broker: broker.hand_over(to))

    def fault_heal(self) -> None:
        self.world.cut = set()
        self.slow_disk = None
        self.world.drop_share = self.world.double_share = self.world.late_share = 0.0

    def heal(self) -> None:
        self.fault_heal()
        self.world.note("healed")
        for number in self.numbers:
            self.brokers[number].paused_until = 0.0
            self.start(number)

    def check_healed(self) -> None:
        leaders = [broker for broker in self.brokers.values() if broker.leader is not None and broker.is_subscribed]
        newest = max((broker.record.version for broker in self.brokers.values() if broker.record), default=0)
        leaders = [broker for broker in leaders if broker.record and broker.record.version == newest]
        if len(leaders) != 1:
            raise Violation(f"after healing there are {len(leaders)} leaders")
        record = leaders[0].record
        assert record is not None
        if set(record.isr) != set(record.replicas):
            raise Violation(f"after healing the ISR is {record.isr} of {record.replicas}")
        for number in record.isr:
            records = self.disks[number].log.records
            for value, offset in self.acked.items():
                if offset >= len(records) or records[offset][1] != value:
                    raise Violation(f"message {value}, acked at {offset}, is not on broker {number}")
        if not any(value > self.published - 60 for value in self.acked):
            raise Violation("after healing nothing is acked")


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    digest: str
    events: int
    acked: int
    committed: int
    faults: dict[str, int]
    violation: str | None
    trace: tuple[str, ...]


def run_seed(seed: int, broker_type: type[Broker] = Broker, *, trace: bool = False) -> Result:
    """One life of a cluster, from seed to verdict."""
    cluster = Cluster(seed, broker_type=broker_type)
    cluster.world.trace = [] if trace else None
    violation = None
    try:
        cluster.run()
    except Violation as error:
        violation = str(error)
    world = cluster.world
    return Result(
        seed,
        world.digest,
        world.events,
        len(cluster.acked),
        len(cluster.committed),
        cluster.faults,
        violation,
        tuple(world.trace or ()),
    )
