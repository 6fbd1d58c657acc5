"""Rows of a direct append: from the Arrow IPC stream that a client uploaded to batches as a log stores them.

Theory of operation. pyarrow reads the stream message by message from a `_CheckedFile`, so that no more than one of its
batches is in memory, and every length in it is checked before memory is taken for it. Each batch is validated: it must
be well-formed Arrow (offsets, UTF-8) and its rows must fit the stream; its columns become those of the payload schema.
`regrouped` then builds batches of a suitable size for logs.

A row's subject must be a plain NATS subject that the stream's own subject covers: a direct append stores no message
that could not have been received over NATS.
"""

from __future__ import annotations

import errno
import io
import os
import struct
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.covered import covered
from natslog.arrow.row_buffers import PAYLOAD_SCHEMA
from natslog.arrow.schema import HEADERS_TYPE, rows_of_items
from natslog.errors import Forbidden, InvalidRequest
from natslog.ingest.conditions import EXPECTED_PREFIX
from natslog.ingest.message_sizes import first_larger, too_large
from natslog.subjects import MAX_SUBJECT_BYTES

GROUPED_BYTES = 8 * 1024 * 1024
GROUPED_ROWS = 64 * 1024
MAX_UPLOADED_BATCH_BYTES = 64 * 1024 * 1024
BYTES_PER_ROW = 16
"""The size of a row in addition to its columns: offset and timestamp."""
_MAX_METADATA_BYTES = 1024 * 1024
_MOST_FILE_BYTES = 2**62
_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)
_COLUMNS = {
    "value": (pa.binary(), pa.string()),
    "subject": (pa.string(),),
    "key": (pa.binary(), pa.string()),
    "headers": (HEADERS_TYPE,),
}
_PLAIN_SUBJECT = r"^[^\s\x00-\x1f\x7f.]+(\.[^\s\x00-\x1f\x7f.]+)*$"
_WILDCARD_TOKEN = r"(^|\.)[*>](\.|$)"


@dataclass(frozen=True, slots=True)
class RowRules:
    """The requirements for rows of one stream.

    Attributes:
        covered_by: the stream's subjects. `default_subject`: of rows that come without a column `subject`.
        allowed: wildcards of the subjects on which the identity may publish; None: all. A
            commit compares it with those of who commits.
        max_message_bytes: of a row, as `message_sizes` counts it; None: no limit.
    """

    covered_by: tuple[str, ...]
    default_subject: str | None
    allowed: tuple[str, ...] | None = None
    max_message_bytes: int | None = None

    @property
    def shown(self) -> str:
        """What the stream records, for errors."""
        return ", ".join(map(repr, self.covered_by))


def read_rows(
    path: Path, crc: int, rules: RowRules, what: str, *, checks_rows: bool = True
) -> Iterator[pa.RecordBatch]:
    """The rows of the Arrow IPC stream in a file, as the payload schema has them, in batches of bounded size.

    Args:
        crc: CRC32C of the file, compared at the end. `what`: how errors name it.
        checks_rows: False where they were checked before, as the CRC will show.

    Raises:
        InvalidRequest, MessageTooLarge: it is not a complete Arrow IPC stream, or its rows are invalid. OSError: the
        file cannot be read, or differs from what was written.
    """
    with _CheckedFile(path, what) as file:
        yield from _rows_of(file, rules, what, checks_rows=checks_rows)
        if file.crc != crc:
            raise OSError(errno.EIO, f"{what} differs from what was written to {path} (CRC32C mismatch)")


def rows_of_bytes(data: bytes, rules: RowRules, what: str) -> Iterator[pa.RecordBatch]:
    """The rows of an uncompressed Arrow IPC stream in memory, as `read_rows`. Raises InvalidRequest."""
    with _CheckedBytes(data, what) as source:
        yield from _rows_of(source, rules, what)


