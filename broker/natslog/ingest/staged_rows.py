"""Rows of a direct append: from the Arrow IPC stream that a client uploaded to batches as a log stores them.

Theory of operation. The stream is walked message by message, so that no more than one of its batches is in memory and
no length in it is believed before it is checked. Each batch is proven to be well-formed Arrow (offsets, UTF-8) and to
hold what the stream takes; its columns become those of the payload schema, copied nowhere. `regrouped` then makes
batches of the size that logs like: what is small is copied together once.

A row's subject must be a plain NATS subject that the stream's own subject covers: a direct append puts nothing into a
stream that NATS could not have.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA
from natslog.arrow.schema import HEADERS_TYPE
from natslog.errors import InvalidRequest
from natslog.subjects import MAX_SUBJECT_BYTES, wildcard_regex

GROUPED_BYTES = 8 * 1024 * 1024
GROUPED_ROWS = 64 * 1024
MAX_UPLOADED_BATCH_BYTES = 64 * 1024 * 1024
_MAX_METADATA_BYTES = 1024 * 1024
_CONTINUATION = b"\xff\xff\xff\xff"
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 6, 8, 10  # places in the vtable of `Message`
_BUFFERS, _COMPRESSION = 8, 10  # in that of `RecordBatch`
_RECORD_BATCH = 3
_COLUMNS = ("value", "subject", "key", "headers")
_TEXT = (pa.string(), pa.large_string())
_BYTES = (pa.binary(), pa.large_binary())
_PLAIN_SUBJECT = r"^[^\s\x00-\x1f\x7f.]+(\.[^\s\x00-\x1f\x7f.]+)*$"
_WILDCARD_TOKEN = r"(^|\.)[*>](\.|$)"


@dataclass(frozen=True, slots=True)
class RowRules:
    """What rows of one stream must be.

    Attributes:
        covered_by: the stream's subject. `default_subject`: of rows that come without a column `subject`.
    """

    covered_by: str
    default_subject: str | None


class UploadedRows:
    """The Arrow IPC stream in an open file. Iterating reads it once.

    Args:
        what: how errors name it. `checks_rows`: False where they were checked before, as the CRC will show.

    Attributes:
        crc: after the end: CRC32C of all its bytes.

    Raises (while iterating):
        InvalidRequest: it is no whole Arrow IPC stream, or its rows are not what they must be. OSError.
    """

    def __init__(self, fd: int, rules: RowRules, what: str, *, checks_rows: bool = True) -> None:
        self._fd, self._rules, self._what, self._checks_rows = fd, rules, what, checks_rows
        self._position = 0
        self.crc = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        opening = self._next_message()
        if opening is None:
            raise InvalidRequest(f"{self._what}: an Arrow IPC stream with the columns value, subject, … must follow")
        with self._parsing():
            schema = pa.ipc.read_schema(pa.ipc.read_message(opening))
            _check_schema(schema, self._rules, self._what)
        first = 0
        while (message := self._next_message()) is not None:
            with self._parsing():
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), schema)
                batch.validate(full=True)
            for start in range(0, batch.num_rows, GROUPED_ROWS):
                piece = batch.slice(start, GROUPED_ROWS)
                if self._checks_rows:
                    _check_rows(piece, self._rules, self._what, first + start)
                with self._parsing():
                    payload = _payload(piece, self._rules)
                yield payload
            first += batch.num_rows

    @contextmanager
    def _parsing(self) -> Iterator[None]:
        """What pyarrow and flatbuffers say of bytes that are not what they should be; OSError is one of their words."""
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, IndexError, struct.error, MemoryError) as error:
            raise InvalidRequest(f"{self._what}: near byte {self._position} it is not Arrow IPC: {error}") from error

    def _next_message(self) -> pa.Buffer | None:
        """The next encapsulated message, whole; None at the end of the stream."""
        prefix = os.pread(self._fd, 8, self._position)
        metadata_bytes = int.from_bytes(prefix[4:8], "little")
        if len(prefix) < 8 or prefix[:4] != _CONTINUATION or metadata_bytes > _MAX_METADATA_BYTES:
            raise InvalidRequest(
                f"{self._what}: at byte {self._position} there is no Arrow IPC message; the stream must end with its "
                "end-of-stream marker (close the writer)"
            )
        if metadata_bytes == 0:
            self._take(8)
            if os.pread(self._fd, 1, self._position):
                raise InvalidRequest(f"{self._what}: bytes follow the end of the Arrow IPC stream")
            return None
        metadata = os.pread(self._fd, metadata_bytes, self._position + 8)
        with self._parsing():
            body_bytes = _body_bytes(metadata)
        if not 0 <= body_bytes <= MAX_UPLOADED_BATCH_BYTES:
            raise InvalidRequest(
                f"{self._what}: a batch of {body_bytes} bytes; at most {MAX_UPLOADED_BATCH_BYTES}: write smaller ones"
            )
        message = self._take(8 + metadata_bytes + body_bytes)
        with self._parsing():
            unpacked = _unpacked_bytes(metadata, memoryview(message)[8 + metadata_bytes :])
        if unpacked > MAX_UPLOADED_BATCH_BYTES:
            raise InvalidRequest(
                f"{self._what}: a batch of {unpacked} bytes, uncompressed; at most {MAX_UPLOADED_BATCH_BYTES}: write "
                "smaller ones"
            )
        return pa.py_buffer(message)

    def _take(self, length: int) -> bytes:
        data = os.pread(self._fd, length, self._position)
        if len(data) < length:
            raise InvalidRequest(f"{self._what}: the upload ends in the middle of a batch")
        self.crc = crc32c(data, self.crc)
        self._position += length
        return data


def _body_bytes(metadata: bytes) -> int:
    """What the flatbuffer says; pyarrow proves the whole of it afterwards. Raises struct.error."""
    place = _field(metadata, struct.unpack_from("<I", metadata)[0], _BODY_LENGTH)
    return int(struct.unpack_from("<q", metadata, place)[0]) if place else 0


def _unpacked_bytes(metadata: bytes, body: memoryview) -> int:
    """What the buffers of a compressed record batch take when they are read; 0 where nothing is compressed. A buffer
    begins with the length it had, or -1 where it is as it was. Raises struct.error.
    """
    root = struct.unpack_from("<I", metadata)[0]
    kind = _field(metadata, root, _HEADER_TYPE)
    if not kind or metadata[kind] != _RECORD_BATCH:
        return 0
    batch = _pointed(metadata, _field(metadata, root, _HEADER))
    buffers = _field(metadata, batch, _BUFFERS)
    if not buffers or not _field(metadata, batch, _COMPRESSION):
        return 0
    vector = _pointed(metadata, buffers)
    total = 0
    for at in range(struct.unpack_from("<I", metadata, vector)[0]):
        offset, length = struct.unpack_from("<qq", metadata, vector + 4 + 16 * at)
        if length >= 8:
            (claimed,) = struct.unpack_from("<q", body, offset)
            total += length if claimed < 0 else claimed
    return total


def _field(metadata: bytes, table: int, slot: int) -> int:
    """Where a table's field is; 0 where it has none."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    (vtable_bytes,) = struct.unpack_from("<H", metadata, vtable)
    place = struct.unpack_from("<H", metadata, vtable + slot)[0] if vtable_bytes > slot else 0
    return table + place if place else 0


