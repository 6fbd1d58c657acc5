"""The two roles of a replica. A leader decides what is committed and who is in sync; a follower decides how to become
its leader's copy. Both receive events and return actions; neither uses a file, a clock or a socket.

Theory of operation. A follower requests records from its log end offset (LEO) on, which confirms that everything below
is on its stable storage, and names the epoch of its last record. The leader looks this epoch up in its own epoch
history. If the follower has records that the leader does not have, the response is the offset to truncate to, and the
follower steps back until both logs agree. The high watermark (HW) is the least LEO of the in-sync replicas and of those
about to join them.

Invariants:
- every request and response has the leader epoch; one of another epoch is refused or ignored;
- HW counts only offsets that were fetched in this epoch, never goes back, and does not advance while fewer than
`min_isr` are in sync;
- nothing is exposed by a new leader before HW has reached the start of its epoch;
- HW is never inside a run (`appended`), nor between the HW that a new leader had and the start of its epoch;
- a replica is proposed for the ISR only with LEO >= HW and >= the epoch's start, and counts for HW from then on;
- a follower truncates by epoch only, and never below its own high watermark: it stops instead.

Source: KIP-101, KIP-279, KIP-320, KIP-595 (divergence in the fetch answer), KIP-966.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from natslog.cluster.commands import IsrChange
from natslog.cluster.epochs import NO_EPOCH, EpochHistory
from natslog.cluster.incarnations import is_former_life
from natslog.errors import NotEnoughReplicas
from natslog.model import BrokerId, Epoch, StreamRecord


class FetchPosition(msgspec.Struct, frozen=True, array_like=True):
    """Position of a follower: everything below `offset` is on its disk, the last record being of `last_epoch`.

    `version`: of the stream's record, as the follower knew it then.
    """

    epoch: Epoch
    offset: int
    last_epoch: Epoch
    version: int = 0


class Fenced(msgspec.Struct, frozen=True, tag=True):
    """The request was of another epoch than the leader's."""

    epoch: Epoch


class Diverging(msgspec.Struct, frozen=True, tag=True):
    """Of the follower's last epoch (or the nearest one below) the leader's records end at `end_offset`."""

    epoch: Epoch
    end_offset: int


class BeforeStart(msgspec.Struct, frozen=True, tag=True):
    """The requested records are past retention: start again at the leader's log start. The record below it was of
    `epoch` (`NO_EPOCH` if the leader does not have it either).
    """

    log_start_offset: int
    epoch: Epoch = NO_EPOCH


class Matching(msgspec.Struct, frozen=True, tag=True):
    """The follower's log is a beginning of the leader's: records from its end on follow."""


Verdict: TypeAlias = Fenced | Diverging | BeforeStart | Matching


def judge(
    position: FetchPosition, *, epoch: Epoch, epochs: EpochHistory, log_start_offset: int, log_end_offset: int
) -> Verdict:
    """The response of a leader of `epoch` to a follower's position."""
    if position.epoch != epoch:
        return Fenced(epoch)
    epoch_below = epochs.last_epoch_before(log_start_offset)
    from_start = BeforeStart(log_start_offset, epoch_below)
    if position.offset < log_start_offset:
        return from_start
    if position.offset == log_start_offset and position.last_epoch < epochs.last_epoch_before(log_start_offset + 1):
        is_comparable = NO_EPOCH not in (position.last_epoch, epoch_below)
        return from_start if is_comparable and position.last_epoch != epoch_below else Matching()
    found, end_offset = epochs.end_of(position.last_epoch, log_end_offset)
    if found == position.last_epoch and end_offset >= position.offset:
        return Matching()
    return Diverging(found, end_offset) if end_offset >= log_start_offset else from_start


@dataclass(slots=True)
class FollowerProgress:
    """A leader's state of a follower. `end_offset` is None until the follower has sent a request in this epoch, and,
    once it is out of the ISR, until it sends a request with the record version that removed it: its earlier data may be
    the reason for the removal (damage). It may have that version before the leader does; for an idle stream it sends
    one request, and no further one. `caught_up_ms`: when it last had everything that the leader had.
    """

    caught_up_ms: float
    known_version: int = 0
    out_since_version: int = 0
    end_offset: int | None = None
    incarnation: str = ""


_END_NOTED_EVERY_MS = 100.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """`lag_ms`: a follower that is behind for this time leaves the ISR. `unresponsive_ms`: a leader that sends nothing
    for this time is reported. `propose_again_ms`: after this time, a change without a known outcome is proposed again.
    """

    lag_ms: float = 3000.0
    unresponsive_ms: float = 2500.0
    propose_again_ms: float = 2000.0


