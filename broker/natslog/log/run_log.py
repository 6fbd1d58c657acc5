"""A log that takes runs: the rows of one direct append, there whole or not at all, and once for each (producer, batch).

Theory of operation. A run is written by `append_run` as batches that all carry its mark, each on stable storage before
the next is written, and shown when the last one is. So in the process that wrote it a log never ends inside a run. It
may do so after a crash, and in a replica that copies batches as they come: `tail_run` says of what run the last batch
is, `whole_end_offset` how far the log goes without an unfinished one, which is cut off by who takes office.

Invariants. No segment is rolled inside a run as long as its file takes writes. The high watermark is never above
`whole_end_offset`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from natslog.arrow import ipc
from natslog.arrow.row_buffers import RowBuffers
from natslog.arrow.run_marks import RunMark
from natslog.log.batch_encoder import EncodedBatch, encode_rows
from natslog.log.producers import ProducerTable
from natslog.log.segment import ActiveSegment, damage, read_at
from natslog.log.stream_log import LogOptions, StreamLog
from natslog.model import StreamSettings

logger = logging.getLogger("natslog.log")

_PLAN_BYTES = 256 * 1024 * 1024  # not read at once: a header at a time


class RunLog(StreamLog):
    """See the module. The calls that write are for the stream's one writer."""

    def __init__(
        self,
        folder: Path,
        stream_id: str,
        settings: StreamSettings,
        options: LogOptions,
        *,
        must_exist: bool = False,
    ) -> None:
        super().__init__(folder, stream_id, settings, options, must_exist=must_exist)
        self.tail_run = self._mark_of_last_batch()
        self.producers = ProducerTable(folder, self._marks)
        self.producers.open(self.log_start_offset, self.log_end_offset, is_short=len(self.chain.segments) <= 1)

    # ---- where runs stand ----

    @property
    def is_inside_run(self) -> bool:
        """Whether the rest of the last batch's run is still to come."""
        return self.tail_run is not None and self.log_end_offset < self.tail_run.end

    @property
    def whole_end_offset(self) -> int:
        """Where the log ends, but for a run that it holds a part of."""
        run = self.tail_run
        return run.start if run is not None and self.log_end_offset < run.end else self.log_end_offset

    def _mark_of_last_batch(self) -> RunMark | None:
        """Of unsealed segments: what is sealed was committed, and so is no part of an unfinished run."""
        for segment in self.chain.unsealed:
            if count := len(segment.index):
                entry = segment.index[count - 1]
                fd = os.open(segment.path, os.O_RDONLY)
                try:
                    header = ipc.proven_header(read_at(fd, entry.position, ipc.MAX_HEADER_BYTES))
                finally:
                    os.close(fd)
                if header is None:
                    raise damage(segment.path, entry, "has a damaged header")
                return header.run
        return None

    def _marks(self, start: int, end: int) -> Iterator[RunMark]:
        """Of the batches that cover `[start, end)`, each run's once. Raises CorruptLog."""
        while start < end:
            with self.reader.plan_read(start, end, max_bytes=_PLAN_BYTES, prove=False, uncommitted=True) as plan:
                for header in plan.headers():
                    if header.run is not None and header.end_offset == header.run.end:
                        yield header.run
                start = plan.next_offset

    def committed_batch(self, producer: str) -> RunMark | None:
        """What this producer appended last; it is committed once HW has reached its end.

        Raises:
            CorruptLog: the log cannot be read, so nobody knows.
        """
        self.producers.settle(self.high_watermark)
        return self.producers.find(producer, self.log_start_offset)

    # ---- writing ----

    def append(self, rows: RowBuffers, now_us: int) -> tuple[int, int]:
        """As `StreamLog.append`."""
        appended = super().append(rows, now_us)
        self.tail_run = None
        return appended

    def append_run(
        self, producer: str, batch: int, chunks: Iterable[RowBuffers], *, rows: int, size_bytes: int, now_us: int
    ) -> RunMark:
        """Sequences all rows as one run; it is on stable storage when this returns.

        Args:
            chunks: its rows, a batch each. Whatever is raised while they are made leaves the log as it was.
            rows, size_bytes: of all chunks.

        Raises:
            As `append`.
        """
        assert not self.is_inside_run, "who leads has cut what was unfinished"
        if self.failure is not None:
            raise self.failure
        timestamp_us = max(now_us, self._last_timestamp_us)
        try:
            active = self.active_for_append(size_bytes, now_us)
            run = RunMark(producer, batch, active.end_offset, active.end_offset + rows)
            active.append_run(self._encoded(run, chunks, timestamp_us))
        except OSError as error:
            raise self.failed(error) from error
        self._wrote(timestamp_us)
        self._note(run, run.end)
        return run

    def _encoded(self, run: RunMark, chunks: Iterable[RowBuffers], timestamp_us: int) -> Iterator[EncodedBatch]:
        offset = run.start
        for chunk in chunks:
            yield encode_rows(chunk, base_offset=offset, timestamp_us=timestamp_us, epoch=self.epoch, run=run)
            offset += chunk.rows
        assert offset == run.end, f"{offset - run.start} rows came, {run.end - run.start} were announced"

    def _note(self, run: RunMark | None, end_offset: int) -> None:
        """The log's last batch is of this run, and ends there."""
        self.tail_run = run
        if run is not None:
            self.producers.note(run, end_offset)
            self.producers.settle(self.high_watermark)

    # ---- segments ----

    def _is_full(self, segment: ActiveSegment, now_us: int) -> bool:
        return not self.is_inside_run and super()._is_full(segment, now_us)

    def _roll(self) -> ActiveSegment:
        fresh = super()._roll()
        self.store_producers(though_empty=len(self.chain.segments) > 1)
        return fresh

    def store_producers(self, *, though_empty: bool = False) -> None:
        """Best effort: without it more of the log is read at the next start."""
        try:
            self.producers.store(self.high_watermark, though_empty=though_empty)
        except OSError as error:
            logger.error("%s: what producers committed could not be stored (%s)", self.folder, error)

    def close(self) -> None:
        """As `StreamLog.close`."""
        self.store_producers()
        super().close()
