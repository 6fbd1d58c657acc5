"""Messages that no consumer needs any more, of streams that keep messages for their consumers.

Theory of operation. A message of a work queue is removed when a consumer has acked it; with the retention `interest`,
when every consumer that reads it has, or if none does. Acks are known from the machines; messages that no consumer
reads are found when they are stored, and again when consumers are deleted or read other subjects. While a consumer
cannot be served, because its record is damaged, nothing is removed for lack of interest. What is removed is
recorded in the companion log, in the same commit as the states that say so, and so on all replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from natslog.errors import CorruptLog, OffsetOutOfRange
from natslog.jetstream.consumers.pending import Longs, Marks
from natslog.jetstream.consumers.reading import Rows, covers, rows_of
from natslog.log.removed import offset_set
from natslog.log_events import event

if TYPE_CHECKING:
    from natslog.jetstream.consumers.leading import LedConsumers
    from natslog.jetstream.consumers.machine import Consumer
    from natslog.jetstream.consumers.served import ServedConsumer
    from natslog.log.stream_log import StreamLog
    from natslog.model import StreamRecord

logger = logging.getLogger("natslog.jetstream")

_AT_ONCE = 100_000


class Retention:
    """Of one stream that is led here."""

    def __init__(self, led: LedConsumers) -> None:
        self._led = led
        self._policy_of: StreamRecord | None = None  # the record of `_policy`: it is asked for with each commit
        self._policy = ""
        self._acked: list[Longs] = []  # sequences that may not be needed any more: kept until that is recorded
        self._looked_at: list[Longs] = []  # those of them that the last call of `removable` has looked at
        self._checked = 0  # offset: of messages below it, those that no consumer reads are removed
        self._checking = 0  # offset: from where on the call of `removable` looks at messages

    @property
    def policy(self) -> str:
        if self._policy_of is not (record := self._led.stream.record):
            self._policy_of, self._policy = record, self._led.stream_config().retention
        return self._policy

    @property
    def is_complete(self) -> bool:
        """Whether all messages were looked at, and those that no consumer needs are removed, or nothing can be now."""
        if self._waits_for_consumers:
            return True
        start, end = self._unchecked
        return not (self._acked or self._looked_at) and (self.policy != "interest" or start >= end)

    @property
    def _unchecked(self) -> tuple[int, int]:
        log = self._led.stream.usable_log()
        return max(self._checked, log.first_readable_offset), log.high_watermark

    def check_again(self) -> None:
        """There are messages, or consumers were deleted, or read other subjects."""
        if self.policy != "limits":
            self._led.store_soon()

    def begin_again(self) -> None:
        """Consumers have changed: messages that some of them had to ack may be needed by none now."""
        self._checked = 0
        self.check_again()

    def take_acked(self, served: ServedConsumer) -> None:
        """What this consumer acked since the last call is looked at by the next `removable`."""
        if len(acked := served.machine.take_acked()):
            self._acked.append(acked)

    async def removable(self, changed: Iterable[ServedConsumer]) -> BitMap64:
        """Offsets of messages that no consumer needs any more. `recorded` or `not_recorded` follows, also where this
        call is cancelled.
        """
        self._checking = self._checked
        for served in changed:
            self.take_acked(served)
        policy, found = self.policy, BitMap64()
        if self._waits_for_consumers:
            self._acked, self._looked_at, self._checked, self._checking = [], [], 0, 0  # all are looked at later
            return found
        acked, self._acked = self._acked, []  # more may come while these are looked at
        if policy == "limits":
            return found
        self._looked_at += acked
        if self._looked_at:
            seqs = np.unique(np.concatenate(self._looked_at))
            found |= offset_set(seqs - 1) if policy == "workqueue" else await self._unneeded_of(seqs)
        if policy == "interest":
            found |= await self._unneeded_since()
        log = self._led.stream.usable_log()
        return found - log.visibility.removed.all if found else found

    @property
    def _waits_for_consumers(self) -> bool:
        """Whether a consumer is not served: it begins to be, or its record cannot be read. It may need any message."""
        known = self._led.stream.consumers.consumers.keys()
        return self.policy == "interest" and not self._led.consumers.keys() >= known

    def recorded(self) -> None:
        """What the last call of `removable` returned is in the companion log."""
        self._looked_at = []

    def not_recorded(self) -> None:
        """What the last call of `removable` looked at is looked at again."""
        self._checked = min(self._checked, self._checking)
        self._acked, self._looked_at = self._looked_at + self._acked, []

    def move_start(self) -> None:
        """What lies before the first message that is left is past a limit. Blocks."""
        log = self._led.stream.usable_log()
        start, end = log.first_readable_offset, log.high_watermark
        log.limits.move_to(log.visibility.removed_below(end).next_visible(start, end))

    async def _unneeded_of(self, seqs: Longs) -> BitMap64:
        log = self._led.stream.usable_log()
        found = BitMap64()
        for start in range(0, len(seqs), _AT_ONCE):
            part = seqs[start : start + _AT_ONCE]
            found |= self._unneeded(await self._read(_subjects_of, log, part))
        return found

    async def _unneeded_since(self) -> BitMap64:
        """Among the messages that were stored since the last call."""
        log = self._led.stream.usable_log()
        start, end = self._unchecked
        if start >= end:
            return BitMap64()
        self._checked = min(end, start + _AT_ONCE)  # before they are read: `begin_again` may be called meanwhile
        if self._checked < end:
            self._led.store_soon()
        return self._unneeded(await self._read(rows_of, log, start, self._checked))

    async def _read(self, rows: Callable[..., Iterable[Rows]], log: StreamLog, *which: Any) -> list[Rows]:
        """Nothing where they cannot be read: they are looked at when this or another broker leads the stream next."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._led.readers, lambda: list(rows(log, *which)))
        except (CorruptLog, OffsetOutOfRange) as error:
            logger.warning(
                "stream %s: messages that no consumer needs are kept for now: %s",
                self._led.stream.name,
                error.message,
                extra=event("consumer.retention_waits", stream=self._led.stream.name, reason=error.code),
            )
            return []

    def _unneeded(self, rows: Iterable[Rows]) -> BitMap64:
        """Those of these messages that no consumer has still to deliver, or waits for an ack of."""
        found = BitMap64()
        for seqs, subjects in rows:
            needed = np.zeros(len(seqs), np.bool_)
            for served in self._led.consumers.values():
                needed |= covers(subjects, served.record.config.filters) & needs(served.machine, seqs)
            found |= offset_set(seqs[~needed] - 1)
        return found


def _subjects_of(log: StreamLog, seqs: Longs) -> Iterator[Rows]:
    """Sequences and subjects of those of these messages that there are."""
    first, end = log.first_readable_offset, log.high_watermark
    offsets = seqs[(seqs > first) & (seqs <= end)] - 1
    if not len(offsets):
        return
    for rows, subjects in rows_of(log, int(offsets[0]), int(offsets[-1]) + 1):
        marks = np.isin(rows, seqs)
        yield rows[marks], subjects.filter(pa.array(marks))


def needs(consumer: Consumer, seqs: Longs) -> Marks:
    """Which of these messages, which the consumer reads, it has still to deliver or waits for an ack of."""
    if consumer.config.ack_policy == "explicit":
        found = (seqs >= consumer.next_seq) | (consumer.pending.find(seqs) >= 0) | np.isin(seqs, consumer.skip)
    else:
        found = seqs > consumer.floor[1]
    if consumer.exceeded:
        found |= np.isin(seqs, np.fromiter(consumer.exceeded, np.int64))
    return found