def _pointed(metadata: bytes, place: int) -> int:
    return place + int(struct.unpack_from("<I", metadata, place)[0])


def _check_schema(schema: pa.Schema, rules: RowRules, what: str) -> None:
    for name in schema.names:
        if name not in _COLUMNS or schema.names.count(name) > 1:
            raise InvalidRequest(
                f"{what}: column {name!r}; rows have value and, if wanted, subject, key, headers, once"
            )
    if "value" not in schema.names:
        raise InvalidRequest(f"{what}: there is no column value")
    if "subject" not in schema.names and rules.default_subject is None:
        raise InvalidRequest(
            f"{what}: the stream takes {rules.covered_by!r}: name one subject (?subject=…), or send a column subject"
        )
    allowed = {"value": _BYTES + _TEXT, "subject": _TEXT, "key": _BYTES + _TEXT}
    for column in schema:
        right = _is_headers(column.type) if column.name == "headers" else column.type in allowed[column.name]
        if not right:
            wanted = HEADERS_TYPE if column.name == "headers" else " or ".join(map(str, allowed[column.name][::2]))
            raise InvalidRequest(f"{what}: column {column.name} is {column.type}, and must be {wanted}")


def _is_headers(kind: pa.DataType) -> bool:
    if not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type) or kind.value_type.num_fields != 2:
        return False
    fields = [kind.value_type.field(at) for at in range(2)]
    return [(one.name, one.type) for one in fields] == [("key", pa.string()), ("value", pa.string())]


