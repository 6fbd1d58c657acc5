"""Responses with rows, checked: no damage to a response crashes the reader or is taken for data. (CRCs are no
protection against a response that was forged.)

Theory of operation. A *whole* answer consists of stored batches, each validated by its CRC32C, and an answer of
*columns* of columns of these, each validated by CRCs of its own; this module checks that the batches are those of the
range. An *exact* answer has no CRC. Its schema is compared with the requested one before any row is read, then pyarrow
validates all buffers (`validate(full=True)`: offsets of strings and lists, UTF-8), and its offsets must lie in the
range and ascend; without a filter there is one row for each offset, but for those that were removed (as many as the
response states in `Natslog-Removed`), and unless the rules of the client's identity leave out rows (`Natslog-Limited`).
A wrong value that is well-formed cannot be detected.

Source: Arrow documentation, "Security considerations": data from elsewhere is validated before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import pyarrow as pa
import urllib3

from natslog.arrow import ipc
from natslog.arrow.batch_line import BatchHeader
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.bounds import MOST_ROWS_BYTES
from natslog.arrow.projection import ProjectedHeader, schema_of, split_projected
from natslog.arrow.schema import COLUMNS, MESSAGE_SCHEMA
from natslog.errors import CorruptAnswer, CorruptLog, Forbidden, NatslogError
from natslog.units import gap_between, offsets_between

_MOST_DIGITS = 19
_SMALL_BODY_BYTES = 4096
_ALL_BYTES = 2**62
_LAST_US = 253_402_300_799_999_999  # the last one of the year 9999
_ARROW_ERRORS = (
    struct.error,
    pa.ArrowException,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    OverflowError,
    OSError,
    MemoryError,
)


Message: TypeAlias = tuple[BatchHeader | ProjectedHeader, memoryview]
"""A stored batch, or columns of one, validated by its CRCs."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One response to a fetch: rows within the requested range, and the offset of the next request.

    `rest`: what follows in the same response, validated and not decoded yet.
    """

    batches: list[pa.RecordBatch]
    next_offset: int
    high_watermark: int
    log_start_offset: int
    stream_id: str
    rest: Rest | None = None


@dataclass(frozen=True, slots=True)
class Rest:
    """Stored batches up to the offset `end`, perhaps compressed; `last` is what was decoded before them, and
    `unpacked_bytes` what all that was decoded claimed.
    """

    messages: Sequence[Message]
    schema: pa.Schema
    asked: RequestedRows
    end: int
    last: Fetched
    unpacked_bytes: int = 0

    def decoded(self, max_bytes: int) -> Fetched:
        """The next part.

        Args:
            max_bytes: of decoded rows; it is exceeded by one batch at most.

        Raises:
            CorruptAnswer: the rows cannot be read.
        """
        batches: list[pa.RecordBatch] = []
        covered, size_bytes, count, unpacked = self.last.next_offset, 0, 0, self.unpacked_bytes
        with _corrupt_if_unreadable(self.asked):
            for header, message in self.messages:
                if batches and size_bytes >= max_bytes:
                    break
                body = message[header.header_bytes :]
                unpacked += _unpacked_bytes(message[8 : header.header_bytes], body, self.asked, unpacked)
                batch = ipc.decode_batch(message, self.schema)
                if batch.num_rows != header.rows:
                    source = f"stream {self.asked.stream!r}"
                    raise CorruptAnswer(f"{source}: the batch at {header.base_offset} does not match its header")
                size_bytes += batch.get_total_buffer_size()  # `nbytes` takes 30 times as long
                count += 1
                within = self._rows_within(header, batch)
                is_whole = within.stop - within.start == header.rows
                if within.stop > within.start:  # otherwise all of them were removed
                    batches.append(batch if is_whole else batch[within])
                covered = min(self.end, header.end_offset)
        left = self.messages[count:]
        part = replace(self.last, batches=batches, next_offset=covered if left else self.end, rest=None)
        rest = replace(self, messages=left, last=part, unpacked_bytes=unpacked)
        return replace(part, rest=rest) if left else part

    def _rows_within(self, header: BatchHeader | ProjectedHeader, batch: pa.RecordBatch) -> slice:
        """Those asked for. Raises CorruptAnswer: it has others than its header states, or they cannot be chosen."""
        if header.has_gaps and batch.num_rows:
            source = f"stream {self.asked.stream!r}: the batch at {header.base_offset}"
            is_cut = self.asked.start > header.base_offset or self.end < header.end_offset
            if "offset" not in batch.schema.names:
                if is_cut:
                    raise CorruptAnswer(f"{source} lacks the column offset, by which its rows are chosen")
            elif (
                not header.base_offset <= batch["offset"][0].as_py() <= batch["offset"][-1].as_py() < header.end_offset
            ):
                raise CorruptAnswer(
                    f"{source} has others than {offsets_between(header.base_offset, header.end_offset)}"
                )
        return ipc.rows_within(header, batch, self.asked.start, self.end)


@dataclass(frozen=True, slots=True)
class RequestedRows:
    """The requested rows. `end` None: up to the end of the stream. `is_filtered`: not all rows of the range.
    `most_bytes`: of the rows of a response, uncompressed.
    """

    stream: str
    start: int
    end: int | None
    columns: Sequence[str] | None
    is_filtered: bool
    most_bytes: int = MOST_ROWS_BYTES

    @property
    def schema(self) -> pa.Schema:
        return schema_of(self.columns or COLUMNS)


def number_of(headers: Mapping[str, str], name: str) -> int | None:
    """None where the header is not there.

    Raises:
        CorruptAnswer: it is no offset.
    """
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise CorruptAnswer(
            f"the header {name} of the response is not an offset ({text[:40]!r}): repeat the request, or send it to "
            "another broker"
        )
    return int(text)


def rows_of(response: urllib3.BaseHTTPResponse, asked: RequestedRows, max_bytes: int | None = None) -> Fetched:
    """The rows of an answer.

    Args:
        max_bytes: of decoded rows; the others are in `rest`. None: all are decoded.

    Raises:
        CorruptLog: a CRC does not hold. CorruptAnswer: rows or headers are not those requested.
    """
    headers = response.headers
    if headers.get("Natslog-Limited") == "true":  # access rules leave out rows
        asked = replace(asked, is_filtered=True)
    if "Natslog-Next-Offset" not in headers:
        raise NatslogError("the response has no Natslog headers: check that the URL is that of a natslog broker")
    next_offset = _required(headers, "Natslog-Next-Offset")
    if asked.end is not None and next_offset > max(asked.start, asked.end):
        raise CorruptAnswer(f"stream {asked.stream!r}: the response ends at {next_offset}, beyond {asked.end}")
    answer = Fetched(
        [],
        next_offset,
        _required(headers, "Natslog-High-Watermark"),
        _required(headers, "Natslog-Log-Start-Offset"),
        headers.get("Natslog-Stream-Id", ""),
    )
    with _corrupt_if_unreadable(asked):
        read = _READERS.get(headers.get("Natslog-Batches", ""))
        if read is None:
            removed = number_of(headers, "Natslog-Removed") or 0
            return replace(answer, batches=_exact_rows(response.data, asked, next_offset, removed))
        schema, messages = read(response.data, asked)
        checked = _checked(messages, asked, next_offset)
    start = replace(answer, next_offset=asked.start)
    return Rest(checked, schema, asked, next_offset, start).decoded(_ALL_BYTES if max_bytes is None else max_bytes)


def stored_of(response: urllib3.BaseHTTPResponse, asked: RequestedRows) -> list[tuple[BatchHeader, memoryview]]:
    """The stored batches of an answer to a request for whole ones, each validated by its CRC: together they cover the
    range that was asked for, and may begin before and end behind it.

    Raises:
        Forbidden: the identity may not read all of the messages. As `rows_of`.
    """
    if response.headers.get("Natslog-Limited") == "true":
        raise Forbidden(
            f"stream {asked.stream!r}: this identity may not read the messages of all subjects, and an export has all: "
            "use one that may",
            stream=asked.stream,
        )
    assert asked.end is not None, "a range is asked for"
    with _corrupt_if_unreadable(asked):
        found = list(ipc.split_messages(response.data, source=f"stream {asked.stream!r}"))
        _checked(found, asked, asked.end)
    return found


@contextmanager
def _corrupt_if_unreadable(asked: RequestedRows) -> Iterator[None]:
    """Raises CorruptAnswer in place of Arrow's errors."""
    try:
        yield
    except _ARROW_ERRORS as error:
        raise CorruptAnswer(
            f"stream {asked.stream!r}: the rows of the response cannot be read ({_first_line(error)}): check that "
            "the URL is that of a natslog broker. The request is repeated at another broker if there is one"
        ) from error


