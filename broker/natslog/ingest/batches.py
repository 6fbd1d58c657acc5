"""From frames to Arrow columns: payloads, subjects and headers are copied once, straight into Arrow buffers.

A `BatchBuilder` grows until it is taken for a commit. It holds the columns of the message schema without offset and
timestamp, and beside them what is not stored: reply subjects, to be acked after the commit, and message ids.

Invariant: a row is only ever added whole; `taken()` hands on buffers that nobody writes to again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.schema import HEADERS_TYPE, MESSAGE_SCHEMA
from natslog.wire import kernels
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD, PAYLOAD_LEN, REPLY, REPLY_LEN, SUBJECT, SUBJECT_LEN

COMMIT_BYTES = 8 * 1024 * 1024
COMMIT_ROWS = 64 * 1024
_SMALLEST = 64
_KEY_HEADER = np.frombuffer(b"Natslog-Key", np.uint8)
_ID_HEADER = np.frombuffer(b"Nats-Msg-Id", np.uint8)
_EXPECTATION = np.frombuffer(b"Nats-Expected-", np.uint8)

Array = npt.NDArray[Any]


class _VariableColumn:
    """An Arrow variable-length column under construction: int32 offsets, bytes."""

    __slots__ = ("data", "offsets", "rows")

    def __init__(self) -> None:
        self.offsets = np.zeros(_SMALLEST, np.int32)
        self.data = np.empty(_SMALLEST, np.uint8)
        self.rows = 0

    @property
    def size_bytes(self) -> int:
        return int(self.offsets[self.rows])

    def extend(self, buffer: Array, starts: Array, lengths: Array) -> None:
        count = len(starts)
        size = self.size_bytes + int(lengths.sum())
        self.offsets = _grown(self.offsets, self.rows + count + 1)
        self.data = _grown(self.data, size)
        kernels.gather(buffer, starts, lengths, self.data, self.offsets, self.rows)
        self.rows += count

    def buffers(self) -> list[pa.Buffer]:
        return [pa.py_buffer(self.offsets[: self.rows + 1]), pa.py_buffer(self.data[: self.size_bytes])]

    def array(self, kind: pa.DataType, valid: Array | None = None) -> pa.Array[Any]:
        return pa.Array.from_buffers(kind, self.rows, [_bitmap(valid), *self.buffers()])


def _grown(array: Array, size: int) -> Array:
    """The same array, or a copy with at least double the room."""
    if size <= len(array):
        return array
    larger = np.empty(max(size, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger


def _bitmap(valid: Array | None) -> pa.Buffer | None:
    if valid is None or valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


@dataclass(frozen=True, slots=True)
class Batch:
    """What one commit takes.

    Attributes:
        columns: `subject`, `key`, `headers`, `value`.
        replies: reply subjects (binary, empty where none was given), a row each; None if nobody waits for an ack.
        ids: uint64 of shape (rows, 2): hashes of message ids, zeros where there is none; None if no row has one.
    """

    columns: pa.RecordBatch
    replies: pa.Array[Any] | None
    ids: npt.NDArray[np.uint64] | None


class BatchBuilder:
    """Collects rows of one stream. `add` until `is_full`, then `taken`."""

    def __init__(self) -> None:
        self._subject = _VariableColumn()
        self._value = _VariableColumn()
        self._reply = _VariableColumn()
        self._key = _VariableColumn()
        self._header_key = _VariableColumn()
        self._header_value = _VariableColumn()
        self._header_counts: list[Array] = []
        self._has_headers: list[Array] = []
        self._has_key: list[Array] = []
        self._ids: list[Array] = []
        self._has_ids = False

    @property
    def rows(self) -> int:
        return self._value.rows

    @property
    def size_bytes(self) -> int:
        columns = (self._subject, self._value, self._reply, self._header_key, self._header_value)
        return sum(column.size_bytes for column in columns) + 24 * self.rows

    @property
    def is_full(self) -> bool:
        return self.rows >= COMMIT_ROWS or self.size_bytes >= COMMIT_BYTES

    def add(self, frames: Frames) -> None:
        """Copies the frames' bytes; the receive buffer is free afterwards."""
        buffer, rows = frames.buffer, frames.rows
        self._subject.extend(buffer, rows[:, SUBJECT], rows[:, SUBJECT_LEN])
        self._value.extend(buffer, rows[:, PAYLOAD], rows[:, PAYLOAD_LEN])
        self._reply.extend(buffer, rows[:, REPLY], rows[:, REPLY_LEN])
        if rows[:, HEADER_LEN].any():
            self._add_headers(buffer, rows)
        else:
            nothing = np.zeros(len(rows), np.int64)
            self._key.extend(buffer, nothing, nothing)
            self._header_counts.append(nothing)
            self._has_headers.append(np.zeros(len(rows), np.bool_))
            self._has_key.append(np.zeros(len(rows), np.bool_))
            self._ids.append(np.zeros((len(rows), 2), np.uint64))

    def _add_headers(self, buffer: Array, rows: Array) -> None:
        pairs = np.zeros((kernels.count_headers(buffer, rows), 4), np.int64)
        first_pair = np.zeros(len(rows) + 1, np.int64)
        keys, ids = np.zeros((len(rows), 2), np.int64), np.zeros((len(rows), 2), np.int64)
        pairs = pairs[: kernels.split_headers(buffer, rows, _KEY_HEADER, _ID_HEADER, pairs, first_pair, keys, ids)]
        self._header_key.extend(buffer, pairs[:, 0], pairs[:, 1])
        self._header_value.extend(buffer, pairs[:, 2], pairs[:, 3])
        self._key.extend(buffer, keys[:, 0], np.maximum(keys[:, 1], 0))
        hashes = np.zeros((len(rows), 2), np.uint64)
        kernels.hash_ids(buffer, ids[:, 0], ids[:, 1], hashes)
        self._has_ids |= bool((ids[:, 1] >= 0).any())
        self._header_counts.append(np.diff(first_pair))
        self._has_headers.append(rows[:, HEADER_LEN] > 0)
        self._has_key.append(keys[:, 1] >= 0)
        self._ids.append(hashes)

    def taken(self) -> Batch:
        """The rows as Arrow columns over the builder's own buffers; the builder is not used again."""
        columns = pa.RecordBatch.from_arrays(
            [
                self._subject.array(pa.string()),
                self._key.array(pa.binary(), np.concatenate(self._has_key)),
                self._headers(),
                self._value.array(pa.binary()),
            ],
            schema=PAYLOAD_SCHEMA,
        )
        replies = self._reply.array(pa.binary()) if self._reply.size_bytes else None
        return Batch(columns, replies, np.concatenate(self._ids) if self._has_ids else None)

    def _headers(self) -> pa.Array[Any]:
        if not self._header_key.rows and not any(valid.any() for valid in self._has_headers):
            return pa.nulls(self.rows, HEADERS_TYPE)
        pairs = pa.StructArray.from_arrays(
            [self._header_key.array(pa.string()), self._header_value.array(pa.string())],
            fields=list(HEADERS_TYPE.value_type),
        )
        offsets = np.zeros(self.rows + 1, np.int32)
        np.cumsum(np.concatenate(self._header_counts), out=offsets[1:])
        valid = _bitmap(np.concatenate(self._has_headers))
        return pa.Array.from_buffers(HEADERS_TYPE, self.rows, [valid, pa.py_buffer(offsets)], children=[pairs])


