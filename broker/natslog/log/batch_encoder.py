"""Encodes a commit: one Arrow IPC record-batch message as pieces to be written, bodies not copied.

Theory of operation. The flatbuffer of a record batch of one schema has one shape: only numbers in it change. So pyarrow
writes one message when this module is first used, the places of its numbers are looked up in the flatbuffer, and each
commit fills a copy of that template: row counts, buffer places, our fixed-width batch line, both CRC32Cs. The body is
the buffers of the rows as they are, with padding between them. A test compares the result with pyarrow's own bytes.

Source: Arrow columnar format, `Message.fbs` and `Schema.fbs`; docs/FORMATS.md.
"""

from __future__ import annotations

import functools
import itertools
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c
from flatbuffers.table import Table

from natslog.arrow import ipc
from natslog.arrow.row_buffers import BUFFERS, NODES, Buffer, RowBuffers
from natslog.arrow.run_marks import RunMark
from natslog.arrow.schema import MESSAGE_SCHEMA

_ALIGNMENT = 8
_ZEROS = memoryview(bytes(_ALIGNMENT))
_PACK_ONE = struct.Struct("<q").pack_into
_PACK_NODES = struct.Struct(f"<{2 * (2 + NODES)}q").pack_into  # with those of offset and timestamp
_PACK_BUFFERS = struct.Struct(f"<{2 * (4 + BUFFERS)}q").pack_into
_HEADERS_NODE = 4  # after offset, timestamp, subject, key
_SIZED = (np.ndarray, memoryview)
_SMALL_BODY_BYTES = 64 * 1024
_COUNTED_ROWS = 64 * 1024
_KEEP_GIL = 0  # 20 bytes per nanosecond: acquiring the lock again takes longer


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """One message in pieces, to be written one after another.

    Attributes:
        header: what it says of itself. `pieces`: `header.total_bytes` bytes in all.
    """

    header: ipc.BatchHeader
    pieces: list[Buffer]


@dataclass(frozen=True, slots=True)
class _Template:
    """A message's header and where its numbers stand: byte positions."""

    header: bytes
    body_length: int
    row_count: int
    nodes: int
    buffers: int
    line: ipc.LinePlaces


@functools.lru_cache(maxsize=8)
def _template(run: RunMark | None = None) -> _Template:
    row = {"offset": 0, "timestamp": 0, "subject": "s", "key": None, "headers": None, "value": b"v"}
    sample = pa.RecordBatch.from_pylist([row], schema=MESSAGE_SCHEMA)
    message = ipc.encode_batch(sample, base_offset=0, epoch=1, max_timestamp_us=0, run=run)
    header_bytes = 8 + int.from_bytes(message[4:8], "little")
    header = bytearray(message[:header_bytes])
    line = ipc.line_places(header)
    line.fill_crcs(header, 0, 0)  # as they stand while CRCs are taken
    table, batch = _tables(header)
    return _Template(
        bytes(header),
        body_length=table.Pos + table.Offset(10),
        row_count=batch.Pos + batch.Offset(4),
        nodes=batch.Vector(batch.Offset(6)),
        buffers=batch.Vector(batch.Offset(8)),
        line=line,
    )


def _tables(header: bytes | bytearray) -> tuple[Table, Table]:
    """The flatbuffer tables `Message` and `RecordBatch` of an encapsulated message."""
    message = Table(header, 8 + int.from_bytes(header[8:12], "little"))
    return message, Table(header, message.Indirect(message.Pos + message.Offset(8)))


def stores_headers(header: bytes) -> bool:
    """Whether any row of a batch has headers, from the batch's proven metadata alone."""
    _, batch = _tables(header)
    rows, nulls = struct.unpack_from("<qq", header, batch.Vector(batch.Offset(6)) + 16 * _HEADERS_NODE)
    return bool(nulls < rows)


def encode_rows(
    rows: RowBuffers, *, base_offset: int, timestamp_us: int, epoch: int, run: RunMark | None = None
) -> EncodedBatch:
    """The message of one commit, or of a part of a run: the rows with offsets from `base_offset` on, at `timestamp_us`.

    The pieces hold views of the rows' buffers: they must stay as they are until the pieces are written.
    """
    template = _template(run)
    count = rows.rows
    buffers = [None, _offsets(base_offset, count), None, np.full(count, timestamp_us, np.int64), *rows.buffers]
    pieces, places, body_bytes = _laid_out(buffers)
    header = bytearray(template.header)
    _PACK_ONE(header, template.body_length, body_bytes)
    _PACK_ONE(header, template.row_count, count)
    _PACK_NODES(header, template.nodes, count, 0, count, 0, *itertools.chain.from_iterable(rows.nodes))
    _PACK_BUFFERS(header, template.buffers, *places)
    template.line.fill(header, base_offset, count, epoch, timestamp_us, body_bytes)
    header_crc = crc = crc32c(header)
    for piece in pieces:
        crc = crc32c(piece, crc, gil_release_mode=_KEEP_GIL)
    template.line.fill_crcs(header, header_crc, crc)
    described = ipc.BatchHeader(base_offset, count, epoch, timestamp_us, len(header), body_bytes, header_crc, crc, run)
    return EncodedBatch(described, [header, *pieces])


def _laid_out(buffers: list[Buffer]) -> tuple[list[Buffer], list[int], int]:
    """The body in pieces, padding included; position and length of each buffer in it; its length."""
    pieces: list[Buffer] = []
    places: list[int] = []
    position = 0
    for buffer in buffers:
        length = 0 if buffer is None else buffer.nbytes if isinstance(buffer, _SIZED) else len(buffer)
        places += (position, length)
        if length:
            pieces.append(buffer)
            if gap := -length % _ALIGNMENT:
                pieces.append(_ZEROS[:gap])
            position += length + gap
    if position <= _SMALL_BODY_BYTES:  # one piece is cheaper to prove and write than many
        pieces = [b"".join(pieces)]
    return pieces, places, position


@functools.cache
def _counted() -> npt.NDArray[np.int64]:
    return np.arange(_COUNTED_ROWS, dtype=np.int64)


def _offsets(base_offset: int, count: int) -> npt.NDArray[np.int64]:
    if count <= _COUNTED_ROWS:
        return _counted()[:count] + base_offset
    return np.arange(base_offset, base_offset + count, dtype=np.int64)
