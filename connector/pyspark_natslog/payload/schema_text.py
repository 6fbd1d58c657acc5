"""Parses `payloadSchema`: DDL, Spark's JSON, Avro's JSON, or the path of a file that contains one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructType

from natslog.errors import InvalidRequest
from pyspark_natslog.payload.avro_schema import AvroNode, fingerprint, parse_avro
from pyspark_natslog.payload.ddl import parse_ddl
from pyspark_natslog.payload.tree import is_decodable

_ENDINGS = (".json", ".avsc", ".ddl", ".sql", ".txt")
_MOST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PayloadSchema:
    """Columns of a payload, as Spark has them.

    Attributes:
        avro: the schema it was made from, with its fingerprint, if it was an Avro schema.
    """

    columns: StructType
    avro: AvroNode | None = None
    fingerprint: int = 0


def parse_payload_schema(text: str) -> PayloadSchema:
    """The columns that a schema gives.

    Raises:
        InvalidRequest: the file cannot be read, the text is not a schema, or a type is not supported.
    """
    if _is_path(text):
        text = _read(text)
    try:
        return _checked(_parse_json(text) if text[:1] in ("{", "[", '"') else PayloadSchema(parse_ddl(text)))
    except RecursionError as error:
        raise InvalidRequest("the types of the schema are nested too deeply") from error


def _checked(found: PayloadSchema) -> PayloadSchema:
    """Raises InvalidRequest: it has no columns, one name twice, or a type that is not supported."""
    if not found.columns.fields:
        raise InvalidRequest("the schema has no columns")
    _check_names(found.columns, "")
    for path, kind in _types(found.columns, ""):
        if not is_decodable(kind):
            raise InvalidRequest(f"{path}: the type {kind.simpleString()} is not supported")
    return found


def _is_path(text: str) -> bool:
    if text[:1] in ("{", "[", '"') or "\n" in text:
        return False
    return text.startswith(("/", "./", "../", "~", "file:")) or text.lower().endswith(_ENDINGS)


def _read(text: str) -> str:
    path = Path(text.removeprefix("file://").removeprefix("file:")).expanduser()
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidRequest(f"the file {text} is larger than {_MOST_BYTES} bytes, which is no schema")
        return path.read_text().strip()
    except OSError as error:
        raise InvalidRequest(
            f"cannot read the file {text}: {error.strerror}; the driver reads it, so it must be on the driver's machine"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the file {text} is not text in UTF-8") from error


def _parse_json(text: str) -> PayloadSchema:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the schema begins like JSON and is not valid JSON: {error}") from error
    if isinstance(body, dict) and body.get("type") == "struct":
        return PayloadSchema(_spark_json(body))
    found = parse_avro(text)
    assert isinstance(found.type, StructType)
    try:
        return PayloadSchema(found.type, found, fingerprint(text))
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidRequest(f"this is not an Avro schema that has a canonical form: {error!r}") from error


def _spark_json(body: dict[str, Any]) -> StructType:
    try:
        return StructType.fromJson(body)
    except Exception as error:  # PySpark raises KeyError, ValueError and errors of its own
        raise InvalidRequest(
            f"this is not Spark's JSON of a schema (as StructType.json() returns it): {error!r}"
        ) from error


def _types(kind: DataType, path: str) -> Iterator[tuple[str, DataType]]:
    """Every type within a type, and its path."""
    yield path, kind
    if isinstance(kind, StructType):
        for inner in kind.fields:
            yield from _types(inner.dataType, f"{path}.{inner.name}" if path else inner.name)
    elif isinstance(kind, ArrayType):
        yield from _types(kind.elementType, f"{path}.element")
    elif isinstance(kind, MapType):
        if not isinstance(kind.keyType, StringType):
            raise InvalidRequest(f"{path}: the keys of a map must be string, not {kind.keyType.simpleString()}")
        yield from _types(kind.valueType, f"{path}.value")


def _check_names(kind: DataType, path: str) -> None:
    for inner_path, inner in _types(kind, path):
        if isinstance(inner, StructType):
            lower = [name.lower() for name in inner.names]
            twice = next((name for name in inner.names if lower.count(name.lower()) > 1), None)
            if twice is not None:
                raise InvalidRequest(f"the name {twice!r} occurs twice{f' in {inner_path}' if inner_path else ''}")
