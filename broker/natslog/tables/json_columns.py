"""JSON objects to typed columns that grow: new members become columns, and what does not fit is named.

Theory of operation. Payloads are parsed in blocks by `pyarrow.json`, with the columns that the table has as explicit
schema; Arrow infers the types of all other members. A block that Arrow refuses is halved until the rows that it refuses
stand alone: these are the misfits. Halves are parsed in the order of the rows, and each one extends the schema for
those behind it, so the same rows always give the same columns. Dates, timestamps and decimals are parsed as texts or
numbers, and converted by `json_values`; the misfits among them are found at once, and their block is parsed again
without them.

What Arrow would accept although it is not JSON is found before (`json_guards`); such a row is parsed by Python. `NaN`,
`Infinity` and `-Infinity` are values of DOUBLE, as in the Spark source.

Types of new members: BIGINT, DOUBLE, BOOLEAN, STRING, arrays and structs of these. Times are strings, because a member
that looks like a time in one message need not in the next one. Members that are always null, and objects without
members, have no type: they become columns with the first value. Arrays that are always empty have none either; where a
column comes with a later block, the blocks before it are parsed again, so that its empty arrays stay what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from natslog.arrow import json_guards
from natslog.arrow.json_blocks import MOST_BYTES, joined, without_object
from natslog.arrow.payloads import Payloads
from natslog.tables.options import type_name
from natslog.wire.json_values import with_values

_BLOCK_BYTES = 8 * 1024 * 1024
_EXACT_DIGITS = 15  # of a decimal that a double has without loss
_ROW = re.compile(r" in row \d+$")
_OTHER_TYPE = re.compile(r"Column\((.*)\) changed from \w+ to (string|number|boolean)")
_OTHER_TYPES = {"string": pa.string(), "number": pa.float64(), "boolean": pa.bool_()}
_UNFIT_NAME = re.compile(r"[ ,;{}()=\x00-\x1f\x7f]")  # which Parquet's readers and Delta do not accept
_MOST_SHOWN = 60  # characters of a value
_MOST_NESTED = 30  # types: Delta's limit is 40 or so, and libraries recurse


class _Refused(Exception):
    """Some row of a block does not fit."""


class _Misfits(Exception):
    """These rows of a block do not: their numbers, and the reasons."""

    def __init__(self, reasons: dict[int, str]) -> None:
        self.reasons = reasons


@dataclass(slots=True)
class _Reading:
    """Of some payloads.

    Attributes:
        is_blank: rows without text. is_dropped: rows that are parsed as `{}`, and left out of the result. parts: the
            columns of `[start, end)`, in the order of the rows.
    """

    payloads: Payloads
    is_blank: Any
    is_dropped: Any
    misfits: dict[int, str]
    parts: list[tuple[pa.Table, int, int]] = field(default_factory=list)

    def text(self, start: int, end: int) -> tuple[Payloads, Any, Any]:
        """(the payloads of these rows, their lines, where these begin)."""
        some = _slice(self.payloads, start, end)
        return some, *joined(some, (self.is_blank | self.is_dropped)[start:end])


@dataclass(frozen=True, slots=True)
class Typed:
    """What was read.

    Attributes:
        columns: one row for each payload that fits, of the schema as it is now (if that has columns).
        kept: the numbers of these payloads (numpy, ascending).
        misfits: number and reason of every other one.
    """

    columns: pa.Table
    kept: Any
    misfits: dict[int, str] = field(default_factory=dict)


class JsonColumns:
    """Reads objects into the columns of `schema`, which grows.

    Args:
        schema: the columns that the table has for members.
        reserved: lower-case names of its other columns.
        adds_columns: False: a payload with a member that is no column is a misfit.
        most_columns: a payload that would add more is a misfit; members of structs count, too.
        has_dots: whether names of new columns may have dots.
    """

    def __init__(
        self,
        schema: pa.Schema,
        reserved: frozenset[str],
        *,
        adds_columns: bool = True,
        most_columns: int = 1000,
        has_dots: bool = True,
    ) -> None:
        self.schema = pa.schema([_plain(inner) for inner in schema])
        self._reserved, self._adds_columns, self._most_columns = reserved, adds_columns, most_columns
        self._has_dots = has_dots
        self._others: dict[str, Any] = {}  # types of values that are not of the usual one of their column, by path

    def read(self, values: pa.Array[Any]) -> Typed:
        """Args: values: binary, without nulls. Blank ones are rows of nulls."""
        payloads = Payloads.of(values)
        blank, malformed = without_object(payloads)
        no_object = dict.fromkeys(_rows(malformed), "it is not a JSON object")
        reading = _Reading(payloads, blank, malformed, no_object)
        for start, end in _blocks(payloads):
            self._read_block(reading, start, end)
        whole = pa.concat_tables([self._whole(reading, *part) for part in reading.parts] or [self.schema.empty_table()])
        misfits, is_dropped = reading.misfits, reading.is_dropped
        kept = np.setdiff1d(np.arange(len(payloads)), np.fromiter(misfits, np.int64, len(misfits)))
        if is_dropped.any():  # rows of `{}` are in their place
            fits = np.ones(len(payloads), bool)
            fits[[row for row in misfits if not is_dropped[row]]] = False
            whole = filtered(whole, ~is_dropped[fits])
        return Typed(whole, kept, misfits)

    def _read_block(self, reading: _Reading, start: int, end: int) -> None:
        """Adds the columns of these rows, except those of misfits."""
        try:
            reading.parts.append((self._parsed(reading, start, end), start, end))
        except _Misfits as found:
            reading.misfits |= {start + row: reason for row, reason in found.reasons.items()}
            reading.is_dropped[[start + row for row in found.reasons]] = True
            self._read_block(reading, start, end)
        except (_Refused, RecursionError) as refused:
            if end - start == 1:
                is_known = isinstance(refused, _Refused)
                reading.misfits[start] = str(refused) if is_known else "it is nested too deeply for a column"
                return
            middle = (start + end) // 2
            self._read_block(reading, start, middle)
            self._read_block(reading, middle, end)

    def _parsed(self, reading: _Reading, start: int, end: int) -> pa.Table:
        """Extends the schema. Raises _Refused, _Misfits: it is unchanged."""
        payloads, text, offsets = reading.text(start, end)
        _check(text, offsets, payloads)
        table, parsed = self._read(text, self.schema, "infer" if self._adds_columns else "error", end - start)
        grown = self.schema
        if table.schema != parsed:  # only the types are taken: Arrow's inference makes lists with a null in front wrong
            grown = self._grown(table.schema)
            table, _ = self._read(text, grown, "ignore", end - start)
        columns = _converted(table, grown)
        self.schema = grown
        return columns

    def _whole(self, reading: _Reading, part: pa.Table, start: int, end: int) -> pa.Table:
        """The part with the columns of the schema as it is now."""
        known = {one.name: one.type for one in part.schema}
        if any(_has_list(one.type) for one in self.schema if known.get(one.name) != one.type):
            with suppress(_Refused, _Misfits):  # what has no type in it is not always an array
                _, text, _ = reading.text(start, end)
                return _converted(self._read(text, self.schema, "ignore", end - start)[0], self.schema)
        return conformed(part, end - start, self.schema)

    def _read(self, text: Any, schema: pa.Schema, unexpected: Any, rows: int) -> tuple[pa.Table, pa.Schema]:
        """(what Arrow parses for these columns, what it was told to). Raises _Refused."""
        others, changed = dict(self._others), set[str]()
        while True:
            parsed = pa.schema([one.with_type(_parsed(one.type, f"/{one.name}", others)) for one in schema])
            try:
                table = _read(text, parsed, unexpected, rows)
            except _Refused as refused:
                found = _OTHER_TYPE.match(str(refused))
                if found is None or found[1] in changed or not _has_leaf(schema, found[1]):
                    raise
                changed.add(found[1])
                if others.pop(found[1], None) is None:
                    others[found[1]] = _OTHER_TYPES[found[2]]
            else:
                self._others = others
                return table, parsed

    def _grown(self, found: pa.Schema) -> pa.Schema:
        """The schema with the members that were found beside its columns."""
        inner = [_with_new(self.schema.field(one.name), one) for one in found if one.name in self.schema.names]
        new = [one.with_type(kind) for one in found if one.name not in self.schema.names and (kind := _new(one.type))]
        grown = pa.schema([*inner, *new])
        count = sum(_columns_in(one.type) for one in grown)
        if count > max(self._most_columns, sum(_columns_in(one.type) for one in self.schema)):
            raise _Refused(f"the table may not have more than {self._most_columns} columns, and this would be {count}")
        self._check_names(list(grown), list(self.schema), self._reserved)
        return grown

    def _check_names(self, fields: list[Any], known: list[Any], reserved: frozenset[str], path: str = "") -> None:
        """Raises _Refused: two names differ only in case, which tables do not tell apart, or a new one cannot be a
        column's.
        """
        types = {one.name: one.type for one in known}
        taken = {name: name for name in reserved} | {one.name.lower(): one.name for one in known}
        for one in fields:
            if one.name not in types:
                self._check_name(one.name, is_top=not path, path=path)
                other = taken.setdefault(one.name.lower(), one.name)
                if one.name.lower() in reserved or other != one.name:
                    raise _Refused(
                        f"the member {path}{one.name!r} has the name of the column {other!r} (case does not count)"
                    )
            inner = _struct_in(one.type)
            if inner is not None:
                below = _struct_in(types[one.name]) if one.name in types else None
                self._check_names(list(inner), list(below or ()), frozenset(), f"{path}{one.name}.")

    def _check_name(self, name: str, *, is_top: bool, path: str) -> None:
        if not name or _UNFIT_NAME.search(name) or (not self._has_dots and "." in name):
            dots = "" if self._has_dots else "."
            raise _Refused(
                f"the member {path}{name!r} cannot be a column: its name is empty, or has a control character or one "
                f"of ' ,;{{}}()={dots}'"
            )
        if is_top and name.startswith("_"):
            raise _Refused(
                f"the member {name!r} cannot be a column: names that begin with _ are for columns of natslog"
            )


# ---- text ----


def _blocks(payloads: Payloads) -> Iterator[tuple[int, int]]:
    offsets, start = payloads.offsets, 0
    while start < len(payloads):
        limit = int(offsets[start]) + _BLOCK_BYTES
        end = max(int(np.searchsorted(offsets, limit, side="right")) - 1, start + 1)
        yield start, end
        start = end


def _slice(payloads: Payloads, start: int, end: int) -> Payloads:
    offsets = payloads.offsets[start : end + 1]
    return Payloads(payloads.text[offsets[0] : offsets[-1]], offsets - offsets[0])


def _check(text: Any, offsets: Any, payloads: Payloads) -> None:
    """Raises _Refused where Arrow's parser might accept what is not JSON."""
    seen = np.frombuffer(text, np.uint8)
    is_suspect = json_guards.may_hold_top_level_null(seen) or json_guards.has_other_words(seen)
    if len(text) >= MOST_BYTES:
        raise _Refused("it is larger than 1 GiB")
    if not json_guards.is_utf8(text):
        raise _Refused("it is not valid UTF-8")
    if is_suspect and (len(payloads) > 1 or not _is_json(payloads[0])):
        raise _Refused("it is not valid JSON")
    if json_guards.nests_too_deeply(seen, offsets):
        raise _Refused(f"it is nested more than {json_guards.MOST_NESTED} deep")


