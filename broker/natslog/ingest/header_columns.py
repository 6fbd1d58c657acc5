"""The columns key and headers of gathered messages, and their message ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.ingest.columns import Array, Column, Growing, bitmap, edges_and_data
from natslog.wire import native
from natslog.wire.frames import Frames
from natslog.wire.header_parts import split_headers
from natslog.wire.own_ids import PACKED_BYTES, packed_id

_OFFSETS_OF_NO_ROWS = bytes(4)
_SHARED_ZEROS = memoryview(bytes(512 * 1024))
_ZERO = np.zeros(1, np.int64)


class HeaderColumns:
    """Data that only messages with headers need: keys, the header lists, ids, correlation ids for the acks. Not filled
    until the first of them comes.
    """

    def __init__(self) -> None:
        self.key = Column()
        self.correlation = Column()
        self.pair_key = Column()
        self.pair_value = Column()
        self.pair_ends = Growing(np.int32)
        self.has_headers = Growing(np.bool_)
        self.has_key = Growing(np.bool_)
        self.ids = Growing(np.uint64, 2)
        self.packed_ids = Growing(np.uint8, PACKED_BYTES)
        self.wants_full_ack = Growing(np.bool_)

    def clear(self) -> None:
        for column in (self.key, self.correlation, self.pair_key, self.pair_value):
            column.clear()
        for growing in (self.pair_ends, self.has_headers, self.has_key, *self._of_acks):
            growing.count = 0

    @property
    def of_acks(self) -> tuple[Array | None, ...]:
        """Packed ids, hashes of ids, and which acks are full; None where no row has one."""
        columns = (self.packed_ids.values, self.ids.values, self.wants_full_ack.values)
        return tuple(values if values.any() else None for values in columns)

    @property
    def _of_acks(self) -> tuple[Growing, ...]:
        return self.ids, self.packed_ids, self.wants_full_ack

    def add_plain(self, count: int) -> None:
        """So many rows without headers."""
        self.key.extend_with_empty(count)
        self.correlation.extend_with_empty(count)
        self.pair_ends.extend(np.full(count, self.pair_key.rows, np.int32))
        for column in (self.has_headers, self.has_key, *self._of_acks):
            column.extend_with_zeros(count)

    def add(self, buffer: Array, rows: Array, header_lines: int, *, packs_ids: bool) -> None:
        """Args: as of `split_headers`."""
        parts = split_headers(Frames(buffer, rows), header_lines, packs_ids=packs_ids)
        name_starts, name_lengths, value_starts, value_lengths = parts.pairs[:, : parts.first_pair[-1]]
        self.pair_ends.extend((parts.first_pair[1:] + self.pair_key.rows).astype(np.int32))
        self.pair_key.extend(buffer, name_starts, name_lengths)
        self.pair_value.extend(buffer, value_starts, value_lengths)
        self.key.extend(buffer, parts.keys[0], np.maximum(parts.keys[1], 0))
        self.correlation.extend(buffer, parts.correlations[0], np.maximum(parts.correlations[1], 0))
        self.ids.extend(parts.hashes)
        self.packed_ids.extend(parts.packed)
        self.wants_full_ack.extend(parts.wants_full_ack)
        self.has_headers.extend(parts.has_headers)
        self.has_key.extend(parts.keys[1] >= 0)

    def add_columns(self, keys: pa.Array[Any], headers: pa.Array[Any], last_correlation_id: bytes) -> None:
        """Keys and headers of rows, at least one, without message ids."""
        count = len(keys)
        self.correlation.extend_with_empty(count - 1)
        self.correlation.extend_with_one(np.frombuffer(last_correlation_id, np.uint8), 1)
        self.key.extend_with(*edges_and_data(keys))
        pairs = headers.flatten()
        lengths = pc.fill_null(pc.list_value_length(headers), 0).to_numpy(zero_copy_only=False)
        self.pair_ends.extend((self.pair_key.rows + np.cumsum(lengths)).astype(np.int32))
        self.pair_key.extend_with(*edges_and_data(pairs.field("key")))
        self.pair_value.extend_with(*edges_and_data(pairs.field("value")))
        self.has_headers.extend(np.asarray(headers.is_valid(), np.bool_))
        self.has_key.extend(np.asarray(keys.is_valid(), np.bool_))
        for growing in self._of_acks:
            growing.extend_with_zeros(count)

    def set_last_id(self, text: bytes) -> None:
        """The message id, of natslog's own form, of the row that was added last."""
        letters = np.frombuffer(text, np.uint8)
        self.packed_ids.values[-1] = packed_id(text)
        native.hash_ids(letters, _ZERO, np.array([len(letters)]), self.ids.values[-1:])

    def nodes_and_buffers(self) -> tuple[list[tuple[int, int]], list[Any]]:
        """Of key, headers, pairs, pair keys, pair values."""
        has_key, has_headers = self.has_key.values, self.has_headers.values
        rows, pairs = len(has_key), self.pair_key.rows
        list_offsets = np.zeros(rows + 1, np.int32)
        list_offsets[1:] = self.pair_ends.values
        nodes = [(rows, rows - int(has_key.sum())), (rows, rows - int(has_headers.sum())), *[(pairs, 0)] * 3]
        buffers = [*self.key.buffers(bitmap(has_key)), bitmap(has_headers), list_offsets, None]
        return nodes, [*buffers, *self.pair_key.buffers(), *self.pair_value.buffers()]


def no_headers(rows: int) -> tuple[list[tuple[int, int]], list[Any]]:
    """As `HeaderColumns.nodes_and_buffers`, all null."""
    invalid, offsets = _zeros((rows + 7) // 8), _zeros(4 * (rows + 1))
    empty = [None, _OFFSETS_OF_NO_ROWS, b""]
    return [(rows, rows), (rows, rows), *[(0, 0)] * 3], [invalid, offsets, b"", invalid, offsets, None, *empty, *empty]


def _zeros(size: int) -> memoryview:
    return _SHARED_ZEROS[:size] if size <= len(_SHARED_ZEROS) else memoryview(bytes(size))
