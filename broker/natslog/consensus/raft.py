"""One member of a Raft group, without I/O: `step` and `tick` in, `Ready` out.

Theory of operation. The node gives every message to `step`, calls `tick` at a steady pace, and after each asks `ready`.
A `Ready` says, in this order, what to save, what to send once that is on stable storage, and what to apply; `advance`
reports that it is done. Between the two, `step`, `tick` and proposals go on: what comes of them is in the next Ready.

    while (ready := raft.ready()) is not None:
        store.save(ready)        # snapshot, entries, hard state: all of it on stable storage, or none of the rest
        send(ready.messages)
        apply(ready.snapshot, ready.committed)
        raft.advance(ready)
        answer(ready.reads)

Invariants. At most one leader in a term. Logs that hold an entry of the same index and term are equal up to it. A
leader has all entries that were committed before its term. What one member applies at an index, every member does.

A member is identified here by its id alone. The node must detect that an id returned with an empty folder, and thus
without its vote: it compares `Member.directory`, and blocks all messages until the member was added again.

Source: Ongaro's thesis; etcd-io/raft `raft.go`, `rawnode.go`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, assert_never

from natslog.consensus.bounds import MAX_TERM_JUMP
from natslog.consensus.elections import RaftElections
from natslog.consensus.membership import encode_membership, require_safe_change
from natslog.consensus.state import ConfirmedRead, PendingRead
from natslog.consensus.types import (
    AppendRequest,
    AppendResponse,
    Entry,
    HardState,
    Index,
    Membership,
    Message,
    Snapshot,
    SnapshotChunk,
    SnapshotResponse,
    Term,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)
from natslog.errors import ClusterMismatch, InvalidRequest, MembershipChanging, NotMetadataLeader
from natslog.model import BrokerId

_MAX_APPLY_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Ready:
    """What to do now, in the order of the fields."""

    snapshot: Snapshot | None
    """Save it in place of every stored entry, and install it in the state machine."""
    truncate_from: Index | None
    """Stored entries from here on are to be replaced by `entries`."""
    entries: tuple[Entry, ...]
    """Save them."""
    hard_state: HardState | None
    """Save it, with the entries or after them, never before: its `commit` is of the log they make. None: unchanged."""
    must_sync: bool
    """Whether the above needs stable storage. If not (a higher `commit` alone), it may be lost in a crash."""
    messages: tuple[Message, ...]
    """To be sent only AFTER all of the above is on stable storage."""
    committed: tuple[Entry, ...]
    """To be applied, after all of the above is on stable storage. None are given together with a snapshot."""
    reads: tuple[ConfirmedRead, ...]
    """The reader may read once the named index is applied."""


class Raft(RaftElections):
    """Args (of the constructor):

    me: this broker; it campaigns only as a voter, or until its removal is committed (`may_campaign`).
    hard_state, snapshot, entries: what the store holds. A new group starts everywhere from one snapshot that names its
        first members; a broker that joins, from an empty one.
    seed: for election timeouts, drawn between one and two times `election_ticks`.
    """

    trailing_entries = 64
    """Entries that are kept before a snapshot, for followers that are slightly behind."""
    _in_flight: Ready | None = None
    _saved: HardState | None = None
    """As of the last Ready. None: the stored state may differ from the state in memory."""

    def tick(self) -> None:
        self._now += 1
        if self.role == "leader":
            self._tick_leader()
        else:
            self._tick_follower()

    def step(self, message: Message) -> None:
        """Takes a message of another member, late, doubled or out of order as it may be.

        Raises:
            ClusterMismatch: no correct member sends it to this one; nothing is changed by it.
        """
        assert message.to == self.me, f"broker {self.me} was given a message for broker {message.to}"
        self._require_plausible(message)
        if message.term > self.term and not self._on_higher_term(message):
            return
        if message.term < self.term:
            self._answer_lower_term(message)
            return
        match message:
            case VoteRequest():
                self._on_vote_request(message)
            case VoteResponse():
                self._on_vote_response(message)
            case AppendRequest():
                self._on_append_request(message)
            case AppendResponse():
                self._on_append_response(message)
            case SnapshotChunk():
                self._on_snapshot_chunk(message)
            case SnapshotResponse():
                self._on_snapshot_response(message)
            case TimeoutNow():
                self._on_timeout_now()
            case _:
                assert_never(message)

    def _require_plausible(self, message: Message) -> None:
        """A term that cannot result from elections, or an answer to a message that was never sent, must not reach the
        hard state.
        """
        is_blank = self.term == 0 and self.last_index == 0
        if message.term > self.term + MAX_TERM_JUMP and not is_blank:
            raise ClusterMismatch(
                f"broker {message.sender} sent term {message.term}, but broker {self.me} is in term {self.term}: the "
                "difference is too large to be valid",
                broker=message.sender,
            )
        if self.role != "leader" or message.term != self.term:
            return
        if not isinstance(message, AppendResponse | SnapshotResponse):
            return
        is_beyond = isinstance(message, AppendResponse) and not message.rejected and message.index > self.last_index
        if is_beyond or message.round > self._round:
            raise ClusterMismatch(
                f"broker {message.sender} confirms entry {message.index} in round {message.round}, but the leader's "
                f"last entry is {self.last_index} and its last round is {self._round}",
                broker=message.sender,
            )

    # -- requests to a leader

    def propose(self, data: bytes) -> tuple[Term, Index]:
        """Where the command is in the log if it is committed; another entry at that index means it is lost.

        Raises:
            NotMetadataLeader: it is not the leader, or is transferring its leadership.
        """
        self._require_leader()
        return self._propose("command", data)

    def propose_membership(self, membership: Membership) -> tuple[Term, Index]:
        """In force at once, and done when that place is committed.

        Raises:
            NotMetadataLeader: as for `propose`.
            MembershipChanging: another change is not committed yet, or the leader has not committed its first entry.
            InvalidRequest: more than one voter would change, none would be left, or one is named twice.
        """
        self._require_leader()
        self._require_no_pending_change()
        require_safe_change(self.membership, membership)
        place = self._propose("membership", encode_membership(membership))
        self._follow_members()
        return place

    def transfer(self, to: BrokerId) -> None:
        """Transfers leadership as soon as `to` has the whole log; abandoned after an election timeout.

        Raises:
            NotMetadataLeader: as for `propose`.
            InvalidRequest: `to` is no voter, so it could not lead.
        """
        self._require_leader()
        if to not in self.membership.voters:
            raise InvalidRequest(f"broker {to} is not a voter: add or promote it first", voters=self.membership.voters)
        if to == self.me:
            return
        self._successor, self._successor_tick = to, self._now
        if self._progress[to].match_index == self.last_index:
            self._send(TimeoutNow(sender=self.me, to=to, term=self.term))

    def successor(self, excluded: Collection[BrokerId]) -> BrokerId | None:
        """The voter to transfer leadership to before this broker stops: the one with the longest log of those that
        answered lately. None: there is none, or this broker does not lead.
        """
        lately = self._now - 2 * self._heartbeat_ticks
        voters = set(self.membership.voters) - {self.me, *excluded} if self.role == "leader" else ()
        answering = [voter for voter in voters if self._progress[voter].was_active(lately)]
        return max(answering, key=lambda voter: (self.match_of(voter), -voter), default=None)

    def read_index(self, context: int) -> None:
        """`Ready.reads` will hold `context` when it is confirmed that this broker is still leader; never, if it loses
        its leadership before.

        Raises:
            NotMetadataLeader: it is not the leader.
        """
        if self.role != "leader":
            raise self._not_leader()
        self._reads.append(PendingRead(context))

    def compact(self, index: Index, data: bytes) -> Snapshot:
        """`data` is the applied state up to `index`: the snapshot to save. Afterwards, entries from `log.anchor_index`
        on must be kept.

        The newest snapshot known, where that reaches `index` already.
        """
        if index <= self.log.snapshot.index:
            return self.log.snapshot
        term = self.log.term_at(index)
        assert term is not None, "what is applied is in the log"
        snapshot = Snapshot(index=index, term=term, membership=self._history.at(index), data=data)
        self.log.compact(snapshot, keep_entries=self.trailing_entries)
        self._history.compact(snapshot)
        return snapshot

    # -- what is to be done

    def ready(self) -> Ready | None:
        """What to save, send and apply now; None for nothing. `advance` must follow before the next."""
        assert self._in_flight is None, "advance() must follow each Ready"
        if self.role == "leader":
            self._begin_reads()
            self._replicate_all()
        hard_state = self._hard_state()
        if not self._has_news(hard_state):
            return None
        snapshot, self.log.pending_snapshot = self.log.pending_snapshot, None
        truncate_from, entries = self.log.unsaved()
        is_new_vote = self._saved is None or (self._saved.term, self._saved.vote) != (self.term, self.vote)
        self._in_flight = Ready(
            snapshot=snapshot,
            truncate_from=truncate_from,
            entries=entries,
            hard_state=hard_state if hard_state != self._saved else None,
            must_sync=is_new_vote or bool(entries) or snapshot is not None or truncate_from is not None,
            messages=tuple(self._outbox),
            committed=self.log.unapplied(max_bytes=_MAX_APPLY_BYTES) if snapshot is None else (),
            reads=tuple(self._confirmed),
        )
        self._saved = hard_state
        self._outbox, self._confirmed = [], []
        return self._in_flight

    def _has_news(self, hard_state: HardState) -> bool:
        log = self.log
        return bool(
            self._outbox
            or self._confirmed
            or hard_state != self._saved
            or log.has_unsaved
            or log.pending_snapshot is not None
            or log.applied < log.commit
        )

    def advance(self, ready: Ready) -> None:
        """All of `ready` is done: saved, sent, applied."""
        assert ready is self._in_flight, "advance() takes the Ready that was given last"
        self._in_flight = None
        self.log.saved()
        if ready.snapshot is not None:
            self.log.applied = Index(max(self.log.applied, ready.snapshot.index))
        if ready.committed:
            self.log.applied = Index(max(self.log.applied, ready.committed[-1].index))
        if self.role == "leader":
            self._commit_stored()
        elif self.role == "candidate" and self.me not in self._votes and self._is_vote_saved():
            self._count_own_vote()

    def _is_vote_saved(self) -> bool:
        return self._saved is not None and (self._saved.term, self._saved.vote) == (self.term, self.me)

    # -- refusals

    def _require_leader(self) -> None:
        if self.role != "leader":
            raise self._not_leader()
        if self._successor is not None:
            raise NotMetadataLeader(
                f"broker {self.me} is transferring leadership to broker {self._successor}: repeat the request at "
                "that broker in a moment",
                leader=self._successor,
            )

    def _not_leader(self) -> NotMetadataLeader:
        if self.leader is None:
            return NotMetadataLeader(
                "no broker leads the metadata group now: repeat the request in a moment", leader=None
            )
        return NotMetadataLeader(
            f"broker {self.leader} leads the metadata group: send the request to it", leader=self.leader
        )

    def _require_no_pending_change(self) -> None:
        if self._history.latest_index > self.commit:
            raise MembershipChanging("another membership change is in progress: repeat the request when it is complete")
        if not self._has_committed_in_term():
            raise MembershipChanging(
                "this leader was just elected and has not committed its first entry yet: repeat the request in a moment"
            )

    def _propose(self, kind: Literal["command", "membership"], data: bytes) -> tuple[Term, Index]:
        index = Index(self.last_index + 1)
        self._append([Entry(index, self.term, kind, data)])
        return self.term, index
