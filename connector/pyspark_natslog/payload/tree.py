"""A payload's columns as a tree of nodes in one table, and where each node's entries are built.

Theory of operation. Spark's types are flattened in pre-order: a node's children stand right behind it, its subtree ends
at `END`. Every node collects entries as Arrow lays them out: a validity byte each, and in `cells` a value or, for
strings, lists and maps, the end of its bytes or items. A struct's children have an entry for each of its own; so
"position" means the same for a struct and all below it down to the next list or map.

How many entries a node can get is known before decoding (no element takes less than a byte). So memory for them is
reserved once, and the kernels never need more; pages that are not written to cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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

from pyspark_natslog.payload.layout import (
    BINARY,
    BITS,
    BOOL,
    BYTES,
    CELL,
    DATE,
    DECIMAL,
    DOUBLE,
    END,
    ENUM,
    FIELDS,
    FLOAT,
    HINT,
    INT,
    KIND,
    LIST,
    MAP,
    NAME,
    NAME_END,
    PRECISION,
    SCALE,
    STRING,
    STRUCT,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    VALID,
    Columns,
)

_KINDS: dict[type[DataType], int] = {
    BooleanType: BOOL, FloatType: FLOAT, DoubleType: DOUBLE, DecimalType: DECIMAL, DateType: DATE,
    TimestampType: TIMESTAMP, TimestampNTZType: TIMESTAMP_NTZ, StringType: STRING, BinaryType: BINARY,
    ArrayType: LIST, MapType: MAP, StructType: STRUCT,
}  # fmt: skip
_INTEGER_BITS: dict[type[DataType], int] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the tree.

    Attributes:
        path: as in messages (`user.tags.element`). `end`: where its subtree ends.
        is_repeated: below a list or map, so that it has any number of entries for a row.
        words: of an Avro enum.
    """

    path: str
    name: str
    kind: int
    type: DataType
    end: int
    is_repeated: bool
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """A struct as nodes; the root is node 0."""

    nodes: tuple[Node, ...]
    names: Any = field(repr=False)
    name_ends: tuple[int, ...] = field(repr=False)
    depth: int

    @classmethod
    def of(cls, schema: StructType, enums: dict[str, Sequence[str]] | None = None) -> Tree:
        """The tree of a checked schema.

        Args:
            enums: words of the nodes that hold an enum's indices, by path.
        """
        nodes: list[Node] = []
        depth = _flatten(nodes, "", "", schema, False, enums or {})
        encoded = [node.name.encode() for node in nodes]
        ends = tuple(int(end) for end in np.cumsum([len(name) for name in encoded]))
        return cls(tuple(nodes), np.frombuffer(b"".join(encoded) or b"\0", np.uint8), ends, depth)

    def children(self, node: int) -> list[int]:
        found, child = [], node + 1
        while child < self.nodes[node].end:
            found.append(child)
            child = self.nodes[child].end
        return found

    def room(self, rows: int, payload_bytes: int) -> Columns:
        """Empty columns for `rows` payloads of `payload_bytes` in total."""
        repeated = payload_bytes + 8
        table = np.zeros((len(self.nodes), FIELDS), np.int64)
        cells = valid = data = name = 0
        for at, node in enumerate(self.nodes):
            entries = repeated if node.is_repeated else rows
            table[at, [KIND, END, CELL, VALID, HINT]] = node.kind, node.end, cells, valid, at + 1
            table[at, [NAME, NAME_END]] = name, self.name_ends[at]
            table[at, BITS] = _INTEGER_BITS.get(type(node.type), 0)
            if isinstance(node.type, DecimalType):
                table[at, [PRECISION, SCALE]] = node.type.precision, node.type.scale
            cells += entries * (2 if node.kind == DECIMAL else 1)
            valid += entries
            name = self.name_ends[at]
        for at, node in enumerate(self.nodes):
            if node.kind in (STRING, BINARY):
                table[at, BYTES] = valid + data
                data += repeated
        held = np.empty(cells, np.int64)
        return Columns(table, self.names, held, held.view(np.float64), np.empty(valid + data, np.uint8))


def _flatten(
    nodes: list[Node], path: str, name: str, kind: DataType, is_repeated: bool, enums: dict[str, Sequence[str]]
) -> int:
    """Appends a type's nodes; returns how deep it nests."""
    at, deepest = len(nodes), 0
    nodes.append(Node(path, name, 0, kind, 0, is_repeated))
    for field_name, child, repeats in _inner(kind):
        child_path = f"{path}.{field_name}" if path else field_name
        deepest = max(deepest, _flatten(nodes, child_path, field_name, child, is_repeated or repeats, enums))
    words = tuple(enums.get(path, ()))
    nodes[at] = Node(path, name, ENUM if words else kind_of(kind), kind, len(nodes), is_repeated, words)
    return deepest + 1


def _inner(kind: DataType) -> list[tuple[str, DataType, bool]]:
    """(name, type, whether it repeats) of the types within a type."""
    if isinstance(kind, StructType):
        return [(inner.name, inner.dataType, False) for inner in kind.fields]
    if isinstance(kind, ArrayType):
        return [("element", kind.elementType, True)]
    if isinstance(kind, MapType):
        return [("key", kind.keyType, True), ("value", kind.valueType, True)]
    return []


def kind_of(kind: DataType) -> int:
    return INT if type(kind) in _INTEGER_BITS else _KINDS[type(kind)]


def is_decodable(kind: DataType) -> bool:
    """Whether a type itself (not what it holds) can be decoded into."""
    return type(kind) in _INTEGER_BITS or type(kind) in _KINDS


def as_nullable(kind: DataType) -> Any:
    """The type with every part nullable, as Spark makes a schema that it reads: a payload may lack any part."""
    if isinstance(kind, StructType):
        return StructType([StructField(inner.name, as_nullable(inner.dataType), True) for inner in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(as_nullable(kind.elementType), True)
    if isinstance(kind, MapType):
        return MapType(as_nullable(kind.keyType), as_nullable(kind.valueType), True)
    return kind
