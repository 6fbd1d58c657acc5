"""JSON of the usual kind by a kernel of its own (`kernels_flat`), which is two to three times as fast as the others.

Which chunks go to it is decided in `json_paths`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from natslog.arrow import json_guards
from natslog.arrow.payloads import Payloads
from natslog.wire.json_values import parsed_type, with_values
from pyspark_natslog.payload import native
from pyspark_natslog.payload.kernels_flat import BOOLEAN, MOST_MEMBERS, REAL, TEXT, TEXTS, WHOLE
from pyspark_natslog.payload.kernels_tokens import MOST_NESTED
from pyspark_natslog.payload.rows import Decoded

_KINDS: dict[type[DataType], tuple[int, int]] = {
    ByteType: (WHOLE, 8),
    ShortType: (WHOLE, 16),
    IntegerType: (WHOLE, 32),
    LongType: (WHOLE, 64),
    DoubleType: (REAL, 0),
    BooleanType: (BOOLEAN, 0),
    StringType: (TEXT, 0),
    DateType: (TEXT, 0),
    TimestampType: (TEXT, 0),
    TimestampNTZType: (TEXT, 0),
}
"""Kind and bits. Times are read as strings."""
_LEAST_ITEM_BYTES = 3  # of a string in a list, with what follows it
_MOST_BYTES = 256 * 1024 * 1024  # of the room for strings
_MOST_ROOM = 64  # columns of strings: each has room for the whole text


def supports(schema: StructType) -> bool:
    """Whether all columns are of types that the kernel reads."""
    kinds = [_kind(inner.dataType) for inner in schema.fields]
    return None not in kinds and sum(kind is not None and kind[0] >= TEXT for kind in kinds) <= _MOST_ROOM


def _kind(of: DataType) -> tuple[int, int] | None:
    if isinstance(of, ArrayType):
        return (TEXTS, 0) if isinstance(of.elementType, StringType) else None
    return _KINDS.get(type(of))


class FlatJson:
    """Decodes into the columns of `schema`, which must be supported."""

    def __init__(self, schema: StructType) -> None:
        self._types = to_arrow_schema(schema, timezone="UTC")
        names = [inner.name.encode() for inner in schema.fields]
        self._names = np.frombuffer(b"".join(names) or b" ", np.uint8)
        name_ends = np.cumsum([len(name) for name in names])
        self._columns = np.zeros((len(names), 6), np.int64)
        self._slots = self._lists = 0
        for at, inner in enumerate(schema.fields):
            kind = _kind(inner.dataType)
            assert kind is not None, "the schema is supported"
            self._columns[at] = (*kind, name_ends[at] - len(names[at]), name_ends[at], self._slots, self._lists)
            self._slots += kind[0] >= TEXT
            self._lists += kind[0] == TEXTS
        self._members, self._levels = np.zeros((MOST_MEMBERS, 3), np.int64), np.empty(MOST_NESTED, np.uint8)

    def decode(self, payloads: Payloads) -> Decoded | None:
        """The columns, equal to those of the other kernel; None if some payload is left to it."""
        text, rows = payloads.text.view(), len(payloads)
        text.flags.writeable = False  # always, so that one compiled form of the kernel is enough
        if self._slots * len(text) > _MOST_BYTES:  # one very large payload
            return None
        if not rows or not json_guards.is_utf8(pa.py_buffer(text)):
            return None
        width = len(self._columns)
        valid, cells = np.zeros(width * rows, np.uint8), np.empty(width * rows, np.int64)
        reals = np.empty(width * rows, np.float64)
        data = np.empty(max(self._slots, 1) * len(text), np.uint8)
        room = len(text) // _LEAST_ITEM_BYTES + 1  # for each list column: a zero, and the ends of its strings
        item_ends = np.zeros(max(self._lists, 1) * room, np.int32)
        done = native.decode_flat(
            text, payloads.offsets, self._columns, self._names, valid, cells, reals, data, item_ends, room,
            self._members, self._levels,
        )  # fmt: skip
        if done < rows:
            return None
        arrays = {}
        for at, inner in enumerate(self._types):
            kind, _, _, _, slot, list_slot = self._columns[at].tolist()
            mine = slice(at * rows, (at + 1) * rows)
            base = slot * len(text)
            array = _array(
                kind, inner.type, valid[mine], cells[mine], reals[mine], data[base:], item_ends[list_slot * room :]
            )
            arrays[inner.name], good = with_values(array, inner.type)
            if not good.all():
                return None
        none = np.zeros(rows, bool)
        return Decoded(arrays, none, reason=str, blank=none)


def _array(kind: int, of: Any, valid: Any, cells: Any, reals: Any, data: Any, item_ends: Any) -> Any:
    """One column, with strings in the place of times."""
    rows, nulls = len(valid), len(valid) - int(np.count_nonzero(valid))
    bits = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
    if kind == REAL:
        return pa.Array.from_buffers(of, rows, [bits, pa.py_buffer(reals)], nulls)
    if kind == BOOLEAN:
        values = np.packbits(cells.astype(np.uint8), bitorder="little")
        return pa.Array.from_buffers(of, rows, [bits, pa.py_buffer(values)], nulls)
    if kind == WHOLE:
        values = cells.astype(of.to_pandas_dtype(), copy=False)
        return pa.Array.from_buffers(of, rows, [bits, pa.py_buffer(values)], nulls)
    ends = np.zeros(rows + 1, np.int32)
    ends[1:] = cells
    if kind == TEXT:
        buffers = [bits, pa.py_buffer(ends), pa.py_buffer(data[: ends[-1]])]
        return pa.Array.from_buffers(parsed_type(of), rows, buffers, nulls)
    count = int(ends[-1])
    buffers = [None, pa.py_buffer(item_ends[: count + 1]), pa.py_buffer(data[: item_ends[count]])]
    items = pa.Array.from_buffers(of.value_type, count, buffers)
    return pa.Array.from_buffers(of, rows, [bits, pa.py_buffer(ends)], nulls, children=[items])
