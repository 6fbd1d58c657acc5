"""The current state of a member of the group, and the only transition back to follower. The other parts are based on
it.

`RaftState` <- `RaftFollower` <- `RaftLeader` <- `RaftElections` <- `Raft`: each part uses those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from natslog.consensus.membership import MembershipHistory
from natslog.consensus.progress import Progress
from natslog.consensus.raft_log import RaftLog
from natslog.consensus.types import Entry, HardState, Index, Membership, Message, Snapshot, Term
from natslog.model import BrokerId

Role: TypeAlias = Literal["follower", "pre_candidate", "candidate", "leader"]

_MASK = (1 << 64) - 1


class Chance:
    """A small generator of its own (xorshift64*): the core uses no external randomness, so that a seed reproduces a
    run.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = ((seed + 1) * 0x9E3779B97F4A7C15) & _MASK or 1
        self.below(2), self.below(2)

    def below(self, bound: int) -> int:
        state = self._state
        state ^= state >> 12
        state ^= (state << 25) & _MASK
        state ^= state >> 27
        self._state = state
        return ((state * 0x2545F4914F6CDD1D) & _MASK) % (bound << 32) >> 32


@dataclass(slots=True)
class PendingRead:
    """A read that waits for a quorum to answer a heartbeat of `round` or later (None: the round has not begun)."""

    context: int
    index: Index | None = None
    round: int | None = None


@dataclass(frozen=True, slots=True)
class ConfirmedRead:
    """The reader may read as soon as `index` is applied."""

    context: int
    index: Index


@dataclass(slots=True)
class IncomingSnapshot:
    """Chunks of a snapshot as far as they came without a gap."""

    index: Index
    term: Term
    total_bytes: int
    crc: int
    data: bytearray


class RaftState:
    """Terms, votes, the log, the leader, and the time since its last message. Ticks are the only clock."""

    def __init__(
        self,
        *,
        me: BrokerId,
        hard_state: HardState,
        snapshot: Snapshot,
        entries: Sequence[Entry],
        seed: int,
        election_ticks: int = 10,
        heartbeat_ticks: int = 2,
        max_append_bytes: int = 256 * 1024,
        chunk_bytes: int = 256 * 1024,
    ) -> None:
        assert 0 < heartbeat_ticks < election_ticks, "an election must take longer than a heartbeat"
        self.me = me
        self.log = RaftLog(snapshot, entries, hard_state.commit)
        self.term = Term(max(hard_state.term, self.log.last_term))  # entries may have been saved just before a crash,
        self.vote = hard_state.vote if hard_state.term == self.term else None  # the term not yet: then no vote either
        self.role: Role = "follower"
        self.leader: BrokerId | None = None
        self._election_ticks, self._heartbeat_ticks = election_ticks, heartbeat_ticks
        self._max_append_bytes, self._chunk_bytes = max_append_bytes, chunk_bytes
        self._history = MembershipHistory(snapshot, self._entries_after(snapshot.index))
        self._chance = Chance(seed * 1_000_003 + me)
        self._outbox: list[Message] = []
        self._now = self._leader_tick = 0
        self._waited_ticks = 0
        self._timeout_ticks = self._draw_timeout()
        self._votes: dict[BrokerId, bool] = {}
        self._progress: dict[BrokerId, Progress] = {}
        self._successor: BrokerId | None = None
        self._successor_tick = 0
        self._round = 0
        self._reads: list[PendingRead] = []
        self._confirmed: list[ConfirmedRead] = []
        self._incoming: IncomingSnapshot | None = None

    # -- queries

    @property
    def membership(self) -> Membership:
        """In force: that of the last membership entry in the log, committed or not."""
        return self._history.latest

    @property
    def commit(self) -> Index:
        return self.log.commit

    @property
    def applied(self) -> Index:
        return self.log.applied

    @property
    def last_index(self) -> Index:
        return self.log.last_index

    @property
    def is_voter(self) -> bool:
        return self.me in self.membership.voters

    @property
    def may_campaign(self) -> bool:
        """A voter; or one until the change that removes it is committed: its log may be the only one that can win an
        election.

        Two voters, of which the leader removes itself and falls: the other lacks that entry, so it cannot be elected
        without the vote of the first, nor have it. The first leads once more, by the other's vote alone. Source:
        Ongaro's thesis, 4.2.2.
        """
        return self.is_voter or self.me in self._history.at(self.commit).voters

    @property
    def now(self) -> int:
        """In ticks since it was made."""
        return self._now

    def ticks_since_leader(self) -> int:
        """Ticks since the last message of a current leader (since the start, if there was none); 0 on a leader with a
        quorum.
        """
        return self._now - self._leader_tick

    def active_within(self, ticks: int) -> frozenset[BrokerId]:
        """On the leader: itself and the members, learners too, that answered it within so many ticks. Else none."""
        return self.active_since(self._now - ticks)

    def active_since(self, tick: int) -> frozenset[BrokerId]:
        """On the leader: itself and the members that answered it at that tick (of `now`) or later. Else none."""
        if self.role != "leader":
            return frozenset()
        active = [broker for broker, progress in self._progress.items() if progress.was_active(tick)]
        return frozenset([self.me, *active])

    def match_of(self, broker: BrokerId) -> Index:
        """On the leader: the index up to which that member certainly stores the leader's log; 0 for an unknown
        member.
        """
        if broker == self.me:
            return self.log.stable
        progress = self._progress.get(broker)
        return progress.match_index if progress else Index(0)

    # -- for the other parts

    def _send(self, message: Message) -> None:
        self._outbox.append(message)

    def _hard_state(self) -> HardState:
        return HardState(term=self.term, vote=self.vote, commit=self.log.commit)

    def _entries_after(self, index: Index) -> tuple[Entry, ...]:
        if index >= self.log.last_index:
            return ()
        return self.log.slice(Index(index + 1), max_bytes=1 << 62)

    def _is_quorum(self, agrees: Callable[[BrokerId], bool]) -> bool:
        """A quorum of the current voters; the caller must count itself too."""
        voters = self.membership.voters
        return sum(map(agrees, voters)) > len(voters) // 2

    def _become_follower(self, term: Term, leader: BrokerId | None) -> None:
        if term > self.term:
            self.term, self.vote = term, None
        self.role, self.leader = "follower", leader
        self._enter_role()

    def _enter_role(self) -> None:
        """No state of the previous role remains."""
        self._waited_ticks = 0
        self._timeout_ticks = self._draw_timeout()
        self._votes, self._progress = {}, {}
        self._successor, self._round, self._reads = None, 0, []
        self._incoming = None

    def _draw_timeout(self) -> int:
        return self._election_ticks + self._chance.below(self._election_ticks)

    def _received_from_leader(self, leader: BrokerId) -> None:
        """An append or snapshot of this term was received: its sender is the leader."""
        assert self.role != "leader", f"brokers {self.me} and {leader} both lead in term {self.term}"
        assert self.leader in (None, leader), f"brokers {self.leader} and {leader} both lead in term {self.term}"
        if self.role != "follower" or self.leader is None:
            self._become_follower(self.term, leader)
        self._waited_ticks, self._leader_tick = 0, self._now

    def _append(self, entries: Iterable[Entry]) -> None:
        """To the log; a membership among them is in force from here on."""
        entries = tuple(entries)
        self.log.append(entries)
        self._history.append(entries)
