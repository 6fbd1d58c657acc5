"""Writing sealed segments again without removed messages, so that their space becomes free. Offsets do not change.

Which rows may be dropped is the same on all replicas (`Visibility.droppable`): what the remaining rows hide then
follows from them and from the records of the companion log.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from pyroaring import BitMap64

from natslog.arrow import ipc
from natslog.log.chain import SegmentChain
from natslog.log.merging import merge, stored
from natslog.log.removed import marks_among, offset_range, to_array
from natslog.log.sealed import SealedSegment, write_beside
from natslog.log.segment import read_batch
from natslog.log.visibility import Visibility

_SHARE = 8
"""A segment is due if at least this fraction of its rows is to be dropped."""


def due_segments(
    chain: SegmentChain, visibility: Visibility, before_us: int, pinned: BitMap64
) -> Iterator[SealedSegment]:
    """Those of which enough can be dropped, oldest first.

    Args:
        before_us: a segment with a message of this stream time, or a newer one, is left as it is. `pinned`: offsets of
            rows that stay.
    """
    gone = droppable_offsets(chain, visibility)
    if not gone:
        return
    first_derived = visibility.removed.first_derived(chain.first_readable_offset)
    for segment, following in pairwise(chain.snapshot()):
        start, end = segment.base_offset, following.base_offset
        if (first_derived is not None and end > first_derived) or not visibility.is_applied(end):
            return
        if not isinstance(segment, SealedSegment) or not (count := gone.range_cardinality(start, end)):
            continue
        facts = segment.facts
        if facts.newest_us >= before_us:
            return
        stay = (gone & pinned).range_cardinality(start, end) if pinned else 0
        kept = segment.kept_rows if _keeps(segment, older_messages(chain, visibility, start)) else 0
        pending = count - (end - start - facts.rows) - kept - stay
        if pending > 0 and pending * _SHARE >= facts.rows:
            yield segment


def droppable_offsets(chain: SegmentChain, visibility: Visibility) -> BitMap64:
    """Whose rows may be dropped from files. Messages below the start hide and count for such only that are below, too,
    and the start never goes back; so they need no record.
    """
    recorded, start = visibility.removed.recorded, chain.log_start_offset
    readable = chain.first_readable_offset
    return recorded | offset_range(start, readable) if readable > start else recorded


def pending_rows(chain: SegmentChain, visibility: Visibility) -> int:
    """How many stored rows of sealed segments are recorded as removed."""
    recorded, pending = visibility.removed.recorded, 0
    for segment, following in pairwise(chain.snapshot()):
        start, end = segment.base_offset, following.base_offset
        if isinstance(segment, SealedSegment) and (count := recorded.range_cardinality(start, end)):
            pending += max(0, count - (end - start - segment.facts.rows))
    return pending


def older_messages(chain: SegmentChain, visibility: Visibility, offset: int) -> int:
    """How many messages below this offset are not recorded as removed."""
    start = min(chain.log_start_offset, offset)
    return offset - start - visibility.removed.recorded.range_cardinality(start, offset)


def _keeps(segment: SealedSegment, older: int) -> bool:
    """Whether most of the older messages are left for which rewriting had to keep rows: otherwise it is tried again."""
    return segment.kept_for - older < max(1, segment.kept_rows // _SHARE)


def rewrite(
    segment: SealedSegment,
    removed: BitMap64,
    start: int,
    visibility: Visibility,
    stream_id: str,
    compression: str,
    pause: Callable[[], None],
) -> tuple[SealedSegment, int | None] | None:
    """The segment as a new file beside it, durable and proven, and the size of its rows if they are compressed. None
    where nothing of it can be dropped.

    Args:
        removed: the offsets of the rows that are to be dropped. `start`: those below need not count for others.

    Raises:
        CorruptLog: a batch is damaged; the segment stays as it is. OSError: as the system says.
    """
    recorded = to_array(removed)
    kept = 0
    dropped = 0

    def messages() -> Iterator[memoryview]:
        nonlocal kept, dropped
        index = segment.index
        fd = os.open(segment.path, os.O_RDONLY)
        try:
            for at in range(len(index)):
                message = memoryview(read_batch(fd, index[at], segment.path))
                batch = ipc.decode_batch(message)
                offsets = batch.column("offset").to_numpy()
                rows = np.flatnonzero(marks_among(offsets, recorded))
                below, behind = np.split(rows, [np.searchsorted(offsets[rows], start)])
                drop = visibility.droppable(offsets[behind], batch.column("subject").take(behind))
                drop = np.concatenate([offsets[below], drop])
                kept += len(rows) - len(drop)
                dropped += len(drop)
                pause()
                yield ipc.without_rows(message, marks_among(offsets, drop)) if len(drop) else message
        finally:
            os.close(fd)

    batches = merge(map(stored, messages()))
    written = write_beside(segment, segment.end_offset, batches, stream_id, compression, pause)
    if not dropped:
        segment.kept_rows = kept
        written.path.unlink()
        return None
    fresh = SealedSegment(written.path, segment.base_offset, written.path.stat().st_size)
    fresh.kept_rows = kept
    return fresh, written.uncompressed_bytes
