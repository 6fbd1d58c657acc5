"""Self-validating Arrow IPC messages: the messages that pyarrow writes, with an additional descriptive header and
CRC32Cs.

Theory of operation. A batch is one encapsulated Arrow IPC message (continuation, metadata length, flatbuffer, body).
Its custom metadata holds one fixed-width line under the key `natslog.batch`:

    v1 base_offset=… rows=… epoch=… max_timestamp_us=… header_bytes=… body_bytes=… header_crc32c=… crc32c=…

(and, in a batch of a direct append, that run's mark: `natslog.arrow.run_marks`).

`header_bytes` is everything before the body. Both CRCs are taken with both CRC fields set to `00000000`:
`header_crc32c` over the header, `crc32c` over header and body. The header's own CRC validates its lengths even when the
body is missing. This distinguishes a torn tail (lengths proven, bytes missing) from damage (bytes there, and wrong). A
file or response is a schema message, then such messages, then end-of-stream.

Source: Arrow columnar format, "Encapsulated message format"; docs/FORMATS.md has every byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
from crc32c import crc32c

from natslog.arrow.run_marks import MARK_KEY, RunMark, find_mark
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.errors import CorruptLog

Bytes: TypeAlias = bytes | bytearray | memoryview

CONTINUATION = b"\xff\xff\xff\xff"
END_OF_STREAM = CONTINUATION + b"\x00\x00\x00\x00"
MAX_HEADER_BYTES = 8192

_BATCH_KEY = b"natslog.batch"
_STATS_KEY = b"natslog.stats"
_BLANK_CRC = b"00000000"
_LINE_FORM = (
    b"v1 base_offset=%019d rows=%010d epoch=%019d max_timestamp_us=%019d"
    b" header_bytes=%010d body_bytes=%012d header_crc32c=00000000 crc32c=00000000"
)
_LINE = re.compile(
    rb"v1 base_offset=(\d{1,19}) rows=(\d{1,10}) epoch=(\d{1,19}) max_timestamp_us=(\d{1,19})"
    rb" header_bytes=(\d{10}) body_bytes=(\d{12}) header_crc32c=([0-9a-f]{8}) crc32c=([0-9a-f]{8})\0"
)


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The header of a batch; `crc` and `header_crc` are the stored values, not yet checked.

    `run`: the run that the batch is a part of, as a validated header names it.
    """

    base_offset: int
    rows: int
    epoch: int
    max_timestamp_us: int
    header_bytes: int
    body_bytes: int
    header_crc: int
    crc: int
    run: RunMark | None = None

    @property
    def end_offset(self) -> int:
        """Exclusive."""
        return self.base_offset + self.rows

    @property
    def total_bytes(self) -> int:
        return self.header_bytes + self.body_bytes


def schema_message(schema: pa.Schema = MESSAGE_SCHEMA) -> bytes:
    """The encapsulated schema message that opens a stream."""
    return bytes(schema.serialize())


def encode_batch(
    batch: pa.RecordBatch,
    *,
    base_offset: int,
    epoch: int,
    max_timestamp_us: int,
    compression: str | None = None,
    stats: bytes | None = None,
    run: RunMark | None = None,
) -> memoryview:
    """One encapsulated message, CRCs filled in.

    Args:
        compression: `zstd`, `lz4` or None, for the body's buffers.
        stats: JSON stored beside the batch line, for tools. `run`: the run that the batch is a part of.
    """
    line = _LINE_FORM % (base_offset, batch.num_rows, epoch, max_timestamp_us, 0, 0)
    metadata = {_BATCH_KEY: line} | ({_STATS_KEY: stats} if stats else {}) | ({MARK_KEY: run.to_line()} if run else {})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch, custom_metadata=metadata)
    # pyarrow opens every stream with the schema message and closes it with end-of-stream; the message is in between.
    message = memoryview(sink.getvalue()).cast("B")[len(schema_message(batch.schema)) : -len(END_OF_STREAM)]
    owned = memoryview(bytearray(message)) if message.readonly else message
    header_bytes = 8 + int.from_bytes(owned[4:8], "little")
    return _seal_header(owned, header_bytes)


def _seal_header(message: memoryview, header_bytes: int) -> memoryview:
    """Fills lengths and CRCs into the fixed-width line."""
    assert header_bytes <= MAX_HEADER_BYTES, "readers search no further for the body"
    places = line_places(message[:header_bytes])
    places.fill_sizes(message, header_bytes, len(message) - header_bytes)
    header_crc = crc32c(message[:header_bytes])
    places.fill_crcs(message, header_crc, crc32c(message[header_bytes:], header_crc))
    return message


@dataclass(frozen=True, slots=True)
class LinePlaces:
    """Positions of the numbers of a batch line of full width in a header, in bytes from its start."""

    starts: tuple[int, ...]

    def fill(
        self, header: bytearray, base_offset: int, rows: int, epoch: int, max_timestamp_us: int, body_bytes: int
    ) -> None:
        """Everything but the CRCs, which are left as they are."""
        for start, text in zip(
            self.starts,
            (b"%019d" % base_offset, b"%010d" % rows, b"%019d" % epoch, b"%019d" % max_timestamp_us),
            strict=False,
        ):
            header[start : start + len(text)] = text
        self.fill_sizes(header, len(header), body_bytes)

    def fill_sizes(self, header: bytearray | memoryview, header_bytes: int, body_bytes: int) -> None:
        header[self.starts[4] : self.starts[4] + 10] = b"%010d" % header_bytes
        header[self.starts[5] : self.starts[5] + 12] = b"%012d" % body_bytes

    def fill_crcs(self, header: bytearray | memoryview, header_crc: int, crc: int) -> None:
        header[self.starts[6] : self.starts[6] + 8] = b"%08x" % header_crc
        header[self.starts[7] : self.starts[7] + 8] = b"%08x" % crc


