"""Direct requests: one message, or several, of a stream, sent as messages and not as JSON.

Theory of operation. The leader of a stream with `allow_direct` subscribes to `$JS.API.DIRECT.GET.<stream>` and, for the
last message on a subject, to `$JS.API.DIRECT.GET.<stream>.<subject>`, on the connection that its messages come over. An
answer is a message with its own headers and some that state where it is from; a request for several gets as many, and
an empty one at the end. Errors are a status in the headers.

Bounds: an answer has at most `MAX_BYTES` of messages, or fewer if the request says so, and at most `MAX_MESSAGES`; the
message at the end states how many are left. A request for the last messages of more than `MAX_SUBJECTS` subjects is
refused.

Source: nats-server, `getDirectRequest` and `getDirectMulti` in `server/stream.go`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.covered import covered
from natslog.errors import InvalidRequest
from natslog.jetstream.errors import ApiError
from natslog.jetstream.requests import MessageGetRequest, decoded
from natslog.jetstream.stored_messages import header_block, last_on, next_on
from natslog.jetstream.stream_state import time_of
from natslog.log import StreamLog
from natslog.model import StreamRecord
from natslog.subjects import has_wildcard
from natslog.times import parse_timestamp_us

PREFIX = "DIRECT.GET."
MAX_BYTES = 8 * 1024 * 1024
MAX_MESSAGES = 10_000
MAX_SUBJECTS = 1024

_ROWS_AT_ONCE = 256
_COLUMNS = ["offset", "timestamp", "subject", "headers", "value"]


class Status(Exception):
    """The answer to a request that gets no message."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.headers = f"NATS/1.0 {code} {text}\r\n\r\n".encode()


class Answer(NamedTuple):
    """One message: its header block, which may be empty, and its payload."""

    headers: bytes
    payload: bytes = b""


def endpoints(record: StreamRecord) -> tuple[str, ...]:
    """The subjects of direct requests to a stream, behind the prefix of the API."""
    jetstream = record.settings.jetstream
    if jetstream is None or not jetstream.allow_direct or record.import_state or "." in record.name:
        return ()
    return f"{PREFIX}{record.name}", f"{PREFIX}{record.name}.>"


def request_of(key: str, payload: bytes) -> MessageGetRequest:
    """Args: key: the subject of which the last message is requested; "" if the payload says which.

    Raises:
        Status: it says nothing, or contradicts itself.
    """
    if not payload and not key:
        raise Status(408, "Empty Request")
    try:
        request = decoded(payload, MessageGetRequest, ignores_unknown=True)
    except ApiError as error:
        raise Status(408, "Malformed Request") from error
    chosen = (request.seq, request.last_by_subj, request.next_by_subj, request.multi_last, request.start_time)
    if key:
        if any((*chosen, request.batch, request.up_to_seq, request.up_to_time)):
            raise Status(408, "Bad Request")
        return msgspec.structs.replace(request, last_by_subj=key)
    if not any(chosen):
        raise Status(408, "Empty Request")
    seq, last, following, several, start_time = chosen
    is_twice = (
        (seq and (last or start_time))
        or (last and (start_time or following or request.batch > 0 or several))
        or (following and several)
        or (request.up_to_seq and request.up_to_time)
    )
    if is_twice:
        raise Status(408, "Bad Request")
    return request


def answers_to(log: StreamLog, stream: str, request: MessageGetRequest) -> Iterator[Answer]:
    """For a reader's thread. Raises Status; CorruptLog: a part of the log is damaged."""
    if request.multi_last:
        yield from _last_of_several(log, stream, request)
    elif request.batch > 0:
        yield from _following(log, stream, request)
    else:
        yield _one(log, stream, request)


def frame(reply: bytes, answer: Answer) -> bytes:
    """A `PUB` or `HPUB` frame."""
    headers, payload = answer
    if not headers:
        return b"PUB %b %d\r\n%b\r\n" % (reply, len(payload), payload)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (reply, len(headers), len(headers) + len(payload), headers, payload)


def _one(log: StreamLog, stream: str, request: MessageGetRequest) -> Answer:
    if request.last_by_subj:
        offset = last_on(log, request.last_by_subj)
    else:
        offset = _start(log, request)
        if request.next_by_subj:
            offset = next_on(log, request.next_by_subj, offset)
    for row in _rows(log, offset, offset + 1):
        return _answer(row, stream, with_headers=not request.no_hdr)
    raise Status(404, "Message Not Found")


def _start(log: StreamLog, request: MessageGetRequest) -> int:
    if not request.start_time:
        return max(0, request.seq - 1)
    return _offset_at(log, request.start_time)


def _offset_at(log: StreamLog, text: str) -> int:
    try:
        offset, _ = log.reader.offset_at(parse_timestamp_us(text), log.first_readable_offset)
    except InvalidRequest as error:
        raise Status(408, "Malformed Request") from error
    return offset


def _following(log: StreamLog, stream: str, request: MessageGetRequest) -> Iterator[Answer]:
    pattern = request.next_by_subj or ">"
    start = max(_start(log, request), log.first_readable_offset)
    pending = _pending(log, pattern, start)
    last, sent, sent_bytes = 0, 0, 0
    room, most_bytes = min(request.batch, MAX_MESSAGES), min(request.max_bytes or MAX_BYTES, MAX_BYTES)
    for row in _matching(log, start, pattern):
        if sent >= room or sent_bytes >= most_bytes:
            break
        pending, sent = max(0, pending - 1), sent + 1
        yield _answer(row, stream, with_headers=not request.no_hdr, pending=pending, last=last)
        last, sent_bytes = row["offset"] + 1, sent_bytes + _size(row)
    if not sent:
        raise Status(404, "Message Not Found")
    yield _end(f"Nats-Num-Pending: {pending}\r\nNats-Last-Sequence: {last}\r\n")


