"""Envelopes among received messages: each is stored as its rows (`natslog.wire.envelope` has the format).

Theory of operation. A kernel finds the messages whose payload begins as an envelope does. Each of them, thousands of
rows, is then read by pyarrow and validated completely, as an upload of a direct append is. A payload that only begins
as an envelope is a plain message, stored as it is, unless a header says that it is an envelope: then it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.errors import InvalidRequest
from natslog.ingest.staged_rows import RowRules, rows_of_bytes
from natslog.wire import native
from natslog.wire.envelope import HEADER_NAME, HEADER_VALUE, MAX_ROWS, OPENING, OPENING_ARRAY
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD, PAYLOAD_LEN, REPLY, REPLY_LEN, SUBJECT, SUBJECT_LEN
from natslog.wire.own_ids import packed_id

BYTES_PER_ROW = 64
"""What a row takes in memory in addition to its texts, at most."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """One, read and validated.

    Attributes:
        rows: of the payload schema, at least one. message_id: of natslog's own form, or None.
    """

    subject: npt.NDArray[np.uint8]
    reply: npt.NDArray[np.uint8]
    rows: pa.RecordBatch
    message_id: bytes | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that a header calls an envelope, and that is none."""

    frames: Frames
    error: InvalidRequest


Received: TypeAlias = Frames | Envelope | Refused


def split_envelopes(frames: Frames, *, reads: bool) -> Iterator[tuple[Received, bool]]:
    """The messages in order: envelopes one by one, those between them together. The second value: whether this is one
    message that begins as an envelope and is stored as it is.

    Args:
        reads: whether envelopes are stored as rows at the present feature level.
    """
    marks = np.zeros(len(frames.rows), np.bool_)
    if not native.mark_openings(frames.buffer, frames.rows, OPENING_ARRAY, marks):
        yield frames, False
        return
    start = 0
    for at in np.flatnonzero(marks).tolist():
        if at > start:
            yield Frames(frames.buffer, frames.rows[start:at]), False
        start = at + 1
        received = _read(Frames(frames.buffer, frames.rows[at:start]), reads=reads)
        yield received, isinstance(received, Frames)
    if start < len(frames.rows):
        yield Frames(frames.buffer, frames.rows[start:]), False


def _read(frames: Frames, *, reads: bool) -> Received:
    row, buffer = frames.rows[0], frames.buffer
    headers = _headers(buffer[row[PAYLOAD] - row[HEADER_LEN] : row[PAYLOAD]].tobytes())
    subject = buffer[row[SUBJECT] : row[SUBJECT] + row[SUBJECT_LEN]]
    reply = buffer[row[REPLY] : row[REPLY] + row[REPLY_LEN]]
    try:
        if not reads:
            raise InvalidRequest("envelopes are stored from feature level 2 on: run natslog cluster finalize-upgrade")
        message_id = _id(headers.get("Nats-Msg-Id"))
        data = buffer[row[PAYLOAD] + len(OPENING) : row[PAYLOAD] + row[PAYLOAD_LEN]].tobytes()
        return Envelope(subject, reply, _rows(data, subject.tobytes().decode()), message_id)
    except InvalidRequest as error:
        return Refused(frames, error) if headers.get(HEADER_NAME) == HEADER_VALUE else frames


def _headers(block: bytes) -> dict[str, str]:
    """The first value of each name; the block was checked to be UTF-8."""
    found: dict[str, str] = {}
    for line in block.decode().split("\r\n")[1:]:
        name, _, value = line.partition(":")
        found.setdefault(name, value.strip(" \t"))
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


def _rows(data: bytes, subject: str) -> pa.RecordBatch:
    """Raises InvalidRequest: these are no rows of one envelope."""
    batches = rows_of_bytes(data, RowRules(subject, subject), "the envelope")
    count = sum(batch.num_rows for batch in batches)
    if not 0 < count <= MAX_ROWS:
        raise InvalidRequest(f"an envelope has 1 to {MAX_ROWS} rows; this one has {count}")
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
