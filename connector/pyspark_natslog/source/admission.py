"""How much of what waits one trigger takes: rows and bytes shared among streams, and waiting for a worthwhile batch.

Spark hands a Python source one built-in limit at a time, so the source combines its options itself: Spark's limit only
tells whether they apply (`ReadAllAvailable` of `Trigger.Once` says that they do not).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, ReadMinRows

from pyspark_natslog.source.options import Admission

Reach = Callable[[str, int | None], tuple[int, int]]
"""For a stream: the rows from its position that take at most so many bytes (None: all that wait), and their bytes."""


class Admitter:
    """Decides, trigger by trigger; remembers when it last let something through."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._admitted_at: float | None = None

    def default_limit(self) -> ReadLimit:
        """The limit that Spark is to hand back."""
        admission = self._admission
        if admission.max_rows is not None:
            return ReadMaxRows(admission.max_rows)
        if admission.max_bytes is not None:
            return ReadMaxBytes(admission.max_bytes)
        return ReadAllAvailable() if admission.min_rows is None else ReadMinRows(admission.min_rows)

    def admit(self, waiting: Mapping[str, int], reach: Reach, *, drains: bool) -> dict[str, int]:
        """How many rows of each stream are taken now.

        Args:
            waiting: rows that each stream has ready.
            drains: everything up to a fixed target is wanted (`availableNow`): nothing is waited for.
        """
        if not drains and self._is_too_early(sum(waiting.values())):
            return dict.fromkeys(waiting, 0)
        admitted = dict(waiting)
        if self._admission.max_rows is not None:
            admitted = share_limit(admitted, self._admission.max_rows)
        if self._admission.max_bytes is not None:
            admitted = _within_bytes(admitted, self._admission.max_bytes, reach)
        if any(admitted.values()):
            self._admitted_at = time.monotonic()
        return admitted

    def _is_too_early(self, rows: int) -> bool:
        min_rows = self._admission.min_rows
        if min_rows is None or rows >= min_rows or self._admitted_at is None:
            return False
        return time.monotonic() - self._admitted_at < self._admission.max_delay_s


def share_limit(waiting: Mapping[str, int], limit: int) -> dict[str, int]:
    """`limit` rows (or bytes) divided among streams in proportion to what waits in each; none that waits is starved,
    and all that fits is given out.
    """
    total = sum(waiting.values())
    if total <= limit:
        return dict(waiting)
    shares = {name: max(1, rows * limit // total) if rows else 0 for name, rows in waiting.items()}
    by_size = sorted(waiting, key=lambda name: (-waiting[name], name))
    while (left := limit - sum(shares.values())) != 0:  # rounding, at most a row or so for each stream
        for name in by_size:
            step = min(1, left, waiting[name] - shares[name]) if left > 0 else -min(1, -left, shares[name])
            shares[name] += step
            left -= step
    return shares


def _within_bytes(admitted: dict[str, int], max_bytes: int, reach: Reach) -> dict[str, int]:
    """Rows that take about `max_bytes`, at least one of each stream that waits."""
    sizes = {name: reach(name, None)[1] for name, rows in admitted.items() if rows}
    if sum(sizes.values()) <= max_bytes:
        return admitted
    shares = share_limit(sizes, max_bytes)
    within = {name: reach(name, max(1, share))[0] for name, share in shares.items()}
    return {name: min(rows, within.get(name, 0)) for name, rows in admitted.items()}