def _rows_of(
    source: _CheckedFile | _CheckedBytes, rules: RowRules, what: str, *, checks_rows: bool = True
) -> Iterator[pa.RecordBatch]:
    messages = source.messages()
    if (opening := next(messages, None)) is None:
        raise InvalidRequest(f"{what}: the Arrow IPC stream has no schema")
    with source.parsing():
        schema = pa.ipc.read_schema(opening)
        _check_schema(schema, rules, what)
    first = 0
    for message in messages:
        with source.parsing():
            begin = partial(_eight_bytes, memoryview(message.body))
            source.check_unpacked(BatchMetadata(bytes(message.metadata)).unpacked_bytes(begin))
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
        for piece in _pieces(batch, rules):
            if checks_rows:
                _check_rows(piece, rules, what, first)
            with source.parsing():
                payload = _payload(piece, rules)
            yield payload
            first += piece.num_rows


def claimed_bytes(path: Path, what: str) -> int:
    """The size of the rows of such a file in a log, as its messages claim before anything is decompressed: some
    kilobytes can claim gigabytes. Reads the messages' headers only.

    Raises:
        InvalidRequest, OSError: as `read_rows`. (What else is wrong is found there.)
    """
    total = at = 0
    with _CheckedFile(path, what) as file, file.parsing():
        fd = file.fileno()
        while at < _MOST_FILE_BYTES and (prefix := os.pread(fd, 8, at))[:4] == _CONTINUATION:
            size_bytes = int.from_bytes(prefix[4:], "little")
            if not 0 < size_bytes <= _MAX_METADATA_BYTES:
                break
            header, body_at = BatchMetadata(os.pread(fd, size_bytes, at + 8)), at + 8 + size_bytes
            if header.is_batch:
                unpacked = header.unpacked_bytes(partial(_eight_bytes_of_file, fd, body_at))
                total += BYTES_PER_ROW * header.rows + (unpacked or header.body_bytes)
            at = body_at + header.body_bytes
    return total


class _CheckedSource(io.IOBase):
    """Where pyarrow reads the stream from; to be combined with a class of binary files."""

    _what: str

    @abstractmethod
    def peek(self) -> bytes:
        """The next eight bytes; they are read again afterwards."""

    def remaining(self) -> bytes:
        """The next nine bytes, if there are as many."""
        return cast(BinaryIO, self).read(9)

    def check_length(self, size_bytes: int) -> None:
        if size_bytes > MAX_UPLOADED_BATCH_BYTES:
            raise InvalidRequest(
                f"{self._what}: a batch has {size_bytes} bytes; the limit, also for uncompressed data, is "
                f"{MAX_UPLOADED_BATCH_BYTES}: write smaller batches"
            )

    def check_unpacked(self, size_bytes: int) -> None:
        """Of a compressed batch; 0 for others."""
        self.check_length(size_bytes)

    def messages(self) -> Iterator[pa.Message]:
        """The messages of the stream: a schema, then record batches."""
        source, expected = pa.PythonFile(self, mode="r"), "schema"
        while (prefix := self.peek()) != _END_OF_STREAM:
            if prefix[:4] != _CONTINUATION or int.from_bytes(prefix[4:], "little") > _MAX_METADATA_BYTES:
                raise InvalidRequest(
                    f"{self._what}: there is no Arrow IPC message at byte {self.tell()}; the stream must end with "
                    "its end-of-stream marker (close the writer)"
                )
            with self.parsing():
                message = pa.ipc.read_message(source)
            if message.type != expected:  # pyarrow would read it as one, and crash
                raise InvalidRequest(f"{self._what}: an Arrow IPC message is of type {message.type}, not {expected}")
            yield message
            expected = "record batch"
        if self.remaining() != _END_OF_STREAM:
            raise InvalidRequest(f"{self._what}: bytes follow the end of the Arrow IPC stream")

    @contextmanager
    def parsing(self) -> Iterator[None]:
        """Errors of pyarrow and flatbuffers about the content; only the disk's own OSErrors have a number."""
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, TypeError, IndexError, struct.error, MemoryError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise InvalidRequest(f"{self._what}: invalid Arrow IPC data near byte {self.tell()}: {error}") from error


