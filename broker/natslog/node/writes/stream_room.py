"""Whether a stream that refuses new messages at its limits (`discard: new`) has room for more.

Theory of operation. A commit that certainly fits takes the usual path: `fits` compares upper bounds. Otherwise
`RowRoom` decides about the rows of the commit one by one, in their order, as a stream does that takes one message at a
time. All messages that the log has count, committed or not: so a new leader does not exceed a limit either. A message
that hides an older one (by the limit per subject, or by its key) takes its place; a roll-up needs room itself, then
makes it. The rows of an envelope, and of a direct append, are accepted together or not at all, and need
room as if they hid nothing.

Source: JetStream's semantics, error number and texts (nats-server, `server/filestore.go`, `server/errors.json`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.arrow.row_buffers import RowBuffers
from natslog.errors import CorruptLog, LimitReached
from natslog.ingest.message_sizes import text_bytes
from natslog.log import RunLog
from natslog.log.message_bytes import size_rule, sizes_of
from natslog.log.rollups import ALL, SUBJECT, rollups_of
from natslog.log.stream_log import HEADER_BYTES, ROW_BYTES
from natslog.model import StreamSettings

_TEXTS = {
    "max_messages": "maximum messages exceeded",
    "max_bytes": "maximum bytes exceeded",
    "max_messages_per_subject": "maximum messages per subject exceeded",
}
_ERR_CODE = 10077
_OVERHEAD_BYTES = 2 * HEADER_BYTES  # of a commit: the headers of its batch, and of a file that it may begin


class _Row(NamedTuple):
    """A row that is in the log, or will be. `rollup`: what it removes, if anything."""

    offset: int
    subject: str
    key: bytes | None
    rollup: str


class StreamRoom:
    """Of one stream. For its writer only, except `fits`."""

    def __init__(self, log: RunLog) -> None:
        self._log = log

    def fits(self, rows: int, size_bytes: int) -> bool:
        """Whether so many rows, which take at most so many stored bytes, certainly fit. Reads no file."""
        settings, size = self._log.settings, self._log.visible_size
        counts_stored_bytes = settings.jetstream is None  # otherwise messages are counted, which may read files
        return settings.discard == "old" or (
            not _refuses_per_subject(settings)
            and (settings.max_messages is None or size.most_messages + rows <= settings.max_messages)
            and (
                settings.max_bytes is None
                or (counts_stored_bytes and size.most_bytes + size_bytes <= settings.max_bytes)
            )
        )

    def of_commit(self, rows: RowBuffers) -> RowRoom | None:
        """None where all of it fits. Raises CorruptLog: the log must be read for it, and cannot be."""
        if self._log.settings.discard == "old" or self.fits(
            rows.rows, rows.nbytes + ROW_BYTES * rows.rows + _OVERHEAD_BYTES
        ):
            return None
        try:
            return RowRoom(self._log, rows)
        except OSError as error:
            raise CorruptLog(f"the limits of the stream cannot be checked: {error}") from error

    def require(self, rows: int, size_bytes: int) -> None:
        """For a direct append. Raises LimitReached, CorruptLog."""
        log, settings = self._log, self._log.settings
        if self.fits(rows, size_bytes):
            return
        log.visibility.removed_below(log.high_watermark)
        messages = log.visible_size.most_messages
        if settings.max_messages is not None and messages + rows > settings.max_messages:
            raise _no_room_for_run("max_messages", rows, f"{messages} of {settings.max_messages} messages")
        if settings.max_bytes is not None and (stored := _bytes_from(log, 0)) + size_bytes > settings.max_bytes:
            raise _no_room_for_run("max_bytes", rows, f"{stored} of {settings.max_bytes} bytes")


class RowRoom:
    """Of the rows of one commit; asked about in ascending order."""

    def __init__(self, log: RunLog, rows: RowBuffers) -> None:
        batch = rows.to_arrow()
        self._settings, self._log = log.settings, log
        self._row_bytes = _row_bytes(rows, batch, log.settings)
        self._base = self._next = log.log_end_offset
        self._own_bytes: list[int] = []  # of the accepted rows
        log.visibility.removed_below(log.high_watermark)
        self._overhead_bytes = _OVERHEAD_BYTES if log.settings.jetstream is None else 0
        self._bytes = self._overhead_bytes + (_bytes_from(log, 0) if log.settings.max_bytes is not None else 0)
        self._messages = log.visible_size.most_messages
        self._hiding = _Hiding(log, batch) if log.visibility.rule.hides else None
        if self._hiding is not None:
            self._messages = self._hiding.committed
            for row in self._hiding.uncommitted:
                self._messages += 1
                self._make_room(self._hiding, row)

    def why_not(self, first: int, last: int) -> LimitReached | None:
        """Why rows `first` to `last`, which belong together, are refused; None: they are accepted."""
        if _refuses_per_subject(self._settings) and self._hiding is not None:
            subjects = Counter(row.subject for row in map(self._hiding.row, range(first, last + 1)) if not row.rollup)
            if any(count > self._hiding.room_on(subject) for subject, count in subjects.items()):
                return _exceeded("max_messages_per_subject")
        rows, size_bytes = last - first + 1, int(self._row_bytes[first : last + 1].sum())
        hidden = self._hiding.hidden_by(self._hiding.row(first, self._next)) if self._hiding and rows == 1 else []
        settings, more = self._settings, rows - len(hidden)
        if settings.max_messages is not None and more > 0 and self._messages + more > settings.max_messages:
            return _exceeded("max_messages")
        more = size_bytes - self._bytes_of(hidden)
        needed = (
            more if settings.jetstream is None else size_bytes
        )  # there a larger message takes no smaller one's place
        if settings.max_bytes is not None and more > 0 and self._bytes + needed > settings.max_bytes:
            return _exceeded("max_bytes")
        for row in range(first, last + 1):
            self._accept(row)
        return None

    def _accept(self, row: int) -> None:
        offset, size_bytes = self._next, int(self._row_bytes[row])
        self._own_bytes.append(size_bytes)
        self._next, self._messages, self._bytes = offset + 1, self._messages + 1, self._bytes + size_bytes
        if self._hiding is not None:
            self._make_room(self._hiding, self._hiding.row(row, offset))

    def _make_room(self, hiding: _Hiding, row: _Row) -> None:
        """Of what the row hides, which counts itself already."""
        hidden = hiding.add(row)
        self._messages -= len(hidden)
        self._bytes -= self._bytes_of(hidden)
        if row.rollup == ALL:
            self._messages, self._bytes = 1, self._overhead_bytes + self._bytes_from(row.offset)

    def _bytes_from(self, offset: int) -> int:
        if self._settings.max_bytes is None:
            return 0
        stored_bytes = _bytes_from(self._log, offset) if offset < self._base else 0
        return stored_bytes + sum(self._own_bytes[max(0, offset - self._base) :])

    def _bytes_of(self, offsets: Iterable[int]) -> int:
        if self._settings.max_bytes is None:
            return 0
        base = self._base
        return sum(_bytes_of(self._log, one) if one < base else self._own_bytes[one - base] for one in offsets)


class _Hiding:
    """What rows hide by the rule in force, before it is applied to them.

    Attributes:
        committed: how many messages are visible of those that the rule was applied to. uncommitted: the other ones, to
            be added first.
    """

    def __init__(self, log: RunLog, batch: pa.RecordBatch) -> None:
        visibility = log.visibility
        self._rule, self._removed, self._start = visibility.rule, visibility.removed, log.first_readable_offset
        self._rows = self._rows_of(batch, range(batch.num_rows))
        rows: list[_Row] = []
        for _, stored in log.reader.stored_rows(visibility.applied, log.log_end_offset):
            rows += self._rows_of(stored, stored.column("offset").to_pylist())
        subjects = {row.subject for row in (*self._rows, *rows)}
        keys = {row.key for row in (*self._rows, *rows) if row.key is not None}
        standing = visibility.standing(self._start, subjects, keys)
        self.committed = standing.visible
        self.uncommitted = [row for row in rows if row.offset >= standing.applied]
        self._of_subject, self._of_key = standing.of_subject, standing.of_key
        self._hidden: set[int] = set()

    def _rows_of(self, batch: pa.RecordBatch, offsets: Iterable[int]) -> list[_Row]:
        rollups = [""] * batch.num_rows
        for rows, kind in zip(rollups_of(batch.column("headers")), (SUBJECT, ALL), strict=True):
            for row in rows.tolist() if self._rule.rolls_up else ():
                rollups[row] = kind
        columns = (batch.column(name).to_pylist() for name in ("subject", "key"))
        return [_Row(*one) for one in zip(offsets, *columns, rollups, strict=True)]

    def room_on(self, subject: str) -> int:
        """How many messages on a subject hide no other."""
        limit = self._rule.per_subject
        assert limit is not None, "the stream has a limit per subject"
        return limit - sum(map(self._is_visible, self._of_subject.get(subject, [])))

    def row(self, at: int, offset: int = 0) -> _Row:
        """Of the commit, when it is appended there."""
        return self._rows[at]._replace(offset=offset)

    def hidden_by(self, row: _Row) -> list[int]:
        """The visible messages that this row would hide as the next one."""
        of_subject, of_key = self._passed(row)
        return [one for one in {*of_subject, *of_key} if self._is_visible(one)]

    def add(self, row: _Row) -> list[int]:
        """The row is the next one. Returns what it hides."""
        hidden = self.hidden_by(row)
        if row.rollup == SUBJECT:
            known = self._of_subject.pop(row.subject, [])
            hidden = list({*hidden, *filter(self._is_visible, known)})
        elif row.rollup == ALL:
            self._start = row.offset
        self._hidden.update(hidden)
        queue = self._of_subject.setdefault(row.subject, [])
        queue.append(row.offset)
        if (limit := self._rule.per_subject) is not None:
            del queue[:-limit]
        if self._rule.compacts and row.key is not None:
            self._of_key[row.key] = [row.offset]
        return hidden

    def _passed(self, row: _Row) -> tuple[list[int], list[int]]:
        """The oldest of its subject and of its key that are superseded."""
        queue, limit = self._of_subject.get(row.subject, []), self._rule.per_subject
        of_subject = [] if limit is None else queue[: max(0, len(queue) + 1 - limit)]
        return of_subject, self._of_key.get(row.key, []) if self._rule.compacts and row.key is not None else []

    def _is_visible(self, offset: int) -> bool:
        return offset >= self._start and offset not in self._hidden and not self._removed.is_hidden(offset)


def _bytes_from(log: RunLog, offset: int) -> int:
    """Of all visible messages from an offset on, committed or not, as the stream counts them."""
    if log.settings.jetstream is None:
        return log.visible_size.bytes(offset)
    return log.message_bytes.total(max(offset, log.first_readable_offset), log.log_end_offset)


def _bytes_of(log: RunLog, offset: int) -> int:
    if log.settings.jetstream is None:
        return log.visible_size.bytes_of_message(offset)
    return log.message_bytes.total(max(offset, log.first_readable_offset), offset + 1)


def _row_bytes(rows: RowBuffers, batch: pa.RecordBatch, settings: StreamSettings) -> npt.NDArray[np.int64]:
    """How many bytes each row takes: its texts, and a share of the rest; or as JetStream counts it."""
    if settings.jetstream is not None:
        return sizes_of(batch, size_rule(settings))
    texts = text_bytes(batch)
    rest = max(0, rows.nbytes - int(texts.sum()))
    return np.asarray(texts + ROW_BYTES - (-rest // rows.rows), np.int64)


def _refuses_per_subject(settings: StreamSettings) -> bool:
    """Whether the limit per subject refuses new messages, instead of hiding old ones."""
    return settings.jetstream is not None and settings.jetstream.discard_new_per_subject


def _exceeded(setting: str) -> LimitReached:
    return LimitReached(_TEXTS[setting], err_code=_ERR_CODE, setting=setting)


def _no_room_for_run(setting: str, rows: int, stored: str) -> LimitReached:
    return LimitReached(
        f"{_TEXTS[setting]}: the stream has {stored} ({setting}) and refuses new ones (discard new), so none of the "
        f"{rows} rows was appended. Remove messages, raise the limit, or let old messages go (discard old)",
        err_code=_ERR_CODE,
        setting=setting,
    )
