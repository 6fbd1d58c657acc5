"""A log as one of several replicas: it appends a leader's batches unchanged, and removes messages that its leader does
not have.

Invariants. Committed messages are never truncated: only `discard_from` and `begin_at` drop them, when the replica no
longer counts. At every moment between two of their steps the folder opens as a shorter log.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right

from natslog.cluster.epochs import NO_EPOCH, EpochHistory
from natslog.errors import CorruptLog
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.chain import Segment
from natslog.log.checked_file import sync_folder
from natslog.log.cutting import cut_segment, readable_index
from natslog.log.repairing import FetchedBatches, rewritten
from natslog.log.run_log import RunLog
from natslog.log.scrub import frame_problem
from natslog.log.sealed import SealedSegment
from natslog.log.segment import ActiveSegment, header_bytes_of, read_batch, remove_segment_files
from natslog.log_events import event
from natslog.model import Epoch

logger = logging.getLogger("natslog.log")


class ReplicaLog(RunLog):
    """See the module. Only the current writer of the log may make these calls."""

    def append_copies(self, batches: list[EncodedBatch]) -> None:
        """A leader's batches, proven by the caller, byte for byte; on stable storage when this returns.

        Raises:
            As `append`. CorruptLog: they do not continue this log.
        """
        if self.failure is not None:
            raise self.failure
        first, last = batches[0].header, batches[-1].header
        if first.base_offset != self.log_end_offset:
            raise CorruptLog(
                f"{self.folder}: the leader sent offset {first.base_offset}, but the next offset of the log is "
                f"{self.log_end_offset}",
                start=self.log_end_offset,
                end=first.base_offset,
            )
        try:
            for header in (batch.header for batch in batches):
                self.epochs.begin(Epoch(header.epoch), header.base_offset)
            self.store_epochs()
            size_bytes = sum(batch.header.total_bytes for batch in batches)
            self._write(self.active_for_append(size_bytes, last.max_timestamp_us), *batches)
        except OSError as error:
            raise self.failed(error) from error
        self._wrote(max(self.newest_timestamp_us, last.max_timestamp_us))
        for header in (batch.header for batch in batches):
            self._note(header.run, header.end_offset)

    def begin_epoch(self, epoch: Epoch) -> None:
        """As `StreamLog.begin_epoch`; a part of a run that the log ends in is dropped before.

        Raises:
            CorruptLog, StorageFailed: as `cut_to`. OSError: the epoch could not be stored.
        """
        self._cut_unfinished_run()
        super().begin_epoch(epoch)

    def _cut_unfinished_run(self) -> None:
        run = self.unfinished_run
        if run is None or self.failure is not None:
            return
        end = self.log_end_offset
        logger.warning(
            f"{self.folder}: truncated from {end} to {run.start}: batch {run.batch} of producer {run.producer} was "
            "incomplete",
            extra=event(
                "log.truncated",
                path=self.folder,
                offset=end,
                end_offset=run.start,
                producer=run.producer,
                batch=run.batch,
            ),
        )
        self.cut_to(run.start)

    def cut_to(self, end_offset: int) -> None:
        """Removes messages that a new leader does not have; durable when this returns. Committed messages remain.

        Raises:
            CorruptLog: a batch that is to be kept in part, or beside others in a sealed segment, is damaged.
            StorageFull: no room to write the kept part of a sealed segment. StorageFailed: a file could not be cut.
        """
        assert end_offset >= self.high_watermark, "what is committed is never cut"
        try:
            self._cut(end_offset)
        except OSError as error:
            raise self.failed(error) from error

    def _cut(self, end_offset: int) -> None:
        self.erasures.cut(end_offset)  # first: what is fetched again may have erased rows
        chain = self.chain
        with self.shared.files_lock:
            while len(chain.segments) > 1 and chain.segments[-1].base_offset >= end_offset:
                with chain.lock:
                    dropped = chain.segments.pop()
                _remove(dropped)
                sync_folder(self.folder)  # one after another: the log has no hole at any moment
            if (last := chain.last) is not None:
                kept = cut_segment(last, end_offset, self.stream_id)
                if kept is not None:
                    with chain.lock:
                        chain.segments[-1] = kept
        self.epochs.cut_to(end_offset)
        self.store_epochs()
        self.unfinished_run = self._find_unfinished_run()
        self.producers.cut(end_offset)
        self.scrub.cut(end_offset)
        self._forget_messages(end_offset)
        if end_offset < self.visibility.applied:
            self.visibility.begin_again(self.log_start_offset)

    def _forget_messages(self, end_offset: int) -> None:
        """Nothing that is kept in memory of the messages from this offset on holds for those that follow there."""
        self.message_bytes.forget()
        self.subjects.cut(end_offset)
        self.kept.clear()
        self.recent.clear()
        self.reader.forget_time()

    def discard_from(self, end_offset: int) -> None:
        """Drops everything from this offset on, committed or not: it is damaged, and is fetched again from another
        replica.

        The replica must not count before it has caught up.

        Raises:
            CorruptLog, StorageFailed: as `cut_to`.
        """
        try:
            if end_offset <= self.log_start_offset:
                self._begin_at(end_offset)
                self.epochs.cut_to(end_offset)
                self.store_epochs()
            else:
                self._lower_checkpoint(end_offset)
                self.chain.committed = min(self.high_watermark, end_offset)
                self._cut(end_offset)
        except OSError as error:
            raise self.failed(error) from error
        self.chain.damages, self.shared.failure = [], None

    def begin_at(self, log_start_offset: int, epoch: Epoch) -> None:
        """Drops everything: the log starts again at this offset. The record below it, which the log does not have, was
        of `epoch` (or `NO_EPOCH`): the next leader can compare with it.

        Raises:
            StorageFull, StorageUnavailable, StorageFailed: files could not be removed or made.
        """
        try:
            self._lower_checkpoint(0)
            self.epochs = EpochHistory([] if epoch == NO_EPOCH else [(epoch, log_start_offset - 1)])
            self.store_epochs()  # first: old files are below the leader's start, and are removed later
            self._begin_at(log_start_offset)
        except OSError as error:
            raise self.failed(error) from error

    def _begin_at(self, log_start_offset: int) -> None:
        """The start is stored first: from then on, opening completes this operation after a crash."""
        self.erasures.cut(0)
        self._lower_checkpoint(0)
        with self.shared.files_lock:
            self._checkpoints.store_log_start(log_start_offset)
            fresh = ActiveSegment.create(self.folder, self.stream_id, log_start_offset)
            with self.chain.lock:
                replaced, self.chain.segments = self.chain.segments, [fresh]
                self.chain.missing_from = None
            for segment in reversed(replaced):
                if segment.base_offset != log_start_offset:
                    _remove(segment)
                elif isinstance(segment, ActiveSegment):
                    segment.close()
                else:
                    segment.path.unlink(missing_ok=True)
            sync_folder(self.folder)
        self.chain.committed, self.chain.damages, self.shared.failure = log_start_offset, [], None
        self.unfinished_run = None
        self.producers.cut(log_start_offset)
        self.scrub.cut(0)
        self._forget_messages(0)
        self.visibility.begin_again(log_start_offset)

    def _lower_checkpoint(self, high_watermark: int) -> None:
        with self.shared.checkpoint_lock:
            self._checkpoints.lower_high_watermark(high_watermark)

    def replace_sealed(self, segment: SealedSegment, end_offset: int, fetched: FetchedBatches) -> bool:
        """Repairs a sealed segment with batches of another replica; durable when this returns. Readers that have the
        damaged file open continue to read it.

        Args:
            end_offset: where the next segment begins. `fetched`: all that is damaged, in whole batches.

        Returns:
            False: the log was closed, or the segment removed meanwhile.

        Raises:
            StorageFull: no room. CorruptLog: another batch of it is damaged. OSError: it could not be written. In all
            cases the damaged segment is unchanged.
        """
        with self.shared.files_lock:
            if self.shared.is_closed or not self.chain.is_current(segment):
                return False
            self._room.require_now(segment.size_bytes + fetched.size_bytes)
            beside = rewritten(segment, end_offset, self.stream_id, fetched)
            fresh = SealedSegment(beside, segment.base_offset, beside.stat().st_size)
            self.chain.replace_with_file([segment], fresh)
            sync_folder(self.folder)
        self.visibility.repaired(self.log_start_offset)
        return True

    def newest_before(self, offset: int) -> int:
        """The timestamp of the newest message below an offset, as far as it can be read; 0 if none can."""
        for segment in reversed(self.chain.snapshot()):
            try:
                index = segment.index
            except (CorruptLog, OSError):
                continue
            if (below := bisect_right(index.end_offsets, offset)) > 0:
                return index.max_timestamps_us[below - 1]
        return 0

    def first_damaged_offset(self) -> int | None:
        """Where the log must be cut so that nothing damaged is left; reads all of it. None if nothing is damaged."""
        starts = [known.start_offset for known in self.chain.damages]
        for segment in list(self.chain.segments):
            bad = _first_bad_offset(segment)
            if bad is not None:
                return min([bad, *starts])
        return min(starts, default=None)


def _remove(segment: Segment) -> None:
    if isinstance(segment, ActiveSegment):
        segment.close()
    remove_segment_files(segment.path)


def _first_bad_offset(segment: Segment) -> int | None:
    """The base offset of the first damaged batch; if a footer is damaged, the end of the intact batches. Of a sealed
    segment of which only other bytes are damaged: its base offset.
    """
    try:
        index = readable_index(segment)
    except CorruptLog:
        return segment.base_offset
    header_bytes: dict[int, int] = {}
    fd = os.open(segment.path, os.O_RDONLY)
    try:
        for at in range(len(index)):
            message = read_batch(fd, index[at], segment.path)
            header_bytes[index.positions[at]] = header_bytes_of(message)
    except CorruptLog:
        return index.base_offsets[at]
    finally:
        os.close(fd)
    if isinstance(segment, ActiveSegment):
        return None
    if segment.has_footer():
        return segment.base_offset if frame_problem(segment, index, header_bytes) else None
    return index.end_offsets[-1] if len(index) else segment.base_offset
