"""The clocks of a broker's machine. Timestamps and expiry use stream time (`cluster.stream_time`), windows and timeouts
use the monotonic clock; the wall clock alone decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress

_ELAPSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_us() -> int:
    """Wall clock, microseconds since 1970 UTC. It may jump."""
    return time.time_ns() // 1000


def elapsed_us() -> int:
    """Microseconds since the machine started, where possible also those in which it was suspended: never jumps, and is
    the same for all processes until the next start of the machine.
    """
    return time.clock_gettime_ns(_ELAPSED) // 1000


def monotonic_ms() -> float:
    """Milliseconds since some moment; never goes back and never jumps."""
    return time.monotonic() * 1000


async def wait_for_at_most(seconds: float, coming: Awaitable[object]) -> None:
    """Returns when the event has occurred, or after this time without it: the caller checks again. Other tasks always
    run meanwhile.
    """
    await asyncio.sleep(0)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await coming
