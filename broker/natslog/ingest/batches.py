"""From frames to the buffers of Arrow columns: payloads, subjects and headers are copied once, straight into place.

A `BatchBuilder` grows until it is taken for a commit. It has the columns of the message schema without offset and
timestamp, and also data that is not stored: reply subjects, which are acked after the commit, and message ids. After
the commit it is cleared and reused, so that no memory is allocated.

Invariant: a row is only ever added whole; between `taken()` and `clear()` nothing is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.row_buffers import RowBuffers
from natslog.subjects import MAX_SUBJECT_BYTES
from natslog.wire import native
from natslog.wire.frames import Frames
from natslog.wire.layout import (
    HEADER_LEN,
    PAYLOAD,
    SUBJECT,
    SUBJECT_LEN,
    Survey,
)
from natslog.wire.own_ids import LETTER_VALUES, PACKED_BYTES, packed_id

COMMIT_BYTES = 8 * 1024 * 1024
COMMIT_ROWS = 64 * 1024
_SMALLEST = 64
_KEY_HEADER = np.frombuffer(b"Natslog-Key", np.uint8)
_ID_HEADER = np.frombuffer(b"Nats-Msg-Id", np.uint8)
_EXPECTATION = np.frombuffer(b"Nats-Expected-", np.uint8)
_OFFSETS_OF_NO_ROWS = bytes(4)

Array = npt.NDArray[Any]


def survey_of(frames: Frames) -> Survey:
    return Survey(*native.survey(frames.buffer, frames.rows))


@dataclass(frozen=True, slots=True)
class Texts:
    """An Arrow variable-length column without nulls: `rows + 1` int32 offsets into bytes."""

    offsets: npt.NDArray[np.int32]
    data: npt.NDArray[np.uint8]

    @property
    def size_bytes(self) -> int:
        return int(self.offsets[-1])

    @classmethod
    def of(cls, values: list[bytes]) -> Texts:
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
        return cls(offsets, np.frombuffer(b"".join(values), np.uint8))

    def to_arrow(self, kind: pa.DataType) -> pa.Array[Any]:
        buffers = [None, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(kind, len(self.offsets) - 1, buffers)


class _Growing:
    """A numpy array that grows by doubling and is used again."""

    __slots__ = ("_array", "count")

    def __init__(self, kind: Any, width: int | None = None) -> None:
        shape = (_SMALLEST,) if width is None else (_SMALLEST, width)
        self._array = np.zeros(shape, kind)
        self.count = 0

    @property
    def values(self) -> Array:
        return self._array[: self.count]

    @property
    def capacity(self) -> int:
        return len(self._array)

    def room_for(self, count: int) -> Array:
        """The whole array, with room for so many more; `count` is the caller's to raise."""
        if self.count + count > len(self._array):
            larger = np.empty(
                (max(self.count + count, 2 * len(self._array)), *self._array.shape[1:]), self._array.dtype
            )
            larger[: self.count] = self.values
            self._array = larger
        return self._array

    def extend(self, values: Array) -> None:
        self.room_for(len(values))[self.count : self.count + len(values)] = values
        self.count += len(values)

    def extend_with_zeros(self, count: int) -> None:
        self.room_for(count)[self.count : self.count + count] = 0
        self.count += count


