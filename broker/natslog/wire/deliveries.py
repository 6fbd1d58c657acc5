"""NATS protocol of deliveries to JetStream consumers, and their acks, as columns: no Python per message.

A delivery has the stream's subject and an ack reply that names consumer, delivery and message. Only a leafnode
connection can send it: `LMSG <subject of the subscriber> <ack reply>@<subject of the stream> <size>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.row_buffers import offsets_of
from natslog.wire import native
from natslog.wire.frames import Frames
from natslog.wire.leaf_protocol import bytes_of
from natslog.wire.outgoing import texts_of

Longs = npt.NDArray[np.int64]

OTHER, ACK, NAK, TERM, PROGRESS, NEXT, UNKNOWN = range(7)
"""Kinds of received frames. OTHER: not to the subjects of acks; UNKNOWN: an ack with a payload of no known kind."""

_FRAME_BYTES = len("LMSG ") + 5 * 20 + 1 + 3 * 11 + len("NATS/1.0\r\nNats-Msg-Size: \r\n\r\n") + 3 * 2
"""An upper bound of what a frame has besides texts of its own: verb, numbers, blanks, line ends."""

_EMPTY_BLOCK = b"NATS/1.0\r\n\r\n"


class Messages:
    """Columns of messages to be delivered.

    Args:
        batch: with the columns subject, value, headers.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        headers, values = batch.column("headers"), batch.column("value")
        self.subjects = batch.column("subject")
        self.values = pc.fill_null(values, b"") if values.null_count else values
        self.has_headers = headers.is_valid().to_numpy(zero_copy_only=False)
        self.lines = _one_line_each(headers, self.has_headers) if headers.null_count < len(headers) else None

    def sizes(self, *, headers_only: bool) -> Longs:
        """Bytes of subject, header block and value of each; with the header that states the size instead of the value,
        if `headers_only`.
        """
        subjects = _lengths(self.subjects)
        if not headers_only:
            return subjects + self.payload_sizes()
        digits = _lengths(pc.binary_length(self.values).cast(pa.string()))
        return subjects + self._lines() + len(_EMPTY_BLOCK) + len("Nats-Msg-Size: \r\n") + digits

    def payload_sizes(self) -> Longs:
        """Bytes of header block and value of each."""
        return self._lines() + np.where(self.has_headers, len(_EMPTY_BLOCK), 0) + _lengths(self.values)

    def _lines(self) -> Longs:
        """Bytes of the lines of headers of each."""
        if self.lines is None:
            return np.zeros(len(self.has_headers), np.int64)
        return np.where(self.has_headers, _lengths(self.lines), 0)

    def frames(
        self,
        first: int,
        count: int,
        *,
        prefix: bytes,
        numbers: Longs,
        replies: Sequence[str],
        reply_of: Longs,
        groups: Sequence[str] = (),
        headers_only: bool = False,
    ) -> memoryview:
        """Of `count` messages from `first` on.

        Args:
            prefix, numbers: of the ack replies; `numbers` has the shape (5, count): how often the message was
                delivered, its stream sequence, its consumer sequence, its time (ns), and how many messages follow.
            replies: subjects to deliver to. reply_of: the number of that of each message. groups: queue groups of which
            one member each gets the messages.
        """
        if not count:
            return memoryview(b"")
        subjects, values = texts_of(self.subjects.slice(first, count)), texts_of(self.values.slice(first, count))
        no_lines = np.zeros(count + 1, np.int32), np.empty(0, np.uint8)
        lines = no_lines if self.lines is None else texts_of(self.lines.slice(first, count))
        named = bytes_of("".join(f" {group}" for group in groups))
        encoded = [bytes_of(f"{reply} +" if groups else reply) for reply in replies]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
        most_reply_bytes = max(map(len, encoded))
        size = sum(int(offsets[-1] - offsets[0]) for offsets, _ in (subjects, values, lines))
        out = np.empty(size + count * (_FRAME_BYTES + len(prefix) + most_reply_bytes + len(named)), np.uint8)
        filled = native.delivery_frames(
            *subjects,
            *values,
            *lines,
            np.ascontiguousarray(self.has_headers[first : first + count]),
            ends,
            np.frombuffer(b"".join(encoded), np.uint8),
            np.ascontiguousarray(reply_of),
            np.frombuffer(prefix, np.uint8),
            np.frombuffer(named, np.uint8),
            np.ascontiguousarray(numbers),
            int(headers_only),
            out,
        )
        return out.data[:filled]


def _one_line_each(headers: Any, is_valid: npt.NDArray[np.bool_]) -> Any:
    """The header lines of each row. Direct appends may have line ends in headers, and headers without a value."""
    pairs, edges = headers.values, offsets_of(headers)
    fields = [pairs.field(name) for name in ("key", "value")]
    names, texts = (texts_of(pc.fill_null(field, "") if field.null_count else field) for field in fields)
    first, last = int(edges[0]), int(edges[-1])
    size = sum(int(offsets[last] - offsets[first]) for offsets, _ in (names, texts)) + 4 * (last - first)
    ends, out = np.empty(len(headers) + 1, np.int32), np.empty(size, np.uint8)
    native.lines_of_pairs(edges, is_valid, *names, *texts, ends, out)
    return pa.Array.from_buffers(pa.binary(), len(headers), [None, pa.py_buffer(ends), pa.py_buffer(out)], 0)


def _lengths(texts: Any) -> Longs:
    return np.diff(offsets_of(texts)).astype(np.int64)


def acks_of(frames: Frames, prefix: bytes) -> tuple[Longs, list[list[int]]]:
    """Columns of received frames: kind, how often it was delivered, stream sequence and consumer sequence, of the shape
    (frames, 4); and their runs of one kind: where it ends, the kind, and how many have a reply subject.
    """
    found = np.empty((len(frames.rows), 4), np.int64)
    runs = np.empty((len(frames.rows), 3), np.int64)
    rows = np.ascontiguousarray(frames.rows)
    count = native.parse_acks(frames.buffer, rows, np.frombuffer(prefix, np.uint8), found, runs)
    return found, runs[:count].tolist()


def status_frame(to: str, headers: bytes, reply: str = "", groups: Sequence[str] = ()) -> bytes:
    """`HMSG` with headers and no payload."""
    target = f"{to} {reply}" if reply else to
    if groups:
        target = f"{to} + {reply} {' '.join(groups)}" if reply else f"{to} | {' '.join(groups)}"
    return b"HMSG %b %d %d\r\n%b\r\n" % (bytes_of(target), len(headers), len(headers), headers)
