"""When a small commit begins (`CommitTiming`), and whether the event loop makes it itself (`DiskPace`).

Theory of operation of `CommitTiming`, for streams with several replicas; it is pure. A follower requests the next
messages when it has stored the last ones. A commit that begins before that is copied no sooner, and costs as much
processor time as one of many messages, so it waits: until the high watermark has passed everything, at most
`COPIES_WITHIN_S`.

Publishers that keep a number of messages in flight send as many as were acked. If the first of them began a commit, the
rest would be in the next one, and from then on two groups would take turns. So a commit also waits for as many messages
as were acked just now, at most 1 ms or half of the time that their copies took. Where most of them do not come, because
publishers do not wait for acks, the next acks are followed by no such pause, and after each failure by twice as many.

Theory of operation of `DiskPace`. While the disk is fast, two thread switches cost more than a sync. Only writes in the
event loop are measured: those of threads wait for the interpreter, too, so that many busy streams would keep each other
in threads. A disk that takes `_QUICK_S` or longer is used by the event loop only for a part of the time; one that takes
`_SLOW_S` or longer, by threads, and now and then a commit is tried in the event loop: after a pause a hundred times as
long as the last one took. One slow write, as any disk has them now and then, is not a slow disk; one that takes very
long is, in the event loop or in a thread. The first commits are made by threads: nothing is known of the disk yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

COPIES_WITHIN_S = 0.005
_RETURN_WITHIN_S, _RETURN_SHARE, _MOST_RETURNED = 0.001, 0.5, 0.75
_MOST_SKIPPED = 64

_QUICK_S, _SLOW_S = 0.001, 0.003
_MOST_COUNTED_S = 0.004
_SHARE_OVER_S, _MOST_BLOCKED = 0.1, 0.5
_PAUSES = 100
_LONGEST_PAUSE_S = 30.0
_STALLED_S = 0.1


class CommitTiming:
    """Of one stream. Times are seconds of a clock that never goes back."""

    def __init__(self) -> None:
        self._copying_until_s = self._copied_from_s = 0.0
        self._expected_rows = 0
        self._expected_until_s = 0.0
        self._skipped = self._left_to_skip = 0

    def copying(self, now_s: float) -> None:
        """A commit is stored here; copies of it are awaited."""
        if now_s >= self._copying_until_s:
            self._copied_from_s = now_s
        self._copying_until_s = now_s + COPIES_WITHIN_S

    def acked(self, rows: int, gathered_rows: int, now_s: float, *, is_last: bool) -> None:
        """Copies of so many rows exist, and their acks are sent.

        Args:
            gathered_rows: those that wait for a commit. is_last: no copies of other commits are awaited.
        """
        if is_last:
            self._copying_until_s = 0.0
        if self._left_to_skip:
            self._left_to_skip -= 1
            return
        self._expected_rows = gathered_rows + rows
        took_s = min(now_s - self._copied_from_s, COPIES_WITHIN_S)
        self._expected_until_s = now_s + max(_RETURN_WITHIN_S, _RETURN_SHARE * took_s)

    def pause_s(self, rows: int, now_s: float) -> float:
        """How long a commit of so many rows has to wait, if no more come; 0: it begins now, which ends what was
        expected.
        """
        if now_s < self._copying_until_s:
            return self._copying_until_s - now_s
        expected_rows, left_s = self._expected_rows, self._expected_until_s - now_s
        if rows < expected_rows and left_s > 0:
            return left_s
        if expected_rows:
            has_failed = rows < _MOST_RETURNED * expected_rows
            self._skipped = min(2 * self._skipped + 1, _MOST_SKIPPED) if has_failed else 0
            self._left_to_skip, self._expected_rows = self._skipped, 0
        return 0.0


class DiskPace:
    """Of one broker; the event loop's but for `took_in_thread`. Args: `clock`: seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usual_s = _SLOW_S  # of a commit, an exponential mean
        self._blocked_s = 0.0  # for how long the event loop has waited for the disk, lately
        self._blocked_at_s = clock()
        self._next_attempt_s = math.inf

    @property
    def is_quick(self) -> bool:
        """Whether the next small commit may be made in the event loop."""
        if self._usual_s < _QUICK_S:
            return True
        now_s = self._clock()
        is_bearable = self._usual_s < _SLOW_S and self._blocked_until(now_s) < _MOST_BLOCKED * _SHARE_OVER_S
        return is_bearable or now_s >= self._next_attempt_s

    def _blocked_until(self, now_s: float) -> float:
        """Of the last `_SHARE_OVER_S`, about."""
        passed_s, self._blocked_at_s = now_s - self._blocked_at_s, now_s
        self._blocked_s *= max(0.0, 1 - passed_s / _SHARE_OVER_S)
        return self._blocked_s

    def took(self, seconds: float) -> None:
        """To write and sync a small commit in the event loop."""
        self._usual_s += (min(seconds, _MOST_COUNTED_S) - self._usual_s) / 8
        self.blocked(seconds)
        if seconds >= _STALLED_S:
            self._usual_s = max(self._usual_s, _SLOW_S)
        if seconds >= _QUICK_S:
            self._postpone(seconds)

    def blocked(self, seconds: float) -> None:
        """The event loop has waited so long for the disk."""
        self._blocked_s = self._blocked_until(self._clock()) + seconds

    def took_in_thread(self, seconds: float) -> None:
        """The same in a thread, with what it waited for the interpreter."""
        if seconds >= _STALLED_S:
            self._usual_s = max(self._usual_s, _SLOW_S)
            self._postpone(seconds)
        elif self._next_attempt_s == math.inf:
            self._next_attempt_s = self._clock()

    def _postpone(self, seconds: float) -> None:
        self._next_attempt_s = self._clock() + min(_PAUSES * seconds, _LONGEST_PAUSE_S)
