"""What consumers read of a stream: messages to be delivered, where to begin, and how many are left.

Theory of operation. Reads run in a reader's thread. What was read and not delivered yet stays as a window, so that one
pull request after another is served from the same columns. It is dropped when messages of it are removed that were not
delivered yet, and when it is not used for a while. The number of messages that are left is counted once and then kept
up to date: what was delivered is subtracted, and what was stored since is counted; it is counted again only if messages
among them were removed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.covered import covered
from natslog.errors import OffsetOutOfRange
from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.jetstream.consumers.deliveries import Batch, Wanted
from natslog.jetstream.consumers.pending import Longs, Marks
from natslog.jetstream.stored_messages import last_on, next_on
from natslog.log import StreamLog
from natslog.log_events import event
from natslog.subjects import SubjectTree, has_wildcard, includes
from natslog.times import parse_timestamp_us
from natslog.wire.deliveries import Messages

_COLUMNS = ["offset", "timestamp", "subject", "headers", "value"]
_WINDOW_ROWS = 10_000
_FIRST_ROWS = 500  # doubled each time a consumer goes on where the window ends
_WINDOW_BYTES = 4 * 1024 * 1024
_FEW_ROWS = 8
_SPARSE_FROM = 20_000  # offsets; from there on the index of subjects is asked first
_GAP = 256
_READ_TRIES = 3
_MOST_SHOWN = 5
_NONE = np.empty(0, np.int64)

logger = logging.getLogger("natslog.jetstream")


@dataclass(frozen=True, slots=True)
class Start:
    """Where a consumer begins: at `seq`, or, if there are any, with the sequences `skip`, and then at `resume`."""

    seq: int
    resume: int
    skip: Longs


class Window:
    """Messages that were read. `upto`: all sequences below, from `start` on, are in it, or not for the consumer.

    Attributes:
        unread: from this sequence on, nothing was delivered. hidden: so many offsets from there to `upto` are hidden,
            and their messages not in it; negative: that is not known.
    """

    def __init__(self, start: int, upto: int, rows: pa.RecordBatch | None, log: StreamLog | None) -> None:
        self.start, self.upto, self.log_id = start, upto, id(log)
        self.unread, self.hidden = start, -1
        self.rows = rows if rows is not None and len(rows) else None
        self.size_bytes = 0 if self.rows is None else self.rows.get_total_buffer_size()
        self._sizes: dict[bool, Longs] = {}
        if self.rows is None:
            self.seqs = self.times_us = _NONE
            self._sizes = {False: _NONE, True: _NONE}
            return
        self.messages = Messages(self.rows)
        self.seqs = self.rows.column("offset").to_numpy() + 1
        self.times_us = self.rows.column("timestamp").view(pa.int64()).to_numpy()

    def __len__(self) -> int:
        return len(self.seqs)

    def only(self, marks: Marks) -> Window:
        """The messages that are marked."""
        rows = None if self.rows is None else self.rows.filter(pa.array(marks))
        found = Window(self.start, self.upto, rows, None)
        found.log_id, found.unread, found.hidden = self.log_id, self.unread, self.hidden
        return found

    def is_current(self, log: StreamLog) -> bool:
        """Whether all messages from `unread` on are in the log, and not hidden."""
        is_whole = self.log_id == id(log) and self.unread > log.first_readable_offset
        return is_whole and self.hidden == self._hidden_now(log, self.unread)

    def note_hidden(self, log: StreamLog) -> None:
        self.hidden = self._hidden_now(log, self.unread)

    def passed(self, log: StreamLog, seq: int) -> None:
        """What is before this sequence was delivered."""
        hidden = self._hidden_now(log, seq)  # first: what is hidden between the two counts is found by the second
        self.hidden = hidden if self.is_current(log) else -1
        self.unread = seq

    def _hidden_now(self, log: StreamLog, seq: int) -> int:
        return log.visibility.removed.count(seq - 1, self.upto - 1)

    def batch(self, first: int, count: int, *, headers_only: bool) -> Batch:
        """Args: headers_only: values are not delivered."""
        if headers_only not in self._sizes:
            self._sizes[headers_only] = self.messages.sizes(headers_only=headers_only)
        part = slice(first, first + count)
        return Batch(self.seqs[part], self._sizes[headers_only][part], self.times_us[part])


@dataclass(slots=True)
class Left:
    """How many messages are left for a consumer: `count` of those in `[start, end)`. `hidden`: how many offsets there
    were hidden when they were counted.
    """

    count: int = 0
    start: int = 0
    end: int = 0
    hidden: int = -1


class ConsumerReader:
    """Of one consumer. Calls block, and are made one at a time.

    Args:
        name: for log lines: of the consumer and its stream.
    """

    __slots__ = (
        "_ahead",
        "_chosen_of",
        "_covered",
        "_name",
        "filters",
        "left",
        "window",
    )

    def __init__(self, filters: tuple[str, ...], name: str) -> None:
        self.filters, self._name = filters, name
        self.window: Window | None = None
        self._ahead = _FIRST_ROWS
        self._covered = SubjectTree(filters)
        self._chosen_of: tuple[Any, Any] = None, None  # rows in memory, and those of them for the consumer
        self.left = Left()

    # ---- messages ----

    def read(self, log: StreamLog, wanted: Wanted, most_bytes: int | None) -> Window:
        """Args: most_bytes: messages with more bytes of headers and value are left out, and logged.

        Raises CorruptLog: a part of the log is damaged.
        """
        if len(wanted.seqs):
            return self._chosen(log, wanted.seqs, most_bytes)
        if (kept := self._kept(log, wanted.start)) is not None:
            return kept
        before = self.window
        goes_on = before is not None and before.upto == wanted.start
        self._ahead = min(2 * self._ahead, _WINDOW_ROWS) if goes_on else _FIRST_ROWS
        self.window = found = self._following(log, wanted, most_bytes)
        return found

    def ready(self, log: StreamLog, wanted: Wanted, most_bytes: int | None) -> Window | None:
        """As `read`, if what is wanted is in memory; does not block."""
        if len(wanted.seqs) or log.visibility.has_rules:
            return None
        if (kept := self._kept(log, wanted.start)) is not None:
            return kept
        return self._at_end(log, wanted.start, most_bytes)

    def _at_end(self, log: StreamLog, start: int, most_bytes: int | None) -> Window | None:
        """What was committed since the sequence before `start`, if that is kept in memory."""
        offset, end = start - 1, log.high_watermark
        if offset >= end:
            return Window(start, start, None, log)
        rows, self._chosen_of = self._recent(log, offset, end), (None, None)
        if rows is None:
            return None
        self.window = Window(start, end + 1, self._deliverable(rows, most_bytes), log)
        self.window.hidden = 0
        return self.window

    def _recent(self, log: StreamLog, start: int, end: int) -> pa.RecordBatch | None:
        """The messages for the consumer in `[start, end)`, if the log has all of them in memory, and none is hidden."""
        is_whole = start >= log.first_readable_offset and not log.visibility.removed.count(start, end)
        if not is_whole or (rows := log.recent.rows(start, end)) is None:
            return None
        if self._chosen_of[0] is not rows:
            self._chosen_of = rows, self._of_filters(rows.select(_COLUMNS))
        return self._chosen_of[1]

    def _kept(self, log: StreamLog, start: int) -> Window | None:
        """What was read before, where it has the message at `start` or behind it, and none that was removed."""
        kept = self.window
        if kept is None or not len(kept) or kept.unread != start or start > int(kept.seqs[-1]):
            return None
        return kept if kept.is_current(log) else None

    def _following(self, log: StreamLog, wanted: Wanted, most_bytes: int | None) -> Window:
        for _ in range(_READ_TRIES):
            try:
                return self._read_from(log, wanted, most_bytes)
            except OffsetOutOfRange:  # a limit has moved the start of the log meanwhile
                continue
        return self._read_from(log, wanted, most_bytes)

    def _read_from(self, log: StreamLog, wanted: Wanted, most_bytes: int | None) -> Window:
        removed, end = log.visibility.removed, log.high_watermark
        first = start = max(wanted.start - 1, log.first_readable_offset)
        hidden_before = removed.count(first, end)
        if self.filters and end - start > _SPARSE_FROM:
            start = self._next_match(log, start, end)
        parts: list[pa.RecordBatch] = []
        rows = size_bytes = 0
        upto = max(start, 0)
        most = min(_WINDOW_ROWS, max(wanted.most, self._ahead))
        for batch in log.reader.visible_rows(start, end) if start < end else ():
            batch = batch.select(_COLUMNS)
            upto = int(batch.column("offset")[-1].as_py()) + 1
            chosen = self._deliverable(self._of_filters(batch), most_bytes)
            parts.append(chosen)
            rows, size_bytes = rows + len(chosen), size_bytes + chosen.nbytes
            if rows >= most or size_bytes >= _WINDOW_BYTES:
                break
        else:
            upto = max(end, start)
        found = Window(wanted.start, upto + 1, _joined(parts), log)
        found.note_hidden(log)
        is_same = removed.count(first, end) == hidden_before
        return found if is_same else self._still_there(log, found)

    @staticmethod
    def _still_there(log: StreamLog, found: Window) -> Window:
        """Without what was removed while it was read."""
        removed = log.visibility.removed.marks(found.seqs - 1)
        found = found.only(~removed) if removed.any() else found
        if not found.is_current(log):  # more was removed meanwhile
            found.hidden = -1
        return found

    def _next_match(self, log: StreamLog, start: int, end: int) -> int:
        if any(map(has_wildcard, self.filters)):
            return start
        found = [at for subject in self.filters if (at := log.subjects.next(subject, start)) >= 0]
        return min(found, default=end)

    def _of_filters(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Args: batch: of `_COLUMNS`, or with more."""
        if not self.filters:
            return batch
        subjects = batch.column("subject")
        if len(batch) > _FEW_ROWS:
            return batch.filter(_marks(subjects, self.filters))
        marks = [self._covered.covers(subject) for subject in subjects.to_pylist()]  # 50 µs sooner than by Arrow
        return batch if all(marks) else batch.filter(pa.array(marks, pa.bool_()))

    def _deliverable(self, batch: pa.RecordBatch, most_bytes: int | None) -> pa.RecordBatch:
        """Without messages that have more bytes of headers and value."""
        if most_bytes is None or batch.get_total_buffer_size() <= most_bytes or batch.nbytes <= most_bytes:
            return batch
        fits = Messages(batch).payload_sizes() <= most_bytes
        if fits.all():
            return batch
        seqs = batch.column("offset").to_numpy()[~fits] + 1
        shown = ", ".join(map(str, seqs[:_MOST_SHOWN])) + (", …" if len(seqs) > _MOST_SHOWN else "")
        logger.warning(
            "%s: messages are not delivered, because they are larger than the %d bytes that the NATS server permits "
            "(max_payload): sequences %s",
            self._name,
            most_bytes,
            shown,
            extra=event("consumer.message_too_large"),
        )
        return batch.filter(pa.array(fits))

    def _chosen(self, log: StreamLog, seqs: Longs, most_bytes: int | None) -> Window:
        """Messages with these sequences, in this order; those that are gone are missing."""
        ascending = np.unique(seqs) - 1
        first, end = log.first_readable_offset, log.high_watermark
        ascending = ascending[(ascending >= first) & (ascending < end)]
        parts = []
        for run in np.split(ascending, np.flatnonzero(np.diff(ascending) > _GAP) + 1) if len(ascending) else ():
            try:
                for batch in log.reader.visible_rows(int(run[0]), int(run[-1]) + 1):
                    batch = batch.select(_COLUMNS)
                    batch = batch.filter(pa.array(np.isin(batch.column("offset").to_numpy(), run)))
                    parts.append(self._deliverable(batch, most_bytes))
            except OffsetOutOfRange:  # a limit has removed it
                continue
        rows = _joined(parts)
        if rows is not None and len(rows):
            found = rows.column("offset").to_numpy() + 1
            order = np.argsort(_places(seqs, found), kind="stable")
            rows = rows.take(pa.array(order)) if (np.diff(order) != 1).any() else rows
        return Window(0, 0, rows, None)

    # ---- counts ----

    def count_left(self, log: StreamLog, next_seq: int) -> int:
        """How many messages there are for the consumer from `next_seq` on. Raises CorruptLog."""
        count = self.count_until(log, next_seq, math.inf)
        assert count is not None, "it does not end before"
        return count

    def count_until(self, log: StreamLog, next_seq: int, deadline_s: float) -> int | None:
        """The same, if it is known at `deadline_s` of `time.monotonic`. If not, the next call continues the count."""
        removed = log.visibility.removed_below(log.high_watermark)
        start, end = max(next_seq - 1, log.first_readable_offset), log.high_watermark
        if start >= end:
            self.left = Left(0, end, end, 0)
            return 0
        if not self.filters:
            return max(0, log.reader.count(start, end))
        left = self.left
        is_known = left.hidden >= 0 and left.start == start and removed.count(left.start, left.end) == left.hidden
        count, upto = (
            (left.count, left.end) if is_known and left.end <= end else self._indexed(log, start, end, deadline_s)
        )
        if upto < end:
            more, upto = self._count(log, upto, end, deadline_s)
            count += more
        self.left = Left(count, start, upto, removed.count(start, upto))
        return count if upto >= end else None

    def known_left(self, log: StreamLog, next_seq: int) -> int | None:
        """The same, if it is known without reading."""
        if log.visibility.has_rules:
            return None
        if not self.filters:
            start = max(next_seq - 1, log.first_readable_offset)
            return max(0, log.reader.count(start, log.high_watermark))
        left, end = self.left, log.high_watermark
        if next_seq - 1 >= end:
            return 0
        is_known = left.hidden >= 0 and left.start == next_seq - 1
        if not is_known or log.visibility.removed.count(left.start, end) != left.hidden:
            return None
        if left.end < end:
            if (rows := self._recent(log, left.end, end)) is None:
                return None
            self.left = left = Left(left.count + len(rows), left.start, end, left.hidden)
        return left.count

    def delivered(self, log: StreamLog, next_seq: int, count: int) -> None:
        """So many of them were delivered, and the next one is this."""
        if self.window is not None:
            self.window.passed(log, next_seq)
        left, start = self.left, next_seq - 1
        if left.hidden >= 0 and left.start <= start <= left.end:
            hidden = log.visibility.removed.count(start, left.end)
            self.left = Left(max(0, left.count - count) if start < left.end else 0, start, left.end, hidden)

    def _indexed(self, log: StreamLog, start: int, end: int, deadline_s: float) -> tuple[int, int]:
        """How many there are, as the index of subjects states it, and up to where: `start` if it does not. With a
        deadline, the index is used as far as it was made before.
        """
        if end - start > _SPARSE_FROM or start <= log.first_readable_offset:
            counts = log.subjects.counts()[1] if math.isinf(deadline_s) else log.subjects.counts_at_hand(deadline_s)
            if counts is None:
                return 0, start
            table = counts.covered_by(self.filters).table
            if not len(table) or pc.min(table.column("first")).as_py() >= start:
                return pc.sum(table.column("count")).as_py() or 0, counts.end
        return 0, start

    def _count(self, log: StreamLog, start: int, end: int, deadline_s: float) -> tuple[int, int]:
        """How many of the rows that are read until then are for the consumer, and up to where they were read."""
        found = 0
        for batch in log.reader.visible_rows(start, end):
            found += pc.sum(_marks(batch.column("subject"), self.filters)).as_py() or 0
            if time.monotonic() > deadline_s:
                return found, int(batch.column("offset")[-1].as_py()) + 1
        return found, end


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch | None:
    parts = [part for part in parts if len(part)]
    if len(parts) <= 1:
        return parts[0] if parts else None
    return pa.Table.from_batches(parts).combine_chunks().to_batches()[0]


