"""JSON payloads, one object each, into typed columns. The kernels are in `kernels_json`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload import assembling, native
from pyspark_natslog.payload.kernels_json import (
    BLANK,
    BROKEN,
    GOOD,
    NO_OBJECT,
    NO_TEXT,
    TRAILING,
    WRONG_VALUE,
)
from pyspark_natslog.payload.kernels_tokens import MOST_NESTED
from pyspark_natslog.payload.layout import CELL, COUNT, FLOAT, Columns
from pyspark_natslog.payload.rows import Decoded
from pyspark_natslog.payload.tree import Tree

_REASONS = {
    BROKEN: "it is not valid JSON at byte {at}",
    NO_OBJECT: "it is not a JSON object",
    TRAILING: "the JSON object is followed by more bytes, from byte {at} on",
    WRONG_VALUE: "field {path} is {type}, and the value at byte {at} is not",
    NO_TEXT: "it is not valid UTF-8",
}


class JsonDecoder:
    """Decodes into the columns of `schema`.

    Args:
        schema: nullable throughout, of types that `tree.is_decodable` accepts.
    """

    def __init__(self, schema: StructType) -> None:
        self._tree = Tree.of(schema)

    def decode(self, payloads: Payloads) -> Decoded:
        tree, text, offsets = self._tree, payloads.text, payloads.offsets
        rows = len(payloads)
        columns = tree.room(rows, len(text))
        usable, results = np.ones(rows, np.uint8), np.empty(rows, np.uint8)
        native.rows_are_utf8(text, offsets, usable)
        where = np.zeros((rows, 2), np.int64)
        hard = np.empty((len(text) // 4 + 2, 4), np.int64)
        hard[0, 0] = 0
        longest = max(len(node.name.encode()) for node in tree.nodes)
        native.decode_json(
            columns,
            text,
            offsets,
            usable,
            results,
            where,
            np.empty((tree.depth + 1, 3), np.int64),
            np.empty(MOST_NESTED, np.uint8),
            np.empty(max(6 * longest, int(np.diff(offsets).max(initial=0))), np.uint8),  # \uXXXX for each byte
            hard,
        )
        _fill_hardreals(tree, columns, text, hard[1 : hard[0, 0] + 1])
        malformed = (results != GOOD) & (results != BLANK)
        return Decoded(
            arrays=assembling.arrays(tree, columns),
            malformed=malformed,
            reason=lambda row: self._reason(int(results[row]), int(where[row, 0]), int(where[row, 1] - offsets[row])),
            blank=results == BLANK,
        )

    def _reason(self, result: int, node: int, at: int) -> str:
        found = self._tree.nodes[node]
        return _REASONS[result].format(at=at, path=found.path, type=found.type.simpleString())


def _fill_hardreals(tree: Tree, columns: Columns, text: Any, notes: Any) -> None:
    """Parses the numbers that the kernel has noted by Arrow's exact parser; skips notes of entries taken back since."""
    if not len(notes):
        return
    edges = np.empty(2 * len(notes) + 1, np.int32)  # notes have the order of the text: each number, each gap
    edges[0:-1:2], edges[1::2] = notes[:, 2], notes[:, 3]
    edges[-1] = edges[-2]
    spans = pa.Array.from_buffers(pa.string(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(text)])
    numbers = spans.take(pa.array(np.arange(0, len(edges) - 1, 2)))
    for single in (True, False):
        kinds = np.array([node.kind == FLOAT for node in tree.nodes])
        chosen = np.flatnonzero(kinds[notes[:, 0]] == single)
        if len(chosen):
            values = reals(numbers.take(pa.array(chosen)), np.float32 if single else np.float64)
            node, position = notes[chosen, 0], notes[chosen, 1]
            cells = columns.table[node, CELL] + position
            stands = (position < columns.table[node, COUNT]) & (columns.cells[cells] == chosen + 1)
            columns.reals[cells[stands]] = values[stands]


def reals(numbers: Any, kind: Any) -> Any:
    """JSON's numbers (Arrow's strings) as float32 or float64, exactly rounded; infinite where they are out of range."""
    try:
        return pc.cast(numbers, pa.float32() if kind is np.float32 else pa.float64()).to_numpy()
    except pa.ArrowInvalid:  # one is out of range: infinite, as in Spark
        with np.errstate(over="ignore"):
            return np.array([kind(number) for number in numbers.to_pylist()])
