"""Avro's schema resolution: columns of the schema that wrote a datum, as columns of the schema that reads it.

Theory of operation. The kernel decodes data by the writer's schema into columns of Spark's types. Here these columns
become those of the reader: whole columns are matched by name, converted, or filled with defaults, without a step per
datum. What cannot be resolved is found once, by the two schemas.

Source: the Avro specification 1.12, "Schema Resolution". Beyond it, a null where the reader expects a value stays null,
as every column in Spark is nullable; an enum without a default may have any of the writer's symbols, because it is a
string in Spark; names of types are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DecimalType, DoubleType, LongType

from natslog.errors import InvalidRequest
from pyspark_natslog.payload.avro_schema import NO_DEFAULT, AvroNode
from pyspark_natslog.payload.tree import as_nullable

_PROMOTED = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}


class Resolution:
    """From one schema to another, for the fields `wanted` of the reader's record.

    Raises:
        InvalidRequest: data of the writer's schema cannot be read by the reader's; names the field.
    """

    def __init__(self, writer: AvroNode, reader: AvroNode, wanted: tuple[str, ...]) -> None:
        self._sources = _sources(writer, reader)
        self._fields = {
            name: child for name, child in zip(reader.names, reader.children, strict=True) if name in wanted
        }
        self._defaults = dict(zip(reader.names, reader.defaults, strict=True))
        self._writers = dict(zip(writer.names, writer.children, strict=True))
        for name, child in self._fields.items():
            source = self._sources.get(name)
            if source is not None:
                _check(self._writers[source], child, name)
            else:
                _check_default(self._defaults[name], child, name)

    @property
    def writer_fields(self) -> list[str]:
        """The fields that are to be decoded."""
        return [source for name, source in self._sources.items() if name in self._fields]

    def resolved(self, columns: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """The reader's columns by name, made of the writer's."""
        found = {}
        for name, child in self._fields.items():
            source = self._sources.get(name)
            if source is None:
                found[name] = _filled(self._defaults[name], child, rows)
            else:
                found[name] = _resolved(columns[source], self._writers[source], child)
        return found


def _sources(writer: AvroNode, reader: AvroNode) -> dict[str, str]:
    """The writer's field for each of the reader's fields, by its name or an alias."""
    found = {}
    for name, aliases in zip(reader.names, reader.aliases, strict=True):
        source = next((one for one in (name, *aliases) if one in writer.names), None)
        if source is not None:
            found[name] = source
    return found


def _real(node: AvroNode) -> AvroNode:
    """The branch of a union with null; a union of two numbers is the wider one."""
    if node.kind != "union":
        return node
    if len(node.branches) == 1:
        return node.branches[0]
    if isinstance(node.type, LongType):
        return AvroNode("long", node.type)
    return AvroNode("double", node.type) if isinstance(node.type, DoubleType) else node


def _check(writer: AvroNode, reader: AvroNode, path: str) -> None:
    one, other = _real(writer), _real(reader)
    if one.kind == other.kind == "record":
        for name, aliases, child, default in zip(
            other.names, other.aliases, other.children, other.defaults, strict=True
        ):
            source = next((at for at in (name, *aliases) if at in one.names), None)
            if source is not None:
                _check(one.children[one.names.index(source)], child, f"{path}.{name}")
            else:
                _check_default(default, child, f"{path}.{name}")
        return
    if one.kind == other.kind and one.kind in ("array", "map"):
        _check(one.children[0], other.children[0], f"{path}.{'element' if one.kind == 'array' else 'value'}")
        return
    if not (one.kind == other.kind and one.size == other.size and one.type == other.type) and not _promotes(one, other):
        raise InvalidRequest(f"{path} was written as {_shown(one)}, and payloadSchema has {_shown(other)}")


def _check_default(default: Any, reader: AvroNode, path: str) -> None:
    """For a field that the writer does not have. Raises InvalidRequest: there is none, or it is of another type."""
    if default is NO_DEFAULT:
        raise InvalidRequest(f"the writer's schema has no field {path}, and payloadSchema has no default for it")
    try:
        _filled(default, reader, 1)
    except (ValueError, TypeError, AttributeError, ArithmeticError, pa.ArrowException) as error:
        raise InvalidRequest(f"{path}: the default in payloadSchema is not of the field's type ({error})") from error


def _promotes(one: AvroNode, other: AvroNode) -> bool:
    if isinstance(one.type, DecimalType) and isinstance(other.type, DecimalType):
        return one.type.scale == other.type.scale and one.type.precision <= other.type.precision
    is_plain = all(not isinstance(node.type, DecimalType) for node in (one, other))
    return is_plain and other.kind in _PROMOTED.get(one.kind, ()) and _is_plain(one) and _is_plain(other)


def _is_plain(node: AvroNode) -> bool:
    """Whether a number or text has no logical type."""
    names = {
        "int": "int",
        "long": "bigint",
        "float": "float",
        "double": "double",
        "string": "string",
        "bytes": "binary",
    }
    return node.type is not None and node.type.simpleString() == names.get(node.kind)


def _shown(node: AvroNode) -> str:
    logical = node.type is not None and not _is_plain(node) and node.kind not in ("record", "array", "map", "enum")
    return f"{node.kind} ({node.type.simpleString()})" if logical and node.type is not None else node.kind


def _arrow_type(node: AvroNode) -> pa.DataType:
    assert node.type is not None, "columns have types"
    return to_arrow_type(as_nullable(node.type), timezone="UTC")


def _resolved(column: Any, writer: AvroNode, reader: AvroNode) -> Any:
    one, other, kind = _real(writer), _real(reader), _arrow_type(reader)
    mask = column.is_null() if column.null_count else None
    if one.kind == other.kind == "record":
        children = []
        for name, aliases, child, default in zip(
            other.names, other.aliases, other.children, other.defaults, strict=True
        ):
            source = next((at for at in (name, *aliases) if at in one.names), None)
            if source is None:
                children.append(_filled(default, child, len(column)))
            else:
                place = one.names.index(source)
                children.append(_resolved(column.field(place), one.children[place], child))
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if one.kind == other.kind == "array":
        values = _resolved(column.values, one.children[0], other.children[0])
        return pa.ListArray.from_arrays(column.offsets, values, type=kind, mask=mask)
    if one.kind == other.kind == "map":
        values = _resolved(column.items, one.children[0], other.children[0])
        return pa.MapArray.from_arrays(column.offsets, column.keys, values, type=kind, mask=mask)
    if one.kind == other.kind == "enum":
        return _with_default_word(column, one, other)
    if column.type == kind:
        return column
    if pa.types.is_floating(kind):
        return column.cast(kind, safe=False)  # above 2^53 it is rounded, as the specification has it
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:  # bytes that are no text
        return pa.array([None if one is None else one.decode("utf-8", "replace") for one in column.to_pylist()], kind)


def _with_default_word(column: Any, writer: AvroNode, reader: AvroNode) -> Any:
    """The reader's default in the place of symbols that it does not have; without a default they stay."""
    if not reader.defaults or set(writer.words) <= set(reader.words):
        return column
    known = pc.is_in(column, value_set=pa.array(reader.words, pa.string()))
    return pc.if_else(pc.or_(known, pc.is_null(column)), column, pa.scalar(reader.defaults[0], pa.string()))