def _places(seqs: Longs, found: Longs) -> Longs:
    """Where each of the found sequences is in `seqs`."""
    order = np.argsort(seqs, kind="stable")
    places: Longs = order[np.searchsorted(seqs[order], found)]
    return places


def _marks(subjects: Any, filters: tuple[str, ...]) -> Any:
    if not any(map(has_wildcard, filters)):
        return pc.is_in(subjects, pa.array(filters, pa.string()))
    return covered(subjects, filters)


Rows: TypeAlias = tuple[Longs, Any]
"""Sequences of messages, ascending, and their subjects as an Arrow array."""


def rows_of(log: StreamLog, start: int, end: int) -> Iterator[Rows]:
    """Sequences and subjects of the visible messages in `[start, end)`."""
    for batch in log.reader.visible_rows(start, end):
        yield batch.column("offset").to_numpy() + 1, batch.column("subject")


def covers(subjects: Any, filters: tuple[str, ...]) -> Any:
    """Which of these subjects a consumer with these filters reads."""
    if not filters:
        return np.ones(len(subjects), np.bool_)
    return np.asarray(_marks(subjects, filters).to_numpy(zero_copy_only=False), np.bool_)


def missing_of(log: StreamLog, seqs: Longs) -> Longs:
    """Those of these ascending sequences that the stream does not have any more."""
    if not len(seqs):
        return seqs
    removed = log.visibility.removed_below(log.high_watermark)
    offsets = seqs - 1
    return seqs[(offsets < log.first_readable_offset) | removed.marks(offsets)]