class _CheckedFile(_CheckedSource, io.FileIO):
    """Attributes: `crc`, of all bytes read."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path)
        self._what = what
        self.crc = 0

    def peek(self) -> bytes:
        return os.pread(self.fileno(), 8, self.tell())

    def read(self, length: int | None = -1, /) -> bytes:
        self.check_length(length or 0)
        data = io.FileIO.read(self, length) or b""
        self.crc = crc32c(data, self.crc)
        return data


class _CheckedBytes(_CheckedSource, io.BytesIO):
    def __init__(self, data: bytes, what: str) -> None:
        super().__init__(data)
        self._what = what

    def peek(self) -> bytes:
        at = self.tell()
        return bytes(self.getbuffer()[at : at + 8])

    def check_unpacked(self, size_bytes: int) -> None:
        if size_bytes:
            raise InvalidRequest(f"{self._what}: its buffers are compressed: send them uncompressed")


def _eight_bytes(body: memoryview, offset: int) -> bytes:
    return bytes(body[offset : offset + 8])


def _eight_bytes_of_file(fd: int, body_at: int, offset: int) -> bytes:
    if not 0 <= offset < _MOST_FILE_BYTES:
        raise ValueError(f"a buffer begins at byte {offset} of its message")
    return os.pread(fd, 8, body_at + offset)


def _check_schema(schema: pa.Schema, rules: RowRules, what: str) -> None:
    for column in schema:
        if column.name not in _COLUMNS or schema.names.count(column.name) > 1:
            raise InvalidRequest(
                f"{what}: unexpected column {column.name!r}; the columns are value and, optionally, subject, key "
                "and headers, each at most once"
            )
        if _plain_type(column.type) not in _COLUMNS[column.name]:
            wanted = " or ".join(map(str, _COLUMNS[column.name]))
            raise InvalidRequest(f"{what}: column {column.name} has type {column.type}, but must have type {wanted}")
    if "value" not in schema.names:
        raise InvalidRequest(f"{what}: the column value is missing")
    if "subject" not in schema.names and rules.default_subject is None:
        raise InvalidRequest(
            f"{what}: the stream records {rules.shown}: give one subject (?subject=…), or send a column subject"
        )


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The same type with 32-bit offsets; of headers, with the names and nullability that a log stores."""
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        pair = [(field.name, field.type) for field in kind.value_type]
        return HEADERS_TYPE if pair == [("key", pa.string()), ("value", pa.string())] else kind
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(kind, kind)


