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
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.arrow import ipc
from natslog.arrow.batch_line import ALIGNMENT, CRCS, BatchHeader, blank_crcs, fill_line, line_spans, line_start
from natslog.arrow.batch_metadata import BUFFERS, FIRST_BUFFERS
from natslog.arrow.message_template import MessageTemplate, batch_tables
from natslog.arrow.row_buffers import Buffer, RowBuffers
from natslog.arrow.run_marks import RunMark
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.wire import native
from natslog.wire.frames import Frames
from natslog.wire.header_parts import HeaderParts

_ZEROS = memoryview(bytes(ALIGNMENT))
_HEADERS_NODE = 4  # after offset, timestamp, subject, key
_SIZED = (np.ndarray, memoryview)
_SMALL_BODY_BYTES = 64 * 1024
_COUNTED_ROWS = 64 * 1024
_PLAIN_ROW_BYTES, _PLAIN_BATCH_BYTES = 40, 256  # of a plain batch beside subjects, payloads and header, at most
_HEADED_ROW_BYTES, _PAIR_BYTES = ipc.ID_BYTES, 8  # the same, of headers
_NO_IDS = np.empty((0, ipc.ID_BYTES), np.uint8)
_NO_HEADERS = np.empty((4, 0), np.int64), np.empty(0, np.int64), np.empty((2, 0), np.int64), np.empty(0, bool), _NO_IDS


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """One message in pieces, to be written one after another.

    Attributes:
        header: what it says of itself. `pieces`: `header.total_bytes` bytes in all.
    """

    header: ipc.BatchHeader
    pieces: list[Buffer]


@functools.lru_cache(maxsize=8)
def _template(run: RunMark | None, batch_format: int) -> MessageTemplate:
    row = {"offset": 0, "timestamp": 0, "subject": "s", "key": None, "headers": None, "value": b"v"}
    sample = pa.RecordBatch.from_pylist([row], schema=MESSAGE_SCHEMA)
    message = ipc.encode_batch(sample, base_offset=0, epoch=1, max_timestamp_us=0, run=run, batch_format=batch_format)
    header = message[: 8 + int.from_bytes(message[4:8], "little")].tobytes()
    return MessageTemplate.of(header, line_start(header))


def stores_headers(header: bytes) -> bool:
    """Whether any row of a batch has headers, from the batch's proven metadata alone."""
    _, batch = batch_tables(header)
    rows, nulls = struct.unpack_from("<qq", header, batch.Vector(batch.Offset(6)) + 16 * _HEADERS_NODE)
    return bool(nulls < rows)


def encode_rows(
    rows: RowBuffers,
    *,
    base_offset: int,
    timestamp_us: int,
    epoch: int,
    run: RunMark | None = None,
    batch_format: int = ipc.LATEST_FORMAT,
) -> EncodedBatch:
    """The message of one commit, or of a part of a run: the rows with offsets from `base_offset` on, at `timestamp_us`.

    The pieces hold views of the rows' buffers: they must stay as they are until the pieces are written.
    """
    count = rows.rows
    described = _Described(base_offset, base_offset + count, epoch, timestamp_us, batch_format, run)
    return _encoded(rows, _offsets(base_offset, count), np.full(count, timestamp_us, np.int64), described)


@functools.cache
def _plain_form() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """A header of a batch that belongs to no run, and where its numbers stand: see `wire.stored_layout`."""
    template = _template(None, ipc.LATEST_FORMAT)
    numbers, crcs = line_spans(template.header)
    places = [template.body_length, template.row_count, template.nodes, template.buffers, crcs[0][0]]
    places += itertools.chain.from_iterable((start, end - start) for start, end in numbers)
    return np.frombuffer(template.header, np.uint8), np.array(places, np.int64)