def _check_rows(batch: pa.RecordBatch, rules: RowRules, what: str, first: int) -> None:
    """Raises InvalidRequest: a row is not what it must be. Args: `first`: the first row's number, for errors."""
    _refuse_first(batch.column("value").is_null(), f"{what}: value is null", first)
    if "subject" in batch.schema.names:
        _check_subjects(batch.column("subject"), rules, what, first)
    if "headers" in batch.schema.names:
        pairs = batch.column("headers").flatten()
        if pairs.null_count or pairs.field(0).null_count or pairs.field(1).null_count:
            raise InvalidRequest(
                f"{what}: a header's key or value is null, in rows {first} to {first + batch.num_rows}"
            )


def _payload(batch: pa.RecordBatch, rules: RowRules) -> pa.RecordBatch:
    """The rows as the payload schema has them."""
    rows, names = batch.num_rows, batch.schema.names
    if "subject" in names:
        subject = _cast(batch.column("subject"), pa.string())
    else:
        subject = pa.repeat(pa.scalar(rules.default_subject, pa.string()), rows)
    key = _cast(batch.column("key"), pa.binary()) if "key" in names else pa.nulls(rows, pa.binary())
    headers = _cast(batch.column("headers"), HEADERS_TYPE) if "headers" in names else pa.nulls(rows, HEADERS_TYPE)
    value = _cast(batch.column("value"), pa.binary())
    return pa.RecordBatch.from_arrays([subject, key, headers, value], schema=PAYLOAD_SCHEMA)


def _check_subjects(subject: Any, rules: RowRules, what: str, first: int) -> None:
    _refuse_first(subject.is_null(), f"{what}: subject is null", first)
    plain = pc.match_substring_regex(subject, _PLAIN_SUBJECT)
    short = pc.less_equal(pc.binary_length(subject), MAX_SUBJECT_BYTES)
    wild = pc.match_substring_regex(subject, _WILDCARD_TOKEN)
    right = pc.and_(pc.and_(plain, short), pc.invert(wild))
    _refuse_first(pc.invert(right), f"{what}: subject is not one plain NATS subject", first, subject)
    covered = pc.match_substring_regex(subject, wildcard_regex(rules.covered_by))
    _refuse_first(pc.invert(covered), f"{what}: the stream takes {rules.covered_by!r}, not the subject", first, subject)


def _refuse_first(wrong: Any, problem: str, first: int, shown: Any = None) -> None:
    """Raises InvalidRequest: some row is wrong; the first one is named."""
    if not pc.any(wrong).as_py():
        return
    row = pc.index(wrong, True).as_py()
    value = "" if shown is None else f" ({shown[row].as_py()[:200]!r})"
    raise InvalidRequest(f"{problem}: row {first + row}{value}", row=first + row)


def _cast(column: Any, kind: pa.DataType) -> Any:
    return column if column.type == kind else column.cast(kind)


def regrouped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of up to `GROUPED_BYTES` and `GROUPED_ROWS` (a single row may be larger), no slices."""
    waiting: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for piece in _pieces(batches):
        piece_bytes = piece.nbytes
        if waiting and (rows + piece.num_rows > GROUPED_ROWS or size_bytes + piece_bytes > GROUPED_BYTES):
            yield _compact(waiting)
            waiting, rows, size_bytes = [], 0, 0
        waiting.append(piece)
        rows, size_bytes = rows + piece.num_rows, size_bytes + piece_bytes
    if waiting:
        yield _compact(waiting)


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What is too large, in slices."""
    for batch in batches:
        most = min(GROUPED_ROWS, max(1, batch.num_rows * GROUPED_BYTES // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, most):
            yield batch.slice(start, most)


def _compact(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    whole = len(pieces) == 1 and all(column.offset == 0 for column in pieces[0].columns) and _is_tight(pieces[0])
    return pieces[0] if whole else pa.concat_batches(pieces)


def _is_tight(batch: pa.RecordBatch) -> bool:
    """Whether its buffers hold little more than its rows: not the first of several slices."""
    held_bytes: int = sum(column.get_total_buffer_size() for column in batch.columns)
    return held_bytes <= 2 * int(batch.nbytes) + 4096
