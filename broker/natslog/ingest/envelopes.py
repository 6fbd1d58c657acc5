"""Envelopes among received messages (`natslog.wire.envelope` has the format): each is stored as its rows, or as the
message that it holds.

Theory of operation. A kernel opens those that hold one message: afterwards their frames have header block and payload
where a message with headers has them. Other kernels find the messages whose payload begins as an envelope of rows does,
and those which a header calls an envelope. What such a message claims (batches, rows, and their size with the subject
in each) is limited before anything is decoded. It is then read by pyarrow and validated completely, as an upload of a
direct append is. A payload that only begins as an envelope is a plain message, stored as it is, unless the header is
there: then it is refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.trace_contexts import TRACEPARENT_BYTES, is_traceparent, with_traceparent
from natslog.errors import InvalidRequest
from natslog.ingest.message_sizes import fitting
from natslog.ingest.staged_rows import RowRules, rows_of_bytes
from natslog.ingest.unwanted import is_utf8
from natslog.tracing import TRACEPARENT
from natslog.wire import native
from natslog.wire.envelope import (
    HEADER_NAME,
    HEADER_VALUE,
    MAX_ROWS,
    MESSAGE_OPENING,
    MESSAGE_OPENING_ARRAY,
    OPENING,
    OPENING_ARRAY,
)
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD, PAYLOAD_LEN, REPLY, REPLY_LEN, SUBJECT, SUBJECT_LEN
from natslog.wire.message_ids import ids_of_headers
from natslog.wire.own_ids import packed_id

BYTES_PER_ROW = 64
"""What a row takes in memory in addition to its texts, at most."""
_MOST_ADDED_BYTES = 16 * 1024 * 1024
"""What the rows of an envelope take in addition to its payload: their subjects, offsets, timestamps, lengths."""
_MOST_BATCHES = 64
_PLAIN_JSON = re.compile(r"[!#-\[\]-~]{1,256}")
_CONTINUATION = b"\xff\xff\xff\xff"
_VERSION_LINE = np.frombuffer(b"NATS/1.0\r\n", np.uint8)
_HEADER_PREFIX = np.frombuffer(f"{HEADER_NAME}:".encode(), np.uint8)


@dataclass(frozen=True, slots=True)
class Envelope:
    """One, read and validated.

    Attributes:
        rows: of the payload schema, at least one. message_id: of natslog's own form, or None. correlation_id: that
            JSON can hold as it is; empty if there is none.
    """

    subject: npt.NDArray[np.uint8]
    reply: npt.NDArray[np.uint8]
    rows: pa.RecordBatch
    message_id: bytes | None
    correlation_id: bytes
    wants_full_ack: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that a header calls an envelope, and that is none."""

    frames: Frames
    error: InvalidRequest


Received: TypeAlias = Frames | Envelope | Refused


def open_messages(frames: Frames) -> tuple[npt.NDArray[np.bool_] | None, int]:
    """Gives the frames of envelopes with one message its headers and payload, in place. Returns marks of these frames,
    None if there are none, and how many others begin as such an envelope and are plain messages.
    """
    opened = np.zeros(len(frames.rows), np.bool_)
    unread = native.open_messages(frames.buffer, frames.rows, MESSAGE_OPENING_ARRAY, _VERSION_LINE, opened)
    if not opened.any():
        return None, unread
    suspects = np.flatnonzero(opened)
    marks = np.zeros(len(suspects), np.bool_)
    native.mark_high_bytes(frames.buffer, frames.rows[suspects], marks)
    for at in suspects[marks].tolist():  # only headers that are not ASCII are checked here
        row = frames.rows[at]
        if not is_utf8(frames.buffer[row[PAYLOAD] - row[HEADER_LEN] : row[PAYLOAD]].tobytes()):
            _close(row)
            opened[at] = False
            unread += 1
    return opened, unread


def _close(row: npt.NDArray[np.int64]) -> None:
    """The payload is again what was received."""
    size_bytes = len(MESSAGE_OPENING) + 4 + int(row[HEADER_LEN])
    row[HEADER_LEN], row[PAYLOAD], row[PAYLOAD_LEN] = 0, row[PAYLOAD] - size_bytes, row[PAYLOAD_LEN] + size_bytes


def split_envelopes(frames: Frames, *, max_message_bytes: int | None = None) -> Iterator[tuple[Received, bool]]:
    """The messages in order: envelopes one by one, those between them together. The second value: whether this is one
    message that begins as an envelope and is stored as it is.

    Args:
        max_message_bytes: rows that would become larger do not get the trace context of their envelope; None: no limit.
    """
    marks = np.zeros(len(frames.rows), np.bool_)
    native.mark_openings(frames.buffer, frames.rows, OPENING_ARRAY, marks)
    if frames.rows[:, HEADER_LEN].any():
        native.mark_header_prefix(frames.buffer, frames.rows, _HEADER_PREFIX, marks)
    if not marks.any():
        yield frames, False
        return
    start = 0
    for at in np.flatnonzero(marks).tolist():
        if at > start:
            yield Frames(frames.buffer, frames.rows[start:at]), False
        start = at + 1
        received, begins = _read(Frames(frames.buffer, frames.rows[at:start]), max_message_bytes)
        yield received, begins and isinstance(received, Frames)
    if start < len(frames.rows):
        yield Frames(frames.buffer, frames.rows[start:]), False


