"""Messages that were sent and wait for the acks of streams.

Theory of operation. Messages have ascending sequence numbers. A ring of marks says of each which streams have not acked
it, so that a chunk of received acks is one pass of a kernel, however many messages wait. Slices, as they were sent,
keep the rows until all of them and of the slices before are acked, because they may have to be sent again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.wire import native
from natslog.wire.frames import Frames
from natslog.wire.layout import PAYLOAD, PAYLOAD_LEN, SUBJECT, SUBJECT_LEN
from natslog.wire.outgoing import reply_prefix
from natslog.wire.outgoing_rows import Rows

Sequences = npt.NDArray[np.int64]

_MOST_BYTES = 32 * 1024 * 1024
_MOST_MESSAGES = 1024 * 1024


class Slice:
    """Messages `[first, end)`, sent together."""

    def __init__(self, first: int, rows: Rows, ack_to: int) -> None:
        self.first, self.end = first, first + len(rows)
        self.rows = rows
        self.ack_to = ack_to
        self.size_bytes = int(rows.values.nbytes)
        # Without an id a stream could not recognise a second copy: such rows are sent once.
        known = pa.repeat(False, len(rows)) if rows.ids is None else pc.is_valid(rows.ids)
        self.has_id = np.asarray(known, np.bool_)
        self.sent_at = time.monotonic()


class Acked(NamedTuple):
    """What a chunk of acks has changed.

    Attributes:
        sequences: of the messages of which no ack is missing any more. rows: how many rows they carry.
        is_progress: whether any ack came for the first time.
        refusal: the payload of the first answer that is no ack, or None. refused: the sequence of its message, or -1.
        mismatch: the payload of the first ack of another number of rows than its envelope carries, or None.
    """

    sequences: Sequences
    rows: int
    is_progress: bool
    refusal: bytes | None
    refused: int
    mismatch: bytes | None


class InFlight:
    """Of one publisher.

    Args:
        inbox: acks come to `<inbox>.~<sequence>`.
        streams: names of the streams that must ack each message; empty: the first ack of any stream counts.
        most_messages: that wait at any time; no more than some 32 MiB of them, and 1,048,576.

    Attributes:
        messages: how many wait for an ack.
    """

    def __init__(self, inbox: str, streams: Sequence[str], most_messages: int) -> None:
        self._prefix_bytes = len(reply_prefix(inbox))
        self._streams = tuple(streams)
        names = [name.encode() for name in streams]
        self._names = np.frombuffer(b"".join(names), np.uint8)
        self._name_edges = np.cumsum([0, *map(len, names)], dtype=np.int64)
        self._most_messages = min(most_messages, _MOST_MESSAGES)
        self._capacity = 1 << (2 * self._most_messages - 1).bit_length()
        self._missing = np.zeros((max(1, len(streams)), self._capacity), np.bool_)
        self._left = np.zeros(self._capacity, np.int64)
        self._carried = np.zeros(self._capacity, np.int64)
        self._first_sent_at = np.zeros(self._capacity)
        self._slices: deque[Slice] = deque()
        self._first = self._end = 0
        self._bytes = 0
        self.messages = 0

    @property
    def rows(self) -> int:
        """How many rows are carried by the messages that wait."""
        places = self._places(np.arange(self._first, self._end))
        return int(self._carried[places][self._left[places] > 0].sum())

    def has_room_for(self, messages: int) -> bool:
        """True if nothing waits."""
        return self._first == self._end or (
            self.messages + messages <= self._most_messages
            and self._end + messages - self._first <= self._capacity
            and self._bytes <= _MOST_BYTES
        )

    def is_empty(self) -> bool:
        return self._first == self._end

    def add(self, rows: Rows, ack_to: int) -> Slice:
        """Counts these messages, at most `most_messages`, as sent. Raises nothing: there must be room for them."""
        added = Slice(self._end, rows, ack_to)
        places = self._places(np.arange(added.first, added.end))
        self._missing[:, places] = True
        self._left[places] = len(self._missing)
        self._carried[places] = 1 if rows.counts is None else np.asarray(rows.counts, np.int64)
        self._first_sent_at[places] = added.sent_at
        self._slices.append(added)
        self._end = added.end
        self._bytes += added.size_bytes
        self.messages += len(rows)
        return added

    def take_acks(self, frames: Frames) -> Acked:
        """Marks the messages that these acks are for. Acks of other messages, and second ones, are ignored."""
        acked = np.empty(self.messages, np.int64)
        count, rows, new, first, refused, mismatched = native.mark_acks(
            frames.buffer, frames.rows, self._prefix_bytes, self._names, self._name_edges, self._first, self._end,
            self._missing, self._left, self._carried, acked,
        )  # fmt: skip
        self.messages -= count
        self._drop_before(first)
        return Acked(
            acked[:count],
            rows,
            new > 0,
            _payload(frames, refused),
            -1 if refused < 0 else self._sequence_of(frames, refused),
            _payload(frames, mismatched),
        )

    def _sequence_of(self, frames: Frames, at: int) -> int:
        row = frames.rows[at]
        digits = frames.buffer[row[SUBJECT] + self._prefix_bytes : row[SUBJECT] + row[SUBJECT_LEN]].tobytes()
        return int(digits) if digits.isdigit() else -1

    def waits_for(self, sequence: int) -> bool:
        return self._first <= sequence < self._end and bool(self._left[sequence % self._capacity] > 0)

    def waited(self, acked: Acked, now_s: float) -> Iterator[tuple[float, int]]:
        """How long before `now_s` (monotonic) the acked messages were first sent, in seconds, and how many rows had
        that time. Valid until more messages are added.
        """
        places = self._places(acked.sequences)
        times, which = np.unique(self._first_sent_at[places], return_inverse=True)
        rows = np.bincount(which, weights=self._carried[places]).astype(np.int64)
        yield from zip((now_s - times).tolist(), rows.tolist(), strict=True)

    def late(self, before_s: float) -> Iterator[tuple[Slice, Sequences]]:
        """The slices that were sent before that time (monotonic), with the numbers of the rows to be sent again."""
        for sent in list(self._slices):
            if sent.sent_at < before_s:
                rows = np.flatnonzero(self._waits(sent) & sent.has_id)
                if len(rows):
                    yield sent, rows

    def first_waiting(self) -> tuple[str, str]:
        """The subject of the first message that waits, and the stream whose ack is missing ("" for any)."""
        place = self._first % self._capacity
        subject = str(self._slices[0].rows.subjects[self._first - self._slices[0].first].as_py())
        return subject, self._streams[int(np.flatnonzero(self._missing[:, place])[0])] if self._streams else ""

    def clear(self) -> None:
        """Forgets all of them; acks that still come are ignored."""
        self._drop_before(self._end)
        self.messages = 0

    def _waits(self, sent: Slice) -> npt.NDArray[np.bool_]:
        return np.asarray(self._left[self._places(np.arange(sent.first, sent.end))] > 0, np.bool_)

    def _places(self, sequences: Sequences) -> Sequences:
        return sequences & (self._capacity - 1)

    def _drop_before(self, first: int) -> None:
        """Invariant: `_first` is the first message that waits, or `_end`; the first slice holds it."""
        self._first = first
        while self._slices and self._slices[0].end <= first:
            self._bytes -= self._slices.popleft().size_bytes


def _payload(frames: Frames, at: int) -> bytes | None:
    if at < 0:
        return None
    row = frames.rows[at]
    return frames.buffer[row[PAYLOAD] : row[PAYLOAD] + row[PAYLOAD_LEN]].tobytes()
