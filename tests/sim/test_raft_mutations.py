"""Each rule of Raft, switched off, turns the simulation red: otherwise the simulation would prove nothing.

A mutation replaces one small method of `Raft`, or of the node around it. Seeds run until the first that fails.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from natslog.consensus import (
    AppendRequest,
    Entry,
    HardState,
    Index,
    Message,
    Raft,
    Ready,
    Term,
    VoteRequest,
)
from natslog.model import BrokerId
from tests.sim.raft_world import Node, Rules, first_red

MANY_SEEDS = 300


class ForgetsVote(Node):
    """The vote is not on disk, the term is."""

    def start(self) -> None:
        self.disk.hard_state = msgspec.structs.replace(self.disk.hard_state, vote=None)
        super().start()


class ForgetsHardState(Node):
    def start(self) -> None:
        self.disk.hard_state = HardState()
        super().start()


class SendsBeforeSaving(Node):
    sent: Ready | None = None

    def before_save(self, ready: Ready) -> None:
        super().send(ready)
        self.sent = ready

    def send(self, ready: Ready) -> None:
        if ready is not self.sent:
            super().send(ready)


class VotesTwice(Raft):
    def _may_vote(self, request: VoteRequest) -> bool:
        return True


class VotesForShortLogs(Raft):
    def _is_up_to_date(self, request: VoteRequest) -> bool:
        return True


class ComparesLengthOnly(Raft):
    """The longer log wins, whatever its last term."""

    def _is_up_to_date(self, request: VoteRequest) -> bool:
        return request.last_index >= self.log.last_index


class CountsOldTerms(Raft):
    """Figure 8."""

    def _may_commit(self, index: Index) -> bool:
        return True


class CountsItselfUnsaved(Raft):
    def match_of(self, broker: BrokerId) -> Index:
        return self.last_index if broker == self.me else super().match_of(broker)


class CountsLearners(Raft):
    """What a learner stores helps to commit."""

    def _quorum_index(self) -> Index:
        matches = sorted((self.match_of(one.id) for one in self.membership.members), reverse=True)
        return matches[len(self.membership.voters) // 2]


class NeedsNoMajority(Raft):
    def _quorum_index(self) -> Index:
        return max(map(self.match_of, self.membership.voters))


class AppendsAnywhere(Raft):
    """No look at the entry before."""

    def _agrees_at(self, index: Index, term: Term) -> bool:
        return index <= self.last_index


class KeepsConflicts(Raft):
    """What is in the log stays, whatever its term."""

    def _take(self, entries: tuple[Entry, ...]) -> None:
        self._append(entry for entry in entries if entry.index > self.last_index)


class CutsOffNewer(Raft):
    """Every append ends the log, late ones too."""

    def _take(self, entries: tuple[Entry, ...]) -> None:
        self._append(entries)


class CommitsWhatWasNotCompared(Raft):
    def _accept(self, request: AppendRequest, index: Index) -> None:
        self.log.commit_to(Index(min(request.commit, self.last_index)))
        super()._accept(request, index)


class ObeysOldLeaders(Raft):
    def step(self, message: Message) -> None:
        if isinstance(message, AppendRequest) and message.term < self.term and self.role == "follower":
            self.leader = message.sender
            message = msgspec.structs.replace(message, term=self.term)
        super().step(message)


class ChangesMembersAnytime(Raft):
    """Also while another change is under way."""

    def _require_no_pending_change(self) -> None:
        pass


class InstallsDamage(Raft):
    def _is_undamaged(self, data: bytes, crc: int) -> bool:
        return True


class ReadsWithoutQuorum(Raft):
    def _is_round_answered(self, round: int) -> bool:
        return True


class KeepsTruncatedMembers(Raft):
    """A membership stays in force when its entry is gone."""

    def _append(self, entries: Iterable[Entry]) -> None:
        entries = tuple(entries)
        before = self._history.latest
        super()._append(entries)
        if not any(entry.kind == "membership" for entry in entries):
            self._history.latest = before


class ReadsTooEarly(Raft):
    """Before an entry of its own term is committed."""

    def _has_committed_in_term(self) -> bool:
        return True


MUTATIONS = {
    "vote forgotten": Rules(node=ForgetsVote),
    "hard state forgotten": Rules(node=ForgetsHardState),
    "sent before saved": Rules(node=SendsBeforeSaving),
    "votes twice": Rules(raft=VotesTwice),
    "votes for short logs": Rules(raft=VotesForShortLogs),
    "compares length only": Rules(raft=ComparesLengthOnly),
    "counts old terms": Rules(raft=CountsOldTerms),
    "counts itself unsaved": Rules(raft=CountsItselfUnsaved),
    "counts learners": Rules(raft=CountsLearners),
    "needs no majority": Rules(raft=NeedsNoMajority),
    "appends anywhere": Rules(raft=AppendsAnywhere),
    "keeps conflicts": Rules(raft=KeepsConflicts),
    "cuts off newer": Rules(raft=CutsOffNewer),
    "commits what was not compared": Rules(raft=CommitsWhatWasNotCompared),
    "obeys old leaders": Rules(raft=ObeysOldLeaders),
    "changes members anytime": Rules(raft=ChangesMembersAnytime),
    "installs damage": Rules(raft=InstallsDamage),
    "reads without quorum": Rules(raft=ReadsWithoutQuorum),
    "keeps truncated members": Rules(raft=KeepsTruncatedMembers),
    "reads too early": Rules(raft=ReadsTooEarly),
}


NOTICED_LATE = ("counts old terms", "vote forgotten")
"""Rules that many seeds do not need: these take seconds."""


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.long) if one in NOTICED_LATE else one for one in MUTATIONS]
)
def test_rule_switched_off_is_noticed(name: str) -> None:
    assert first_red(MUTATIONS[name], range(MANY_SEEDS)) is not None, f"{name}: {MANY_SEEDS} seeds saw nothing wrong"
