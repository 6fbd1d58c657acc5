"""Events that follow from the commands that were applied last: see `cluster.activity`.

Every broker keeps them, so that the one that becomes metadata leader reports what its predecessor had not. The number
of an event is made of the index of its command in the metadata log, and is the same on every broker.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from natslog.cluster.activity import Activity, Before, is_silent
from natslog.cluster.commands import Outcome, Proposal
from natslog.cluster.metadata import Metadata
from natslog.consensus import Index
from natslog.node.clock import now_us
from natslog.times import format_timestamp_us

_MOST = 4096
_PER_COMMAND = 1 << 20

Numbered = tuple[int, Activity]


class RecentChanges:
    """Bounded: the oldest events are dropped.

    Attributes:
        news: set when there are new events.
        is_reporting: whether this broker is to report the events that it keeps. `dropped`: events that it should have
            reported, and had no room for.
    """

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.is_reporting = False
        self.dropped = 0
        self._recent: deque[Numbered] = deque()

    def decide(self, state: Metadata, index: Index, proposal: Proposal) -> Outcome:
        """Applies the proposal to the state, and keeps its events."""
        if is_silent(proposal.command):
            return state.decide(proposal)
        before, version = Before(state, proposal), state.version
        outcome = state.decide(proposal)
        if state.version != version:
            self._keep(index, before.compare(state))
        return outcome

    def _keep(self, index: Index, events: list[dict[str, object]]) -> None:
        if not events:
            return
        time = format_timestamp_us(now_us())
        for position, fields in enumerate(events[:_PER_COMMAND]):
            shown = {"id": f"m{index}.{position}", "time": time} | fields
            self._recent.append((index * _PER_COMMAND + position, msgspec.convert(shown, Activity)))
        while len(self._recent) > _MOST:
            self._recent.popleft()
            self.dropped += self.is_reporting
        self.news.set()

    def after(self, number: int) -> list[Numbered]:
        """The events that are kept, behind that number."""
        return [one for one in self._recent if one[0] > number]

    def forget(self, number: int) -> None:
        """The events up to this number are stored in the stream."""
        while self._recent and self._recent[0][0] <= number:
            self._recent.popleft()
