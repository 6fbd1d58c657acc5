"""One replica of one stream on one broker: a pure state machine that decides what the broker does with it.

Theory of operation. The machine compares what the metadata wants (`changed`) with the state it is in, and names one
`Step` at a time (`next_step`); the executor carries the step out on real files and sockets, or in the simulation on
virtual ones, and reports `done` or `failed`. What needs no waiting is a `Notice` (`take_notices`). What happened
meanwhile is told by the other inputs: `appended`, `fetched`, `answered`, `damaged`, `tick`, `transfer`, `stop`.

    Closed(problem) ──opened──▶ Idle ──▶ Following(role)     A role begins from Idle only, and ends in Idle: so no two
        ▲                        │ ▲ ──▶ Leading(role)       roles ever overlap, whatever the metadata says meanwhile.
        └────────────────────────┘ └────────┘

What it does in a role is in `leading` and `following`; what these share, in `replica_context`.

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
from typing import TypeAlias

from natslog.cluster.following import Following
from natslog.cluster.leading import Leading, is_proven, propose_leader
from natslog.cluster.replica_context import ReplicaContext
from natslog.cluster.replica_steps import (
    BeginEpoch,
    Close,
    Closed,
    Copy,
    Damaged,
    Drain,
    Follow,
    Halted,
    Idle,
    Log,
    Notice,
    Open,
    OpenCompanion,
    Repair,
    SetAside,
    Step,
    StopWriting,
    Surroundings,
    Unfollow,
)
from natslog.cluster.roles import (
    BeginAt,
    CutTo,
    Fenced,
    FetchPosition,
    FollowerReplica,
    Halt,
    LeaderReplica,
    Verdict,
)
from natslog.cluster.tracks import Timeouts
from natslog.errors import CorruptLog, DataDirError, NatslogError, StorageFailed
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, companion_id

_RETRY_MS = 1000.0
_CLOCKS_WITHIN_MS = 2000.0

State: TypeAlias = Closed | Idle | Following | Leading


class Replica:
    """See the module. All inputs return at once and touch nothing but this object. Longer than 40 methods, because each
    input and each state that others read is one; what a role decides is in `Leading` and `Following`.

    Args:
        me: this broker. `record`: the stream, as the metadata has it.
        now_ms: of a clock that never jumps; each input that depends on time is given it.

    Attributes:
        context: what the roles share. logs: how far they are committed, and what was found damaged in them.
    """

    def __init__(
        self,
        me: BrokerId,
        record: StreamRecord,
        surroundings: Surroundings,
        now_ms: float,
        timeouts: Timeouts = Timeouts(),
    ) -> None:
        self.state: State = Closed()
        self.context = ReplicaContext(me, record, surroundings, now_ms, timeouts)
        self.logs = self.context.logs
        self._step: Step | None = None
        self._has_stale_writer = False
        self._without_time: tuple[Epoch, float] | None = None  # the epoch that waits for the others' clocks, since when
        self._is_leaving = False

    # ---- what others may ask ----

    @property
    def record(self) -> StreamRecord | None:
        """The newest that is known here; None once the stream was deleted or moved away."""
        return self.context.record

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
        return self.context.problem or closed or self.logs.damage

    @property
    def is_leading(self) -> bool:
        """Whether it leads, takes messages, knows what is committed, and may say so: it has a metadata session."""
        return self.is_exposed and self.context.surroundings.has_session and self._fits

    @property
    def is_ready(self) -> bool:
        """Whether it leads, as far as it knows, and takes messages, or would if it had a session."""
        return isinstance(self.state, Leading) and self.state.is_ready

    @property
    def is_exposed(self) -> bool:
        """Whether it leads, as far as it knows, and its HW is known well enough to be shown."""
        return isinstance(self.state, Leading) and self.state.is_exposed

    @property
    def may_serve(self) -> bool:
        """Whether ranges that end at or below the HW known here may be served from here."""
        context = self.context
        if self.is_exposed:
            return True
        return (
            isinstance(self.state, Following)
            and context.record is not None
            and context.me in context.record.isr
            and self.logs.damage is None
            and not context.is_halted
            and self.logs.has_delivered
        )

    @property
    def is_transferring(self) -> bool:
        """Whether it takes no messages, so that another replica may become leader; or until those that it had taken
        are appended, where that was given up meanwhile.
        """
        return isinstance(self._step, Drain) or (isinstance(self.state, Leading) and self.state.is_transferring)

    @property
    def is_reconciled(self) -> bool:
        """Whether the replica is what the record says, as far as it can be."""
        return self._step is None and (self._fits or isinstance(self.state, Idle | Closed))

    @property
    def is_finished(self) -> bool:
        """Whether it is closed for good."""
        return self.context.ends and isinstance(self.state, Closed) and self._step is None

    @property
    def is_quiet(self) -> bool:
        """Whether the next tick will find nothing to do, unless there is an input before it, or `Calm` ends."""
        context = self.context
        if self._step is not None or context.notices or self._has_stale_writer or not self._fits:
            return False
        if self.logs.damage is not None or not context.is_held:
            return False
        if context.lacks_companion or context.is_companion_unreported:
            return False
        return self.state.is_quiet if isinstance(self.state, Leading) else True

    def is_followed_by_any(self, brokers: frozenset[BrokerId]) -> bool:
        """Whether it leads, and one of these is its follower."""
        leading = self.leading
        return leading is not None and not brokers.isdisjoint(leading.followers)

    def successor(self, stopping: Collection[BrokerId]) -> BrokerId | None:
        """An in-sync replica that this leader may hand its leadership to before the broker stops.

        Args:
            stopping: brokers that stop, too.
        """
        return self.state.successor(stopping) if isinstance(self.state, Leading) else None

    def unresponsive_leader(self, now_ms: float, leader_contact_ms: float, ended: Collection[BrokerId]) -> Epoch | None:
        """The epoch whose leader is to be reported: it is one of `ended`, or has not answered for too long."""
        following = self.following
        if following is None or not following.is_leader_unresponsive(now_ms, leader_contact_ms, ended):
            return None
        return following.epoch

    def unproven_positions(self) -> list[tuple[StreamId, int, Epoch, int]]:
        """(log, record version, last epoch, log end offset) of each log, where the metadata leader has to know it: the
        broker restarted uncleanly, and no leader has compared the log with its own since.
        """
        context, record, logs = self.context, self.record, self.logs
        if record is None or logs.messages is None or self._step is not None or logs.damage is not None:
            return []
        is_to_be_told = context.me in record.unproven and record.leader != context.me and self.leading is None
        if not is_to_be_told or context.lacks_companion:
            return []
        open_logs = [(record.id, logs.messages), (companion_id(record.id), logs.companion)]
        return [(log_id, record.version, *_last_of(log)) for log_id, log in open_logs if log is not None]

    # ---- inputs: the metadata, time, the operator ----

    def changed(self, record: StreamRecord | None) -> None:
        """The metadata has this record now; None: the stream was deleted, or the replica was moved away."""
        context, logs = self.context, self.logs
        former, context.record = context.record, record
        if logs.companion is not None and former is not None and context.me not in former.isr:
            logs.serves_from = logs.companion.log_end_offset  # where it joins now, this is all that is committed
        if record is None or not self._fits:
            return
        match self.state:
            case Leading() as leading:
                leading.changed(record)
            case Following() as following:
                following.changed(record, former)

    def pass_time(self, now_ms: float) -> None:
        """Instead of a tick, of a replica that is quiet."""
        self.context.now_ms = now_ms

    def tick(self, now_ms: float, contact_ms: Mapping[BrokerId, float]) -> None:
        """Time has passed. `contact_ms`: when each follower last asked this broker for anything."""
        self.context.now_ms = now_ms
        if isinstance(self.state, Leading) and self._fits:
            self.state.tick(contact_ms)
            self.state.propose_transfer()
        self.context.propose_own_state(is_following=isinstance(self.state, Following))

    def transfer(self, to: BrokerId, now_ms: float) -> bool:
        """Stops taking messages, lets `to` catch up, then proposes it as leader. Where that takes too long the replica
        goes on leading. Returns whether it was begun.
        """
        context, record = self.context, self.record
        context.now_ms = now_ms
        if record is None or record.leader != context.me or to == context.me or not is_proven(record, to):
            return False
        if isinstance(self.state, Leading):
            return self.state.transfer(to)
        propose_leader(context, record, to)  # its epoch could not begin, so nothing was appended in it
        return True

    def leave(self) -> bool:
        """The broker is about to stop: a follower fetches no more. Returns whether it is to leave the ISR, so that the
        leader does not wait for it; also where it has handed its leadership over and does not follow yet.
        """
        record, me = self.record, self.context.me
        if record is None or record.leader in (None, me):
            return False
        self._is_leaving = True  # fetching on, it would be proposed for the ISR again
        is_needed = me in record.isr and len(record.isr) <= record.settings.min_isr
        return me in record.isr and not is_needed

    def stop(self) -> None:
        """The broker stops: the role ends, what was received is appended and acknowledged, the log is closed."""
        self.context.is_stopping = True

    # ---- inputs: the logs ----

    def appended(self, end_offset: int, run_start: int | None = None, *, is_companion: bool = False) -> None:
        """The leader's log ends here now, on stable storage; from `run_start` on it is one run, where given."""
        if isinstance(self.state, Leading):
            self.state.appended(end_offset, run_start, is_companion=is_companion)

    def delivered(self, offset: int) -> None:
        """The owner of the stream was given all records of the companion log below this offset."""
        self.logs.companion_delivered = max(self.logs.companion_delivered, offset)

    def damaged(self, error: NatslogError, *, is_companion: bool = False) -> None:
        """Something on disk is not what was written, or can no longer be written. Where there is no other replica, the
        log itself refuses writes, and reads go on around the damage.
        """
        is_replicated = self.record is not None and len(self.record.replicas) > 1
        if is_replicated and self.logs.note_damage(error, is_companion=is_companion):
            self.context.notices.append(Damaged(error))

    # ---- inputs: replication ----

    def create_companion(self) -> None:
        """The stream needs a companion log. Only of a leader; to be repeated until the record states that there is
        one.
        """
        if isinstance(self.state, Leading) and self._fits:
            self.state.create_companion()

    def judged(self, position: FetchPosition, *, is_companion: bool = False) -> Verdict:
        """What a follower at this position is told."""
        if not isinstance(self.state, Leading):
            return Fenced(Epoch(0))
        return self.state.judged(position, is_companion=is_companion)

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
        self.context.now_ms = now_ms
        if not isinstance(self.state, Leading):
            return Fenced(Epoch(0))
        return self.state.fetched(follower, position, incarnation, is_companion=is_companion)

    def position(self, *, is_companion: bool = False) -> FetchPosition | None:
        """Where a follower asks from; None where it does not fetch now."""
        if not isinstance(self.state, Following) or self._step is not None:
            return None
        return self.state.position(is_companion=is_companion)

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
        self.context.now_ms = now_ms
        if not isinstance(self.state, Following) or self._step is not None or not self._fits:
            return None
        step = self.state.answered(
            epoch, verdict, high_watermark=high_watermark, has_records=has_records, is_companion=is_companion
        )
        if isinstance(step, Halt):
            self._halt(step.why)
            return None
        self._step = step
        return step

    def lacks_ids(self, epoch: Epoch, serial: int) -> bool:
        """Whether the message ids that the leader keeps of removed rows must be taken over before its answer may be
        processed: this replica is not in sync, or may have lost the end of its log with its last life, so it may never
        have had these rows. It may join the ISR with the next request, and every member of it must recognise a
        repeated message.

        Args:
            serial: as the answer states; 0: the leader keeps none.
        """
        return isinstance(self.state, Following) and self.state.lacks_ids(epoch, serial)

    def adopted_ids(self, epoch: Epoch, serial: int) -> None:
        """They are on stable storage here."""
        if isinstance(self.state, Following):
            self.state.adopted_ids(epoch, serial)

    # ---- inputs: steps ----

    def opened(self, log: Log) -> None:
        """The step `Open` succeeded."""
        self._end_step(Open)
        self.logs.messages, self.state = log, Idle()
        self.logs.high_watermark = log.high_watermark
        self.context.propose_own_state(is_following=False)

    def companion_opened(self, log: Log, delivered: int) -> None:
        """The step `OpenCompanion` succeeded; the owner was given all records below `delivered`."""
        self._end_step(OpenCompanion)
        self.context.problem = None
        self.logs.open_companion(log, delivered)
        match self.state:
            case Leading() as leading:
                leading.begin_companion()
            case Following() as following:
                following.companion_opened()
        self.context.propose_own_state(is_following=isinstance(self.state, Following))

    def done(self) -> None:
        """The step under way succeeded."""
        step, self._step = self._step, None
        logs = self.logs
        match step:
            case BeginEpoch():
                self._begin_to_lead(step.epoch)
            case StopWriting() if self._has_stale_writer:
                self._has_stale_writer = False
            case Repair(companion=is_companion_set_aside):
                self._end_damage()
                logs.high_watermark = logs.messages.high_watermark if logs.messages is not None else 0
                if is_companion_set_aside:
                    logs.close_companion()
            case SetAside():
                self._end_damage()
                self.state = Closed()
            case Close():
                logs.messages, self.state = None, Closed()
                logs.close_companion()
                if isinstance(logs.damage, StorageFailed):
                    self._end_damage()  # what is on disk now is what it has; opening it tells
            case Copy() | CutTo() | BeginAt() if isinstance(self.state, Following):
                self.state.done(step)
            case _ if step is not None and isinstance(self.state, Leading):
                self.state.done(step)
            case _:
                pass

    def failed(self, error: NatslogError) -> None:
        """The step under way could not be carried out. What may succeed later is tried again; what is damage is
        treated as such.
        """
        context = self.context
        step, self._step = self._step, None
        context.not_before_ms = context.now_ms + _RETRY_MS
        match step:
            case Open():
                self.state = Closed(error)
                if self._is_damage(error):
                    self.damaged(error)
                    context.not_before_ms = context.now_ms  # nothing is gained by waiting
            case OpenCompanion():
                context.problem = error
                if self._is_damage(error):
                    self.damaged(error, is_companion=True)
            case BeginEpoch():
                context.problem = error
                if not error.retriable:
                    self.damaged(error)  # a replica with a disk that works is to lead
            case Copy() | CutTo() | BeginAt():
                if isinstance(error, CorruptLog | StorageFailed):
                    is_companion = isinstance(self.state, Following) and self.state.is_copy_of_companion
                    self.damaged(error, is_companion=is_companion)
            case _:
                context.problem = context.problem or error

    def _is_damage(self, error: NatslogError) -> bool:
        """Of a log that could not be opened. Where no other replica holds it, a disk that fails is tried again."""
        is_of_disk = isinstance(error, StorageFailed) and self.context.others_hold_it
        return is_of_disk or isinstance(error, CorruptLog | DataDirError)

    def _end_damage(self) -> None:
        self.context.problem = None
        self.logs.end_damage()

    def _end_step(self, kind: type[Step]) -> None:
        assert isinstance(self._step, kind), f"{kind.__name__} was not under way, but {self._step}"
        self._step = None

    def take_notices(self) -> list[Notice]:
        """Those since the last call."""
        notices, self.context.notices = self.context.notices, []
        return notices

    # ---- the next step ----

    @property
    def _fits(self) -> bool:
        """Whether the present role is the one that the record asks for."""
        match self.state:
            case Leading() as leading:
                return leading.fits
            case Following() as following:
                return following.fits and not self._is_leaving
        return False

    def next_step(self) -> Step | None:
        """What is to be done now, if anything; it is under way from here on, until `done`, `opened` or `failed`."""
        if self._step is not None:
            return None
        self._step = StopWriting(abandon=True) if self._has_stale_writer else self._chosen_step()
        self.context.note_standby(can_be=not (self._is_leaving or isinstance(self.state, Closed)))
        return self._step

    def _chosen_step(self) -> Step | None:
        context = self.context
        match self.state:
            case Leading() as leading:
                if leading.fits:
                    return leading.next_step()
                if (step := leading.step_out(is_stopping=context.is_stopping)) is not None:
                    return step
                self.state = Idle()
            case Following():
                if self._fits:
                    return context.step_to_companion(None)
                context.notices.append(Unfollow())
                self.state = Idle()
        return self._step_of_closed(self.state) if isinstance(self.state, Closed) else self._step_of_idle()

    def _step_of_closed(self, state: Closed) -> Step | None:
        context, record = self.context, self.record
        if context.ends or record is None or not context.surroundings.is_registered:
            return None
        if state.problem is not None and context.now_ms < context.not_before_ms:
            return None
        if isinstance(self.logs.damage, StorageFailed) and not context.others_hold_it:
            self._end_damage()  # no other replica holds it: opening is tried again
        if self.logs.damage is not None:
            return SetAside() if self._may_repair(record) else None
        if state.problem is not None and isinstance(state.problem, CorruptLog):
            return None  # one replica: an operator has to restore it
        return Open(must_exist=context.me in record.holders and context.me in record.candidates)

    def _step_of_idle(self) -> Step | None:
        context, record = self.context, self.record
        if context.ends or record is None:
            return Close()
        if not context.surroundings.is_registered or context.is_halted:
            return None
        if self.logs.damage is not None:
            return self._step_of_damaged(record)
        if context.lacks_companion:  # one that cannot be read is restored by an operator, where it is the only one
            return None if isinstance(context.problem, CorruptLog) else context.step_to_companion(None)
        if record.leader is None or not context.is_held:
            return None
        if record.leader == context.me:
            is_waiting = context.waits or (context.problem is not None and not context.surroundings.has_room)
            return None if is_waiting or self._waits_for_clocks(record) else BeginEpoch(record.leader_epoch)
        if not self._is_leaving:
            self.state = Following(context, record)
            context.problem = None
            context.notices.append(Follow(record.leader))
        return None

    def _step_of_damaged(self, record: StreamRecord) -> Step | None:
        logs = self.logs
        if self.context.now_ms < self.context.not_before_ms or not self._may_repair(record):
            return None
        is_unopened = logs.damaged_companion and logs.companion is None
        if isinstance(logs.damage, StorageFailed) and not is_unopened:
            return Close()
        return Repair(messages=logs.damaged_messages, companion=logs.damaged_companion)

    def _may_repair(self, record: StreamRecord) -> bool:
        """Whether another replica leads, holds everything, and this one does not count."""
        me = self.context.me
        return len(record.replicas) > 1 and me not in record.candidates and record.leader not in (None, me)

    def _waits_for_clocks(self, record: StreamRecord) -> bool:
        """Whether the epoch is to begin a moment later. Messages stamped before a majority's clocks are known could get
        times that are far behind; stream time would then leap, and message ids of a moment ago would have expired.
        """
        context = self.context
        if context.surroundings.has_time:
            self._without_time = None
            return False
        if self._without_time is None or self._without_time[0] != record.leader_epoch:
            self._without_time = record.leader_epoch, context.now_ms
        return context.now_ms - self._without_time[1] < _CLOCKS_WITHIN_MS

    def _begin_to_lead(self, epoch: Epoch) -> None:
        context, record, log = self.context, self.record, self.logs.messages
        assert log is not None, "an epoch begins on an open log"
        context.problem = None
        if record is None or (record.leader, record.leader_epoch) != (context.me, epoch):
            self._has_stale_writer = True  # the record has moved on while the epoch began
            return
        role = LeaderReplica(
            context.me,
            record,
            log_end_offset=log.whole_end_offset,
            high_watermark=self.logs.high_watermark,
            now_ms=context.now_ms,
            timeouts=context.timeouts,
        )
        self.state = Leading(context, role)

    def _halt(self, why: str) -> None:
        context, record = self.context, self.record
        assert record is not None, "a follower has a record"
        context.is_halted = True
        context.problem = CorruptLog(
            f"stream {record.name!r}: {why}. Nothing was changed here: compare both brokers' logs with natslog "
            "verify, keep a copy, and move the wrong replica to another broker",
            stream=record.name,
        )
        context.notices.append(Halted(context.problem.message))


def _last_of(log: Log) -> tuple[Epoch, int]:
    """The epoch of its last record, and where it ends."""
    return log.epochs.last_epoch_before(log.log_end_offset), log.log_end_offset
