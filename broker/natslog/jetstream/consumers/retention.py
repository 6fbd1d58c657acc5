"""Messages that no consumer needs any more, of streams that keep messages for their consumers.

Theory of operation. A message of a work queue is removed when a consumer has acked it; with the retention `interest`,
when every consumer that reads it has, or if none does. Acks are known from the machines; messages that no consumer
reads are found when they are stored, and again when consumers are deleted or read other subjects. What is removed is
recorded in the companion log, in the same commit as the states that say so, and so on all replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from natslog.errors import CorruptLog, OffsetOutOfRange
from natslog.jetstream.consumers.pending import Longs
from natslog.jetstream.consumers.reading import covers, rows_of
from natslog.log.removed import offset_set

if TYPE_CHECKING:
    from natslog.jetstream.consumers.leading import LedConsumers
    from natslog.jetstream.consumers.served import ServedConsumer

logger = logging.getLogger("natslog.jetstream")

_AT_ONCE = 100_000


class Retention:
    """Of one stream that is led here."""

    def __init__(self, led: LedConsumers) -> None:
        self._led = led
        self._checked = 0  # offset: of messages below it, those that no consumer reads are removed
        self._acked = BitMap64()  # offsets of a work queue that could not be removed

    @property
    def policy(self) -> str:
        retention: str = self._led.stream_config().retention
        return retention

    async def begin(self) -> None:
        """All messages are looked at: what was acked last may not have been removed."""
        self._checked = 0

    @property
    def is_complete(self) -> bool:
        """Whether all messages were looked at."""
        return self.policy != "interest" or self._checked >= self._led.stream.usable_log().high_watermark

    def look_again(self) -> None:
        """There are messages, or consumers were deleted, or read other subjects."""
        if self.policy == "interest":
            self._led.store_soon()

    def begin_again(self) -> None:
        """Consumers have changed: messages that some of them had to ack may be needed by none now."""
        self._checked = 0
        self.look_again()

    async def removable(self, changed: Iterable[ServedConsumer]) -> BitMap64:
        """Offsets of messages that no consumer needs any more."""
        policy = self.policy
        acked = [served.machine.take_acked() for served in changed]
        if policy == "limits":
            return BitMap64()
        seqs = np.unique(np.concatenate(acked)) if any(map(len, acked)) else np.empty(0, np.int64)
        found = BitMap64()
        if len(seqs):
            found |= offset_set(seqs - 1) if policy == "workqueue" else await self._unneeded_of(seqs)
        if policy == "workqueue":
            found |= self._acked
            self._acked = BitMap64()
        if policy == "interest":
            found |= await self._unneeded_since()
        log = self._led.stream.usable_log()
        return found - log.visibility.removed.all if found else found

    def not_removed(self, offsets: BitMap64) -> None:
        """They could not be recorded: they are looked at again."""
        if self.policy == "workqueue":
            self._acked |= offsets
        elif offsets:
            self._checked = min(self._checked, int(offsets.min()))

    def removed(self, offsets: BitMap64) -> None:
        """They are recorded. What lies before the first message that is left is past a limit. Blocks."""
        log = self._led.stream.usable_log()
        start, end = log.first_readable_offset, log.high_watermark
        log.limit_start(log.visibility.removed_below(end).next_visible(start, end))

    async def _unneeded_of(self, seqs: Longs) -> BitMap64:
        log = self._led.stream.usable_log()
        loop = asyncio.get_running_loop()
        found = BitMap64()
        for start in range(0, len(seqs), _AT_ONCE):
            part = seqs[start : start + _AT_ONCE]
            try:
                subjects = await loop.run_in_executor(self._led.readers, _subjects_of, log, part)
            except (CorruptLog, OffsetOutOfRange) as error:
                logger.warning("stream %s: messages are removed later: %s", self._led.stream.name, error.message)
                continue
            found |= self._unneeded(*subjects)
        return found

    async def _unneeded_since(self) -> BitMap64:
        """Among the messages that were stored since the last call."""
        log = self._led.stream.usable_log()
        start, end = max(self._checked, log.first_readable_offset), log.high_watermark
        if start >= end:
            return BitMap64()
        try:
            rows = await asyncio.get_running_loop().run_in_executor(
                self._led.readers, lambda: list(rows_of(log, start, min(end, start + _AT_ONCE)))
            )
        except (CorruptLog, OffsetOutOfRange) as error:
            logger.warning("stream %s: messages are removed later: %s", self._led.stream.name, error.message)
            self._checked = end
            return BitMap64()
        self._checked = min(end, start + _AT_ONCE)
        if self._checked < end:
            self._led.store_soon()
        found = BitMap64()
        for seqs, subjects in rows:
            found |= self._unneeded(seqs, subjects)
        return found

    def _unneeded(self, seqs: Longs, subjects: Any) -> BitMap64:
        """Those of these messages that no consumer has still to deliver, or waits for an ack of."""
        if not len(seqs):
            return BitMap64()
        needed = np.zeros(len(seqs), np.bool_)
        for served in self._led.consumers.values():
            needed |= covers(subjects, served.record.config.filters) & served.machine.needs(seqs)
        return offset_set(seqs[~needed] - 1)


def _subjects_of(log: Any, seqs: Longs) -> tuple[Longs, Any]:
    """Sequences and subjects of those of these messages that there are."""
    first, end = log.first_readable_offset, log.high_watermark
    offsets = seqs[(seqs > first) & (seqs <= end)] - 1
    if not len(offsets):
        return seqs[:0], pa.array([], pa.string())
    found_seqs, found_subjects = [], []
    for rows, subjects in rows_of(log, int(offsets[0]), int(offsets[-1]) + 1):
        marks = np.isin(rows, seqs)
        found_seqs.append(rows[marks])
        found_subjects.append(subjects.filter(pa.array(marks)))
    if not found_seqs:
        return seqs[:0], pa.array([], pa.string())
    return np.concatenate(found_seqs), pa.chunked_array(found_subjects).combine_chunks()
