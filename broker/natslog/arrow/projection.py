"""Answers with some of the columns, made of the stored bytes: nothing is decoded.

Theory of operation. The buffers of a column stand next to each other in the body of a batch. A message with some of the
columns consists of a new header and these bytes, in the order asked for. Its custom metadata has the key
`natslog.columns` with the line

    v1 base_offset=… end_offset=… rows=… header_bytes=… body_bytes=… columns=<from>-<to>,… header_crc32c=…

where `from` and `to` are the running CRC32Cs of the stored body before and after the column (see `batch_line`): they
prove the column's bytes, from the disk of the broker to the client.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
from crc32c import crc32c

from natslog.arrow import ipc
from natslog.arrow.batch_line import CONTINUATION, MAX_HEADER_BYTES, BatchHeader, Bytes
from natslog.arrow.batch_metadata import BUFFERS, FIRST_BUFFERS, BatchMetadata
from natslog.arrow.message_template import MessageTemplate
from natslog.arrow.schema import COLUMNS, MESSAGE_SCHEMA
from natslog.errors import CorruptLog
from natslog.units import offsets_between

_KEY = b"natslog.columns"
_NODES = 9
_FIRST_NODES = (0, 1, 2, 3, 4, 8)
_CODECS = ("lz4", "zstd")
_CRC_BYTES = 8
_LINE = re.compile(
    rb"v1 base_offset=(\d{19}) end_offset=(\d{19}) rows=(\d{10}) header_bytes=(\d{10}) body_bytes=(\d{12})"
    rb" columns=([0-9a-f,-]+) header_crc32c=([0-9a-f]{8})\0"
)


def schema_of(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([MESSAGE_SCHEMA.field(name) for name in columns])


def _line(numbers: tuple[int, int, int], header_bytes: int, body_bytes: int, crcs: Sequence[tuple[int, int]]) -> bytes:
    """With zeros as the header's CRC. `numbers`: base offset, end offset, rows."""
    columns = b",".join(b"%08x-%08x" % pair for pair in crcs)
    form = b"v1 base_offset=%019d end_offset=%019d rows=%010d header_bytes=%010d body_bytes=%012d columns="
    return form % (*numbers, header_bytes, body_bytes) + columns + b" header_crc32c=" + b"0" * _CRC_BYTES


@functools.lru_cache(maxsize=64)
def _template(columns: tuple[str, ...], codec: int | None) -> MessageTemplate:
    line = _line((0, 0, 0), 0, 0, [(0, 0)] * len(columns))
    row = {"offset": 0, "timestamp": 0, "subject": "s", "key": None, "headers": None, "value": b"v"}
    sample = pa.RecordBatch.from_pylist([row], schema=MESSAGE_SCHEMA).select(list(columns))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=None if codec is None else _CODECS[codec])
    with pa.ipc.new_stream(sink, sample.schema, options=options) as writer:
        writer.write_batch(sample, custom_metadata={_KEY: line})
    message = sink.getvalue().to_pybytes()[len(ipc.schema_message(sample.schema)) :]
    header = message[: 8 + int.from_bytes(message[4:8], "little")]
    return MessageTemplate.of(header, header.index(line))


@dataclass(frozen=True, slots=True)
class Projected:
    """A message with some of the columns of a stored batch.

    Attributes:
        header: up to the body. `body`: the parts of the stored body of which the new one consists, in turn: start and
            end in bytes.
    """

    header: bytearray
    body: list[tuple[int, int]]


def project(header: BatchHeader, window: Bytes, columns: tuple[str, ...]) -> Projected:
    """Of a proven batch of format 2.

    Args:
        window: bytes that begin with the batch's header.
    """
    metadata = BatchMetadata(bytes(window[8 : header.header_bytes]))
    edges = ipc.column_edges(metadata, header)
    stored_nodes, stored_buffers = metadata.nodes, metadata.buffers
    nodes: list[int] = []
    buffers: list[int] = []
    crcs: list[tuple[int, int]] = []
    body: list[tuple[int, int]] = []
    at = 0
    running = (0, *header.crcs[1:])
    for number in map(COLUMNS.index, columns):
        start, end = edges[number], edges[number + 1]
        for node in _of_column(stored_nodes, _FIRST_NODES, number, _NODES):
            nodes += node
        for position, length in _of_column(stored_buffers, FIRST_BUFFERS, number, BUFFERS):
            buffers += (position - start + at, length)
        crcs.append((running[number], running[number + 1]))
        body = [*body[:-1], (body[-1][0], end)] if body and body[-1][1] == start else [*body, (start, end)]
        at += end - start
    template = _template(columns, metadata.codec)
    made = template.filled(header.rows, nodes, buffers, at)
    line = _line((header.base_offset, header.end_offset, header.rows), len(made), at, crcs)
    _fill_line(made, template.line, line)
    return Projected(made, body)


