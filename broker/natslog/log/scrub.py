"""Scrubbing: the bytes of sealed segments are read back from their disk and compared with their CRCs.

Theory of operation. A *pass* reads the sealed segments of one log in offset order, up to the one that was the last when
the pass began. `read_back` reads one segment in small steps, between which the caller pauses; pages of the file are
dropped from the page cache before they are read, so that the disk is read and not the memory, and after that, so that
the cache is left to readers. A batch that does not hold is read twice before it counts as damaged.

`ScrubProgress` is what is known of one log: where the pass is, when the last one was completed, and which offsets are
damaged. It is stored in the file `scrub` beside the segments. Without the file, the next pass begins at once.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
from crc32c import crc32c

from natslog.arrow import ipc
from natslog.errors import CorruptLog, DataDirError, UpgradeRequired
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.chain import SegmentChain
from natslog.log.checked_file import read_record, write_checked
from natslog.log.sealed import SealedSegment, read_footer_index, sealing_bytes, split_footer
from natslog.log.segment import check_file_header, damage, read_at
from natslog.log_events import event
from natslog.units import offsets_between

logger = logging.getLogger("natslog.log")

SCRUB_FILE = "scrub"
STEP_BYTES = 256 * 1024
_PAGE_BYTES = 4096
_FOOTER_BYTES = 1024 * 1024
_MOST_DAMAGES = 1000
_MOST_SHOWN = 20

_OF_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that do not concern the disk."""

OffsetRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Finding:
    """Offsets `[start, end)` cannot be read any more; none, if only the frame of the file is damaged."""

    start: int
    end: int
    error: CorruptLog


# ---- one segment ----


def read_back(segment: SealedSegment, end_offset: int, findings: list[Finding]) -> Generator[int, None, None]:
    """Reads every byte of a sealed segment, in steps of at most `STEP_BYTES`.

    Args:
        end_offset: where the next segment begins. `findings`: what is damaged is added here.

    Yields:
        How many bytes each step has read.

    Raises:
        OSError: this process has too few resources to read; nothing is known of the segment.
    """
    try:
        fd = os.open(segment.path, os.O_RDONLY)
    except OSError as error:
        _raise_if_of_process(error)
        findings.append(_of_whole(segment, end_offset, f"cannot be opened: {error.strerror}"))
        return
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no pages beyond those that are asked for
        _drop_pages(fd, max(0, os.fstat(fd).st_size - _FOOTER_BYTES), _FOOTER_BYTES)
        index = _index_of(segment) or _index_of(segment)
        if index is None:
            findings.append(_of_whole(segment, end_offset, "has a damaged footer"))
            return
        header_bytes: dict[int, int] = {}
        for at in range(len(index)):
            problem, length = yield from _check_batch(fd, index[at])
            if problem:
                problem, length = yield from _check_batch(fd, index[at])
            if problem:
                findings.append(_of_batch(segment, index[at], problem))
            header_bytes[index[at].position] = length
        problem = _frame_problem_now(segment, index, header_bytes) if not findings else ""
        if problem and (problem := _frame_problem_now(segment, index, header_bytes)):
            findings.append(Finding(segment.base_offset, segment.base_offset, _frame_error(segment, problem)))
    finally:
        os.close(fd)


def _raise_if_of_process(error: OSError) -> None:
    if error.errno in _OF_PROCESS:
        raise error


def _index_of(segment: SealedSegment) -> BatchIndex | None:
    """As the file has it; None if it cannot be read."""
    try:
        return read_footer_index(segment.path)
    except CorruptLog:
        return None
    except OSError as error:
        _raise_if_of_process(error)
        return None


def _check_batch(fd: int, entry: BatchEntry) -> Generator[int, None, tuple[str, int]]:
    """What is wrong with a batch ("": nothing), and the length of its header."""
    try:
        window = _read_from_disk(fd, entry.position, min(entry.length, ipc.MAX_HEADER_BYTES))
        yield len(window)
        header = ipc.proven_header(window)
        if header is None or (header.base_offset, header.end_offset) != (entry.base_offset, entry.end_offset):
            return "has a damaged header", 0
        if header.total_bytes != entry.length:
            return "has another length than its index", 0
        crc, expected = header.body_crc
        crc, position = crc32c(window[header.header_bytes :], crc), len(window)
        while position < entry.length:
            piece = _read_from_disk(fd, entry.position + position, min(STEP_BYTES, entry.length - position))
            if not piece:
                return "is truncated", 0
            crc, position = crc32c(piece, crc), position + len(piece)
            yield len(piece)
    except OSError as error:
        _raise_if_of_process(error)
        return f"cannot be read: {error.strerror}", 0
    return ("" if crc == expected else "has a wrong CRC32C"), header.header_bytes


def _read_from_disk(fd: int, position: int, length: int) -> bytes:
    _drop_pages(fd, position, length)
    piece = read_at(fd, position, length)
    _drop_pages(fd, position, length)
    return piece


