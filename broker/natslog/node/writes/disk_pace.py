"""Whether small commits are made in the event loop: while the disk is fast, two thread switches cost more than a sync.

Theory of operation. Only writes in the event loop are measured: those of threads wait for the interpreter, too, so
that many busy streams would keep each other in threads for ever. A disk that takes `_QUICK_S` or longer is used by the
event loop only for a part of the time; one that takes `_SLOW_S` or longer, by threads, and now and then a commit is
tried in the event loop: after a pause a hundred times as long as the last one took.
One slow write, as any disk has them now and then, is not a slow disk; one that takes very long is, in the event loop or
in a thread. The first commits are made by threads: nothing is known of the disk yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_QUICK_S, _SLOW_S = 0.001, 0.003
_MOST_COUNTED_S = 0.004
_SHARE_OVER_S, _MOST_BLOCKED = 0.1, 0.5
_PAUSES = 100
_LONGEST_PAUSE_S = 30.0
_STALLED_S = 0.1


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