def _filled(default: Any, reader: AvroNode, rows: int) -> Any:
    """A column of the default, which the schema states in JSON. Raises ValueError: it is not of the type."""
    kind = _arrow_type(reader)
    value = _value(default, reader)
    if isinstance(value, int) and pa.types.is_temporal(kind):
        scalar = pa.array([value], pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)[0]
    else:
        scalar = pa.array([value], kind)[0]
    return pa.repeat(scalar, rows)


def _value(default: Any, node: AvroNode) -> Any:
    """As Arrow takes it. Raises ValueError."""
    match node.kind:
        case "null" if default is None:
            return None
        case "boolean" if isinstance(default, bool):
            return default
        case "string" if isinstance(default, str):
            return default
        case "enum" if default in node.words:
            return default
        case "bytes" | "fixed" if isinstance(default, str):
            return _bytes(default, node)
        case "record" if isinstance(default, dict):
            return {
                name: _value(default.get(name, own), child)
                for name, child, own in zip(node.names, node.children, node.defaults, strict=True)
            }
        case "array" if isinstance(default, list):
            return [_value(one, node.children[0]) for one in default]
        case "map" if isinstance(default, dict):
            return [(name, _value(one, node.children[0])) for name, one in default.items()]
        case "union":
            return _of_union(default, node)
        case "int" | "long" if isinstance(default, int) and not isinstance(default, bool):
            return default * node.factor
        case "float" | "double" if isinstance(default, int | float) and not isinstance(default, bool):
            return float(default)
    shown = "there is none" if default is NO_DEFAULT else f"{default!r} is not {node.kind}"
    raise ValueError(shown)


def _of_union(default: Any, node: AvroNode) -> Any:
    """The default as the first branch has it that it is of."""
    for branch in node.children:
        try:
            value = _value(default, branch)
        except ValueError:
            continue
        if branch.kind == "null" or _real(node).kind != "union":
            return value
        at = node.branches.index(branch)
        return {f"member{other}": value if other == at else None for other in range(len(node.branches))}
    raise ValueError(f"{default!r} is of no branch of the union")


def _bytes(default: str, node: AvroNode) -> bytes | Decimal:
    data = default.encode("latin-1")
    if node.kind == "fixed" and len(data) != node.size:
        raise ValueError(f"{default!r} has not {node.size} bytes")
    if not isinstance(node.type, DecimalType):
        return data
    number = int.from_bytes(data, "big", signed=True)
    digits = tuple(map(int, str(abs(number))))
    return Decimal((int(number < 0), digits, -node.type.scale))  # exact, whatever the context's precision is