class LeaderReplica:
    """The leader's side of one stream, for one epoch.

    Args:
        me: this broker, the record's leader. `log_end_offset`: where its epoch starts.
        high_watermark: what is known to be committed. `now_ms`: of a clock that never jumps.
    """

    def __init__(
        self,
        me: BrokerId,
        record: StreamRecord,
        *,
        log_end_offset: int,
        high_watermark: int,
        now_ms: float,
        timeouts: Timeouts = Timeouts(),
    ) -> None:
        assert record.leader == me, "only the record's leader leads"
        self.me = me
        self.record = record
        self.epoch = record.leader_epoch
        self.epoch_start = log_end_offset
        self.log_end_offset = log_end_offset
        self.high_watermark = high_watermark
        self.followers: dict[BrokerId, FollowerProgress] = {}
        self._ends: deque[tuple[float, int]] = deque([(now_ms, log_end_offset)])  # (when, log end offset), lately
        self._leaps: deque[tuple[int, int]] = deque()  # what HW passes at once, in order: runs
        if high_watermark < log_end_offset:  # it may hold runs; none of it is exposed before all of it is committed
            self._leaps.append((high_watermark, log_end_offset))
        self._timeouts = timeouts
        self._version = record.version
        self._proposed: set[BrokerId] = set()  # members of all changes proposed for the record's present version
        self._proposed_ms: float | None = None
        self.update(record, now_ms)
        self._advance()

    # ---- what happened ----

    def update(self, record: StreamRecord, now_ms: float) -> int:
        """The metadata has a new record of this stream, in the same epoch. Returns HW."""
        assert (record.leader, record.leader_epoch) == (self.me, self.epoch), "another epoch is another LeaderReplica"
        joined, left = set(record.isr) - set(self.record.isr), set(self.record.isr) - set(record.isr)
        self.record = record
        others = [broker for broker in record.replicas if broker != self.me]
        self.followers = {broker: self.followers.get(broker) or FollowerProgress(now_ms) for broker in others}
        for broker in joined & set(self.followers):
            self.followers[broker].caught_up_ms = now_ms
        for broker in left & set(self.followers):
            progress = self.followers[broker]
            progress.out_since_version = record.version
            if progress.known_version < record.version:
                progress.end_offset = None
        if record.version != self._version:
            self._version, self._proposed, self._proposed_ms = record.version, set(), None
        return self._advance()

    @property
    def is_quiet(self) -> bool:
        """Whether every replica is in sync and has everything, and no change is proposed."""
        ends = [progress.end_offset for progress in self.followers.values()]
        return (
            not self._proposed
            and not self.record.unproven
            and set(self.record.isr) == set(self.record.replicas)
            and self.high_watermark == self.log_end_offset
            and all(end is not None and end >= self.log_end_offset for end in ends)
        )

    def appended(self, end_offset: int, run_start: int | None = None, *, now_ms: float | None = None) -> int:
        """Everything below `end_offset` is on this broker's stable storage. Returns HW.

        Args:
            run_start: where given, all from there to `end_offset` is one run: HW passes it at once.
            now_ms: up to now the log ended where it did, which is not noted while the stream is quiet.
        """
        assert end_offset >= self.log_end_offset, "a leader never cuts its log"
        if now_ms is not None and self.followers:
            self._note_end(now_ms)
        if run_start is not None:
            assert run_start == self.log_end_offset, "a run is told of as a whole"
            self._leaps.append((run_start, end_offset))
        self.log_end_offset = end_offset
        return self._advance()

    def fetched(self, follower: BrokerId, offset: int, incarnation: str, now_ms: float, version: int = 0) -> int:
        """A follower whose log matches has everything below `offset`, and knows the record's `version`. Returns HW."""
        progress = self.followers.get(follower)
        if progress is None or version < progress.out_since_version:
            return self.high_watermark  # not a replica of this stream, or one that has not yet received its removal
        if incarnation != progress.incarnation and is_former_life(incarnation, progress.incarnation):
            return self.high_watermark  # late: its next life has already sent a request, and may have fewer messages
        self._note_end(now_ms)
        is_same_life = progress.incarnation == incarnation
        if offset >= self.log_end_offset or (is_same_life and self._moves_on_in_run(progress, offset)):
            progress.caught_up_ms = now_ms
        else:
            progress.caught_up_ms = max(progress.caught_up_ms, self._end_was_at(offset))
        progress.known_version = version
        progress.end_offset = offset
        progress.incarnation = incarnation
        return self._advance()

    def _note_end(self, now_ms: float) -> None:
        """What the log's end is now, for a while: a follower that is always a little behind, by less than `lag_ms`,
        keeps up, however much the leader appends between two of its fetches.
        """
        if now_ms - self._ends[-1][0] >= _END_NOTED_EVERY_MS:
            self._ends.append((now_ms, self.log_end_offset))
            while len(self._ends) > 1 and now_ms - self._ends[1][0] > self._timeouts.lag_ms:
                self._ends.popleft()

    def _end_was_at(self, offset: int) -> float:
        """The last moment at which the log is known to have ended at or below this offset."""
        return next((at_ms for at_ms, end in reversed(self._ends) if end <= offset), float("-inf"))

    def _moves_on_in_run(self, progress: FollowerProgress, offset: int) -> bool:
        """A run becomes visible when it is complete, however long it is: a follower that copies it without a pause
        counts as caught up.
        """
        has_moved = progress.end_offset is not None and offset > progress.end_offset
        return has_moved and any(self.epoch_start <= start <= offset < end for start, end in self._leaps)

    # ---- what follows from it ----

    @property
    def counted(self) -> frozenset[BrokerId]:
        """Replicas whose LEO limits HW: the ISR, and the replicas that a change that may still be applied would add."""
        return frozenset(self.record.isr) | self._proposed

    def _advance(self) -> int:
        if len(self.record.isr) >= self.record.settings.min_isr:
            ends = [self._end_of(broker) for broker in self.counted]
            if None not in ends:
                reached = self._whole_runs_below(min(end for end in ends if end is not None))
                self.high_watermark = max(self.high_watermark, reached)
        return self.high_watermark

    def _whole_runs_below(self, end_offset: int) -> int:
        """The same, or where the run starts that it is inside of."""
        while self._leaps and self._leaps[0][1] <= end_offset:
            self._leaps.popleft()
        return min(end_offset, self._leaps[0][0]) if self._leaps else end_offset

    def _end_of(self, broker: BrokerId) -> int | None:
        if broker == self.me:
            return self.log_end_offset
        progress = self.followers.get(broker)
        return progress.end_offset if progress is not None else None

    @property
    def is_exposed(self) -> bool:
        """Whether HW is known well enough to be shown: all of earlier epochs is committed."""
        return self.high_watermark >= self.epoch_start

    def refusal(self) -> NotEnoughReplicas | None:
        """Why nothing may be appended now."""
        isr, min_isr = self.record.isr, self.record.settings.min_isr
        if len(isr) >= min_isr:
            return None
        return NotEnoughReplicas(
            f"stream {self.record.name!r} has {len(isr)} replicas in sync but requires {min_isr}: start the missing "
            "brokers (natslog cluster status lists them); writes resume automatically",
            stream=self.record.name,
            isr=list(isr),
            min_isr=min_isr,
        )

    def isr_change(self, now_ms: float, contact_ms: Mapping[BrokerId, float]) -> IsrChange | None:
        """The change to propose now, if any.

        Args:
            contact_ms: when each broker last asked this one for anything: for an idle stream a follower sends nothing.
        """
        if self._proposed_ms is not None and now_ms - self._proposed_ms < self._timeouts.propose_again_ms:
            return None
        self._note_end(now_ms)
        wanted = [broker for broker in self.record.replicas if self._belongs(broker, now_ms, contact_ms)]
        proven = [broker for broker in wanted if broker in self.record.unproven and self._may_join(broker)]
        withdrawn = self._proposed - set(wanted)  # an older proposal may still be applied: a new version voids it
        if set(wanted) == set(self.record.isr) and not proven and not withdrawn:
            return None
        self._proposed |= set(wanted)
        self._proposed_ms = now_ms
        return IsrChange(
            stream_id=self.record.id,
            epoch=self.epoch,
            version=self.record.version,
            isr=tuple(wanted),
            incarnations=tuple(self._incarnation_of(broker) for broker in wanted),
            proven=tuple(proven),
        )

    def _incarnation_of(self, broker: BrokerId) -> str:
        progress = self.followers.get(broker)
        return progress.incarnation if progress is not None else ""

    def _belongs(self, broker: BrokerId, now_ms: float, contact_ms: Mapping[BrokerId, float]) -> bool:
        if broker == self.me:
            return True
        if broker not in self.record.isr:
            return self._may_join(broker) and not self._lags(broker, now_ms, contact_ms)
        return not self._lags(broker, now_ms, contact_ms)

    def _may_join(self, broker: BrokerId) -> bool:
        end_offset = self._end_of(broker)
        return end_offset is not None and end_offset >= max(self.high_watermark, self.epoch_start)

    def _lags(self, broker: BrokerId, now_ms: float, contact_ms: Mapping[BrokerId, float]) -> bool:
        progress = self.followers[broker]
        caught_up_ms = progress.caught_up_ms
        if progress.end_offset is not None and progress.end_offset >= self.log_end_offset:
            caught_up_ms = max(caught_up_ms, contact_ms.get(broker, 0.0))
        return now_ms - caught_up_ms > self._timeouts.lag_ms

    def is_to_join(self, broker: BrokerId) -> bool:
        """Whether this follower, which is out of the ISR, has everything that a member must have."""
        return broker in self.followers and broker not in self.counted and self._may_join(broker)

    def is_caught_up(self, broker: BrokerId) -> bool:
        """Whether this follower holds all there is."""
        return self._end_of(broker) == self.log_end_offset


