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
    parts = _gather([part for run in runs for part in _pieces(run, max(1, target_rows))], target_bytes, target_rows)
    while len(parts) < min_splits and (halved := _halve_largest(parts)):
        parts = halved
    return [
        Split(start=part[0][0], end=part[-1][1], rows=part[-1][1] - part[0][0], bytes=sum(size for _, _, size in part))
        for part in parts
    ]


def _pieces(run: Run, target_rows: int) -> list[Run]:
    """The run itself, or equal parts of it where it has more rows than a part may have."""
    start, end, size = run
    count = -(-(end - start) // target_rows)
    edges = [start + (end - start) * at // count for at in range(count + 1)]
    return [(low, high, size * (high - low) // (end - start)) for low, high in pairwise(edges)]


def _gather(pieces: Sequence[Run], target_bytes: int, target_rows: int) -> list[list[Run]]:
    """Neighbouring pieces as parts of about the target."""
    parts: list[list[Run]] = []
    size = 0
    for piece in pieces:
        _, high, length = piece
        if not parts or size + length // 2 > target_bytes or high - parts[-1][0][0] > target_rows:
            parts.append([])
            size = 0
        parts[-1].append(piece)
        size += length
    return parts


def _halve_largest(parts: Sequence[list[Run]]) -> list[list[Run]]:
    """One part more, on a boundary of runs where there is one; empty where each has one row. (Runs of one size need
    not add up to a target.)
    """
    able = [at for at, part in enumerate(parts) if len(part) > 1]
    able = able or [at for at, ((start, end, _), *_) in enumerate(parts) if end - start > 1]
    if not able:
        return []
    at = max(able, key=lambda one: sum(size for _, _, size in parts[one]))
    part = parts[at]
    if len(part) == 1:
        part = _pieces(part[0], -(-(part[0][1] - part[0][0]) // 2))
    middle = len(part) // 2
    return [*parts[:at], part[:middle], part[middle:], *parts[at + 1 :]]
