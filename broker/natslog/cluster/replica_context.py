"""What the roles of a replica share: its record, its logs, the time, and the proposals and notices that it gives."""

from __future__ import annotations

from natslog.cluster.attempts import Attempts
from natslog.cluster.commands import BackgroundCommand, DisableReplicas, HoldCompanions, HoldReplicas
from natslog.cluster.replica_steps import Log, Notice, OpenCompanion, Propose, StandBy, Surroundings
from natslog.cluster.roles import LeaderReplica
from natslog.cluster.standby import standby_subjects
from natslog.cluster.tracks import Timeouts
from natslog.errors import NatslogError
from natslog.model import BrokerId, Epoch, StreamRecord


class ReplicaLogs:
    """The two logs of a replica, how far they are committed, and what was found damaged in them.

    Attributes:
        messages, companion: None while they are not open.
        high_watermark: what is known to be committed; the executor acknowledges and exposes what lies below.
        companion_high_watermark: the same of the companion log. companion_delivered: how far the owner of the stream
            was given its records. serves_from: what must be delivered before a follower serves.
        damage: what was found damaged and is not repaired yet. damaged_messages, damaged_companion: in which log.
    """

    def __init__(self) -> None:
        self.messages: Log | None = None
        self.companion: Log | None = None
        self.high_watermark = self.companion_high_watermark = self.companion_delivered = 0
        self.serves_from = 0
        self.damage: NatslogError | None = None
        self.damaged_messages = self.damaged_companion = False

    def reached_by(self, role: LeaderReplica) -> None:
        self.high_watermark = max(self.high_watermark, role.high_watermark)
        if role.companion is not None:
            self.companion_high_watermark = max(self.companion_high_watermark, role.companion.high_watermark)

    def reached_in_copy(self, high_watermark: int, *, is_companion: bool) -> None:
        if is_companion:
            self.companion_high_watermark = max(self.companion_high_watermark, high_watermark)
        else:
            self.high_watermark = max(self.high_watermark, high_watermark)

    @property
    def has_delivered(self) -> bool:
        """Whether the owner has what was committed in the companion log when it was opened here, and when this replica
        joined the ISR: files may lack messages that only these records name.
        """
        if self.companion is None:
            return True
        return self.companion_delivered >= min(self.serves_from, self.companion.log_end_offset)

    def open_companion(self, log: Log, delivered: int) -> None:
        self.companion = log
        self.companion_high_watermark, self.companion_delivered = log.high_watermark, delivered
        self.serves_from = log.log_end_offset  # where it is in the ISR, this is all that is committed

    def close_companion(self) -> None:
        self.companion = None
        self.companion_high_watermark = self.companion_delivered = self.serves_from = 0

    def note_damage(self, error: NatslogError, *, is_companion: bool) -> bool:
        """Returns whether it is the first."""
        if is_companion:
            self.damaged_companion = True
        else:
            self.damaged_messages = True
        is_first = self.damage is None
        self.damage = self.damage or error
        return is_first

    def end_damage(self) -> None:
        self.damage = None
        self.damaged_messages = self.damaged_companion = False


