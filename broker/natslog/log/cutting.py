"""The kept part of a segment as a new unsealed segment: for truncation inside a sealed segment or inside a batch.

Theory of operation. The kept batches are proven and written beside the segment, synced, and renamed to its unsealed
name; a sealed file is removed after that. A crash leaves one of the files or both; in the latter case the sealed one is
used if it is intact (`opening`). At every moment the folder therefore opens as the log before or after the truncation.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from natslog.arrow import ipc
from natslog.errors import CorruptLog
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.chain import Segment
from natslog.log.checked_file import sync_folder, write_all
from natslog.log.recovery import scan_segment
from natslog.log.sealed import SealedSegment
from natslog.log.segment import (
    ACTIVE_SUFFIX,
    ActiveSegment,
    check_file_header,
    damage,
    file_header,
    read_batch,
    replace_durably,
)


def cut_segment(segment: Segment, end_offset: int, stream_id: str) -> ActiveSegment | None:
    """Truncates the last segment of the log to `end_offset`; durable when this returns.

    Returns:
        The segment that replaces it; None if the segment remains, perhaps shorter.

    Raises:
        CorruptLog: a batch that is to be kept is damaged. OSError: a file could not be cut or written.
    """
    if isinstance(segment, ActiveSegment):
        if segment.cut_to(end_offset):
            return None
    elif _ends_at_or_below(segment, end_offset):
        return None
    kept = _write_kept_part(segment, end_offset, stream_id)
    if isinstance(segment, ActiveSegment):
        segment.close()
    else:
        segment.path.unlink()
        sync_folder(segment.path.parent)
    return kept


def _ends_at_or_below(segment: SealedSegment, end_offset: int) -> bool:
    try:
        return segment.end_offset <= end_offset
    except CorruptLog:
        return False  # its footer is damaged: the batches are written anew


def _write_kept_part(segment: Segment, end_offset: int, stream_id: str) -> ActiveSegment:
    beside = segment.path.with_suffix(".tmp")
    target = os.open(beside, os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_RDWR, 0o644)
    try:
        header = file_header(stream_id, segment.base_offset)
        write_all(target, [header])
        index, position = BatchIndex(), len(header)
        for entry, message in _kept_batches(segment, end_offset):
            write_all(target, [message])
            index.append(
                BatchEntry(
                    entry.base_offset, entry.end_offset, entry.rows, position, len(message), entry.max_timestamp_us
                )
            )
            position += len(message)
        os.fsync(target)
        path = segment.path.with_suffix(ACTIVE_SUFFIX)
        replace_durably(beside, path)
    except BaseException:
        os.close(target)
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    return ActiveSegment(path, segment.base_offset, position, index, _fd=target)


def _kept_batches(segment: Segment, end_offset: int) -> Iterator[tuple[BatchEntry, bytes | memoryview]]:
    """Proven batches below `end_offset`; of one that goes beyond, its first rows as a batch."""
    index, expected = readable_index(segment), segment.base_offset
    fd = os.open(segment.path, os.O_RDONLY)
    try:
        for entry in (index[at] for at in range(len(index))):
            if entry.base_offset >= end_offset:
                break
            if entry.base_offset != expected:
                raise damage(segment.path, entry, f"begins after offset {expected}")
            message = read_batch(fd, entry, segment.path)
            yield (entry, message) if entry.end_offset <= end_offset else _first_rows(message, end_offset)
            expected = entry.end_offset
    finally:
        os.close(fd)


def _first_rows(message: bytes, end_offset: int) -> tuple[BatchEntry, memoryview]:
    cut = ipc.clip_batch(message, 0, end_offset)
    header = ipc.proven_header(cut)
    assert header is not None, "it was just written"
    return BatchEntry(header.base_offset, end_offset, header.rows, 0, len(cut), header.max_timestamp_us), cut


def readable_index(segment: Segment) -> BatchIndex:
    """The segment's index; where a sealed one's footer is damaged, of the whole batches up to the first bad one.

    Raises:
        CorruptLog: the file header is damaged too.
    """
    try:
        return segment.index
    except CorruptLog:
        with open(segment.path, "rb") as file:
            window = file.read(ipc.MAX_HEADER_BYTES)
        position = check_file_header(window, segment.path, None, segment.base_offset)
        scan = scan_segment(segment.path, position=position, base_offset=segment.base_offset)
        first_bad = min((known.start_offset for known in scan.damages), default=None)
        return scan.index if first_bad is None else scan.index.first(scan.index.first_covering(first_bad))