@dataclass(frozen=True, slots=True)
class CutTo:
    """Drop everything from `end_offset` on, then send the next request."""

    end_offset: int


@dataclass(frozen=True, slots=True)
class BeginAt:
    """Drop everything and begin at `log_start_offset`, as if behind a record of `epoch`."""

    log_start_offset: int
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Append:
    """The records of the answer continue the log; then HW is `min(leader's, own LEO)`."""


@dataclass(frozen=True, slots=True)
class Ignore:
    """The response is of another epoch: the metadata decides, once it has arrived."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Continuing would truncate committed messages."""

    why: str


FollowerStep: TypeAlias = CutTo | BeginAt | Append | Ignore | Halt


@dataclass(slots=True)
class FollowerReplica:
    """The follower's side of one stream, for one epoch.

    Attributes:
        high_watermark: the offset up to which messages are known to be committed; at most its own LEO.
    """

    me: BrokerId
    record: StreamRecord
    high_watermark: int
    last_contact_ms: float
    timeouts: Timeouts = field(default_factory=Timeouts)

    @property
    def epoch(self) -> Epoch:
        return self.record.leader_epoch

    def position(self, epochs: EpochHistory, log_end_offset: int) -> FetchPosition:
        last_epoch = epochs.last_epoch_before(log_end_offset)
        return FetchPosition(self.epoch, log_end_offset, last_epoch, self.record.version)

    def answered(
        self, epoch: Epoch, verdict: Verdict, now_ms: float, *, epochs: EpochHistory, log_end_offset: int
    ) -> FollowerStep:
        """The action that a response from a leader of `epoch` requires.

        It must be the response to the last request of this process, with an unchanged log since: an older response of
        the same epoch could truncate messages that were fetched, and counted, since.
        """
        if epoch != self.epoch or isinstance(verdict, Fenced):
            return Ignore()
        self.last_contact_ms = now_ms
        match verdict:
            case Matching():
                return Append()
            case BeforeStart(log_start_offset=start, epoch=start_epoch):
                if start < self.high_watermark:
                    return Halt(
                        f"the leader's log begins at {start}, and this replica would have to delete committed offsets"
                    )
                return BeginAt(start, start_epoch)
            case Diverging(epoch=diverging_epoch, end_offset=leader_end):
                _, own_end = epochs.end_of(diverging_epoch, log_end_offset)
                end_offset = min(own_end, leader_end, log_end_offset)
                if end_offset < self.high_watermark:
                    return Halt(
                        f"the leader's log of epoch {diverging_epoch} ends at {leader_end}, below the high watermark "
                        f"{self.high_watermark} of this replica"
                    )
                return CutTo(end_offset)

    def advanced(self, leader_high_watermark: int, whole_end_offset: int) -> int:
        """After the append. Returns HW.

        Args:
            whole_end_offset: the log end offset; where the log holds only a part of its last run, that run's start.
        """
        self.high_watermark = max(self.high_watermark, min(leader_high_watermark, whole_end_offset))
        return self.high_watermark

    def is_leader_unresponsive(self, now_ms: float, leader_contact_ms: float) -> bool:
        """Whether the leader has sent nothing for so long that it is to be reported."""
        return now_ms - max(self.last_contact_ms, leader_contact_ms) > self.timeouts.unresponsive_ms


def quorum_position(positions: Mapping[BrokerId, tuple[Epoch, int]], candidates: Iterable[BrokerId]) -> BrokerId | None:
    """The leader if every candidate has restarted uncleanly: the replica with the longest log by (epoch of the last
    record, LEO).

    A minority of the candidates may have lost the end of their logs; a majority of positions is one more, so it holds
    at least one log with everything that was committed. None while there are fewer.
    """
    known = sorted(set(candidates))
    given = [broker for broker in known if broker in positions]
    if len(given) < len(known) // 2 + 1:
        return None
    return max(given, key=lambda broker: (*positions[broker], -broker))
