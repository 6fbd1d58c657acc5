"""Virtual time, chance and a bad network under one seed: the ground that simulations of the pure cores stand on.

Everything that happens is an action in one queue, ordered by (time, number of its making), and all chance comes from
one generator: the same seed gives the same trace.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any


class World:
    """Args: seed; the network delays each message `delay_ms` (low, high), drops and doubles some."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_ms = 0.0
        self.random = Random(seed)
        self.delay_ms = (1.0, 12.0)
        self.drop_share = 0.0
        self.double_share = 0.0
        self.late_share = 0.0
        self.late_ms = (50.0, 1500.0)
        self.cut: set[tuple[int, int]] = set()
        self.events = 0
        self._numbers = count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self.trace: list[str] | None = None

    def note(self, text: str) -> None:
        """Into the trace: always hashed, kept as text where `trace` is a list."""
        self._digest.update(text.encode())
        if self.trace is not None:
            self.trace.append(f"{self.now_ms:9.1f} {text}")

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def after(self, delay_ms: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_ms + delay_ms, next(self._numbers), action))

    def send(self, sender: int, to: int, deliver: Callable[[Any], None], message: Any) -> None:
        """Delivers later, perhaps twice, late, or never; what is cut when it would arrive is lost."""
        chance = self.random
        if chance.random() < self.drop_share:
            return
        copies = 2 if chance.random() < self.double_share else 1
        for _ in range(copies):
            delay_ms = chance.uniform(*self.delay_ms)
            if self.late_share and chance.random() < self.late_share:
                delay_ms += chance.uniform(*self.late_ms)
            self.after(delay_ms, lambda: None if (sender, to) in self.cut else deliver(message))

    def run_until(self, end_ms: float, check: Callable[[], None] | None = None) -> None:
        """Does what is due, one action after another; `check` runs after each."""
        while self._queue and self._queue[0][0] <= end_ms:
            self.now_ms, _, action = heapq.heappop(self._queue)
            action()
            self.events += 1
            if check is not None:
                check()
        self.now_ms = end_ms
