"""Acks of commits that are stored here, until all in-sync replicas have them."""

from __future__ import annotations

import time
from collections import deque

from natslog.node.writes.commits import Outcome
from natslog.node.writes.ingest_memory import IngestMemory, IngestStats
from natslog.node.writes.refusals import Refusals


class WaitingAcks:
    """Of one stream, in the order of its commits. In the event loop. True while there are any."""

    def __init__(self, memory: IngestMemory, refusals: Refusals, stats: IngestStats) -> None:
        self._memory, self._refusals, self._stats = memory, refusals, stats
        self._waiting: deque[Outcome] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, outcome: Outcome) -> None:
        """It waits behind the others, and its acks use memory meanwhile."""
        self._waiting.append(outcome)
        self._memory.charge(outcome.held_bytes)

    def release(self, high_watermark: int) -> int:
        """Sends the acks of all that lies below; returns of how many rows."""
        waiting, stats, acked_rows = self._waiting, self._stats, 0
        while waiting and waiting[0].end_offset <= high_watermark:
            outcome = waiting.popleft()
            self._memory.give_back(outcome.held_bytes)
            stats.committed += outcome.stored
            stats.duplicates += outcome.duplicates
            seconds = time.monotonic() - outcome.begun_s
            stats.acked_commits += 1
            stats.ack_seconds += seconds
            stats.latency.observe(seconds)
            if outcome.answers is not None:
                self._refusals.send(outcome.answers, outcome.rows)
            if outcome.span is not None:
                outcome.end_span()
            acked_rows += outcome.rows
        return acked_rows

    def drop(self) -> None:
        """None of them is sent: publishers send the messages again."""
        for outcome in self._waiting:
            self._memory.give_back(outcome.held_bytes)
        self._waiting.clear()
