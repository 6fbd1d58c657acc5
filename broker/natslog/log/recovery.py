"""Reading an unsealed segment after a stop: which bytes are intact, a torn tail, or damage.

Theory of operation. A commit is acknowledged after its fsync, and the next commit is written after that; a file grows
only by appending. So a stop at any moment leaves whole batches and at most one *torn* commit at the very end: bytes
missing. Anything else is *damage*: bytes that exist and are wrong. The distinction must not depend on a damaged length:

- a header names its lengths twice (Arrow's prefix and the batch line) and has a CRC of its own, so no single flipped
  bit can make a complete batch look incomplete;
- a header with a valid CRC whose lengths exceed the end of the file is torn;
- a leader's commit is one batch, so a whole batch after a bad one proves that the bad one was durable: damage;
- a crashed file system may show blocks that were never written as zeros. A last batch with such a block (4 KiB aligned)
  is torn, unless it is below the high-watermark checkpoint;
- a follower writes several batches of its leader's at once (`several_bytes`), and blocks reach the disk in any order:
  bytes near the end may be torn although a complete batch follows. If this was damage in fact, another replica has the
  messages: after an unclean end a replica counts for nothing until the end of its log was compared with the others'.

Invariant: only bytes after the last durable commit are ever cut; damage is reported with file, position and offsets.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from natslog.arrow import ipc
from natslog.arrow.batch_line import CONTINUATION
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.segment import read_at
from natslog.log.small_runs import SmallRuns
from natslog.units import offsets_between
from natslog.wire.stored_layout import BASE

BLOCK_BYTES = 4096
_WINDOW_BYTES = 4 * 1024 * 1024
_SMALLEST_ROW_BYTES = 24  # offset, timestamp, and the offsets of subject and value, uncompressed


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes `[position, end_position)` of a file differ from what was written; `end_offset` is None if it is
    unknown.
    """

    path: Path
    position: int
    end_position: int
    start_offset: int
    end_offset: int | None

    def __str__(self) -> str:
        offsets = f"offsets {self.start_offset} and later"
        if self.end_offset is not None:
            offsets = offsets_between(self.start_offset, self.end_offset)
        if self.position == self.end_position:
            return f"{self.path}: {offsets} are missing or stored twice"
        place = f"{self.path}: bytes {self.position} to {self.end_position}"
        if self.start_offset == self.end_offset:
            return f"{place} are damaged: the file header, before offset {self.start_offset}"
        return f"{place} are damaged, {offsets}"


@dataclass(slots=True)
class Scan:
    """The contents of a segment. Bytes from `end_position` on are a torn tail of `torn_bytes` (0: none)."""

    index: BatchIndex = field(default_factory=BatchIndex)
    end_position: int = 0
    torn_bytes: int = 0
    damages: list[Damage] = field(default_factory=list)


