"""The data that Raft stores and that its members send to each other. Plain values: no behaviour except look-ups.

A `Member` is a broker *with its data folder*: `directory` is created with the folder. A broker that comes back with
an empty folder has another directory and is therefore not the member that voted (after KIP-853).
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NewType, TypeAlias

import msgspec

from natslog.model import BrokerId

Term = NewType("Term", int)
Index = NewType("Index", int)


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A broker in the group; a learner (`is_voter` false) receives everything and counts for nothing."""

    id: BrokerId
    directory: str
    url: str
    is_voter: bool = True


class Membership(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The members of the group, by ascending id."""

    members: tuple[Member, ...] = ()

    @cached_property
    def voters(self) -> tuple[BrokerId, ...]:
        """`dict=True`: it is derived once, because each message of the group requires it."""
        return tuple(member.id for member in self.members if member.is_voter)

    def find(self, broker: BrokerId) -> Member | None:
        return next((member for member in self.members if member.id == broker), None)

    def with_member(self, member: Member) -> Membership:
        """With this one added, or in place of the one of its id."""
        others = [other for other in self.members if other.id != member.id]
        return Membership(members=tuple(sorted([*others, member], key=lambda one: one.id)))

    def without(self, broker: BrokerId) -> Membership:
        return Membership(members=tuple(member for member in self.members if member.id != broker))


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One position of the replicated log. `empty` opens a term; `membership` holds an encoded `Membership`."""

    index: Index
    term: Term
    kind: Literal["command", "membership", "empty"]
    data: bytes = b""


class HardState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """On stable storage before any message that depends on it is sent."""

    term: Term = Term(0)
    vote: BrokerId | None = None
    commit: Index = Index(0)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The applied state up to and with `index`, which was of `term`."""

    index: Index = Index(0)
    term: Term = Term(0)
    membership: Membership = Membership()
    data: bytes = b""


class VoteRequest(msgspec.Struct, frozen=True, kw_only=True, tag="vote?", forbid_unknown_fields=True):
    """`is_pre`: a pre-vote, which changes no state. `by_transfer`: the leader requested this election, so its lease
    does not block it.
    """

    sender: BrokerId
    to: BrokerId
    term: Term
    is_pre: bool
    last_index: Index
    last_term: Term
    by_transfer: bool = False


class VoteResponse(msgspec.Struct, frozen=True, kw_only=True, tag="vote!", forbid_unknown_fields=True):
    sender: BrokerId
    to: BrokerId
    term: Term
    is_pre: bool
    granted: bool


class AppendRequest(msgspec.Struct, frozen=True, kw_only=True, tag="append?", forbid_unknown_fields=True):
    """Entries after (`prev_index`, `prev_term`); none in a heartbeat. `round` numbers heartbeats, for read index."""

    sender: BrokerId
    to: BrokerId
    term: Term
    prev_index: Index
    prev_term: Term
    entries: tuple[Entry, ...] = ()
    commit: Index = Index(0)
    round: int = 0


class AppendResponse(msgspec.Struct, frozen=True, kw_only=True, tag="append!", forbid_unknown_fields=True):
    """If `rejected`, (`index`, `hint_term`) is the last place that may still agree; else all to `index` is stored."""

    sender: BrokerId
    to: BrokerId
    term: Term
    rejected: bool
    index: Index
    hint_term: Term = Term(0)
    round: int = 0


class SnapshotChunk(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot?", forbid_unknown_fields=True):
    """Bytes from `position` on of a snapshot of `total_bytes`; `crc` is the CRC32C of the whole."""

    sender: BrokerId
    to: BrokerId
    term: Term
    index: Index
    index_term: Term
    membership: Membership
    position: int
    total_bytes: int
    crc: int
    data: bytes
    round: int = 0


class SnapshotResponse(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot!", forbid_unknown_fields=True):
    """`position`: bytes held so far; the chunk from there is wanted next. `done`: it is installed."""

    sender: BrokerId
    to: BrokerId
    term: Term
    index: Index
    position: int
    done: bool
    round: int = 0


class TimeoutNow(msgspec.Struct, frozen=True, kw_only=True, tag="campaign", forbid_unknown_fields=True):
    """The leader transfers its leadership: campaign at once."""

    sender: BrokerId
    to: BrokerId
    term: Term


Message: TypeAlias = (
    VoteRequest | VoteResponse | AppendRequest | AppendResponse | SnapshotChunk | SnapshotResponse | TimeoutNow
)