def _is_json(payload: bytes) -> bool:
    try:
        return isinstance(json.loads(payload), dict)
    except (ValueError, RecursionError):
        return False


def _read(text: Any, schema: pa.Schema, unexpected: Any, rows: int) -> pa.Table:
    options = pj.ParseOptions(explicit_schema=schema, newlines_in_values=False, unexpected_field_behavior=unexpected)
    one_block = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    try:
        table = pj.read_json(pa.BufferReader(text), read_options=one_block, parse_options=options)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        said = str(error).partition("\n")[0].removeprefix("JSON parse error: ")
        raise _Refused(_ROW.sub("", said)) from error
    if table.num_rows != rows:
        raise _Refused("it is not one JSON object")
    return table


# ---- types ----


def _plain(inner: pa.Field[Any]) -> pa.Field[Any]:
    """Nullable, and with the usual layout: tables also have `large_string`, `string_view`, `large_list`."""
    return pa.field(inner.name, plain_type(inner.type))


def plain_type(kind: Any) -> Any:
    types = pa.types
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_struct(kind):
        return pa.struct([_plain(kind.field(at)) for at in range(kind.num_fields)])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_list_view(kind):
        return pa.list_(pa.field("element", plain_type(kind.value_type)))
    return kind


def _parsed(kind: Any, path: str, others: dict[str, Any]) -> Any:
    """What Arrow parses for a column: dates and times are strings at first, decimals are doubles.

    Args:
        path: of the column, as Arrow's errors name it. others: by path, what is parsed instead: some values of other
            types can be converted, and those of a whole block are told from each other at once.
    """
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([pa.field(one.name, _parsed(one.type, f"{path}/{one.name}", others)) for one in kind])
    if types.is_list(kind):
        return pa.list_(pa.field("element", _parsed(kind.value_type, f"{path}/[]", others)))
    is_exact = types.is_decimal(kind) and kind.precision > _EXACT_DIGITS  # a number would be a double
    if (other := others.get(path)) is not None and not (is_exact and types.is_floating(other)):
        return pa.int64() if types.is_timestamp(kind) and types.is_floating(other) else other
    if types.is_decimal(kind):
        return pa.float64() if kind.precision <= _EXACT_DIGITS else pa.string()
    is_plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return kind if is_plain else pa.string()  # a value of a type that JSON does not have is not converted


