"""What happened, as those outside saw it: messages sent and acked, offsets read, changes of the metadata, faults.

All times are this process's monotonic seconds. Each publisher numbers its own messages; a value names both, so that
whatever is stored says whose it is: `b"3-00001712 …"`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

PADDING = b" " + b"." * 80


def value_of(publisher: int, number: int) -> bytes:
    return b"%d-%08d" % (publisher, number) + PADDING


def name_of(value: bytes) -> tuple[int, int]:
    """(publisher, number) of a stored value."""
    publisher, _, rest = value.partition(b"-")
    return int(publisher), int(rest[:8])


@dataclass(slots=True)
class Published:
    """One publisher's messages; lists are by number.

    Attributes:
        sent_s: when it was handed over for the first time. `acked_s`: when the ack was seen; None: unknown whether it
            is stored.
        acked_offset: where the ack says it is, if this publisher looks; -1 otherwise.
        batch: messages of one number were sent as one, and in order; -1 where something was sent again.
        has_ids: messages carry ids, so each must be stored once; without, at most once for each leader that heard it.
    """

    number: int
    has_ids: bool
    sent_s: list[float] = field(default_factory=list)
    acked_s: list[float | None] = field(default_factory=list)
    acked_offset: list[int] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)

    def begin(self, count: int, batch: int, now_s: float) -> int:
        """Returns the number of the first of `count` new messages."""
        first = len(self.sent_s)
        self.sent_s += [now_s] * count
        self.acked_s += [None] * count
        self.acked_offset += [-1] * count
        self.batch += [batch] * count
        return first

    @property
    def acked(self) -> int:
        return sum(one is not None for one in self.acked_s)


@dataclass(frozen=True, slots=True)
class MetadataChange:
    """`kind` is create or delete; `outcome`: made, found, gone, missing, or unknown (it may have been done, or may be
    done later).
    """

    name: str
    kind: str
    outcome: str
    began_s: float
    ended_s: float
    broker: int


@dataclass(slots=True)
class FaultEvent:
    """`healed_s`: when all that was broken was whole again; `in_sync_s`: when all replicas were in the ISR.

    `keeps_majority`: a majority of the brokers and `min_isr` replicas of the stream went on, whole, connected, with
    NATS: writes must resume without the healing. `hit`: the brokers that did not. `broken_s`: when something more broke
    after the beginning; the time to resume is counted anew from there. `resumes_s`: when the cause was gone and all
    processes answered: from there on, writes that had stopped are due. `orderly_s`: when one was asked to stop while
    all were whole.
    """

    kind: str
    place: str
    began_s: float
    keeps_majority: bool
    healed_s: float | None = None
    in_sync_s: float | None = None
    is_awaited: bool = True
    notes: list[str] = field(default_factory=list)
    hit: frozenset[int] = frozenset()
    broken_s: list[float] = field(default_factory=list)
    resumes_s: float | None = None
    orderly_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sample:
    """How the stream looked at a moment."""

    at_s: float
    isr: int
    leader: int | None
    epoch: int


@dataclass(slots=True)
class Followed:
    """How far the reader that is bound to `broker` has come: every offset below `next_offset`, once and in order."""

    broker: int
    next_offset: int = 0


@dataclass(slots=True)
class Violation:
    promise: str
    text: str


class History:
    """Of a cluster, or of one of its streams. Filled from several threads, judged by `checkers` when all is quiet."""

    def __init__(self, stream: str = "") -> None:
        self.stream = stream
        self.started_s = time.monotonic()
        self.published: list[Published] = []
        self.read: dict[int, int] = {}  # offset → hash of the row that some broker served
        self.reads = 0
        self.followed: list[Followed] = []
        self.changes: list[MetadataChange] = []
        self.faults: list[FaultEvent] = []
        self.samples: list[Sample] = []
        self.violations: list[Violation] = []  # seen at once, while it ran
        self.errors: Counter[str] = Counter()
        self.flips: Counter[str] = Counter()  # bits in sealed segments of running brokers, and what became of them
        self._lock = threading.Lock()

    def new_publisher(self, *, has_ids: bool) -> Published:
        with self._lock:
            self.published.append(Published(len(self.published), has_ids))
            return self.published[-1]

    def violate(self, promise: str, text: str) -> None:
        with self._lock:
            if sum(one.promise == promise for one in self.violations) < 20:
                at = f"{self.stream} at" if self.stream else "at"
                self.violations.append(Violation(promise, f"{at} {time.monotonic() - self.started_s:.2f} s: {text}"))

    def note_error(self, who: str, error: Any) -> None:
        with self._lock:
            self.errors[f"{who}: {str(error)[:120]}"] += 1

    @property
    def acked(self) -> int:
        return sum(one.acked for one in self.published)
