"""A log with runs. A run consists of the rows of one direct append: a log has all of it or nothing, once per (producer,
batch).

Theory of operation. `append_run` writes a run as batches that all carry its mark. Each is on stable storage before the
next is written, and all become visible when the last one is. So in the process that wrote it a log never ends inside a
run. It may do so after a crash, and in a replica that copies batches as they arrive: then `unfinished_run` names that
run, and `whole_end_offset` is where it starts. A new leader cuts it off before its epoch begins.

Invariants. No segment is rolled inside a run as long as its file takes writes. The high watermark is never above
`whole_end_offset`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from natslog.arrow.row_buffers import RowBuffers
from natslog.arrow.run_marks import RunMark
from natslog.log.batch_encoder import EncodedBatch, encode_rows
from natslog.log.options import LogOptions
from natslog.log.producers import ProducerTable
from natslog.log.read_plan import ReadPlan
from natslog.log.segment import ActiveSegment
from natslog.log.stream_log import StreamLog
from natslog.log_events import event
from natslog.model import StreamSettings

logger = logging.getLogger("natslog.log")

_PLAN_BYTES = 256 * 1024 * 1024  # not read at once: small batches by the MiB, and headers of others


class RunLog(StreamLog):
    """See the module. Only the stream's writer may make the calls that write."""

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
        self.unfinished_run = self._find_unfinished_run()
        self.producers = ProducerTable(folder, self._marks)
        self.producers.open(self.log_start_offset, self.checkpointed, self.log_end_offset, is_short=self._is_short)

    # ---- positions of runs ----

    @property
    def whole_end_offset(self) -> int:
        """Where the log ends, without the part of a run that it may end in."""
        run = self.unfinished_run
        return self.log_end_offset if run is None else run.start

    def _find_unfinished_run(self) -> RunMark | None:
        """The run of the last batch, if it is incomplete. Sealed batches were committed, and so their runs are
        complete.
        """
        unsealed = self.chain.unsealed
        if not unsealed or self.log_end_offset == unsealed[-1].base_offset:
            return None
        with self._plan(self.log_end_offset - 1, self.log_end_offset) as plan:
            (header,) = plan.headers()
        return header.run if header.run is not None and header.end_offset < header.run.end else None

    def _marks(self, start: int, end: int) -> Iterator[RunMark]:
        """Of the runs whose last batch is in `[start, end)`. Raises CorruptLog."""
        while start < end:
            with self._plan(start, end) as plan:
                for header in plan.headers():
                    if header.run is not None and header.end_offset == header.run.end:
                        yield header.run
                start = plan.next_offset

    def _plan(self, start: int, end: int) -> ReadPlan:
        return self.reader.plan_read(start, end, max_bytes=_PLAN_BYTES, prove=False, uncommitted=True)

    def last_run(self, producer: str, *, is_committed: bool = False) -> RunMark | None:
        """The run that this producer appended last, or the last one that is committed.

        Raises:
            CorruptLog: the log must be read for it, and cannot be.
        """
        return self.producers.last_run(producer, self.log_start_offset, self.high_watermark, is_committed=is_committed)

    def last_runs(self, prefix: str) -> list[RunMark]:
        """The last committed runs of the producers whose names begin so. Raises as `last_run`."""
        return self.producers.last_runs(prefix, self.log_start_offset, self.high_watermark)

    # ---- writing ----

    def append_run(
        self,
        producer: str,
        batch: int,
        chunks: Iterable[RowBuffers],
        *,
        rows: int,
        size_bytes: int,
        now_us: int,
        digest: int | None = None,
    ) -> RunMark:
        """Sequences all rows as one run; it is on stable storage when this returns.

        Args:
            chunks: its rows, a batch each. If an exception is raised while they are built, the log is unchanged.
            rows, size_bytes: of all chunks. `digest`: of the rows, stored with the run.

        Raises:
            As `append`.
        """
        assert self.unfinished_run is None, "a leader has cut what was unfinished"
        if self.failure is not None:
            raise self.failure
        timestamp_us = max(now_us, self.newest_timestamp_us)
        try:
            active = self.active_for_append(size_bytes, now_us)
            run = RunMark(producer, batch, active.end_offset, active.end_offset + rows, digest)
            only_batch = active.append_run(self._encoded(run, chunks, timestamp_us))
        except OSError as error:
            raise self.failed(error) from error
        if only_batch is not None:
            self.recent.committed(only_batch)
        self._wrote(timestamp_us)
        self._note(run, run.end)
        return run

    def _encoded(self, run: RunMark, chunks: Iterable[RowBuffers], timestamp_us: int) -> Iterator[EncodedBatch]:
        offset = run.start
        for chunk in chunks:
            yield encode_rows(chunk, base_offset=offset, timestamp_us=timestamp_us, epoch=self.epoch, run=run)
            offset += chunk.rows
        assert offset == run.end, f"{offset - run.start} rows were received, but {run.end - run.start} were announced"

    def _note(self, run: RunMark | None, end_offset: int) -> None:
        """The log ends with a batch of this run, at this offset."""
        is_whole = run is None or run.end == end_offset
        self.unfinished_run = None if is_whole else run
        if run is not None and is_whole:
            self.producers.note(run, self.high_watermark)

    # ---- segments ----

    @property
    def _is_short(self) -> bool:
        """Whether the log is of one segment, which is quickly read."""
        return len(self.chain.segments) <= 1

    def _is_full(self, segment: ActiveSegment, now_us: int) -> bool:
        return self.unfinished_run is None and super()._is_full(segment, now_us)

    def _roll(self) -> ActiveSegment:
        fresh = super()._roll()
        self.store_producers()
        return fresh

    def store_producers(self) -> None:
        """Best effort: otherwise more of the log is read at the next start."""
        try:
            self.producers.store(self.high_watermark, is_short=self._is_short)
        except OSError as error:
            logger.error(
                f"{self.folder}: the last batches of producers could not be stored ({error})",
                extra=event("log.checkpoint_not_stored", path=self.folder),
            )

    def close(self) -> None:
        """As `StreamLog.close`."""
        self.store_producers()
        super().close()
