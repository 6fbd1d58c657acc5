"""The members of the group according to the log: an entry is in force from when it is appended until it is truncated.

Between two memberships that differ in at most one voter any two quorums meet; that is why voters come and go one at a
time (Ongaro's thesis, 4.1; the correction of 2015: not before the leader committed an entry of its own term).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from natslog.consensus.types import Entry, Index, Membership, Snapshot
from natslog.errors import InvalidRequest


def encode_membership(membership: Membership) -> bytes:
    return msgspec.msgpack.encode(membership)


def decode_membership(data: bytes) -> Membership:
    return msgspec.msgpack.decode(data, type=Membership)


class MembershipHistory:
    """Memberships by their index, oldest first: that of the snapshot, then those of entries after it."""

    __slots__ = ("_known", "latest")

    def __init__(self, snapshot: Snapshot, entries: Iterable[Entry] = ()) -> None:
        self._known: list[tuple[Index, Membership]] = [(snapshot.index, snapshot.membership)]
        self.latest = snapshot.membership
        self.append(entry for entry in entries if entry.index > snapshot.index)

    @property
    def latest_index(self) -> Index:
        return self._known[-1][0]

    def append(self, entries: Iterable[Entry]) -> None:
        """Applies the memberships in the entries; they replace earlier ones from their indices on."""
        for entry in entries:
            while len(self._known) > 1 and self._known[-1][0] >= entry.index:
                self._known.pop()
            if entry.kind == "membership":
                self._known.append((entry.index, decode_membership(entry.data)))
        self.latest = self._known[-1][1]

    def at(self, index: Index) -> Membership:
        """The one in force at `index`."""
        return next(membership for start, membership in reversed(self._known) if start <= index)

    def compact(self, snapshot: Snapshot) -> None:
        """Removes memberships before the snapshot."""
        later = [(index, membership) for index, membership in self._known if index > snapshot.index]
        self._known = [(snapshot.index, snapshot.membership), *later]


def require_safe_change(current: Membership, wanted: Membership) -> None:
    """Raises InvalidRequest unless the quorums of both must meet."""
    ids = [member.id for member in wanted.members]
    if len(set(ids)) != len(ids):
        raise InvalidRequest("a broker is named twice: name each member once", members=ids)
    if not wanted.voters:
        raise InvalidRequest("the last voter cannot be removed: add another voter first", voters=list(current.voters))
    before = {(member.id, member.directory) for member in current.members if member.is_voter}
    after = {(member.id, member.directory) for member in wanted.members if member.is_voter}
    changed = sorted(before ^ after)
    if len(changed) > 1:
        raise InvalidRequest(
            "voters are added, removed or promoted one at a time: propose one change, wait until it is complete, "
            "then propose the next (a broker with a new data folder must be removed first, then added)",
            brokers=sorted({broker for broker, _ in changed}),
        )
