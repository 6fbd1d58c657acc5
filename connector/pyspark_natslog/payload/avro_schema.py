"""Avro schemas: their types in Spark, the nodes that the kernel's program is made of, and the fingerprint.

    {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}, …]}

Types map as in Spark's `from_avro`: unions with null are nullable, int|long is bigint, float|double is double, other
unions are structs of `member0`, `member1`, …; logical types date, timestamp-millis and -micros, local-timestamp-millis
and -micros, decimal and uuid.

Source: the Avro specification 1.12 (binary encoding, single-object encoding, parsing canonical form, CRC-64-AVRO);
Spark's `SchemaConverters.toSqlType`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from natslog.errors import InvalidRequest, did_you_mean

_PRIMITIVES: dict[str, DataType] = {
    "boolean": BooleanType(), "int": IntegerType(), "long": LongType(), "float": FloatType(), "double": DoubleType(),
    "bytes": BinaryType(), "string": StringType(),
}  # fmt: skip
_LOGICAL: dict[tuple[str, str], DataType] = {
    ("int", "date"): DateType(),
    ("long", "timestamp-millis"): TimestampType(),
    ("long", "timestamp-micros"): TimestampType(),
    ("long", "local-timestamp-millis"): TimestampNTZType(),
    ("long", "local-timestamp-micros"): TimestampNTZType(),
}


class NoDefault(Enum):
    """Of a field that has none; `null` is a default."""

    NO_DEFAULT = "no default"


NO_DEFAULT = NoDefault.NO_DEFAULT
_MOST_DIGITS = 38
_MOST_NODES = 10_000
_NUMBERS = ({"int", "long"}, {"float", "double"})
_EMPTY = 0xC15D213AA4D7A795


@dataclass(frozen=True, slots=True)
class AvroNode:
    """A parsed type.

    Attributes:
        kind: `record`, `array`, `map`, `union`, `enum`, `fixed` or a primitive. `type`: Spark's; None for null.
        children: of a record its fields, of a union its branches, of array and map the items. `names`: of the fields,
            with their `aliases` and `defaults` (as in the schema's JSON; NO_DEFAULT); of an enum, its default.
        factor: a cell is the datum times this (1,000 for timestamps in ms). `size`: of a fixed. `words`: of an enum.
    """

    kind: str
    type: DataType | None
    children: tuple[AvroNode, ...] = ()
    names: tuple[str, ...] = ()
    factor: int = 1
    size: int = 0
    words: tuple[str, ...] = ()
    aliases: tuple[tuple[str, ...], ...] = ()
    defaults: tuple[Any, ...] = ()

    @property
    def branches(self) -> tuple[AvroNode, ...]:
        """Of a union, those that are not null."""
        return tuple(branch for branch in self.children if branch.kind != "null")

    def least_bytes(self) -> int:
        """The minimal number of bytes of a datum."""
        match self.kind:
            case "null":
                return 0
            case "fixed":
                return self.size
            case "record":
                return sum(child.least_bytes() for child in self.children)
            case "float":
                return 4
            case "double":
                return 8
            case _:
                return 1


def parse_avro(text: str) -> AvroNode:
    """A record's schema.

    Raises:
        InvalidRequest: not an Avro schema, not a record, or a type that Spark does not have.
    """
    try:
        body = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the schema is not valid JSON: {error}") from error
    try:
        found = _Parser().parse(body, "", "")
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(
            f"this is not an Avro schema: a name, size or list in it has another type ({error})"
        ) from error
    if found.kind != "record":
        raise InvalidRequest(
            f"the Avro schema has the type {found.kind}; it must be a record, whose fields become the columns"
        )
    return found


class _Parser:
    """Walks a schema and collects the names that it defines."""

    def __init__(self) -> None:
        self._named: dict[str, AvroNode | None] = {}
        self._sizes: dict[str, int] = {}
        self._nodes = 0

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > _MOST_NODES:
            raise InvalidRequest(f"the schema has more than {_MOST_NODES} parts, named types counted at each use")

    def parse(self, body: Any, namespace: str, path: str) -> AvroNode:
        self._count(1)
        if isinstance(body, list):
            return self._union([self.parse(branch, namespace, path) for branch in body], path)
        if isinstance(body, str):
            return self._by_name(body, namespace, path)
        if not isinstance(body, dict) or "type" not in body:
            raise InvalidRequest(f"{path or 'the schema'}: {json.dumps(body)[:60]} is not an Avro type")
        kind = body["type"]
        if isinstance(kind, dict | list):
            return self.parse(kind, namespace, path)
        try:
            if kind in ("record", "error", "enum", "fixed"):
                return self._define(kind, body, namespace, path)
            if kind == "array":
                return self._array(self.parse(body["items"], namespace, f"{path}.element"), path)
            if kind == "map":
                values = self.parse(body["values"], namespace, f"{path}.value")
                return AvroNode("map", MapType(StringType(), _spark(values, path), _is_nullable(values)), (values,))
        except KeyError as error:
            raise InvalidRequest(f"{path or 'the schema'}: the {kind} lacks {error}") from error
        return self._logical(self._by_name(kind, namespace, path), body, path)

    def _by_name(self, name: Any, namespace: str, path: str) -> AvroNode:
        if name == "null":
            return AvroNode("null", None)
        if isinstance(name, str) and name in _PRIMITIVES:
            return AvroNode(name, _PRIMITIVES[name])
        full = _full_name(str(name), namespace)
        if full not in self._named:
            raise InvalidRequest(
                f"{path}: {name!r} is not an Avro type{did_you_mean(str(name), (*_PRIMITIVES, 'record'))}"
            )
        found = self._named[full]
        if found is None:
            raise InvalidRequest(f"{path}: {full} contains itself; Spark has no recursive types")
        self._count(self._sizes[full])
        return found

    def _define(self, kind: str, body: dict[str, Any], namespace: str, path: str) -> AvroNode:
        full = _full_name(body["name"], body.get("namespace", namespace))
        inner = full.rpartition(".")[0]
        if full in self._named:
            raise InvalidRequest(f"{path}: {full} is defined twice")
        self._named[full], before = None, self._nodes
        if kind == "enum":
            default = (str(body["default"]),) if "default" in body else ()
            found = AvroNode("enum", StringType(), words=tuple(body["symbols"]), defaults=default)
        elif kind == "fixed":
            found = self._logical(AvroNode("fixed", BinaryType(), size=int(body["size"])), body, path)
        else:
            names = tuple(str(field["name"]) for field in body["fields"])
            children = tuple(
                self.parse(field["type"], inner, f"{path}.{name}" if path else name)
                for field, name in zip(body["fields"], names, strict=True)
            )
            fields = [
                StructField(name, _spark(child, f"{path}.{name}"), _is_nullable(child))
                for name, child in zip(names, children, strict=True)
            ]
            aliases = tuple(tuple(map(str, field.get("aliases", ()))) for field in body["fields"])
            defaults = tuple(field.get("default", NO_DEFAULT) for field in body["fields"])
            found = AvroNode("record", StructType(fields), children, names, aliases=aliases, defaults=defaults)
        self._named[full], self._sizes[full] = found, self._nodes - before
        return found

    def _array(self, items: AvroNode, path: str) -> AvroNode:
        if items.least_bytes() == 0:  # a few bytes could encode any number of them
            raise InvalidRequest(f"{path}: an array of items that take no bytes is not supported")
        return AvroNode("array", ArrayType(_spark(items, path), _is_nullable(items)), (items,))

    def _union(self, branches: list[AvroNode], path: str) -> AvroNode:
        kinds = [branch.kind for branch in branches]
        if "union" in kinds or not branches:
            raise InvalidRequest(f"{path}: a union must have branches, and none of them may be a union")
        union = AvroNode("union", None, tuple(branches))
        real = union.branches
        kind: DataType
        if not real:
            raise InvalidRequest(f"{path}: a column that is always null is not supported")
        if len(real) == 1:
            kind = _spark(real[0], path)
        elif set(kinds) - {"null"} in _NUMBERS:  # Spark leaves out their logical types
            kind = LongType() if "long" in kinds else DoubleType()
            branches = [one if one.kind == "null" else AvroNode(one.kind, _PRIMITIVES[one.kind]) for one in branches]
        else:
            kind = StructType([StructField(f"member{at}", _spark(branch, path)) for at, branch in enumerate(real)])
        return AvroNode("union", kind, tuple(branches))

    def _logical(self, plain: AvroNode, body: dict[str, Any], path: str) -> AvroNode:
        """The type with its logical type if Spark has it; else the underlying type."""
        logical = body.get("logicalType")
        if logical == "decimal" and plain.kind in ("bytes", "fixed"):
            precision, scale = int(body["precision"]), int(body.get("scale", 0))
            if not 1 <= precision <= _MOST_DIGITS or not 0 <= scale <= precision:
                raise InvalidRequest(f"{path}: decimal({precision}, {scale}) exceeds Spark's {_MOST_DIGITS} digits")
            return AvroNode(plain.kind, DecimalType(precision, scale), size=plain.size)
        kind = _LOGICAL.get((plain.kind, str(logical)))
        if kind is None:
            return plain
        return AvroNode(plain.kind, kind, factor=1000 if str(logical).endswith("millis") else 1)


def _spark(node: AvroNode, path: str) -> DataType:
    if node.type is None:
        raise InvalidRequest(f"{path}: a column that is always null is not supported")
    return node.type


def _is_nullable(node: AvroNode) -> bool:
    return node.kind == "union" and any(child.kind == "null" for child in node.children)


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


# ---- fingerprint ----


def fingerprint(text: str) -> int:
    """CRC-64-AVRO of the schema's parsing canonical form: what stands in the header of single-object encoding."""
    value = _EMPTY
    for byte in canonical_form(json.loads(text)).encode():
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 255]
    return value


