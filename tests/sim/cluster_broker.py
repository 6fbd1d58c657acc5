"""A broker of the simulation: what its replica of the stream does, as `LeaderReplica` and `FollowerReplica` say.

A real connection answers questions in their order and each one once: of answers of one epoch, only that to the last
question counts. Answers of another epoch may come at any time; the epoch they carry is all that tells them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from natslog.cluster import roles
from natslog.cluster.commands import AppointLeaders, Appointment, ChangeIsrs, DisableReplicas
from natslog.cluster.epochs import EpochHistory
from natslog.cluster.roles import (
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
from natslog.model import BrokerId, Epoch, StreamRecord
from tests.sim.cluster_checker import require
from tests.sim.cluster_process import NAME, STREAM, Disk, Entry, Life, Process

if TYPE_CHECKING:
    from tests.sim.cluster_world import Cluster

FETCH_EVERY_MS = 60.0
FETCH_TIMEOUT_MS = 500.0
MOST_RECORDS = 8
MOST_OF_RUN = 2  # so that many a replica holds a part of one
LONG_AGO_MS = -1e9


@dataclass(slots=True)
class Fetch:
    sender: BrokerId
    incarnation: str
    position: FetchPosition
    number: int


@dataclass(slots=True)
class Answer:
    epoch: Epoch
    verdict: Verdict
    records: list[Entry]
    offset: int
    high_watermark: int
    number: int


class Roles(Life):
    """What one life of a broker does as a replica; a subclass says how it knows of the metadata."""

    def __init__(self, cluster: Cluster, me: int, disk: Disk) -> None:
        super().__init__(cluster, me, disk)
        self.log = disk.log
        self.log.keep(self.log.synced)
        self.epochs = self.log.epochs()
        self.high_watermark = self.log.checkpoint
        self.record: StreamRecord | None = None
        self.leader: LeaderReplica | None = None
        self.follower: FollowerReplica | None = None
        self.heard_ms: dict[BrokerId, float] = {}
        self.stored: dict[int, int] = {}  # message → offset: the deduplication window
        self.waiting: list[tuple[int, int]] = []  # (offset, message) of appended messages not acked yet
        self.gathered: list[int] = []
        self.is_writing = self.is_halted = False
        self.fetch_number = disk.lives * 1_000_000  # no answer to a former life is taken for one
        self.fetching_since_ms = LONG_AGO_MS
        self.handing_over_to: BrokerId | None = None
        self.every(FETCH_EVERY_MS, self.fetch)

    def tick(self) -> None:
        super().tick()
        if self.leader is not None:
            self.lead(self.leader)
        self.look_after_position()

    # ---- roles ----

    def look_at_record(self) -> None:
        record = self.state.streams.get(NAME)
        if record is None or not self.is_registered or record == self.record or self.is_halted:
            return
        if self.disk.is_damaged:
            if self.me in record.candidates:
                return  # says so in tick until it is heard, and does nothing before
            self.disk.is_damaged = False
        if self.goes_on(record):
            return
        self.leader = self.follower = self.handing_over_to = None
        self.waiting, self.gathered = [], []
        if self.is_writing:
            return  # again when the disk is done
        self.see(record)
        if self.me not in record.replicas:
            self.bury()
        elif record.leader == self.me:
            self.become_leader(record)
        elif record.leader is not None:
            self.follower = FollowerReplica(self.me, record, self.high_watermark, self.world.now_ms)
            self.fetching_since_ms = LONG_AGO_MS

    def goes_on(self, record: StreamRecord) -> bool:
        """Whether the present role is also that of the new record."""
        role = self.leader or self.follower
        if role is None or self.me not in record.replicas:
            return False
        if (role.record.leader, role.record.leader_epoch) != (record.leader, record.leader_epoch):
            return False
        self.see(record)
        if self.leader is not None:
            self.advance(self.leader.update(record, self.world.now_ms))
        elif self.follower is not None:
            self.follower.record = record
        return True

    def see(self, record: StreamRecord) -> None:
        self.record = record
        self.world.note(
            f"{self.me} sees v{record.version} leader {record.leader} epoch {record.leader_epoch} isr {record.isr} "
            f"eligible {record.eligible} unproven {record.unproven} replicas {record.replicas}"
        )

    def bury(self) -> None:
        """The replica was moved away: where there is a tombstone for it, and only there, its files go."""
        if any(one.id == STREAM and one.broker == self.me for one in self.state.tombstones.values()):
            self.log.keep(0)
            self.epochs, self.high_watermark = EpochHistory(), 0

    def become_leader(self, record: StreamRecord) -> None:
        self.cut_unfinished_run()
        self.cluster.checker.leads(self, record)
        log = self.log
        self.epochs.begin(record.leader_epoch, log.synced)
        self.leader = LeaderReplica(
            self.me,
            record,
            log_end_offset=log.synced,
            high_watermark=self.high_watermark,
            now_ms=self.world.now_ms,
        )
        self.heard_ms = {}
        self.stored = self.rebuilt_window()
        self.world.note(f"{self.me} leads epoch {record.leader_epoch} from {log.synced}, isr {record.isr}")
        self.advance(self.leader.high_watermark)

    def cut_unfinished_run(self) -> None:
        end = self.settled_end()
        if end < self.log.synced:
            self.world.note(f"{self.me} cuts the part of a run from {end} on")
            self.log.keep(end)
            self.epochs.cut_to(end)

    def settled_end(self) -> int:
        """Where the log ends, but for a run that it holds a part of."""
        end = self.log.synced
        start, run_end = self.cluster.checker.runs.get(self.log.records[end - 1], (end, end)) if end else (0, 0)
        return start if run_end > end else end

    def rebuilt_window(self) -> dict[int, int]:
        """Of the whole log: what is not committed yet will be."""
        return {message: offset for offset, (_, message) in enumerate(self.log.records)}

    def look_after_position(self) -> None:
        """What a replica says to the metadata leader while it has no leader, or does not hear it."""
        if self.disk.is_damaged:
            self.command(DisableReplicas(broker=self.me, incarnation=self.incarnation, stream_ids=(STREAM,)))
            self.look_at_record()
        record = self.record
        if record is None or self.is_writing:
            return
        if self.me in record.unproven and record.leader != self.me:
            last = self.epochs.last_epoch_before(self.log.synced)
            self.report("positioned", (self.me, record.version, last, self.log.synced))
        if self.follower is not None and self.follower.misses_leader(self.world.now_ms, 0.0):
            self.report("reported", (self.me, record.leader_epoch))

    # ---- leading ----

    @property
    def is_subscribed(self) -> bool:
        return self.leader is not None and self.has_session and self.handing_over_to is None

    def lead(self, leader: LeaderReplica) -> None:
        change = leader.isr_change(self.world.now_ms, self.heard_ms)
        if change is not None:
            self.world.note(f"{self.me} proposes isr {change.isr} of version {change.version}")
            self.command(ChangeIsrs(broker=self.me, changes=(change,)))
        to, isr = self.handing_over_to, leader.record.isr
        if to is None or self.is_writing:
            return
        if to in isr and leader.is_caught_up(to):
            appointment = Appointment(stream_id=STREAM, version=leader.record.version, leader=to, isr=isr)
            self.command(AppointLeaders(appointments=(appointment,)))
            self.handing_over_to = None
        elif to not in isr:
            self.handing_over_to = None

    def hand_over(self, to: BrokerId) -> None:
        if self.leader is not None and to in self.leader.record.isr:
            self.handing_over_to = to

    def published(self, message: int) -> None:
        if self.leader is None or not self.is_subscribed or self.leader.refusal() is not None:
            return
        offset = self.stored.get(message)
        if offset is not None and offset < self.high_watermark:
            self.cluster.ack(offset, message)
        elif offset is not None:
            insort(self.waiting, (offset, message))
        elif message not in self.gathered:
            self.gathered.append(message)
            self.write()

    def write(self) -> None:
        leader, log = self.leader, self.log
        if self.is_writing or not self.gathered or leader is None or leader.refusal() is not None:
            return
        self.cluster.checker.appends(leader.record)
        base = len(log.records)
        log.records += [(leader.epoch, message) for message in self.gathered]
        added = [(base + at, message) for at, message in enumerate(self.gathered)]
        self.stored.update((message, offset) for offset, message in added)
        is_run = len(added) > 1 and base % 3 != 0
        if is_run:
            self.cluster.checker.runs |= {record: (base, base + len(added)) for record in log.records[base:]}
        self.gathered, self.is_writing = [], True

        def done() -> None:
            self.is_writing = False
            log.synced = len(log.records)
            if self.leader is leader:
                for one in added:
                    insort(self.waiting, one)
                self.advance(leader.appended(log.synced, base if is_run else None))
                self.write()
            else:
                self.look_at_record()

        self.sync(done)

    def advance(self, high_watermark: int) -> None:
        """HW is known to be this."""
        if high_watermark <= self.high_watermark:
            return
        self.cluster.checker.advanced(self, self.high_watermark, high_watermark)
        self.high_watermark = high_watermark
        if self.world.random.random() < 0.02:
            self.log.checkpoint = high_watermark
        while self.waiting and self.waiting[0][0] < high_watermark:
            self.cluster.ack(*self.waiting.pop(0))

    def fetched(self, fetch: Fetch) -> None:
        self.heard_ms[fetch.sender] = self.world.now_ms
        leader, log, offset = self.leader, self.log, fetch.position.offset
        if leader is None:
            return
        verdict = roles.judge(
            fetch.position, epoch=leader.epoch, epochs=self.epochs, log_start_offset=0, log_end_offset=log.synced
        )
        records: list[Entry] = []
        if isinstance(verdict, Matching):
            version = fetch.position.version
            self.advance(leader.fetched(fetch.sender, offset, fetch.incarnation, self.world.now_ms, version))
            in_run = offset < log.synced and log.records[offset] in self.cluster.checker.runs
            records = log.records[offset : min(log.synced, offset + (MOST_OF_RUN if in_run else MOST_RECORDS))]
        answer = Answer(leader.epoch, verdict, records, offset, leader.high_watermark, fetch.number)
        self.cluster.send(self.me, fetch.sender, "answered", answer)

    # ---- reading ----

    def readable_end(self) -> int | None:
        """Up to where this replica serves readers; None where it serves none."""
        if self.record is None or self.me not in self.record.isr:
            return None
        if self.leader is not None:
            return self.high_watermark if self.leader.is_exposed else None
        return self.high_watermark if self.follower is not None else None

    # ---- following ----

    def fetch(self) -> None:
        now_ms, follower = self.world.now_ms, self.follower
        if follower is None or self.is_writing or now_ms - self.fetching_since_ms < FETCH_TIMEOUT_MS:
            return
        assert follower.record.leader is not None, "a follower has a leader"
        self.fetch_number += 1
        self.fetching_since_ms = now_ms
        position = follower.position(self.epochs, self.durable_end())
        fetch = Fetch(self.me, self.incarnation, position, self.fetch_number)
        self.cluster.send(self.me, follower.record.leader, "fetched", fetch)

    def durable_end(self) -> int:
        return self.log.synced

    def answered(self, answer: Answer) -> None:
        follower, log = self.follower, self.log
        is_last = answer.number == self.fetch_number
        if follower is None or self.is_writing or (answer.epoch == follower.epoch and not is_last):
            return
        if is_last:
            self.fetching_since_ms = LONG_AGO_MS
        step = follower.answered(
            answer.epoch, answer.verdict, self.world.now_ms, epochs=self.epochs, log_end_offset=log.synced
        )
        match step:
            case Append() if answer.offset == len(log.records):
                self.append(follower, answer)
            case CutTo(end_offset=end) | BeginAt(log_start_offset=end):
                self.cut(end)
            case Halt(why=why):
                self.halt(why)
            case _:
                pass

    def halt(self, why: str) -> None:
        """Rather than lie; never while what happens is within what is tolerated."""
        self.world.note(f"{self.me} halts: {why}")
        require(self.cluster.is_reckless, f"broker {self.me} halts: {why}")
        self.is_halted, self.follower = True, None

    def cut(self, end: int) -> None:
        self.world.note(f"{self.me} cuts to {end} of {len(self.log.records)}")
        require(end >= self.high_watermark, f"broker {self.me} cuts to {end}, below its HW {self.high_watermark}")
        self.log.keep(end)
        self.epochs.cut_to(end)
        self.cluster.checker.cut(self, end)

    def append(self, follower: FollowerReplica, answer: Answer) -> None:
        log = self.log
        for at, (epoch, _) in enumerate(answer.records):
            self.epochs.begin(Epoch(epoch), answer.offset + at)
        log.records += answer.records

        def done() -> None:
            self.is_writing = False
            log.synced = len(log.records)
            if self.follower is follower:
                self.advance(follower.advanced(answer.high_watermark, self.settled_end()))
                if answer.records:
                    self.fetch()
            else:
                self.look_at_record()

        if answer.records:
            self.is_writing = True
            self.after_append(done)
        else:
            done()

    def after_append(self, done: Callable[[], None]) -> None:
        self.sync(done)


class Broker(Roles, Process):
    """One life of one broker, in time."""
