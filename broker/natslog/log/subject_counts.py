"""The distinct subjects of messages: how many there are of each, and the first and last offset."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.covered import covered

_ROWS_AT_LEAST = 1 << 17
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