def _pending(log: StreamLog, pattern: str, start: int) -> int:
    """How many visible messages a pattern covers from `start` on."""
    end = log.high_watermark
    if pattern == ">":
        return max(0, log.reader.count(start, end)) if start < end else 0
    _, counts = log.subjects.counts()
    table = counts.covered_by((pattern,)).table
    if not len(table) or pc.min(table.column("first")).as_py() >= start:
        return pc.sum(table.column("count")).as_py() or 0
    return sum(len(rows) for rows in _covered_rows(log, start, pattern))


def _covered_rows(log: StreamLog, start: int, pattern: str) -> Iterator[pa.RecordBatch]:
    if start >= log.high_watermark:
        return
    for rows in log.reader.visible_rows(start, log.high_watermark):
        yield rows if pattern == ">" else rows.filter(covered(rows.column("subject"), (pattern,)))


def _matching(log: StreamLog, start: int, pattern: str) -> Iterator[dict[str, Any]]:
    for rows in _covered_rows(log, start, pattern):
        yield from _to_rows(rows)


def _last_of_several(log: StreamLog, stream: str, request: MessageGetRequest) -> Iterator[Answer]:
    end = min(request.up_to_seq or log.high_watermark, log.high_watermark)
    if request.up_to_time:
        end = _offset_at(log, request.up_to_time)
        if end <= log.first_readable_offset:
            raise Status(404, "No Results")
    offsets = _last_offsets(log, request.multi_last, end)
    if not offsets:
        raise Status(404, "No Results")
    pending, last, sent, sent_bytes = len(offsets), 0, 0, 0
    room, most_bytes = request.batch or MAX_SUBJECTS, min(request.max_bytes or MAX_BYTES, MAX_BYTES)
    for offset in offsets:
        if sent >= room or sent_bytes >= most_bytes:
            break
        pending -= 1
        if offset + 1 < request.seq:
            continue
        for row in _rows(log, offset, offset + 1):
            yield _answer(row, stream, with_headers=True, pending=pending, last=last)
            last, sent, sent_bytes = offset + 1, sent + 1, sent_bytes + _size(row)
    yield _end(f"Nats-Num-Pending: {pending}\r\nNats-Last-Sequence: {last}\r\nNats-UpTo-Sequence: {end}\r\n")


def _last_offsets(log: StreamLog, patterns: tuple[str, ...], end: int) -> list[int]:
    """Ascending: of the last message below `end` on each subject that one of the patterns covers."""
    if len(patterns) > MAX_SUBJECTS:
        raise Status(413, "Too Many Results")
    if not any(map(has_wildcard, patterns)):
        found = [log.subjects.last(subject, end) for subject in dict.fromkeys(patterns)]
        return sorted(offset for offset in found if offset >= 0)
    _, counts = log.subjects.counts()
    table = counts.covered_by(patterns).table
    table = table.filter(pc.less(table.column("first"), end))
    if len(table) > MAX_SUBJECTS:
        raise Status(413, "Too Many Results")
    pairs = zip(table.column("subject").to_pylist(), table.column("last").to_pylist(), strict=True)
    found = [last if last < end else log.subjects.last(subject, end) for subject, last in pairs]
    return sorted(offset for offset in found if offset >= 0)


def _rows(log: StreamLog, start: int, end: int) -> Iterator[dict[str, Any]]:
    """Of visible messages; none of what is not in the log."""
    if log.first_readable_offset <= start < end <= log.high_watermark:
        for rows in log.reader.visible_rows(start, end):
            yield from _to_rows(rows)


def _to_rows(rows: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    times_us = rows.column("timestamp").cast(pa.int64())
    fields = rows.select(_COLUMNS).set_column(1, "timestamp", times_us)
    for start in range(0, fields.num_rows, _ROWS_AT_ONCE):
        yield from fields.slice(start, _ROWS_AT_ONCE).to_pylist()


def _size(row: dict[str, Any]) -> int:
    headers = header_block(row["headers"]) if row["headers"] is not None else b""
    return len(row["subject"].encode()) + len(headers) + len(row["value"])


def _answer(
    row: dict[str, Any], stream: str, *, with_headers: bool, pending: int | None = None, last: int = 0
) -> Answer:
    if not with_headers:
        return Answer(b"", row["value"])
    lines = (
        f"Nats-Stream: {stream}\r\nNats-Subject: {row['subject']}\r\nNats-Sequence: {row['offset'] + 1}\r\n"
        f"Nats-Time-Stamp: {time_of(row['timestamp'])}\r\n"
    )
    if pending is not None:
        lines += f"Nats-Num-Pending: {pending}\r\nNats-Last-Sequence: {last}\r\n"
    block = header_block(row["headers"] or [])
    return Answer(b"%b%b\r\n" % (block[:-2], lines.encode()), row["value"])


def _end(lines: str) -> Answer:
    return Answer(f"NATS/1.0 204 EOB\r\n{lines}\r\n".encode())
