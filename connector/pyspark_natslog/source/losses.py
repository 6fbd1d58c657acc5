"""How much a query has lost, for its progress."""

from __future__ import annotations

from typing import Any


class Losses:
    """The losses that a query has accepted since it was started; a copy in another process has none.

    Spark asks for the same range more than once, so losses with the same start are one. A stream that is created again
    may have others with this start: then the number is too small, or unknown.
    """

    def __init__(self) -> None:
        self._ends: dict[str, dict[int, int | None]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Losses, ()

    def add(self, stream: str, start: int, end: int | None) -> None:
        """Offsets `[start, end)` are lost; `end` None where it is not known."""
        ends = self._ends.setdefault(stream, {})
        known = ends.get(start, start)
        ends[start] = None if end is None or known is None else max(known, end)

    def rows_of(self, stream: str) -> int | None:
        """Offsets that are lost, at most as many messages; None where the end of a loss is not known."""
        rows = 0
        for start, end in self._ends.get(stream, {}).items():
            if end is None:
                return None
            rows += end - start
        return rows
