"""One replica of one stream on one broker: a pure state machine that decides what the broker does with it.

Theory of operation. The machine compares what the metadata wants (`changed`) with the state it is in, and names one
`Step` at a time (`next_step`); the executor carries the step out on real files and sockets, or in the simulation on
virtual ones, and reports `done` or `failed`. What needs no waiting is a `Notice` (`take_notices`). What happened
meanwhile is told by the other inputs: `appended`, `fetched`, `answered`, `damaged`, `tick`, `transfer`, `stop`.

    Closed(problem) ──opened──▶ Idle ──▶ Following(role)     A role begins from Idle only, and ends in Idle: so no two
        ▲                        │ ▲ ──▶ Leading(role)       roles ever overlap, whatever the metadata says meanwhile.
        └────────────────────────┘ └────────┘

Invariants.
- One step at a time; a role is that of the newest record, or is on its way out.
- A role begins only in an incarnation that the metadata has registered, on a log that the metadata knows to exist
  (`holders`), and never on a damaged one.
- A replica with damage is taken out of the candidates first, then repaired. Where it is the only candidate nothing is
  proposed and nothing is repaired: no other could lead, and an operator decides.
- Only a leader with a metadata session states positions (`is_leading`); everyone else serves what is below its own
  high watermark (HW) at most (`may_serve`).
- HW never goes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from natslog.cluster.attempts import Attempts
from natslog.cluster.commands import (
    AppointLeaders,
    Appointment,
    DisableReplicas,
    HoldReplicas,
)
from natslog.cluster.replica_steps import (
    BeginEpoch,
    Close,
    Closed,
    Copy,
    Damaged,
    Drain,
    Follow,
    Following,
    Halted,
    Idle,
    Leading,
    Log,
    Notice,
    Open,
    Propose,
    ProposeIsr,
    Repair,
    SetAside,
    State,
    Step,
    StopWriting,
    Subscribe,
    Surroundings,
    Unfollow,
    Unsubscribe,
)
from natslog.cluster.roles import (
    Append,
    BeginAt,
    CutTo,
    Fenced,
    FetchPosition,
    FollowerReplica,
    Halt,
    Ignore,
    LeaderReplica,
    Matching,
    Timeouts,
    Verdict,
    judge,
)
from natslog.errors import CorruptLog, DataDirError, NatslogError, NotEnoughReplicas, StorageFailed
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord

_RETRY_MS = 1000.0
_TRANSFER_WITHIN_MS = 3000.0
_CLOCKS_WITHIN_MS = 2000.0


@dataclass(slots=True)
class _Transfer:
    to: BrokerId
    since_ms: float
    is_drained: bool = False


class Replica:
    """See the module. All inputs return at once and touch nothing but this object.

    Args:
        me: this broker. `record`: the stream, as the metadata has it.
        now_ms: of a clock that never jumps; each input that depends on time is given it.

    Attributes:
        record: the newest that is known here; None once the stream was deleted or moved away.
        damage: what was found damaged and is not repaired yet. `problem`: why the replica does not serve.
        high_watermark: what is known to be committed; the executor acknowledges and exposes what lies below.
    """

    def __init__(
        self,
        me: BrokerId,
        record: StreamRecord,
        surroundings: Surroundings,
        now_ms: float,
        timeouts: Timeouts = Timeouts(),
    ) -> None:
        self.me = me
        self.stream_id: StreamId = record.id
        self.record: StreamRecord | None = record
        self.state: State = Closed()
        self.log: Log | None = None
        self.damage: NatslogError | None = None
        self.high_watermark = 0
        self._problem: NatslogError | None = None
        self._surroundings = surroundings
        self._timeouts = timeouts
        self._now_ms = now_ms
        self._step: Step | None = None
        self._notices: list[Notice] = []
        self._attempts = Attempts()
        self._not_before_ms = 0.0
        self._contact_ms: Mapping[BrokerId, float] = {}
        self._transfer: _Transfer | None = None
        self._has_stale_writer = False
        self._without_time: tuple[Epoch, float] | None = None  # the epoch that waits for the others' clocks, since when
        self._is_halted = False
        self._is_leaving = False
        self._is_stopping = False

    # ---- what others may ask ----

    @property
    def leading(self) -> LeaderReplica | None:
        return self.state.role if isinstance(self.state, Leading) else None

    @property
    def following(self) -> FollowerReplica | None:
        return self.state.role if isinstance(self.state, Following) else None

    @property
    def problem(self) -> NatslogError | None:
        """Why the replica does not serve, or not fully."""
        closed = self.state.problem if isinstance(self.state, Closed) else None
        return self._problem or closed or self.damage

    @property
    def is_leading(self) -> bool:
        """Whether it leads, takes messages, knows what is committed, and may say so: it has a metadata session."""
        return self.is_exposed and self._surroundings.has_session and self._fits()

    @property
    def is_ready(self) -> bool:
        """Whether it leads, as far as it knows, and takes messages, or would if it had a session."""
        return isinstance(self.state, Leading) and self.state.is_ready

    @property
    def is_exposed(self) -> bool:
        """Whether it leads, as far as it knows, and its HW is known well enough to be shown."""
        state = self.state
        return isinstance(state, Leading) and state.is_ready and state.role.is_exposed

    @property
    def may_serve(self) -> bool:
        """Whether ranges that end at or below the HW known here may be served from here."""
        record = self.record
        if self.is_exposed:
            return True
        return (
            isinstance(self.state, Following)
            and record is not None
            and self.me in record.isr
            and self.damage is None
            and not self._is_halted
        )

    @property
    def others_hold_it(self) -> bool:
        """Whether another replica may hold all that is committed."""
        return self.record is not None and bool(set(self.record.candidates) - {self.me})

    @property
    def is_transferring(self) -> bool:
        """Whether it takes no messages, so that another replica may become leader; or until those that it had taken
        are appended, where that was given up meanwhile.
        """
        return self._transfer is not None or isinstance(self._step, Drain)

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    @property
    def is_reconciled(self) -> bool:
        """Whether the replica is what the record says, as far as it can be."""
        return self._step is None and (self._fits() or isinstance(self.state, Idle | Closed))

    @property
    def is_finished(self) -> bool:
        """Whether it is closed for good."""
        return self._ends and isinstance(self.state, Closed) and self._step is None

    def refusal(self) -> NotEnoughReplicas | None:
        """Why nothing may be appended now. From any thread."""
        leading = self.leading
        return leading.refusal() if leading is not None else None

    def unresponsive_leader(self, leader_contact_ms: float) -> Epoch | None:
        """The epoch whose leader has not answered for so long that it is to be reported."""
        following = self.following
        if following is None or not following.is_leader_unresponsive(self._now_ms, leader_contact_ms):
            return None
        return following.epoch

    def unproven_position(self) -> tuple[int, Epoch, int] | None:
        """(record version, last epoch, log end offset) where the metadata leader has to know it: the broker restarted
        uncleanly, and no leader has compared the log with its own since.
        """
        record, log = self.record, self.log
        if record is None or log is None or self.is_busy or self.damage is not None or self.leading is not None:
            return None
        if record.leader == self.me or self.me not in record.unproven:
            return None
        end = log.log_end_offset
        return record.version, log.epochs.last_epoch_before(end), end

    # ---- inputs: the metadata, time, the operator ----

    def changed(self, record: StreamRecord | None) -> None:
        """The metadata has this record now; None: the stream was deleted, or the replica was moved away."""
        self.record = record
        if not self._fits() or record is None:
            return
        state = self.state
        if isinstance(state, Leading):
            self._reached(state.role.update(record, self._now_ms))
            if self._transfer is not None and not _is_proven(record, self._transfer.to):
                self._transfer = None
        elif isinstance(state, Following):
            state.role.record = record
            if self.me not in record.isr and record.leader is not None:
                self._notices.append(Follow(record.leader))  # asks once more, knowing that it is out of the ISR

    @property
    def is_quiet(self) -> bool:
        """Whether the next tick will find nothing to do, unless there is an input before it, or `Calm` ends."""
        state = self.state
        if self._step is not None or self._notices or self._transfer is not None or self._has_stale_writer:
            return False
        if self.damage is not None or not self._is_held or not self._fits():
            return False
        if isinstance(state, Leading):
            return state.is_ready and state.subscribed_to == self._wanted_subjects(state) and state.role.is_quiet
        return True

    def is_followed_by_any(self, brokers: frozenset[BrokerId]) -> bool:
        """Whether it leads, and one of these is its follower."""
        leading = self.leading
        return leading is not None and not brokers.isdisjoint(leading.followers)

    def pass_time(self, now_ms: float) -> None:
        """Instead of a tick, of a replica that is quiet."""
        self._now_ms = now_ms

    def tick(self, now_ms: float, contact_ms: Mapping[BrokerId, float]) -> None:
        """Time has passed. `contact_ms`: when each follower last asked this broker for anything."""
        self._now_ms = now_ms
        state = self.state
        if isinstance(state, Leading) and self._fits():
            if self._transfer is not None and now_ms - self._transfer.since_ms > _TRANSFER_WITHIN_MS:
                self._transfer = None
            self._contact_ms = contact_ms
            self._propose_isr(state.role)
        self._propose_transfer()
        self._propose_for_itself()

    def transfer(self, to: BrokerId, now_ms: float) -> bool:
        """Stops taking messages, lets `to` catch up, then proposes it as leader. Where that takes too long the replica
        goes on leading. Returns whether it was begun.
        """
        self._now_ms = now_ms
        record = self.record
        if record is None or record.leader != self.me or to == self.me or not _is_proven(record, to):
            return False
        if self.leading is None:  # its epoch could not begin, so nothing was appended in it
            self._propose_leader(record, to)
            return True
        if self._transfer is None:
            self._transfer = _Transfer(to, now_ms)
        return self._transfer.to == to

    def leave(self) -> bool:
        """The broker is about to stop: a follower fetches no more. Returns whether it is to leave the ISR, so that the
        leader does not wait for it.
        """
        record = self.record
        if self.following is None or record is None:
            return False
        self._is_leaving = True  # fetching on, it would be proposed for the ISR again
        is_needed = self.me in record.isr and len(record.isr) <= record.settings.min_isr
        return self.me in record.isr and not is_needed and self._surroundings.level >= 2

    @property
    def successor(self) -> BrokerId | None:
        """An in-sync replica that this leader may hand its leadership to before the broker stops."""
        leading = self.leading
        if leading is None:
            return None
        others = (one for one in leading.record.isr if one != self.me and one not in leading.record.unproven)
        return next(others, None)

    def stop(self) -> None:
        """The broker stops: the role ends, what was received is appended and acknowledged, the log is closed."""
        self._is_stopping = True

    # ---- inputs: the log ----

    def appended(self, end_offset: int, run_start: int | None = None) -> None:
        """The leader's log ends here now, on stable storage; from `run_start` on it is one run, where given."""
        if isinstance(self.state, Leading):
            self._reached(self.state.role.appended(end_offset, run_start, now_ms=self._now_ms))
            self._propose_transfer()

    def damaged(self, error: NatslogError) -> None:
        """Something on disk is not what was written, or can no longer be written. Where there is no other replica, the
        log itself refuses writes, and reads go on around the damage.
        """
        if self.damage is None and self._is_replicated:
            self.damage = error
            self._notices.append(Damaged(error))

    # ---- inputs: replication ----

    def fetched(self, follower: BrokerId, position: FetchPosition, incarnation: str, now_ms: float) -> Verdict:
        """A follower asks from here on: everything below is on its stable storage, if its log matches."""
        self._now_ms = now_ms
        verdict = self.judged(position)
        if isinstance(verdict, Matching) and isinstance(self.state, Leading):
            role = self.state.role
            self._reached(role.fetched(follower, position.offset, incarnation, now_ms, position.version))
            if role.is_to_join(follower):  # at once: the next moment it may be behind again
                self._propose_isr(role)
            self._propose_transfer()
        return verdict

    def judged(self, position: FetchPosition) -> Verdict:
        """What a follower at this position is told."""
        state, log = self.state, self.log
        if not isinstance(state, Leading) or log is None:
            return Fenced(Epoch(0))
        return judge(
            position,
            epoch=state.role.epoch,
            epochs=log.epochs,
            log_start_offset=log.log_start_offset,
            log_end_offset=log.log_end_offset,
        )

    def position(self) -> FetchPosition | None:
        """Where a follower asks from; None where it does not fetch now."""
        following, log = self.following, self.log
        if following is None or log is None or self.is_busy:
            return None
        return following.position(log.epochs, log.log_end_offset)

    def answered(
        self, epoch: Epoch, verdict: Verdict, *, high_watermark: int, has_records: bool, now_ms: float
    ) -> Copy | CutTo | BeginAt | None:
        """The leader's answer to the question asked last, with its HW. Returns the step to be taken now, if any; it is
        followed by `done` or `failed`.
        """
        self._now_ms = now_ms
        state, log = self.state, self.log
        if not isinstance(state, Following) or log is None or self._step is not None or not self._fits():
            return None
        answer = state.role.answered(epoch, verdict, now_ms, epochs=log.epochs, log_end_offset=log.log_end_offset)
        match answer:
            case Append() if has_records:
                self._step = Copy(high_watermark)
            case Append():
                self._reached(state.role.advanced(high_watermark, log.whole_end_offset))
            case CutTo() | BeginAt():
                self._step = answer
            case Halt(why=why):
                self._halt(why)
            case Ignore():
                pass
        step = self._step
        assert step is None or isinstance(step, Copy | CutTo | BeginAt), "no other step is under way"
        return step

    # ---- inputs: steps ----

    def opened(self, log: Log) -> None:
        """The step `Open` succeeded."""
        self._end_step(Open)
        self.log, self.state = log, Idle()
        self.high_watermark = log.high_watermark
        self._propose_for_itself()

    def done(self) -> None:
        """The step under way succeeded."""
        step, self._step = self._step, None
        match step:
            case BeginEpoch():
                self._begin_to_lead(step.epoch)
            case Subscribe(subjects=subjects) if isinstance(self.state, Leading):
                self.state.subscribed_to, self.state.is_ready = subjects, True
            case Unsubscribe() if isinstance(self.state, Leading):
                self.state.subscribed_to = ()
            case Drain() if self._transfer is not None:
                self._transfer.is_drained = True
                self._propose_transfer()
            case StopWriting():
                self._has_stale_writer = False
                if isinstance(self.state, Leading):
                    self.state.is_writing = False
            case Repair():
                self.damage = self._problem = None
                self.high_watermark = self.log.high_watermark if self.log is not None else 0
            case SetAside():
                self.damage = self._problem = None
                self.state = Closed()
            case Close():
                self.log, self.state = None, Closed()
                if isinstance(self.damage, StorageFailed):
                    self.damage = None  # what is on disk now is what it has; opening it tells
            case Copy(leader_high_watermark=leader_high_watermark) if isinstance(self.state, Following):
                assert self.log is not None, "records are copied to an open log"
                end_offset = self.log.whole_end_offset
                self._reached(self.state.role.advanced(leader_high_watermark, end_offset))
            case BeginAt(log_start_offset=start) if isinstance(self.state, Following):
                self.state.role.high_watermark = max(self.state.role.high_watermark, start)
                self.high_watermark = max(self.high_watermark, start)
            case _:
                pass

    def failed(self, error: NatslogError) -> None:
        """The step under way could not be carried out. What may succeed later is tried again; what is damage is
        treated as such.
        """
        step, self._step = self._step, None
        self._not_before_ms = self._now_ms + _RETRY_MS
        match step:
            case Open():
                self.state = Closed(error)
                is_of_disk = isinstance(error, StorageFailed) and self.others_hold_it
                if is_of_disk or isinstance(error, CorruptLog | DataDirError):
                    self.damaged(error)
                    self._not_before_ms = self._now_ms  # nothing is gained by waiting
            case BeginEpoch():
                self._problem = error
                if not error.retriable:
                    self.damaged(error)  # a replica with a disk that works is to lead
            case Copy() | CutTo() | BeginAt():
                if isinstance(error, CorruptLog | StorageFailed):
                    self.damaged(error)
            case _:
                self._problem = self._problem or error

    def take_notices(self) -> list[Notice]:
        """Those since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def next_step(self) -> Step | None:
        """What is to be done now, if anything; it is under way from here on, until `done`, `opened` or `failed`."""
        if self._step is not None:
            return None
        if self._has_stale_writer:
            self._step = StopWriting(abandon=True)
        else:
            self._step = self._chosen_step()
        return self._step

    # ---- what follows ----

    @property
    def _ends(self) -> bool:
        return self._is_stopping or self.record is None or self.me not in self.record.replicas

    @property
    def _is_replicated(self) -> bool:
        return self.record is not None and len(self.record.replicas) > 1

    @property
    def _is_held(self) -> bool:
        """Whether the metadata knows that the log exists on this disk, as far as the level provides for it."""
        return self._surroundings.level < 2 or (self.record is not None and self.me in self.record.holders)

    def _fits(self) -> bool:
        """Whether the present role is the one that the record asks for."""
        record, state = self.record, self.state
        if record is None or self._ends or self._is_halted or (self.damage is not None and self.others_hold_it):
            return False
        if isinstance(state, Leading):
            return (record.leader, record.leader_epoch) == (self.me, state.role.epoch) and state.is_writing
        if isinstance(state, Following) and not self._is_leaving:
            return (record.leader, record.leader_epoch) == (state.role.record.leader, state.role.epoch)
        return False

    def _chosen_step(self) -> Step | None:
        state = self.state
        if isinstance(state, Leading):
            step = self._step_of_leader(state) if self._fits() else self._step_out_of_lead(state)
            if step is not None or isinstance(self.state, Leading):
                return step
        elif isinstance(state, Following):
            if self._fits():
                return None
            self._notices.append(Unfollow())
            self.state = Idle()
        if isinstance(self.state, Closed):
            return self._step_of_closed(self.state)
        return self._step_of_idle()

    def _step_of_leader(self, state: Leading) -> Step | None:
        subjects = self._wanted_subjects(state)
        if subjects != state.subscribed_to:
            return Subscribe(subjects) if subjects else Unsubscribe()
        if not state.is_ready:
            state.is_ready = True  # without a session; it subscribes when it has one
        if self._transfer is not None and not self._transfer.is_drained:
            return Drain()
        return None

    def _wanted_subjects(self, state: Leading) -> tuple[str, ...]:
        """What a leader subscribes to."""
        record = state.role.record
        takes_messages = self._surroundings.has_session and self._transfer is None and not record.sealed
        return record.settings.subjects if takes_messages else ()

    def _step_out_of_lead(self, state: Leading) -> Step | None:
        self._transfer = None
        if state.subscribed_to:
            return Unsubscribe()
        if state.is_writing:
            return StopWriting(abandon=not self._is_stopping)
        self.state = Idle()
        return None

    def _step_of_closed(self, state: Closed) -> Step | None:
        record = self.record
        if self._ends or record is None or not self._surroundings.is_registered:
            return None
        if state.problem is not None and self._now_ms < self._not_before_ms:
            return None
        if isinstance(self.damage, StorageFailed) and not self.others_hold_it:
            self.damage = None  # no other replica holds it: opening is tried again
        if self.damage is not None:
            return SetAside() if self._may_repair(record) else None
        if state.problem is not None and isinstance(state.problem, CorruptLog):
            return None  # one replica: an operator has to restore it
        return Open(
            must_exist=self._surroundings.level >= 2 and self.me in record.holders and self.me in record.candidates
        )

    def _step_of_idle(self) -> Step | None:
        record = self.record
        if self._ends or record is None:
            return Close()
        if not self._surroundings.is_registered or self._is_halted:
            return None
        if self.damage is not None:
            if self._now_ms < self._not_before_ms or not self._may_repair(record):
                return None
            return Close() if isinstance(self.damage, StorageFailed) else Repair()
        if record.leader is None or not self._is_held:
            return None
        if record.leader == self.me:
            is_waiting = self._problem is not None and (
                self._now_ms < self._not_before_ms or not self._surroundings.has_room
            )
            return None if is_waiting or self._waits_for_clocks(record) else BeginEpoch(record.leader_epoch)
        if self._is_leaving:
            return None
        self.state = Following(FollowerReplica(self.me, record, self.high_watermark, self._now_ms, self._timeouts))
        self._problem = None
        self._notices.append(Follow(record.leader))
        return None

    def _waits_for_clocks(self, record: StreamRecord) -> bool:
        """Whether the epoch is to begin a moment later. Messages stamped before a majority's clocks are known could get
        times that are far behind; stream time would then leap, and message ids of a moment ago would have expired.
        """
        if self._surroundings.has_time:
            self._without_time = None
            return False
        if self._without_time is None or self._without_time[0] != record.leader_epoch:
            self._without_time = record.leader_epoch, self._now_ms
        return self._now_ms - self._without_time[1] < _CLOCKS_WITHIN_MS

    def _may_repair(self, record: StreamRecord) -> bool:
        """Whether another replica leads, holds everything, and this one does not count."""
        is_counted = self.me in record.candidates
        return len(record.replicas) > 1 and not is_counted and record.leader not in (None, self.me)

    def _begin_to_lead(self, epoch: Epoch) -> None:
        record, log = self.record, self.log
        assert log is not None, "an epoch begins on an open log"
        self._problem = None
        if record is None or (record.leader, record.leader_epoch) != (self.me, epoch):
            self._has_stale_writer = True  # the record has moved on while the epoch began
            return
        role = LeaderReplica(
            self.me,
            record,
            log_end_offset=log.whole_end_offset,
            high_watermark=self.high_watermark,
            now_ms=self._now_ms,
            timeouts=self._timeouts,
        )
        self.state = Leading(role)
        self._reached(role.high_watermark)

    def _halt(self, why: str) -> None:
        record = self.record
        assert record is not None, "a follower has a record"
        self._is_halted = True
        self._problem = CorruptLog(
            f"stream {record.name!r}: {why}. Nothing was changed here: compare both brokers' logs with natslog "
            "verify, keep a copy, and move the wrong replica to another broker",
            stream=record.name,
        )
        self._notices.append(Halted(self._problem.message))

    def _reached(self, high_watermark: int) -> None:
        self.high_watermark = max(self.high_watermark, high_watermark)

    def _end_step(self, kind: type[Step]) -> None:
        assert isinstance(self._step, kind), f"{kind.__name__} was not under way, but {self._step}"
        self._step = None

    # ---- proposals ----

    def _propose_isr(self, role: LeaderReplica) -> None:
        if (change := role.isr_change(self._now_ms, self._contact_ms)) is not None:
            self._notices.append(ProposeIsr(change))

    def _propose_transfer(self) -> None:
        transfer, leading = self._transfer, self.leading
        if transfer is None or leading is None or not transfer.is_drained or not self._fits():
            return
        if not leading.is_caught_up(transfer.to) or leading.high_watermark < leading.log_end_offset:
            return
        self._propose_leader(leading.record, transfer.to)

    def _propose_leader(self, record: StreamRecord, leader: BrokerId) -> None:
        if self._may_propose("transfer", record.version):
            appointment = Appointment(stream_id=record.id, version=record.version, leader=leader, isr=record.isr)
            self._notices.append(Propose(AppointLeaders(appointments=(appointment,))))

    def _propose_for_itself(self) -> None:
        """That the log exists here; that it is damaged."""
        record, around = self.record, self._surroundings
        if record is None or self._ends or not around.is_registered:
            return
        me, incarnation, ids = self.me, around.incarnation, (self.stream_id,)
        if self.damage is not None:
            is_counted = self.me in record.candidates and self.following is None
            if is_counted and self.others_hold_it and self._may_propose("disable", record.version):
                self._notices.append(Propose(DisableReplicas(broker=me, incarnation=incarnation, stream_ids=ids)))
        elif self.log is not None and not self._is_held and self._may_propose("hold", record.version):
            self._notices.append(Propose(HoldReplicas(broker=me, incarnation=incarnation, stream_ids=ids)))

    def _may_propose(self, kind: str, version: int) -> bool:
        return self._surroundings.has_session and self._attempts.may(kind, version, self._now_ms)


def _is_proven(record: StreamRecord, broker: BrokerId) -> bool:
    """Whether it is in sync in its present life: positions from a life that ended uncleanly do not count."""
    return broker in record.isr and broker not in record.unproven
