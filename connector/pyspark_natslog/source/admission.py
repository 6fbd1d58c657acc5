"""How many waiting rows one trigger takes: limits of rows and bytes are shared among streams, and a batch may wait for
a minimum of rows.

Invariant: where a limit is smaller than the number of streams that have waiting rows, those come first that have waited
for the most triggers: over several triggers every stream is read.

Spark gives a Python source one built-in limit at a time, so the source combines its options itself. Spark's limit only
determines whether they apply (they do not with `ReadAllAvailable`, of `Trigger.Once`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, ReadMinRows

from pyspark_natslog.source.options import Admission

Reach = Callable[[str, int | None], tuple[int, int | None]]
"""For a stream: the rows from its position that take at most this many bytes (None: all that wait), and their bytes
(None: unknown to this reader).
"""


class Admitter:
    """Determines how much each trigger takes; stores the time of the last trigger that took rows, and which streams it
    took rows of.
    """

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

    def admit(self, waiting: Mapping[str, int], reach: Reach, *, drains: bool) -> dict[str, int]:
        """The number of rows of each stream that are taken now.

        Args:
            waiting: the rows of each stream that can be read.
            drains: everything up to a fixed target is read (`availableNow`), without waiting for a minimum.
        """
        if not drains and self._is_too_early(sum(waiting.values())):
            return dict.fromkeys(waiting, 0)
        admitted = {name: waiting[name] for name in sorted(waiting, key=lambda name: self._last_turn.get(name, 0))}
        if self._admission.max_rows is not None:
            admitted = share_limit(admitted, self._admission.max_rows)
        if self._admission.max_bytes is not None:
            admitted = _within_bytes(admitted, self._admission.max_bytes, reach)
        if any(admitted.values()):
            self._admitted_at = time.monotonic()
            self._note_turn(admitted)
        return admitted

    def due_in_s(self, waiting_rows: int) -> float:
        """How long a trigger without new rows may wait for some, if so many rows wait for a minimum already."""
        if self._admission.min_rows is None or not waiting_rows or self._admitted_at is None:
            return float("inf")
        return max(0.0, self._admitted_at + self._admission.max_delay_s - time.monotonic())

    def _note_turn(self, admitted: Mapping[str, int]) -> None:
        self._turns += 1
        before = self._last_turn
        self._last_turn = {name: self._turns if rows else before.get(name, 0) for name, rows in admitted.items()}

    def _is_too_early(self, rows: int) -> bool:
        min_rows = self._admission.min_rows
        if min_rows is None or rows >= min_rows or self._admitted_at is None:
            return False
        return time.monotonic() - self._admitted_at < self._admission.max_delay_s


def share_limit(waiting: Mapping[str, int], limit: int) -> dict[str, int]:
    """`limit` rows (or bytes) divided among streams in proportion to what waits in each. Each stream with waiting rows
    gets at least one; where the limit does not allow this, the first ones do. The whole limit is used.
    """
    total = sum(waiting.values())
    if total <= limit:
        return dict(waiting)
    nonempty = [name for name, rows in waiting.items() if rows]
    if limit < len(nonempty):
        return dict.fromkeys(waiting, 0) | dict.fromkeys(nonempty[:limit], 1)
    shares = {name: max(1, rows * limit // total) if rows else 0 for name, rows in waiting.items()}
    by_size = sorted(waiting, key=lambda name: (-waiting[name], name))
    while (left := limit - sum(shares.values())) != 0:  # rounding, at most a row or so for each stream
        for name in by_size:
            step = min(1, left, waiting[name] - shares[name]) if left > 0 else -min(1, -left, max(0, shares[name] - 1))
            shares[name] += step
            left -= step
    return shares


def _within_bytes(admitted: dict[str, int], max_bytes: int, reach: Reach) -> dict[str, int]:
    """Rows that take about `max_bytes`, at least one of each stream that has waiting rows. Where sizes are unknown, the
    limit is divided in proportion to rows, and the brokers apply the shares.
    """
    waiting = {name: rows for name, rows in admitted.items() if rows}
    sizes = {name: size for name in waiting if (size := reach(name, None)[1]) is not None}
    if len(sizes) < len(waiting):
        shares = {name: max_bytes * rows // sum(waiting.values()) for name, rows in waiting.items()}
    elif sum(sizes.values()) <= max_bytes:
        return admitted
    else:
        shares = share_limit(sizes, max_bytes)
    within = {name: reach(name, max(1, share))[0] for name, share in shares.items()}
    return {name: min(rows, within.get(name, 0)) for name, rows in admitted.items()}
