"""Spark's DDL for schemas, `id BIGINT, user STRUCT<name: STRING, tags: ARRAY<STRING>>`, parsed without a Spark session:
there is none where the source is planned.

Source: `DataType.fromDDL` and the grammar rules `colTypeList` and `dataType` of Spark's `SqlBaseParser.g4`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from natslog.errors import InvalidRequest, did_you_mean

_PLAIN: dict[str, Callable[[], DataType]] = {
    "boolean": BooleanType, "tinyint": ByteType, "byte": ByteType, "smallint": ShortType, "short": ShortType,
    "int": IntegerType, "integer": IntegerType, "bigint": LongType, "long": LongType, "float": FloatType,
    "real": FloatType, "double": DoubleType, "string": StringType, "binary": BinaryType, "date": DateType,
    "timestamp": TimestampType, "timestamp_ltz": TimestampType, "timestamp_ntz": TimestampNTZType,
}  # fmt: skip
_REFUSED = {
    "varchar": "string", "character": "string", "char": "string", "interval": "string", "variant": "string",
    "void": "string", "time": "string",
}  # fmt: skip
_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)*`)|([^\s<>(),:`']+)|('(?:[^'\\]|\\.)*')|([<>(),:]))")
_MOST_DIGITS = 38


class _Tokens:
    """The tokens of a DDL text, with their positions."""

    def __init__(self, text: str) -> None:
        self._found: list[tuple[str, int]] = []
        at = 0
        text = text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise InvalidRequest(f"syntax error at {text[at : at + 20]!r}")
            self._found.append((match.group().strip(), match.start()))
            at = match.end()
        self._at = 0

    def peek(self) -> str:
        return self._found[self._at][0] if self._at < len(self._found) else ""

    def take(self, *expected: str) -> str:
        """The next one, which must be one of `expected` if any are given."""
        token = self.peek()
        if not token or (expected and token.lower() not in expected):
            wanted = " or ".join(repr(word) for word in expected) or "a name or type"
            raise InvalidRequest(
                f"expected {wanted}, found {token!r}" if token else f"expected {wanted}, found the end"
            )
        self._at += 1
        return token

    def takes(self, word: str) -> bool:
        """Takes the next token if it is `word`; returns whether it was."""
        if self.peek().lower() != word:
            return False
        self._at += 1
        return True


def parse_ddl(text: str) -> StructType:
    """The schema of `name type, …`, or of `struct<…>`.

    Raises:
        InvalidRequest: what was expected, and what was found.
    """
    tokens = _Tokens(text)
    if tokens.peek().lower() == "struct" and "<" in text.split(",", 1)[0].split(":", 1)[0]:
        found: Any = _type(tokens)
    else:
        found = StructType(_fields(tokens, ""))
    if tokens.peek():
        raise InvalidRequest(f"expected ',' or the end, found {tokens.peek()!r}")
    assert isinstance(found, StructType)
    return found


def _fields(tokens: _Tokens, closing: str) -> list[StructField]:
    fields: list[StructField] = []
    while tokens.peek() != closing:
        if fields:
            tokens.take(",")
        name = tokens.take()
        if name in "<>(),:" or name.startswith("'"):
            raise InvalidRequest(f"expected a column's name, found {name!r}")
        name = name[1:-1].replace("``", "`") if name.startswith("`") else name
        tokens.takes(":")
        kind, nullable = _type(tokens), True
        if tokens.takes("not"):
            tokens.take("null")
            nullable = False
        if tokens.takes("comment"):
            tokens.take()
        fields.append(StructField(name, kind, nullable))
    return fields


def _type(tokens: _Tokens) -> DataType:
    word = tokens.take()
    name = word.lower()
    if name in ("decimal", "dec", "numeric"):
        return _decimal(tokens)
    if name == "array":
        tokens.take("<")
        inner = _type(tokens)
        tokens.take(">")
        return ArrayType(inner)
    if name == "map":
        tokens.take("<")
        key = _type(tokens)
        tokens.take(",")
        value = _type(tokens)
        tokens.take(">")
        return MapType(key, value)
    if name == "struct":
        tokens.take("<")
        fields = _fields(tokens, ">")
        tokens.take(">")
        return StructType(fields)
    if name in _REFUSED:
        raise InvalidRequest(f"the type {name} is not supported: write {_REFUSED[name]}, and cast after reading")
    if name not in _PLAIN:
        raise InvalidRequest(
            f"{word!r} is not a type{did_you_mean(word, (*_PLAIN, 'decimal', 'array', 'map', 'struct'))}"
        )
    return _PLAIN[name]()


def _decimal(tokens: _Tokens) -> DecimalType:
    if not tokens.takes("("):
        return DecimalType(10, 0)
    numbers = [tokens.take()]
    if tokens.takes(","):
        numbers.append(tokens.take())
    tokens.take(")")
    if not all(number.isdecimal() and len(number) <= 9 for number in numbers):
        raise InvalidRequest(f"decimal({', '.join(numbers)[:40]}): precision and scale must be whole numbers")
    precision, scale = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0
    if not 1 <= precision <= _MOST_DIGITS or scale > precision:
        raise InvalidRequest(
            f"decimal({precision}, {scale}): the precision must be 1 to {_MOST_DIGITS}, and the scale not above it"
        )
    return DecimalType(precision, scale)
