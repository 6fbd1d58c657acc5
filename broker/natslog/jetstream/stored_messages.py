"""Single messages of a stream, as the API shows them."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.covered import covered
from natslog.errors import InvalidRequest
from natslog.jetstream.errors import api_error
from natslog.jetstream.requests import MessageGetRequest
from natslog.jetstream.stream_state import time_of
from natslog.log import StreamLog
from natslog.subjects import has_wildcard
from natslog.times import parse_timestamp_us


def require_one_choice(request: MessageGetRequest) -> None:
    """Raises ApiError: the request does not say which message, or says it twice."""
    by_time, by_last, by_next = bool(request.start_time), bool(request.last_by_subj), bool(request.next_by_subj)
    if request.batch > 0 or request.max_bytes > 0:
        raise api_error("bad_request")
    is_twice = (request.seq and (by_last or by_time)) or (by_last and (by_next or by_time))
    if is_twice or not (request.seq or by_last or by_next or by_time):
        raise api_error("bad_request")


def message_of(log: StreamLog, request: MessageGetRequest) -> dict[str, Any]:
    """For a reader's thread. Raises ApiError: there is none; CorruptLog: a part of the log is damaged."""
    offset = _chosen(log, request)
    if log.first_readable_offset <= offset < log.high_watermark:
        for rows in log.reader.visible_rows(offset, offset + 1):
            return shown(rows, with_headers=not request.no_hdr)
    raise api_error("no_message")


def _chosen(log: StreamLog, request: MessageGetRequest) -> int:
    """The offset of the message; -1 if there is none."""
    if request.last_by_subj:
        return last_on(log, request.last_by_subj)
    start = max(0, request.seq - 1)
    if request.start_time:
        try:
            start_us = parse_timestamp_us(request.start_time, "start_time")
        except InvalidRequest as error:
            raise api_error("bad_request") from error
        start, found_us = log.reader.offset_at(start_us, log.first_readable_offset)
        if found_us is None:
            return -1
    return next_on(log, request.next_by_subj, start) if request.next_by_subj else start


def last_on(log: StreamLog, subject: str) -> int:
    """The offset of the newest visible message on a subject, which may have wildcards; -1 if there is none."""
    if not has_wildcard(subject):
        return log.subjects.last(subject)
    newest = pc.max(_covered_by(log, subject).column("last")).as_py()
    return -1 if newest is None else int(newest)


def next_on(log: StreamLog, subject: str, start: int) -> int:
    """The same of the first one from `start` on."""
    if not has_wildcard(subject):
        return log.subjects.next(subject, start)
    later = _covered_by(log, subject)
    later = later.filter(pc.greater_equal(later.column("last"), start))
    if not len(later):
        return -1
    start = max(start, log.first_readable_offset, pc.min(later.column("first")).as_py())
    for rows in log.reader.visible_rows(start, log.high_watermark):
        found = rows.column("offset").filter(covered(rows.column("subject"), (subject,)))
        if len(found):
            return int(found[0].as_py())
    return -1


def _covered_by(log: StreamLog, pattern: str) -> pa.Table:
    _, counts = log.subjects.counts()
    return counts.covered_by((pattern,)).table


def shown(rows: pa.RecordBatch, *, with_headers: bool) -> dict[str, Any]:
    """Of one row."""
    row = rows.select(["offset", "subject", "headers", "value"]).to_pylist()[0]
    body: dict[str, Any] = {"subject": row["subject"], "seq": row["offset"] + 1}
    if with_headers and row["headers"] is not None:
        body["hdrs"] = b64encode(header_block(row["headers"])).decode()
    if row["value"]:
        body["data"] = b64encode(row["value"]).decode()
    return body | {"time": time_of(rows.column("timestamp").cast(pa.int64())[0].as_py())}


def header_block(headers: list[dict[str, str]]) -> bytes:
    """The headers of a message as they are sent."""
    lines = "".join(f"{_on_one_line(one['key'])}: {_on_one_line(one['value'])}\r\n" for one in headers)
    return f"NATS/1.0\r\n{lines}\r\n".encode()


def _on_one_line(text: str) -> str:
    """Direct appends may have line ends in headers, which would begin another header."""
    return text.replace("\r", " ").replace("\n", " ") if "\r" in text or "\n" in text else text