class ReplicaContext:
    """Of one replica.

    Attributes:
        record: the newest that is known here; None once the stream was deleted or moved away.
        now_ms: of a clock that never jumps, as the last input stated it.
        problem: why a step failed, where the replica does not serve because of it. not_before_ms: when it is repeated.
        is_subscribed: as the leader; None: not yet in its present role. stands_by_for: the subjects of a subscription
            beside that of a leader, until that one takes it over.
        is_stopping: the broker stops. is_halted: the leader's log contradicts committed messages of this replica.
    """

    def __init__(
        self, me: BrokerId, record: StreamRecord, surroundings: Surroundings, now_ms: float, timeouts: Timeouts
    ) -> None:
        self.me = me
        self.stream_id = record.id
        self.record: StreamRecord | None = record
        self.surroundings = surroundings
        self.timeouts = timeouts
        self.now_ms = now_ms
        self.logs = ReplicaLogs()
        self.problem: NatslogError | None = None
        self.not_before_ms = 0.0
        self.notices: list[Notice] = []
        self.is_stopping = self.is_halted = False
        self.is_subscribed: bool | None = None
        self.stands_by_for: tuple[str, ...] = ()
        self._attempts = Attempts()

    # ---- what the record states of this replica ----

    @property
    def ends(self) -> bool:
        """Whether the replica is to be closed for good."""
        return self.is_stopping or self.record is None or self.me not in self.record.replicas

    @property
    def may_have_role(self) -> bool:
        """Whether it may lead or follow."""
        is_to_be_repaired = self.logs.damage is not None and self.others_hold_it
        return not (self.ends or self.is_halted or is_to_be_repaired)

    @property
    def others_hold_it(self) -> bool:
        """Whether another replica may hold all that is committed."""
        return self.record is not None and bool(set(self.record.candidates) - {self.me})

    @property
    def is_held(self) -> bool:
        """Whether the metadata states that the log exists on this disk."""
        return self.record is not None and self.me in self.record.holders

    @property
    def is_companion_held(self) -> bool:
        """Whether the companion log is open, and the metadata states that it exists on this disk."""
        record = self.record
        return self.logs.companion is not None and record is not None and self.me in record.companion_holders

    @property
    def is_companion_unreported(self) -> bool:
        """Whether the metadata is to state that the companion log exists here."""
        return self.logs.companion is not None and not self.is_companion_held

    @property
    def lacks_companion(self) -> bool:
        """Whether the stream has a companion log that is not open here."""
        return self.logs.companion is None and self.record is not None and self.record.has_companion

    # ---- steps and notices ----

    def note_standby(self, *, can_be: bool) -> None:
        """The subscription goes on while the role changes. A leader begins one where its own has ended."""
        record = self.record
        subjects: tuple[str, ...] = ()
        if record is not None and can_be and self.may_have_role and not self.is_subscribed:
            begins = record.leader != self.me or self.is_subscribed is False
            subjects = standby_subjects(record, self.me) if begins or self.stands_by_for else ()
        if subjects != self.stands_by_for:
            self.stands_by_for = subjects
            self.notices.append(StandBy(subjects))

    @property
    def waits(self) -> bool:
        """Whether a step that failed is not to be repeated yet."""
        return self.problem is not None and self.now_ms < self.not_before_ms

    def step_to_companion(self, epoch: Epoch | None) -> OpenCompanion | None:
        """Where the stream has a companion log that is not open here; a failed attempt is repeated later."""
        record = self.record
        if record is None or not self.lacks_companion or self.waits:
            return None
        return OpenCompanion(self.me in record.companion_holders and self.me in record.candidates, epoch)

    def may_propose(self, kind: str, version: int) -> bool:
        return self.surroundings.has_session and self._attempts.may(kind, version, self.now_ms)

    def propose(self, kind: str, record: StreamRecord, command: BackgroundCommand) -> None:
        """If it is time to."""
        if self.may_propose(kind, record.version):
            self.notices.append(Propose(command))

    def propose_own_state(self, *, is_following: bool) -> None:
        """That the logs exist here; that one is damaged."""
        record, logs = self.record, self.logs
        if record is None or self.ends or not self.surroundings.is_registered:
            return
        me, incarnation, ids = self.me, self.surroundings.incarnation, (self.stream_id,)
        if logs.damage is not None:
            if me in record.candidates and not is_following and self.others_hold_it:
                self.propose("disable", record, DisableReplicas(broker=me, incarnation=incarnation, stream_ids=ids))
        elif logs.messages is not None and not self.is_held and self.may_propose("hold", record.version):
            self.notices.append(Propose(HoldReplicas(broker=me, incarnation=incarnation, stream_ids=ids)))
        elif self.is_companion_unreported:  # also while the other proposal is not to be repeated yet
            self.propose("hold companion", record, HoldCompanions(broker=me, incarnation=incarnation, stream_ids=ids))
