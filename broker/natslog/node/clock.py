"""The two clocks of a broker. Stored timestamps come from `now_us`; windows and timeouts from the monotonic clock."""

from __future__ import annotations

import time


def now_us() -> int:
    """Wall clock, microseconds since 1970 UTC. It may jump; a log never lets its timestamps go back."""
    return time.time_ns() // 1000


def monotonic_us() -> int:
    """Microseconds since some moment; never goes back and never jumps."""
    return time.monotonic_ns() // 1000


def monotonic_ms() -> float:
    """The same in milliseconds."""
    return time.monotonic() * 1000
