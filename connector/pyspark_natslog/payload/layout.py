"""How kernels see the tree of columns, in arrays; no Spark is needed for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

STRUCT, LIST, MAP = 0, 1, 2
BOOL, INT, FLOAT, DOUBLE, DECIMAL, DATE, TIMESTAMP, TIMESTAMP_NTZ = 10, 11, 12, 13, 14, 15, 16, 17
STRING, BINARY = 20, 21
ENUM = 22  # its cells are indices into the words of the Avro enum

KIND, END, CELL, VALID, BYTES, COUNT, HINT, NAME, NAME_END, BITS, PRECISION, SCALE = range(12)
"""Columns of the table: what a node is and where its subtree ends; where its cells, validity and bytes begin; how many
entries it has; the child expected next (by its node); where its name is; bits of an integer; of a decimal.
"""
FIELDS = 12


class Columns(NamedTuple):
    """What the kernels read and write.

    Attributes:
        table: (nodes, FIELDS). `names`: the names of all nodes, one after the other.
        cells: values and ends; two for a decimal, low and high. `reals`: the same memory as floats.
        data: validity bytes of all nodes, then the bytes of strings.
    """

    table: Any
    names: Any
    cells: Any
    reals: Any
    data: Any


class Words(NamedTuple):
    """One word of memory, as bits and as reals."""

    bits: Any
    single_bits: Any
    real: Any
    single: Any

    @classmethod
    def new(cls) -> Words:
        word = np.zeros(1, np.uint64)
        return cls(word, word.view(np.uint32), word.view(np.float64), word.view(np.float32))
