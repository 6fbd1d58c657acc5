"""The fast path of JSON: `pyarrow.json` over all payloads of a chunk at once. It needs no compiled code.

Theory of operation. The payloads are joined by newlines and parsed as one block with an explicit schema. What Arrow
refuses (one row is enough) is left to the kernel of `json_rows`, which is the reference: None is returned. What Arrow
would accept differently is found before (`json_guards`), or has no column type here (`supports`).

Invariant: each payload is one row. Each begins with `{` and ends with `}`, apart from blanks, and a newline follows it.
A string cannot contain that newline; so if a payload left an object or list open, its last brace would be followed by
the first brace of the next one, which is no valid JSON within a container. Hence every payload has at least one row,
and there are as many rows as payloads.

Payloads that are blank, or that do not begin and end so, are nulls in every column: they are replaced by `{}` before
the join, and cost no more than others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pyspark_natslog.payload import json_guards
from pyspark_natslog.payload.json_times import parsed_type, with_times
from pyspark_natslog.payload.rows import Decoded, Payloads

_DENSE = (BooleanType, ByteType, ShortType, IntegerType, LongType, FloatType, DoubleType)
_SCALARS = (*_DENSE, StringType, DateType, TimestampType, TimestampNTZType)
_BLANKS = " \t\r\n"
_MOST_BYTES = 2**30  # a block's size is a 32-bit number
_EMPTY = pa.scalar(b"{}", pa.binary())


def supports(kind: DataType) -> bool:
    """Whether Arrow's values of this type are those of the kernel, and it is not much slower.

    Not supported: maps (Arrow makes no maps of objects), binary (Arrow does not decode base64), and decimals (Arrow
    reads beyond the end of a table where the exponent is very negative, and may crash). Arrays of numbers and booleans
    are left to the kernel because it decodes them 1.3 to 1.5 times as fast.
    """
    if isinstance(kind, StructType):
        return all(supports(inner.dataType) for inner in kind.fields)
    if isinstance(kind, ArrayType):
        return supports(kind.elementType) and not isinstance(kind.elementType, _DENSE)
    return isinstance(kind, _SCALARS)


class ArrowJson:
    """Decodes into the columns of `schema`.

    Args:
        schema: nullable throughout, of types that are supported.
        reason: why a malformed payload is malformed, of the kernel.
    """

    def __init__(self, schema: StructType, reason: Callable[[Payloads, int], str]) -> None:
        self._types = to_arrow_schema(schema, timezone="UTC")
        parsed = pa.schema([inner.with_type(parsed_type(inner.type)) for inner in self._types])
        self._parse = pj.ParseOptions(
            explicit_schema=parsed, newlines_in_values=False, unexpected_field_behavior="ignore"
        )
        self._reason = reason

    def decode(self, payloads: Payloads) -> Decoded | None:
        """The columns, equal to the kernel's; None if some payload is left to it."""
        if len(payloads.text) + len(payloads) > _MOST_BYTES:
            return None
        blank, malformed = _without_object(payloads)
        if not len(payloads):
            return Decoded({inner.name: pa.nulls(0, inner.type) for inner in self._types}, malformed, str, blank=blank)
        text, offsets = _joined(payloads, blank | malformed)
        arrays = self._arrays(text, len(payloads))
        if arrays is None or json_guards.nests_too_deeply(np.frombuffer(text, np.uint8), offsets):
            return None
        return Decoded(arrays, malformed, reason=lambda row: self._reason(payloads, row), blank=blank)

    def _arrays(self, text: Any, rows: int) -> dict[str, Any] | None:
        seen = np.frombuffer(text, np.uint8)
        if json_guards.may_hold_top_level_null(seen) or json_guards.has_other_words(seen):
            return None
        if not json_guards.is_utf8(text):
            return None
        one_block = pj.ReadOptions(use_threads=False, block_size=len(seen) + 1)
        try:
            table = pj.read_json(pa.BufferReader(text), read_options=one_block, parse_options=self._parse)
        except pa.ArrowInvalid:  # a row is malformed, or written in a way that only the kernel reads
            return None
        if table.num_rows != rows:
            return None
        columns = [with_times(_whole(table.column(at)), kind.type) for at, kind in enumerate(self._types)]
        if any(column is None for column in columns):
            return None
        return dict(zip(self._types.names, columns, strict=True))


def _without_object(payloads: Payloads) -> tuple[Any, Any]:
    """(a bool per payload: it is blank, a bool per payload: it does not begin and end as an object does)."""
    suspect = ~_in_braces(payloads)
    blank, malformed = np.zeros(len(payloads), bool), np.zeros(len(payloads), bool)
    if suspect.any():
        some = _binary(payloads.text, payloads.offsets).filter(pa.array(suspect)).view(pa.string())
        trimmed = Payloads.of(pc.ascii_trim(some, _BLANKS).view(pa.binary()))
        blank[suspect] = trimmed.are_empty
        malformed[suspect] = ~(trimmed.are_empty | _in_braces(trimmed))
    return blank, malformed


def _in_braces(payloads: Payloads) -> Any:
    """A bool per payload: its first byte opens an object, and its last one closes one."""
    text, starts, ends = payloads.text, payloads.offsets[:-1], payloads.offsets[1:]
    if not len(text):
        return np.zeros(len(payloads), bool)
    first, last = text.take(starts, mode="clip"), text.take(ends - 1, mode="clip")
    return (ends - starts > 1) & (first == ord("{")) & (last == ord("}"))


def _joined(payloads: Payloads, replaced: Any) -> tuple[Any, Any]:
    """(a buffer of all payloads, a newline after each; offsets of them there). `{}` is in the place of the replaced."""
    values = _binary(payloads.text, np.append(payloads.offsets, payloads.offsets[-1:]))  # the last is empty
    if replaced.any():
        values = pc.if_else(pa.array(np.append(replaced, False)), _EMPTY, values)
    as_one = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    edges = np.frombuffer(values.buffers()[1], np.int32)[: len(values)]
    return pc.binary_join(as_one, b"\n")[0].as_buffer(), edges + np.arange(len(edges), dtype=np.int32)


def _binary(text: Any, offsets: Any) -> Any:
    """An Arrow array on these bytes."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _whole(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
