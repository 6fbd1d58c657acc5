"""Table rows of messages: columns of the message itself, columns of its payload, and what does not fit.

| column | type | |
|---|---|---|
| `_offset` | BIGINT | of the message in its stream |
| `_timestamp` | TIMESTAMP | when the broker recorded it |
| `_subject` | STRING | |
| `_key` | BINARY | null without a key |
| `_headers` | ARRAY<STRUCT<key, value>> | if they were requested |
| `_day` | DATE | if the table is partitioned by it: of the event time, or of `_timestamp` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.schema import HEADERS_TYPE, rows_of_items
from natslog.errors import ConfigError
from natslog.model import TOMBSTONE_HEADER
from natslog.tables.json_columns import JsonColumns, filtered
from natslog.tables.options import TableOptions

DAY = "_day"
PARTITION_TYPES = (pa.string(), pa.bool_(), pa.int32(), pa.int64(), pa.date32())
_TIME = pa.timestamp("us", tz="UTC")
_MOST_PATH = 60  # each byte may take three in a folder's name, which has at most 255
_OWN = {"offset": pa.int64(), "timestamp": _TIME, "subject": pa.string(), "key": pa.binary()}
DEAD_LETTER_SCHEMA = pa.schema(
    [*(pa.field(f"_{name}", kind) for name, kind in _OWN.items()), ("value", pa.binary()), ("reason", pa.string())]
)
"""Columns of a table of dead letters: the message as it was published, and why it is here."""
_TOMBSTONE = TOMBSTONE_HEADER.lower()


def first_schema(options: TableOptions) -> pa.Schema:
    """The columns of a new table."""
    fields = [pa.field(f"_{name}", kind) for name, kind in _OWN.items()]
    if options.headers:
        fields.append(pa.field("_headers", HEADERS_TYPE))
    if DAY in options.partition_by:
        fields.append(pa.field(DAY, pa.date32()))
    match options.payload_format:
        case "binary":
            fields.append(pa.field("value", pa.binary()))
        case "string":
            fields.append(pa.field("value", pa.string()))
        case "json":
            fields += [pa.field(name, kind) for name, kind in options.columns.items()]
    return pa.schema(fields)


def check_partitions(options: TableOptions, columns: pa.Schema) -> None:
    """Raises ConfigError: a new table with these columns cannot be partitioned so."""
    for name in options.partition_by:
        if name not in columns.names or columns.field(name).type not in PARTITION_TYPES:
            raise ConfigError(
                f"--partition-by {name}: a new table can be partitioned by _day, and by declared columns (--column "
                f"{name}=string) of the types string, boolean, int, bigint and date"
            )


@dataclass(frozen=True, slots=True)
class Rows:
    """Attributes:
    table: those that fit. dead_letters: the others. newest_us: the newest event time of `table`, None without one.
    """

    table: pa.Table
    dead_letters: pa.Table
    newest_us: int | None = None


class RowMaker:
    """Makes rows for a table with these columns.

    Raises:
        ConfigError: the table lacks a column that the options name, or has one with another type.
    """

    def __init__(
        self, options: TableOptions, schema: pa.Schema, partitions: Sequence[str] = (), *, has_dots: bool = True
    ) -> None:
        self._options = options
        self._partitions = [name for name in partitions if name != DAY and name in schema.names]
        if required := [one.name for one in schema if not one.nullable]:
            raise ConfigError(
                f"the table cannot have rows of this stream: its columns {', '.join(required)} are NOT NULL, and a "
                "message may lack any of them"
            )
        wanted = first_schema(options)
        missing = [one.name for one in wanted if one.name not in schema.names and one.name != "_headers"]
        others = [one for one in wanted if one.name in schema.names and schema.field(one.name).type != one.type]
        if missing or others:
            shown = [f"it has no column {name}" for name in missing]
            shown += [f"its column {one.name} is {schema.field(one.name).type}, not {one.type}" for one in others]
            raise ConfigError(
                f"the table cannot have rows of this stream: {'; '.join(shown)}. Use the options that it was created "
                "with, or another table"
            )
        self._own = [name for name in wanted.names if name.startswith("_")]
        if DAY in schema.names and DAY not in self._own and pa.types.is_date(schema.field(DAY).type):
            self._own.append(DAY)
        self._event_time = _event_time(options, schema)
        own = frozenset([*(name.lower() for name in self._own), "_headers", DAY])
        payload = pa.schema([one for one in schema if one.name not in self._own])
        self._json = JsonColumns(
            payload,
            own,
            adds_columns=options.new_columns == "add",
            most_columns=options.most_columns,
            has_dots=has_dots,
        )

    def make(self, messages: pa.Table, watermark_us: int | None) -> Rows:
        """Args:
        messages: of the stream, in the order of their offsets. watermark_us: the newest event time of all before.
        """
        messages = messages.combine_chunks()
        if self._options.merge and len(gone := _tombstones(messages)):  # whatever their values are
            is_gone = pc.is_in(messages.column("offset"), value_set=gone)
            blank = pc.if_else(is_gone, pa.scalar(b"", pa.binary()), messages.column("value"))
            messages = messages.set_column(messages.schema.get_field_index("value"), "value", blank)
        if self._options.payload_format == "json":
            typed = self._json.read(_whole(messages.column("value")))
            kept, reasons, payload = typed.kept, typed.misfits, typed.columns
        else:
            kept, reasons, payload = self._untyped(messages)
        if self._options.merge:
            has_key = _whole(messages.column("key")).is_valid().to_numpy(zero_copy_only=False)[kept]
            reasons |= {int(row): "it has no key" for row in kept[~has_key]}
            payload, kept = filtered(payload, has_key), kept[has_key]
        for name in self._partitions:
            fits = _fit_paths(_whole(payload.column(name))) if name in payload.column_names else None
            if fits is not None and not fits.all():
                reasons |= {int(row): f"the partition column {name} is too long" for row in kept[~fits]}
                payload, kept = filtered(payload, fits), kept[fits]
        late, newest_us = self._late(payload, watermark_us)
        if late is not None and late.any():
            reasons |= {int(row): "its event time is older than the watermark allows" for row in kept[late]}
            payload, kept = filtered(payload, ~late), kept[~late]
        return Rows(self._whole_rows(messages, kept, payload), dead_letters(messages, reasons), newest_us)

    def _untyped(self, messages: pa.Table) -> tuple[Any, dict[int, str], pa.Table]:
        rows, values = np.arange(messages.num_rows), _whole(messages.column("value"))
        if self._options.payload_format == "binary":
            return rows, {}, pa.table({"value": values})
        try:
            return rows, {}, pa.table({"value": values.cast(pa.string())})
        except pa.ArrowInvalid:
            fits = np.array([_is_text(one) for one in values.to_pylist()], bool)
        reasons = {int(row): "it is not valid UTF-8" for row in np.flatnonzero(~fits)}
        return rows[fits], reasons, pa.table({"value": values.filter(pa.array(fits)).cast(pa.string())})

    def _late(self, payload: pa.Table, watermark_us: int | None) -> tuple[Any | None, int | None]:
        """(a bool per row: it is late, the newest event time of the others)."""
        name = self._options.event_time
        if name is None or not payload.num_rows:
            return None, None
        times = _whole(payload.column(name))
        late = None
        if watermark_us is not None and self._options.late_s is not None:
            edge = pa.scalar(watermark_us - round(self._options.late_s * 1e6), pa.int64()).cast(_TIME)
            late = pc.fill_null(pc.less(times, edge), False).to_numpy(zero_copy_only=False)
        newest = pc.max(times).cast(pa.int64()).as_py()
        return late, newest

    def _whole_rows(self, messages: pa.Table, kept: Any, payload: pa.Table) -> pa.Table:
        if len(kept) < messages.num_rows:
            messages = messages.take(pa.array(kept))
        columns = {name: messages.column(name.removeprefix("_")) for name in self._own if name != DAY}
        if DAY in self._own:
            times = messages.column("timestamp")
            if self._event_time is not None:
                times = pc.coalesce(payload.column(self._event_time), times)
            columns[DAY] = times.cast(pa.date32())
        return pa.table(columns | {name: payload.column(name) for name in payload.column_names})


def dead_letters(messages: pa.Table, reasons: dict[int, str]) -> pa.Table:
    """Rows of these messages for the table of dead letters."""
    numbers = sorted(reasons)
    some = messages.take(pa.array(numbers, pa.int64()))
    columns = {f"_{name}": some.column(name).cast(kind) for name, kind in _OWN.items()}
    columns |= {"value": some.column("value"), "reason": pa.array([reasons[row] for row in numbers], pa.string())}
    return pa.table(columns, schema=DEAD_LETTER_SCHEMA)


def newest_by_key(rows: pa.Table, messages: pa.Table) -> tuple[pa.Table, pa.Table]:
    """(the newest row of each key, those of them that are tombstones).

    Args:
        rows: with `_key` and `_offset`. messages: that they were made of.
    """
    newest = rows.select(["_key", "_offset"]).group_by("_key").aggregate([("_offset", "max")])
    rows = rows.filter(pc.is_in(rows.column("_offset"), value_set=_whole(newest.column("_offset_max"))))
    gone = pc.is_in(rows.column("_offset"), value_set=_tombstones(messages))
    return rows.filter(pc.invert(gone)), rows.filter(gone)


def _tombstones(messages: pa.Table) -> Any:
    """Their offsets."""
    messages = messages.combine_chunks()
    headers = _whole(messages.column("headers"))
    found = np.zeros(messages.num_rows, bool)
    names = headers.flatten().field("key")
    if len(names):
        at = pc.equal(pc.utf8_lower(names), _TOMBSTONE).to_numpy(zero_copy_only=False)
        found[rows_of_items(headers)[at]] = True
    return _whole(messages.column("offset")).filter(pa.array(found))


def _event_time(options: TableOptions, schema: pa.Schema) -> str | None:
    name = options.event_time
    if name is None:
        return None
    if name not in schema.names or schema.field(name).type != _TIME:
        raise ConfigError(
            f"--event-time {name}: the table has no column {name} of type timestamp: declare it, --column "
            f"{name}=timestamp"
        )
    return name


def _fit_paths(values: Any) -> Any | None:
    """A bool per value of a partition column: it can be the name of a folder."""
    if not pa.types.is_string(values.type):
        return None
    return pc.fill_null(pc.less_equal(pc.binary_length(values), _MOST_PATH), True).to_numpy(zero_copy_only=False)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _whole(column: Any) -> Any:
    """One chunk."""
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