def start_after_purge(log: StreamLog, pattern: str, filters: tuple[str, ...]) -> int | None:
    """Where the stream begins for a consumer with these filters, after the messages on the subjects of a pattern, or if
    that is empty the oldest ones, were purged. None: it does not concern the consumer.

    Source: nats-server, `purge` in `server/stream.go`. Unlike there, a consumer with several filters skips only what
    was purged.
    """
    end = log.high_watermark
    first = log.visibility.removed_below(end).next_visible(log.first_readable_offset, end) + 1
    if not pattern:
        return first
    if filters and all(includes(pattern, one) for one in filters):
        found = next_on(log, pattern, log.first_readable_offset)
        return found + 1 if found >= 0 else end + 1
    is_wider = not filters or any(includes(one, pattern) or includes(pattern, one) for one in filters)
    return first if is_wider else None


# ---- where to begin ----


def start_of(log: StreamLog, config: ConsumerConfig, *, keeps_one: bool) -> Start:
    """Args: keeps_one: the stream has one message for each subject. Raises CorruptLog.

    Source: nats-server, `selectStartingSeqNo` in `server/consumer.go`.
    """
    end = log.high_watermark
    removed = log.visibility.removed_below(end)
    first = removed.next_visible(log.first_readable_offset, end) + 1
    last, filters, skip = end, config.filters, _NONE
    seq = first
    match config.deliver_policy:
        case "last":
            seq = max((last_on(log, one) + 1 for one in filters), default=last)
        case "last_per_subject" if not keeps_one:
            skip = _last_of_each(log, filters)
            seq = int(skip[0]) if len(skip) else last
        case "by_start_time":
            seq = log.reader.offset_at(parse_timestamp_us(config.opt_start_time), log.first_readable_offset)[0] + 1
            seq = _nearer(log, filters, seq, last)
        case "new":
            seq = last + 1
        case "by_start_sequence":
            return Start(max(config.opt_start_seq, first), last + 1, skip)
    return Start(max(1, first, min(seq, last + 1)), last + 1, skip)


def _last_of_each(log: StreamLog, filters: tuple[str, ...]) -> Longs:
    _, counts = log.subjects.counts()
    found: Longs = np.sort(counts.covered_by(filters).table.column("last").to_numpy()) + 1
    return found


def _nearer(log: StreamLog, filters: tuple[str, ...], seq: int, last: int) -> int:
    """The first message of the filters from a time on, where that is nearer to the end."""
    found = [at + 1 for one in filters if (at := next_on(log, one, log.first_readable_offset)) >= 0]
    near = [at for at in found if seq <= at < last]
    return min(near) if near and min(near) > seq else seq
