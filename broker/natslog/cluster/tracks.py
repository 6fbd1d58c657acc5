"""What a leader tracks of one log of its stream: the log itself, and how far each follower has it.

A stream has a log of messages and perhaps a companion log. The leader has a track for each; who is in sync is one
decision for both (`cluster.roles.LeaderReplica`).

Invariants: as for the high watermark (HW) in `cluster.roles`. A follower's end offset counts only in the life of the
follower in which it was sent, and with the version of the record that it was sent with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from natslog.model import BrokerId

_END_NOTED_EVERY_MS = 100.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """`lag_ms`: a follower that lacks what was there so long ago, or that has everything and has sent nothing for this
    time, leaves the ISR. `unresponsive_ms`: a leader that sends nothing for this time is reported. `propose_again_ms`:
    after this time, a change without a known outcome is proposed again. `wait_after_ms`: HW waits for a follower that
    keeps up for so long and does not reach it.
    """

    lag_ms: float = 3000.0
    unresponsive_ms: float = 2200.0
    propose_again_ms: float = 2000.0
    wait_after_ms: float = 5000.0


@dataclass(slots=True)
class CopyProgress:
    """A follower's copy of a log. `end_offset` is None until the follower has sent a request in this epoch, and, once
    it is out of the ISR, until it sends a request with the record version that removed it: its earlier data may be the
    reason for the removal (damage). It may have that version before the leader does (`known_version`); for an idle log
    it sends one request, and no further one. `caught_up_ms`: when it last had everything that the leader had.
    """

    caught_up_ms: float
    known_version: int = 0
    end_offset: int | None = None


class Track:
    """Of one log, for one epoch.

    Args:
        me: the leader. `followers`: the other replicas. `log_end_offset`: where its epoch starts.
        high_watermark: what is known to be committed. `now_ms`: of a clock that never jumps.
    """

    def __init__(
        self,
        me: BrokerId,
        followers: Iterable[BrokerId],
        *,
        log_end_offset: int,
        high_watermark: int,
        now_ms: float,
        timeouts: Timeouts,
    ) -> None:
        self.me = me
        self.epoch_start = log_end_offset
        self.log_end_offset = log_end_offset
        self.high_watermark = high_watermark
        self.copies = {broker: CopyProgress(now_ms) for broker in followers}
        self._ends: deque[tuple[float, int]] = deque([(now_ms, log_end_offset)])  # (when, log end offset), lately
        self._leaps: deque[tuple[int, int]] = deque()  # what HW passes at once, in order: runs
        if high_watermark < log_end_offset:  # it may hold runs; none of it is exposed before all of it is committed
            self._leaps.append((high_watermark, log_end_offset))
        self._timeouts = timeouts

    # ---- what happened ----

    def follow(self, followers: Iterable[BrokerId], now_ms: float) -> None:
        """These are the other replicas from now on."""
        self.copies = {broker: self.copies.get(broker) or CopyProgress(now_ms) for broker in followers}

    def left_isr(self, broker: BrokerId, version: int) -> None:
        """By this version of the record."""
        copy = self.copies[broker]
        if copy.known_version < version:
            copy.end_offset = None

    def begin_life(self, broker: BrokerId) -> None:
        """The follower has restarted: what it had before does not count."""
        self.copies[broker].end_offset = None

    def appended(self, end_offset: int, run_start: int | None, now_ms: float | None) -> None:
        """As `LeaderReplica.appended`."""
        assert end_offset >= self.log_end_offset, "a leader never cuts its log"
        if now_ms is not None and self.copies:
            self.note_end(now_ms)
        if run_start is not None:
            assert run_start == self.log_end_offset, "a run is told of as a whole"
            self._leaps.append((run_start, end_offset))
        self.log_end_offset = end_offset

    def fetched(self, follower: BrokerId, offset: int, now_ms: float, version: int) -> None:
        """A follower has everything below `offset`, and knows the record's `version`."""
        copy = self.copies[follower]
        self.note_end(now_ms)
        if offset >= self.log_end_offset or self._moves_on_in_run(copy, offset):
            copy.caught_up_ms = now_ms
        else:
            copy.caught_up_ms = max(copy.caught_up_ms, self._end_was_at(offset))
        copy.known_version = version
        copy.end_offset = offset

    def note_end(self, now_ms: float) -> None:
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

    def _moves_on_in_run(self, copy: CopyProgress, offset: int) -> bool:
        """A run becomes visible when it is complete, however long it is: a follower that copies it without a pause
        counts as caught up.
        """
        has_moved = copy.end_offset is not None and offset > copy.end_offset
        return has_moved and any(self.epoch_start <= start <= offset < end for start, end in self._leaps)

    # ---- what follows from it ----

    def advance(self, counted: Iterable[BrokerId]) -> None:
        """HW is the least end offset of these replicas, if all are known."""
        lowest = self.log_end_offset
        for broker in counted:
            if broker != self.me:
                copy = self.copies.get(broker)
                if copy is None or copy.end_offset is None:
                    return
                lowest = min(lowest, copy.end_offset)
        self.high_watermark = max(self.high_watermark, self._whole_runs_below(lowest))

    def _whole_runs_below(self, end_offset: int) -> int:
        """The same, or where the run starts that it is inside of."""
        while self._leaps and self._leaps[0][1] <= end_offset:
            self._leaps.popleft()
        return min(end_offset, self._leaps[0][0]) if self._leaps else end_offset

    def end_of(self, broker: BrokerId) -> int | None:
        """How far this replica has the log; None if that is unknown."""
        if broker == self.me:
            return self.log_end_offset
        copy = self.copies.get(broker)
        return copy.end_offset if copy is not None else None

    @property
    def is_exposed(self) -> bool:
        """Whether all of earlier epochs is committed."""
        return self.high_watermark >= self.epoch_start

    @property
    def is_committed(self) -> bool:
        """Whether everything is."""
        return self.high_watermark == self.log_end_offset

    @property
    def is_quiet(self) -> bool:
        """Whether everything is committed, and every follower has it."""
        ends = [copy.end_offset for copy in self.copies.values()]
        return self.is_committed and all(end is not None and end >= self.log_end_offset for end in ends)

    def may_join(self, broker: BrokerId) -> bool:
        """Whether it has what a member of the ISR must have of this log."""
        end_offset = self.end_of(broker)
        return end_offset is not None and end_offset >= max(self.high_watermark, self.epoch_start)

    def keeps_up(self, broker: BrokerId, now_ms: float) -> bool:
        """Whether it is known that a follower has what was there `lag_ms` ago, and all of earlier epochs."""
        end_offset = self.end_of(broker)
        if end_offset is None or end_offset < self.epoch_start:
            return False
        return end_offset >= self.log_end_offset or now_ms - self._end_was_at(end_offset) <= self._timeouts.lag_ms

    def lags(self, broker: BrokerId, now_ms: float, contact_ms: float) -> bool:
        """Whether a follower lacks what was there `lag_ms` ago, or has everything and is not in contact."""
        copy = self.copies[broker]
        caught_up_ms = copy.caught_up_ms
        if copy.end_offset is not None:
            has_everything = copy.end_offset >= self.log_end_offset
            caught_up_ms = max(caught_up_ms, contact_ms if has_everything else self._end_was_at(copy.end_offset))
        return now_ms - caught_up_ms > self._timeouts.lag_ms