def _drop_pages(fd: int, position: int, length: int) -> None:
    """From the page cache; with the pages at both edges, of which the system drops whole ones only."""
    start = position - position % _PAGE_BYTES
    end = position + length + -(position + length) % _PAGE_BYTES
    os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


def frame_problem(segment: SealedSegment, index: BatchIndex, header_bytes_of: dict[int, int]) -> str:
    """What is wrong with a segment beside its batches: the file header and all from end-of-stream on; "" if nothing.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with open(segment.path, "rb") as file:
            header = file.read(ipc.MAX_HEADER_BYTES)
        check_file_header(header, segment.path, None, segment.base_offset)
        _, footer = split_footer(segment.path)
    except CorruptLog as error:
        return error.message
    return "" if footer == sealing_bytes(index, header_bytes_of) else "the footer is not what sealing wrote"


def _frame_problem_now(segment: SealedSegment, index: BatchIndex, header_bytes_of: dict[int, int]) -> str:
    """As `frame_problem`; a disk that cannot read it is a problem, too."""
    try:
        return frame_problem(segment, index, header_bytes_of)
    except OSError as error:
        _raise_if_of_process(error)
        return f"it cannot be read: {error.strerror}"


def _of_batch(segment: SealedSegment, entry: BatchEntry, what: str) -> Finding:
    return Finding(entry.base_offset, entry.end_offset, damage(segment.path, entry, what))


def _of_whole(segment: SealedSegment, end_offset: int, what: str) -> Finding:
    message = (
        f"{segment.path}: this sealed segment, {offsets_between(segment.base_offset, end_offset)}, {what}. Restore the "
        "file from a replica or a copy; `natslog verify` checks it"
    )
    error = CorruptLog(message, file=str(segment.path), position=0, start=segment.base_offset, end=end_offset)
    return Finding(segment.base_offset, end_offset, error)


def _frame_error(segment: SealedSegment, problem: str) -> CorruptLog:
    return CorruptLog(
        f"{segment.path}: {problem}. All its messages are intact, but other Arrow programs may read it incorrectly. "
        "Restore the file from a replica or a copy; `natslog verify` checks it",
        file=str(segment.path),
        start=segment.base_offset,
        end=segment.base_offset,
    )


# ---- the log ----


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The file `scrub`. Times are microseconds since 1970; 0: never.

    Attributes:
        next_offset, end_offset: of a pass that is under way: segments that begin in between are to be read; -1: none is
            under way. lost: offsets that were damaged, and accepted as lost.
    """

    began_us: int = 0
    completed_us: int = 0
    next_offset: int = 0
    end_offset: int = -1
    damaged: tuple[OffsetRange, ...] = ()
    lost: tuple[OffsetRange, ...] = ()


