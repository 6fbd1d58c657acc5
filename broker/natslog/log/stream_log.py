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
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from natslog.arrow import ipc
from natslog.arrow.batch_line import LATEST_FORMAT
from natslog.arrow.row_buffers import RowBuffers
from natslog.cluster.epochs import EpochHistory
from natslog.errors import CorruptLog, StorageFailed, StorageFull, StorageUnavailable
from natslog.log import sealed as sealing
from natslog.log.batch_encoder import EncodedBatch, encode_plain, encode_rows
from natslog.log.batch_index import BatchEntry
from natslog.log.chain import Segment, SegmentChain, damage_error
from natslog.log.checked_file import make_folder, sync_folder
from natslog.log.checkpoints import NO_DESCRIPTORS, NO_ROOM, Checkpoints
from natslog.log.compression import CompressedSizes
from natslog.log.epoch_file import read_epochs, rebuilt_epochs, write_epochs
from natslog.log.erasing import ErasedRows, Erasures, RewrittenFile, due_segment, erased, is_in_unsealed
from natslog.log.kept_messages import KeptMessages
from natslog.log.latest_views import LatestViews
from natslog.log.limits import StartLimits
from natslog.log.log_reader import LogReader
from natslog.log.message_bytes import MessageBytes, size_rule
from natslog.log.newest import NewestRows, Offsets, Texts
from natslog.log.opening import Opening, check_folder, lost_log
from natslog.log.recent_commits import RecentCommits, RecentRoom
from natslog.log.recovery import Damage
from natslog.log.removed import offset_range, offset_set
from natslog.log.rewriting import droppable_offsets, due_segments, older_messages, pending_rows, rewrite
from natslog.log.room import DiskRoom, StoreLimit
from natslog.log.scrub import ScrubProgress
from natslog.log.sealed import SealedSegment
from natslog.log.segment import SEALED_SUFFIX, ActiveSegment, read_batch, remove_segment_files
from natslog.log.small_segments import Full, SmallSegments, has_many_small_batches, write_merged
from natslog.log.stored_ids import KeptIds, NewestIds, StoredIds, as_damage, ids_in, is_older, newest_ids
from natslog.log.subject_counts import KeptCounts
from natslog.log.subject_index import SubjectIndex
from natslog.log.visibility import UNKNOWN, Visibility
from natslog.log.visible_size import VisibleSize
from natslog.log_events import event
from natslog.model import Epoch, StreamSettings
from natslog.wire.frames import Frames
from natslog.wire.outgoing import taken

logger = logging.getLogger("natslog.log")

Written: TypeAlias = Callable[[EncodedBatch], bool]

