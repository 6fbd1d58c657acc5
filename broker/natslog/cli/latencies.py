"""Percentiles of many latencies in bounded memory.

Theory of operation. Latencies are counted in buckets, each 1 % wider than the one before, from 1 µs to over an hour. A
percentile is the upper bound of its bucket: at most 1 % above the true value, and never above the maximum, which is
exact.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_LEAST_S = 1e-6
_GROWTH = math.log(1.01)
_BUCKETS = 2300
_SHOWN = (50, 90, 99)


class Latencies:
    """Not thread-safe: each thread has its own, and `merge` adds them up."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)
        self._max_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """So many of this latency. Negative ones count as 0."""
        bucket = int(math.log(max(seconds, _LEAST_S) / _LEAST_S) / _GROWTH)
        self._counts[min(bucket, _BUCKETS - 1)] += count
        self._max_s = max(self._max_s, seconds)

    def add_each(self, seconds: npt.NDArray[np.float64]) -> None:
        """One of each. Negative ones count as 0."""
        if len(seconds):
            buckets = (np.log(np.maximum(seconds, _LEAST_S) / _LEAST_S) / _GROWTH).astype(np.int64)
            self._counts += np.bincount(np.minimum(buckets, _BUCKETS - 1), minlength=_BUCKETS)
            self._max_s = max(self._max_s, float(seconds.max()))

    def merge(self, other: Latencies) -> None:
        self._counts += other._counts
        self._max_s = max(self._max_s, other._max_s)

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def percentile_s(self, percent: float) -> float:
        """In seconds; 0 where there are none."""
        if not self.count:
            return 0.0
        rank = max(1, math.ceil(self.count * percent / 100))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(_LEAST_S * math.exp((bucket + 1) * _GROWTH), self._max_s)

    def to_json(self) -> dict[str, float] | None:
        """`{p50, p90, p99, max}` in milliseconds; None where there are none."""
        if not self.count:
            return None
        found = {f"p{percent}": self.percentile_s(percent) for percent in _SHOWN} | {"max": self._max_s}
        return {name: round(seconds * 1000, 3) for name, seconds in found.items()}
