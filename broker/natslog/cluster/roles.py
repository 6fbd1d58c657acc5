"""The two roles of a replica. A leader decides what is committed and who is in sync; a follower decides how to become
its leader's copy. Both receive events and return actions; neither uses a file, a clock or a socket.

Theory of operation. A follower requests records from its log end offset (LEO) on, which confirms that everything below
is on its stable storage, and names the epoch of its last record. The leader looks this epoch up in its own epoch
history. If the follower has records that the leader does not have, the response is the offset to truncate to, and the
follower steps back until both logs agree. The high watermark (HW) is the least LEO of the in-sync replicas and of those
about to join them. Where a stream has a companion log, both logs are copied and committed so, each with its own HW, and
a replica is in sync, caught up or lagging only in both together.

Invariants:
- every request and response has the leader epoch; one of another epoch is refused or ignored;
- HW counts only offsets that were fetched in this epoch, never goes back, and does not advance while fewer than
`min_isr` are in sync;
- nothing is exposed by a new leader before HW has reached the start of its epoch;
- HW is never inside a run (`appended`), nor between the HW that a new leader had and the start of its epoch;
- a replica is proposed for the ISR only with LEO >= HW and >= the epoch's start, and counts for HW from then on. HW
waits for one that keeps up but is a little behind whenever it requests records;
- a follower truncates by epoch only, and never below its own high watermark: it stops instead.

Source: KIP-101, KIP-279, KIP-320, KIP-595 (divergence in the fetch answer), KIP-966.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from natslog.cluster.commands import IsrChange
from natslog.cluster.epochs import NO_EPOCH, EpochHistory
from natslog.cluster.incarnations import is_former_life
from natslog.cluster.tracks import Timeouts, Track
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
    if position.last_epoch == epochs.latest and log_start_offset < position.offset <= log_end_offset:
        return Matching()  # as below: the records of the last epoch end where the log does
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
    """A leader's state of a follower, beside its copies (`Track`): its present life, the version of the record that
    removed it from the ISR, and from when on HW waits for it, while it keeps up.
    """

    incarnation: str = ""
    out_since_version: int = 0
    awaited_from_ms: float | None = None


class LeaderReplica:
    """The leader's side of one stream, for one epoch: one decision on the ISR, for all logs of the stream.

    Args:
        me: this broker, the record's leader. `log_end_offset`: where its epoch starts.
        high_watermark: what is known to be committed. `now_ms`: of a clock that never jumps.

    Attributes:
        messages: the track of the log of messages. `companion`: of the companion log, once it is open here.
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
        self.followers = {broker: FollowerProgress() for broker in self._others(record)}
        self._timeouts = timeouts
        self.messages = self._track(log_end_offset, high_watermark, now_ms)
        self.companion: Track | None = None
        self._version = record.version
        self._proposed: set[BrokerId] = set()  # members of all changes proposed for the record's present version
        self._proposed_ms: float | None = None
        self._awaited: set[BrokerId] = set()  # followers out of the ISR that HW waits for
        self._advance()

    def _others(self, record: StreamRecord) -> list[BrokerId]:
        return [broker for broker in record.replicas if broker != self.me]

    def _track(self, log_end_offset: int, high_watermark: int, now_ms: float) -> Track:
        return Track(
            self.me,
            self.followers,
            log_end_offset=log_end_offset,
            high_watermark=high_watermark,
            now_ms=now_ms,
            timeouts=self._timeouts,
        )

    @property
    def tracks(self) -> tuple[Track, ...]:
        return (self.messages,) if self.companion is None else (self.messages, self.companion)

    @property
    def epoch_start(self) -> int:
        return self.messages.epoch_start

    @property
    def log_end_offset(self) -> int:
        return self.messages.log_end_offset

    @property
    def high_watermark(self) -> int:
        return self.messages.high_watermark

    # ---- what happened ----

    def begin_companion(self, log_end_offset: int, high_watermark: int, now_ms: float) -> None:
        """The companion log is open here. It counts from now on; followers have `lag_ms` to open it."""
        assert self.companion is None, "a stream has one companion log"
        self.companion = self._track(log_end_offset, high_watermark, now_ms)
        self._advance()

    def update(self, record: StreamRecord, now_ms: float) -> int:
        """The metadata has a new record of this stream, in the same epoch. Returns HW."""
        assert (record.leader, record.leader_epoch) == (self.me, self.epoch), "another epoch is another LeaderReplica"
        joined, left = set(record.isr) - set(self.record.isr), set(self.record.isr) - set(record.isr)
        self.record = record
        self.followers = {broker: self.followers.get(broker) or FollowerProgress() for broker in self._others(record)}
        for broker in left & set(self.followers):
            self.followers[broker].out_since_version = record.version
        for track in self.tracks:
            track.follow(self.followers, now_ms)
            for broker in joined & set(self.followers):
                track.copies[broker].caught_up_ms = now_ms
            for broker in left & set(self.followers):
                track.left_isr(broker, record.version)
        if record.version != self._version:
            self._version, self._proposed, self._proposed_ms = record.version, set(), None
        return self._advance()

    @property
    def is_quiet(self) -> bool:
        """Whether every replica is in sync and has everything, and no change is proposed."""
        return (
            not self._proposed
            and not self.record.unproven
            and set(self.record.isr) == set(self.record.replicas)
            and all(track.is_quiet for track in self.tracks)
        )

    def appended(
        self, end_offset: int, run_start: int | None = None, *, now_ms: float | None = None, track: Track | None = None
    ) -> int:
        """Everything below `end_offset` is on this broker's stable storage. Returns HW of the messages.

        Args:
            run_start: where given, all from there to `end_offset` is one run: HW passes it at once.
            now_ms: up to now the log ended where it did, which is not noted while the stream is quiet.
            track: of the log that was appended to; None: of the messages.
        """
        (track or self.messages).appended(end_offset, run_start, now_ms)
        return self._advance()

    def fetched(
        self,
        follower: BrokerId,
        offset: int,
        incarnation: str,
        now_ms: float,
        version: int = 0,
        track: Track | None = None,
    ) -> int:
        """A follower whose log matches has everything below `offset`, and knows the record's `version`. Returns HW of
        the messages.

        Args:
            track: of the log that it has; None: of the messages.
        """
        progress = self.followers.get(follower)
        if progress is None or version < progress.out_since_version:
            return self.high_watermark  # not a replica of this stream, or one that has not yet received its removal
        if incarnation != progress.incarnation:
            if is_former_life(incarnation, progress.incarnation):
                return self.high_watermark  # late: its next life has sent a request, and may have fewer messages
            progress.incarnation = incarnation
            for one in self.tracks:
                one.begin_life(follower)
        (track or self.messages).fetched(follower, offset, now_ms, version)
        return self._advance()

    # ---- what follows from it ----

    @property
    def counted(self) -> frozenset[BrokerId]:
        """Replicas whose LEO limits HW: the ISR, the replicas that a change that may still be applied would add, and
        those that are to reach HW, to be added then.
        """
        return frozenset(self.record.isr) | self._proposed | self._awaited

    def _advance(self) -> int:
        if len(self.record.isr) >= self.record.settings.min_isr:
            counted = self.counted
            for track in self.tracks:
                track.advance(counted)
        return self.high_watermark

    @property
    def is_exposed(self) -> bool:
        """Whether HW is known well enough to be shown: all of earlier epochs is committed, in each log."""
        return all(track.is_exposed for track in self.tracks)

    @property
    def is_committed(self) -> bool:
        """Whether everything is, in each log."""
        return all(track.is_committed for track in self.tracks)

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

    def isr_change(
        self, now_ms: float, contact_ms: Mapping[BrokerId, float], *, may_wait: bool = True
    ) -> IsrChange | None:
        """The change to propose now, if any. HW may wait for followers from now on, or no longer.

        Args:
            contact_ms: when each broker last asked this one for anything: for an idle stream a follower sends nothing.
            may_wait: whether HW may wait for followers that are to join.
        """
        self._awaited = {one for one in self.followers if may_wait and self._is_awaited(one, now_ms)}
        self._advance()
        if self._proposed_ms is not None and now_ms - self._proposed_ms < self._timeouts.propose_again_ms:
            return None
        for track in self.tracks:
            track.note_end(now_ms)
        wanted = [broker for broker in self.record.replicas if self._belongs(broker, now_ms, contact_ms)]
        proven = [broker for broker in wanted if broker in self.record.unproven and self._may_join(broker)]
        withdrawn = self._proposed - set(wanted)  # an older proposal may still be applied: a new version voids it
        if set(wanted) == set(self.record.isr) and not proven and not withdrawn:
            return None
        self._proposed |= set(wanted)
        self._proposed_ms = now_ms
        self._awaited -= self._proposed
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

    def _is_awaited(self, broker: BrokerId, now_ms: float) -> bool:
        """Whether HW waits for this follower. While messages are appended all the time, one whose requests take long
        to follow each other is always behind HW in one log or the other, so it would stay out of the ISR for ever,
        although as a member it would not lag. After a while, HW waits for it, as long as for a member.
        """
        progress = self.followers[broker]
        is_out = broker not in self.record.isr and broker not in self._proposed
        if not is_out or not all(track.keeps_up(broker, now_ms) for track in self.tracks):
            progress.awaited_from_ms = None
            return False
        from_ms = progress.awaited_from_ms
        if from_ms is None or now_ms - from_ms > self._timeouts.lag_ms:
            from_ms = progress.awaited_from_ms = now_ms + self._timeouts.wait_after_ms
        return now_ms >= from_ms

    def end_waiting(self) -> int:
        """Followers out of the ISR no longer limit HW. Returns HW of the messages."""
        self._awaited = set()
        return self._advance()

    def _may_join(self, broker: BrokerId) -> bool:
        return all(track.may_join(broker) for track in self.tracks)

    def _lags(self, broker: BrokerId, now_ms: float, contact_ms: Mapping[BrokerId, float]) -> bool:
        return any(track.lags(broker, now_ms, contact_ms.get(broker, 0.0)) for track in self.tracks)

    def is_to_join(self, broker: BrokerId) -> bool:
        """Whether this follower, which is out of the ISR, has everything that a member must have."""
        is_counted = broker in self.record.isr or broker in self._proposed
        return broker in self.followers and not is_counted and self._may_join(broker)

    def is_caught_up(self, broker: BrokerId) -> bool:
        """Whether this follower holds all there is."""
        return all(track.end_of(broker) == track.log_end_offset for track in self.tracks)


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

    def is_leader_unresponsive(self, now_ms: float, leader_contact_ms: float, ended: Collection[BrokerId]) -> bool:
        """Whether the leader is to be reported: its process is one of those that have ended, or has sent nothing for so
        long.
        """
        is_silent = now_ms - max(self.last_contact_ms, leader_contact_ms) > self.timeouts.unresponsive_ms
        return is_silent or self.record.leader in ended


