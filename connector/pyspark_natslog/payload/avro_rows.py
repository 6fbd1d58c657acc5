"""Avro payloads into typed columns: datums of one schema, with or without the header of single-object encoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pyspark.sql.types import DecimalType, StructField, StructType

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload import assembling, kernels_avro, native
from pyspark_natslog.payload.avro_schema import AvroNode
from pyspark_natslog.payload.kernels_avro import CUT_SHORT, GOOD, NO_DATUM, OTHER_HEADER, TRAILING
from pyspark_natslog.payload.layout import Words
from pyspark_natslog.payload.rows import Decoded
from pyspark_natslog.payload.tree import Tree, as_nullable

MAGIC = b"\xc3\x01"
_OPS = {
    "null": kernels_avro.NULL, "boolean": kernels_avro.BOOLEAN, "int": kernels_avro.INT, "long": kernels_avro.LONG,
    "float": kernels_avro.FLOAT, "double": kernels_avro.DOUBLE, "bytes": kernels_avro.BYTES,
    "string": kernels_avro.STRING, "fixed": kernels_avro.FIXED, "enum": kernels_avro.ENUM,
    "record": kernels_avro.RECORD, "array": kernels_avro.ARRAY, "map": kernels_avro.MAP, "union": kernels_avro.UNION,
}  # fmt: skip


class AvroDecoder:
    """Decodes the fields of `columns`, and skips the others.

    Args:
        schema: the schema that the payloads were written with. `fingerprint`: its CRC-64-AVRO; None: no payload has a
            header.
    """

    def __init__(self, schema: AvroNode, fingerprint: int | None, columns: Sequence[str]) -> None:
        assert isinstance(schema.type, StructType)
        kept = [StructField(name, as_nullable(schema.type[name].dataType)) for name in columns]
        enums: dict[str, Sequence[str]] = {}
        _collect_enums(schema, "", enums)
        self._tree = Tree.of(StructType(kept), enums)
        self._by_path = {node.path: at for at, node in enumerate(self._tree.nodes)}
        rows: list[list[int]] = []
        self._paths: list[str] = []
        self._depth = self._compile(schema, "", rows)
        self._program = np.array(rows, np.int64)
        header = b"" if fingerprint is None else MAGIC + fingerprint.to_bytes(8, "little")
        self._header = np.frombuffer(header, np.uint8)

    def _compile(self, node: AvroNode, path: str, rows: list[list[int]]) -> int:
        """Appends a type's program; returns how deep it nests."""
        at, op, deepest = len(rows), _OPS[node.kind], 0
        size = node.size or len(node.words)
        if node.kind in ("bytes", "fixed") and isinstance(node.type, DecimalType):
            op = kernels_avro.DECIMAL
        if node.kind == "union":
            size = len(node.children)
            op = kernels_avro.UNION_STRUCT if _is_struct_union(node) else op
        rows.append([op, self._by_path.get(path, -1), 0, size, node.factor])
        self._paths.append(path)
        for child_path, child in _inner(node, path):
            deepest = max(deepest, self._compile(child, child_path, rows))
        rows[at][kernels_avro.END] = len(rows)
        return deepest + 1

    def decode(self, payloads: Payloads) -> Decoded:
        rows, text = len(payloads), payloads.text
        columns = self._tree.room(rows, len(text))
        results, where = np.empty(rows, np.uint8), np.zeros((rows, 2), np.int64)
        stack = np.empty((self._depth + 1, 3), np.int64)
        native.decode_avro(
            columns, self._program, self._header, text, payloads.offsets, results, where, stack, Words.new()
        )
        return Decoded(
            arrays=assembling.arrays(self._tree, columns),
            malformed=results != GOOD,
            reason=lambda row: self._reason(
                payloads[row], int(results[row]), int(where[row, 0]), int(where[row, 1] - payloads.offsets[row])
            ),
        )

    def _reason(self, payload: bytes, result: int, node: int, at: int) -> str:
        if result == OTHER_HEADER:
            theirs, ours = (int.from_bytes(header[2:10], "little") for header in (payload, self._header.tobytes()))
            return (
                f"it begins with the header of another schema: the fingerprint is {theirs:016x}, payloadSchema's is "
                f"{ours:016x} (a payload without a header is read this way too if its data begin with C3 01)"
            )
        hint = ""
        if payload.startswith(b"\0") and len(payload) > 5:
            hint = "; it may have a Confluent header (00 and a schema id, 5 bytes): set the option schemaRegistry"
        path = self._paths[node] or "the record"
        reasons = {
            CUT_SHORT: f"it ends within {path}",
            NO_DATUM: f"byte {at} is not a valid datum of {path}",
            TRAILING: f"the datum is followed by more bytes, from byte {at} on",
        }
        return reasons[result] + hint


def _is_struct_union(node: AvroNode) -> bool:
    """Whether Spark makes a struct of the union: its branches are not one type."""
    return isinstance(node.type, StructType) and len(node.branches) > 1


def _inner(node: AvroNode, path: str) -> list[tuple[str, AvroNode]]:
    """The types within a type, each with the path of the column that it is decoded into."""
    if node.kind == "record":
        return [
            (f"{path}.{name}" if path else name, child) for name, child in zip(node.names, node.children, strict=True)
        ]
    if node.kind in ("array", "map"):
        return [(f"{path}.{'element' if node.kind == 'array' else 'value'}", node.children[0])]
    if _is_struct_union(node):
        real = {id(branch): at for at, branch in enumerate(node.branches)}
        return [(f"{path}.member{real.get(id(child), '-')}", child) for child in node.children]
    return [(path, child) for child in node.children]


def _collect_enums(node: AvroNode, path: str, found: dict[str, Sequence[str]]) -> None:
    if node.kind == "enum":
        found[path] = node.words
    for child_path, child in _inner(node, path):
        _collect_enums(child, child_path, found)
