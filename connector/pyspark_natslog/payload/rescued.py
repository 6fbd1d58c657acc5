"""The rescued column: members of JSON payloads that the schema does not name, as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload import native
from pyspark_natslog.payload.kernels_rescued import LEVEL_FIELDS
from pyspark_natslog.payload.kernels_tokens import MOST_NESTED
from pyspark_natslog.payload.tree import Tree


class Rescuer:
    """Args: schema: all fields that a payload is decoded into, whether they are requested or not."""

    def __init__(self, schema: StructType) -> None:
        tree = Tree.of(schema)
        self._columns = tree.room(0, 0)
        self._open_levels = np.empty((tree.depth + 1, LEVEL_FIELDS), np.int64)
        self._levels = np.empty(MOST_NESTED, np.uint8)
        self._longest_name = max(len(node.name.encode()) for node in tree.nodes)

    def rescued(self, payloads: Payloads) -> Any:
        """An Arrow array of strings, one for each payload: `{"discount":0.1,"address":{"floor":2}}`; null where a
        payload has nothing else, or is not valid JSON.
        """
        rows, text, offsets = len(payloads), payloads.text, payloads.offsets
        usable = np.ones(rows, np.uint8)
        native.rows_are_utf8(text, offsets, usable)
        out, ends = np.empty(max(1, len(text)), np.uint8), np.zeros(rows + 1, np.int32)
        room = max(6 * self._longest_name, int(np.diff(offsets).max(initial=0)))
        scratch = np.empty(room, np.uint8)
        native.rescue_json(self._columns, text, offsets, usable, out, ends, self._open_levels, self._levels, scratch)
        has_some = np.diff(ends) > 0
        bitmap = pa.py_buffer(np.packbits(has_some, bitorder="little"))
        buffers = [bitmap, pa.py_buffer(ends), pa.py_buffer(out[: ends[-1]].copy())]
        return pa.Array.from_buffers(pa.string(), rows, buffers)
