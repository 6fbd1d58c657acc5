"""Maintenance of one log: sealing, merging, rewriting and erasing segments, and removing those that retention drops.

All of it runs in threads of maintenance, beside the log's writer and its readers. One segment at a time is written
again (`SharedLog.files_lock`), beside its file, which it replaces in one step: at every moment the folder opens as a
log with the same visible messages.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise

from natslog.errors import CorruptLog
from natslog.log import sealed as sealing
from natslog.log.chain import Segment
from natslog.log.checked_file import sync_folder
from natslog.log.checkpoints import NO_ROOM
from natslog.log.erasing import ErasedRows, RewrittenFile, due_segment, erased, is_in_unsealed
from natslog.log.limits import StartLimits
from natslog.log.message_ids import MessageIds
from natslog.log.removed import offset_range
from natslog.log.rewriting import droppable_offsets, due_segments, older_messages, pending_rows, rewrite
from natslog.log.sealed import SealedSegment
from natslog.log.segment import SEALED_SUFFIX, ActiveSegment, remove_segment_files
from natslog.log.shared import SharedLog
from natslog.log.small_segments import SmallSegments, write_merged


class _Closed(Exception):
    """The log was closed while a segment of it was being written again."""


class LogUpkeep:
    """Of one log that is open; see the module."""

    def __init__(self, shared: SharedLog, ids: MessageIds, limits: StartLimits) -> None:
        self._shared, self._ids, self._limits = shared, ids, limits
        self._chain, self._visibility, self._erasures = shared.chain, shared.visibility, shared.erasures
        self._checkpoints, self._compression, self._room = shared.checkpoints, shared.compression, shared.room
        self._small_segments = SmallSegments(shared.chain, shared.compression)
        self._merges = shared.options.merges_segments

    def is_needed(self) -> bool:
        """Whether there is something to checkpoint, to seal, or perhaps to drop. Touches no file."""
        settings, chain, visibility = self._shared.settings, self._chain, self._visibility
        at = chain.positions()
        has_limit = (settings.max_age_s, settings.max_bytes, settings.max_messages) != (None, None, None)
        has_limit = has_limit or at.first_readable_offset > at.log_start_offset
        has_work = at.high_watermark > self._checkpoints.high_watermark or chain.has_unsealed
        has_work = has_work or chain.limited_below > self._checkpoints.limited_below
        has_work = has_work or (self._merges and self._small_segments.may_be_due)
        has_rows = visibility.has_rules and visibility.applied < at.high_watermark
        has_rows = has_rows or bool(visibility.removed) or self._erasures.is_pending
        return has_work or has_rows or bool(self._ids.kept.serial) or (has_limit and len(chain.segments) > 1)

    def seal_next(self, pause: Callable[[], None] = lambda: None) -> bool:
        """Seals the oldest full segment, if there is one; True if it did.

        Args:
            pause: called after every few MiB of work; may sleep. Where the log is closed then, the work ends there.

        Raises:
            StorageFull: no room for the sealed file; to be tried again later.
            CorruptLog, OSError: it cannot be sealed; it is read as it is, and later segments go on.
        """

        def seal(go_on: Callable[[], None]) -> bool:
            segment = self._chain.oldest_unsealed()
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
        """What `work` returns, which writes a segment again; it calls what it is given as `seal_next` calls `pause`.
        False, and nothing is done, where the log is damaged; nothing is changed where it is closed meanwhile.

        Raises:
            StorageFull: no room.
        """

        def go_on() -> None:
            pause()
            if self._shared.is_closed:
                raise _Closed

        with self._shared.files_lock:
            if self._chain.damages or self._shared.is_closed:
                return False
            try:
                return work(go_on)
            except _Closed:
                return False  # what was begun is removed when the log is opened
            except OSError as error:
                raise (self._room.full() if error.errno in NO_ROOM else error) from error

    def _seal(self, segment: ActiveSegment, pause: Callable[[], None]) -> None:
        written = sealing.write_sealed(segment, self._shared.stream_id, self._shared.settings.compression, pause)
        target = segment.path.with_suffix(SEALED_SUFFIX)
        self._shared.checkpoint()  # before: of smaller files, the start by limits would be lower
        os.replace(written.path, target)
        sealed = SealedSegment(target, segment.base_offset, target.stat().st_size)
        self._chain.replace([segment], sealed)
        sync_folder(self._shared.folder)
        segment.close()
        segment.path.unlink(missing_ok=True)
        self._compression.sealed(self._chain, segment.base_offset, written.uncompressed_bytes)

    def merge_next(self, pause: Callable[[], None] = lambda: None) -> bool:
        """Writes small sealed neighbours as one segment, if enough of them are there (`log.small_segments`); True if
        it did.

        Args:
            pause: as in `seal_next`.

        Raises:
            As `seal_next`.
        """

        def merge(go_on: Callable[[], None]) -> bool:
            parts = self._small_segments.next(self._shared.full)
            if not parts:
                return False
            self._room.require_now(sum(part.size_bytes for part in parts))
            compression = self._shared.settings.compression
            fresh, uncompressed_bytes = write_merged(parts, self._shared.stream_id, compression, go_on)
            self._replace_by_merged(parts, fresh)
            self._compression.sealed(self._chain, fresh.base_offset, uncompressed_bytes)
            return True

        is_due = self._merges and self._small_segments.may_be_due and self._shared.failure is None
        return is_due and self._write_again(merge, pause)

    def _replace_by_merged(self, parts: list[SealedSegment], fresh: SealedSegment) -> None:
        chain, offsets = self._chain, (parts[0].base_offset, parts[-1].end_offset)
        with self._shared.checkpoint_lock:
            self._checkpoints.store_merged(chain.high_watermark, chain.limited_below, offsets)

        def replace() -> Segment:
            chain.replace_with_file(parts, fresh)
            return fresh

        self._shared.subjects.merge(parts, replace)
        sync_folder(self._shared.folder)
        for part in parts[1:]:
            remove_segment_files(part.path)
        sync_folder(self._shared.folder)

    def enforce_retention(self) -> int:
        """Moves the logical start, and removes segments below it; returns how many."""
        self._limits.advance()
        return self.drop_before(self._chain.first_readable_offset)

    def drop_before(self, offset: int) -> int:
        """Removes the segments that lie wholly below an offset. Returns how many.

        The log start is on stable storage before. The last segment stays, and what is not known to be committed here.

        Raises:
            OSError: the start could not be stored, and nothing was removed; or a file could not be removed.
        """
        with self._shared.files_lock:  # until the files are removed: closing the log waits for that
            if self._shared.is_closed:
                return 0
            count = self._count_below(offset)
            self._drop_first(count)
        return count

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
            self._visibility.removed_below(self._chain.high_watermark)
            pinned = self._shared.latest_views.pinned(time.monotonic())
            segment = next(due_segments(self._chain, self._visibility, before_us, pinned), None)
            if segment is None:
                return False
            self._room.require_now(segment.size_bytes)
            self._replace_by_rewritten(segment, go_on)
            return True

        return self._write_again(rewrite, pause)

    @property
    def pending_rows(self) -> int:
        """How many rows of sealed segments wait for rewriting."""
        return pending_rows(self._chain, self._visibility)

    def _replace_by_rewritten(self, segment: SealedSegment, pause: Callable[[], None]) -> None:
        """Under `files_lock`."""
        start, removed = self._chain.first_readable_offset, droppable_offsets(self._chain, self._visibility)
        removed = removed & offset_range(segment.base_offset, segment.end_offset)
        removed -= self._shared.latest_views.pinned(
            time.monotonic()
        )  # after it: a view that begins now has none of these
        older = older_messages(self._chain, self._visibility, segment.base_offset)
        compression = self._shared.settings.compression
        rewritten = rewrite(segment, removed, start, self._visibility, self._shared.stream_id, compression, pause)
        (segment if rewritten is None else rewritten[0]).kept_for = older
        if rewritten is not None:
            self._replace_by(segment, *rewritten)

    def _replace_by(self, segment: SealedSegment, fresh: SealedSegment, uncompressed_bytes: int | None) -> None:
        self._shared.checkpoint()  # as in `_seal`
        self._chain.replace_with_file([segment], fresh)
        self._shared.subjects.forget(segment.path)  # it has the subjects of removed messages
        self._shared.kept.clear()
        self._shared.recent.clear()
        sync_folder(self._shared.folder)
        self._compression.sealed(self._chain, segment.base_offset, uncompressed_bytes)

    def erase_next(self, now_us: int, pause: Callable[[], None] = lambda: None) -> bool:
        """Writes one sealed segment again without erased rows, if one has some; if none has, the erasure is complete
        here. True if there may be more to do.

        Args:
            now_us: for the receipt. `pause`: as in `seal_next`.

        Raises:
            As `seal_next`.
        """

        def erase(go_on: Callable[[], None]) -> bool:
            rows = self._erasures.pending()
            if rows is None:
                return False
            if (segment := due_segment(self._chain, rows)) is None:
                return self._complete_erasure(rows, now_us)
            self._erase_in(segment, rows, now_us, go_on)
            return True

        return self._write_again(erase, pause)

    def _erase_in(self, segment: SealedSegment, rows: ErasedRows, now_us: int, pause: Callable[[], None]) -> None:
        """Under `files_lock`."""
        self._room.require_now(segment.size_bytes)
        found = erased(segment, rows, self._shared.stream_id, self._shared.settings.compression, pause)
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
        self._ids.keep_of(segment, segment.end_offset)
        self._erasures.rewrote(rows, segment.base_offset, segment.end_offset, file)
        self._replace_by(segment, fresh, written.uncompressed_bytes)

    def _complete_erasure(self, rows: ErasedRows, now_us: int) -> bool:
        """Where all that was requested is stored here, and sealed."""
        if self._chain.high_watermark < rows.below or is_in_unsealed(self._chain, rows):
            return False
        self._visibility.removed_below(self._chain.high_watermark)
        self._visibility.forget_texts(self._erasures.all_rows(), self._chain.log_start_offset)
        return not self._erasures.complete(rows, now_us)

    def apply_rules(self) -> None:
        """Hides what newer messages hide, so that readers find little left to do, and stores the result from time to
        time. Raises OSError: it could not be stored.
        """
        self._visibility.removed_below(self._chain.high_watermark)
        self._visibility.store(self._chain.log_start_offset)

    def _count_below(self, offset: int) -> int:
        """How many segments lie wholly below an offset, and are known to be committed; never the last one."""
        following = [segment.base_offset for segment in self._chain.segments[1:]]
        return bisect_right(following, min(offset, self._chain.high_watermark))

    def _drop_first(self, count: int) -> None:
        """Removes so many segments, under `files_lock`. The new log start is on stable storage before."""
        if not count:
            return
        chain = self._chain
        for segment, following in pairwise(chain.segments[: count + 1]):
            self._ids.keep_of(segment, following.base_offset)
        self._checkpoints.store_log_start(chain.segments[count].base_offset)
        with chain.lock:
            dropped = chain.segments[:count]
            del chain.segments[:count]
            chain.missing_from = None
        self._shared.scrub.drop_below(chain.log_start_offset)
        self._visibility.removed.drop_below(chain.log_start_offset)
        for segment in dropped:
            if isinstance(segment, ActiveSegment):
                segment.close()
            remove_segment_files(segment.path)
        sync_folder(self._shared.folder)