def _required(headers: Mapping[str, str], name: str) -> int:
    if (number := number_of(headers, name)) is None:
        raise CorruptAnswer(f"the response has no header {name}: repeat the request, or send it to another broker")
    return number


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _whole_messages(data: bytes, asked: RequestedRows) -> tuple[pa.Schema, Iterator[Message]]:
    """The stored batches, each validated by its CRC; no data is copied."""
    return MESSAGE_SCHEMA, ipc.split_messages(data, source=f"stream {asked.stream!r}")


def _columns_of_messages(data: bytes, asked: RequestedRows) -> tuple[pa.Schema, Iterator[Message]]:
    """The same, of columns of stored batches."""
    source, columns = f"stream {asked.stream!r}", asked.columns
    if columns is None or not pa.ipc.read_schema(pa.py_buffer(data)).equals(asked.schema):
        raise CorruptAnswer(f"{source}: the response does not have the requested columns")
    return asked.schema, split_projected(data, columns, source=source)


def _checked(messages: Iterable[Message], asked: RequestedRows, end: int) -> list[Message]:
    """All of them, if they have together what was asked for. Raises CorruptLog, CorruptAnswer."""
    found, covered = [], asked.start
    for header, message in messages:
        covered = header.base_offset + _within(header, asked, covered, end).stop
        found.append((header, message))
    _check_covered(asked, covered, end)
    return found


