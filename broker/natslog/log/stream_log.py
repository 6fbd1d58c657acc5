"""One stream's log on one broker: a chain of segments, appended to by one owner, read by anyone.

    00000000000000000000.arrow   sealed        00000000000000005000.active   full, waits to be sealed
    00000000000000008192.active  taking commits

All calls block (they touch files) and are safe from several threads: `append`, `roll` and `close` are for the
stream's one writer; the rest may run beside it. Reading is in `reader`.

Invariants. Batches are contiguous: an offset without a row within its batch was removed, and an offset without a batch
is lost. `log_start_offset <= high_watermark <= log_end_offset`. A stream with damage in its
unsealed part, or after a failed fsync, takes no writes. A log has at least one segment from the moment it was made, and
the last one is never removed: the end of the log is always known, and a folder without a segment has lost it. The log
start is on stable storage before any file below it is removed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from natslog.arrow.batch_line import LATEST_FORMAT
from natslog.arrow.row_buffers import RowBuffers
from natslog.cluster.epochs import EpochHistory
from natslog.errors import CorruptLog, StorageFailed, StorageFull, StorageUnavailable
from natslog.log.batch_encoder import EncodedBatch, encode_plain, encode_rows
from natslog.log.chain import Positions, damage_error
from natslog.log.checked_file import make_folder
from natslog.log.checkpoints import NO_DESCRIPTORS, NO_ROOM
from natslog.log.epoch_file import read_epochs, rebuilt_epochs, write_epochs
from natslog.log.limits import StartLimits
from natslog.log.message_ids import MessageIds
from natslog.log.opening import Opening, lost_log
from natslog.log.options import LogOptions
from natslog.log.recovery import Damage
from natslog.log.segment import ActiveSegment
from natslog.log.shared import SharedLog
from natslog.log.upkeep import LogUpkeep
from natslog.log.visible_size import VisibleSize
from natslog.log_events import event
from natslog.model import Epoch, StreamSettings
from natslog.wire.frames import Frames
from natslog.wire.header_parts import HeaderParts

logger = logging.getLogger("natslog.log")

Written: TypeAlias = Callable[[EncodedBatch], bool]

FIRST_EPOCH = Epoch(1)
ROW_BYTES, HEADER_BYTES = 16, 1024
"""What is stored beside the buffers of rows: offset and timestamp of each, and the header of their batch, about."""
_NOT_DUE_WITHIN_US = 1_000_000
_STORED_AT_CLOSE_OFFSETS = 10_000
_COPIED_AT_ONCE_BYTES = 80 * 1024 * 1024  # an answer has up to 4 MiB and one batch more, of any size


class StreamLog:
    """See the module. `StreamLog(folder, …)` recovers the log on disk; the cost does not grow with sealed segments. A
    new log is on stable storage, with its first segment, before the constructor returns.

    Args:
        must_exist: this replica has held the stream before: a new log would hide that it is lost.

    Raises:
        CorruptLog: checkpoint or epoch history cannot be read, or the log must exist and does not.
        DataDirError: a newer format.
        OSError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        stream_id: str,
        settings: StreamSettings,
        options: LogOptions,
        *,
        must_exist: bool = False,
    ) -> None:
        self.shared = shared = SharedLog(folder, stream_id, settings, options, must_exist=must_exist)
        self.folder, self.stream_id, self.options = folder, stream_id, options
        self.chain, self.visibility, self.reader = shared.chain, shared.visibility, shared.reader
        self.subjects, self.newest, self.message_bytes = shared.subjects, shared.newest, shared.message_bytes
        self.recent, self.kept, self.latest_views = shared.recent, shared.kept, shared.latest_views
        self.scrub, self.compression, self.erasures = shared.scrub, shared.compression, shared.erasures
        self.ids, self.limits = MessageIds(shared), StartLimits(shared)
        self.visible_size = VisibleSize(self.chain, self.visibility.removed)
        self._room, self._checkpoints = shared.room, shared.checkpoints
        self.appended_bytes = 0  # since it was opened, about
        self.written_in_s = 0.0  # by the last append: to write its bytes and to sync them
        self._unwritten_bytes = 0  # of an append that is under way
        self._announced_end_offset = 0  # of one that is written, and is synced now
        self.epochs = self._stored_epochs = EpochHistory()
        opening = Opening(
            folder,
            stream_id,
            self.chain,
            self._checkpoints.high_watermark,
            log_start_offset=self._checkpoints.log_start_offset,
            merged=self._checkpoints.merged,
            several_bytes=self._several_bytes(),
        )
        opening.open_segments()
        self._open_epochs(must_exist)
        self.scrub.drop_below(self.log_start_offset)
        self.chain.limited_below = self._checkpoints.limited_below
        self.visibility.open(self.log_start_offset, self.high_watermark)
        shared.newest_timestamp_us, shared.written_s = opening.newest_timestamp_us, time.monotonic()
        self.upkeep = LogUpkeep(shared, self.ids, self.limits)
        self._refuse_writes_if_damaged()

    # ---- recovery ----

    def _open_epochs(self, must_exist: bool) -> None:
        """Reads the epoch history; missing data of the other files is rebuilt from the log, or written for a new
        log.
        """
        stored = read_epochs(self.folder)
        if not self.chain.segments:
            if must_exist:
                raise lost_log(self.folder)
            self._begin_or_mark_missing(stored)
            return
        # Only messages that are certainly committed are sealed. (The rest may end in a part of a run.)
        unsealed = self.chain.unsealed
        proven = unsealed[-1].base_offset if unsealed else self.chain.segments[-1].base_offset
        self._checkpoints.complete(self.log_start_offset, proven)
        if stored is not None:
            self.epochs, self._stored_epochs = stored, stored.copy()
            return
        self.epochs = rebuilt_epochs(self.folder, self.chain, has_others=self.settings.replicas > 1)
        self.store_epochs()

    def _begin_or_mark_missing(self, stored: EpochHistory | None) -> None:
        """A folder without a segment belongs to a new log, unless another file shows that there was more."""
        start = self._checkpoints.log_start_offset or 0
        epoch_start = stored.entries[-1][1] if stored is not None and stored.entries else 0
        end = max(start, self._checkpoints.high_watermark, epoch_start)
        self.epochs = self._stored_epochs = stored or EpochHistory()
        if end > 0:
            self.chain.missing_from = start
            self.chain.damages.append(Damage(self.folder, 0, 0, start, end))
            return
        self._checkpoints.create()
        self.epochs = stored or EpochHistory([(FIRST_EPOCH, 0)])
        self._stored_epochs = EpochHistory()
        self.store_epochs(sync_name=False)
        make_folder(self.folder)
        self.chain.segments.append(ActiveSegment.create(self.folder, self.stream_id, 0))

    def _refuse_writes_if_damaged(self) -> None:
        end, committed = self.chain.log_end_offset, self.checkpointed
        if not self.chain.damages and end < committed:
            last = self.chain.last
            path, position = (last.path, last.size_bytes) if last else (self.folder, 0)
            self.chain.damages.append(Damage(path, position, position, end, committed))
        if self.chain.damages:
            self.shared.failure = damage_error(self.chain.damages)
            logger.error("%s", self.shared.failure.message, extra=event("log.damaged", path=self.folder))

    # ---- its state ----

    @property
    def settings(self) -> StreamSettings:
        return self.shared.settings

    @settings.setter
    def settings(self, settings: StreamSettings) -> None:
        self.shared.adopt(settings)

    @property
    def failure(self) -> StorageFailed | CorruptLog | None:
        """Why it takes no more writes."""
        return self.shared.failure

    @property
    def epoch(self) -> Epoch:
        """Of the leader that writes now, or that wrote last."""
        return self.epochs.latest

    def positions(self) -> Positions:
        return self.chain.positions()

    @property
    def log_start_offset(self) -> int:
        return self.chain.log_start_offset

    @property
    def first_readable_offset(self) -> int:
        return self.chain.first_readable_offset

    @property
    def log_end_offset(self) -> int:
        return self.chain.log_end_offset

    @property
    def high_watermark(self) -> int:
        return self.chain.high_watermark

    @property
    def checkpointed(self) -> int:
        """The high watermark on stable storage."""
        return self._checkpoints.high_watermark

    @property
    def newest_timestamp_us(self) -> int:
        """As stored, in stream time; 0 if it is unknown."""
        return self.shared.newest_timestamp_us

    @property
    def idle_s(self) -> float:
        """How long ago the newest message was written here, or the log was opened, by a clock that never jumps."""
        return self.shared.idle_s

    # ---- writing ----

    def append(
        self,
        rows: RowBuffers,
        now_us: int,
        written: Written | None = None,
        *,
        batch_format: int = LATEST_FORMAT,
    ) -> tuple[int, int]:
        """Sequences rows as one commit and returns when they are on stable storage.

        Args:
            rows: at least one; their buffers must stay as they are until this returns.
            now_us: stream time; the stored timestamp never goes back. `batch_format`: see `arrow.batch_line`.
            written: is called with the batch when it is written, before it is synced; returns whether it was sent. If
                it was, and the sync fails, the log takes no more writes, whatever the reason: a follower may have it.

        Returns:
            The first row's offset and the stored timestamp in microseconds.

        Raises:
            StorageFull, StorageUnavailable: nothing was written; the same call may succeed later.
            StorageFailed, CorruptLog: the stream takes no writes until the broker restarts or the file is restored.
        """
        size_bytes = rows.nbytes + ROW_BYTES * rows.rows + HEADER_BYTES
        return self._append(size_bytes, now_us, partial(encode_rows, rows, batch_format=batch_format), written)

    def append_plain(
        self,
        frames: Frames,
        headers: HeaderParts | None,
        frame_bytes: int,
        now_us: int,
        written: Written | None = None,
    ) -> tuple[int, int]:
        """As `append`, of frames that are plain, and have so many bytes (`kernels_plain.survey_plain`), in the latest
        format. Only where the append is quick (`is_quick_append`).
        """
        size_bytes = frame_bytes * (1 + (headers is not None)) + ROW_BYTES * len(frames.rows) + HEADER_BYTES
        encode = partial(encode_plain, frames, headers, frame_bytes)
        return self._append(size_bytes, now_us, encode, written, is_quick=True)

    def _append(
        self,
        size_bytes: int,
        now_us: int,
        encode: Callable[..., EncodedBatch],
        written: Written | None,
        *,
        is_quick: bool = False,
    ) -> tuple[int, int]:
        if self.shared.failure is not None:
            raise self.shared.failure
        timestamp_us = max(now_us, self.shared.newest_timestamp_us)
        try:
            active = self.active_for_append(size_bytes, now_us, is_quick=is_quick)
            base_offset = active.end_offset
            encoded = encode(base_offset=base_offset, timestamp_us=timestamp_us, epoch=self.epoch)
            self._write(active, encoded, written=written)
            self.recent.committed(encoded)
        except OSError as error:
            raise self.failed(error) from error
        self._wrote(timestamp_us)
        return base_offset, timestamp_us

    def _write(self, active: ActiveSegment, *batches: EncodedBatch, written: Written | None = None) -> None:
        """One commit. `written`: as of `append`, for one batch. Raises OSError."""

        def announce() -> None:
            if written is not None and written(batches[0]):
                self._announced_end_offset = batches[0].header.end_offset

        started_s = time.perf_counter()
        active.append(*batches, written=None if written is None else announce)
        self.written_in_s, self._announced_end_offset = time.perf_counter() - started_s, 0

    @property
    def written_end_offset(self) -> int:
        """Of what is written, though perhaps not yet synced."""
        return max(self.log_end_offset, self._announced_end_offset)

    def failed(self, error: OSError) -> StorageFull | StorageUnavailable | StorageFailed:
        """Space may become free again, so that a new file can be created, and so may descriptors, without which no file
        was opened; any other failed write or fsync is final for this process. So is one of what a follower may have
        already: nothing else may be appended in its place in this epoch.
        """
        self._unwritten_bytes = 0
        is_announced, self._announced_end_offset = self._announced_end_offset > self.log_end_offset, 0
        if error.errno in NO_ROOM and not is_announced:
            return self._room.full()
        if error.errno in NO_DESCRIPTORS and not is_announced:
            return StorageUnavailable(
                f"{self.folder}: a file could not be opened ({error.strerror}), and nothing was written: raise the "
                "limit of open files of the broker (LimitNOFILE), or close connections",
                file=str(self.folder),
            )
        self.shared.failure = failure = StorageFailed(
            f"{self.folder}: writing failed ({error.strerror or error}); the stream accepts no messages until the "
            "broker is restarted and has recovered the log",
            file=str(self.folder),
        )
        logger.error("%s", failure.message, extra=event("log.write_failed", path=self.folder))
        return failure

    def _wrote(self, timestamp_us: int) -> None:
        self._unwritten_bytes = 0
        self.shared.newest_timestamp_us, self.shared.written_s = timestamp_us, time.monotonic()

    def _several_bytes(self) -> int:
        """How much may be written as several batches at once, before any of it is acked."""
        copies = self.settings.replicas > 1 or self.options.appends_copies
        return _COPIED_AT_ONCE_BYTES if copies and not self.options.ended_in_order else 0

    def active_for_append(self, incoming_bytes: int, now_us: int, *, is_quick: bool = False) -> ActiveSegment:
        self._unwritten_bytes = incoming_bytes
        try:
            self._room.require(incoming_bytes)
            self.appended_bytes += incoming_bytes
            last = self.chain.last
            if isinstance(last, ActiveSegment) and not last.failed and (is_quick or not self._is_full(last, now_us)):
                return last
            return self._roll()
        except (StorageFull, StorageUnavailable):
            self._unwritten_bytes = 0
            raise

    def _is_full(self, segment: ActiveSegment, now_us: int) -> bool:
        """Also where all of it was purged, or where it has too many small batches."""
        index, end_offset = segment.index, segment.end_offset
        if end_offset == segment.base_offset:
            return False
        if end_offset <= self.chain.purged_below or index.has_many_small(0):
            return True
        full, age_us = self.shared.full, now_us - index.max_timestamps_us[0]
        offsets = end_offset - segment.base_offset
        return segment.size_bytes >= full.size_bytes or offsets >= full.offsets or age_us >= full.age_us

    def _roll(self) -> ActiveSegment:
        """A new last segment. It replaces one that failed before it had any messages: the log's end is known
        at every moment.

        Raises:
            StorageFull, StorageUnavailable: no new file could be made; all is as before.
        """
        last = self.chain.last
        base_offset = last.end_offset if last is not None else 0
        try:
            if isinstance(last, ActiveSegment):
                last.cut_excess()
            fresh = ActiveSegment.create(self.folder, self.stream_id, base_offset)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise self._room.full() from error
            raise StorageUnavailable(
                f"{self.folder}: no new segment could be created ({error.strerror or error}); it will be tried again"
            ) from error
        with self.chain.lock:
            if isinstance(last, ActiveSegment):
                last.close()
            if last is not None and last.base_offset == base_offset:
                self.chain.segments[-1] = fresh
            else:
                self.chain.segments.append(fresh)
        if isinstance(last, ActiveSegment) and last.index.has_many_small(0):
            self.options.closed_early()
        return fresh

    def roll(self) -> None:
        """Starts a new active segment where the present one holds something, so that it can be sealed.

        Raises:
            StorageFull, StorageUnavailable: as `append`.
        """
        last = self.chain.last
        if self.failure is None and isinstance(last, ActiveSegment) and len(last.index):
            self._roll()

    # ---- epochs ----

    def begin_epoch(self, epoch: Epoch) -> None:
        """Later appends are of this epoch; durable when this returns."""
        self.epochs.cut_to(self.log_end_offset)
        self.epochs.begin(epoch, self.log_end_offset)
        self.store_epochs()

    def store_epochs(self, *, sync_name: bool = True) -> None:
        """Writes the history if it is not on disk yet: the next attempt repeats a failed one."""
        if self.epochs.entries != self._stored_epochs.entries:
            write_epochs(self.folder, self.epochs, sync_name=sync_name)
            self._stored_epochs = self.epochs.copy()

    # ---- maintenance ----

    @property
    def is_to_be_rolled(self) -> bool:
        """Whether the segment that takes commits has rows that are to be erased, or small batches that are to be
        merged: also of a follower.
        """
        last = self.chain.last
        if self.failure is not None or not isinstance(last, ActiveSegment) or not len(last.index):
            return False
        now_us = self.shared.newest_timestamp_us + int(self.idle_s * 1e6)
        if last.index.has_many_small(now_us - last.index.max_timestamps_us[0]):
            return True
        rows = self.erasures.pending() if self.erasures.is_pending else None
        return rows is not None and rows.concerns(last.base_offset, last.end_offset)

    @property
    def sealed_end_offset(self) -> int:
        """All that lies below is in sealed segments."""
        unsealed = [segment for segment in self.chain.snapshot() if isinstance(segment, ActiveSegment)]
        return unsealed[0].base_offset if unsealed else self.log_end_offset

    @property
    def has_open_rows(self) -> bool:
        """Whether there are messages in a segment that takes commits."""
        last = self.chain.last
        return self.failure is None and isinstance(last, ActiveSegment) and len(last.index) > 0

    @property
    def recovery_bytes(self) -> int:
        """The amount of this log that a start would have to read."""
        return sum(segment.recovery_bytes for segment in self.chain.unsealed)

    @property
    def stored_bytes(self) -> int:
        """What its segments take, with what is being appended now."""
        return self._unwritten_bytes + self.chain.size_bytes  # in this order: a write that ends meanwhile is in both

    def is_quick_append(self, now_us: int, epoch: Epoch | None = None) -> bool:
        """Whether the next append is one write and one sync: it makes no file, and stores no epoch. Only for the
        stream's writer.

        Args:
            epoch: of the batches that are copied, where they are.
        """
        last = self.chain.last
        return (
            isinstance(last, ActiveSegment)
            and last.is_open
            and not last.failed
            and self.shared.failure is None
            and not self._is_full(last, now_us + _NOT_DUE_WITHIN_US)
            and epoch in (None, self.epochs.latest)
        )

    def is_roll_due(self, now_us: int) -> bool:
        """Whether the active segment is full or old, so that idle streams shrink too, or holds purged messages."""
        last = self.chain.last
        if self.failure is not None or not isinstance(last, ActiveSegment):
            return False
        is_purged = len(last.index) > 0 and last.base_offset < self.chain.purged_below
        return is_purged or self._is_full(last, now_us) or self.is_to_be_rolled

    def checkpoint(self) -> None:
        """See `SharedLog.checkpoint`."""
        self.shared.checkpoint()

    def close(self) -> None:
        """Checkpoints, as far as the disk allows, and closes all files; they do not change afterwards."""
        try:
            self.checkpoint()
        except OSError as error:
            logger.error(
                f"{self.folder}: the last checkpoint could not be written ({error}); the next recovery does not need "
                "it",
                extra=event("log.checkpoint_not_stored", path=self.folder),
            )
        self._store_visibility()
        self.kept.clear()
        self.recent.clear()
        self.subjects.close()
        self.shared.is_closed = True
        with self.shared.files_lock, self.shared.checkpoint_lock:  # all other work on files has ended
            for segment in self.chain.segments:
                if isinstance(segment, ActiveSegment):
                    segment.close()

    def _store_visibility(self) -> None:
        """Best effort: otherwise more of the log is read after the next start."""
        try:
            self.visibility.store(self.log_start_offset, at_least=_STORED_AT_CLOSE_OFFSETS)
        except OSError as error:
            logger.error(
                f"{self.folder}: which messages are hidden could not be stored ({error})",
                extra=event("log.checkpoint_not_stored", path=self.folder),
            )
