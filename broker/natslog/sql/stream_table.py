"""One stream as a table of DuckDB, with the columns of the Spark source.

Theory of operation. DuckDB scans a `pyarrow.dataset.Dataset` by `scanner(columns=, filter=)` and leaves it to the
scanner to apply the filter. The scanner here requests only the columns that the query or its condition needs, from the
first to the last offset that can satisfy the condition, and of one subject where that is all (`pushed`). The condition
is then applied to every row that arrives. Parts of about `FETCH_BYTES` pass through: of each scan two parts are in
memory, and two answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import acero

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.client import FETCH_BYTES, NatslogClient
from natslog.client.reading_ahead import ReadAhead
from natslog.errors import NatslogError, OffsetOutOfRange
from natslog.sql.pushed import can_hold, columns_of, number_bounds, subject_pattern
from natslog.subjects import includes
from natslog.times import format_timestamp_us

_STREAM = pa.field("stream", pa.string(), nullable=False)
_ORDER = ("offset", "timestamp", "subject", "key", "value", "headers")
TABLE_SCHEMA = pa.schema([_STREAM, *(MESSAGE_SCHEMA.field(name) for name in _ORDER)])
"""`stream`, `offset`, `timestamp`, `subject`, `key`, `value`, `headers`: names, types and order of the Spark source."""

_YEAR_10000_US = 253_402_300_800_000_000
_SMALL_ROWS = 2048


class ScanStopped(Exception):
    """The reads of the query were stopped."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What the scans of one connection share.

    Attributes:
        failures: errors of brokers, in order; DuckDB raises an error of its own with their text.
        stopping: done when all scans shall end.
    """

    client: NatslogClient
    failures: list[NatslogError] = field(default_factory=list)
    stopping: Future[None] = field(default_factory=Future)

    def stop(self) -> None:
        """Scans end with the next row that they would wait for; new ones end at once."""
        if not self.stopping.done():
            self.stopping.set_result(None)


@dataclass(frozen=True, slots=True)
class Extent:
    """The messages `[start, end)` of a stream, as a query sees it; `subjects`: what it records."""

    name: str
    id: str
    subjects: Sequence[str]
    start: int
    end: int


class StreamTable(ds.Dataset):  # type: ignore[misc]
    """A stream, from its first message to the high watermark when it was opened.

    DuckDB accepts objects of this class only. Nothing of Arrow's dataset is used, so its constructor is not called.
    """

    def __init__(self, reads: Reads, extent: Extent) -> None:
        self._reads, self._extent = reads, extent

    @property
    def schema(self) -> pa.Schema:
        return TABLE_SCHEMA

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> _Scanner:
        """What DuckDB calls for each scan.

        Args:
            columns: None: all. `filter`: the scanner returns only rows for which this expression holds.
        """
        return _Scanner(self._reads, self._extent, tuple(columns or TABLE_SCHEMA.names), filter)


class _Scanner:
    def __init__(self, reads: Reads, extent: Extent, columns: tuple[str, ...], condition: Any) -> None:
        self._reads, self._extent, self._columns, self._condition = reads, extent, columns, condition
        self.projected_schema = pa.schema([TABLE_SCHEMA.field(name) for name in columns])

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._kept_batches()
        except OffsetOutOfRange as error:
            failure = OffsetOutOfRange(
                f"stream {self._extent.name!r}: messages that belong to this query were removed (retention, a purge) "
                f"before they were read: repeat the query ({error.message})",
                **error.facts,
            )
            self._reads.failures.append(failure)
            raise failure from error
        except NatslogError as error:
            self._reads.failures.append(error)
            raise

    def _kept_batches(self) -> Iterator[pa.RecordBatch]:
        needed = set(self._columns)
        if self._condition is not None:
            of_condition = columns_of(self._condition, TABLE_SCHEMA)
            needed |= of_condition
        else:
            of_condition = set()
        start, end, pattern = self._range(of_condition)
        stored = [name for name in MESSAGE_SCHEMA.names if name in needed] or ["offset"]
        for part in self._parts(start, end, pattern, stored):
            if "stream" in needed:
                part = part.append_column(_STREAM, pa.repeat(self._extent.name, part.num_rows))
            if self._condition is not None:
                part = _filtered(part, self._condition)
            yield from part.select(self._columns).cast(self.projected_schema).to_batches()

    def _range(self, of_condition: set[str]) -> tuple[int, int, str | None]:
        """The offsets to read, and the subjects among them (None: all)."""
        extent, condition = self._extent, self._condition
        start, end, pattern = extent.start, extent.end, None
        if condition is None or start >= end:
            return start, end, None
        if not can_hold(condition, pc.field("stream") == extent.name, TABLE_SCHEMA):
            return start, start, None
        if "offset" in of_condition:
            start, end = number_bounds(condition, TABLE_SCHEMA, "offset", start, end)
        if "timestamp" in of_condition and start < end:
            start, end = self._within_times(start, end)
        if "subject" in of_condition and start < end:
            pattern = subject_pattern(condition, TABLE_SCHEMA)
            if pattern is not None and all(includes(pattern, recorded) for recorded in extent.subjects):
                pattern = None  # the broker sends stored bytes if it need not choose rows
        return start, end, pattern

    def _within_times(self, start: int, end: int) -> tuple[int, int]:
        """Timestamps never decrease within a stream, so a time is an offset."""
        first_us, behind_us = number_bounds(self._condition, TABLE_SCHEMA, "timestamp", 0, _YEAR_10000_US)
        if first_us >= behind_us:
            return start, start
        if first_us > 0:
            start = max(start, self._offset_at(first_us))
        if behind_us < _YEAR_10000_US:
            end = min(end, self._offset_at(behind_us))
        return start, max(start, end)

    def _offset_at(self, timestamp_us: int) -> int:
        return self._reads.client.offset_at(self._extent.name, format_timestamp_us(timestamp_us))[0]

    def _parts(self, start: int, end: int, pattern: str | None, columns: list[str]) -> Iterator[pa.Table]:
        fetch = partial(
            self._reads.client.fetch,
            self._extent.name,
            end=end,
            subject=pattern,
            columns=None if len(columns) == len(MESSAGE_SCHEMA) else columns,
            expected_id=self._extent.id,
            max_decoded_bytes=FETCH_BYTES,
        )
        stopping = self._reads.stopping
        ahead = ReadAhead(fetch, self._extent.name, start, end, FETCH_BYTES)
        while ahead.coming is not None:
            awaited: list[Future[Any]] = [ahead.coming, stopping]
            wait(awaited, return_when=FIRST_COMPLETED)
            if stopping.done():
                raise ScanStopped("the query was stopped")
            found = ahead.take().batches
            if found:
                part = pa.Table.from_batches(found)
                yield part.combine_chunks() if len(found) > 1 + part.num_rows // _SMALL_ROWS else part


def _filtered(part: pa.Table, condition: Any) -> pa.Table:
    """In one thread, so that the rows keep their order."""
    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(part))
    kept = acero.Declaration("filter", acero.FilterNodeOptions(condition))
    return acero.Declaration.from_sequence([source, kept]).to_table(use_threads=False)