def _within(header: BatchHeader | ProjectedHeader, asked: RequestedRows, covered: int, end: int) -> slice:
    """The offsets of the batch that belong to the answer, which has those up to `covered`.

    Raises:
        CorruptLog: it does not continue there. CorruptAnswer: it has more rows than offsets.
    """
    low, high = max(asked.start, header.base_offset), min(end, header.end_offset)
    if low != covered:
        raise CorruptLog(
            f"stream {asked.stream!r}: in the response {gap_between(covered, low)}",
            start=covered,
            end=low,
        )
    if high < low or header.rows > header.end_offset - header.base_offset:
        raise CorruptAnswer(
            f"stream {asked.stream!r}: the batch at offset {header.base_offset} does not match its header"
        )
    return slice(low - header.base_offset, high - header.base_offset)


def _check_covered(asked: RequestedRows, covered: int, upto: int) -> None:
    if covered < upto:
        raise CorruptLog(
            f"stream {asked.stream!r}: {offsets_between(covered, upto)} are missing in the response",
            start=covered,
            end=upto,
        )


def _exact_rows(data: bytes, asked: RequestedRows, end: int, removed: int) -> list[pa.RecordBatch]:
    """Validated rows: see above. `removed`: how many offsets of the range have no message."""
    messages = _ipc_messages(data, asked)
    if not (schema := pa.ipc.read_schema(next(messages))).equals(asked.schema):
        raise CorruptAnswer(f"stream {asked.stream!r}: the response does not have the requested columns")
    batches, covered, unpacked = [], asked.start, 0
    for message in messages:
        unpacked += _unpacked_bytes(memoryview(message.metadata), memoryview(message.body), asked, unpacked)
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        _check_nulls(batch, asked)
        _check_times(batch, asked)
        covered = _check_offsets(batch, asked, covered, end)
        if batch.num_rows:
            batches.append(batch)
    rows = sum(batch.num_rows for batch in batches)
    span = max(0, end - asked.start - removed)
    if rows > span or (rows < span and not asked.is_filtered):
        raise CorruptAnswer(f"stream {asked.stream!r}: {rows} rows for {offsets_between(asked.start, end)}")
    return batches


