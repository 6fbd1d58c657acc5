"""Makes Arrow arrays of Spark's types from what the kernels have built; most buffers are used without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DecimalType

from pyspark_natslog.payload.layout import (
    BINARY,
    BITS,
    BOOL,
    BYTES,
    CELL,
    COUNT,
    DATE,
    DECIMAL,
    DOUBLE,
    ENUM,
    FLOAT,
    INT,
    LIST,
    MAP,
    STRING,
    STRUCT,
    VALID,
    Columns,
)
from pyspark_natslog.payload.tree import Tree

_INTEGERS = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def arrays(tree: Tree, columns: Columns) -> dict[str, Any]:
    """The root's children by name, each with an entry per row."""
    return {tree.nodes[child].name: _array(tree, columns, child) for child in tree.children(0)}


def _array(tree: Tree, columns: Columns, at: int) -> Any:
    node, count = tree.nodes[at], int(columns.table[at, COUNT])
    width = 2 if node.kind == DECIMAL else 1
    base = int(columns.table[at, CELL])
    cells = columns.cells[base : base + count * width]
    valid = columns.data[int(columns.table[at, VALID]) :][:count]
    nulls = count - int(np.count_nonzero(valid))
    bitmap = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
    if node.kind == STRUCT:
        kind = to_arrow_type(node.type, timezone="UTC")
        children = [_array(tree, columns, child) for child in tree.children(at)]
        return pa.Array.from_buffers(kind, count, [bitmap], nulls, children=children)
    if node.kind == LIST:
        kind = to_arrow_type(node.type, timezone="UTC")
        return pa.Array.from_buffers(
            kind, count, [bitmap, _offsets(cells)], nulls, children=[_array(tree, columns, at + 1)]
        )
    if node.kind == MAP:
        key, value = tree.children(at)
        kind = to_arrow_type(node.type, timezone="UTC")
        entries = pa.StructArray.from_arrays(
            [_array(tree, columns, key), _array(tree, columns, value)], fields=[kind.key_field, kind.item_field]
        )
        return pa.Array.from_buffers(kind, count, [bitmap, _offsets(cells)], nulls, children=[entries])
    if node.kind in (STRING, BINARY):
        held = columns.data[int(columns.table[at, BYTES]) :][: int(cells[-1]) if count else 0]
        kind = pa.string() if node.kind == STRING else pa.binary()
        return pa.Array.from_buffers(kind, count, [bitmap, _offsets(cells), pa.py_buffer(held)], nulls)
    return _fixed(tree, columns, at, cells, valid, bitmap, nulls)


def _fixed(tree: Tree, columns: Columns, at: int, cells: Any, valid: Any, bitmap: Any, nulls: int) -> Any:
    """An array of a type whose values all have the same size."""
    node, count = tree.nodes[at], len(valid)
    if node.kind == ENUM:
        words = pa.array(node.words, pa.string())
        return words.take(pa.array(cells.astype(np.int32), mask=valid == 0))
    if node.kind == BOOL:
        values: Any = np.packbits((cells == 1).view(np.uint8), bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), count, [bitmap, pa.py_buffer(values)], nulls)
    if node.kind == DECIMAL:
        assert isinstance(node.type, DecimalType)
        kind = pa.decimal128(node.type.precision, node.type.scale)
        return pa.Array.from_buffers(kind, count, [bitmap, pa.py_buffer(cells)], nulls)
    kind = to_arrow_type(node.type, timezone="UTC")
    if node.kind == INT:
        values = cells.astype(_INTEGERS[int(columns.table[at, BITS])], copy=False)
    elif node.kind == DATE:
        values = cells.astype(np.int32)
    elif node.kind == FLOAT:
        with np.errstate(over="ignore"):  # out of a float's range: infinite, as in Spark
            values = cells.view(np.float64).astype(np.float32)
    else:
        values = cells.view(np.float64) if node.kind == DOUBLE else cells
    return pa.Array.from_buffers(kind, count, [bitmap, pa.py_buffer(values)], nulls)


def _offsets(cells: Any) -> Any:
    """Arrow's offsets from the ends of all entries."""
    offsets = np.empty(len(cells) + 1, np.int32)
    offsets[0] = 0
    offsets[1:] = cells
    return pa.py_buffer(offsets)
