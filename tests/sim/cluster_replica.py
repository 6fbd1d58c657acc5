"""A replica of the simulation: the production `Replica` decides; its steps are taken on a virtual disk and network.
Its companion log: `cluster_companion`.

A real connection answers questions in their order and each one once: of answers of one epoch, only that to the last
question counts. Answers of another epoch may come at any time; the epoch they carry is all that tells them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import TYPE_CHECKING

from natslog.cluster.commands import ChangeIsrs
from natslog.cluster.leading import Leading
from natslog.cluster.removals import decides_removals
from natslog.cluster.replica import Replica
from natslog.cluster.replica_steps import (
    BeginEpoch,
    Close,
    Copy,
    Drain,
    Follow,
    Halted,
    Notice,
    Open,
    OpenCompanion,
    Propose,
    ProposeIsr,
    Repair,
    SetAside,
    StandBy,
    Step,
    StopWriting,
    Subscribe,
    Unsubscribe,
)
from natslog.cluster.roles import BeginAt, CutTo, FollowerReplica, LeaderReplica, Matching
from natslog.cluster.standby import standby_subjects
from natslog.cluster.stream_time import StreamClock
from natslog.errors import CorruptLog, StorageFull
from natslog.model import BrokerId, Epoch, StreamRecord
from tests.sim.cluster_clocks import elapsed_us, remembered_from
from tests.sim.cluster_companion import SimCompanion
from tests.sim.cluster_messages import LONG_AGO_MS, Answer, Fetch
from tests.sim.cluster_process import Entry
from tests.sim.cluster_removals import REWRITE_SHARE, Record, SimRemovals
from tests.sim.raft_checker import Violation, require

if TYPE_CHECKING:
    from tests.sim.cluster_broker import Roles

FETCH_TIMEOUT_MS = 500.0
MOST_RECORDS = 8
MOST_OF_RUN = 2  # so that many a replica holds a part of one


class OpenLog:
    """What the machine reads of the log: `cluster.replica_steps.Log`."""

    log_start_offset = 0

    def __init__(self, replica: SimReplica) -> None:
        self.epochs = replica.log.epochs()
        self.replica = replica

    @property
    def log_end_offset(self) -> int:
        return self.replica.durable_end()

    @property
    def written_end_offset(self) -> int:
        return max(self.replica.durable_end(), self.replica.sent_end())

    @property
    def whole_end_offset(self) -> int:
        return self.replica.whole_end()

    @property
    def high_watermark(self) -> int:
        return self.replica.log.checkpoint


class SimReplica:
    """One stream on one life of a broker."""

    def __init__(self, life: Roles, record: StreamRecord) -> None:
        self.life, self.cluster, self.world, self.me = life, life.cluster, life.world, life.me
        self.id, self.name = record.id, record.name
        self.log = life.disk.log_of(record.id)
        self.open_log: OpenLog | None = None
        self.machine = Replica(self.me, record, life, self.world.now_ms)
        self.checker = self.cluster.checker.streams[record.id]
        self.high_watermark = self.log.checkpoint
        self.stored: dict[int, int] = {}  # message → offset: the deduplication window
        self.clock = StreamClock(0, 0)
        self.written_ms = self.world.now_ms
        self.waiting: list[tuple[int, int]] = []  # (offset, message) of appended messages not acknowledged yet
        self.gathered: list[int] = []
        self.is_writing = self.is_writing_run = self.is_stepping = False
        self.after_writing: Callable[[], None] | None = None
        self.fetch_number = len(life.disk.lives) * 1_000_000  # no answer to a former life is taken for one
        self.fetching_since_ms = LONG_AGO_MS
        self.removals: SimRemovals | None = None
        self.stands_by_for: tuple[str, ...] = ()  # as it was told
        self.companion = SimCompanion(self)

    # ---- what others ask ----

    @property
    def record(self) -> StreamRecord | None:
        return self.machine.record

    @property
    def leader(self) -> LeaderReplica | None:
        return self.machine.leading

    @property
    def follower(self) -> FollowerReplica | None:
        return self.machine.following

    @property
    def is_subscribed(self) -> bool:
        return isinstance(self.machine.state, Leading) and bool(self.machine.state.subscribed_to)

    @property
    def is_halted(self) -> bool:
        return self.machine.context.is_halted

    def readable_end(self) -> int | None:
        """Up to where this replica serves readers; None where it serves none."""
        return self.high_watermark if self.machine.may_serve else None

    def record_for(self, number: int) -> Record:
        """What a request of this number makes the leader record."""
        if self.removals is None or self.record is None:
            return Record()
        is_due = decides_removals(self.record, leads=self.machine.is_leading)
        return self.removals.record_for(number) if is_due else Record()

    # ---- inputs ----

    def changed(self, record: StreamRecord | None) -> None:
        if record is not None and record != self.machine.record:
            self.world.note(
                f"{self.me} {self.name} sees v{record.version} leader {record.leader} epoch {record.leader_epoch} isr "
                f"{record.isr} eligible {record.eligible} unproven {record.unproven} replicas {record.replicas}"
            )
        self.machine.changed(record)
        if self.removals is not None:
            self.removals.adopt()
        self.act()

    def tick(self) -> None:
        is_away = self.machine.is_followed_by_any(self.life.calm.away)
        if self.life.is_calm and self.machine.is_quiet and not is_away:
            self.machine.pass_time(self.world.now_ms)
        else:
            self.machine.tick(self.world.now_ms, self.life.contact_ms)
            self.act()
        self.report()
        if self.removals is not None and self.world.random.random() < REWRITE_SHARE:
            self.removals.rewrite()

    def report(self) -> None:
        """What a replica tells the metadata leader while it has no leader, or is not answered by it."""
        if (epoch := self.machine.unresponsive_leader(self.world.now_ms, 0.0, self.life.ended)) is not None:
            self.life.report("reported", (self.id, self.me, epoch))
        for log_id, *where in self.machine.unproven_positions():
            self.life.report("positioned", (log_id, self.me, *where))

    def hand_over(self, to: BrokerId) -> None:
        self.machine.transfer(to, self.world.now_ms)
        self.act()

    def leave(self) -> bool:
        is_to_leave = self.machine.leave()
        self.act()
        return is_to_leave

    def stop(self) -> None:
        self.machine.stop()
        self.act()

    # ---- what follows from an input ----

    def act(self) -> None:
        self.advance()
        step = None if self.is_stepping else self.machine.next_step()
        for notice in self.machine.take_notices():
            self.hand_on(notice)
        if step is not None:
            self.is_stepping = True
            self.perform(step)
        elif not self.is_stepping and self.machine.is_finished:
            self.life.let_go(self)
        self.check_standby()

    def check_standby(self) -> None:
        """Every in-sync follower stands by, and none that is subscribed as the leader."""
        record, is_subscribed = self.record, self.is_subscribed
        require(not (is_subscribed and self.stands_by_for), f"broker {self.me} is subscribed twice")
        if self.follower is not None and record is not None and self.machine.is_reconciled:
            wanted = standby_subjects(record, self.me)
            require(self.stands_by_for == wanted, f"broker {self.me} stands by for {self.stands_by_for}, not {wanted}")

    def finish(self, outcome: Callable[[], None]) -> None:
        """The step under way has come to its end."""
        self.is_stepping = False
        outcome()
        self.act()

    def hand_on(self, notice: Notice) -> None:
        match notice:
            case Follow():
                self.fetching_since_ms = self.companion.fetching_since_ms = LONG_AGO_MS
            case Propose(command=command):
                self.world.note(f"{self.me} {self.name} proposes {type(command).__name__}")
                self.cluster.checker.proposes(self.me, self.record, command)
                self.life.command(command)
            case ProposeIsr(change=change):
                self.world.note(f"{self.me} {self.name} proposes isr {change.isr} of version {change.version}")
                self.life.command(ChangeIsrs(broker=self.me, changes=(change,)))
            case Halted(why=why):
                self.world.note(f"{self.me} {self.name} halts: {why}")
                require(self.cluster.is_reckless, f"broker {self.me} halts: {why}")
            case StandBy(subjects=subjects):
                self.stands_by_for = subjects
            case _:
                pass

    def perform(self, step: Step) -> None:
        done = self.machine.done
        match step:
            case Open():
                self.life.sync(lambda: self.finish(lambda: self.open(step.must_exist)))
            case OpenCompanion():
                self.life.sync(lambda: self.finish(lambda: self.companion.open(step)))
            case SetAside():
                self.log.delete()
                self.companion.log.delete()
                self.finish(done)
            case Repair(messages=messages, companion=companion):
                if messages:
                    self.log.is_damaged = False
                if companion:
                    self.companion.set_aside()
                self.finish(done)
            case Close():
                self.log.checkpoint = max(self.log.checkpoint, self.high_watermark)
                self.open_log = None
                self.companion.close()
                self.finish(done)
            case BeginEpoch():
                self.life.sync(lambda: self.finish(lambda: self.begin_epoch(step.epoch)))
            case Subscribe():
                self.stands_by_for = ()  # taken over
                self.finish(done)
            case Unsubscribe():
                self.finish(done)
            case Drain():
                self.when_written(lambda: self.finish(done))
            case StopWriting(abandon=abandon):
                if abandon:
                    self.gathered = []
                self.when_written(lambda: self.finish(lambda: self.stop_writing(done)))
            case _:
                raise AssertionError(f"{step} is taken where the answer is")

    def open(self, must_exist: bool) -> None:
        if must_exist and not self.log.exists:
            self.machine.failed(CorruptLog("the folder is missing"))
            return
        self.log.exists = True
        self.open_log = OpenLog(self)
        self.removals = SimRemovals(self) if self.cluster.removes else None
        self.machine.opened(self.open_log)
        self.high_watermark = self.machine.logs.high_watermark
        if self.log.is_damaged:
            self.machine.damaged(CorruptLog("a hole"))

    def begin_epoch(self, epoch: Epoch) -> None:
        log = self.log
        assert self.open_log is not None, "an epoch begins on an open log"
        if self.life.disk.is_full:
            self.machine.failed(StorageFull("no room"))
            return
        self.cut_unfinished_run()
        if self.record is not None and self.record.leader_epoch == epoch and self.record.leader == self.me:
            self.checker.leads(self, self.record)
        self.open_log.epochs.cut_to(log.synced)
        self.open_log.epochs.begin(epoch, log.synced)
        self.companion.begin_epoch(epoch)
        newest_us = self.checker.stamps[log.records[-1]] if log.synced else 0
        self.clock = StreamClock(newest_us, elapsed_us(self.written_ms))
        self.stored = self.rebuilt_window()
        self.waiting, self.gathered = [], []
        self.world.note(f"{self.me} {self.name} leads epoch {epoch} from {log.synced}")
        self.machine.done()

    def cut_unfinished_run(self) -> None:
        end = self.whole_end()
        if end < self.log.synced:
            self.world.note(f"{self.me} {self.name} cuts the part of a run from {end} on")
            self.log.keep(end)

    def whole_end(self) -> int:
        """Where the log ends, but for a run that it holds a part of."""
        end = self.log.synced
        start, run_end = self.checker.runs.get(self.log.records[end - 1], (end, end)) if end else (0, 0)
        return start if run_end > end else end

    def rebuilt_window(self) -> dict[int, int]:
        """Of the whole log: what is not committed yet will be. Of what files lack, only the kept ids are known."""
        lost = self.log.dropped - self.log.kept_ids
        if lost:
            raise Violation(f"broker {self.me} leads without the ids of removed rows at {sorted(lost)[:8]}")
        return {message: offset for offset, (_, message) in enumerate(self.log.records) if offset not in lost}

    def when_written(self, then: Callable[[], None]) -> None:
        if self.is_writing or self.gathered or self.companion.is_busy:
            self.after_writing = then
        else:
            then()

    def stop_writing(self, done: Callable[[], None]) -> None:
        self.waiting, self.gathered = [], []
        self.companion.stop_writing()
        done()

    def advance(self) -> None:
        """HW may have moved."""
        self.companion.advance()
        high_watermark = self.machine.logs.high_watermark
        if high_watermark <= self.high_watermark:
            self.high_watermark = high_watermark  # after a repair
            return
        self.checker.advanced(self, self.high_watermark, high_watermark)
        self.high_watermark = high_watermark
        if self.world.random.random() < 0.02:
            self.log.checkpoint = high_watermark
        while self.waiting and self.waiting[0][0] < high_watermark:
            self.cluster.ack(self.id, *self.waiting.pop(0))

    # ---- leading ----

    def published(self, message: int) -> None:
        if self.leader is None or not self.is_subscribed or self.leader.refusal() is not None:
            return
        offset = self.remembered(message)
        if offset is not None and offset < self.high_watermark:
            self.cluster.ack(self.id, offset, message)
        elif offset is not None:
            if (offset, message) not in self.waiting and not self.is_writing:
                insort(self.waiting, (offset, message))
        elif message not in self.gathered:
            self.gathered.append(message)
            self.write()

    def remembered(self, message: int) -> int | None:
        """Where it is stored, while that is within the deduplication window."""
        offset = self.stored.get(message)
        if offset is None or self.checker.stamps[self.log.records[offset]] < remembered_from(self.stream_time_us()):
            return None
        return offset

    def stream_time_us(self) -> int:
        is_first = not self.log.records
        return self.checker.time_is(self.me, self.clock.advance(self.life.reading()), is_first=is_first)

    def write(self) -> None:
        leader, log = self.leader, self.log
        if self.is_writing or not self.gathered or leader is None or leader.refusal() is not None:
            self.gathered = [] if leader is None or leader.refusal() is not None else self.gathered
            return self.written()
        if self.life.disk.is_full:
            self.gathered = []  # refused
            return self.written()
        self.checker.appends(leader.record)
        base, time_us = len(log.records), self.stream_time_us()
        log.records += [(leader.epoch, message) for message in self.gathered]
        self.checker.stamps |= dict.fromkeys(log.records[base:], time_us)
        self.written_ms = self.world.now_ms
        added = [(base + at, message) for at, message in enumerate(self.gathered)]
        self.stored.update((message, offset) for offset, message in added)
        is_run = len(added) > 1 and base % 3 != 0
        if is_run:
            self.checker.runs |= {record: (base, base + len(added)) for record in log.records[base:]}
        self.gathered, self.is_writing, self.is_writing_run = [], True, is_run

        def done() -> None:
            self.is_writing = self.is_writing_run = False
            log.synced = len(log.records)
            for one in added:
                insort(self.waiting, one)
            self.machine.appended(log.synced, base if is_run else None)
            self.act()
            self.write()

        return self.life.sync(done)

    def written(self) -> None:
        is_busy = self.is_writing or self.gathered or self.companion.is_busy
        if not is_busy and self.after_writing is not None:
            then, self.after_writing = self.after_writing, None
            then()

    def fetched(self, fetch: Fetch) -> None:
        log, offset = self.log, fetch.position.offset
        verdict = self.machine.fetched(fetch.sender, fetch.position, fetch.incarnation, self.world.now_ms)
        self.act()
        leader = self.leader
        if leader is None:
            return
        records: list[Entry] = []
        if isinstance(verdict, Matching):
            end = self.sent_end()
            in_run = offset < end and log.records[offset] in self.checker.runs
            records = log.records[offset : min(end, offset + (MOST_OF_RUN if in_run else MOST_RECORDS))]
        gaps = frozenset(log.dropped.intersection(range(offset, offset + len(records)))) if log.dropped else frozenset()
        kept = frozenset(log.kept_ids), log.ids_serial
        answer = Answer(
            self.id, leader.epoch, verdict, records, offset, leader.high_watermark, fetch.number, gaps, *kept
        )
        self.cluster.send(self.me, fetch.sender, "answered", answer)

    def sent_end(self) -> int:
        """Followers get what is written, also while it is synced; but a run when it is synced."""
        return self.log.synced if self.is_writing_run or self.leader is None else len(self.log.records)

    # ---- following ----

    def fetch(self) -> None:
        now_ms, follower = self.world.now_ms, self.follower
        if follower is None or self.is_writing or now_ms - self.fetching_since_ms < FETCH_TIMEOUT_MS:
            return
        position = self.machine.position()
        if position is None:
            return
        assert follower.record.leader is not None, "a follower has a leader"
        self.fetch_number += 1
        self.fetching_since_ms = now_ms
        fetch = Fetch(self.id, self.me, self.life.incarnation, position, self.fetch_number)
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
        if isinstance(answer.verdict, Matching) and answer.offset != len(log.records):
            return
        if self.machine.lacks_ids(answer.epoch, answer.ids_serial):
            log.kept_ids |= answer.kept_ids
            log.ids_serial += 1
            self.machine.adopted_ids(answer.epoch, answer.ids_serial)
        step = self.machine.answered(
            answer.epoch,
            answer.verdict,
            high_watermark=answer.high_watermark,
            has_records=bool(answer.records),
            now_ms=self.world.now_ms,
        )
        match step:
            case Copy():
                self.append(answer)
            case CutTo(end_offset=end) | BeginAt(log_start_offset=end):
                self.cut(end)
                self.machine.done()
                self.act()
            case None:
                self.act()

    def cut(self, end: int) -> None:
        self.world.note(f"{self.me} {self.name} cuts to {end} of {len(self.log.records)}")
        require(end >= self.high_watermark, f"broker {self.me} cuts to {end}, below its HW {self.high_watermark}")
        self.log.keep(end)
        if self.open_log is not None:
            self.open_log.epochs.cut_to(end)
        self.checker.cut(self, end)

    def append(self, answer: Answer) -> None:
        log = self.log
        if self.life.disk.is_full:
            self.machine.failed(StorageFull("no room"))
            return self.act()
        assert self.open_log is not None, "a follower has a log"
        for at, (epoch, _) in enumerate(answer.records):
            self.open_log.epochs.begin(Epoch(epoch), answer.offset + at)
        log.records += answer.records
        log.dropped |= answer.gaps
        self.written_ms = self.world.now_ms
        self.is_writing = True

        def done() -> None:
            self.is_writing = False
            log.synced = len(log.records)
            self.machine.done()
            self.act()
            self.fetch()

        return self.after_append(done)

    def after_append(self, done: Callable[[], None]) -> None:
        self.life.sync(done)
