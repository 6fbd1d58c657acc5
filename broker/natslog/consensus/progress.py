"""A leader's state of one other member, and what it may send to it now.

- `probe`: where the logs agree is not known; one append at a time, and the next one when an answer has new information,
  or with a heartbeat to a member that answers. Duplicate answers have no new information and must not cause duplicate
  messages.
- `replicate`: they agree to `match_index`; appends follow each other without waiting, a bounded number of them.
- `snapshot`: the entries that the member lacks were compacted; a snapshot is sent to it chunk by chunk, one at a time.

Invariants. match_index < next_index. `match_index` never decreases: a member keeps the entries that it stored under
this leader.

Source: etcd-io/raft `tracker/progress.go`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from natslog.consensus.types import Index, Snapshot

MAX_IN_FLIGHT = 16
_NOWHERE = Index(0)


@dataclass(slots=True)
class SnapshotTransfer:
    """A snapshot that is being sent: the chunk from `position` was sent at `sent_tick`."""

    snapshot: Snapshot
    crc: int
    sent_tick: int
    position: int = 0


@dataclass(slots=True)
class Progress:
    """`since_tick`: when the leader began to follow it. `answered_tick`: when it last answered this leader."""

    next_index: Index
    directory: str
    since_tick: int
    match_index: Index = _NOWHERE
    state: Literal["probe", "replicate", "snapshot"] = "probe"
    answered_tick: int | None = None
    moved_tick: int = 0
    paused: bool = False
    round: int = 0
    commit_sent: Index = _NOWHERE
    in_flight: deque[Index] = field(default_factory=deque)
    transfer: SnapshotTransfer | None = None

    @property
    def may_send(self) -> bool:
        match self.state:
            case "probe":
                return not self.paused
            case "replicate":
                return len(self.in_flight) < MAX_IN_FLIGHT
            case "snapshot":
                return False

    def lacks(self, last_index: Index) -> bool:
        """Whether an append would have new information: entries, or the position of a probe."""
        return self.next_index <= last_index or (self.state == "probe" and self.next_index != self.match_index + 1)

    def was_active(self, since_tick: int) -> bool:
        return self.answered_tick is not None and self.answered_tick >= since_tick

    def answered(self, tick: int, round: int) -> None:
        """Any answer: it runs, and follows this leader."""
        self.answered_tick = tick
        self.round = max(self.round, round)

    def sent(self, last: Index, tick: int) -> None:
        """An append whose last entry is `last` goes out."""
        if self.state == "probe":
            self.paused = True
            return
        if not self.in_flight:
            self.moved_tick = tick
        if last >= self.next_index:
            self.in_flight.append(last)
            self.next_index = Index(last + 1)

    def accepted(self, index: Index, tick: int) -> bool:
        """All to `index` is stored there. Whether that is news."""
        is_news = index > self.match_index
        if is_news:
            self.match_index = index
            self.moved_tick = tick
            self.next_index = Index(max(self.next_index, index + 1))
            self.paused = False
        while self.in_flight and self.in_flight[0] <= self.match_index:
            self.in_flight.popleft()
        if self.state == "probe" and self.next_index == self.match_index + 1:
            self.state = "replicate"
        return is_news

    def rejected(self, agreeing: Index) -> None:
        """The logs agree at `agreeing` at best. Never back beyond what was once stored, never forward."""
        next_index = Index(max(self.match_index + 1, min(self.next_index, agreeing + 1)))
        if self.state == "replicate" or next_index < self.next_index:
            self.become_probe(next_index)

    def become_probe(self, next_index: Index) -> None:
        self.state, self.next_index = "probe", next_index
        self.paused = False
        self.transfer = None
        self.in_flight.clear()

    def become_snapshot(self, transfer: SnapshotTransfer) -> None:
        self.state, self.transfer = "snapshot", transfer
        self.in_flight.clear()

    def is_stalled(self, before_tick: int) -> bool:
        """Whether appends are unanswered and made no progress since: one of them was lost."""
        return self.state == "replicate" and bool(self.in_flight) and self.moved_tick <= before_tick
