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
from natslog.wire.layout import END, START
from natslog.wire.outgoing import TextBuffers, taken

Longs = npt.NDArray[np.int64]

_ANSWER_BYTES = len("NATS/1.0\r\n\r\nNats-Sequence: \r\nNats-Time-Stamp: 2000-01-01T00:00:00.000000Z\r\n\r\n") + 20
_FRAME_BYTES = len("HPUB   \r\n\r\n") + 2 * 20
"""Upper bounds of what an answer, and its frame, have besides texts of their own."""
_COPIED_FROM_BYTES = 16 * 1024


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
        places: where each begins (-1: there is no message), the length of its header block, and its length; of shape
            (answers, 3).
    """

    places: Longs
    data: npt.NDArray[np.uint8]


def taken_requests(frames: Frames, api_bytes: int, domain_bytes: int) -> tuple[Requests, Frames | None]:
    """Copies of those that are for one message, as far as a kernel can read them; and the frames of the others, if
    there are any, without those that have no reply subject, or one that begins with `$`.

    Args:
        api_bytes, domain_bytes: see `kernels_direct.take_requests`.
    """
    rows = np.ascontiguousarray(frames.rows)
    count, span = len(rows), int(rows[-1, END] - rows[0, START])  # the frames are within these bytes
    subjects, replies = (np.empty(count + 1, np.int32), np.empty(span, np.uint8)), np.empty(count + 1, np.int32)
    reply_data, sequences, others = np.empty(span, np.uint8), np.empty(count, np.int64), np.empty(count, np.int64)
    found, left = native.take_requests(
        frames.buffer, rows, api_bytes, domain_bytes, others, *subjects, replies, reply_data, sequences
    )
    requests = Requests(
        _ended(*subjects, found), sequences if found == count else sequences[:found], _ended(replies, reply_data, found)
    )
    return requests, Frames(frames.buffer, rows[others[:left]]) if left else None


def _ended(offsets: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], count: int) -> TextBuffers:
    """The first texts. What waits takes no more memory than it needs."""
    used = int(offsets[count])
    return offsets[: count + 1], data[:used].copy() if len(data) > _COPIED_FROM_BYTES else data[:used]


def rendered(rows: pa.RecordBatch, offsets: Longs, stream: str) -> Answers:
    """The answers with these messages.

    Args:
        rows: with the columns timestamp, subject, headers, value.
    """
    messages = Messages(rows)
    texts = messages.subjects, messages.values, messages.lines
    prefix = np.frombuffer(f"Nats-Stream: {stream}\r\nNats-Subject: ".encode(), np.uint8)
    size = sum(int(one[0][-1] - one[0][0]) for one in texts)
    out = np.empty(size + len(rows) * (_ANSWER_BYTES + len(prefix)), np.uint8)
    places = np.empty((len(rows), 3), np.int64)
    times_us = np.ascontiguousarray(rows.column("timestamp").cast(pa.int64()).to_numpy())
    filled = native.direct_answers(
        *texts[0], *texts[1], *texts[2], np.ascontiguousarray(offsets), times_us, prefix, out, places
    )
    return Answers(places, out[:filled])


@dataclass(frozen=True, slots=True)
class Limits:
    """Of answers.

    Attributes:
        most_bytes: of a header block and a payload. too_large: the answer instead of a larger one. not_found: the one
            where there is no message.
    """

    most_bytes: int
    too_large: npt.NDArray[np.uint8]
    not_found: npt.NDArray[np.uint8]

    @property
    def status_bytes(self) -> int:
        return max(len(self.too_large), len(self.not_found))


def frames_of(
    replies: TextBuffers, rows: Longs, answers: Answers, limits: Limits, room_bytes: int
) -> Iterator[memoryview]:
    """`HPUB` frames in parts of about `room_bytes`, or of one frame where that is larger.

    Args:
        rows: of each answer, the number of its reply subject.
    """
    if not len(rows):
        return
    lengths = np.maximum(answers.places[:, 2], limits.status_bytes) + (replies[0][rows + 1] - replies[0][rows])
    ends, at = np.cumsum(lengths + _FRAME_BYTES), 0
    while at < len(rows):
        before = int(ends[at - 1]) if at else 0
        until = max(at + 1, int(np.searchsorted(ends, before + room_bytes, "right")))
        part = Answers(answers.places[at:until], answers.data)
        yield frames_at_once(replies, rows[at:until], part, limits, int(ends[until - 1]) - before)
        at = until


def frames_at_once(replies: TextBuffers, rows: Longs, answers: Answers, limits: Limits, room_bytes: int) -> memoryview:
    """All of them, which take `room_bytes` at most."""
    out = np.empty(room_bytes, np.uint8)
    places, data = np.ascontiguousarray(answers.places), answers.data
    filled = native.answer_frames(
        *replies, rows, places, data, limits.most_bytes, limits.not_found, limits.too_large, out
    )
    return out.data[:filled]


def most_frame_bytes(requests: Requests, answer_bytes: int, limits: Limits) -> int:
    """What the frames of all answers take at most, if the messages among them have `answer_bytes`."""
    return len(requests.replies[1]) + answer_bytes + len(requests) * (_FRAME_BYTES + limits.status_bytes)


def _joined(parts: Sequence[TextBuffers]) -> TextBuffers:
    shift, offsets = 0, [np.zeros(1, np.int32)]
    for one, data in parts:
        offsets.append(one[1:] + np.int32(shift))
        shift += len(data)
    return np.concatenate(offsets), np.concatenate([data for _, data in parts])
