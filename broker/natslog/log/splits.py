"""Cutting a range into parts for parallel readers: pure arithmetic over runs of `(start, end, bytes)`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from natslog.model import Split

Run: TypeAlias = tuple[int, int, int]
"""Offsets `[start, end)` that lie together, and their bytes: one batch."""


def cut_into_splits(
    runs: Sequence[Run], *, max_bytes: int | None, max_rows: int | None, min_splits: int
) -> list[Split]:
    """Parts on run boundaries where the limits allow it; a run is cut inside for `max_rows`, or where there are fewer
    runs than `min_splits`.

    Args:
        runs: in offset order, none empty.
        max_bytes: a part is larger only where a single run is. `max_rows`: never more.
        min_splits: how many parts at least, as far as there are rows.
    """
    if not runs:
        return []
    total_bytes, total_rows = sum(size for _, _, size in runs), sum(end - start for start, end, _ in runs)
    target_bytes = max(1, min(max_bytes or total_bytes, -(-total_bytes // min_splits)))
    target_rows = max_rows or total_rows
    if len(runs) < min_splits:
        target_rows = min(target_rows, -(-total_rows // min_splits))
    return _gather([part for run in runs for part in _pieces(run, max(1, target_rows))], target_bytes, target_rows)


def _pieces(run: Run, target_rows: int) -> list[Run]:
    """The run itself, or equal parts of it where it has more rows than a part may have."""
    start, end, size = run
    count = -(-(end - start) // target_rows)
    edges = [start + (end - start) * at // count for at in range(count + 1)]
    return [(low, high, size * (high - low) // (end - start)) for low, high in pairwise(edges)]


def _gather(pieces: Sequence[Run], target_bytes: int, target_rows: int) -> list[Split]:
    splits: list[Split] = []
    start, end, size = pieces[0][0], pieces[0][0], 0
    for low, high, length in pieces:
        if end > start and (size + length // 2 > target_bytes or high - start > target_rows):
            splits.append(Split(start=start, end=end, rows=end - start, bytes=size))
            start, size = low, 0
        end, size = high, size + length
    splits.append(Split(start=start, end=end, rows=end - start, bytes=size))
    return splits
