"""`payloadSchema=infer`: the schema of JSON payloads, from a sample.

Theory of operation. The source takes the sample when Spark asks for the columns, and writes the schema that it finds
into the option; so everything else sees a schema that was given. When Spark creates a reader it passes these columns
back, and they are the schema: there is no second sample, which could differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    NullType,
    StringType,
    StructField,
    StructType,
)

_MOST_DIGITS = 38
_LONG = 2**63
_MOST_NESTED = 64


def schema_of(payloads: Iterable[bytes]) -> StructType:
    """The schema of objects in JSON, as Spark infers it: members in the order in which they are seen first.

    Whole numbers are BIGINT, DECIMAL beyond 64 bits, and DOUBLE together with others; values of different kinds are
    STRING, as are times, members that are always null, and what is nested more than 64 deep. Payloads that are not
    objects are left out.
    """
    found: DataType = NullType()
    for payload in payloads:
        try:
            document = json.loads(payload.decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            found = _merged(found, _type_of(document))
    return _one_of_each_name(_without_nulls(found)) if isinstance(found, StructType) else StructType()


def _one_of_each_name(kind: Any) -> Any:
    """Without members whose name differs from that of one before only by case, as columns are compared, or that is no
    text (half of a surrogate pair).
    """
    if isinstance(kind, ArrayType):
        return ArrayType(_one_of_each_name(kind.elementType))
    if not isinstance(kind, StructType):
        return kind
    kept: dict[str, StructField] = {}
    for field in kind.fields:
        if any("\ud800" <= letter <= "\udfff" for letter in field.name):
            continue
        kept.setdefault(field.name.lower(), StructField(field.name, _one_of_each_name(field.dataType)))
    return StructType(list(kept.values()))


def _type_of(value: Any, depth: int = 0) -> DataType:
    if depth == _MOST_NESTED and isinstance(value, dict | list):
        return StringType()
    match value:
        case None:
            return NullType()
        case bool():
            return BooleanType()
        case int():
            if -_LONG <= value < _LONG:
                return LongType()
            return DecimalType(_MOST_DIGITS, 0) if len(str(abs(value))) <= _MOST_DIGITS else DoubleType()
        case float():
            return DoubleType()
        case str():
            return StringType()
        case list():
            element: DataType = NullType()
            for one in value:
                element = _merged(element, _type_of(one, depth + 1))
            return ArrayType(element)
        case _:
            return StructType([StructField(name, _type_of(inner, depth + 1)) for name, inner in value.items()])


_NUMBERS: Sequence[type[DataType]] = (LongType, DecimalType, DoubleType)
"""Each has all values of those before it, or nearly."""


def _merged(one: DataType, other: DataType) -> DataType:
    if isinstance(one, NullType) or one == other:
        return other
    if isinstance(other, NullType):
        return one
    if isinstance(one, StructType) and isinstance(other, StructType):
        types = {field.name: field.dataType for field in one.fields}
        for field in other.fields:
            types[field.name] = _merged(types.get(field.name, NullType()), field.dataType)
        return StructType([StructField(name, kind) for name, kind in types.items()])
    if isinstance(one, ArrayType) and isinstance(other, ArrayType):
        return ArrayType(_merged(one.elementType, other.elementType))
    if type(one) in _NUMBERS and type(other) in _NUMBERS:
        return max(one, other, key=lambda kind: _NUMBERS.index(type(kind)))
    return StringType()


def _without_nulls(kind: DataType) -> Any:
    """With STRING where no value was seen. An object without members has no columns: it is read as text."""
    if isinstance(kind, StructType) and kind.fields:
        return StructType([StructField(field.name, _without_nulls(field.dataType)) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_without_nulls(kind.elementType))
    return StringType() if isinstance(kind, NullType | StructType) else kind
