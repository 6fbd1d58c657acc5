"""Slots for work with limited concurrency: clients on different hosts take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from natslog.errors import Overloaded


class FairSlots:
    """Of the event loop.

    Args:
        slots: how many may be taken at once.
        most_waiting: how many requests may wait for one, and for how long, in seconds.
    """

    def __init__(self, slots: int, most_waiting: int, wait_s: float) -> None:
        self._free = slots
        self._most_waiting, self._wait_s = most_waiting, wait_s
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by host; the one whose turn is next comes first
        self.waiting = 0

    @asynccontextmanager
    async def slot(self, host: str) -> AsyncIterator[None]:
        """Raises Overloaded: too many requests wait already, or this one has waited for too long."""
        await self._taken(host)
        try:
            yield
        finally:
            self._pass_on()

    async def _taken(self, host: str) -> None:
        if self._free:
            self._free -= 1
            return
        if self.waiting >= self._most_waiting:
            raise Overloaded(
                f"{self.waiting} requests are already waiting for responses of this kind: repeat the request in a "
                "moment"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, deque()).append(turn)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:  # the deadline has passed, or the client has left
            if turn.cancelled():
                self._forget(host, turn)
            else:
                self._pass_on()  # the slot was already assigned
            if not isinstance(error, TimeoutError):
                raise
            raise Overloaded(
                f"this request waited for {self._wait_s:.0f} s because many other clients request responses of this "
                "kind: repeat it in a moment, or request less at once (max_bytes)"
            ) from None

    def _forget(self, host: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(host, deque())
        if turn not in turns:
            return  # it was passed over
        turns.remove(turn)
        self.waiting -= 1
        if not turns:
            del self._waiting[host]

    def _pass_on(self) -> None:
        while self._waiting:
            host = next(iter(self._waiting))
            turns = self._waiting.pop(host)
            turn = turns.popleft()
            self.waiting -= 1
            if turns:
                self._waiting[host] = turns  # behind the other hosts
            if not turn.cancelled():  # it is where its request was cancelled, and has not run since
                turn.set_result(None)
                return
        self._free += 1
