"""A replica while it leads: who is in sync, which subjects it subscribes to, and how it hands its leadership over.

What is committed is decided by `roles.LeaderReplica`, for one epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from natslog.cluster.commands import AppointLeaders, Appointment, CreateCompanion
from natslog.cluster.replica_context import ReplicaContext
from natslog.cluster.replica_steps import Drain, ProposeIsr, Step, StopWriting, Subscribe, Unsubscribe
from natslog.cluster.roles import Fenced, FetchPosition, LeaderReplica, Matching, Verdict, judge
from natslog.model import BrokerId, Epoch, StreamRecord
from natslog.subjects import is_internal

_TRANSFER_WITHIN_MS = 3000.0


@dataclass(slots=True)
class _Transfer:
    to: BrokerId
    since_ms: float
    is_drained: bool = False


class Leading:
    """The state of a leader.

    Attributes:
        role: of this epoch. is_ready: the subscription was requested once.
        subscribed_to: the subjects; none without a subscription. group: of the subscription.
        is_writing: the ingest of this role has not been stopped.
    """

    def __init__(self, context: ReplicaContext, role: LeaderReplica) -> None:
        self.role = role
        self.is_ready = False
        self.subscribed_to: tuple[str, ...] = ()
        self.group: str | None = None
        self.is_writing = True
        self._context = context
        self._transfer: _Transfer | None = None
        self._contact_ms: Mapping[BrokerId, float] = {}
        context.is_subscribed = None
        companion = context.logs.companion
        if companion is not None:
            self.begin_companion()
        context.logs.reached_by(role)

    # ---- its state ----

    @property
    def is_exposed(self) -> bool:
        """Whether its HW is known well enough to be shown."""
        companion = self.role.companion
        is_shown = self.is_ready and self.role.is_exposed
        return is_shown and (companion is None or self._context.logs.companion_delivered >= companion.epoch_start)

    @property
    def is_transferring(self) -> bool:
        """Whether it takes no messages, so that another replica may become leader."""
        return self._transfer is not None

    @property
    def is_quiet(self) -> bool:
        """Whether the next tick will find nothing to do, unless there is an input before it."""
        return self._transfer is None and self.is_ready and self._step_to_subjects() is None and self.role.is_quiet

    @property
    def fits(self) -> bool:
        """Whether this is the role that the record asks for."""
        record, me = self._context.record, self._context.me
        is_of_record = record is not None and (record.leader, record.leader_epoch) == (me, self.role.epoch)
        return is_of_record and self.is_writing and self._context.may_have_role

    def successor(self, stopping: Collection[BrokerId]) -> BrokerId | None:
        """See `Replica.successor`."""
        excluded = {self._context.me, *stopping, *self.role.record.unproven}
        return next((one for one in self.role.record.isr if one not in excluded), None)

    # ---- inputs ----

    def changed(self, record: StreamRecord) -> None:
        """The metadata has this record now, in the same epoch."""
        self.role.update(record, self._context.now_ms)
        self._context.logs.reached_by(self.role)
        if self._transfer is not None and not is_proven(record, self._transfer.to):
            self._transfer = None

    def tick(self, contact_ms: Mapping[BrokerId, float]) -> None:
        """Args: contact_ms: when each follower last asked this broker for anything."""
        if self._transfer is not None and self._context.now_ms - self._transfer.since_ms > _TRANSFER_WITHIN_MS:
            self._transfer = None
        self._contact_ms = contact_ms
        self._propose_isr()

    def appended(self, end_offset: int, run_start: int | None, *, is_companion: bool = False) -> None:
        track = self.role.companion if is_companion else None
        if is_companion and track is None:
            return
        self.role.appended(end_offset, run_start, now_ms=self._context.now_ms, track=track)
        self._context.logs.reached_by(self.role)
        self.propose_transfer()

    def begin_companion(self) -> None:
        """The companion log is open here."""
        logs = self._context.logs
        assert logs.companion is not None, "it was opened"
        self.role.begin_companion(logs.companion.log_end_offset, logs.companion_high_watermark, self._context.now_ms)
        logs.reached_by(self.role)

    def create_companion(self) -> None:
        """The stream needs a companion log."""
        record = self.role.record
        if not record.has_companion:
            command = CreateCompanion(stream_id=record.id, broker=self._context.me, epoch=self.role.epoch)
            self._context.propose("create companion", record, command)

    def judged(self, position: FetchPosition, *, is_companion: bool) -> Verdict:
        """What a follower at this position is told."""
        logs = self._context.logs
        log = logs.companion if is_companion else logs.messages
        if log is None or (is_companion and self.role.companion is None):
            return Fenced(Epoch(0))
        return judge(
            position,
            epoch=self.role.epoch,
            epochs=log.epochs,
            log_start_offset=log.log_start_offset,
            log_end_offset=log.written_end_offset,
        )

    def fetched(self, follower: BrokerId, position: FetchPosition, incarnation: str, *, is_companion: bool) -> Verdict:
        """A follower asks from here on: everything below is on its stable storage, if its log matches."""
        verdict = self.judged(position, is_companion=is_companion)
        if isinstance(verdict, Matching):
            role, now_ms = self.role, self._context.now_ms
            track = role.companion if is_companion else role.messages
            role.fetched(follower, position.offset, incarnation, now_ms, position.version, track)
            self._context.logs.reached_by(role)
            if role.is_to_join(follower):  # at once: the next moment it may be behind again
                self._propose_isr()
            self.propose_transfer()
        return verdict

    # ---- its leadership is handed over ----

    def transfer(self, to: BrokerId) -> bool:
        """See `Replica.transfer`."""
        if self._transfer is None:
            self._transfer = _Transfer(to, self._context.now_ms)
            self.role.end_waiting()
            self._context.logs.reached_by(self.role)
        return self._transfer.to == to

    def propose_transfer(self) -> None:
        """When the successor holds all there is."""
        transfer = self._transfer
        if transfer is None or not transfer.is_drained or not self.fits:
            return
        if self.role.is_caught_up(transfer.to) and self.role.is_committed:
            propose_leader(self._context, self.role.record, transfer.to)

    def _propose_isr(self) -> None:
        change = self.role.isr_change(self._context.now_ms, self._contact_ms, may_wait=self._transfer is None)
        self._context.logs.reached_by(self.role)
        if change is not None:
            self._context.notices.append(ProposeIsr(change))

    # ---- steps ----

    def next_step(self) -> Step | None:
        """Of a role that the record asks for."""
        if (opening := self._context.step_to_companion(self.role.epoch)) is not None:
            return opening
        if (subscribing := self._step_to_subjects()) is not None:
            return subscribing
        self.is_ready = True  # also without a session; it subscribes when it has one
        is_to_drain = self._transfer is not None and not self._transfer.is_drained
        return Drain() if is_to_drain else None

    def step_out(self, *, is_stopping: bool) -> Step | None:
        """Of a role that is to end; None: it has ended."""
        self._transfer = None
        if self.subscribed_to:
            return Unsubscribe()
        return StopWriting(abandon=not is_stopping) if self.is_writing else None

    def done(self, step: Step) -> None:
        match step:
            case Subscribe(subjects=subjects, group=group):
                self.subscribed_to, self.group, self.is_ready = subjects, group, True
                self._context.is_subscribed, self._context.stands_by_for = True, ()
            case Unsubscribe():
                self.subscribed_to, self._context.is_subscribed = (), False
            case Drain() if self._transfer is not None:
                self._transfer.is_drained = True
                self.propose_transfer()
            case StopWriting():
                self.is_writing = False
            case _:
                pass

    def _step_to_subjects(self) -> Subscribe | Unsubscribe | None:
        """To those that a leader subscribes to, in its group: a subscription of another group ends first."""
        subjects, group = self._wanted_subjects(), self.role.record.settings.group
        is_of_other_group = bool(self.subscribed_to) and group != self.group
        if subjects == self.subscribed_to and not is_of_other_group:
            return None
        return Subscribe(subjects, group) if subjects and not is_of_other_group else Unsubscribe()

    def _wanted_subjects(self) -> tuple[str, ...]:
        """What a leader subscribes to. Clients of JetStream are told that a stream is sealed."""
        record = self.role.record
        if is_internal(record.name):
            return ()
        is_closed = (record.sealed and record.settings.acks != "any") or record.import_state != ""
        takes_messages = self._context.surroundings.has_session and self._transfer is None and not is_closed
        return record.settings.subjects if takes_messages else ()


def propose_leader(context: ReplicaContext, record: StreamRecord, leader: BrokerId) -> None:
    appointment = Appointment(stream_id=record.id, version=record.version, leader=leader, isr=record.isr)
    context.propose("transfer", record, AppointLeaders(appointments=(appointment,)))


def is_proven(record: StreamRecord, broker: BrokerId) -> bool:
    """Whether it is in sync in its present life: positions from a life that ended uncleanly do not count."""
    return broker in record.isr and broker not in record.unproven
