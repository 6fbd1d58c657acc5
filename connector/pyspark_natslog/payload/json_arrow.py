"""The fast path of JSON: `pyarrow.json` over all payloads of a chunk at once. It needs no compiled code.

Theory of operation. The payloads are joined by newlines and parsed as one block with an explicit schema. What Arrow
refuses (one row is enough) is left to the kernel of `json_rows`, which is the reference: None is returned. What Arrow
would accept differently is found before (`json_guards`), or has no column type here (`supports`).

Each payload is one row: `natslog.arrow.json_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
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

from natslog.arrow import json_guards
from natslog.arrow.json_blocks import MOST_BYTES, joined, without_object
from natslog.arrow.payloads import Payloads
from natslog.wire.json_values import parsed_type, with_values
from pyspark_natslog.payload.rows import Decoded

_DENSE = (BooleanType, ByteType, ShortType, IntegerType, LongType, FloatType, DoubleType)
_SCALARS = (*_DENSE, StringType, DateType, TimestampType, TimestampNTZType)


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
        if len(payloads.text) + len(payloads) > MOST_BYTES:
            return None
        blank, malformed = without_object(payloads)
        if not len(payloads):
            return Decoded({inner.name: pa.nulls(0, inner.type) for inner in self._types}, malformed, str, blank=blank)
        text, offsets = joined(payloads, blank | malformed)
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
        columns = [with_values(_whole(table.column(at)), kind.type) for at, kind in enumerate(self._types)]
        if not all(good.all() for _, good in columns):
            return None
        return {name: column for name, (column, _) in zip(self._types.names, columns, strict=True)}


def _whole(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
