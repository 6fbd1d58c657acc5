"""The distinct subjects of messages: how many there are of each, and the first and last offset."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.covered import covered
from natslog.log.removed import Hidden

_ROWS_AT_LEAST = 1 << 17
_KEPT_BYTES = 32 * 1024 * 1024
COUNTS_SCHEMA = pa.schema(
    [("subject", pa.string()), ("count", pa.int64()), ("first", pa.int64()), ("last", pa.int64())],
)


@dataclass(frozen=True, slots=True)
class SubjectCounts:
    """The subjects of the messages that were visible below `end`.

    Attributes:
        table: `subject` (ascending), `count`, `first`, `last`: one row for each.
    """

    table: pa.Table
    end: int

    def covered_by(self, patterns: tuple[str, ...]) -> SubjectCounts:
        """Those that one of these wildcards covers."""
        return SubjectCounts(self.table.filter(covered(self.table.column("subject"), patterns)), self.end)

    def page(self, after: str | None, limit: int) -> pa.Table:
        """At most `limit` rows, of the subjects behind `after`."""
        subjects = self.table.column("subject")
        start = 0
        if after is not None:
            start = bisect_right(range(len(subjects)), after.encode(), key=lambda at: subjects[at].as_py().encode())
        return self.table.slice(start, limit)


class KeptCounts:
    """What was counted last in each of a broker's logs, of at most 32 MiB together: that of the log that was asked
    longest ago is dropped first. Thread-safe.
    """

    def __init__(self, most_bytes: int = _KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: dict[object, KnownCounts] = {}
        self._total_bytes = 0

    def of(self, index: object) -> KnownCounts | None:
        with self._lock:
            known = self._kept.pop(index, None)
            if known is not None:
                self._kept[index] = known
            return known

    def keep(self, index: object, known: KnownCounts) -> None:
        with self._lock:
            self._drop(index)
            self._kept[index] = known
            self._total_bytes += known.nbytes
            while self._total_bytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def drop(self, index: object) -> None:
        with self._lock:
            self._drop(index)

    def _drop(self, index: object) -> None:
        known = self._kept.pop(index, None)
        self._total_bytes -= known.nbytes if known is not None else 0


@dataclass(frozen=True, slots=True)
class KnownCounts:
    """Of the messages in `[start, counts.end)`, of which so many were hidden."""

    start: int
    hidden: int
    counts: SubjectCounts

    @property
    def nbytes(self) -> int:
        return int(self.counts.table.nbytes)

    def still_hold(self, start: int, end: int, hidden: Hidden) -> bool:
        """Whether the same of these messages are visible: what is hidden stays hidden."""
        own_end = self.counts.end
        return self.start == start and own_end <= end and hidden.count(start, own_end) == self.hidden


def combined(tables: Iterable[pa.Table]) -> pa.Table:
    """Counts of several ranges, each with ascending subjects, as one such table. They are added up whenever there are
    as many rows as distinct subjects, so that the memory is that of the distinct subjects.
    """
    waiting, rows = [COUNTS_SCHEMA.empty_table()], 0
    for table in tables:
        if not len(table):
            continue
        waiting.append(table)
        rows += len(table)
        if rows >= max(_ROWS_AT_LEAST, len(waiting[0])):
            waiting, rows = [_grouped(waiting)], 0
    return _grouped(waiting).combine_chunks()


def _grouped(tables: list[pa.Table]) -> pa.Table:
    """One row for each subject, ascending."""
    filled = [table for table in tables if len(table)]
    if len(filled) < 2:
        return filled[0] if filled else tables[0]
    rows = pa.concat_tables(filled)
    encoded = rows.column("subject").combine_chunks().dictionary_encode()
    codes, subjects = encoded.indices.to_numpy(), encoded.dictionary
    order = np.argsort(codes, kind="stable")
    begins = np.searchsorted(codes[order], np.arange(len(subjects)))
    added = [
        one.reduceat(rows.column(name).to_numpy()[order], begins)
        for name, one in (("count", np.add), ("first", np.minimum), ("last", np.maximum))
    ]
    grouped = pa.Table.from_arrays([subjects, *map(pa.array, added)], schema=COUNTS_SCHEMA)
    return grouped.take(pc.sort_indices(subjects))
