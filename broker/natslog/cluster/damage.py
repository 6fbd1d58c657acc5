"""What is done about damage on the disk of a replica, and what clients are told about it.

Theory of operation. Damage is first that of one replica: where the replica is one of several, committed messages are on
others, so the damaged part is fetched from them, and clients are referred to another replica. A damaged range inside a
sealed segment is repaired in place, while the replica keeps its role; if no other replica is in sync, the repair waits
for one. All other damage takes the replica out of the candidates, and the log is fetched again from the damage on
(`cluster.replica`). A range that is damaged on every replica cannot be repaired: it is reported with its exact offsets,
until it is repaired from a copy, or its loss is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from natslog.errors import CorruptLog, NatslogError
from natslog.model import BrokerId, StreamRecord

OffsetRange: TypeAlias = tuple[int, int]
"""The first offset, and the one behind the last."""


class Remedy(Enum):
    """What is fetched from another replica: only the damaged range, or the log from the damage on."""

    RANGE = "range"
    LOG = "log"


def has_others_in_sync(record: StreamRecord, me: BrokerId) -> bool:
    """Whether another in-sync replica could serve in place of this one."""
    return any(broker != me for broker in record.isr)


def remedy_for(error: NatslogError, record: StreamRecord, *, is_in_sealed_segment: bool) -> Remedy:
    """Args: is_in_sealed_segment: the error names offsets of one sealed segment of the log of messages."""
    is_range = is_in_sealed_segment and isinstance(error, CorruptLog) and len(record.replicas) > 1
    return Remedy.RANGE if is_range else Remedy.LOG


def range_of(error: NatslogError) -> OffsetRange | None:
    """The offsets that damage names; None where it names none."""
    start, end = error.facts.get("start"), error.facts.get("end")
    if not isinstance(error, CorruptLog) or not isinstance(start, int) or not isinstance(end, int):
        return None
    return start, end


@dataclass(frozen=True, slots=True)
class Fetch:
    """Request the beginning of `[start, end)` from this replica. Answered by `fetched` or `refused`."""

    broker: BrokerId
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Put removed offsets in the place of this range: its loss was accepted. Answered by `given_up`."""

    lost: OffsetRange


class RangeRepair:
    """The repair of one damaged range: it is requested part by part, from one replica after the other. What one replica
    lacks at one place, another one may have: so ranges that are damaged at different places of two replicas are
    repaired on both.

    Args:
        others: the replicas to request it from, the best first.
        accepts_loss: what no replica has is given up.

    Attributes:
        problem: why it cannot be fetched now. without_copy: the part that no other replica has undamaged, as all of
            them answered. The repair ends with either one; otherwise, when all is fetched or given up.
        lost: what was given up.
    """

    def __init__(self, missing: OffsetRange, others: Sequence[BrokerId], *, accepts_loss: bool = False) -> None:
        self._start, self._end = missing
        self._others, self._accepts_loss = others, accepts_loss
        self.problem: NatslogError | None = None
        self.without_copy: OffsetRange | None = None
        self.lost: list[OffsetRange] = []
        self._begin_round()

    def _begin_round(self) -> None:
        self._round_start = self._start
        self._left = list(self._others)
        self._refusals: list[NatslogError] = []
        if not self._left and self._start < self._end:
            self.without_copy = (self._start, self._end)

    def next_step(self) -> Fetch | GiveUp | None:
        """None: it has ended."""
        if self.without_copy is not None:
            return GiveUp(self.without_copy) if self._accepts_loss else None
        is_over = self._start >= self._end or self.problem is not None
        return None if is_over else Fetch(self._left[0], self._start, self._end)

    def fetched(self, upto: int) -> None:
        """The answer has what lies below this offset."""
        self._start = upto

    def refused(self, error: NatslogError) -> None:
        """By the replica that was requested."""
        self._left.pop(0)
        self._refusals.append(error)
        if self._left:
            return
        if self._start > self._round_start:
            self._begin_round()
            return
        waits = [error for error in self._refusals if not isinstance(error, CorruptLog)]
        if waits:  # one that may have it does not give it now
            self.problem = waits[0]
            return
        ends = (error.facts.get("end", self._end) for error in self._refusals)
        self.without_copy = self._start, min([self._end, *(one for one in ends if one > self._start)])

    def given_up(self) -> None:
        assert self.without_copy is not None, "only what no replica has is given up"
        self.lost.append(self.without_copy)
        self._start, self.without_copy = self.without_copy[1], None
        self._begin_round()


class Losses:
    """Offsets of one stream that are damaged on every replica, as far as this replica has found that out.

    Attributes:
        ranges: those that are neither repaired nor accepted as lost. accepted: how many offsets were accepted as lost.
    """

    def __init__(self) -> None:
        self.ranges: frozenset[OffsetRange] = frozenset()  # replaced: threads of readers go through it
        self.accepted = 0

    def cover(self, error: NatslogError) -> bool:
        """Whether it is damage that every replica has."""
        damaged = range_of(error)
        return damaged is not None and any(first < damaged[1] and damaged[0] < last for first, last in self.ranges)

    def note(self, lost: OffsetRange) -> bool:
        """Returns whether this is new, so that it is to be reported."""
        is_new = lost not in self.ranges
        self.ranges |= {lost}
        return is_new

    def resolved(self, segment: OffsetRange, accepted: Sequence[OffsetRange]) -> None:
        """A segment has no damage any more: what could not be repaired in it was accepted as lost."""
        self.ranges = frozenset(one for one in self.ranges if not segment[0] <= one[0] < segment[1])
        self.accepted += sum(end - start for start, end in accepted)

    def are_repairable(self, error: NatslogError, record: StreamRecord, me: BrokerId) -> bool:
        """Whether rows that cannot be read may be passed over for now, because another replica is to give them."""
        return not self.cover(error) and has_others_in_sync(record, me)

    def is_final(self, error: NatslogError, *, others_hold_it: bool) -> bool:
        """Whether clients are to get this error itself: no other replica could serve in place of this one."""
        return not others_hold_it or self.cover(error)
