"""The size of messages as nats-server counts it: header block and payload. Streams may limit it (`max_message_bytes`).

The rows of envelopes and direct appends have no header block: they count as the same messages sent one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.errors import MessageTooLarge
from natslog.ingest.columns import Array
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD_LEN

_BLOCK_BYTES = len("NATS/1.0\r\n\r\n")
_LINE_BYTES = len(": \r\n")
_KEY_LINE_BYTES = len("Natslog-Key: \r\n")


def split_by_size(frames: Frames, max_bytes: int) -> tuple[Frames, Frames]:
    """Frames of messages of at most `max_bytes`, and those that are larger."""
    large = frames.rows[:, HEADER_LEN] + frames.rows[:, PAYLOAD_LEN] > max_bytes
    return (frames, frames.select(large)) if not large.any() else (frames.select(~large), frames.select(large))


def first_larger(rows: pa.RecordBatch, max_bytes: int) -> tuple[int, int] | None:
    """The number and the size of the first row that is larger; None if none is. `rows`: with the column `value`; `key`
    and `headers` where there are such columns.
    """
    sizes = _sizes(rows)
    at = int(np.argmax(sizes > max_bytes)) if len(sizes) else 0
    return (at, int(sizes[at])) if len(sizes) and sizes[at] > max_bytes else None


def fitting(rows: pa.RecordBatch, max_bytes: int, header_bytes: int) -> npt.NDArray[np.bool_]:
    """Marks rows of at most `max_bytes` with a further header, whose name and value have `header_bytes`. `rows`: as
    `first_larger`, with the columns `key` and `headers`.
    """
    headers, keys = rows.column("headers"), rows.column("key")
    has_no_block = np.asarray(pc.and_(headers.is_null(), keys.is_null()), np.bool_)
    return np.asarray(_sizes(rows) + header_bytes + _LINE_BYTES + _BLOCK_BYTES * has_no_block <= max_bytes)


def text_bytes(rows: pa.RecordBatch) -> Array:
    """The bytes of subject, key, headers and value of each row. `rows`: of the payload schema."""
    headers = rows.column("headers")
    sizes = sum(_lengths(pc.binary_length(rows.column(name))) for name in ("subject", "key", "value"))
    return np.asarray(sizes if headers.null_count == len(headers) else sizes + _of_pairs(headers), np.int64)


def too_large(max_bytes: int, what: str, **facts: Any) -> MessageTooLarge:
    """`what`: the message and its size, or how many there are."""
    return MessageTooLarge(
        f"message size exceeds maximum allowed: {what}, and the stream permits {max_bytes} bytes, headers included "
        "(max_message_bytes). Send smaller messages, or raise the limit",
        max_message_bytes=max_bytes,
        **facts,
    )


def _sizes(rows: pa.RecordBatch) -> Array:
    sizes = _lengths(pc.binary_length(rows.column("value")))
    has_block = np.zeros(len(sizes), np.bool_)
    if "key" in rows.schema.names:
        keys = rows.column("key")
        has_key = np.asarray(keys.is_valid(), np.bool_)
        sizes, has_block = sizes + _lengths(pc.binary_length(keys)) + _KEY_LINE_BYTES * has_key, has_key
    if "headers" in rows.schema.names:
        headers = rows.column("headers")
        sizes, has_block = sizes + _header_lines(headers), has_block | np.asarray(headers.is_valid(), np.bool_)
    return np.asarray(sizes + _BLOCK_BYTES * has_block)


def _header_lines(headers: pa.Array[Any]) -> Array:
    """Bytes of the header lines of each row."""
    return _of_pairs(headers, _LINE_BYTES)


def _of_pairs(headers: pa.Array[Any], each_bytes: int = 0) -> Array:
    """Names and values of the headers of each row, and so many bytes for each pair."""
    pairs = headers.flatten()
    lines = sum(_lengths(pc.binary_length(pairs.field(at))) for at in range(2)) + each_bytes
    counts = _lengths(pc.list_value_length(headers))
    ends = np.cumsum(counts)
    before = np.concatenate([[0], np.cumsum(lines)])
    return np.asarray(before[ends] - before[ends - counts])


def _lengths(values: pa.Array[Any]) -> Array:
    return np.asarray(pc.fill_null(values, 0).to_numpy(zero_copy_only=False), np.int64)
