"""Whether small commits are made in the event loop: while the disk is fast, two thread switches cost more than a sync.

Theory of operation. Only writes in the event loop are measured: those of threads wait for the interpreter, too, so
that many busy streams would keep each other in threads for ever. When the disk has become slow, threads make the
commits, and now and then one is tried in the event loop: after a pause a hundred times as long as the last one took.
One slow write, as any disk has them now and then, is not a slow disk; one that takes very long is, in the event loop or
in a thread. The first commits are made by threads: nothing is known of the disk yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_QUICK_S = 0.001
_MOST_COUNTED_S = 0.004
_PAUSES = 100
_LONGEST_PAUSE_S = 30.0
_STALLED_S = 0.1


class DiskPace:
    """Of one broker; the event loop's but for `took_in_thread`. Args: `clock`: seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usual_s = _QUICK_S  # of a commit, an exponential mean
        self._next_attempt_s = math.inf

    @property
    def is_quick(self) -> bool:
        """Whether the next small commit may be made in the event loop."""
        return self._usual_s < _QUICK_S or self._clock() >= self._next_attempt_s

    def took(self, seconds: float) -> None:
        """To write and sync a small commit in the event loop."""
        self._usual_s += (min(seconds, _MOST_COUNTED_S) - self._usual_s) / 8
        if seconds >= _STALLED_S:
            self._usual_s = max(self._usual_s, _QUICK_S)
        if seconds >= _QUICK_S:
            self._postpone(seconds)

    def took_in_thread(self, seconds: float) -> None:
        """The same in a thread, with what it waited for the interpreter."""
        if seconds >= _STALLED_S:
            self._usual_s = max(self._usual_s, _QUICK_S)
            self._postpone(seconds)
        elif self._next_attempt_s == math.inf:
            self._next_attempt_s = self._clock()

    def _postpone(self, seconds: float) -> None:
        self._next_attempt_s = self._clock() + min(_PAUSES * seconds, _LONGEST_PAUSE_S)
