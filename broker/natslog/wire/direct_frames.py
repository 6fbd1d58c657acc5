"""Direct requests of the JetStream API, and the frames of their answers, as columns: no Python per request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.wire import native
from natslog.wire.deliveries import Messages
from natslog.wire.frames import Frames
from natslog.wire.layout import REPLY, REPLY_LEN
from natslog.wire.outgoing import TextBuffers, gathered, taken, texts_of

Longs = npt.NDArray[np.int64]

OTHER, BY_SUBJECT, BY_SEQUENCE, IGNORED = range(4)
"""Kinds of requests. IGNORED: without a reply subject, or with one that begins with `$`."""

_ANSWER_BYTES = len("NATS/1.0\r\n\r\nNats-Sequence: \r\nNats-Time-Stamp: 2000-01-01T00:00:00.000000Z\r\n\r\n") + 20
_FRAME_BYTES = len("HPUB   \r\n\r\n") + 2 * 20
"""Upper bounds of what an answer, and its frame, have besides texts of their own."""


@dataclass(frozen=True, slots=True)
class Requests:
    """For one message each.

    Attributes:
        subjects: of which the last message is requested; empty where `sequences` is not 0. replies: the subjects of the
            answers.
    """

    subjects: TextBuffers
    sequences: Longs
    replies: TextBuffers

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def nbytes(self) -> int:
        return len(self.subjects[1]) + len(self.replies[1])

    def take(self, rows: Longs) -> Requests:
        return Requests(taken(self.subjects, rows), self.sequences[rows], taken(self.replies, rows))

    @classmethod
    def joined(cls, parts: Sequence[Requests]) -> Requests:
        if len(parts) == 1:
            return parts[0]
        sequences = np.concatenate([one.sequences for one in parts])
        return cls(_joined([one.subjects for one in parts]), sequences, _joined([one.replies for one in parts]))


@dataclass(frozen=True, slots=True)
class Answers:
    """Header blocks and payloads in `data`.

    Attributes:
        places: where each begins, the length of its header block, and its length; of shape (answers, 3).
    """

    places: Longs
    data: npt.NDArray[np.uint8]


def sorted_requests(frames: Frames, api_bytes: int, domain_bytes: int) -> tuple[Requests, Frames]:
    """Copies of those that are for one message, as a kernel can tell; and the frames of the others, without those that
    are ignored.

    Args:
        api_bytes, domain_bytes: see `kernels_direct.sort_requests`.
    """
    rows = np.ascontiguousarray(frames.rows)
    found = np.empty((len(rows), 4), np.int64)
    count = native.sort_requests(frames.buffer, rows, api_bytes, domain_bytes, found)
    kinds = found[:, 0]
    chosen = found[(kinds == BY_SUBJECT) | (kinds == BY_SEQUENCE)] if count < len(rows) else found
    replies = rows[(kinds == BY_SUBJECT) | (kinds == BY_SEQUENCE)] if count < len(rows) else rows
    requests = Requests(
        gathered(frames.buffer, chosen[:, 1], chosen[:, 2]),
        np.ascontiguousarray(chosen[:, 3]),
        gathered(frames.buffer, replies[:, REPLY], replies[:, REPLY_LEN]),
    )
    return requests, frames.select(kinds == OTHER)


def rendered(rows: pa.RecordBatch, offsets: Longs, stream: str) -> Answers:
    """The answers with these messages.

    Args:
        rows: with the columns timestamp, subject, headers, value.
    """
    messages = Messages(rows)
    texts = texts_of(messages.subjects), texts_of(messages.values)
    lines = np.zeros(len(rows) + 1, np.int32), np.empty(0, np.uint8)
    if messages.lines is not None:
        lines = texts_of(messages.lines)
    prefix = np.frombuffer(f"Nats-Stream: {stream}\r\nNats-Subject: ".encode(), np.uint8)
    size = sum(int(one[0][-1] - one[0][0]) for one in (*texts, lines))
    out = np.empty(size + len(rows) * (_ANSWER_BYTES + len(prefix)), np.uint8)
    places = np.empty((len(rows), 3), np.int64)
    times_us = np.ascontiguousarray(rows.column("timestamp").cast(pa.int64()).to_numpy())
    filled = native.direct_answers(
        *texts[0], *texts[1], *lines, np.ascontiguousarray(offsets), times_us, prefix, out, places
    )
    return Answers(places, out[:filled])


def frames_of(replies: TextBuffers, rows: Longs, answers: Answers, room_bytes: int) -> Iterator[memoryview]:
    """`HPUB` frames in parts of about `room_bytes`, or of one frame where that is larger.

    Args:
        rows: of each answer, the number of its reply subject.
    """
    if not len(rows):
        return
    rows, places, at = np.ascontiguousarray(rows), np.ascontiguousarray(answers.places), 0
    lengths = replies[0][rows + 1] - replies[0][rows] + places[:, 2] + _FRAME_BYTES
    ends = np.cumsum(lengths)
    while at < len(rows):
        before = int(ends[at - 1]) if at else 0
        until = max(at + 1, int(np.searchsorted(ends, before + room_bytes, "right")))
        out = np.empty(int(ends[until - 1]) - before, np.uint8)
        filled = native.answer_frames(*replies, rows[at:until], places[at:until], answers.data, out)
        yield out.data[:filled]
        at = until


def _joined(parts: Sequence[TextBuffers]) -> TextBuffers:
    shift, offsets = 0, [np.zeros(1, np.int32)]
    for one, data in parts:
        offsets.append(one[1:] + np.int32(shift))
        shift += len(data)
    return np.concatenate(offsets), np.concatenate([data for _, data in parts])
