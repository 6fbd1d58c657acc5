"""What a consumer delivers at once, and how much of it the deliver subject of a push consumer takes: while it has a
subscriber, at the pace of the rate limit and of the times of publication, and within the window of flow control. Pure.

Source: nats-server, `server/consumer.go`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.jetstream.consumers.pending import Longs
from natslog.jetstream.consumers.pulls import FOREVER_US, NS_PER_US, Status, status

FLOW_BYTES = 32 * 1024 * 1024
"""The most bytes that a subscriber with flow control has not confirmed yet."""
_FIRST_FLOW_SHARE = 16
_REPLAY_AT_ONCE_US = 1000
NO_SEQS = np.empty(0, np.int64)


class Wanted(NamedTuple):
    """Messages to be read: those with these sequences, or else so many from `start` on. `is_again`: they were delivered
    before.
    """

    seqs: Longs
    start: int
    most: int
    is_again: bool = False


@dataclass(slots=True)
class Batch:
    """Messages that were read. `seqs`, `sizes` (bytes of subject, headers and payload), `times_us`: of each."""

    seqs: Longs
    sizes: Longs
    times_us: Longs


@dataclass(slots=True)
class Delivery:
    """The first `count` messages of a batch, in this order.

    Attributes:
        replies: subjects to deliver to; `reply_of`: the number of that of each message. delivered_as, times, pending:
            of each: its consumer sequence, how often it was delivered, and how many messages follow.
        statuses: with the number of messages before each.
    """

    count: int = 0
    replies: list[str] = field(default_factory=list)
    reply_of: Longs = field(default_factory=lambda: NO_SEQS)
    delivered_as: Longs = field(default_factory=lambda: NO_SEQS)
    times: Longs = field(default_factory=lambda: NO_SEQS)
    pending: Longs = field(default_factory=lambda: NO_SEQS)
    statuses: list[tuple[int, Status]] = field(default_factory=list)


class DeliverSubject:
    """That of a push consumer.

    Args:
        flow_prefix: of the reply subjects of flow control requests.

    Attributes:
        active: it has a subscriber. `replay_upto`: the last message that is sent at the pace of its publication.
        resumes_us: until when nothing is sent, so as to keep the pace. heartbeat_us: when the next heartbeat is due.
    """

    __slots__ = ("_last_time_us", "active", "flow", "heartbeat_us", "replay_upto", "resumes_us")

    def __init__(self, flow_prefix: str) -> None:
        self.active = False
        self.flow = FlowControl(flow_prefix)
        self.heartbeat_us = FOREVER_US
        self.replay_upto = self.resumes_us = 0
        self._last_time_us = 0

    def reset_heartbeat(self, config: ConsumerConfig, now_us: int) -> None:
        """Something was sent, or is to be, from now on."""
        every_us = config.idle_heartbeat // NS_PER_US
        self.heartbeat_us = now_us + every_us if every_us else FOREVER_US

    def deliver(self, config: ConsumerConfig, batch: Batch, sizes: Longs, now_us: int) -> Delivery:
        """The first of these messages, as many as may be sent now. `sizes`: of each, in bytes."""
        count = self._paced(config, batch, sizes, now_us)
        found = Delivery(count, [config.deliver_subject], np.zeros(count, np.int64))
        if config.flow_control:
            found.count, asked_after = self.flow.sent(sizes[:count])
            found.reply_of = found.reply_of[: found.count]
            if asked_after is not None:
                request = status(config.deliver_subject, "100 FlowControl Request", reply=self.flow.asked)
                found.statuses.append((asked_after, request))
        if found.count:
            self.reset_heartbeat(config, now_us)
        return found

    def _paced(self, config: ConsumerConfig, batch: Batch, sizes: Longs, now_us: int) -> int:
        """How many of these messages may be sent now, by the rate limit and the times of their publication."""
        count = len(sizes) if self.active else 0  # the subscriber may have gone while they were read
        if self.replay_upto and count and int(batch.seqs[0]) <= self.replay_upto:
            count = self._replayed(batch, now_us)
        rate = config.rate_limit_bps / 8 / 1e6  # bytes in a microsecond
        if rate and count:
            fits = int(np.searchsorted(np.cumsum(sizes[:count]), max(1, rate * 100_000))) + 1
            count = min(count, fits)
            sent = int(sizes[:count].sum())
            self.resumes_us = max(self.resumes_us, now_us) + int(sent / rate)
        return count

    def _replayed(self, batch: Batch, now_us: int) -> int:
        """Those that were published within a millisecond after the one before go with it."""
        times = batch.times_us
        if self._last_time_us and (pause_us := int(times[0]) - self._last_time_us) > _REPLAY_AT_ONCE_US:
            self._last_time_us = int(times[0])
            self.resumes_us = now_us + pause_us
            return 0
        gaps = np.flatnonzero(np.diff(times) > _REPLAY_AT_ONCE_US)
        count = int(gaps[0]) + 1 if len(gaps) else len(times)
        self._last_time_us = int(times[count - 1])
        return count


class FlowControl:
    """A subscriber is asked to confirm that it has received what was sent, before much more is sent."""

    __slots__ = (
        "_asked_at",
        "_most",
        "_prefix",
        "_requests",
        "_unconfirmed",
        "asked",
    )

    def __init__(self, prefix: str) -> None:
        self.asked = ""
        self._prefix, self._requests = prefix, 0
        self._most = FLOW_BYTES // _FIRST_FLOW_SHARE
        self._unconfirmed = 0
        self._asked_at = 0

    @property
    def is_stalled(self) -> bool:
        return self._unconfirmed > self._most

    def sent(self, sizes: Longs) -> tuple[int, int | None]:
        """How many of these messages may be sent now, and behind how many of them the subscriber is to be asked."""
        if not len(sizes):
            return 0, None
        sums = self._unconfirmed + np.cumsum(sizes)
        count = min(len(sizes), int(np.searchsorted(sums, self._most, "right")) + 1)
        asked_after = None
        if not self.asked:
            first = int(np.searchsorted(sums[:count], self._most // 2, "right"))
            if first < count:
                self._requests += 1
                self.asked, self._asked_at = f"{self._prefix}{self._requests}", int(sums[first])
                asked_after = first + 1
        self._unconfirmed = int(sums[count - 1])
        return count, asked_after

    def confirm(self, reply: str) -> None:
        if reply != self.asked or not reply:
            return
        self._most = min(FLOW_BYTES, 2 * self._most)
        self._unconfirmed = max(0, self._unconfirmed - self._asked_at)
        self.asked, self._asked_at = "", 0
