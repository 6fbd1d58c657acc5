"""Rows to be published as envelopes: one message for many rows of a subject.

Theory of operation. Rows are grouped by subject, in order, and cut by their number and size only, never by time: a
retry that has the same rows cuts them the same way and sends the same message ids. Where a subject has few rows, or a
row is large, envelopes save nothing: such rows stay messages of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.schema import HEADERS_TYPE
from natslog.wire.envelope import HEADER_BYTES, HEADER_NAME, HEADER_VALUE, write_envelope
from natslog.wire.outgoing_rows import Rows
from natslog.wire.row_hashes import as_ids, row_hashes

_ROWS = 8192
_BYTES = 512 * 1024
_LEAST_ROWS = 4
"""With fewer rows in an envelope, its own bytes are more than those of as many messages."""
_OVERHEAD_BYTES = 4096  # of an envelope: Arrow's metadata, headers of the message
_ROW_BYTES = 24  # of a row: offsets, lengths, padding
_MOST_BYTES_TOGETHER = 1024 * 1024 * 1024  # of a column with 32-bit offsets
_MARK = [{"key": HEADER_NAME, "value": HEADER_VALUE}]

Indices = npt.NDArray[np.int64]


def as_envelopes(rows: Rows, max_payload_bytes: int) -> Rows:
    """The messages that carry these rows, which were checked before.

    Args:
        max_payload_bytes: of the server.
    """
    limit_bytes = min(_BYTES, max_payload_bytes - _OVERHEAD_BYTES - HEADER_BYTES)
    distinct = pc.unique(rows.subjects)
    if len(distinct) * _LEAST_ROWS > len(rows) or limit_bytes <= 0 or not len(rows) or _has_ids_in_headers(rows):
        return rows
    sizes = _sizes(rows)
    messages: list[Rows] = []
    envelopes = _Envelopes()
    for group in _by_subject(rows.subjects, distinct):
        for chunk in _cut(group, sizes, limit_bytes):
            if _is_worth_it(rows, chunk, sizes, limit_bytes):
                envelopes.add(_rows_at(rows, chunk))
            else:  # in their order among the others
                messages += [*envelopes.taken(), _rows_at(rows, chunk)]
            if envelopes.size_bytes > _MOST_BYTES_TOGETHER:
                messages += envelopes.taken()
    messages += envelopes.taken()
    return messages[0] if len(messages) == 1 else _joined(messages)


class _Envelopes:
    """Payloads one after another in one buffer, which becomes a column without being copied."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._sink = pa.BufferOutputStream()
        self._edges = [0]
        self._parts: list[Rows] = []

    @property
    def size_bytes(self) -> int:
        return self._edges[-1]

    def add(self, rows: Rows) -> None:
        """One message that carries these rows of one subject."""
        columns = {"value": rows.values, "key": rows.keys, "headers": rows.headers}
        columns = {
            name: column for name, column in columns.items() if column is not None and column.null_count < len(column)
        }
        write_envelope(self._sink, pa.RecordBatch.from_pydict(columns))
        self._edges.append(self._sink.tell())
        self._parts.append(rows)

    def taken(self) -> list[Rows]:
        """The messages since the last call, as no rows or as one `Rows`."""
        parts, count = self._parts, len(self._parts)
        if not parts:
            return []
        edges, payloads = pa.py_buffer(np.array(self._edges, np.int32)), self._sink.getvalue()
        messages = Rows(
            pa.concat_arrays([rows.subjects.slice(0, 1) for rows in parts]),
            pa.Array.from_buffers(pa.binary(), count, [None, edges, payloads]),
            headers=pa.array([_MARK] * count, HEADERS_TYPE),
            ids=pa.concat_arrays([_id_of(rows) for rows in parts]),
            counts=pa.array(map(len, parts), pa.int64()),
        )
        self._clear()
        return [messages]


def _rows_at(rows: Rows, chunk: Indices) -> Rows:
    """These rows; not copied if they are neighbours."""
    first, last = int(chunk[0]), int(chunk[-1])
    return rows.slice(first, len(chunk)) if last - first + 1 == len(chunk) else rows.take(chunk)


def _by_subject(subjects: pa.Array[str], distinct: pa.Array[str]) -> Iterator[Indices]:
    """The numbers of the rows of each subject."""
    if len(distinct) == 1:
        yield np.arange(len(subjects))
        return
    number = pc.index_in(subjects, distinct).to_numpy(zero_copy_only=False)
    order = np.argsort(number, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(number[order])) + 1)


def _sizes(rows: Rows) -> Indices:
    """What each row takes in an envelope, in bytes."""
    size = np.asarray(pc.binary_length(rows.values), np.int64) + _ROW_BYTES
    if rows.keys is not None:
        size += np.asarray(pc.fill_null(pc.binary_length(rows.keys), 0), np.int64)
    if rows.headers is not None:
        pairs = rows.headers.flatten()
        lengths = np.asarray(pc.add(pc.binary_length(pairs.field(0)), pc.binary_length(pairs.field(1))), np.int64)
        counts = np.asarray(pc.fill_null(pc.list_value_length(rows.headers), 0), np.int64)
        ends = np.concatenate(([0], np.cumsum(lengths + _ROW_BYTES)))[np.cumsum(counts)]
        size += np.diff(ends, prepend=0)
    return size


def _cut(group: Indices, sizes: Indices, limit_bytes: int) -> Iterator[Indices]:
    """Neighbouring rows of at most `_ROWS` and `limit_bytes`; a row that is larger comes by itself."""
    ends, start = np.cumsum(sizes[group]), 0
    while start < len(group):
        before = int(ends[start - 1]) if start else 0
        fits = int(np.searchsorted(ends, before + limit_bytes, side="right"))
        end = max(start + 1, min(start + _ROWS, fits))
        yield group[start:end]
        start = end


def _is_worth_it(rows: Rows, chunk: Indices, sizes: Indices, limit_bytes: int) -> bool:
    """Also not where some rows have an id and others have none: they can only be sent again one by one."""
    nulls = 0 if rows.ids is None else rows.ids.take(pa.array(chunk)).null_count
    return len(chunk) >= _LEAST_ROWS and int(sizes[chunk].sum()) <= limit_bytes and nulls in (0, len(chunk))


def _has_ids_in_headers(rows: Rows) -> bool:
    """Such rows are deduplicated one by one."""
    if rows.headers is None:
        return False
    return bool(pc.any(pc.equal(rows.headers.flatten().field("key"), "Nats-Msg-Id")).as_py())


def _id_of(rows: Rows) -> pa.Array[str]:
    """The message id of an envelope: a hash of the ids of its rows, or null."""
    if rows.ids is None or rows.ids.null_count:
        return pa.nulls(1, pa.string())
    hashes = row_hashes(rows.ids, rows.ids.cast(pa.binary()), None, None)
    return as_ids(hashes.sum(axis=0, dtype=np.uint64, keepdims=True))


def _joined(messages: list[Rows]) -> Rows:
    """All of them, in order."""

    def joined(name: str, kind: pa.DataType) -> pa.Array:
        columns = [getattr(rows, name) for rows in messages]
        missing = pa.scalar(1 if name == "counts" else None, kind)
        return pa.concat_arrays(
            [
                pa.repeat(missing, len(rows)) if column is None else column.cast(kind)
                for rows, column in zip(messages, columns, strict=True)
            ]
        )

    return Rows(
        joined("subjects", pa.string()),
        joined("values", pa.binary()),
        joined("keys", pa.binary()),
        joined("headers", HEADERS_TYPE),
        joined("ids", pa.string()),
        joined("counts", pa.int64()),
    )