def encode_rows(rows: pa.RecordBatch, start: int, end: int) -> memoryview:
    """A message of the same form, made of rows in memory: those of the offsets `[start, end)` that are sent. Its CRCs
    are of the columns as they are sent.
    """
    columns = tuple(rows.schema.names)
    line = _line((start, end, rows.num_rows), 0, 0, [(0, 0)] * len(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows, custom_metadata={_KEY: line})
    message = memoryview(sink.getvalue()).cast("B")[len(_schema_bytes(columns)) : -len(ipc.END_OF_STREAM)]
    header_bytes = 8 + int.from_bytes(message[4:8], "little")
    header, body = message[:header_bytes], message[header_bytes:]
    edges = [*_edges(bytes(header), columns), len(body)]
    crcs = [(0, crc32c(body[before:after])) for before, after in pairwise(edges)]
    _fill_line(header, bytes(header).index(line), _line((start, end, rows.num_rows), header_bytes, len(body), crcs))
    return message


@functools.lru_cache(maxsize=64)
def _schema_bytes(columns: tuple[str, ...]) -> bytes:
    return ipc.schema_message(schema_of(columns))


def _fill_line(header: bytearray | memoryview, at: int, line: bytes) -> None:
    """With the CRC of the header, in which that CRC is zeros."""
    end = at + len(line)
    header[at:end] = line
    header[end - _CRC_BYTES : end] = b"%08x" % crc32c(header)


def _edges(header: bytes, columns: Sequence[str]) -> list[int]:
    """Where each column begins in the body of a message with these columns."""
    buffers = BatchMetadata(header[8:]).buffers
    edges, first = [], 0
    for number in map(COLUMNS.index, columns):
        edges.append(buffers[first][0])
        first += (*FIRST_BUFFERS, BUFFERS)[number + 1] - FIRST_BUFFERS[number]
    return edges


def _of_column(every: list[tuple[int, int]], firsts: tuple[int, ...], number: int, count: int) -> list[tuple[int, int]]:
    return every[firsts[number] : (*firsts, count)[number + 1]]


@dataclass(frozen=True, slots=True)
class ProjectedHeader:
    """What a message with some of the columns states; `crcs`: of each column, before and after it."""

    base_offset: int
    end_offset: int
    rows: int
    header_bytes: int
    body_bytes: int
    crcs: list[tuple[int, int]]

    @property
    def has_gaps(self) -> bool:
        """As `BatchHeader.has_gaps`."""
        return self.rows < self.end_offset - self.base_offset

    @property
    def total_bytes(self) -> int:
        return self.header_bytes + self.body_bytes


def _proven_header(window: memoryview) -> ProjectedHeader | None:
    """The header that these bytes begin with, if it is whole and its own CRC holds."""
    header_bytes = 8 + int.from_bytes(window[4:8], "little")
    if bytes(window[:4]) != CONTINUATION or not 8 < header_bytes <= min(len(window), MAX_HEADER_BYTES):
        return None
    found = _LINE.search(window[:header_bytes])
    if found is None:
        return None
    crc = crc32c(b"0" * _CRC_BYTES, crc32c(window[: found.start(7)]))
    if crc32c(window[found.end(7) : header_bytes], crc) != int(found[7], 16) or int(found[4]) != header_bytes:
        return None
    base, end, rows, _, body_bytes = (int(found[group]) for group in range(1, 6))
    pairs = [pair.partition(b"-") for pair in found[6].split(b",")]
    crcs = [(int(before, 16), int(after, 16)) for before, _, after in pairs]
    return ProjectedHeader(base, end, rows, header_bytes, body_bytes, crcs)


def split_projected(
    stream: Bytes, columns: Sequence[str], *, source: str
) -> Iterator[tuple[ProjectedHeader, memoryview]]:
    """The messages of an answer with these columns, each column proven; schema and end-of-stream are passed over.

    Args:
        source: what to name in an error.

    Raises:
        CorruptLog: a message is cut short, or a CRC does not hold.
    """
    view = memoryview(stream)
    position = 8 + int.from_bytes(view[4:8], "little")  # of the schema message
    while position + 8 <= len(view):
        if int.from_bytes(view[position + 4 : position + 8], "little") == 0:
            return
        header, message = proven_at(view, position, columns, source=source)
        yield header, message
        position += header.total_bytes
    raise CorruptLog(f"{source}: the response has no end")


def proven_at(
    view: memoryview, position: int, columns: Sequence[str], *, source: str
) -> tuple[ProjectedHeader, memoryview]:
    """The message with these columns that begins there, each column proven. Raises as `split_projected`."""
    header = _proven_header(view[position : position + MAX_HEADER_BYTES])
    if header is None:
        raise CorruptLog(f"{source}: the message at byte {position} has a damaged header", position=position)
    message = view[position : position + header.total_bytes]
    if len(message) < header.total_bytes or not _columns_hold(header, message, columns):
        raise CorruptLog(
            f"{source}: the message at byte {position}, {offsets_between(header.base_offset, header.end_offset)}, has "
            "a wrong CRC32C",
            position=position,
            start=header.base_offset,
            end=header.end_offset,
        )
    return header, message


def _columns_hold(header: ProjectedHeader, message: memoryview, columns: Sequence[str]) -> bool:
    body = message[header.header_bytes :]
    parts = pairwise([*_edges(bytes(message[: header.header_bytes]), columns), header.body_bytes])
    return len(header.crcs) == len(columns) and all(
        crc32c(body[start:end], before) == after
        for (start, end), (before, after) in zip(parts, header.crcs, strict=True)
    )
