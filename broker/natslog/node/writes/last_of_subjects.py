"""The newest visible message of a subject, as the leader has appended it, committed or not.

Theory of operation. Of committed messages the log has an index of subjects (`log.visibility`), which is made with the
first request and stored. Behind it is a small table of the rows that were appended since, kept from the first request
on. A row of the table that is hidden is committed, and so are all before it: then the index has the answer.

Invariant. The table has all rows from a committed offset to the end of the log. For the log's writer only.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from natslog.arrow.row_buffers import RowBuffers
from natslog.log import RunLog
from natslog.log.newest import NewestRows, Offsets, Texts
from natslog.log.rollups import rollups_of
from natslog.model import Epoch

_ROWS_AT_MOST = 1 << 18


class LastOfSubjects:
    """See the module."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._recent: NewestRows | None = None
        self._start = self._end = 0
        self._rolled_up_below = 0  # by a message that removes all older ones; it may be uncommitted

    def appended(self, rows: RowBuffers, base_offset: int) -> None:
        """These rows were appended there. Without requests so far nothing is kept."""
        if self._recent is not None and self._end == base_offset:
            offsets = np.arange(base_offset, base_offset + rows.rows, dtype=np.int64)
            self._add(self._recent, self._log.epoch, rows.to_arrow(), offsets)
            self._end += rows.rows

    def last_sequence(self, subject: str) -> int:
        """The sequence (offset plus one) of the newest visible message; 0 if there is none.

        Raises:
            CorruptLog: the log must be read for it, and cannot be.
        """
        log = self._log
        offset = self._caught_up().newest_of_text(subject)
        if offset < log.first_readable_offset or log.visibility.removed.is_hidden(offset):
            offset = log.visibility.newest_of_subject(
                subject, log.high_watermark, log.log_start_offset, log.first_readable_offset
            )
        return offset + 1 if offset >= self._rolled_up_below else 0

    def _caught_up(self) -> NewestRows:
        """With the rows that were appended in another way, as direct appends are."""
        log = self._log
        is_large = log.log_end_offset - self._start > _ROWS_AT_MOST
        if self._recent is None or self._end > log.log_end_offset or is_large:
            self._recent = NewestRows()
            self._start = self._end = log.high_watermark
        for epoch, batch in log.reader.stored_rows(self._end, log.log_end_offset):
            self._add(self._recent, Epoch(epoch), batch, batch.column("offset").to_numpy())
        self._end = log.log_end_offset
        return self._recent

    def _add(self, recent: NewestRows, epoch: Epoch, batch: pa.RecordBatch, offsets: Offsets) -> None:
        recent.add(Texts.of(batch.column("subject")), offsets)
        if self._log.visibility.rule_of(epoch).rolls_up:
            _, of_all = rollups_of(batch.column("headers"))
            self._rolled_up_below = int(offsets[of_all[-1]]) if len(of_all) else self._rolled_up_below
