"""Limits of messages and bytes: the logical start of a log, which is exact for each message.

Theory of operation. With every commit the leader moves the start so far that what follows is within the limits; readers
get nothing below it from then on, and the followers receive it with the high watermark. Files go later, with whole
segments. The start never goes back, so that a message that was past a limit does not return when others are removed.

The newest message stays, also if it alone has more than `max_bytes`. A message counts with its share of the stored
bytes of its batch. Hidden messages count for their bytes until their segment was rewritten, and not as messages. For a
stream of the JetStream API, `max_bytes` is of visible messages as JetStream counts them (`log.message_bytes`), and a
message that alone has more does not stay.
"""

from __future__ import annotations

import threading
from bisect import bisect_right

from natslog.log.chain import Segment
from natslog.log.extent import bytes_between, reach
from natslog.log.shared import SharedLog
from natslog.model import StreamSettings


class StartLimits:
    """Moves `SegmentChain.limited_below`, at the leader. Thread-safe."""

    def __init__(self, shared: SharedLog) -> None:
        self._shared, self._chain, self._removed = shared, shared.chain, shared.visibility.removed
        self._lock = threading.Lock()  # for the start, which never goes back
        self._middle: tuple[int, Segment | None, Segment | None, int] = (0, None, None, 0)

    def advance(self) -> None:
        """So that what follows the start is within the limits of messages and bytes, where old messages make room for
        new ones.

        Raises:
            CorruptLog: the index of the segment at the start is damaged.
        """
        settings = self._shared.settings
        if settings.discard == "old" and (settings.max_messages, settings.max_bytes) != (None, None):
            with self._lock:
                self._advance(settings)

    def expire(self, now_us: int) -> int | None:
        """The start moves behind the messages that are past the age limit. Returns the timestamp of the first one after
        it; None if there is none.

        Args:
            now_us: the time by which messages expire.

        Raises:
            CorruptLog: the place to look is damaged.
        """
        age_s = self._shared.settings.age_limit_s
        past_us = now_us - int(age_s * 1e6) if age_s is not None else 0
        offset, timestamp_us = self._shared.reader.offset_at(past_us, self._chain.first_readable_offset)
        self.move_to(offset)
        return timestamp_us

    def move_to(self, offset: int) -> None:
        """What lies below is past a limit: readers do not get it from now on."""
        chain = self._chain
        with self._lock:
            chain.limited_below = max(chain.limited_below, min(offset, chain.high_watermark))

    def _advance(self, settings: StreamSettings) -> None:
        chain = self._chain
        _, start, end, _ = chain.positions()
        if settings.max_messages is not None:
            excess = end - start - self._removed.count(start, end) - settings.max_messages
            if excess > 0:
                start = self._removed.visible_from(start, end, excess) if self._removed else start + excess
        if settings.max_bytes is not None and start < end:
            if settings.jetstream is None:
                start = min(self._start_by_bytes(start, end, settings.max_bytes), end - 1)
            else:
                start = self._shared.message_bytes.start_within(start, end, settings.max_bytes)
        chain.limited_below = max(chain.limited_below, start)

    def _start_by_bytes(self, start: int, end: int, max_bytes: int) -> int:
        segments = self._chain.snapshot()
        at = max(0, bisect_right([segment.base_offset for segment in segments], start) - 1)
        while start < end:
            segment = segments[at]
            here_end = segments[at + 1].base_offset if at + 1 < len(segments) else segment.end_offset
            here_bytes = _bytes_of(segment, start, here_end, end)
            excess = here_bytes + self._bytes_behind(segments, at, end) - max_bytes
            if excess <= 0:
                return start
            if excess < here_bytes:
                return min(reach(segment.index, start, min(here_end, end), excess) + 1, end)
            start, at = min(here_end, end), at + 1
        return start

    def _bytes_behind(self, segments: list[Segment], at: int, end: int) -> int:
        """Stored bytes of committed messages in the segments after this one; those of full ones are added up once."""
        if at + 1 >= len(segments):
            return 0
        key = (len(segments), segments[at], segments[-1])
        if self._middle[:3] != key:
            self._middle = (*key, sum(segment.size_bytes for segment in segments[at + 1 : -1]))
        last = segments[-1]
        return self._middle[3] + _bytes_of(last, last.base_offset, last.end_offset, end)


def _bytes_of(segment: Segment, start: int, segment_end: int, end: int) -> int:
    """As `extent` counts them: of a whole segment its file."""
    is_whole = start == segment.base_offset and segment_end <= end
    return segment.size_bytes if is_whole else bytes_between(segment.index, start, min(segment_end, end))