Position: TypeAlias = tuple[Epoch, int]
"""Of a log: the epoch of its last record, and LEO."""


def quorum_position(
    positions: Mapping[BrokerId, Position],
    candidates: Iterable[BrokerId],
    companions: Mapping[BrokerId, Position] | None = None,
) -> BrokerId | None:
    """The leader if every candidate has restarted uncleanly: the replica with the longest log.

    Up to half of the candidates may have lost the end of their logs; a majority of positions is one more, so it holds
    at least one log with everything that was committed. None while there are fewer.

    With a companion log, a replica may have the longest log of messages and have lost the end of the other one. The
    replicas that lost nothing are at least `whole` of those given, and all of them have what was committed in each log:
    so a replica that is among the best `whole` in both logs has it too. If there is none, the result is None until more
    are given. If all of an odd number are given, there is one, because `whole` is more than half of them. Of an even
    number (for example of two, each with the longer one of another log) an operator decides which to replace.

    Args:
        companions: the positions of companion logs, where the stream has them.
    """
    known = sorted(set(candidates))
    given = [broker for broker in known if broker in positions and (companions is None or broker in companions)]
    if len(given) < len(known) // 2 + 1:
        return None
    best = given
    if companions is not None:
        whole = len(given) - len(known) // 2
        best = [one for one in given if _is_among(whole, one, given, positions)]
        best = [one for one in best if _is_among(whole, one, given, companions)]
    return max(best, key=lambda broker: (*positions[broker], -broker), default=None)


def _is_among(best: int, broker: BrokerId, given: Iterable[BrokerId], positions: Mapping[BrokerId, Position]) -> bool:
    """Whether its log is one of the so many longest."""
    return sum(positions[other] > positions[broker] for other in given) < best
