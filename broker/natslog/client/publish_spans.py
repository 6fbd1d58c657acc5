"""The span of a publisher: from the first message that is sent until the acks have come.

Theory of operation. All messages that are sent before the publisher waits for their acks are one batch and have one
span, whose context is added to their headers. The acks state the offsets. Of each chunk of received acks the first and
the last one are read: acks of a stream arrive in the order of its offsets. That does not hold for acks of several
streams, or of duplicates, which state where the row was stored before: if any of these are read, and others are not,
the span states no offsets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow.compute as pc

from natslog import tracing
from natslog.arrow.trace_contexts import with_traceparent
from natslog.model import Ack
from natslog.wire.frames import Frames
from natslog.wire.layout import PAYLOAD, PAYLOAD_LEN
from natslog.wire.outgoing_rows import Rows

_LAST_OFFSET = 2**63 - 1
_LINE_BYTES = len(f"{tracing.TRACEPARENT}: \r\n") + 55


class _Ack(msgspec.Struct):
    """What an ack states; `count` is of the rows of an envelope, `messages` of an ack for several messages."""

    stream: str
    seq: int
    count: int | None = None
    messages: int = 1
    duplicate: bool = False


_DECODER = msgspec.json.Decoder(_Ack)


def begin_span(attributes: tracing.Attributes) -> PublishSpan | None:
    """None without tracing, or if this span is not sampled: then the messages get no header."""
    span = tracing.start("publish", "producer", {**attributes, **tracing.messaging("publish", "send", system="nats")})
    return PublishSpan(span) if span.is_recording else None


class PublishSpan:
    """Of what a publisher has sent and not waited for."""

    def __init__(self, span: tracing.Span) -> None:
        self._span = span
        self._rows = self._bytes = 0
        self._subjects: set[str] = set()
        self._offsets: dict[str, tuple[int, int]] = {}  # the first and the last one in each stream
        self._has_unread = self._has_duplicates = self._is_uncertain = False

    def note_rows(self, rows: Rows) -> None:
        """Before they become messages."""
        self._rows += len(rows)
        self._bytes += int(rows.values.nbytes)
        if len(self._subjects) <= 1:
            self._subjects.update(map(str, pc.unique(rows.subjects)[:2].to_pylist()))

    def added_to(self, messages: Rows, max_payload_bytes: int) -> Rows:
        """The messages with its context as a header, except those that have one or would be too large with it."""
        fits = np.asarray(pc.less_equal(messages.sent_bytes(_LINE_BYTES), max_payload_bytes), np.bool_)
        headers = with_traceparent(messages.headers, len(messages), self._span.traceparent, where=fits)
        return replace(messages, headers=headers)

    def note_acks(self, frames: Frames) -> None:
        """Received acks."""
        self._has_unread |= len(frames.rows) > 2
        for at in {0, len(frames.rows) - 1} if len(frames.rows) else ():
            row = frames.rows[at]
            self._note(frames.buffer[row[PAYLOAD] : row[PAYLOAD] + row[PAYLOAD_LEN]].tobytes())

    def _note(self, payload: bytes) -> None:
        """One ack, or what another program has sent to the ack subject."""
        try:
            ack = _DECODER.decode(payload)
        except (ValueError, RecursionError):
            return  # it is counted or refused by the publisher, which reads all acks
        stream, last = ack.stream, ack.seq - 1
        first = ack.seq - (ack.count or ack.messages)
        if 0 <= first <= last <= _LAST_OFFSET:  # a refusal states the sequence 0
            known_first, known_last = self._offsets.get(stream, (first, last))
            self._offsets[stream] = min(first, known_first), max(last, known_last)
            self._has_duplicates |= ack.duplicate
            self._is_uncertain |= ack.duplicate and ack.messages > 1

    def end(self, ack: Ack, error: BaseException | None) -> None:
        """The acks have come, or will not come."""
        attributes: dict[str, Any] = {
            "messaging.batch.message_count": self._rows,
            "natslog.bytes": self._bytes,
            "natslog.ack": ack,
        }
        if len(self._subjects) == 1:
            attributes["messaging.destination.name"] = next(iter(self._subjects))
        self._span.set(attributes | tracing.offsets(self._known_offsets()))
        if error is not None:
            self._span.fail(error)
        self._span.end()

    def _known_offsets(self) -> dict[str, tuple[int, int]]:
        """None where acks that were not read may state others: of another stream, or of rows stored earlier."""
        found = dict(self._offsets)  # acks may still come in another thread
        is_mixed = self._has_duplicates or len(found) > 1
        return {} if self._is_uncertain or (self._has_unread and is_mixed) else found
