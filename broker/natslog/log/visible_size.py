"""How many messages of a log are visible, and how many stored bytes they take, for comparison with limits of a stream.

A message counts with its share of the stored bytes of its batch. Uncommitted messages count, hidden ones do not, also
while their files still have them: so removed messages make room at once.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from natslog.log.chain import Segment, SegmentChain
from natslog.log.extent import bytes_between, overlapping
from natslog.log.removed import RemovedOffsets, to_array

_Key = tuple[int, int, int, int]


class VisibleSize:
    """See the module. For one thread at a time: the log's writer."""

    def __init__(self, chain: SegmentChain, removed: RemovedOffsets) -> None:
        self._chain, self._removed = chain, removed
        self._with_hidden: dict[Path, tuple[_Key, int]] = {}

    @property
    def most_messages(self) -> int:
        """An upper bound: there may be fewer, because of rules that are not applied yet."""
        start, end = self._chain.first_readable_offset, self._chain.log_end_offset
        return end - start - self._removed.count(start, end)

    @property
    def most_bytes(self) -> int:
        """An upper bound, as all messages were visible."""
        return self._chain.size_bytes

    def bytes(self, start: int = 0) -> int:
        """Of the visible messages from `start` on.

        Raises:
            CorruptLog: the index of a segment is damaged.
        """
        return self._chain.on_snapshot(lambda segments: self._bytes_of(segments, start))

    def bytes_of_message(self, offset: int) -> int:
        """Its share of its batch; 0 if it is not in the log. Raises CorruptLog."""
        return self._chain.on_snapshot(
            lambda segments: sum(
                bytes_between(segment.index, offset, offset + 1)
                for segment, base, end in overlapping(segments, offset, offset + 1)
                if base <= offset < end
            )
        )

    def _bytes_of(self, segments: list[Segment], start: int) -> int:
        start, end = max(start, self._chain.first_readable_offset), self._chain.log_end_offset
        if len(self._with_hidden) > 2 * len(segments):
            self._with_hidden.clear()
        size_bytes = 0
        for segment, base, segment_end in overlapping(segments, start, end):
            low, high = max(start, base), min(end, segment_end)
            if hidden := self._removed.count(low, high):
                size_bytes += self._without_hidden(segment, (low, high, hidden, segment.size_bytes))
            elif (low, high) == (base, segment_end):
                size_bytes += segment.size_bytes
            else:
                size_bytes += bytes_between(segment.index, low, high)
        return size_bytes

    def _without_hidden(self, segment: Segment, key: _Key) -> int:
        """The same of a segment until more of it is hidden, or added."""
        known = self._with_hidden.get(segment.path)
        if known is None or known[0] != key:
            known = self._with_hidden[segment.path] = key, self._visible_bytes(segment, *key[:2])
        return known[1]

    def _visible_bytes(self, segment: Segment, low: int, high: int) -> int:
        index = segment.index
        bases, ends = np.clip(np.array(index.base_offsets), low, high), np.clip(np.array(index.end_offsets), low, high)
        hidden = to_array(self._removed.hidden_within(low, high))
        visible = ends - bases - (np.searchsorted(hidden, ends) - np.searchsorted(hidden, bases))
        rows = np.array(index.rows)
        return int((np.array(index.lengths) * np.minimum(visible, rows) // np.maximum(rows, 1)).sum())