def _ipc_messages(data: bytes, asked: RequestedRows) -> Iterator[pa.Message]:
    """The messages of an Arrow IPC stream: a schema, then record batches."""
    reader, expected = pa.ipc.MessageReader.open_stream(data), "schema"
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            if expected == "schema":
                raise ValueError("there is no schema") from None
            return
        if message.type != expected:  # pyarrow would read it as one, and crash
            raise CorruptAnswer(f"stream {asked.stream!r}: the response has a message that is not a {expected}")
        yield message
        expected = "record batch"


def _unpacked_bytes(metadata: memoryview, body: memoryview, asked: RequestedRows, before: int) -> int:
    """What a batch claims to have uncompressed. Small ones count as they are: they cannot exceed a limit.

    Args:
        before: what the batches before it in the same response claim.

    Raises:
        CorruptAnswer: with it, the response has more than was asked for. Nothing was decompressed.
    """
    if len(body) < _SMALL_BODY_BYTES:
        return len(body)
    found = BatchMetadata(bytes(metadata)).unpacked_bytes(lambda at: bytes(body[at : at + 8])) or len(body)
    if before + found > asked.most_bytes:
        raise CorruptAnswer(
            f"stream {asked.stream!r}: the response unpacks to more than {asked.most_bytes} bytes: check that the URL "
            "is that of a natslog broker. The request is repeated at another broker if there is one"
        )
    return found


def _check_nulls(batch: pa.RecordBatch, asked: RequestedRows) -> None:
    for field, column in zip(asked.schema, batch.columns, strict=True):
        if not field.nullable and column.null_count:
            raise CorruptAnswer(f"stream {asked.stream!r}: the response has rows without {field.name}")


def _check_times(batch: pa.RecordBatch, asked: RequestedRows) -> None:
    """Raises CorruptAnswer: a timestamp is outside of the range of Python and Spark."""
    if "timestamp" in batch.schema.names and batch.num_rows:
        import pyarrow.compute as pc  # takes long to import, and stored batches do not need it

        bounds = pc.min_max(batch.column("timestamp").cast(pa.int64())).as_py()
        if bounds["min"] < 0 or bounds["max"] > _LAST_US:
            raise CorruptAnswer(
                f"stream {asked.stream!r}: the response has timestamps outside of the years 1970 to 9999"
            )


def _check_offsets(batch: pa.RecordBatch, asked: RequestedRows, covered: int, end: int) -> int:
    """The offset behind the batch. Raises CorruptAnswer: offsets are not in `[covered, end)`, or do not ascend."""
    if "offset" not in batch.schema.names or not batch.num_rows:
        return covered
    offsets = batch.column("offset")
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    import pyarrow.compute as pc

    ascend = pc.all(pc.less(offsets[:-1], offsets[1:]), min_count=0).as_py()
    if not (covered <= first and last < end and ascend):
        raise CorruptAnswer(
            f"stream {asked.stream!r}: the offsets of the response are not {asked.start} to {end} in ascending order"
        )
    return int(last) + 1


_READERS = {"whole": _whole_messages, "columns": _columns_of_messages}
"""By the response header `Natslog-Batches`; any other response is read by `_exact_rows`."""