def line_places(header: Bytes) -> LinePlaces:
    """Of a header that has a batch line of full width."""
    found = _LINE.search(header)
    assert found is not None, "the batch line must be in the header that was just written"
    return LinePlaces(tuple(found.start(group) for group in range(1, 9)))


def find_batch_line(window: Bytes) -> BatchHeader | None:
    """The first batch line in these bytes, not validated; None if there is none."""
    found = _LINE.search(window)
    return _header_of(found, None) if found else None


def _header_of(found: re.Match[bytes], run: RunMark | None) -> BatchHeader:
    base_offset, rows, epoch, max_timestamp_us, header_bytes, body_bytes = (int(found[group]) for group in range(1, 7))
    crcs = int(found[7], 16), int(found[8], 16)
    return BatchHeader(base_offset, rows, epoch, max_timestamp_us, header_bytes, body_bytes, *crcs, run)


def proven_header(window: Bytes) -> BatchHeader | None:
    """The header these bytes begin with, if it is whole and its own CRC holds."""
    if len(window) < 8 or bytes(window[:4]) != CONTINUATION:
        return None
    header_bytes = 8 + int.from_bytes(window[4:8], "little")
    if not 8 < header_bytes <= min(len(window), MAX_HEADER_BYTES):
        return None
    found = _LINE.search(window, 0, header_bytes) if isinstance(window, bytes) else _LINE.search(window[:header_bytes])
    if found is None:
        return None
    header = _header_of(found, find_mark(window[:header_bytes]))
    if header.header_bytes != header_bytes or _blank_crc(window, found, header_bytes) != header.header_crc:
        return None
    return header


def _blank_crc(window: Bytes, found: re.Match[bytes], header_bytes: int) -> int:
    view = memoryview(window)
    crc = crc32c(_BLANK_CRC, crc32c(view[: found.start(7)]))
    crc = crc32c(_BLANK_CRC, crc32c(view[found.end(7) : found.start(8)], crc))
    return int(crc32c(view[found.end(8) : header_bytes], crc))


def has_stats(window: bytes) -> bool:
    """Whether the batch that begins here has statistics."""
    return _STATS_KEY in window[: 8 + int.from_bytes(window[4:8], "little")]


def body_holds(header: BatchHeader, message: Bytes) -> bool:
    """Whether the CRC over header and body of this whole message holds (the header is proven already)."""
    view = memoryview(message)
    return int(crc32c(view[header.header_bytes : header.total_bytes], header.header_crc)) == header.crc


def split_messages(stream: Bytes, *, source: str) -> Iterator[tuple[BatchHeader, memoryview]]:
    """The batches of a response or file range (schema and end-of-stream messages passed over), each CRC-checked.

    Args:
        stream: consecutive encapsulated messages, copied nowhere.
        source: what to name in an error: a file or URL.

    Raises:
        CorruptLog: a message is cut short, or its CRC does not hold.
    """
    view = memoryview(stream)
    position = 0
    while position + 8 <= len(view):
        length = int.from_bytes(view[position + 4 : position + 8], "little")
        if length == 0:
            return
        window = view[position : position + MAX_HEADER_BYTES]
        header = proven_header(window)
        if header is None:
            if position == 0 and _is_schema(view):
                position = 8 + length
                continue
            raise CorruptLog(f"{source}: the batch at byte {position} has a damaged header", position=position)
        message = view[position : position + header.total_bytes]
        if len(message) < header.total_bytes or not body_holds(header, message):
            raise CorruptLog(
                f"{source}: the batch at byte {position}, offsets {header.base_offset} to {header.end_offset}, has a "
                "wrong CRC32C",
                position=position,
                start=header.base_offset,
                end=header.end_offset,
            )
        yield header, message
        position += header.total_bytes
    if position != len(view):
        raise CorruptLog(f"{source}: the {len(view) - position} bytes after the last batch are not a message")


def _is_schema(view: memoryview) -> bool:
    return bytes(view[:4]) == CONTINUATION and b"offset\0" in bytes(view[: 8 + int.from_bytes(view[4:8], "little")])


def decode_batch(message: Bytes, schema: pa.Schema = MESSAGE_SCHEMA) -> pa.RecordBatch:
    """The record batch of one message; its buffers are slices of `message`, not copies."""
    return pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(message)), schema)


def clip_batch(message: Bytes, start: int, end: int) -> memoryview:
    """The rows of a proven batch whose offsets are within `[start, end)`, at least one, as a batch of their own."""
    header = proven_header(message[:MAX_HEADER_BYTES])
    assert header is not None, "the message was proven"
    low, high = max(start, header.base_offset), min(end, header.end_offset)
    batch = decode_batch(message).slice(low - header.base_offset, high - low)
    newest_us = header.max_timestamp_us
    if high < header.end_offset:
        newest_us = batch.column("timestamp").cast(pa.int64())[-1].as_py()
    return encode_batch(batch, base_offset=low, epoch=header.epoch, max_timestamp_us=newest_us, run=header.run)