PAYLOAD_SCHEMA = pa.schema(list(MESSAGE_SCHEMA)[2:])
"""The message schema without what the leader adds: offset and timestamp."""


def split_by_text(frames: Frames) -> tuple[Frames, Frames]:
    """Frames whose subject and headers are UTF-8, and those that are not (Arrow strings cannot hold these)."""
    buffer, rows = frames.buffer, frames.rows
    suspects = np.flatnonzero(_has_high_bytes(buffer, rows))
    bad = np.zeros(len(rows), np.bool_)
    for at in suspects.tolist():  # only messages with non-ASCII subjects or headers come here
        row = rows[at]
        subject = buffer[row[SUBJECT] : row[SUBJECT] + row[SUBJECT_LEN]].tobytes()
        headers = buffer[row[PAYLOAD] - row[HEADER_LEN] : row[PAYLOAD]].tobytes()
        bad[at] = not (is_utf8(subject) and is_utf8(headers))
    return (frames, frames.select(bad)) if not bad.any() else (frames.select(~bad), frames.select(bad))


def split_by_expectation(frames: Frames) -> tuple[Frames, Frames]:
    """Frames without and with a `Nats-Expected-…` header: a condition that must not be acked unchecked."""
    marks = np.zeros(len(frames.rows), np.bool_)
    if frames.rows[:, HEADER_LEN].any():
        kernels.mark_header_prefix(frames.buffer, frames.rows, _EXPECTATION, marks)
    return (frames, frames.select(marks)) if not marks.any() else (frames.select(~marks), frames.select(marks))


def _has_high_bytes(buffer: Array, rows: Array) -> Array:
    marks = np.zeros(len(rows), np.bool_)
    kernels.mark_high_bytes(buffer, rows, marks)
    return marks


def is_utf8(text: bytes) -> bool:
    """Whether Arrow's string type can hold it."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