def _has_leaf(fields: Any, path: str, above: str = "") -> bool:
    """Whether the path is that of a column which is neither a struct nor a list."""
    for one in fields:
        at, kind = f"{above}/{one.name}", one.type
        while pa.types.is_list(kind):
            at, kind = f"{at}/[]", kind.value_type
        if _has_leaf(kind, path, at) if pa.types.is_struct(kind) else at == path:
            return True
    return False


def _has_list(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_list(one.type) for one in kind)
    return bool(pa.types.is_list(kind))


def _new(kind: Any) -> Any:
    """The type of a member that was not known; None where there is no value in it."""
    types = pa.types
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        return pa.string()
    if types.is_null(kind):
        return None
    if types.is_struct(kind):
        fields = [pa.field(one.name, inner) for one in kind if (inner := _new(one.type)) is not None]
        return pa.struct(fields) if fields else None
    if types.is_list(kind):
        element = _new(kind.value_type)
        return None if element is None else pa.list_(pa.field("element", element))
    return kind


def _struct_in(kind: Any) -> Any | None:
    """The struct, also within lists; None where there is none."""
    while pa.types.is_list(kind):
        kind = kind.value_type
    return kind if pa.types.is_struct(kind) else None


def _columns_in(kind: Any, depth: int = 0) -> int:
    """Raises _Refused: it is nested too deeply."""
    if depth == _MOST_NESTED:
        raise _Refused(f"it is nested more than {_MOST_NESTED} deep")
    if pa.types.is_list(kind):
        return _columns_in(kind.value_type, depth + 1)
    return sum(_columns_in(one.type, depth + 1) for one in kind) if pa.types.is_struct(kind) else 1


