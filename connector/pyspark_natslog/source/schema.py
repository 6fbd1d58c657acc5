"""The source's columns as Spark's types, and stored batches converted to them without copying values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from natslog.arrow.schema import HEADERS_TYPE, rows_of_items
from natslog.errors import ConfigError, did_you_mean

_PAIR = StructType([StructField("key", StringType()), StructField("value", StringType())])
_SPARK_TYPES: dict[str, DataType] = {
    "stream": StringType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "subject": StringType(),
    "key": BinaryType(),
    "headers": ArrayType(_PAIR),
}
HEADERS_AS_MAP: DataType = MapType(StringType(), StringType())
METADATA_COLUMNS = tuple(_SPARK_TYPES)
"""All but the payload: `value`, or the typed columns that replace it."""
_SPARK_HEADERS = pa.list_(pa.field("element", HEADERS_TYPE.value_type))


def spark_schema(columns: Sequence[str], payload: Mapping[str, DataType] = {"value": BinaryType()}) -> StructType:
    """The schema of these columns, in this order.

    Args:
        payload: types of the payload's columns.
    """
    types = {**_SPARK_TYPES, **payload}
    return StructType([StructField(name, types[name]) for name in columns])


def checked_columns(schema: StructType, payload: Mapping[str, DataType]) -> tuple[str, ...]:
    """The columns of a schema.

    Args:
        payload: types of the payload's columns.

    Raises:
        ConfigError: one that the source does not have, or of another type.
    """
    types = {**_SPARK_TYPES, **payload}
    for column in schema.fields:
        if column.name not in types:
            hint = did_you_mean(column.name, tuple(types))
            raise ConfigError(f"schema: the source has no column {column.name!r}{hint}", column=column.name)
        expected = types[column.name]
        if column.dataType.simpleString() != expected.simpleString():
            raise ConfigError(
                f"schema: column {column.name!r} is {expected.simpleString()}, not {column.dataType.simpleString()}; "
                "cast it after reading",
                column=column.name,
            )
    return tuple(column.name for column in schema.fields)


def to_spark(
    batch: pa.RecordBatch, stream: str, columns: Sequence[str], *, headers_as_map: bool = False
) -> pa.RecordBatch:
    """The batch as Spark expects it: these columns in this order."""
    arrays = [_column(batch, stream, name, headers_as_map) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _column(batch: pa.RecordBatch, stream: str, name: str, headers_as_map: bool) -> Any:
    if name == "stream":
        return pa.repeat(pa.scalar(stream), batch.num_rows)
    column = batch.column(name)
    if name == "headers":  # Spark has another name for the items of a list; the buffers are the same
        return _as_map(column) if headers_as_map else column.cast(_SPARK_HEADERS)
    return column


def _as_map(headers: Any) -> Any:
    """A map for each row, on the same values; of a repeated name the first value."""
    rows, pairs = rows_of_items(headers), headers.flatten()
    names = pc.dictionary_encode(pairs.field("key")).indices.to_numpy()
    kept = np.unique(rows * (int(names.max(initial=0)) + 1) + names, return_index=True)[1]
    if len(kept) < len(names):
        kept.sort()
        pairs, rows = pairs.take(pa.array(kept)), rows[kept]
    offsets = np.searchsorted(rows, np.arange(len(headers) + 1)).astype(np.int32)
    mask = headers.is_null() if headers.null_count else None
    return pa.MapArray.from_arrays(pa.array(offsets), pairs.field("key"), pairs.field("value"), mask=mask)