class _Column:
    """A variable-length column under construction."""

    __slots__ = ("_data", "_offsets")

    def __init__(self) -> None:
        self._offsets = _Growing(np.int32)
        self._data = _Growing(np.uint8)
        self._offsets.count = 1  # the first offset is 0

    @property
    def rows(self) -> int:
        return self._offsets.count - 1

    @property
    def size_bytes(self) -> int:
        return self._data.count

    @property
    def capacity_bytes(self) -> int:
        return self._data.capacity

    def room_for(self, count: int, size_bytes: int) -> tuple[Array, Array]:
        """Data and offsets to be filled from row `rows` on."""
        return self._data.room_for(size_bytes), self._offsets.room_for(count)

    def filled(self, count: int, size_bytes: int) -> None:
        self._data.count += size_bytes
        self._offsets.count += count

    def extend(self, buffer: Array, starts: Array, lengths: Array) -> None:
        """Adds `buffer[start : start + length]` of each row."""
        count, size_bytes = len(starts), int(lengths.sum())
        native.gather(buffer, starts, lengths, *self.room_for(count, size_bytes), self.rows)
        self.filled(count, size_bytes)

    def extend_with(self, offsets: npt.NDArray[np.int32], data: Array) -> None:
        """Adds texts of another column: `data[offsets[i] : offsets[i + 1]]`."""
        count, first = len(offsets) - 1, int(offsets[0])
        size_bytes = int(offsets[-1]) - first
        target, target_offsets = self.room_for(count, size_bytes)
        target[self.size_bytes : self.size_bytes + size_bytes] = data[first : first + size_bytes]
        np.add(
            offsets[1:], self.size_bytes - first,
            out=target_offsets[self._offsets.count : self._offsets.count + count],
        )  # fmt: skip
        self.filled(count, size_bytes)

    def extend_with_one(self, text: Array, count: int) -> None:
        """Adds the same text so many times."""
        edges = np.arange(count + 1, dtype=np.int32) * len(text)
        self.extend_with(edges, np.tile(text, count))

    def extend_with_empty(self, count: int) -> None:
        self._offsets.room_for(count)[self._offsets.count : self._offsets.count + count] = self.size_bytes
        self._offsets.count += count

    @property
    def texts(self) -> Texts:
        return Texts(self._offsets.values, self._data.values)

    def buffers(self, validity: Array | None = None) -> list[Any]:
        return [validity, self._offsets.values, self._data.values]

    def clear(self) -> None:
        self._offsets.count, self._data.count = 1, 0


class _HeaderColumns:
    """Data that only messages with headers need: keys, the header lists, ids. Not filled until the first of them
    comes.
    """

    def __init__(self) -> None:
        self.key = _Column()
        self.pair_key = _Column()
        self.pair_value = _Column()
        self.pair_ends = _Growing(np.int32)
        self.has_headers = _Growing(np.bool_)
        self.has_key = _Growing(np.bool_)
        self.ids = _Growing(np.uint64, 2)
        self.packed_ids = _Growing(np.uint8, PACKED_BYTES)

    def clear(self) -> None:
        for column in (self.key, self.pair_key, self.pair_value):
            column.clear()
        for growing in (self.pair_ends, self.has_headers, self.has_key, self.ids, self.packed_ids):
            growing.count = 0

    def add_plain(self, count: int) -> None:
        """So many rows without headers."""
        self.key.extend_with_empty(count)
        self.pair_ends.extend(np.full(count, self.pair_key.rows, np.int32))
        for column in (self.has_headers, self.has_key, self.ids, self.packed_ids):
            column.extend_with_zeros(count)

    def add(self, buffer: Array, rows: Array, header_lines: int, *, packs_ids: bool) -> None:
        """`header_lines`: at least as many as there are."""
        count = len(rows)
        packed = np.zeros((count, PACKED_BYTES), np.uint8)
        pairs = np.empty((4, header_lines), np.int64)
        first_pair = np.zeros(count + 1, np.int64)
        keys, ids = np.zeros((2, count), np.int64), np.zeros((2, count), np.int64)
        found = native.split_headers(
            buffer, rows, _KEY_HEADER, _ID_HEADER, pairs, first_pair, keys, ids,
            LETTER_VALUES, packed if packs_ids else packed[:0],
        )  # fmt: skip
        name_starts, name_lengths, value_starts, value_lengths = pairs[:, :found]
        self.pair_ends.extend((first_pair[1:] + self.pair_key.rows).astype(np.int32))
        self.pair_key.extend(buffer, name_starts, name_lengths)
        self.pair_value.extend(buffer, value_starts, value_lengths)
        self.key.extend(buffer, keys[0], np.maximum(keys[1], 0))
        hashes = np.zeros((count, 2), np.uint64)
        native.hash_ids(buffer, ids[0], ids[1], hashes)
        self.ids.extend(hashes)
        self.packed_ids.extend(packed)
        has_only_id = packed.any(axis=1) & (np.diff(first_pair) == 0)
        self.has_headers.extend((rows[:, HEADER_LEN] > 0) & ~has_only_id)
        self.has_key.extend(keys[1] >= 0)

    def add_columns(self, keys: pa.Array[Any], headers: pa.Array[Any]) -> None:
        """Keys and headers of rows without message ids."""
        count = len(keys)
        self.key.extend_with(*_edges_and_data(keys))
        pairs = headers.flatten()
        lengths = pc.fill_null(pc.list_value_length(headers), 0).to_numpy(zero_copy_only=False)
        self.pair_ends.extend((self.pair_key.rows + np.cumsum(lengths)).astype(np.int32))
        self.pair_key.extend_with(*_edges_and_data(pairs.field("key")))
        self.pair_value.extend_with(*_edges_and_data(pairs.field("value")))
        self.has_headers.extend(np.asarray(headers.is_valid(), np.bool_))
        self.has_key.extend(np.asarray(keys.is_valid(), np.bool_))
        for growing in (self.ids, self.packed_ids):
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
        buffers = [*self.key.buffers(_bitmap(has_key)), _bitmap(has_headers), list_offsets, None]
        return nodes, [*buffers, *self.pair_key.buffers(), *self.pair_value.buffers()]


