"""How long commits take, counted in buckets: one histogram for all streams of a broker."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of all buckets but the last one, which has none."""


class LatencyHistogram:
    """Written by the event loop only; may be read from any thread. One for each broker, not for each stream: its
    buckets are series of their own.
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
