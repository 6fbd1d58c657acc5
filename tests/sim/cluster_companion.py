"""The companion log of a replica of the simulation: appended to, copied, delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from natslog.cluster.epochs import EpochHistory
from natslog.cluster.replica_steps import Copy, OpenCompanion
from natslog.cluster.roles import BeginAt, CutTo, Matching
from natslog.errors import CorruptLog, StorageFull
from natslog.model import Epoch, companion_id
from tests.sim.cluster_messages import LONG_AGO_MS, Answer, Fetch
from tests.sim.raft_checker import require

if TYPE_CHECKING:
    from tests.sim.cluster_replica import SimReplica

MOST_RECORDS = 3
FETCH_TIMEOUT_MS = 500.0


class OpenCompanionLog:
    """What the machine reads of it."""

    log_start_offset = 0

    def __init__(self, companion: SimCompanion) -> None:
        self.epochs: EpochHistory = companion.log.epochs()
        self.log = companion.log

    @property
    def log_end_offset(self) -> int:
        return self.log.synced

    @property
    def written_end_offset(self) -> int:
        return self.log.synced

    @property
    def whole_end_offset(self) -> int:
        return self.log.synced

    @property
    def high_watermark(self) -> int:
        return self.log.checkpoint


class SimCompanion:
    """Records are numbers; each may be appended again, as removals may."""

    def __init__(self, replica: SimReplica) -> None:
        self.replica, self.life, self.world = replica, replica.life, replica.world
        self.me, self.machine = replica.me, replica.machine
        self.id = companion_id(replica.id)
        self.log = self.life.disk.log_of(self.id)
        self.checker = replica.cluster.checker.companions[replica.id]
        self.open_log: OpenCompanionLog | None = None
        self.high_watermark = self.delivered = 0
        self.gathered: list[int] = []
        self.waiting: list[tuple[int, int]] = []
        self.is_writing = self.is_delivering = False
        self.openings = 0
        self.fetch_number = replica.fetch_number
        self.fetching_since_ms = LONG_AGO_MS

    @property
    def is_busy(self) -> bool:
        return self.is_writing or bool(self.gathered)

    # ---- steps ----

    def open(self, step: OpenCompanion) -> None:
        log = self.log
        if (step.must_exist and not log.exists) or log.is_damaged:
            self.machine.failed(CorruptLog("the companion log is missing or damaged"))
            return
        if not log.exists and self.life.disk.is_full:
            self.machine.failed(StorageFull("no room"))
            return
        log.exists = True
        self.open_log = OpenCompanionLog(self)
        if step.epoch is not None:
            self.begin_epoch(step.epoch)
        self.openings += 1
        self.delivered, self.high_watermark = 0, log.checkpoint
        self.deliver(log.checkpoint)
        self.machine.companion_opened(self.open_log, self.delivered)

    def begin_epoch(self, epoch: Epoch) -> None:
        if self.open_log is not None:
            record = self.replica.record
            if record is not None and (record.leader, record.leader_epoch) == (self.me, epoch):
                self.checker.leads(self, record)
            self.open_log.epochs.cut_to(self.log.synced)
            self.open_log.epochs.begin(epoch, self.log.synced)

    def set_aside(self) -> None:
        self.log.delete()
        self.open_log = None

    def close(self) -> None:
        if self.open_log is not None:
            self.log.checkpoint = max(self.log.checkpoint, self.high_watermark)
        self.open_log = None

    def stop_writing(self) -> None:
        self.gathered, self.waiting = [], []

    # ---- what follows from HW ----

    def advance(self) -> None:
        high_watermark = self.machine.logs.companion_high_watermark
        if self.open_log is None or high_watermark <= self.high_watermark:
            return
        self.checker.advanced(self, self.high_watermark, high_watermark)
        self.high_watermark = high_watermark
        if self.world.random.random() < 0.1:
            self.log.checkpoint = high_watermark
        if not self.is_delivering:
            self.is_delivering = True
            self.life.sync(self.deliver_read)

    def deliver_read(self) -> None:
        """They were read from the log meanwhile."""
        self.is_delivering = False
        if self.open_log is None:
            return
        self.deliver(self.high_watermark)
        self.machine.delivered(self.delivered)
        while self.waiting and self.waiting[0][0] < self.delivered:
            self.replica.cluster.ack_change(self.replica.id, *self.waiting.pop(0))
        self.replica.act()

    def deliver(self, end: int) -> None:
        self.checker.delivers(self, self.delivered, end)
        if (removals := self.replica.removals) is not None:
            contents, records = self.checker.contents, self.log.records
            removals.deliver(self.delivered, [contents[records[at][0], at] for at in range(self.delivered, end)])
        self.delivered = end

    # ---- leading ----

    def requested(self, number: int) -> None:
        """A change that is to be stored; who requests it repeats that until it is acked."""
        leader, machine = self.replica.leader, self.machine
        if leader is None or machine.is_transferring or leader.refusal() is not None:
            return
        if leader.companion is None or not machine.context.is_companion_held:
            machine.create_companion()
            self.replica.act()
        elif number not in self.gathered:
            self.gathered.append(number)
            self.write()

    def write(self) -> None:
        leader, log = self.replica.leader, self.log
        if self.is_writing or not self.gathered:
            return self.replica.written()
        if leader is None or leader.refusal() is not None or self.life.disk.is_full:
            self.gathered = []
            return self.replica.written()
        base = len(log.records)
        log.records += [(leader.epoch, number) for number in self.gathered]
        added = [(base + at, number) for at, number in enumerate(self.gathered)]
        for at, number in added:
            self.checker.contents[leader.epoch, at] = self.replica.record_for(number)
        self.gathered, self.is_writing = [], True

        def done() -> None:
            self.is_writing = False
            log.synced = len(log.records)
            self.waiting += added
            self.machine.appended(log.synced, is_companion=True)
            self.replica.act()
            self.write()

        return self.life.sync(done)

    def fetched(self, fetch: Fetch) -> None:
        log, offset = self.log, fetch.position.offset
        now_ms = self.world.now_ms
        verdict = self.machine.fetched(fetch.sender, fetch.position, fetch.incarnation, now_ms, is_companion=True)
        self.replica.act()
        leader = self.replica.leader
        if leader is None or leader.companion is None:
            return
        is_matching = isinstance(verdict, Matching)
        records = log.records[offset : min(log.synced, offset + MOST_RECORDS)] if is_matching else []
        high_watermark = leader.companion.high_watermark
        answer = Answer(self.id, leader.epoch, verdict, records, offset, high_watermark, fetch.number)
        self.replica.cluster.send(self.me, fetch.sender, "answered", answer)

    # ---- following ----

    def fetch(self) -> None:
        now_ms, follower = self.world.now_ms, self.replica.follower
        if follower is None or self.is_writing or now_ms - self.fetching_since_ms < FETCH_TIMEOUT_MS:
            return
        position = self.machine.position(is_companion=True)
        if position is None or follower.record.leader is None:
            return
        self.fetch_number += 1
        self.fetching_since_ms = now_ms
        fetch = Fetch(self.id, self.me, self.life.incarnation, position, self.fetch_number)
        self.replica.cluster.send(self.me, follower.record.leader, "fetched", fetch)

    def answered(self, answer: Answer) -> None:
        follower, log = self.replica.follower, self.log
        is_last = answer.number == self.fetch_number
        if follower is None or self.is_writing or (answer.epoch == follower.epoch and not is_last):
            return
        if is_last:
            self.fetching_since_ms = LONG_AGO_MS
        if self.open_log is None or (isinstance(answer.verdict, Matching) and answer.offset != len(log.records)):
            return
        step = self.machine.answered(
            answer.epoch,
            answer.verdict,
            high_watermark=answer.high_watermark,
            has_records=bool(answer.records),
            now_ms=self.world.now_ms,
            is_companion=True,
        )
        match step:
            case Copy():
                self.append(answer)
            case CutTo(end_offset=end) | BeginAt(log_start_offset=end):
                self.world.note(f"{self.me} {self.replica.name} cuts its companion to {end} of {len(log.records)}")
                require(end >= self.high_watermark, f"broker {self.me} cuts its companion below its HW")
                log.keep(end)
                self.open_log.epochs.cut_to(end)
                self.checker.cut(self, end)
                self.machine.done()
                self.replica.act()
            case None:
                self.replica.act()

    def append(self, answer: Answer) -> None:
        log = self.log
        if self.life.disk.is_full:
            self.machine.failed(StorageFull("no room"))
            return self.replica.act()
        assert self.open_log is not None, "a follower has a log"
        for at, (epoch, _) in enumerate(answer.records):
            self.open_log.epochs.begin(Epoch(epoch), answer.offset + at)
        log.records += answer.records
        self.is_writing = True

        def done() -> None:
            self.is_writing = False
            log.synced = len(log.records)
            self.machine.done()
            self.replica.act()
            self.fetch()

        return self.life.sync(done)