def canonical_form(body: Any, namespace: str = "") -> str:
    """The schema with all that doesn't change its data stripped, in one spelling."""
    if isinstance(body, list):
        return f"[{','.join(canonical_form(branch, namespace) for branch in body)}]"
    if isinstance(body, str):
        known = body in _PRIMITIVES or body == "null"
        return _quoted(body if known else _full_name(body, namespace))
    kind = body["type"]
    if not isinstance(kind, str):
        return canonical_form(kind, namespace)
    parts = []
    if "name" in body and kind in ("record", "error", "enum", "fixed"):
        full = _full_name(body["name"], body.get("namespace", namespace))
        namespace = full.rpartition(".")[0]
        parts.append(f'"name":{_quoted(full)}')
    elif kind not in ("array", "map"):
        return canonical_form(kind, namespace)
    parts.append(f'"type":{json.dumps(kind)}')
    if kind in ("record", "error"):
        fields = [
            f'{{"name":{_quoted(field["name"])},"type":{canonical_form(field["type"], namespace)}}}'
            for field in body["fields"]
        ]
        parts.append(f'"fields":[{",".join(fields)}]')
    if kind == "enum":
        symbols = ",".join(_quoted(word) for word in body["symbols"])
        parts.append(f'"symbols":[{symbols}]')
    if kind == "array":
        parts.append(f'"items":{canonical_form(body["items"], namespace)}')
    if kind == "map":
        parts.append(f'"values":{canonical_form(body["values"], namespace)}')
    if kind == "fixed":
        parts.append(f'"size":{int(body["size"])}')
    return f"{{{','.join(parts)}}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_EMPTY & -(value & 1))
        table.append(value)
    return tuple(table)


_TABLE = _crc_table()
