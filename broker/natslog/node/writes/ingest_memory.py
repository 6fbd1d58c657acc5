"""Shared state of ingest for all streams of a broker: memory for uncommitted messages, the counters of each
stream, and how long commits take.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from itertools import accumulate

from natslog.ingest.batches import BatchBuilder

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of all buckets but the last one, which has none."""
_BUILDERS_KEPT = 2


class IngestMemory:
    """Memory for messages received and not stored here yet, and for answers that wait until they are committed, over
    all streams of a broker; the event loop's but for `builder` and `take_back`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._spare: deque[BatchBuilder] = deque()

    def fits(self, size_bytes: int) -> bool:
        """One message fits into empty memory whatever its size."""
        return not self.used_bytes or self.used_bytes + size_bytes <= self.limit_bytes

    def take(self, size_bytes: int) -> bool:
        if not self.fits(size_bytes):
            return False
        self.used_bytes += size_bytes
        return True

    def charge(self, size_bytes: int) -> None:
        """Memory that is already used and cannot be refused any more: less is left for new messages."""
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0, "more was given back than taken"

    def builder(self) -> BatchBuilder:
        """An empty builder, a reused one if possible. From any thread."""
        try:
            return self._spare.pop()
        except IndexError:
            return BatchBuilder()

    def take_back(self, builder: BatchBuilder) -> None:
        """Of a builder whose rows are not used any more. From any thread."""
        builder.clear()
        if len(self._spare) < _BUILDERS_KEPT and not builder.is_bloated:
            self._spare.append(builder)


class LatencyHistogram:
    """How long commits take, counted in buckets. Written by the event loop only; may be read from any thread. One for
    each broker, not for each stream: its buckets are series of their own.
    """

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound (the last is `+Inf`) and how many commits took at most so long."""
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


class IngestStats:
    """Counters since the broker started; written by the event loop only. `ack_seconds`: of each commit that was
    replicated, the time from its first message to the acks.

    Args: `latency`: of the commits of all streams of the broker.
    """

    def __init__(self, latency: LatencyHistogram | None = None) -> None:
        self.latency = latency or LatencyHistogram()
        self.received = 0
        self.received_bytes = 0
        self.committed = 0
        self.duplicates = 0
        self.commits = 0
        self.commit_seconds = 0.0
        self.acked_commits = 0
        self.ack_seconds = 0.0
        self.acks_unsent = 0
        self.unread_envelopes = 0
        self.runs = 0
        self.run_duplicates = 0
        self.run_seconds = 0.0
        self.standby_stored = 0
        self.standby_dropped = 0
        self.refused: Counter[str] = Counter()
