"""The two clocks of a broker. Stored timestamps come from `now_us`; windows and timeouts from the monotonic clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress


def now_us() -> int:
    """Wall clock, microseconds since 1970 UTC. It may jump; a log never lets its timestamps go back."""
    return time.time_ns() // 1000


def monotonic_us() -> int:
    """Microseconds since some moment; never goes back and never jumps."""
    return time.monotonic_ns() // 1000


def monotonic_ms() -> float:
    """The same in milliseconds."""
    return time.monotonic() * 1000


async def wait_for_at_most(seconds: float, coming: Awaitable[object]) -> None:
    """Returns when it has come, or after so long without it: the caller looks again. Others run meanwhile, always."""
    await asyncio.sleep(0)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await coming