def _read(frames: Frames, max_message_bytes: int | None) -> tuple[Received, bool]:
    """Of one message; and whether its payload begins as an envelope."""
    row, buffer = frames.rows[0], frames.buffer
    headers = _headers(buffer[row[PAYLOAD] - row[HEADER_LEN] : row[PAYLOAD]].tobytes())
    subject = buffer[row[SUBJECT] : row[SUBJECT] + row[SUBJECT_LEN]]
    reply = buffer[row[REPLY] : row[REPLY] + row[REPLY_LEN]]
    payload = buffer[row[PAYLOAD] : row[PAYLOAD] + row[PAYLOAD_LEN]].tobytes()
    begins = payload.startswith(OPENING)
    try:
        if not begins:
            raise InvalidRequest(f"the payload does not begin as that of an envelope does: {payload[:16].hex()}")
        message_id = _id(headers.get("Nats-Msg-Id"))
        rows = _rows(payload[len(OPENING) :], subject.tobytes().decode(), _traceparent(headers), max_message_bytes)
        correlation_id = headers.get("Natslog-Correlation-Id", "")
        returned = correlation_id.encode() if _PLAIN_JSON.fullmatch(correlation_id) else b""
        wants_full_ack = headers.get("Natslog-Ack") == "full"
        return Envelope(subject, reply, rows, message_id, returned, wants_full_ack), begins
    except InvalidRequest as error:
        return (Refused(frames, error) if headers.get(HEADER_NAME) == HEADER_VALUE else frames), begins


def _headers(block: bytes) -> dict[str, str]:
    """The first value of each name that is not empty; the block was checked to be UTF-8."""
    found: dict[str, str] = {}
    for line in block.decode().split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if not found.get(name):
            found[name] = value.strip(" \t")
    return found


def _id(text: str | None) -> bytes | None:
    if not text:
        return None
    try:
        packed_id(text.encode())
    except ValueError as error:
        raise InvalidRequest(
            f"the message id of an envelope must be of natslog's own form: {error} (docs/FORMATS.md)"
        ) from error
    return text.encode()


def _traceparent(headers: Mapping[str, str]) -> str | None:
    """The trace context of the envelope: that of each of its rows which has none of its own."""
    text = next((value for name, value in headers.items() if name.lower() == TRACEPARENT), "")
    return text if is_traceparent(text) else None


def _rows(data: bytes, subject: str, traceparent: str | None, max_message_bytes: int | None) -> pa.RecordBatch:
    """Raises InvalidRequest: these are no rows of one envelope. With the trace context, as far as limits allow it."""
    claimed, subject_bytes = _claimed_rows(data), len(subject.encode())
    each_bytes = subject_bytes + BYTES_PER_ROW
    if claimed * each_bytes > _MOST_ADDED_BYTES:
        raise InvalidRequest(
            f"{claimed} rows with a subject of {subject_bytes} bytes are too many for one envelope: send several"
        )
    batches = list(rows_of_bytes(data, RowRules((subject,), subject), "the envelope"))
    rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    if ids_of_headers(rows.column("headers")) is not None:
        raise InvalidRequest("rows of an envelope have no message ids of their own: send such rows as messages")
    if traceparent is None or claimed * (each_bytes + TRACEPARENT_BYTES) > _MOST_ADDED_BYTES:
        return rows
    fits = None if max_message_bytes is None else fitting(rows, max_message_bytes, TRACEPARENT_BYTES)
    at = rows.schema.get_field_index("headers")
    traced = with_traceparent(rows.column(at), rows.num_rows, traceparent, fits)
    return rows.set_column(at, rows.schema.field(at), traced)


def _claimed_rows(data: bytes) -> int:
    """How many rows the metadata of the messages claims. Raises InvalidRequest: that is invalid, or it claims more
    than an envelope may have.
    """
    rows = batches = messages = at = 0
    while data[at : at + 4] == _CONTINUATION and (size_bytes := int.from_bytes(data[at + 4 : at + 8], "little")):
        try:
            metadata = BatchMetadata(data[at + 8 : at + 8 + size_bytes])
            body_bytes, is_batch, claimed = metadata.body_bytes, metadata.is_batch, 0
            if is_batch:
                claimed = metadata.rows
        except (struct.error, ValueError, TypeError, IndexError) as error:
            raise InvalidRequest(f"the envelope: invalid Arrow IPC data near byte {at}: {error}") from error
        if is_batch and not claimed:
            raise InvalidRequest("an envelope has no batches without rows")
        rows, batches, messages = rows + claimed, batches + is_batch, messages + 1
        at += 8 + size_bytes + body_bytes
        if rows > MAX_ROWS or messages > 1 + _MOST_BATCHES:
            break
    if not 0 < rows <= MAX_ROWS or batches > _MOST_BATCHES:
        raise InvalidRequest(f"an envelope has 1 to {MAX_ROWS} rows in at most {_MOST_BATCHES} batches")
    return rows
