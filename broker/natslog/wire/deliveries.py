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
from natslog.wire.outgoing import TextBuffers, texts_of

Longs = npt.NDArray[np.int64]

OTHER, ACK, NAK, TERM, PROGRESS, NEXT, UNKNOWN = range(7)
"""Kinds of received frames. OTHER: not to the subjects of acks; UNKNOWN: an ack with a payload of no known kind."""

_FRAME_BYTES = len("LMSG ") + 5 * 20 + 1 + 3 * 11 + len("NATS/1.0\r\nNats-Msg-Size: \r\n\r\n") + 3 * 2
"""An upper bound of what a frame has besides texts of its own: verb, numbers, blanks, line ends."""

_EMPTY_BLOCK = b"NATS/1.0\r\n\r\n"
_NO_BYTES = np.empty(0, np.uint8)


class Messages:
    """Columns of messages to be delivered.

    Args:
        batch: with the columns subject, value, headers.

    Attributes:
        lines: the header lines of each.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        headers, values = batch.column("headers"), batch.column("value")
        self.has_headers = headers.is_valid().to_numpy(zero_copy_only=False)
        self.subjects = texts_of(batch.column("subject"))
        self.values = texts_of(pc.fill_null(values, b"") if values.null_count else values)
        self.lines = np.zeros(len(batch) + 1, np.int32), _NO_BYTES
        if headers.null_count < len(headers):
            self.lines = _one_line_each(headers, self.has_headers)

    def sizes(self, *, headers_only: bool) -> Longs:
        """Bytes of subject, header block and value of each; with the header that states the size instead of the value,
        if `headers_only`.
        """
        subjects = _lengths(self.subjects)
        if not headers_only:
            return subjects + self.payload_sizes()
        digits = np.char.str_len(_lengths(self.values).astype(np.str_))
        return subjects + _lengths(self.lines) + len(_EMPTY_BLOCK) + len("Nats-Msg-Size: \r\n") + digits

    def payload_sizes(self) -> Longs:
        """Bytes of header block and value of each."""
        blocks: Longs = _lengths(self.lines) + len(_EMPTY_BLOCK) * self.has_headers
        return blocks + _lengths(self.values)

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
        part = slice(first, first + count + 1)
        subjects, values, lines = ((edges[part], data) for edges, data in (self.subjects, self.values, self.lines))
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


def _one_line_each(headers: Any, is_valid: npt.NDArray[np.bool_]) -> TextBuffers:
    """The header lines of each row. Direct appends may have line ends in headers, and headers without a value."""
    pairs, edges = headers.values, offsets_of(headers)
    fields = [pairs.field(name) for name in ("key", "value")]
    names, texts = (texts_of(pc.fill_null(field, "") if field.null_count else field) for field in fields)
    first, last = int(edges[0]), int(edges[-1])
    size = sum(int(offsets[last] - offsets[first]) for offsets, _ in (names, texts)) + 4 * (last - first)
    ends, out = np.empty(len(headers) + 1, np.int32), np.empty(size, np.uint8)
    native.lines_of_pairs(edges, is_valid, *names, *texts, ends, out)
    return ends, out


def _lengths(texts: TextBuffers) -> Longs:
    edges = texts[0]
    lengths: Longs = (edges[1:] - edges[:-1]).astype(np.int64)
    return lengths


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
