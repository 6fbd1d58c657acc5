"""Self-validating Arrow IPC messages: the messages that pyarrow writes, with a line of text and CRC32Cs in their
metadata (`batch_line`), and packed message ids behind the columns of the body.

Theory of operation. A batch is one encapsulated Arrow IPC message (continuation, metadata length, flatbuffer, body).
Its custom metadata holds the batch line under the key `natslog.batch` (and, in a batch of a direct append, that run's
mark: `natslog.arrow.run_marks`). The header's own CRC validates its lengths even when the body is missing. This
distinguishes a torn tail (lengths proven, bytes missing) from damage (bytes there, and wrong). A file or response is a
schema message, then such messages, then end-of-stream. Other readers of Arrow pass over the bytes behind the columns.

Source: Arrow columnar format, "Encapsulated message format"; docs/FORMATS.md has every byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from natslog.arrow.batch_line import (
    ALIGNMENT,
    CONTINUATION,
    FIRST_FORMAT,
    ID_BYTES,
    LATEST_FORMAT,
    MAX_HEADER_BYTES,
    BatchHeader,
    Bytes,
    blank_crcs,
    blank_line,
    fill_line,
    find_batch_line,
    line_start,
    proven_header,
)
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.run_marks import MARK_KEY, RunMark
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.errors import CorruptLog
from natslog.units import offsets_between

__all__ = [
    "FIRST_FORMAT",
    "ID_BYTES",
    "LATEST_FORMAT",
    "MAX_HEADER_BYTES",
    "BatchHeader",
    "Bytes",
    "find_batch_line",
    "proven_header",
]

END_OF_STREAM = CONTINUATION + b"\x00\x00\x00\x00"

_BATCH_KEY = b"natslog.batch"
_STATS_KEY = b"natslog.stats"

PackedIds = npt.NDArray[np.uint8]
"""Message ids that are stored beside the columns (see `wire.own_ids`): shape (rows, 12), zeros where there is none."""


def schema_message(schema: pa.Schema = MESSAGE_SCHEMA) -> bytes:
    """The encapsulated schema message that opens a stream."""
    return bytes(schema.serialize())


def encode_batch(
    batch: pa.RecordBatch,
    *,
    base_offset: int,
    end_offset: int | None = None,
    epoch: int,
    max_timestamp_us: int,
    compression: str | None = None,
    stats: bytes | None = None,
    run: RunMark | None = None,
    packed_ids: PackedIds | None = None,
    batch_format: int = LATEST_FORMAT,
) -> memoryview:
    """One encapsulated message, CRCs filled in.

    Args:
        end_offset: where the next batch begins; None: there is a row for each offset. Offsets of the batch without a
            row belong to messages that were removed, which format 1 cannot state.
        compression: `zstd`, `lz4` or None, for the body's buffers.
        stats: JSON stored beside the batch line, for tools. `run`: the run that the batch is a part of.
        packed_ids: of its rows; None where no row has one, and in format 1.
    """
    line = blank_line(batch_format)
    metadata = {_BATCH_KEY: line} | ({_STATS_KEY: stats} if stats else {}) | ({MARK_KEY: run.to_line()} if run else {})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch, custom_metadata=metadata)
    ids = b"" if packed_ids is None else packed_ids.tobytes()
    behind = ids + bytes(-len(ids) % ALIGNMENT)
    sink.write(behind)
    # pyarrow opens every stream with the schema message and closes it with end-of-stream; the message is in between.
    message = memoryview(sink.getvalue()).cast("B")[len(schema_message(batch.schema)) : -len(END_OF_STREAM)]
    message[len(message) - len(behind) :] = behind
    header_bytes = 8 + int.from_bytes(message[4:8], "little")
    assert header_bytes <= MAX_HEADER_BYTES, "readers search no further for the body"
    header, body = message[:header_bytes], message[header_bytes:]
    metadata_of = BatchMetadata(bytes(header[8:]))
    metadata_of.set_body_bytes(header[8:], len(body))
    end_offset = base_offset + batch.num_rows if end_offset is None else end_offset
    assert end_offset == base_offset + batch.num_rows or batch_format != FIRST_FORMAT, "format 1 has no gaps"
    described = BatchHeader(
        base_offset, end_offset, batch.num_rows, epoch, max_timestamp_us,
        header_bytes, len(body), blank_crcs(batch_format), len(ids), run,
    )  # fmt: skip
    edges = [0, len(body)] if batch_format == FIRST_FORMAT else [*column_edges(metadata_of, described), len(body)]
    fill_line(header, line_start(header), described, [[body[start:end]] for start, end in pairwise(edges)])
    return message


class OffsetRange(Protocol):
    """What the header of any message states: offsets `[base_offset, end_offset)`, of which `rows` have a message."""

    @property
    def base_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def has_gaps(self) -> bool: ...


def column_edges(metadata: BatchMetadata, header: BatchHeader) -> list[int]:
    """Where each column begins in the body, and where the last one ends: bytes from its start."""
    return [*metadata.column_starts(), header.columns_bytes]


def has_stats(window: bytes) -> bool:
    """Whether the batch that begins here has statistics."""
    return _STATS_KEY in window[: 8 + int.from_bytes(window[4:8], "little")]


def body_holds(header: BatchHeader, message: Bytes) -> bool:
    """Whether the CRC of the body of this whole message holds (the header is proven already)."""
    view = memoryview(message)
    before, after = header.body_crc
    return int(crc32c(view[header.header_bytes : header.total_bytes], before)) == after


def split_messages(stream: Bytes, *, source: str) -> Iterator[tuple[BatchHeader, memoryview]]:
    """The batches of a response or file range (schema and end-of-stream messages passed over), each CRC-checked.

    Args:
        stream: consecutive encapsulated messages, copied nowhere.
        source: what to name in an error: a file or URL.

    Raises:
        CorruptLog: a message is cut short, or its CRC does not hold.
    """
    view, position = memoryview(stream), 0
    while (found := message_at(view, position, source=source)) is not None:
        header, message, position = found
        yield header, message


def message_at(view: memoryview, position: int, *, source: str) -> tuple[BatchHeader, memoryview, int] | None:
    """The batch of `split_messages` that begins there, and where the next one does; None: there is no other one."""
    length = int.from_bytes(view[position + 4 : position + 8], "little")
    if position == len(view) or (length == 0 and position + 8 <= len(view)):
        return None
    if position + 8 > len(view):
        raise CorruptLog(f"{source}: the {len(view) - position} bytes after the last batch are not a message")
    header = proven_header(view[position : position + MAX_HEADER_BYTES])
    if header is None:
        if position == 0 and _is_schema(view):
            return message_at(view, 8 + length, source=source)
        raise CorruptLog(f"{source}: the batch at byte {position} has a damaged header", position=position)
    end = position + header.total_bytes
    message = view[position:end]
    if len(message) < header.total_bytes or not body_holds(header, message):
        raise CorruptLog(
            f"{source}: the batch at byte {position}, {offsets_between(header.base_offset, header.end_offset)}, has a "
            "wrong CRC32C",
            position=position,
            start=header.base_offset,
            end=header.end_offset,
        )
    return header, message, end


def _is_schema(view: memoryview) -> bool:
    return bytes(view[:4]) == CONTINUATION and b"offset\0" in bytes(view[: 8 + int.from_bytes(view[4:8], "little")])


def decode_batch(message: Bytes, schema: pa.Schema = MESSAGE_SCHEMA) -> pa.RecordBatch:
    """The record batch of one message; its buffers are slices of `message`, not copies."""
    return pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(message)), schema)


def packed_ids_of(header: BatchHeader, message: Bytes) -> PackedIds | None:
    """The packed ids of a proven batch, a view of the message; None where no row has one."""
    if not header.ids_bytes:
        return None
    start = header.header_bytes + header.columns_bytes
    return np.frombuffer(message, np.uint8, header.ids_bytes, start).reshape(header.rows, ID_BYTES)


def rows_within(header: OffsetRange, batch: pa.RecordBatch, start: int, end: int) -> slice:
    """Which rows of a batch have offsets within `[start, end)`. If offsets are missing in it and the range begins or
    ends inside of it, the batch must have the column `offset`.
    """
    low, high = max(start, header.base_offset), min(end, header.end_offset)
    if low <= header.base_offset and high >= header.end_offset:
        return slice(0, header.rows)
    if not header.rows:
        return slice(0, 0)
    if not header.has_gaps:
        return slice(low - header.base_offset, max(low, high) - header.base_offset)
    first, behind = np.searchsorted(batch.column("offset").to_numpy(), (low, max(low, high))).tolist()
    return slice(first, behind)


def clip_batch(message: Bytes, start: int, end: int) -> memoryview:
    """The part of a proven batch within `[start, end)`, at least one offset, as a batch of its own."""
    header = proven_header(message[:MAX_HEADER_BYTES])
    assert header is not None, "the message was proven"
    batch = decode_batch(message)
    kept = rows_within(header, batch, start, end)
    newest_us = header.max_timestamp_us
    if kept.stop < header.rows and kept.stop > kept.start:
        newest_us = batch.column("timestamp").cast(pa.int64())[kept.stop - 1].as_py()
    return _encoded_again(
        header,
        batch[kept],
        _ids_at(header, message, kept),
        base_offset=max(start, header.base_offset),
        end_offset=min(end, header.end_offset),
        max_timestamp_us=newest_us,
    )


def without_rows(message: Bytes, removed: npt.NDArray[np.bool_], *, compression: str | None = None) -> memoryview:
    """A proven batch without some of its rows. It is for the same offsets; the timestamp of its newest message stays,
    so that timestamps of batches ascend.

    Args:
        removed: of shape (rows,). `compression`: as in `encode_batch`.
    """
    header = proven_header(message[:MAX_HEADER_BYTES])
    assert header is not None, "the message was proven"
    assert len(removed) == header.rows, "one flag for each row"
    kept = np.flatnonzero(~removed)
    return _encoded_again(
        header,
        decode_batch(message).take(pa.array(kept)),
        _ids_at(header, message, kept),
        base_offset=header.base_offset,
        end_offset=header.end_offset,
        max_timestamp_us=header.max_timestamp_us,
        compression=compression,
    )


def without_contents(message: Bytes, emptied: npt.NDArray[np.bool_]) -> memoryview:
    """A proven batch in which some rows have no key, headers, message id, and an empty value. Offsets, times and
    subjects stay.

    Args:
        emptied: of shape (rows,).
    """
    import pyarrow.compute as pc  # takes long to import, and most readers do not need it

    header = proven_header(message[:MAX_HEADER_BYTES])
    assert header is not None, "the message was proven"
    batch, kept = decode_batch(message), pa.array(np.arange(header.rows), mask=emptied)
    columns = {name: batch.column(name) for name in MESSAGE_SCHEMA.names}
    columns |= {name: columns[name].take(kept) for name in ("key", "headers")}
    columns["value"] = pc.fill_null(columns["value"].take(kept), b"")
    ids = packed_ids_of(header, message)
    if ids is not None:
        ids = np.where(emptied[:, None], np.uint8(0), ids)
    return _encoded_again(
        header,
        pa.RecordBatch.from_arrays(list(columns.values()), schema=MESSAGE_SCHEMA),
        ids if ids is not None and ids.any() else None,
        base_offset=header.base_offset,
        end_offset=header.end_offset,
        max_timestamp_us=header.max_timestamp_us,
    )


def _ids_at(header: BatchHeader, message: Bytes, rows: slice | npt.NDArray[np.int64]) -> PackedIds | None:
    ids = packed_ids_of(header, message)
    return None if ids is None or not ids[rows].any() else np.ascontiguousarray(ids[rows])


def _encoded_again(
    header: BatchHeader,
    batch: pa.RecordBatch,
    packed_ids: PackedIds | None,
    *,
    base_offset: int,
    end_offset: int,
    max_timestamp_us: int,
    compression: str | None = None,
) -> memoryview:
    """Some rows of a batch, with what its header states."""
    has_gaps = batch.num_rows < end_offset - base_offset
    return encode_batch(
        batch,
        base_offset=base_offset,
        end_offset=end_offset,
        epoch=header.epoch,
        max_timestamp_us=max_timestamp_us,
        compression=compression,
        run=header.run,
        packed_ids=packed_ids,
        batch_format=LATEST_FORMAT if has_gaps else header.batch_format,
    )
