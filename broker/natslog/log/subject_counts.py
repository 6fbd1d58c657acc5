"""The distinct subjects of messages: how many there are of each, and the first and last offset."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from natslog.arrow.covered import covered

_ROWS_AT_LEAST = 1 << 17
_GROUPED = [("count", "sum"), ("first", "min"), ("last", "max")]
_NAMES = {"subject": "subject", "count_sum": "count", "first_min": "first", "last_max": "last"}
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
    """Counts of several ranges as one table with ascending subjects. They are added up whenever there are as many rows
    as distinct subjects, so that the memory is that of the distinct subjects.
    """
    known, waiting, rows = COUNTS_SCHEMA.empty_table(), list[pa.Table](), 0
    for table in tables:
        waiting.append(table)
        rows += len(table)
        if rows >= max(_ROWS_AT_LEAST, len(known)):
            known, waiting, rows = _grouped([known, *waiting]), [], 0
    if waiting:
        known = _grouped([known, *waiting]) if len(known) or len(waiting) > 1 else waiting[0]
    return known.sort_by("subject").combine_chunks()


def _grouped(tables: list[pa.Table]) -> pa.Table:
    """One row for each subject."""
    grouped = pa.concat_tables(tables).group_by("subject", use_threads=False).aggregate(_GROUPED)
    return grouped.select(list(_NAMES)).rename_columns(list(_NAMES.values())).cast(COUNTS_SCHEMA)
