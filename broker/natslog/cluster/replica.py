"""One replica of one stream on one broker: a pure state machine that decides what the broker does with it.

Theory of operation. The machine compares what the metadata wants (`changed`) with the state it is in, and names one
`Step` at a time (`next_step`); the executor carries the step out on real files and sockets, or in the simulation on
virtual ones, and reports `done` or `failed`. What needs no waiting is a `Notice` (`take_notices`). What happened
meanwhile is told by the other inputs: `appended`, `fetched`, `answered`, `damaged`, `tick`, `transfer`, `stop`.

    Closed(problem) ──opened──▶ Idle ──▶ Following(role)     A role begins from Idle only, and ends in Idle: so no two
        ▲                        │ ▲ ──▶ Leading(role)       roles ever overlap, whatever the metadata says meanwhile.
        └────────────────────────┘ └────────┘

A stream has a log of messages, and perhaps a companion log, which is opened before a role begins, or, where it was just
created, while the role goes on. Both are of one replica: inputs and steps name the log where it matters
(`is_companion`), and damage in either one is damage of the replica.

Invariants.
- One step at a time; a role is that of the newest record, or is on its way out.
- A role begins only in an incarnation that the metadata has registered, on a log that the metadata knows to exist
  (`holders`), and never on a damaged one.
- A replica with damage is taken out of the candidates first, then repaired. Where it is the only candidate nothing is
  proposed and nothing is repaired: no other could lead, and an operator decides.
- Only a leader with a metadata session states positions (`is_leading`); everyone else serves what is below its own
  high watermark (HW) at most (`may_serve`).
- HW never goes back, in either log.
- The companion log is copied or appended to only when the metadata states that it exists here (`companion_holders`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from natslog.cluster.attempts import Attempts
from natslog.cluster.commands import (
    AppointLeaders,
    Appointment,
    CreateCompanion,
    DisableReplicas,
    HoldCompanions,
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
    OpenCompanion,
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
    Verdict,
    judge,
)
from natslog.cluster.tracks import Timeouts
from natslog.errors import CorruptLog, DataDirError, NatslogError, NotEnoughReplicas, StorageFailed
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord
from natslog.subjects import is_internal

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
        companion_high_watermark: the same of the companion log. companion_delivered: how far the owner of the stream
            was given its records.
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
        self.companion: Log | None = None
        self.high_watermark = self.companion_high_watermark = self.companion_delivered = 0
        self._problem: NatslogError | None = None
        self._surroundings = surroundings
        self._timeouts = timeouts
        self._now_ms = now_ms
        self._step: Step | None = None
        self._is_copy_of_companion = False  # the step, where it copies or truncates
        self._damaged_messages = self._damaged_companion = False
        self._serves_from = 0  # of the companion log: what must be delivered before a follower serves
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
        if not isinstance(state, Leading) or not state.is_ready or not state.role.is_exposed:
            return False
        companion = state.role.companion
        return companion is None or self.companion_delivered >= companion.epoch_start

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
            and (self.companion is None or self._has_delivered)
        )

    @property
    def _has_delivered(self) -> bool:
        """Whether the owner has what was committed in the companion log when it was opened here, and when this replica
        joined the ISR: files may lack messages that only these records name.
        """
        assert self.companion is not None, "there is one"
        return self.companion_delivered >= min(self._serves_from, self.companion.log_end_offset)

    @property
    def is_companion_held(self) -> bool:
        """Whether the companion log is open, and the metadata states that it exists on this disk."""
        record = self.record
        return self.companion is not None and record is not None and self.me in record.companion_holders

    @property
    def _is_companion_unreported(self) -> bool:
        """Whether the metadata is to state that the companion log exists here."""
        return self.companion is not None and not self.is_companion_held

    @property
    def _lacks_companion(self) -> bool:
        return self.companion is None and self.record is not None and self.record.has_companion

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
        """Why nothing may be appended now."""
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
        if record.leader == self.me or self.me not in record.unproven or self._lacks_companion:
            return None
        return record.version, *_last_of(log)

    def unproven_companion_position(self) -> tuple[int, Epoch, int] | None:
        """The same of the companion log, where there is one."""
        position = self.unproven_position()
        return None if position is None or self.companion is None else (position[0], *_last_of(self.companion))

    # ---- inputs: the metadata, time, the operator ----

    def changed(self, record: StreamRecord | None) -> None:
        """The metadata has this record now; None: the stream was deleted, or the replica was moved away."""
        former, self.record = self.record, record
        if self.companion is not None and former is not None and self.me not in former.isr:
            self._serves_from = self.companion.log_end_offset  # where it joins now, this is all that is committed
        if not self._fits() or record is None:
            return
        state = self.state
        if isinstance(state, Leading):
            state.role.update(record, self._now_ms)
            self._reached_by(state.role)
            if self._transfer is not None and not _is_proven(record, self._transfer.to):
                self._transfer = None
        elif isinstance(state, Following):
            state.role.record = record
            if state.companion is not None:
                state.companion.record = record
            if record.leader is not None and (self.me not in record.isr or _begins_to_hold(self.me, former, record)):
                self._notices.append(Follow(record.leader))  # asks once more, knowing that it is out of the ISR

    @property
    def is_quiet(self) -> bool:
        """Whether the next tick will find nothing to do, unless there is an input before it, or `Calm` ends."""
        state = self.state
        if self._step is not None or self._notices or self._transfer is not None or self._has_stale_writer:
            return False
        if self.damage is not None or not self._is_held or not self._fits():
            return False
        if self._lacks_companion or self._is_companion_unreported:
            return False
        if isinstance(state, Leading):
            return state.is_ready and self._step_to_subjects(state) is None and state.role.is_quiet
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
            self.leading.wait_for_nobody()
            self._reached_by(self.leading)
        return self._transfer.to == to

    def leave(self) -> bool:
        """The broker is about to stop: a follower fetches no more. Returns whether it is to leave the ISR, so that the
        leader does not wait for it; also where it has handed its leadership over and does not follow yet.
        """
        record = self.record
        if record is None or record.leader in (None, self.me):
            return False
        self._is_leaving = True  # fetching on, it would be proposed for the ISR again
        is_needed = self.me in record.isr and len(record.isr) <= record.settings.min_isr
        return self.me in record.isr and not is_needed

    def successor(self, stopping: Collection[BrokerId]) -> BrokerId | None:
        """An in-sync replica that this leader may hand its leadership to before the broker stops.

        Args:
            stopping: brokers that stop, too.
        """
        leading = self.leading
        if leading is None:
            return None
        excluded = {self.me, *stopping, *leading.record.unproven}
        return next((one for one in leading.record.isr if one not in excluded), None)

    def stop(self) -> None:
        """The broker stops: the role ends, what was received is appended and acknowledged, the log is closed."""
        self._is_stopping = True

    # ---- inputs: the log ----

    def appended(self, end_offset: int, run_start: int | None = None) -> None:
        """The leader's log ends here now, on stable storage; from `run_start` on it is one run, where given."""
        if isinstance(self.state, Leading):
            self.state.role.appended(end_offset, run_start, now_ms=self._now_ms)
            self._reached_by(self.state.role)
            self._propose_transfer()

    def companion_appended(self, end_offset: int) -> None:
        """The companion log of the leader ends here now, on stable storage."""
        leading = self.leading
        if leading is not None and leading.companion is not None:
            leading.appended(end_offset, now_ms=self._now_ms, track=leading.companion)
            self._reached_by(leading)
            self._propose_transfer()

    def delivered(self, offset: int) -> None:
        """The owner of the stream was given all records of the companion log below this offset."""
        self.companion_delivered = max(self.companion_delivered, offset)

    def damaged(self, error: NatslogError, *, is_companion: bool = False) -> None:
        """Something on disk is not what was written, or can no longer be written. Where there is no other replica, the
        log itself refuses writes, and reads go on around the damage.
        """
        if not self._is_replicated:
            return
        if is_companion:
            self._damaged_companion = True
        else:
            self._damaged_messages = True
        if self.damage is None:
            self.damage = error
            self._notices.append(Damaged(error))

    # ---- inputs: replication ----

    def create_companion(self) -> None:
        """The stream needs a companion log. Only of a leader; to be repeated until the record states that there is
        one.
        """
        leading = self.leading
        if leading is None or leading.record.has_companion or not self._fits():
            return
        if self._may_propose("create companion", leading.record.version):
            command = CreateCompanion(stream_id=self.stream_id, broker=self.me, epoch=leading.epoch)
            self._notices.append(Propose(command))

    def fetched(
        self,
        follower: BrokerId,
        position: FetchPosition,
        incarnation: str,
        now_ms: float,
        *,
        is_companion: bool = False,
    ) -> Verdict:
        """A follower asks from here on: everything below is on its stable storage, if its log matches."""
        self._now_ms = now_ms
        verdict = self.judged(position, is_companion=is_companion)
        if isinstance(verdict, Matching) and isinstance(self.state, Leading):
            role = self.state.role
            track = role.companion if is_companion else role.messages
            role.fetched(follower, position.offset, incarnation, now_ms, position.version, track)
            self._reached_by(role)
            if role.is_to_join(follower):  # at once: the next moment it may be behind again
                self._propose_isr(role)
            self._propose_transfer()
        return verdict

    def judged(self, position: FetchPosition, *, is_companion: bool = False) -> Verdict:
        """What a follower at this position is told."""
        state, log = self.state, self.companion if is_companion else self.log
        if not isinstance(state, Leading) or log is None or (is_companion and state.role.companion is None):
            return Fenced(Epoch(0))
        return judge(
            position,
            epoch=state.role.epoch,
            epochs=log.epochs,
            log_start_offset=log.log_start_offset,
            log_end_offset=log.written_end_offset,
        )

    def position(self, *, is_companion: bool = False) -> FetchPosition | None:
        """Where a follower asks from; None where it does not fetch now."""
        role, log = self._copied(is_companion)
        if role is None or log is None or self.is_busy or (is_companion and not self.is_companion_held):
            return None
        return role.position(log.epochs, log.log_end_offset)

    def _copied(self, is_companion: bool) -> tuple[FollowerReplica | None, Log | None]:
        """The follower's side of a log, and the log."""
        state = self.state
        if not isinstance(state, Following):
            return None, None
        return (state.companion, self.companion) if is_companion else (state.role, self.log)

    def answered(
        self,
        epoch: Epoch,
        verdict: Verdict,
        *,
        high_watermark: int,
        has_records: bool,
        now_ms: float,
        is_companion: bool = False,
    ) -> Copy | CutTo | BeginAt | None:
        """The leader's answer to the question asked last, with its HW. Returns the step to be taken now, if any; it is
        followed by `done` or `failed`.
        """
        self._now_ms = now_ms
        role, log = self._copied(is_companion)
        if role is None or log is None or self._step is not None or not self._fits():
            return None
        self._is_copy_of_companion = is_companion
        answer = role.answered(epoch, verdict, now_ms, epochs=log.epochs, log_end_offset=log.log_end_offset)
        match answer:
            case Append() if has_records:
                self._step = Copy(high_watermark)
            case Append():
                self._reached_in_copy(role.advanced(high_watermark, log.whole_end_offset))
            case CutTo() | BeginAt():
                self._step = answer
            case Halt(why=why):
                self._halt(why)
            case Ignore():
                pass
        step = self._step
        assert step is None or isinstance(step, Copy | CutTo | BeginAt), "no other step is under way"
        return step

    def lacks_ids(self, epoch: Epoch, serial: int) -> bool:
        """Whether the message ids that the leader keeps of removed rows must be taken over before its answer may be
        processed: this replica is not in sync, or may have lost the end of its log with its last life, so it may never
        have had these rows. It may join the ISR with the next request, and every member of it must recognise a
        repeated message.

        Args:
            serial: as the answer states; 0: the leader keeps none.
        """
        state, record = self.state, self.record
        if not serial or not isinstance(state, Following) or state.role.epoch != epoch or record is None:
            return False
        has_had_rows = self._surroundings.is_registered and _is_proven(record, self.me)
        return not has_had_rows and state.adopted_ids != serial

    def adopted_ids(self, epoch: Epoch, serial: int) -> None:
        """They are on stable storage here."""
        if isinstance(self.state, Following) and self.state.role.epoch == epoch:
            self.state.adopted_ids = serial

    # ---- inputs: steps ----

    def opened(self, log: Log) -> None:
        """The step `Open` succeeded."""
        self._end_step(Open)
        self.log, self.state = log, Idle()
        self.high_watermark = log.high_watermark
        self._propose_for_itself()

    def companion_opened(self, log: Log, delivered: int) -> None:
        """The step `OpenCompanion` succeeded; the owner was given all records below `delivered`."""
        self._end_step(OpenCompanion)
        self.companion, self._problem = log, None
        self.companion_high_watermark, self.companion_delivered = log.high_watermark, delivered
        self._serves_from = log.log_end_offset  # where it is in the ISR, this is all that is committed
        state = self.state
        if isinstance(state, Leading):
            state.role.begin_companion(log.log_end_offset, log.high_watermark, self._now_ms)
            self._reached_by(state.role)
        elif isinstance(state, Following):
            state.companion = self._follower_of_companion(state.role.record)
            if self.is_companion_held and state.role.record.leader is not None:
                self._notices.append(Follow(state.role.record.leader))
        self._propose_for_itself()

    def _follower_of_companion(self, record: StreamRecord) -> FollowerReplica | None:
        if self.companion is None:
            return None
        return FollowerReplica(self.me, record, self.companion_high_watermark, self._now_ms, self._timeouts)

    def done(self) -> None:
        """The step under way succeeded."""
        step, self._step = self._step, None
        match step:
            case BeginEpoch():
                self._begin_to_lead(step.epoch)
            case Subscribe(subjects=subjects, group=group) if isinstance(self.state, Leading):
                self.state.subscribed_to, self.state.group, self.state.is_ready = subjects, group, True
            case Unsubscribe() if isinstance(self.state, Leading):
                self.state.subscribed_to = ()
            case Drain() if self._transfer is not None:
                self._transfer.is_drained = True
                self._propose_transfer()
            case StopWriting():
                self._has_stale_writer = False
                if isinstance(self.state, Leading):
                    self.state.is_writing = False
            case Repair(companion=is_companion_set_aside):
                self._end_damage()
                self.high_watermark = self.log.high_watermark if self.log is not None else 0
                if is_companion_set_aside:
                    self._forget_companion()
            case SetAside():
                self._end_damage()
                self.state = Closed()
            case Close():
                self.log, self.state = None, Closed()
                self._forget_companion()
                if isinstance(self.damage, StorageFailed):
                    self._end_damage()  # what is on disk now is what it has; opening it tells
            case Copy(leader_high_watermark=leader_high_watermark):
                role, log = self._copied(self._is_copy_of_companion)
                if role is not None and log is not None:
                    self._reached_in_copy(role.advanced(leader_high_watermark, log.whole_end_offset))
            case BeginAt(log_start_offset=start):
                role, _ = self._copied(self._is_copy_of_companion)
                if role is not None:
                    role.high_watermark = max(role.high_watermark, start)
                    self._reached_in_copy(start)
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
                if self._is_damage(error):
                    self.damaged(error)
                    self._not_before_ms = self._now_ms  # nothing is gained by waiting
            case OpenCompanion():
                self._problem = error
                if self._is_damage(error):
                    self.damaged(error, is_companion=True)
            case BeginEpoch():
                self._problem = error
                if not error.retriable:
                    self.damaged(error)  # a replica with a disk that works is to lead
            case Copy() | CutTo() | BeginAt():
                if isinstance(error, CorruptLog | StorageFailed):
                    self.damaged(error, is_companion=self._is_copy_of_companion)
            case _:
                self._problem = self._problem or error

    def _is_damage(self, error: NatslogError) -> bool:
        """Of a log that could not be opened. Where no other replica holds it, a disk that fails is tried again."""
        is_of_disk = isinstance(error, StorageFailed) and self.others_hold_it
        return is_of_disk or isinstance(error, CorruptLog | DataDirError)

    def _end_damage(self) -> None:
        self.damage = self._problem = None
        self._damaged_messages = self._damaged_companion = False

    def _forget_companion(self) -> None:
        """It is closed."""
        self.companion = None
        self.companion_high_watermark = self.companion_delivered = self._serves_from = 0

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
        """Whether the metadata states that the log exists on this disk."""
        return self.record is not None and self.me in self.record.holders

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
                return self._step_to_companion(None)
            self._notices.append(Unfollow())
            self.state = Idle()
        if isinstance(self.state, Closed):
            return self._step_of_closed(self.state)
        return self._step_of_idle()

    def _step_to_companion(self, epoch: Epoch | None) -> OpenCompanion | None:
        """Where the stream has a companion log that is not open here; a failed attempt is repeated later."""
        record = self.record
        is_waiting = self._problem is not None and self._now_ms < self._not_before_ms
        if record is None or not self._lacks_companion or is_waiting:
            return None
        return OpenCompanion(self.me in record.companion_holders and self.me in record.candidates, epoch)

    def _step_of_leader(self, state: Leading) -> Step | None:
        if (opening := self._step_to_companion(state.role.epoch)) is not None:
            return opening
        if (subscribing := self._step_to_subjects(state)) is not None:
            return subscribing
        if not state.is_ready:
            state.is_ready = True  # without a session; it subscribes when it has one
        if self._transfer is not None and not self._transfer.is_drained:
            return Drain()
        return None

    def _step_to_subjects(self, state: Leading) -> Subscribe | Unsubscribe | None:
        """To those that a leader subscribes to, in its group: a subscription of another group ends first."""
        subjects, group = self._wanted_subjects(state), state.role.record.settings.group
        is_of_other_group = bool(state.subscribed_to) and group != state.group
        if subjects == state.subscribed_to and not is_of_other_group:
            return None
        return Subscribe(subjects, group) if subjects and not is_of_other_group else Unsubscribe()

    def _wanted_subjects(self, state: Leading) -> tuple[str, ...]:
        """What a leader subscribes to. Clients of JetStream are told that a stream is sealed."""
        record = state.role.record
        if is_internal(record.name):
            return ()
        is_closed = (record.sealed and record.settings.acks != "any") or record.import_state != ""
        takes_messages = self._surroundings.has_session and self._transfer is None and not is_closed
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
            self._end_damage()  # no other replica holds it: opening is tried again
        if self.damage is not None:
            return SetAside() if self._may_repair(record) else None
        if state.problem is not None and isinstance(state.problem, CorruptLog):
            return None  # one replica: an operator has to restore it
        return Open(must_exist=self.me in record.holders and self.me in record.candidates)

    def _step_of_idle(self) -> Step | None:
        record = self.record
        if self._ends or record is None:
            return Close()
        if not self._surroundings.is_registered or self._is_halted:
            return None
        if self.damage is not None:
            if self._now_ms < self._not_before_ms or not self._may_repair(record):
                return None
            is_unopened = self._damaged_companion and self.companion is None
            if isinstance(self.damage, StorageFailed) and not is_unopened:
                return Close()
            return Repair(messages=self._damaged_messages, companion=self._damaged_companion)
        if self._lacks_companion:  # one that cannot be read is restored by an operator, where it is the only one
            return None if isinstance(self._problem, CorruptLog) else self._step_to_companion(None)
        if record.leader is None or not self._is_held:
            return None
        if record.leader == self.me:
            is_waiting = self._problem is not None and (
                self._now_ms < self._not_before_ms or not self._surroundings.has_room
            )
            return None if is_waiting or self._waits_for_clocks(record) else BeginEpoch(record.leader_epoch)
        if self._is_leaving:
            return None
        role = FollowerReplica(self.me, record, self.high_watermark, self._now_ms, self._timeouts)
        self.state = Following(role, self._follower_of_companion(record))
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
        if self.companion is not None:
            role.begin_companion(self.companion.log_end_offset, self.companion_high_watermark, self._now_ms)
        self.state = Leading(role)
        self._reached_by(role)

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

    def _reached_by(self, role: LeaderReplica) -> None:
        self.high_watermark = max(self.high_watermark, role.high_watermark)
        if role.companion is not None:
            self.companion_high_watermark = max(self.companion_high_watermark, role.companion.high_watermark)

    def _reached_in_copy(self, high_watermark: int) -> None:
        """In the log that was answered for last."""
        if self._is_copy_of_companion:
            self.companion_high_watermark = max(self.companion_high_watermark, high_watermark)
        else:
            self.high_watermark = max(self.high_watermark, high_watermark)

    def _end_step(self, kind: type[Step]) -> None:
        assert isinstance(self._step, kind), f"{kind.__name__} was not under way, but {self._step}"
        self._step = None

    # ---- proposals ----

    def _propose_isr(self, role: LeaderReplica) -> None:
        change = role.isr_change(self._now_ms, self._contact_ms, may_wait=self._transfer is None)
        self._reached_by(role)
        if change is not None:
            self._notices.append(ProposeIsr(change))

    def _propose_transfer(self) -> None:
        transfer, leading = self._transfer, self.leading
        if transfer is None or leading is None or not transfer.is_drained or not self._fits():
            return
        if not leading.is_caught_up(transfer.to) or not leading.is_committed:
            return
        self._propose_leader(leading.record, transfer.to)

    def _propose_leader(self, record: StreamRecord, leader: BrokerId) -> None:
        if self._may_propose("transfer", record.version):
            appointment = Appointment(stream_id=record.id, version=record.version, leader=leader, isr=record.isr)
            self._notices.append(Propose(AppointLeaders(appointments=(appointment,))))

    def _propose_for_itself(self) -> None:
        """That the logs exist here; that one is damaged."""
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
        elif self._is_companion_unreported and self._may_propose("hold companion", record.version):
            self._notices.append(Propose(HoldCompanions(broker=me, incarnation=incarnation, stream_ids=ids)))

    def _may_propose(self, kind: str, version: int) -> bool:
        return self._surroundings.has_session and self._attempts.may(kind, version, self._now_ms)


def _is_proven(record: StreamRecord, broker: BrokerId) -> bool:
    """Whether it is in sync in its present life: positions from a life that ended uncleanly do not count."""
    return broker in record.isr and broker not in record.unproven


def _last_of(log: Log) -> tuple[Epoch, int]:
    """The epoch of its last record, and where it ends."""
    return log.epochs.last_epoch_before(log.log_end_offset), log.log_end_offset


def _begins_to_hold(broker: BrokerId, former: StreamRecord | None, record: StreamRecord) -> bool:
    """Whether the metadata states now for the first time that its companion log exists."""
    was = former.companion_holders if former is not None else ()
    return broker in record.companion_holders and broker not in was