def _pieces(batch: pa.RecordBatch, rules: RowRules) -> Iterator[pa.RecordBatch]:
    """Slices of limited payload size, with the default subject if they have none."""
    payload_bytes = batch.nbytes + batch.num_rows * (16 + len(rules.default_subject or ""))
    most = min(GROUPED_ROWS, max(1, batch.num_rows * GROUPED_BYTES // max(1, payload_bytes)))
    for start in range(0, batch.num_rows, most):
        yield batch.slice(start, most)


def _check_rows(batch: pa.RecordBatch, rules: RowRules, what: str, first: int) -> None:
    """Raises InvalidRequest: a row is invalid. Args: `first`: the first row's number, for errors."""

    def refuse(wrong: Any, problem: str, shown: Any = None) -> None:
        if pc.any(wrong).as_py():
            row = pc.index(wrong, True).as_py()
            value = "" if shown is None else f" ({shown[row].as_py()[:200]!r})"
            raise InvalidRequest(f"{what}: {problem}: row {first + row}{value}", row=first + row)

    refuse(batch.column("value").is_null(), "value is null")
    _check_sizes(batch, rules, what, first)
    _check_allowed(batch, rules, what)
    if "subject" in batch.schema.names:
        subject = batch.column("subject")
        refuse(subject.is_null(), "subject is null")
        distinct = pc.unique(subject)  # each is checked once
        plain = pc.match_substring_regex(distinct, _PLAIN_SUBJECT)
        short = pc.less_equal(pc.binary_length(distinct), MAX_SUBJECT_BYTES)
        wild = pc.match_substring_regex(distinct, _WILDCARD_TOKEN)
        right = pc.and_not(pc.and_(plain, short), wild)
        recorded = covered(distinct, rules.covered_by)
        for is_right, problem in (
            (right, "subject is not one plain NATS subject"),
            (recorded, f"the stream records {rules.shown}, not the subject"),
        ):
            if not pc.all(is_right, min_count=0).as_py():
                refuse(pc.is_in(subject, distinct.filter(pc.invert(is_right))), problem, subject)
    if "headers" in batch.schema.names:
        _check_headers(batch.column("headers"), what, first)


def _check_headers(headers: pa.Array[Any], what: str, first: int) -> None:
    """Raises InvalidRequest. A condition of a publish is refused, because here it would be stored unchecked."""
    pairs = headers.flatten()
    if pairs.null_count or pairs.field(0).null_count or pairs.field(1).null_count:
        raise InvalidRequest(f"{what}: a header's key or value is null, in rows {first} to {first + len(headers)}")
    names = pairs.field(0)
    item = pc.index(pc.starts_with(names, EXPECTED_PREFIX), True).as_py()
    if item >= 0:
        row = first + int(rows_of_items(headers)[item])
        raise InvalidRequest(
            f"{what}: row {row} has the header {names[item].as_py()[:100]}. Conditions are checked only for messages "
            "that are published over NATS: remove the header, or publish the row over NATS",
            row=row,
        )


def _check_sizes(batch: pa.RecordBatch, rules: RowRules, what: str, first: int) -> None:
    """Raises MessageTooLarge."""
    max_bytes = rules.max_message_bytes
    if max_bytes is not None and (larger := first_larger(batch, max_bytes)) is not None:
        row, row_bytes = first + larger[0], larger[1]
        raise too_large(max_bytes, f"{what}: row {row} has {row_bytes} bytes", row=row)


def _check_allowed(batch: pa.RecordBatch, rules: RowRules, what: str) -> None:
    """Raises Forbidden: a row has a subject on which the identity may not publish."""
    if rules.allowed is None:
        return
    has_subjects = "subject" in batch.schema.names
    distinct = pc.unique(batch.column("subject")) if has_subjects else pa.array([rules.default_subject], pa.string())
    others = distinct.filter(pc.fill_null(pc.invert(covered(distinct, rules.allowed)), False))
    if len(others):
        raise Forbidden(
            f"{what}: you may publish only on the subjects {', '.join(rules.allowed)}, not on "
            f"{others[0].as_py()[:200]!r}",
            action="publish",
        )


def _payload(batch: pa.RecordBatch, rules: RowRules) -> pa.RecordBatch:
    columns = []
    for field in PAYLOAD_SCHEMA:
        if field.name in batch.schema.names:
            columns.append(batch.column(field.name).cast(field.type))
        elif field.name == "subject":
            columns.append(pa.repeat(pa.scalar(rules.default_subject, pa.string()), batch.num_rows))
        else:
            columns.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA)


def regrouped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of up to `GROUPED_BYTES` and `GROUPED_ROWS` (a single row may be larger), no slices."""
    waiting: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes
        if waiting and (rows > GROUPED_ROWS or size_bytes > GROUPED_BYTES):
            yield pa.concat_batches(waiting)
            waiting, rows, size_bytes = [], batch.num_rows, batch.nbytes
        waiting.append(batch)
    if waiting:
        yield pa.concat_batches(waiting)
