"""How much one trigger takes: the limits that are sent with its plan, and which streams come first.

Invariant. Where a limit is smaller than the number of streams that have waiting rows, those come first that have waited
for the most triggers: over several triggers every stream is read.

Spark gives a Python source one built-in limit at a time, so the source combines its options itself. Spark's limit only
determines whether they apply (they do not with `ReadAllAvailable`, of `Trigger.Once`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, ReadMinRows

from natslog.planning import ReadLimits
from pyspark_natslog.source.options import Admission


class Admitter:
    """Stores the time of the last trigger that took rows, and which streams it took rows of."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._admitted_at: float | None = None
        self._last_turn: dict[str, int] = {}
        self._turns = 0

    def default_limit(self) -> ReadLimit:
        """The limit that Spark passes to `latestOffset`."""
        admission = self._admission
        if admission.max_rows is not None:
            return ReadMaxRows(admission.max_rows)
        if admission.max_bytes is not None:
            return ReadMaxBytes(admission.max_bytes)
        return ReadAllAvailable() if admission.min_rows is None else ReadMinRows(admission.min_rows)

    def limits(self, *, drains: bool) -> ReadLimits:
        """Those of this trigger.

        Args:
            drains: everything up to a fixed target is read (`availableNow`), without waiting for a minimum.
        """
        admission = self._admission
        waits = not drains and self._admitted_at is not None and self._left_s(self._admitted_at) > 0
        min_rows = admission.min_rows if waits else None
        return ReadLimits(min_rows=min_rows, max_rows=admission.max_rows, max_bytes=admission.max_bytes)

    def in_turn(self, names: Iterable[str]) -> list[str]:
        """Those first that have waited longest."""
        return sorted(names, key=lambda name: self._last_turn.get(name, 0))

    def note(self, names: Collection[str], taken: Collection[str]) -> None:
        """A trigger has planned these streams, and took rows of some."""
        if taken:
            self._admitted_at = time.monotonic()
            self._turns += 1
            before = self._last_turn
            self._last_turn = {name: self._turns if name in taken else before.get(name, 0) for name in names}

    def due_in_s(self, waiting_rows: int) -> float:
        """How long a trigger without new rows may wait for some, if so many rows wait for a minimum already."""
        if self._admission.min_rows is None or not waiting_rows or self._admitted_at is None:
            return float("inf")
        return max(0.0, self._left_s(self._admitted_at))

    def _left_s(self, admitted_at: float) -> float:
        return admitted_at + self._admission.max_delay_s - time.monotonic()
