"""From the files of a folder to a chain of segments: which file is used, where a torn tail is removed, and what is
damage.

Theory of operation. All files are read before any is changed, the newest first: the valid contents of a segment depend
on the next one. A new segment is made when the one before is durable up to there, so its name proves the offsets below.
But an *empty* segment proves nothing about offsets above its base: if its creation failed after it had its name,
commits continued in the previous segment. Whole batches are therefore never cut because an empty segment begins below
their end; that one is removed. One that holds rows of the same offsets is damage.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from natslog.arrow import ipc
from natslog.errors import CorruptLog
from natslog.log.chain import Segment, SegmentChain
from natslog.log.checked_file import sync_folder
from natslog.log.recovery import Damage, Scan, scan_segment
from natslog.log.sealed import SealedSegment, read_footer_index
from natslog.log.segment import (
    ACTIVE_SUFFIX,
    SEALED_SUFFIX,
    SUBJECTS_SUFFIX,
    ActiveSegment,
    check_file_header,
    file_header,
    remove_segment_files,
    segment_path,
)
from natslog.log_events import event

logger = logging.getLogger("natslog.log")

_DAMAGED_SUFFIX = ".damaged"


@dataclass(slots=True)
class _Unsealed:
    """An unsealed file as it was read; it was not changed yet. `scan`: None if it never had a header."""

    path: Path
    base_offset: int
    scan: Scan | None

    @property
    def is_empty(self) -> bool:
        return self.scan is None or not (len(self.scan.index) or self.scan.damages)


class Opening:
    """Fills a chain from a folder.

    Args:
        checkpointed: the high watermark that is known to be durable: nothing below may be cut.
        log_start_offset: the stored log start; None if the files decide. merged: see `log.checkpoints`.
        several_bytes: as `scan_segment`.

    Attributes:
        newest_timestamp_us: of the messages in the log; 0 if it cannot be determined.
    """

    def __init__(
        self,
        folder: Path,
        stream_id: str,
        chain: SegmentChain,
        checkpointed: int,
        *,
        log_start_offset: int | None,
        merged: tuple[int, int] | None = None,
        several_bytes: int = 0,
    ) -> None:
        self.folder = folder
        self.stream_id = stream_id
        self.chain = chain
        self.newest_timestamp_us = 0
        self._checkpointed = checkpointed
        self._log_start_offset = log_start_offset
        self._merged = merged
        self._several_bytes = several_bytes

    def open_segments(self) -> None:
        """Once. The chain stays empty where the folder has no segment.

        Raises:
            CorruptLog, DataDirError: a file is of another stream or a newer format. OSError: the folder cannot be used.
        """
        self._remove_leftovers()
        for one in self._read_files():
            if isinstance(one, SealedSegment):
                self.chain.segments.append(one)
            elif not self._is_to_be_removed(one):
                self.chain.segments.append(self._recovered(one))
            else:
                one.path.unlink()
        self._compare_ends()
        self._compare_start()
        self._remove_indexes()
        sync_folder(self.folder)  # names removed
        self._find_newest()

    # ---- reading ----

    def _remove_leftovers(self) -> None:
        for pattern in ("*.tmp", "*.new"):
            for leftover in self.folder.glob(pattern):
                leftover.unlink()

    def _remove_indexes(self) -> None:
        """Of the subjects of segments that are gone: other versions of natslog may have removed these."""
        segments = {segment.path.stem for segment in self.chain.segments}
        for path in self.folder.glob(f"*{SUBJECTS_SUFFIX}"):
            if path.stem not in segments:
                path.unlink()

    def _read_files(self) -> list[SealedSegment | _Unsealed]:
        """All files that belong to the log, oldest first."""
        sealed = {int(path.stem): path for path in self.folder.glob(f"*{SEALED_SUFFIX}")}
        active = {int(path.stem): path for path in self.folder.glob(f"*{ACTIVE_SUFFIX}")}
        for base_offset in sorted(set(sealed) & set(active)):
            self._resolve_duplicate(base_offset, sealed, active)
        self._complete_merge(sealed)
        found: list[SealedSegment | _Unsealed] = []
        following: int | None = None  # the base of the next file
        next_base: int | None = None  # of the next one that holds rows
        for base_offset in reversed(self._without_dropped(sorted(sealed | active))):
            if base_offset in sealed and (following is not None or _has_footer(sealed[base_offset])):
                path = sealed[base_offset]
                one: SealedSegment | _Unsealed = SealedSegment(path, base_offset, path.stat().st_size)
            else:
                path = active.get(base_offset) or sealed[base_offset]  # the end of the last one must be known
                one = self._read_unsealed(path, base_offset, following, next_base)
            if isinstance(one, SealedSegment) or not one.is_empty:
                next_base = base_offset
            following = base_offset
            found.append(one)
        return found[::-1]

    def _resolve_duplicate(self, base_offset: int, sealed: dict[int, Path], active: dict[int, Path]) -> None:
        """A segment was sealed, or its kept part was written anew, and a crash came before the removal of the other
        file. The sealed file is used if it is intact: then it has all rows.
        """
        try:
            read_footer_index(sealed[base_offset])
        except CorruptLog as error:
            aside = sealed[base_offset].with_suffix(_DAMAGED_SUFFIX)
            logger.error(
                f"{error.message} The file is kept as {aside}; {active[base_offset].name} is used",
                extra=event("log.segment_set_aside", path=aside),
            )
            os.replace(sealed.pop(base_offset), aside)
        else:
            active.pop(base_offset).unlink()

    def _complete_merge(self, sealed: dict[int, Path]) -> None:
        """Segments became one, and a crash came before the removal of all but the first, which has all rows."""
        first, end = self._merged or (0, 0)
        others = [base_offset for base_offset in sealed if first < base_offset < end]
        whole = SealedSegment(sealed[first], first, 0) if others and first in sealed else None
        if whole is not None and whole.has_footer() and whole.end_offset == end:
            for base_offset in others:
                remove_segment_files(sealed.pop(base_offset))

    def _without_dropped(self, bases: list[int]) -> list[int]:
        """Completes the removal of segments below the log start, which was stored before any file was removed."""
        start = self._log_start_offset or 0
        dropped = [base for base, following in pairwise(bases) if following <= start]
        for base_offset in dropped:
            logger.info(
                f"{self.folder}: the segment at {base_offset} was removed because the log starts at {start}",
                extra=event("log.segment_dropped", path=self.folder, offset=base_offset),
            )
            remove_segment_files(segment_path(self.folder, base_offset, SEALED_SUFFIX))
        return bases[len(dropped) :]

    def _read_unsealed(self, path: Path, base_offset: int, following: int | None, next_base: int | None) -> _Unsealed:
        _forget_cached(path)
        with open(path, "rb") as file:
            window = file.read(ipc.MAX_HEADER_BYTES)
        expected = file_header(self.stream_id, base_offset)
        # An ack of this file, or of one behind it, is durable up to here: nothing below may be cut.
        durable_offset = max(self._checkpointed, following or 0)
        if durable_offset <= base_offset and (not any(window) or _is_cut(window, expected)):
            return _Unsealed(path, base_offset, None)
        damages: list[Damage] = []
        try:
            header_bytes = check_file_header(window, path, self.stream_id, base_offset)
        except CorruptLog:
            header_bytes = len(expected)
            damages.append(Damage(path, 0, header_bytes, base_offset, base_offset))
        scan = scan_segment(
            path,
            position=header_bytes,
            base_offset=base_offset,
            next_base_offset=next_base,
            durable_offset=durable_offset,
            several_bytes=self._several_bytes,
        )
        scan.damages[:0] = damages
        return _Unsealed(path, base_offset, scan)

    # ---- deciding ----

    def _is_to_be_removed(self, one: _Unsealed) -> bool:
        if one.scan is None:
            logger.warning(
                f"{one.path}: removed; its header was incomplete, so the file had no messages",
                extra=event("log.empty_segment_removed", path=one.path),
            )
            return True
        end = self._end_of_last() if one.is_empty else None
        if end is None or end <= one.base_offset:
            return False
        logger.warning(
            f"{one.path}: removed; it is empty, and the previous segment has offsets up to {end}",
            extra=event("log.empty_segment_removed", path=one.path),
        )
        return True

    def _end_of_last(self) -> int | None:
        """The end of the last segment processed so far; None if there is none, or its footer is damaged."""
        last = self.chain.last
        try:
            return last.end_offset if last is not None else None
        except CorruptLog as error:  # reads of it will report this
            logger.error("%s", error.message, extra=event("log.damaged", path=self.folder))
            return None

    def _recovered(self, one: _Unsealed) -> ActiveSegment:
        """The segment, its torn tail cut off and the rest fsynced."""
        assert one.scan is not None, "a file without a header is removed"
        path, scan = one.path.with_suffix(ACTIVE_SUFFIX), one.scan
        if path != one.path:
            logger.warning(
                f"{one.path}: the footer is damaged; the file is read as an unsealed segment",
                extra=event("log.footer_damaged", path=one.path),
            )
            one.path.rename(path)
        self.chain.damages += scan.damages
        if scan.torn_bytes and not self.chain.damages:
            logger.warning(
                f"{path}: removed an incomplete commit of {scan.torn_bytes} bytes at byte {scan.end_position}",
                extra=event("log.tail_removed", path=path, bytes=scan.torn_bytes),
            )
            os.truncate(path, scan.end_position)
        segment = ActiveSegment(path, one.base_offset, scan.end_position, scan.index)
        segment.sync()
        return segment

    def _compare_ends(self) -> None:
        """Each segment ends where the next begins. Of two sealed ones that is compared when they are read: a start
        reads no footers but those next to unsealed segments.
        """
        named = {known.path for known in self.chain.damages}
        for segment, following in pairwise(self.chain.segments):
            both_sealed = isinstance(segment, SealedSegment) and isinstance(following, SealedSegment)
            if both_sealed or segment.path in named:
                continue
            end = self._end_of(segment)
            if end is not None and end != following.base_offset:
                self.chain.damages.append(_between(segment, end, following.base_offset))

    @staticmethod
    def _end_of(segment: Segment) -> int | None:
        try:
            return segment.end_offset
        except CorruptLog:
            return None

    def _compare_start(self) -> None:
        """A log that starts above its stored start has lost its first segments."""
        start, segments = self._log_start_offset, self.chain.segments
        if start is None or not segments:
            return
        if segments[0].base_offset > start:
            missing = segment_path(self.folder, start, SEALED_SUFFIX)
            self.chain.damages.insert(0, Damage(missing, 0, 0, start, segments[0].base_offset))
            self.chain.missing_from = start
        elif self._end_of(segments[-1]) is not None and segments[-1].end_offset <= start > segments[-1].base_offset:
            self._begin_at(start)

    def _begin_at(self, start: int) -> None:
        """Completes a restart of the log of which only the start was stored: all existing messages are below it."""
        logger.warning(
            f"{self.folder}: the log starts again at {start}: all its messages are below its stored log start offset",
            extra=event("log.started_again", path=self.folder, offset=start),
        )
        fresh = ActiveSegment.create(self.folder, self.stream_id, start)
        replaced, self.chain.segments, self.chain.damages = self.chain.segments, [fresh], []
        for segment in reversed(replaced):
            if isinstance(segment, ActiveSegment):
                segment.close()
            remove_segment_files(segment.path)

    def _find_newest(self) -> None:
        for one in self.chain.segments[-2:]:  # the last one may have no rows
            try:
                if one.max_timestamp_us:
                    self.newest_timestamp_us = one.max_timestamp_us
            except CorruptLog as error:  # reads of that segment will report this; the end of the log is in the next one
                logger.error("%s", error.message, extra=event("log.damaged", path=self.folder))


def check_folder(folder: Path, *, must_exist: bool) -> None:
    """Makes the folder where a log may be new. Raises CorruptLog: it must exist, and is missing or has no segment."""
    if not must_exist:
        folder.mkdir(parents=True, exist_ok=True)
    elif not folder.is_dir() or not any(path.suffix in (ACTIVE_SUFFIX, SEALED_SUFFIX) for path in folder.iterdir()):
        raise lost_log(folder)


def _has_footer(path: Path) -> bool:
    return SealedSegment(path, 0, 0).has_footer()


def lost_log(folder: Path) -> CorruptLog:
    return CorruptLog(
        f"{folder} is missing or has no segment, but this broker stored the stream there before. Check that "
        f"{folder.parent} is mounted, then mount the file system or restore the folder; if the stream has several "
        "replicas, it is fetched again",
        file=str(folder),
    )


def _between(segment: Segment, end: int, next_base: int) -> Damage:
    """Two neighbours that leave offsets out, or both hold some."""
    at = segment.size_bytes
    return Damage(segment.path, at, at, min(end, next_base), max(end, next_base))


def _is_cut(window: bytes, expected: bytes) -> bool:
    return len(window) < len(expected) and expected.startswith(window)


def _forget_cached(path: Path) -> None:
    """Recovery reads from the disk: after a failed fsync the page cache may have data that is not on disk."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