def encode_plain(
    frames: Frames, headers: HeaderParts | None, frame_bytes: int, *, base_offset: int, timestamp_us: int, epoch: int
) -> EncodedBatch:
    """As `encode_rows`, of plain frames (`kernels_plain.survey_plain`): one piece, which has bytes of its own."""
    rows, (template, places) = len(frames.rows), _plain_form()
    most_bytes, parts = frame_bytes + _PLAIN_ROW_BYTES * rows, _NO_HEADERS
    if headers is not None:
        most_bytes += frame_bytes + _HEADED_ROW_BYTES * rows + _PAIR_BYTES * headers.pairs.shape[1]  # keys come twice
        packed = headers.packed if headers.packed.any() else _NO_IDS
        parts = (headers.pairs, headers.first_pair, headers.keys, headers.has_headers, packed)
    out = np.empty(len(template) + most_bytes + _PLAIN_BATCH_BYTES, np.uint8)
    lengths, crcs = np.empty(BUFFERS, np.int64), np.empty(CRCS, np.int64)
    numbers = (base_offset, epoch, timestamp_us)
    size = native.encode_plain(frames.buffer, frames.rows, *parts, template, places, *numbers, lengths, crcs, out)
    sizes, end_offset = (len(template), size - len(template)), base_offset + rows
    stated = (base_offset, end_offset, rows, epoch, timestamp_us, *sizes, tuple(crcs.tolist()))
    header = BatchHeader(*stated, parts[-1].nbytes)
    return EncodedBatch(header, [out.data[:size] if size > len(out) // 2 else out[:size].copy().data])  # it may be kept


def encode_rows_at(
    rows: RowBuffers,
    offsets: npt.NDArray[np.int64],
    times_us: npt.NDArray[np.int64],
    *,
    base_offset: int,
    end_offset: int,
    max_timestamp_us: int,
    epoch: int,
) -> EncodedBatch:
    """The message of rows that have offsets and times already, both ascending: those of `[base_offset, end_offset)`
    that have no row have no message. As `encode_rows`.
    """
    described = _Described(base_offset, end_offset, epoch, max_timestamp_us, ipc.LATEST_FORMAT, None)
    return _encoded(rows, offsets, times_us, described)


class _Described(NamedTuple):
    """What the header states, but for rows, sizes and CRCs."""

    base_offset: int
    end_offset: int
    epoch: int
    max_timestamp_us: int
    batch_format: int
    run: RunMark | None


def _encoded(rows: RowBuffers, offsets: Buffer, times: Buffer, described: _Described) -> EncodedBatch:
    base_offset, end_offset, epoch, max_timestamp_us, batch_format, run = described
    count, template = rows.rows, _template(run, batch_format)
    buffers = [None, offsets, None, times, *rows.buffers]
    ids_bytes = 0 if rows.packed_ids is None else rows.packed_ids.nbytes
    pieces, places, edges = _laid_out(buffers, rows.packed_ids)
    body_bytes = edges[-1][1]
    nodes = [count, 0, count, 0, *itertools.chain.from_iterable(rows.nodes)]
    header = template.filled(count, nodes, places, body_bytes)
    sizes, crcs = (len(header), body_bytes), blank_crcs(batch_format)
    unproven = BatchHeader(base_offset, end_offset, count, epoch, max_timestamp_us, *sizes, crcs, ids_bytes, run)
    if body_bytes <= _SMALL_BODY_BYTES:  # one piece is cheaper to prove and to write than many
        body = memoryview(b"".join(pieces))
        pieces, parts = [body], [[body[start:end]] for (_, start), (_, end) in pairwise(edges)]
    else:
        parts = [pieces[first:last] for (first, _), (last, _) in pairwise(edges)]
    stated = fill_line(header, template.line, unproven, [pieces] if batch_format == ipc.FIRST_FORMAT else parts)
    return EncodedBatch(stated, [header, *pieces])


def _laid_out(
    buffers: list[Buffer], packed_ids: Buffer | None
) -> tuple[list[Buffer], list[int], list[tuple[int, int]]]:
    """The body in pieces, padding included; position and length of each buffer in it; for the begin, the end of each
    column and the end of the packed ids: how many pieces there are up to it, and its position.
    """
    pieces: list[Buffer] = []
    places: list[int] = []
    edges: list[tuple[int, int]] = []
    position = 0
    for at, buffer in enumerate(buffers):
        if at in FIRST_BUFFERS:
            edges.append((len(pieces), position))
        length = 0 if buffer is None else buffer.nbytes if isinstance(buffer, _SIZED) else len(buffer)
        places += (position, length)
        if length:
            position += _add_padded(pieces, buffer, length)
    edges.append((len(pieces), position))
    if packed_ids is not None:
        position += _add_padded(pieces, packed_ids, packed_ids.nbytes)
    edges.append((len(pieces), position))
    return pieces, places, edges


def _add_padded(pieces: list[Buffer], buffer: Buffer, length: int) -> int:
    """Returns the length with the padding."""
    pieces.append(buffer)
    gap = -length % ALIGNMENT
    if gap:
        pieces.append(_ZEROS[:gap])
    return length + gap


@functools.cache
def _counted() -> npt.NDArray[np.int64]:
    return np.arange(_COUNTED_ROWS, dtype=np.int64)


def _offsets(base_offset: int, count: int) -> npt.NDArray[np.int64]:
    if count <= _COUNTED_ROWS:
        return _counted()[:count] + base_offset
    return np.arange(base_offset, base_offset + count, dtype=np.int64)