def _with_new(known: pa.Field[Any], found: pa.Field[Any]) -> pa.Field[Any]:
    """The column with what was found within its structs."""
    return known.with_type(_type_with_new(known.type, found.type))


def _type_with_new(known: Any, found: Any) -> Any:
    if pa.types.is_struct(known) and pa.types.is_struct(found):
        names = {one.name for one in known}
        inner = [_with_new(one, found.field(one.name)) for one in known]
        more = [pa.field(one.name, kind) for one in found if one.name not in names and (kind := _new(one.type))]
        return pa.struct([*inner, *more])
    if pa.types.is_list(known) and pa.types.is_list(found):
        return pa.list_(pa.field("element", _type_with_new(known.value_type, found.value_type)))
    return known


# ---- values ----


def _converted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """What was parsed, as its types. Raises _Misfits."""
    columns, misfits = [], dict[int, str]()
    for at, kind in enumerate(schema):
        parsed = table.column(at).combine_chunks()
        column, good = with_values(parsed, kind.type, in_calendar=True)
        columns.append(column)
        for row in _rows(~good):
            misfits.setdefault(row, f"column {kind.name} is {type_name(kind.type)}, and {_shown(parsed[row])} is not")
    if misfits:
        raise _Misfits(misfits)
    return pa.Table.from_arrays(columns, schema=schema)


def _shown(value: Any) -> str:
    text = json.dumps(value.as_py(), ensure_ascii=False, default=str)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"


def _rows(mask: Any) -> list[int]:
    rows: list[int] = np.flatnonzero(mask).tolist()
    return rows


def filtered(table: pa.Table, mask: Any) -> pa.Table:
    """Args: mask: a bool per row (numpy). A table without columns has no number of rows in Arrow."""
    return table.filter(pa.array(mask)) if table.num_columns else table


def conformed(table: pa.Table, rows: int, schema: pa.Schema) -> pa.Table:
    """The table, of so many rows, with the columns of `schema`, which has all that it has; what is missing is null."""
    if table.schema == schema:
        return table
    names = table.schema.names
    return pa.Table.from_arrays(
        [
            _widened(table.column(one.name).combine_chunks(), one.type)
            if one.name in names
            else pa.nulls(rows, one.type)
            for one in schema
        ],
        schema=schema,
    )


def _widened(array: Any, kind: Any) -> Any:
    """With the members of structs that it lacks."""
    if array.type == kind:
        return array
    if pa.types.is_struct(kind):
        held = {one.name: array.field(at) for at, one in enumerate(array.type)}
        children = [
            _widened(held[one.name], one.type) if one.name in held else pa.nulls(len(array), one.type) for one in kind
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    if pa.types.is_list(kind):
        offsets = pa.Array.from_buffers(pa.int32(), len(array) + 1, [None, array.buffers()[1]], offset=array.offset)
        values = _widened(array.values, kind.value_type)
        bitmap = array.is_null() if array.null_count else None
        return pa.ListArray.from_arrays(offsets, values, type=kind, mask=bitmap)
    return array.cast(kind)
