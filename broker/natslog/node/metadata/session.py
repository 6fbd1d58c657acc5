"""The session: whether the metadata of this broker is recent enough to state positions.

Theory of operation. The broker repeatedly requests a barrier: a majority confirms the metadata leader, and everything
that was committed by then is applied here. The session lasts from the time when such a request was *sent*, not from its
answer: an answer may have waited in a socket, beside old heartbeats, while this process was stopped. Time is monotonic
and continues while the process is stopped.

Invariant. `SESSION_S` is shorter than the time without messages after which the metadata leader replaces a broker
(`SESSION_TICKS`) by more than the two heartbeats that may be between a request and the last message before it. While a
leader of a stream has a session, no other broker has therefore been appointed in its place because of missing messages.
Appointments for another reason (reports of its followers) are applied here a moment later: clients therefore compare
leader epochs as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from natslog.cluster.lease import Lease
from natslog.errors import NatslogError

_ASK_EVERY_S = 0.5
_ASK_AGAIN_S = 0.1
_MOST_QUESTIONS = 8


class Session:
    """For the event loop.

    Args:
        barrier: returns when the metadata here holds all that was committed when it was called.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, barrier: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic) -> None:
        self._barrier, self._clock = barrier, clock
        self._lease = Lease()

    def is_valid(self) -> bool:
        return self._lease.is_valid(self._clock())

    async def run(self) -> None:
        """Maintains the session; a slow request does not delay the next one."""
        questions: set[asyncio.Task[None]] = set()
        try:
            while True:
                if len(questions) < _MOST_QUESTIONS:
                    questions.add(asyncio.create_task(self._ask(), name="session"))
                answered, questions = await asyncio.wait(
                    questions, timeout=_ASK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
                for question in answered:
                    question.result()  # raises where it met a bug
                await asyncio.sleep(self._pause_s())
        finally:
            for question in questions:
                question.cancel()

    def _pause_s(self) -> float:
        asked_s = self._lease.asked_s
        is_recent = asked_s is not None and self._clock() - asked_s < 2 * _ASK_EVERY_S
        return _ASK_EVERY_S if is_recent else _ASK_AGAIN_S

    async def _ask(self) -> None:
        asked_s = self._clock()
        try:
            await self._barrier()
        except NatslogError:
            return  # no leader, or no majority: requested again in a moment
        self._lease.confirmed(asked_s)
