"""A replica while it follows: what it requests from its leader, and what an answer means for its logs.

How it becomes its leader's copy is decided by `roles.FollowerReplica`, for each of the logs.
"""

from __future__ import annotations

from natslog.cluster.leading import is_proven
from natslog.cluster.replica_context import ReplicaContext
from natslog.cluster.replica_steps import Copy, Follow, Log
from natslog.cluster.roles import Append, BeginAt, CutTo, FetchPosition, FollowerReplica, Halt, Ignore, Verdict
from natslog.model import BrokerId, Epoch, StreamRecord


class Following:
    """The state of a follower.

    Attributes:
        role: of the log of messages. companion: of the companion log, while it is open.
    """

    def __init__(self, context: ReplicaContext, record: StreamRecord) -> None:
        self.role = FollowerReplica(context.me, record, context.logs.high_watermark, context.now_ms, context.timeouts)
        self.companion: FollowerReplica | None = None
        self._context = context
        self._adopted_ids = 0  # the serial of the message ids that were taken over from this leader
        self._is_copy_of_companion = False  # the step under way
        if context.logs.companion is not None:
            self._begin_companion()

    @property
    def fits(self) -> bool:
        """Whether this is the role that the record asks for."""
        record, role = self._context.record, self.role
        is_of_record = record is not None and (record.leader, record.leader_epoch) == (role.record.leader, role.epoch)
        return is_of_record and self._context.may_have_role

    # ---- inputs ----

    def changed(self, record: StreamRecord, former: StreamRecord | None) -> None:
        """The metadata has this record now, in the same epoch."""
        me = self._context.me
        self.role.record = record
        if self.companion is not None:
            self.companion.record = record
        if record.leader is not None and (me not in record.isr or _begins_to_hold(me, former, record)):
            self.follow_again()  # asks once more, knowing that it is out of the ISR

    def companion_opened(self) -> None:
        self._begin_companion()
        if self._context.is_companion_held:
            self.follow_again()

    def _begin_companion(self) -> None:
        context = self._context
        self.companion = FollowerReplica(
            context.me, self.role.record, context.logs.companion_high_watermark, context.now_ms, context.timeouts
        )

    def follow_again(self) -> None:
        """From the present position."""
        if (leader := self.role.record.leader) is not None:
            self._context.notices.append(Follow(leader))

    # ---- copying ----

    def _copied(self, is_companion: bool) -> tuple[FollowerReplica | None, Log | None]:
        """The follower's side of a log, and the log."""
        logs = self._context.logs
        return (self.companion, logs.companion) if is_companion else (self.role, logs.messages)

    def position(self, *, is_companion: bool) -> FetchPosition | None:
        """Where it asks from; None where it does not fetch this log now."""
        role, log = self._copied(is_companion)
        if role is None or log is None or (is_companion and not self._context.is_companion_held):
            return None
        return role.position(log.epochs, log.log_end_offset)

    def answered(
        self, epoch: Epoch, verdict: Verdict, *, high_watermark: int, has_records: bool, is_companion: bool
    ) -> Copy | CutTo | BeginAt | Halt | None:
        """The step to be taken now, if any."""
        role, log = self._copied(is_companion)
        if role is None or log is None:
            return None
        self._is_copy_of_companion = is_companion
        now_ms = self._context.now_ms
        answer = role.answered(epoch, verdict, now_ms, epochs=log.epochs, log_end_offset=log.log_end_offset)
        match answer:
            case Append() if has_records:
                return Copy(high_watermark)
            case Append():
                self._reached(role.advanced(high_watermark, log.whole_end_offset))
                return None
            case Ignore():
                return None
            case CutTo() | BeginAt() | Halt():
                return answer

    def done(self, step: Copy | CutTo | BeginAt) -> None:
        role, log = self._copied(self._is_copy_of_companion)
        if role is None or log is None:
            return
        match step:
            case Copy(leader_high_watermark=leader_high_watermark):
                self._reached(role.advanced(leader_high_watermark, log.whole_end_offset))
            case BeginAt(log_start_offset=start):
                role.high_watermark = max(role.high_watermark, start)
                self._reached(start)
            case CutTo():
                pass

    def _reached(self, high_watermark: int) -> None:
        self._context.logs.reached_in_copy(high_watermark, is_companion=self._is_copy_of_companion)

    @property
    def is_copy_of_companion(self) -> bool:
        """Whether the step that copies or truncates is one of the companion log."""
        return self._is_copy_of_companion

    # ---- message ids ----

    def lacks_ids(self, epoch: Epoch, serial: int) -> bool:
        """See `Replica.lacks_ids`."""
        context = self._context
        if not serial or self.role.epoch != epoch or context.record is None:
            return False
        has_had_rows = context.surroundings.is_registered and is_proven(context.record, context.me)
        return not has_had_rows and self._adopted_ids != serial

    def adopted_ids(self, epoch: Epoch, serial: int) -> None:
        """They are on stable storage here."""
        if self.role.epoch == epoch:
            self._adopted_ids = serial


def _begins_to_hold(broker: BrokerId, former: StreamRecord | None, record: StreamRecord) -> bool:
    """Whether the metadata states now for the first time that its companion log exists."""
    was = former.companion_holders if former is not None else ()
    return broker in record.companion_holders and broker not in was