FIRST_EPOCH = Epoch(1)
ROW_BYTES, HEADER_BYTES = 16, 1024
"""What is stored beside the buffers of rows: offset and timestamp of each, and the header of their batch, about."""
_SMALLEST_ROLL_BYTES = 64 * 1024
_ROLLS_PER_LIMIT = 8
_NOT_DUE_WITHIN_US = 1_000_000
_STORED_AT_CLOSE_OFFSETS = 10_000
_READ_AT_ONCE_BYTES, _READ_FIRST_BYTES = 8 * 1024 * 1024, 256 * 1024
_COPIED_AT_ONCE_BYTES = 80 * 1024 * 1024  # an answer has up to 4 MiB and one batch more, of any size


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Settings of the broker for all its logs. Sizes in bytes, ages in seconds.

    Attributes:
        ended_in_order: the broker's last life ended gracefully, so that nothing can be torn.
        store: what all logs of the broker may take together. kept_counts: what was counted last, of all of them.
        recent_room: what their last commits may take in memory.
        appends_copies: several batches may have been written at once, also without other replicas: by an import.
        stores_scrub: whether the progress of scrubbing and the sizes of compressed segments are stored.
        merges_segments: whether small sealed segments become one.
        closed_early: called where a segment is closed because it has many small batches; from any thread.
    """

    segment_bytes: int = 128 * 1024 * 1024
    segment_age_s: float = 3600.0
    min_free_bytes: int = 64 * 1024 * 1024
    ended_in_order: bool = False
    store: StoreLimit = field(default_factory=lambda: StoreLimit(None))
    kept_counts: KeptCounts = field(default_factory=KeptCounts)
    recent_room: RecentRoom = field(default_factory=RecentRoom)
    stores_scrub: bool = True
    merges_segments: bool = True
    closed_early: Callable[[], None] = lambda: None
    appends_copies: bool = False


class _Closed(Exception):
    """The log was closed while a segment of it was being sealed."""


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
        self.folder = folder
        self.stream_id = stream_id
        self.settings = settings
        self.options = options
        self.failure: StorageFailed | CorruptLog | None = None
        self.chain = SegmentChain()
        self.visibility = Visibility(folder, self.stored_rows, lambda: self.log_start_offset)
        self.reader = LogReader(self.chain, self.visibility)
        subject_rows = partial(self.stored_rows, columns=("offset", "subject"))
        self.subjects = SubjectIndex(folder, self.chain, self.visibility, subject_rows, options.kept_counts)
        self._limits = StartLimits(self.chain, self.visibility.removed, self._start_within)
        self.visible_size = VisibleSize(self.chain, self.visibility.removed)
        self._message_bytes = MessageBytes(self.chain, self.visibility.removed)
        self._message_bytes_lock = threading.Lock()
        self._full_by: tuple[StreamSettings | None, Full] = (None, Full(1, 1, 1))
        self.recent = RecentCommits(options.recent_room)
        self._known_time = -1, 0
        self._is_closed = False
        self._seal_lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()
        self._limits_lock = threading.Lock()
        self._room = DiskRoom(folder, options.min_free_bytes, options.store)
        self.appended_bytes = 0  # since it was opened, about
        self.written_in_s = 0.0  # by the last append: to write its bytes and to sync them
        self._unwritten_bytes = 0  # of an append that is under way
        self._announced_end_offset = 0  # of one that is written, and is synced now
        check_folder(folder, must_exist=must_exist)
        self._checkpoints = Checkpoints(folder)
        self.scrub = ScrubProgress(folder, is_stored=options.stores_scrub)
        self.compression = CompressedSizes(folder, is_stored=options.stores_scrub)
        self.erasures = Erasures(folder)
        self.kept = KeptMessages()
        self.kept_ids = KeptIds(folder)
        self.latest_views = LatestViews(self.latest, lambda: self.erasures.serial)
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
        self._small_segments = SmallSegments(self.chain, self.compression)
        self._open_epochs(must_exist)
        self.scrub.drop_below(self.log_start_offset)
        self.chain.limited_below = self._checkpoints.limited_below
        self.visibility.open(self.log_start_offset, self.high_watermark)
        self._last_timestamp_us = opening.newest_timestamp_us
        self._written_s = time.monotonic()
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
        self._checkpoints.complete(self.log_start_offset, self._proven_high_watermark())
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

    def _proven_high_watermark(self) -> int:
        """The end of the messages that are certainly committed: only these are sealed. (The rest may end in a part of a
        run.)
        """
        unsealed = self.chain.unsealed
        return unsealed[-1].base_offset if unsealed else self.chain.segments[-1].base_offset

    def _refuse_writes_if_damaged(self) -> None:
        end, committed = self.chain.log_end_offset, self.checkpointed
        if not self.chain.damages and end < committed:
            last = self.chain.last
            path, position = (last.path, last.size_bytes) if last else (self.folder, 0)
            self.chain.damages.append(Damage(path, position, position, end, committed))
        if self.chain.damages:
            self.failure = damage_error(self.chain.damages)
            logger.error("%s", self.failure.message, extra=event("log.damaged", path=self.folder))

    # ---- positions ----

    @property
    def epoch(self) -> Epoch:
        """Of the leader that writes now, or that wrote last."""
        return self.epochs.latest

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
        return self._last_timestamp_us

    @property
    def idle_s(self) -> float:
        """How long ago the newest message was written here, or the log was opened, by a clock that never jumps."""
        return time.monotonic() - self._written_s

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
        self, frames: Frames, frame_bytes: int, now_us: int, written: Written | None = None
    ) -> tuple[int, int]:
        """As `append`, of frames that are plain, and have so many bytes (`kernels_plain.survey_plain`), in the latest
        format. Only where the append is quick (`is_quick_append`).
        """
        size_bytes = frame_bytes + ROW_BYTES * len(frames.rows) + HEADER_BYTES
        return self._append(size_bytes, now_us, partial(encode_plain, frames, frame_bytes), written, is_quick=True)

    def _append(
        self,
        size_bytes: int,
        now_us: int,
        encode: Callable[..., EncodedBatch],
        written: Written | None,
        *,
        is_quick: bool = False,
    ) -> tuple[int, int]:
        if self.failure is not None:
            raise self.failure
        timestamp_us = max(now_us, self._last_timestamp_us)
        try:
            active = self.active_for_append(size_bytes, now_us, is_quick=is_quick)
            base_offset = active.end_offset
            encoded = encode(base_offset=base_offset, timestamp_us=timestamp_us, epoch=self.epoch)
            if written is None:
                self._write(active, encoded)
            else:
                self._write_and_announce(active, encoded, written)
            self.recent.committed(encoded)
        except OSError as error:
            raise self.failed(error) from error
        self._wrote(timestamp_us)
        return base_offset, timestamp_us

    def _write(self, active: ActiveSegment, *batches: EncodedBatch, written: Callable[[], None] | None = None) -> None:
        """One commit. Raises OSError."""
        started_s = time.perf_counter()
        active.append(*batches, written=written)
        self.written_in_s = time.perf_counter() - started_s

    def _write_and_announce(self, active: ActiveSegment, encoded: EncodedBatch, written: Written) -> None:
        """Raises OSError."""

        def announce() -> None:
            if written(encoded):
                self._announced_end_offset = encoded.header.end_offset

        self._write(active, encoded, written=announce)
        self._announced_end_offset = 0

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
        self.failure = StorageFailed(
            f"{self.folder}: writing failed ({error.strerror or error}); the stream accepts no messages until the "
            "broker is restarted and has recovered the log",
            file=str(self.folder),
        )
        logger.error("%s", self.failure.message, extra=event("log.write_failed", path=self.folder))
        return self.failure

    def _wrote(self, timestamp_us: int) -> None:
        self._unwritten_bytes = 0
        self._last_timestamp_us, self._written_s = timestamp_us, time.monotonic()

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
        if end_offset <= self.chain.purged_below or has_many_small_batches(index, 0):
            return True
        offsets, age_us = end_offset - segment.base_offset, now_us - index.max_timestamps_us[0]
        return self._full.share(segment.size_bytes, offsets, age_us) >= 1

    @property
    def _full(self) -> Full:
        """By bytes, offsets or age; limits of the stream roll earlier, so that retention can work in whole segments."""
        settings = self.settings
        if self._full_by[0] is settings:
            return self._full_by[1]
        roll_bytes = self.options.segment_bytes
        if settings.max_bytes is not None:
            roll_bytes = min(roll_bytes, max(_SMALLEST_ROLL_BYTES, settings.max_bytes // _ROLLS_PER_LIMIT))
        roll_age_s = min(self.options.segment_age_s, (settings.max_age_s or 1e12) / _ROLLS_PER_LIMIT)
        roll_rows = max(1, (settings.max_messages or 2**62) // _ROLLS_PER_LIMIT)
        full = Full(roll_bytes, roll_rows, roll_age_s * 1_000_000)
        self._full_by = settings, full
        return full

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
        if isinstance(last, ActiveSegment) and has_many_small_batches(last.index, 0):
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

    def needs_upkeep(self) -> bool:
        """Whether there is something to checkpoint, to seal, or perhaps to drop. Touches no file."""
        settings, segments = self.settings, self.chain.segments
        has_limit = (settings.max_age_s, settings.max_bytes, settings.max_messages) != (None, None, None)
        has_limit = has_limit or self.first_readable_offset > self.log_start_offset
        has_work = self.high_watermark > self.checkpointed or self.chain.has_unsealed
        has_work = has_work or self.chain.limited_below > self._checkpoints.limited_below
        has_work = has_work or (self.options.merges_segments and self._small_segments.may_be_due)
        visibility = self.visibility
        has_rows = visibility.has_rules and visibility.applied < self.high_watermark
        has_rows = has_rows or bool(visibility.removed) or self.erasures.is_pending
        return has_work or has_rows or bool(self.kept_ids.serial) or (has_limit and len(segments) > 1)

    @property
    def is_to_be_rolled(self) -> bool:
        """Whether the segment that takes commits has rows that are to be erased, or small batches that are to be
        merged: also of a follower.
        """
        last = self.chain.last
        if self.failure is not None or not isinstance(last, ActiveSegment) or not len(last.index):
            return False
        now_us = self._last_timestamp_us + int(self.idle_s * 1e6)
        if has_many_small_batches(last.index, now_us - last.index.max_timestamps_us[0]):
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
            and self.failure is None
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

    def seal_next(self, pause: Callable[[], None] = lambda: None) -> bool:
        """Seals the oldest full segment, if there is one; True if it did.

        Args:
            pause: called after every few MiB of work; may sleep. Where the log is closed then, the work ends there.

        Raises:
            StorageFull: no room for the sealed file; to be tried again later.
            CorruptLog, OSError: it cannot be sealed; it is read as it is, and later segments go on.
        """

        def seal(go_on: Callable[[], None]) -> bool:
            segment = self.chain.oldest_unsealed()
            if segment is None:
                return False
            self._room.require_now(segment.size_bytes)
            try:
                self._seal(segment, go_on)
            except (CorruptLog, OSError) as error:
                segment.unsealable = not (isinstance(error, OSError) and error.errno in NO_ROOM)
                raise
            return True

        return self._write_again(seal, pause)

    def _write_again(self, work: Callable[[Callable[[], None]], bool], pause: Callable[[], None]) -> bool:
        """What `work` returns, which writes a segment anew; it calls what it is given as `seal_next` calls `pause`.
        False, and nothing is done, where the log is damaged; nothing is changed where it is closed meanwhile.

        Raises:
            StorageFull: no room.
        """

        def go_on() -> None:
            pause()
            if self._is_closed:
                raise _Closed

        with self._seal_lock:
            if self.chain.damages or self._is_closed:
                return False
            try:
                return work(go_on)
            except _Closed:
                return False  # what was begun is removed when the log is opened
            except OSError as error:
                raise (self._room.full() if error.errno in NO_ROOM else error) from error

    def _seal(self, segment: ActiveSegment, pause: Callable[[], None]) -> None:
        written = sealing.write_sealed(segment, self.stream_id, self.settings.compression, pause)
        target = segment.path.with_suffix(SEALED_SUFFIX)
        self.checkpoint()  # before: of smaller files, the start by limits would be lower
        os.replace(written.path, target)
        sealed = SealedSegment(target, segment.base_offset, target.stat().st_size)
        with self.chain.lock:
            at = next(at for at, one in enumerate(self.chain.segments) if one is segment)
            self.chain.segments[at] = sealed
        sync_folder(self.folder)
        segment.close()
        segment.path.unlink(missing_ok=True)
        self.compression.sealed(self.chain, segment.base_offset, written.uncompressed_bytes)

    def merge_next(self, pause: Callable[[], None] = lambda: None) -> bool:
        """Writes small sealed neighbours as one segment, if enough of them are there (`log.small_segments`); True if
        it did.

        Args:
            pause: as in `seal_next`.

        Raises:
            As `seal_next`.
        """

        def merge(go_on: Callable[[], None]) -> bool:
            parts = self._small_segments.next(self._full)
            if not parts:
                return False
            self._room.require_now(sum(part.size_bytes for part in parts))
            fresh, uncompressed_bytes = write_merged(parts, self.stream_id, self.settings.compression, go_on)
            self._replace_by_merged(parts, fresh)
            self.compression.sealed(self.chain, fresh.base_offset, uncompressed_bytes)
            return True

        is_due = self.options.merges_segments and self._small_segments.may_be_due and self.failure is None
        return is_due and self._write_again(merge, pause)

    def _replace_by_merged(self, parts: list[SealedSegment], fresh: SealedSegment) -> None:
        offsets = parts[0].base_offset, parts[-1].end_offset
        with self._checkpoint_lock:
            self._checkpoints.store_merged(self.high_watermark, self.chain.limited_below, offsets)

        def replace() -> Segment:
            with self.chain.lock:  # with the name, so that no reader opens the new file by the old index
                os.replace(fresh.path, parts[0].path)
                fresh.path = parts[0].path
                at = next(at for at, one in enumerate(self.chain.segments) if one is parts[0])
                self.chain.segments[at : at + len(parts)] = [fresh]
            return fresh

        self.subjects.merge(parts, replace)
        sync_folder(self.folder)
        for part in parts[1:]:
            remove_segment_files(part.path)
        sync_folder(self.folder)

    def enforce_retention(self) -> int:
        """Moves the logical start, and removes segments below it; returns how many."""
        self.advance_start()
        return self.drop_before(self.first_readable_offset)

    def drop_before(self, offset: int) -> int:
        """Removes the segments that lie wholly below an offset. Returns how many.

        The log start is on stable storage before. The last segment stays, and what is not known to be committed here.

        Raises:
            OSError: the start could not be stored, and nothing was removed; or a file could not be removed.
        """
        with self._seal_lock:  # until the files are gone: who closes the log waits for that
            if self._is_closed:
                return 0
            count = self._count_below(offset)
            self._drop_first(count)
        return count

    def advance_start(self) -> None:
        """Of the leader: the logical start moves so far that what follows is within the limits of messages and bytes,
        where old messages make room for new ones.

        Raises:
            CorruptLog: the index of the segment at the start is damaged.
        """
        settings = self.settings
        if settings.discard == "old" and (settings.max_messages, settings.max_bytes) != (None, None):
            with self._limits_lock:
                self._limits.advance(settings)

    def expire_by_age(self, now_us: int) -> int | None:
        """Of the leader: the logical start moves behind the messages that are past the age limit. Returns the timestamp
        of the first one after it; None if there is none.

        Args:
            now_us: the time by which messages expire.

        Raises:
            CorruptLog: the place to look is damaged.
        """
        age_s = self.settings.age_limit_s
        past_us = now_us - int(age_s * 1e6) if age_s is not None else 0
        offset, timestamp_us = self.reader.offset_at(past_us, self.first_readable_offset)
        self.limit_start(offset)
        return timestamp_us

    def _count_below(self, offset: int) -> int:
        """How many segments lie wholly below an offset, and are known to be committed; never the last one."""
        following = [segment.base_offset for segment in self.chain.segments[1:]]
        return bisect_right(following, min(offset, self.high_watermark))

    def _drop_first(self, count: int) -> None:
        """Removes so many segments, under the lock of sealing. The new log start is on stable storage before."""
        if not count:
            return
        for segment, following in pairwise(self.chain.segments[: count + 1]):
            self._keep_ids(segment, following.base_offset)
        self._checkpoints.store_log_start(self.chain.segments[count].base_offset)
        with self.chain.lock:
            dropped = self.chain.segments[:count]
            del self.chain.segments[:count]
            self.chain.missing_from = None
        self.scrub.drop_below(self.log_start_offset)
        self.visibility.removed.drop_below(self.log_start_offset)
        for segment in dropped:
            if isinstance(segment, ActiveSegment):
                segment.close()
            remove_segment_files(segment.path)
        sync_folder(self.folder)

    def _keep_ids(self, segment: Segment, end_offset: int) -> None:
        """Before rows of a segment go: their message ids, while a repeated message may be recognised by them."""
        oldest_us = self._oldest_id_us
        if not self.settings.dedupe_window_s or is_older(segment, oldest_us):
            return
        found, damage = ids_in(self.chain, self.reader, segment.base_offset, end_offset)
        if damage is not None:
            self._report_lost_ids(damage)
        try:
            self.kept_ids.add(found, oldest_us)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._report_lost_ids(error)  # what is removed makes room

    def _report_lost_ids(self, error: Exception) -> None:
        logger.error(
            "%s: message ids of rows that are removed could not be kept, so that a repeated message may be stored "
            "again: %s",
            self.folder,
            error,
            extra=event("log.ids_lost", path=self.folder),
        )

    @property
    def _oldest_id_us(self) -> int:
        """Ids of older messages are not needed."""
        return self.newest_timestamp_us - int(self.settings.dedupe_window_s * 1_000_000)

    def newest_ids(self, window_s: float) -> NewestIds:
        """To fill a deduplication window of this length; committed or not."""
        oldest_us = self.newest_timestamp_us - int(window_s * 1_000_000)
        return newest_ids(self.chain, self.reader, self.kept_ids, oldest_us)

    def ids_from(self, offset: int) -> tuple[StoredIds, CorruptLog | None]:
        """Those of the rows from this offset on, also of rows that have gone since, and the first damage that hid
        some.
        """
        found, damage = ids_in(self.chain, self.reader, offset, self.log_end_offset)
        try:
            kept = self.kept_ids.read()  # at last, as in `newest_ids`
        except (CorruptLog, OSError) as error:
            return found, damage or as_damage(error)
        later = kept.offsets >= offset
        gone = StoredIds(kept.ids[later], kept.offsets[later], kept.times_us[later])
        return StoredIds.joined([found, gone]), damage

    def adopt_ids(self, found: StoredIds) -> None:
        """Those that the leader keeps. Raises OSError: they could not be stored."""
        self.kept_ids.add(found, self._oldest_id_us)

    def expire_ids(self) -> None:
        """Removes the kept ids that no window asks for any more. Raises OSError."""
        self.kept_ids.expire(self._oldest_id_us + int(self.idle_s * 1_000_000))

    def rewrite_next(self, before_us: int, pause: Callable[[], None] = lambda: None) -> bool:
        """Writes one sealed segment again without removed messages, if one has enough of them; True if it did.

        Only what the companion log records is dropped, and only where it records everything that is hidden up to the
        end of the segment: what a dropped message hid stays hidden.

        Args:
            before_us: segments with messages of this stream time, or newer ones, are left as they are.
            pause: as in `seal_next`.

        Raises:
            As `seal_next`.
        """

        def rewrite(go_on: Callable[[], None]) -> bool:
            self.visibility.removed_below(self.high_watermark)
            pinned = self.latest_views.pinned(time.monotonic())
            segment = next(due_segments(self.chain, self.visibility, before_us, pinned), None)
            if segment is None:
                return False
            self._room.require_now(segment.size_bytes)
            self._replace_by_rewritten(segment, go_on)
            return True

        return self._write_again(rewrite, pause)

    @property
    def pending_rows(self) -> int:
        """How many rows of sealed segments wait for rewriting."""
        return pending_rows(self.chain, self.visibility)

    def _replace_by_rewritten(self, segment: SealedSegment, pause: Callable[[], None]) -> None:
        """Under the lock of sealing."""
        start, gone = self.chain.first_readable_offset, droppable_offsets(self.chain, self.visibility)
        gone = gone & offset_range(segment.base_offset, segment.end_offset)
        gone -= self.latest_views.pinned(time.monotonic())  # behind: a view that begins now has none of these
        older = older_messages(self.chain, self.visibility, segment.base_offset)
        compression = self.settings.compression
        rewritten = rewrite(segment, gone, start, self.visibility, self.stream_id, compression, pause)
        (segment if rewritten is None else rewritten[0]).kept_for = older
        if rewritten is not None:
            self._replace_by(segment, *rewritten)

    def _replace_by(self, segment: SealedSegment, fresh: SealedSegment, uncompressed_bytes: int | None) -> None:
        self.checkpoint()  # as in `_seal`
        with self.chain.lock:  # with the name, so that no reader opens the new file by the old index
            os.replace(fresh.path, segment.path)
            fresh.path = segment.path
            at = next(at for at, one in enumerate(self.chain.segments) if one is segment)
            self.chain.segments[at] = fresh
        self.subjects.forget(segment.path)  # it has the subjects of removed messages
        self.kept.clear()
        self.recent.clear()
        sync_folder(self.folder)
        self.compression.sealed(self.chain, segment.base_offset, uncompressed_bytes)

    def erase_next(self, now_us: int, pause: Callable[[], None] = lambda: None) -> bool:
        """Writes one sealed segment again without erased rows, if one has some; if none has, the erasure is complete
        here. True if there may be more to do.

        Args:
            now_us: for the receipt. `pause`: as in `seal_next`.

        Raises:
            As `seal_next`.
        """

        def erase(go_on: Callable[[], None]) -> bool:
            rows = self.erasures.pending()
            if rows is None:
                return False
            if (segment := due_segment(self.chain, rows)) is None:
                return self._complete_erasure(rows, now_us)
            self._erase_in(segment, rows, now_us, go_on)
            return True

        return self._write_again(erase, pause)

    def _erase_in(self, segment: SealedSegment, rows: ErasedRows, now_us: int, pause: Callable[[], None]) -> None:
        """Under the lock of sealing."""
        self._room.require_now(segment.size_bytes)
        found = erased(segment, rows, self.stream_id, self.settings.compression, pause)
        if found is None:
            segment.checked_erasures = rows.serial
            return
        written, count = found
        fresh = SealedSegment(written.path, segment.base_offset, written.path.stat().st_size)
        fresh.kept_rows, fresh.kept_for, fresh.checked_erasures = segment.kept_rows, segment.kept_for, rows.serial
        file = RewrittenFile(
            name=segment.path.name,
            bytes_before=segment.size_bytes,
            bytes_after=fresh.size_bytes,
            rows=count,
            at_us=now_us,
        )
        self._keep_ids(segment, segment.end_offset)
        self.erasures.rewrote(rows, segment.base_offset, segment.end_offset, file)
        self._replace_by(segment, fresh, written.uncompressed_bytes)

    def _complete_erasure(self, rows: ErasedRows, now_us: int) -> bool:
        """Where all that was requested is stored here, and sealed."""
        if self.high_watermark < rows.below or is_in_unsealed(self.chain, rows):
            return False
        self.visibility.removed_below(self.high_watermark)
        self.visibility.forget_texts(self.erasures.all_rows(), self.log_start_offset)
        return not self.erasures.complete(rows, now_us)

    def apply_rules(self) -> None:
        """Hides what newer messages hide, so that readers find little left to do, and stores the result from time to
        time. Raises OSError: it could not be stored.
        """
        self.visibility.removed_below(self.high_watermark)
        self.visibility.store(self.log_start_offset)

    def latest(self) -> tuple[BitMap64, int]:
        """The newest visible message of each key, where the stream is compacted, else of each subject; without
        tombstones. Returns their offsets and the high watermark that they are of.

        Raises:
            InvalidRequest: the stream is compacted, and none of its messages has a key. CorruptLog: a part of the log
                is damaged.
        """
        if self.visibility.keeps_newest_only:
            return self.visibility.newest_only(self.high_watermark, self.log_start_offset)
        if self.visibility.rule.compacts:
            return self._newest_of_keys(self.high_watermark)
        state, counts = self.subjects.counts()
        return offset_set(counts.table.column("last").to_numpy()), state.end

    def _newest_of_keys(self, end: int) -> tuple[BitMap64, int]:
        """The same where compaction does not apply to messages of older leader epochs: all messages are read."""
        table = NewestRows()
        for batch in self.visible_rows(self.chain.first_readable_offset, end):
            table.add(Texts.of(batch.column("key")), batch.column("offset").to_numpy())
        return self.visibility.without_tombstones(offset_set(table.newest())), end

    def newest_of_subjects(self, subjects: Texts) -> Offsets:
        """The newest visible message of each subject; -1 where there is none. Raises CorruptLog."""
        end = self.high_watermark
        self.visibility.removed_below(end)
        found = self.visibility.newest_of_subjects(subjects, end, may_wait=True)
        if found is None:
            return self.subjects.last_of((subjects.offsets, subjects.data))
        if len(unknown := np.flatnonzero(found == UNKNOWN)):
            found[unknown] = self.subjects.last_of(taken((subjects.offsets, subjects.data), unknown))
        return self._readable_of(found)

    def newest_of_subjects_now(self, subjects: Texts) -> Offsets | None:
        """The same where it is known in memory, else None: does not block."""
        found = self.visibility.newest_of_subjects(subjects, self.high_watermark, may_wait=False)
        return None if found is None or found.min(initial=0) == UNKNOWN else self._readable_of(found)

    def visible_of(self, offsets: Offsets) -> Offsets:
        """-1 in place of offsets that are not visible. Raises CorruptLog."""
        end = self.high_watermark
        removed = self.visibility.removed_below(end)
        return self._readable_of(np.where(removed.marks_of(offsets) | (offsets >= end), -1, offsets))

    def visible_of_now(self, offsets: Offsets) -> Offsets | None:
        """The same where it is known in memory, else None: does not block."""
        end = self.high_watermark
        if not self.visibility.is_applied(end):
            return None
        return self._readable_of(np.where(self.visibility.removed.marks_of(offsets) | (offsets >= end), -1, offsets))

    def _readable_of(self, offsets: Offsets) -> Offsets:
        start = self.first_readable_offset
        if start:
            offsets[offsets < start] = -1
        return offsets

    def limit_start(self, offset: int) -> None:
        """What lies below is past a limit: readers do not get it from now on."""
        with self._limits_lock:
            self.chain.limited_below = max(self.chain.limited_below, min(offset, self.high_watermark))

    def visible_rows(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """The visible messages in `[start, end)`, in bounded memory; little is read for the first of them.

        Raises:
            OffsetOutOfRange: `start` is not in the log. CorruptLog: a part of it is damaged.
        """
        max_bytes = _READ_FIRST_BYTES
        while start < end:
            with self.reader.plan_read(start, end, max_bytes=max_bytes) as plan:
                for header, batch in plan.rows():
                    rows = ipc.rows_within(header, batch, start, min(end, plan.next_offset))
                    if rows.start < rows.stop:
                        yield batch[rows]
                start = plan.next_offset
            max_bytes = min(2 * max_bytes, _READ_AT_ONCE_BYTES)

    def stored_rows(
        self, start: int, end: int, *, prove: bool = False, columns: tuple[str, ...] | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """See `visibility.StoredRows`: also of messages that are hidden, or not committed yet.

        Args:
            columns: those that are needed, with `offset` as the first one; None: all.
        """
        start = max(start, self.log_start_offset)
        while start < end:
            with self.reader.plan_read(
                start, end, max_bytes=_READ_AT_ONCE_BYTES, prove=prove, uncommitted=True
            ) as plan:
                for header, batch in plan.rows() if columns is None else plan.selected(columns):
                    rows = ipc.rows_within(header, batch, start, end)
                    if rows.start < rows.stop:
                        yield header.epoch, batch[rows]
                start = plan.next_offset

    def time_us_of(self, offset: int) -> int | None:
        """When this message was stored; None: nothing is stored there. The last one that was asked for is kept.

        Raises:
            OffsetOutOfRange: it was removed meanwhile. CorruptLog: it cannot be read.
        """
        known = self._known_time
        if known[0] == offset:
            return known[1]
        for _, rows in self.stored_rows(offset, offset + 1, columns=("offset", "timestamp")):
            if rows.column("offset")[0].as_py() == offset:
                found = int(rows.column("timestamp").cast(pa.int64())[0].as_py())
                self._known_time = offset, found
                return found
        return None

    def message_bytes(self, start: int, end: int) -> int:
        """The size of the visible messages in `[start, end)` as JetStream counts it. Raises CorruptLog."""
        with self._message_bytes_lock:
            return self._message_bytes.total(start, end, size_rule(self.settings))

    def forget_sizes(self) -> None:
        """Stored batches were cut off or replaced."""
        with self._message_bytes_lock:
            self._message_bytes.forget()

    def _start_within(self, start: int, end: int, max_bytes: int) -> int:
        """From where on the visible messages take at most `max_bytes`, as JetStream counts them."""
        with self._message_bytes_lock:
            return self._message_bytes.start_within(start, end, max_bytes, size_rule(self.settings))

    def gaps(self) -> BitMap64:
        """Offsets that have no row, although their batches are stored. Raises CorruptLog."""

        def within(segments: list[Segment]) -> BitMap64:
            found = BitMap64()
            for segment in segments:
                index = segment.index
                if sum(index.rows) < segment.end_offset - segment.base_offset:
                    with open(self.chain.open(segment), "rb") as file:
                        for at in range(len(index)):
                            found |= _gaps_of(file.fileno(), index[at], segment.path)
            return found

        return self.chain.on_snapshot(within)

    def checkpoint(self) -> None:
        """Makes the high watermark durable, so that a file that is cut short later is seen as damage, and the start by
        limits, so that it does not go back.
        """
        with self._checkpoint_lock:
            if self.failure is None and not self._is_closed:
                self._checkpoints.advance(self.high_watermark, self.chain.limited_below)

    def close(self) -> None:
        """Checkpoints, as far as the disk allows, and closes all files; they do not change afterwards."""
        try:
            self.checkpoint()
        except OSError as error:
            logger.error(
                "%s: the last checkpoint could not be written (%s); the next recovery does not need it",
                self.folder,
                error,
                extra=event("log.checkpoint_not_stored", path=self.folder),
            )
        self._store_visibility()
        self.kept.clear()
        self.recent.clear()
        self.subjects.close()
        self._is_closed = True
        with self._seal_lock, self._checkpoint_lock:  # all other work on files has ended
            for segment in self.chain.segments:
                if isinstance(segment, ActiveSegment):
                    segment.close()

    def _store_visibility(self) -> None:
        """Best effort: otherwise more of the log is read after the next start."""
        try:
            self.visibility.store(self.log_start_offset, at_least=_STORED_AT_CLOSE_OFFSETS)
        except OSError as error:
            logger.error(
                "%s: which messages are hidden could not be stored (%s)",
                self.folder,
                error,
                extra=event("log.checkpoint_not_stored", path=self.folder),
            )


def _gaps_of(fd: int, entry: BatchEntry, path: Path) -> BitMap64:
    """The offsets of a batch that have no row."""
    whole = offset_range(entry.base_offset, entry.end_offset)
    if entry.rows == entry.end_offset - entry.base_offset:
        return BitMap64()
    if not entry.rows:
        return whole
    return whole - offset_set(ipc.decode_batch(read_batch(fd, entry, path)).column("offset").to_numpy())