class ScrubProgress:
    """Of one log. Thread-safe; reads its file once, when the log is opened.

    Args: `is_stored`: False: a pass begins again after a restart.

    Attributes:
        is_requested: whether an operator requested the pass. `passes`: how many began in this process.
    """

    def __init__(self, folder: Path, *, is_stored: bool = True) -> None:
        self._path, self._is_stored = folder / SCRUB_FILE, is_stored
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._known = _read(self._path)
        self.is_requested = False
        self.passes = 0

    @property
    def completed_us(self) -> int:
        """When the last pass was completed; 0: none was."""
        return self._known.completed_us

    @property
    def damaged(self) -> tuple[OffsetRange, ...]:
        """In offset order; a range without offsets is a segment with intact messages in a damaged frame."""
        return self._known.damaged

    @property
    def lost(self) -> tuple[OffsetRange, ...]:
        """Offsets whose loss an operator has accepted; they count as removed."""
        return self._known.lost

    def accept(self, lost: Sequence[OffsetRange]) -> None:
        """These offsets are lost."""
        with self._lock:
            self._change(lost=tuple(sorted({*self._known.lost, *lost})))

    @property
    def problem(self) -> CorruptLog | None:
        """Which offsets cannot be read."""
        damaged = self.damaged
        if not damaged:
            return None
        lost = ", ".join(f"{start} to {end - 1}" for start, end in damaged[:_MOST_SHOWN] if start < end)
        frames = ", ".join(str(start) for start, end in damaged[:_MOST_SHOWN] if start == end)
        texts = [f"offsets {lost} are damaged and cannot be read"] if lost else []
        texts += [f"the header or footer of the segments that begin at {frames} is damaged"] if frames else []
        more = len(damaged) - _MOST_SHOWN
        texts += [f"{more} more places are damaged"] if more > 0 else []
        return CorruptLog(
            f"{self._path.parent}: {'; '.join(texts)}. All other messages are served. Restore the files from a "
            "replica or a copy (`natslog verify` names them), then scrub the stream again; or accept the loss "
            "(natslog repair)",
            start=damaged[0][0],
            end=damaged[-1][1],
        )

    @property
    def is_running(self) -> bool:
        return self._known.end_offset >= 0

    def share(self, log_start_offset: int) -> float | None:
        """The part of the pass that is done, from 0 to 1, by offsets; None where none is under way."""
        known = self._known
        if known.end_offset < 0:
            return None
        done, all_of_it = known.next_offset - log_start_offset, known.end_offset - log_start_offset
        return min(1.0, max(0.0, done / all_of_it)) if all_of_it > 0 else 1.0

    def is_due(self, chain: SegmentChain, now_us: int, interval_s: float) -> bool:
        """Whether a pass is under way, or is to begin. Touches no file.

        A time in the future was stored by a clock that was wrong: the pass is then due.

        Args:
            interval_s: from the begin of a pass to that of the next one; 0: only those that are requested.
        """
        if self.is_running:
            return True
        since_us = now_us - self._known.began_us
        if not interval_s or 0 <= since_us < interval_s * 1_000_000:
            return False
        return any(isinstance(one, SealedSegment) for one in list(chain.segments))

    def begin(self, chain: SegmentChain, now_us: int, *, is_requested: bool = False) -> None:
        """A new pass over all segments that are sealed now."""
        bases = [one.base_offset for one in chain.snapshot() if isinstance(one, SealedSegment)]
        end_offset = bases[-1] + 1 if bases else 0
        with self._lock:
            self.is_requested = is_requested
            self.passes += 1
            self._change(began_us=now_us, next_offset=bases[0] if bases else 0, end_offset=end_offset)

    def next_segment(self, chain: SegmentChain) -> tuple[SealedSegment, int] | None:
        """The segment that is to be read next, and where it ends; None where the pass has read all. May touch files."""
        known, segments = self._known, chain.snapshot()
        for segment, following in pairwise([*segments, None]):
            if not isinstance(segment, SealedSegment) or segment.base_offset < known.next_offset:
                continue
            if segment.base_offset >= known.end_offset:
                break
            return segment, _end_of(segment) if following is None else following.base_offset
        return None

    def verified(self, start: int, end: int, findings: Sequence[Finding], *, is_pass: bool = True) -> list[Finding]:
        """A segment was read: by the pass, or when it was repaired. Returns the findings that were not known before."""
        with self._lock:
            known = self._known.damaged
            others = [one for one in known if not start <= one[0] < end]
            found = [(one.start, one.end) for one in findings]
            damaged = tuple(sorted([*others, *found]))[:_MOST_DAMAGES]
            next_offset = max(end, self._known.next_offset) if is_pass else self._known.next_offset
            self._change(next_offset=next_offset, damaged=damaged)
        return [one for one in findings if (one.start, one.end) not in known]

    def note(self, error: CorruptLog) -> bool:
        """A batch was found damaged by a reader of it; the facts of the error name its offsets. Returns whether that
        was not known before.
        """
        start, end = error.facts.get("start"), error.facts.get("end")
        if start is None or end is None or (start, end) in self._known.damaged:
            return False
        with self._lock:
            self._change(damaged=tuple(sorted({*self._known.damaged, (start, end)}))[:_MOST_DAMAGES])
        return True

    def complete(self, now_us: int, log_start_offset: int) -> None:
        """The pass has read all. What retention has removed is not damaged any more."""
        with self._lock:
            self.is_requested = False
            left = tuple(one for one in self._known.damaged if one[0] >= log_start_offset)
            self._change(completed_us=now_us, next_offset=0, end_offset=-1, damaged=left)

    def cut(self, end_offset: int) -> None:
        """The log was truncated: what is appended from here on was not read yet."""
        with self._lock:
            left = tuple(one for one in self._known.damaged if one[0] < end_offset)
            self._change(next_offset=min(self._known.next_offset, end_offset), damaged=left)

    def drop_below(self, log_start_offset: int) -> None:
        """The log begins here now."""
        with self._lock:
            left = tuple(one for one in self._known.damaged if one[1] > log_start_offset or one[0] >= log_start_offset)
            self._change(damaged=left)

    def repaired(self) -> None:
        """All of the log was read, and nothing in it is damaged."""
        with self._lock:
            self._change(damaged=())

    def _change(self, **changes: object) -> None:
        self._known = msgspec.structs.replace(self._known, **changes)

    def store(self) -> None:
        """Best effort: without it, a pass continues from where it was stored last."""
        if not self._is_stored:
            return
        try:
            with self._writing:
                write_checked(self._path, SCRUB_FILE, 1, self._known)
        except OSError as error:
            logger.warning(
                f"{self._path} could not be written: {error.strerror or error}",
                extra=event("file.not_written", path=self._path),
            )


def _end_of(segment: SealedSegment) -> int:
    """Of the last segment of a log."""
    try:
        return segment.end_offset
    except (CorruptLog, OSError):
        return segment.base_offset + 1


def _read(path: Path) -> _Stored:
    try:
        return read_record(path, SCRUB_FILE, 1, _Stored) or _Stored()
    except (CorruptLog, DataDirError, UpgradeRequired, OSError) as error:
        logger.warning(
            f"{path} is ignored, and the log is scrubbed from its start: {error}",
            extra=event("file.ignored", path=path),
        )
        return _Stored()
