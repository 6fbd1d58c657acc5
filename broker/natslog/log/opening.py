"""From the files of a folder to a chain of segments: which file counts, where a torn tail is cut, what is damage."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from natslog.arrow import ipc
from natslog.errors import CorruptLog
from natslog.log.chain import SegmentChain
from natslog.log.recovery import Damage, scan_segment
from natslog.log.sealed import SealedSegment, read_footer_index
from natslog.log.segment import ACTIVE_SUFFIX, SEALED_SUFFIX, ActiveSegment, check_file_header, file_header

logger = logging.getLogger("natslog.log")


class Opening:
    """Fills a chain from a folder.

    Args:
        checkpointed: the high watermark that is known to be durable: nothing below may be cut.
        several_bytes: as `scan_segment`.

    Attributes:
        newest_timestamp_us: of the messages there; 0 where nothing can be known of it.
    """

    def __init__(
        self, folder: Path, stream_id: str, chain: SegmentChain, checkpointed: int, *, several_bytes: int = 0
    ) -> None:
        self.folder = folder
        self.stream_id = stream_id
        self.chain = chain
        self.newest_timestamp_us = 0
        self._checkpointed = checkpointed
        self._several_bytes = several_bytes

    def open_segments(self) -> None:
        """Once.

        Raises:
            CorruptLog: a sealed file beside its unsealed twin is not whole. DataDirError: a newer format.
            OSError: the folder cannot be used.
        """
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink()
        sealed = {int(path.stem): path for path in self.folder.glob(f"*{SEALED_SUFFIX}")}
        active = {int(path.stem): path for path in self.folder.glob(f"*{ACTIVE_SUFFIX}")}
        for base_offset in sorted(set(sealed) & set(active)):
            read_footer_index(sealed[base_offset])  # whole, or this raises and both are kept
            active.pop(base_offset).unlink()  # only the removal was missed
        bases = sorted(sealed | active)
        for base_offset, next_base in zip(bases, [*bases[1:], None], strict=False):
            if base_offset in sealed:
                path = sealed[base_offset]
                self.chain.segments.append(SealedSegment(path, base_offset, path.stat().st_size))
            elif (segment := self._recover_active(active[base_offset], base_offset, next_base)) is not None:
                self.chain.segments.append(segment)
        for one in self.chain.segments[-2:]:  # the last one may have no rows
            try:
                if one.max_timestamp_us:
                    self.newest_timestamp_us = one.max_timestamp_us
            except CorruptLog as error:  # reads of that segment will say so; the log's end is in the one after it
                logger.error("%s", error.message)

    def _recover_active(self, path: Path, base_offset: int, next_base: int | None) -> ActiveSegment | None:
        """The segment, its torn tail cut off and the rest fsynced; None where nothing was ever in it."""
        _forget_cached(path)
        with open(path, "rb") as file:
            window = file.read(ipc.MAX_HEADER_BYTES)
        expected = file_header(self.stream_id, base_offset)
        # An ack of this file, or of one behind it, is durable up to here: nothing below may be cut.
        durable_offset = max(self._checkpointed, next_base or 0)
        if durable_offset <= base_offset and (not any(window) or _is_cut(window, expected)):
            logger.warning("%s: removed; its header was never finished, so nothing was ever in it", path)
            path.unlink()
            return None
        header_bytes = self._checked_header_bytes(window, path, base_offset, len(expected))
        scan = scan_segment(
            path,
            position=header_bytes,
            base_offset=base_offset,
            next_base_offset=next_base,
            durable_offset=durable_offset,
            several_bytes=self._several_bytes,
        )
        self.chain.damages += scan.damages
        if scan.torn_bytes and not self.chain.damages:
            logger.warning("%s: cut an unfinished commit: %d bytes at %d", path, scan.torn_bytes, scan.end_position)
            os.truncate(path, scan.end_position)
        created_us = scan.index.max_timestamps_us[0] if len(scan.index) else int(path.stat().st_mtime * 1e6)
        segment = ActiveSegment(path, base_offset, scan.end_position, scan.index, created_us)
        segment.sync()
        if next_base is not None and segment.end_offset != next_base and not scan.damages:
            end = scan.end_position
            self.chain.damages.append(Damage(path, end, end, segment.end_offset, next_base))
        return segment

    def _checked_header_bytes(self, window: bytes, path: Path, base_offset: int, expected_bytes: int) -> int:
        try:
            return check_file_header(window, path, self.stream_id, base_offset)
        except CorruptLog:
            self.chain.damages.append(Damage(path, 0, expected_bytes, base_offset, base_offset))
            return expected_bytes


def _is_cut(window: bytes, expected: bytes) -> bool:
    return len(window) < len(expected) and expected.startswith(window)


def _forget_cached(path: Path) -> None:
    """What recovery reads comes from the disk: after a failed fsync the page cache holds what the disk does not."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
