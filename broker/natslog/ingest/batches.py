"""From frames to the buffers of Arrow columns: payloads, subjects and headers are copied once, straight into place.

A `BatchBuilder` grows until it is taken for a commit. It has the columns of the message schema without offset and
timestamp, and also data that is not stored: reply subjects, which are acked after the commit, and message ids. After
the commit it is cleared and reused, so that no memory is allocated.

Invariant: a row is only ever added whole; between `taken()` and `clear()` nothing is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.arrow.row_buffers import RowBuffers
from natslog.ingest.columns import Array, Column, Texts, edges_and_data
from natslog.ingest.conditions import Condition
from natslog.ingest.header_columns import HeaderColumns, no_headers
from natslog.wire import native
from natslog.wire.frames import Frames
from natslog.wire.layout import Survey

COMMIT_BYTES = 8 * 1024 * 1024
COMMIT_ROWS = 64 * 1024


def survey_of(frames: Frames) -> Survey:
    return Survey(*native.survey(frames.buffer, frames.rows))


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one commit; views of the builder's buffers.

    Attributes:
        rows: what is stored.
        replies: reply subjects, empty where none was given; None if no ack is waited for.
        correlations: correlation ids, which acks return, empty where none was given; None if no row has one.
        ids: uint64 of shape (rows, 2): hashes of message ids, zeros where there is none; None if no row has one.
        spans: the number of rows of an envelope, at its last one, which has its reply subject and id; 0 for other rows.
            None if there is no envelope.
        full: marks rows whose acks state offset and epoch; None if there are none.
        conditions: of rows, by their number, in ascending order; empty for most commits.
    """

    rows: RowBuffers
    replies: Texts | None
    correlations: Texts | None
    ids: npt.NDArray[np.uint64] | None
    spans: npt.NDArray[np.int64] | None = None
    conditions: Sequence[tuple[int, Condition]] = ()
    full: npt.NDArray[np.bool_] | None = None


class BatchBuilder:
    """Collects rows of one stream. `add` until `is_full`, then `taken`, then `clear`."""

    def __init__(self) -> None:
        self._subject = Column()
        self._value = Column()
        self._reply = Column()
        self._headers = HeaderColumns()
        self._is_headed = False
        self._spans: list[tuple[int, int]] = []  # last row and number of rows of each envelope
        self._conditions: list[tuple[int, Condition]] = []

    @property
    def rows(self) -> int:
        return self._value.rows

    @property
    def is_full(self) -> bool:
        headers = self._headers
        columns = (self._subject, self._value, self._reply, headers.pair_key, headers.pair_value)
        return self.rows >= COMMIT_ROWS or sum(column.size_bytes for column in columns) + 24 * self.rows >= COMMIT_BYTES

    @property
    def is_bloated(self) -> bool:
        """Whether a large message has enlarged it far beyond the needs of a commit."""
        headers = self._headers
        columns = (self._subject, self._value, headers.key, headers.pair_key, headers.pair_value)
        return sum(column.capacity_bytes for column in columns) > 4 * COMMIT_BYTES

    def add(self, frames: Frames, survey: Survey | None = None, *, packs_ids: bool = True) -> None:
        """Copies the frames' bytes; the receive buffer is free afterwards.

        Args:
            survey: of these frames. packs_ids: whether message ids of natslog's own form are left out of the headers.
        """
        buffer, rows = frames.buffer, frames.rows
        survey = survey or survey_of(frames)
        before, count = self.rows, len(rows)
        native.gather_messages(
            buffer,
            rows,
            *self._subject.room_for(count, survey.subject_bytes),
            *self._value.room_for(count, survey.value_bytes),
            *self._reply.room_for(count, survey.reply_bytes),
            before,
        )
        self._subject.filled(count, survey.subject_bytes)
        self._value.filled(count, survey.value_bytes)
        self._reply.filled(count, survey.reply_bytes)
        if survey.headed_rows:
            if not self._is_headed:
                self._is_headed = True
                self._headers.add_plain(before)
            self._headers.add(buffer, rows, survey.header_lines, packs_ids=packs_ids)
        elif self._is_headed:
            self._headers.add_plain(len(rows))

    @property
    def has_conditions(self) -> bool:
        return bool(self._conditions)

    def add_conditions(self, conditions: Sequence[tuple[int, Condition]]) -> None:
        """Of the rows that are added next, by their number among these."""
        self._conditions += [(self.rows + at, condition) for at, condition in conditions]

    def add_envelope(
        self,
        subject: Array,
        reply: Array,
        rows: pa.RecordBatch,
        message_id: bytes | None,
        correlation_id: bytes = b"",
        *,
        wants_full_ack: bool = False,
    ) -> None:
        """Copies rows of one envelope, at least one.

        Args:
            rows: of the payload schema. message_id: of natslog's own form. correlation_id: of the ack; may be empty.
                wants_full_ack: whether the ack states offset and epoch.
        """
        before, count = self.rows, rows.num_rows
        self._subject.extend_with_one(subject, count)
        self._value.extend_with(*edges_and_data(rows.column("value")))
        self._reply.extend_with_empty(count - 1)
        self._reply.extend_with_one(reply, 1)
        keys, headers = rows.column("key"), rows.column("headers")
        has_any = keys.null_count < count or headers.null_count < count
        if (has_any or message_id or correlation_id or wants_full_ack) and not self._is_headed:
            self._is_headed = True
            self._headers.add_plain(before)
        if self._is_headed:
            self._headers.add_columns(keys, headers, correlation_id)
        if message_id is not None:
            self._headers.set_last_id(message_id)
        if wants_full_ack:
            self._headers.wants_full_ack.values[-1] = True
        self._spans.append((before + count - 1, count))

    def taken(self) -> Batch:
        """The rows, over the builder's own buffers."""
        count, headers = self.rows, self._headers
        nodes, buffers = headers.nodes_and_buffers() if self._is_headed else no_headers(count)
        packed_ids, ids, full = headers.of_acks if self._is_headed else (None, None, None)
        rows = RowBuffers(
            count,
            [(count, 0), *nodes, (count, 0)],
            [*self._subject.buffers(), *buffers, *self._value.buffers()],
            packed_ids,
        )
        replies, correlations = _if_any(self._reply), _if_any(headers.correlation)
        return Batch(rows, replies, correlations, ids, self._spans_of(count), self._conditions, full)

    def _spans_of(self, rows: int) -> npt.NDArray[np.int64] | None:
        if not self._spans:
            return None
        spans = np.zeros(rows, np.int64)
        last, counts = np.array(self._spans).T
        spans[last] = counts
        return spans

    def clear(self) -> None:
        """Empty again, with the room it has grown."""
        for column in (self._subject, self._value, self._reply):
            column.clear()
        self._headers.clear()
        self._is_headed = False
        self._spans.clear()
        self._conditions = []


def _if_any(column: Column) -> Texts | None:
    return column.texts if column.size_bytes else None
