"""The records of a companion log: as rows of the ordinary batch format, and back; and what each kind of them states.

A record is one row: `value` holds its bytes, `subject` its kind. No record has a key or headers. Kinds of consumers:
`consumer_records`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.log import StreamLog

REMOVED = "removed"
"""Kind of the records that name removed offsets, as a bitmap (`natslog.log.removed`)."""
ERASED = "erased"
"""Kind of those that name erased offsets (`natslog.log.erasing.ErasedOffsets`)."""
RULES = "rules"
"""Kind of those that state the settings version by which a rule was added: what is recorded before does not count."""

Record: TypeAlias = tuple[str, bytes]
"""Kind, and bytes."""
Delivered: TypeAlias = tuple[int, str, bytes]
"""Offset, kind, and bytes."""
_READ_BYTES = 4 * 1024 * 1024


def size_of(records: Sequence[Record]) -> int:
    """Of their values and kinds, in bytes."""
    return sum(len(kind) + len(value) for kind, value in records)


def rows_of(records: Sequence[Record]) -> RowBuffers:
    """At least one record, as rows to be appended."""
    kinds, values = zip(*records, strict=True)
    count = len(records)
    columns = [
        pa.array(kinds, pa.string()),
        pa.nulls(count, pa.binary()),
        pa.nulls(count, HEADERS_TYPE),
        pa.array(values, pa.binary()),
    ]
    return RowBuffers.of(pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA))


def read_records(log: StreamLog, start: int, end: int, *, uncommitted: bool = False) -> tuple[list[Delivered], int]:
    """The records in `[start, end)`, or the first few MiB of them, and the offset to continue from. Blocks.

    Raises:
        OffsetOutOfRange: the log begins above `start`. CorruptLog: a record is damaged. OSError: it cannot be read.
    """
    with log.reader.plan_read(start, end, max_bytes=_READ_BYTES, uncommitted=uncommitted) as plan:
        found: list[Delivered] = []
        for _, batch in plan.rows():
            rows = zip(*(batch.column(name).to_pylist() for name in ("offset", "subject", "value")), strict=True)
            found += [(offset, kind, value) for offset, kind, value in rows if start <= offset < plan.next_offset]
        return found, plan.next_offset