def scan_segment(
    path: Path,
    *,
    position: int,
    base_offset: int,
    next_base_offset: int | None = None,
    durable_offset: int = 0,
    several_bytes: int = 0,
) -> Scan:
    """Walks the batches of an unsealed segment, proving each.

    Args:
        position: where the first batch starts (the length of the file header).
        base_offset: the first offset expected there.
        next_base_offset: where the next segment that holds rows begins.
        durable_offset: offsets below this are known to have been committed (the high-watermark checkpoint).
        several_bytes: the most that may have been written as several batches at once; 0 where a commit is one batch.

    Raises:
        OSError: the file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        return _Scanner(fd, path, durable_offset, next_base_offset, several_bytes).run(position, base_offset)
    finally:
        os.close(fd)


class _Scanner:
    def __init__(
        self, fd: int, path: Path, durable_offset: int, next_base_offset: int | None, several_bytes: int
    ) -> None:
        self.fd = fd
        self.path = path
        self.durable_offset = durable_offset
        self.next_base_offset = next_base_offset
        self.several_bytes = several_bytes
        self.size_bytes = os.fstat(fd).st_size
        self.scan = Scan()
        self.small_runs = SmallRuns(fd, self.size_bytes)

    def run(self, position: int, offset: int) -> Scan:
        while position < self.size_bytes and not self._reaches_next(offset):
            if (run := self._small_batches_at(position, offset)) is not None:
                position, offset = run
                continue
            header = self._whole_batch_at(position, offset)
            if header is not None:
                self._keep(position, header)
            elif (following := self._next_whole_batch(position, offset)) is None:
                if self._is_end_of_stream(position) and offset >= self.durable_offset:
                    break  # sealing in place was cut short: what follows is a part of the footer
                self._end_at_bad_batch(position, offset)
                return self.scan
            elif self._is_torn_before(following[0], position, offset):
                break
            else:
                position, header = self._skip_damage(position, offset, following)
                self._keep(position, header)
            position += header.total_bytes
            offset = header.end_offset
        self.scan.end_position = position
        self.scan.torn_bytes = self.size_bytes - position
        if self._reaches_next(offset):
            self._compare_with_next(position, offset)
        return self.scan

    def _small_batches_at(self, position: int, offset: int) -> tuple[int, int] | None:
        """Keeps the small batches that begin there; returns where the next batch does, in the file and in the log."""
        run = self.small_runs.at(position)
        if run is None or run.batches[0, BASE] != offset:
            return None
        found = run.batches
        if self.next_base_offset is not None:
            found = found[found[:, BASE] < self.next_base_offset]
        self.scan.index.extend(found, position)
        return self.scan.index.positions[-1] + self.scan.index.lengths[-1], self.scan.index.end_offsets[-1]

    def _reaches_next(self, offset: int) -> bool:
        return self.next_base_offset is not None and offset >= self.next_base_offset

    def _compare_with_next(self, position: int, offset: int) -> None:
        """Whole batches are never cut: where the next segment holds rows of the same offsets, it cannot be known which
        rows were acknowledged.
        """
        assert self.next_base_offset is not None, "there is a next segment"
        beyond = self._whole_batch_at(position, offset) if position < self.size_bytes else None
        if beyond is not None or offset > self.next_base_offset:
            end_offset = offset if beyond is None else beyond.end_offset
            self.scan.damages.append(Damage(self.path, position, self.size_bytes, self.next_base_offset, end_offset))
            self.scan.end_position, self.scan.torn_bytes = self.size_bytes, 0

    def _keep(self, position: int, header: ipc.BatchHeader) -> None:
        length = header.total_bytes
        offsets = (header.base_offset, header.end_offset, header.rows)
        entry = BatchEntry(*offsets, position, length, header.max_timestamp_us)
        self.scan.index.append(entry)

    def _whole_batch_at(self, position: int, offset: int) -> ipc.BatchHeader | None:
        window = read_at(self.fd, position, ipc.MAX_HEADER_BYTES)
        header = ipc.proven_header(window)
        if header is None or header.base_offset != offset or position + header.total_bytes > self.size_bytes:
            return None
        self.small_runs.note(header, window)
        return header if ipc.body_holds(header, read_at(self.fd, position, header.total_bytes)) else None

    def _is_end_of_stream(self, position: int) -> bool:
        return read_at(self.fd, position, 8) == ipc.END_OF_STREAM

    def _end_at_bad_batch(self, position: int, offset: int) -> None:
        """The file's last batch is not whole: a torn tail is cut, damage stops the stream."""
        self.scan.end_position = position
        if self._is_torn(position, offset):
            self.scan.torn_bytes = self.size_bytes - position
            return
        header = ipc.proven_header(read_at(self.fd, position, ipc.MAX_HEADER_BYTES))
        end_offset = header.end_offset if header is not None and header.base_offset == offset else None
        self.scan.damages.append(Damage(self.path, position, self.size_bytes, offset, end_offset))
        self.scan.end_position = self.size_bytes

    def _is_torn(self, position: int, offset: int) -> bool:
        if offset < self.durable_offset:
            return False
        window = read_at(self.fd, position, ipc.MAX_HEADER_BYTES)
        left = self.size_bytes - position
        header = ipc.proven_header(window)
        if header is not None:
            missing = header.total_bytes > left
            return header.base_offset == offset and (missing or self._has_unwritten_block(position))
        return self._header_is_cut(window, left) or self._has_unwritten_block(position)

    def _is_torn_before(self, following: int, position: int, offset: int) -> bool:
        """Whether the bad batch and the complete one after it may belong to one incomplete write."""
        if offset < self.durable_offset or self.size_bytes - position > self.several_bytes:
            return False
        return self.next_base_offset is None and self._has_unwritten_block(position, following)

    @staticmethod
    def _header_is_cut(window: bytes, left: int) -> bool:
        """Both lengths of the header, as far as they can be read, exceed the end of the file."""
        if left < 8:
            return True
        lengths = []
        if window[:4] == CONTINUATION:
            lengths.append(8 + int.from_bytes(window[4:8], "little"))
        if (line := ipc.find_batch_line(window)) is not None:
            lengths.append(line.header_bytes)
        return bool(lengths) and left < min(lengths) <= ipc.MAX_HEADER_BYTES

    def _has_unwritten_block(self, position: int, end: int | None = None) -> bool:
        """A whole aligned block of zeros (or the zeros the file ends in, after a cut in mid-block) up to `end`: a block
        that holds a part of something whole was written.
        """
        block = position - position % BLOCK_BYTES
        end = self.size_bytes if end is None else end
        while block < end if end == self.size_bytes else block + BLOCK_BYTES <= end:
            start = max(block, position)
            piece = read_at(self.fd, start, block + BLOCK_BYTES - start)
            is_whole = start in (block, position)
            if is_whole and len(piece) >= 8 and not any(piece):
                return True
            block += BLOCK_BYTES
        return False

    def _next_whole_batch(self, position: int, offset: int) -> tuple[int, ipc.BatchHeader] | None:
        """The nearest whole batch after a bad one; None if there is none. Payloads may hold batches of other logs, so
        the length in the bad batch itself is used first, and offsets must be possible at their place.
        """
        window = read_at(self.fd, position, ipc.MAX_HEADER_BYTES)
        if (line := ipc.proven_header(window) or ipc.find_batch_line(window)) is not None:
            after = position + line.total_bytes
            if (found := self._batch_after(after, position, offset)) is not None:
                return after, found
            if ipc.proven_header(window) is not None:
                return None  # its lengths hold, so what lies between is payload
        window_start = position + 8
        while window_start < self.size_bytes:
            window = read_at(self.fd, window_start, _WINDOW_BYTES + ipc.MAX_HEADER_BYTES)
            at = window.find(CONTINUATION)
            while 0 <= at < _WINDOW_BYTES:
                candidate = window_start + at
                if candidate % 8 == 0 and (found := self._batch_after(candidate, position, offset)):
                    return candidate, found
                at = window.find(CONTINUATION, at + 1)
            window_start += _WINDOW_BYTES
        return None

    def _batch_after(self, candidate: int, position: int, offset: int) -> ipc.BatchHeader | None:
        """A whole batch there that the bytes since `position` leave room for."""
        header = ipc.proven_header(read_at(self.fd, candidate, ipc.MAX_HEADER_BYTES))
        most_rows = (candidate - position) // _SMALLEST_ROW_BYTES
        highest = max(offset + most_rows, self.durable_offset)  # committed messages may have been removed
        if header is None or not offset < header.base_offset <= highest:
            return None
        return self._whole_batch_at(candidate, header.base_offset)

    def _skip_damage(
        self, position: int, offset: int, following: tuple[int, ipc.BatchHeader]
    ) -> tuple[int, ipc.BatchHeader]:
        found_at, header = following
        self.scan.damages.append(Damage(self.path, position, found_at, offset, header.base_offset))
        return found_at, header
