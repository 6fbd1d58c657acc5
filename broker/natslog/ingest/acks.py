r"""PubAcks for a whole commit, as one run of NATS protocol built by a kernel: no Python per message.

    PUB _INBOX.x 28\r\n{"stream":"orders","seq":42}\r\n

Where reply subjects are numbered (`<text>.~<number>`), consecutive rows get one ack together: each ack costs the NATS
server as much as a message.

`seq` is `offset + 1`, as JetStream counts, so that the publish calls of JetStream clients can read it. Some of these
refuse fields that JetStream does not have, so `offset` and `epoch` are only in acks of messages with the header
`Natslog-Ack: full`.
"""

from __future__ import annotations

import functools
import json

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.row_buffers import offsets_of
from natslog.errors import NatslogError
from natslog.ingest.columns import Texts
from natslog.wire import native
from natslog.wire.frames import Frames
from natslog.wire.outgoing import publish_frames

_MIDDLE = np.frombuffer(b',"offset":', np.uint8)
_TAILS = np.frombuffer(b"}", np.uint8), np.frombuffer(b',"duplicate":true}', np.uint8)
_NONE = np.zeros(0, np.bool_)
_NO_COUNTS = np.zeros(0, np.int64)
_NO_TEXTS = Texts(np.zeros(0, np.int32), np.zeros(0, np.uint8))
_CORRELATION_FIELD_BYTES = len(',"correlation_id":""')
_FRAME_AND_NUMBERS_BYTES = 96
"""An upper bound of what an ack holds besides reply subject and fixed texts: verb, length, line ends, numbers."""


def stored(
    replies: Texts,
    offsets: npt.NDArray[np.int64],
    *,
    stream: str,
    epoch: int,
    duplicate: npt.NDArray[np.bool_] | None = None,
    full: npt.NDArray[np.bool_] | None = None,
    counts: npt.NDArray[np.int64] | None = None,
    correlations: Texts | None = None,
    domain: str = "",
) -> memoryview:
    """Acks of committed rows.

    Args:
        replies: reply subjects, empty where none was requested.
        offsets: where each row is stored (for a duplicate: where the first one is).
        duplicate: marks rows that were stored before; None where none was.
        full: marks rows whose acks state `offset` and `epoch`; None where none does.
        counts: the number of rows of an envelope, at its last one; 0 for other rows. None where there was no envelope.
        correlations: the correlation id that each ack returns, which JSON can hold as it is; empty where there is none.
        domain: of JetStream, that the acks state; empty: none.
    """
    head, epoch_field = _texts(stream, epoch, domain)
    fixed_bytes = len(head) + len(_MIDDLE) + len(epoch_field) + len(_TAILS[1]) + _FRAME_AND_NUMBERS_BYTES
    ids = correlations or _NO_TEXTS
    id_bytes = 0 if correlations is None else correlations.size_bytes + len(offsets) * _CORRELATION_FIELD_BYTES
    out = np.empty(replies.size_bytes + id_bytes + len(offsets) * fixed_bytes, np.uint8)
    marks = _NONE if duplicate is None else duplicate
    rows_of = _NO_COUNTS if counts is None else counts
    texts = (replies.data, replies.offsets, ids.data, ids.offsets)
    fixed = (head, _MIDDLE, epoch_field, *_TAILS)
    filled = native.stored_acks(*texts, offsets, marks, _NONE if full is None else full, rows_of, *fixed, out)
    return _kept(out, filled)


def _kept(out: npt.NDArray[np.uint8], filled: int) -> memoryview:
    """What is kept until HW allows it takes no more than twice its size."""
    return out.data[:filled] if filled > len(out) // 2 else out[:filled].copy().data


def of_plain(frames: Frames, frame_bytes: int, base_offset: int, *, stream: str, domain: str = "") -> memoryview:
    """The same of plain frames (`kernels_plain.survey_plain`), which are stored from this offset on."""
    head, _ = _texts(stream, 0, domain)
    fixed_bytes = len(head) + len(_TAILS[0]) + _FRAME_AND_NUMBERS_BYTES
    out = np.empty(frame_bytes + len(frames.rows) * fixed_bytes, np.uint8)
    return _kept(out, native.plain_acks(frames.buffer, frames.rows, base_offset, head, _TAILS[0], out))


@functools.lru_cache(1024)
def _texts(stream: str, epoch: int, domain: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """What every ack of a stream begins with, and the epoch in full ones."""
    stated = f',"domain":{json.dumps(domain)}' if domain else ""
    head, field = f'{{"stream":{json.dumps(stream)}{stated},"seq":', f',"epoch":{epoch}'
    return np.frombuffer(head.encode(), np.uint8), np.frombuffer(field.encode(), np.uint8)


def refused(
    replies: Texts,
    error: NatslogError,
    *,
    stream: str,
    correlations: Texts | None = None,
    is_jetstream: bool = False,
) -> memoryview:
    """The same answer, but for the correlation id, to every row that has a reply subject.

    `code` is the HTTP status, as in JetStream; `err_code` a JetStream number where one means the same, else 10500 up.

    Args:
        is_jetstream: clients of JetStream read it, and may compare the text with that of the server.
    """
    err_code = error.facts.get("err_code", _ERR_CODES.get(error.code, 10500))
    description = _JETSTREAM_TEXTS.get(err_code, error.message) if is_jetstream else error.message
    body = {
        "error": {"code": _STATUSES.get(err_code, error.status), "err_code": err_code, "description": description},
        "stream": stream,
        "seq": 0,
    }
    text = json.dumps(body).encode()
    subjects = replies.to_arrow(pa.binary())
    bodies = pa.repeat(pa.scalar(text, pa.binary()), len(subjects))
    if correlations is not None:
        ids = correlations.to_arrow(pa.binary())
        with_id = pc.binary_join_element_wise(text[:-1], b', "correlation_id": "', ids, b'"}', b"")
        bodies = pc.if_else(pc.greater(pc.binary_length(ids), 0), with_id, bodies)
    asking = pc.greater(pc.binary_length(subjects), 0)
    return publish_frames(subjects.filter(asking), bodies.filter(asking))


def no_responders(replies: Texts) -> memoryview:
    """What the NATS server answers where there is no subscriber, to each of these reply subjects."""
    frames = pc.binary_join_element_wise(b"HPUB ", replies.to_arrow(pa.binary()), _NO_RESPONDERS, b"")
    return memoryview(frames.buffers()[2])[: offsets_of(frames)[-1]]


_NO_RESPONDERS = b" 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
_ERR_CODES = {
    "storage_full": 10047,
    "message_too_large": 10054,
    "storage_failed": 10077,
    "overloaded": 10167,
    "corrupt_log": 10501,
    "stream_sealed": 10109,
}
_STATUSES = {10109: 400}
_JETSTREAM_TEXTS = {
    10047: "insufficient storage resources available",
    10054: "message size exceeds maximum allowed",
    10109: "invalid operation on sealed stream",
    10167: "too many requests",
}
"""JetStream: 10047 insufficient resources (storage), 10054 message size exceeds maximum allowed, 10077 stream store
failed, 10109 invalid operation on sealed stream, 10167 too many requests.
"""