def _edges_and_data(texts: pa.Array[Any]) -> tuple[npt.NDArray[np.int32], Array]:
    """Offsets, and the bytes that they count in, of a column that may be a slice; null is empty."""
    texts = pc.fill_null(texts, b"" if texts.type == pa.binary() else "")
    _, offsets, data = texts.buffers()
    edges = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1] if len(texts) else _NO_EDGES
    return edges, np.frombuffer(data or b"", np.uint8)


_ZERO = np.zeros(1, np.int64)
_NO_EDGES = np.zeros(1, np.int32)


def _bitmap(valid: Array) -> Array | None:
    return None if valid.all() else np.packbits(valid, bitorder="little")


def _no_headers(rows: int) -> tuple[list[tuple[int, int]], list[Any]]:
    """As `_HeaderColumns.nodes_and_buffers`, all null."""
    invalid, offsets = _zeros((rows + 7) // 8), _zeros(4 * (rows + 1))
    empty = [None, _OFFSETS_OF_NO_ROWS, b""]
    return [(rows, rows), (rows, rows), *[(0, 0)] * 3], [invalid, offsets, b"", invalid, offsets, None, *empty, *empty]


_shared_zeros = memoryview(bytes(8 * COMMIT_ROWS))


def _zeros(size: int) -> memoryview:
    return _shared_zeros[:size] if size <= len(_shared_zeros) else memoryview(bytes(size))


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one commit; views of the builder's buffers.

    Attributes:
        rows: what is stored.
        replies: reply subjects, empty where none was given; None if no ack is waited for.
        ids: uint64 of shape (rows, 2): hashes of message ids, zeros where there is none; None if no row has one.
        spans: the number of rows of an envelope, at its last one, which has its reply subject and id; 0 for other rows.
            None if there is no envelope.
    """

    rows: RowBuffers
    replies: Texts | None
    ids: npt.NDArray[np.uint64] | None
    spans: npt.NDArray[np.int64] | None = None


class BatchBuilder:
    """Collects rows of one stream. `add` until `is_full`, then `taken`, then `clear`."""

    def __init__(self) -> None:
        self._subject = _Column()
        self._value = _Column()
        self._reply = _Column()
        self._headers = _HeaderColumns()
        self._is_headed = False
        self._spans: list[tuple[int, int]] = []  # last row and number of rows of each envelope

    @property
    def rows(self) -> int:
        return self._value.rows

    @property
    def is_full(self) -> bool:
        headers = self._headers
        columns = (self._subject, self._value, self._reply, headers.pair_key, headers.pair_value)
        return self.rows >= COMMIT_ROWS or sum(column.size_bytes for column in columns) + 24 * self.rows >= COMMIT_BYTES

    @property
    def is_bloated(self) -> bool:
        """Whether a large message has enlarged it far beyond the needs of a commit."""
        headers = self._headers
        columns = (self._subject, self._value, headers.key, headers.pair_key, headers.pair_value)
        return sum(column.capacity_bytes for column in columns) > 4 * COMMIT_BYTES

    def add(self, frames: Frames, survey: Survey | None = None, *, packs_ids: bool = True) -> None:
        """Copies the frames' bytes; the receive buffer is free afterwards.

        Args:
            survey: of these frames. packs_ids: whether message ids of natslog's own form are left out of the headers.
        """
        buffer, rows = frames.buffer, frames.rows
        survey = survey or survey_of(frames)
        before, count = self.rows, len(rows)
        native.gather_messages(
            buffer,
            rows,
            *self._subject.room_for(count, survey.subject_bytes),
            *self._value.room_for(count, survey.value_bytes),
            *self._reply.room_for(count, survey.reply_bytes),
            before,
        )
        self._subject.filled(count, survey.subject_bytes)
        self._value.filled(count, survey.value_bytes)
        self._reply.filled(count, survey.reply_bytes)
        if survey.headed_rows:
            if not self._is_headed:
                self._is_headed = True
                self._headers.add_plain(before)
            self._headers.add(buffer, rows, survey.header_lines, packs_ids=packs_ids)
        elif self._is_headed:
            self._headers.add_plain(len(rows))

    def add_envelope(self, subject: Array, reply: Array, rows: pa.RecordBatch, message_id: bytes | None) -> None:
        """Copies rows of one envelope, at least one.

        Args:
            rows: of the payload schema. message_id: of natslog's own form.
        """
        before, count = self.rows, rows.num_rows
        self._subject.extend_with_one(subject, count)
        self._value.extend_with(*_edges_and_data(rows.column("value")))
        self._reply.extend_with_empty(count - 1)
        self._reply.extend_with_one(reply, 1)
        keys, headers = rows.column("key"), rows.column("headers")
        has_any = message_id is not None or keys.null_count < count or headers.null_count < count
        if has_any and not self._is_headed:
            self._is_headed = True
            self._headers.add_plain(before)
        if self._is_headed:
            self._headers.add_columns(keys, headers)
        if message_id is not None:
            self._headers.set_last_id(message_id)
        self._spans.append((before + count - 1, count))

    def taken(self) -> Batch:
        """The rows, over the builder's own buffers."""
        count, headers = self.rows, self._headers
        nodes, buffers = headers.nodes_and_buffers() if self._is_headed else _no_headers(count)
        packed_ids = headers.packed_ids.values
        rows = RowBuffers(
            count,
            [(count, 0), *nodes, (count, 0)],
            [*self._subject.buffers(), *buffers, *self._value.buffers()],
            packed_ids if packed_ids.any() else None,
        )
        ids = headers.ids.values if headers.ids.values.any() else None
        return Batch(rows, self._reply.texts if self._reply.size_bytes else None, ids, self._spans_of(count))

    def _spans_of(self, rows: int) -> npt.NDArray[np.int64] | None:
        if not self._spans:
            return None
        spans = np.zeros(rows, np.int64)
        last, counts = np.array(self._spans).T
        spans[last] = counts
        return spans

    def clear(self) -> None:
        """Empty again, with the room it has grown."""
        for column in (self._subject, self._value, self._reply):
            column.clear()
        self._headers.clear()
        self._is_headed = False
        self._spans.clear()


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


def split_by_subject(frames: Frames) -> tuple[Frames, Frames]:
    """Frames with one plain subject, as a direct append takes it too, and those with another one."""
    marks = np.zeros(len(frames.rows), np.bool_)
    if not native.mark_not_plain(frames.buffer, frames.rows, MAX_SUBJECT_BYTES, marks):
        return frames, frames.select(marks)
    return frames.select(~marks), frames.select(marks)


def split_by_expectation(frames: Frames) -> tuple[Frames, Frames]:
    """Frames without and with a `Nats-Expected-…` header: a condition that must not be acked unchecked."""
    marks = np.zeros(len(frames.rows), np.bool_)
    if frames.rows[:, HEADER_LEN].any():
        native.mark_header_prefix(frames.buffer, frames.rows, _EXPECTATION, marks)
    return (frames, frames.select(marks)) if not marks.any() else (frames.select(~marks), frames.select(marks))


def _has_high_bytes(buffer: Array, rows: Array) -> Array:
    marks = np.zeros(len(rows), np.bool_)
    native.mark_high_bytes(buffer, rows, marks)
    return marks


def is_utf8(text: bytes) -> bool:
    """Whether Arrow's string type can hold it."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
