"""Rows before they are appended to a log, as the buffers of an Arrow IPC body: the commit path uses no Arrow objects.

The columns are those of the message schema without what the leader adds (offset and timestamp). Buffers stand in
Arrow's depth-first order, each the exact length that Arrow wants, none padded:

    subject     validity (None), offsets, data
    key         validity, offsets, data
    headers     validity, offsets; of the pairs: validity (None); of their keys and values: validity, offsets, data each
    value       validity (None), offsets, data

Source: Arrow columnar format, "RecordBatch message".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.arrow.schema import MESSAGE_SCHEMA

Buffer: TypeAlias = Any
"""Anything with the buffer protocol, in bytes; None where Arrow leaves a buffer out."""

PAYLOAD_SCHEMA = pa.schema(list(MESSAGE_SCHEMA)[2:])
"""`subject`, `key`, `headers`, `value`."""

_SIZED = (np.ndarray, memoryview)
_NO_OFFSETS = np.zeros(1, np.int32)


def offsets_of(column: pa.Array[Any]) -> npt.NDArray[np.int32]:
    """The offsets of a string, binary or list column, which may be a slice. Their buffer may have any length in data
    from elsewhere, as long as they are in it: also one that is no multiple of four bytes, or none without rows.
    """
    count = column.offset + len(column) + 1
    return np.frombuffer(column.buffers()[1], np.int32, count)[column.offset :] if len(column) else _NO_OFFSETS


NODES = 7
BUFFERS = 18


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """Rows as buffers. The creator may reuse them once the rows are committed.

    Attributes:
        rows: at least one.
        nodes: (length, null count) of subject, key, headers, pairs, pair keys, pair values, value.
        buffers: the buffers of these, in order: `BUFFERS` of them.
        packed_ids: message ids that are stored beside the columns (see `wire.own_ids`), uint8 of shape (rows, 12);
            None where no row has one.
    """

    rows: int
    nodes: Sequence[tuple[int, int]]
    buffers: Sequence[Buffer]
    packed_ids: npt.NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        assert len(self.nodes) == NODES, "a node for each field, nested ones too"
        assert len(self.buffers) == BUFFERS, "each buffer has its place"

    @property
    def nbytes(self) -> int:
        ids_bytes = 0 if self.packed_ids is None else self.packed_ids.nbytes
        return ids_bytes + sum(
            buffer.nbytes if isinstance(buffer, _SIZED) else memoryview(buffer).nbytes
            for buffer in self.buffers
            if buffer is not None
        )

    def filter(self, keep: npt.NDArray[np.bool_]) -> RowBuffers:
        """Copies of the rows that are marked, at least one."""
        ids = None if self.packed_ids is None else self.packed_ids[keep]
        return RowBuffers.of(self.to_arrow().filter(pa.array(keep)), ids)

    @classmethod
    def of(cls, batch: pa.RecordBatch, packed_ids: npt.NDArray[np.uint8] | None = None) -> RowBuffers:
        """Of a record batch of `PAYLOAD_SCHEMA` that is no slice; nothing is copied."""
        assert batch.schema.equals(PAYLOAD_SCHEMA), f"not the payload schema: {batch.schema}"
        nodes: list[tuple[int, int]] = []
        buffers: list[Buffer] = []
        for column in batch.columns:
            assert column.offset == 0, "a slice's buffers begin elsewhere"
            _collect_nodes(column, nodes)
            buffers += column.buffers()
        return cls(batch.num_rows, nodes, buffers, packed_ids)

    def to_arrow(self) -> pa.RecordBatch:
        """The same rows as Arrow columns over the same buffers."""
        buffers = [None if buffer is None else pa.py_buffer(buffer) for buffer in self.buffers]
        (_, subject), (_, key), (_, headers), (_, pairs), (_, pair_key), (_, pair_value), (_, value) = self.nodes
        pair_rows = self.nodes[3][0]
        pair_type = PAYLOAD_SCHEMA.field("headers").type.value_type
        children = [
            pa.Array.from_buffers(pa.string(), pair_rows, buffers[9:12], pair_key),
            pa.Array.from_buffers(pa.string(), pair_rows, buffers[12:15], pair_value),
        ]
        entries = pa.Array.from_buffers(pair_type, pair_rows, buffers[8:9], pairs, children=children)
        header_type = PAYLOAD_SCHEMA.field("headers").type
        return pa.RecordBatch.from_arrays(
            [
                pa.Array.from_buffers(pa.string(), self.rows, buffers[0:3], subject),
                pa.Array.from_buffers(pa.binary(), self.rows, buffers[3:6], key),
                pa.Array.from_buffers(header_type, self.rows, buffers[6:8], headers, children=[entries]),
                pa.Array.from_buffers(pa.binary(), self.rows, buffers[15:18], value),
            ],
            schema=PAYLOAD_SCHEMA,
        )


def _collect_nodes(column: pa.Array[Any], nodes: list[tuple[int, int]]) -> None:
    """Depth first, as Arrow writes field nodes."""
    nodes.append((len(column), column.null_count))
    if pa.types.is_list(column.type):
        _collect_nodes(column.values, nodes)
    elif pa.types.is_struct(column.type):
        for index in range(column.type.num_fields):
            _collect_nodes(column.field(index), nodes)
