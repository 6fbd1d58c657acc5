"""The replicated log in memory: an anchor (index and term of the last entry dropped), then entries without a gap.

Three indexes advance along it. `stable`: up to here the store has the entries in memory. `commit`: up to here a quorum
has them, and they do not change any more. `applied`: up to here the state machine has them. The newest snapshot lies
between the anchor and `applied`; the entries between anchor and snapshot are kept so that a slow follower rarely needs
the snapshot.

Invariants. Indices have no gap. anchor <= snapshot <= commit <= last. Nothing at or below `commit` is ever replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from natslog.consensus.types import Entry, Index, Snapshot, Term

_ENTRY_OVERHEAD_BYTES = 32


class RaftLog:
    """Args: what the store holds; entries that contradict the snapshot (a crash between saving the one and the other)
    are left out, a commit beyond the log is lowered to its end.
    """

    __slots__ = (
        "_entries",
        "_saved",
        "_saving",
        "_stale_from",
        "anchor_index",
        "anchor_term",
        "applied",
        "commit",
        "pending_snapshot",
        "snapshot",
        "stable",
    )

    def __init__(self, snapshot: Snapshot, entries: Sequence[Entry], commit: Index) -> None:
        self.snapshot = snapshot
        self.pending_snapshot: Snapshot | None = None
        self.anchor_index, self.anchor_term, self._entries = _agreeing(snapshot, entries)
        self.stable = self._saving = self.last_index
        self._saved = self.last_index
        self._stale_from = entries[0].index if entries and not self._entries else None
        self.commit = min(max(commit, snapshot.index), self.last_index)
        self.applied = snapshot.index

    @property
    def last_index(self) -> Index:
        return Index(self.anchor_index + len(self._entries))

    @property
    def last_term(self) -> Term:
        return self._entries[-1].term if self._entries else self.anchor_term

    def term_at(self, index: Index) -> Term | None:
        """None outside of the log."""
        if index == self.anchor_index:
            return self.anchor_term
        if self.anchor_index < index <= self.last_index:
            return self._entries[index - self.anchor_index - 1].term
        return None

    def slice(self, start: Index, *, max_bytes: int, until: Index | None = None) -> tuple[Entry, ...]:
        """Entries from `start` on (to `until` inclusive), as many as fit, but one at least if there is one."""
        assert start > self.anchor_index, f"entry {start} was compacted: the log begins after {self.anchor_index}"
        first = start - self.anchor_index - 1
        end = len(self._entries) if until is None else min(until - self.anchor_index, len(self._entries))
        room_bytes = max_bytes
        for position in range(first, end):
            room_bytes -= len(self._entries[position].data) + _ENTRY_OVERHEAD_BYTES
            if room_bytes < 0:
                return tuple(self._entries[first : max(position, first + 1)])
        return tuple(self._entries[first:end])

    def find_conflict(self, entries: Sequence[Entry]) -> int | None:
        """Position of the first of `entries` that is not here with its term; None when all are."""
        for position, entry in enumerate(entries):
            if self.term_at(entry.index) != entry.term:
                return position
        return None

    def find_by_term(self, index: Index, term: Term) -> Index:
        """The last place at or below `index` whose term is at most `term`: there two logs may still agree.

        Source: etcd-io/raft `findConflictByTerm`. Where it lies before the anchor, the answer does too.
        """
        index = min(index, self.last_index)
        while index >= self.anchor_index and index > 0:
            found = self.term_at(index)
            if found is None or found <= term:
                break
            index = Index(index - 1)
        return index

    def append(self, entries: Sequence[Entry]) -> None:
        """At the end, or in place of everything from the first of them on."""
        if not entries:
            return
        first = entries[0].index
        assert self.commit < first <= self.last_index + 1, (
            f"entry {first} cannot be put into a log that is committed to {self.commit} and ends at {self.last_index}"
        )
        if first <= self.last_index:
            self._truncate(first)
        self._entries.extend(entries)

    def _truncate(self, first: Index) -> None:
        del self._entries[first - self.anchor_index - 1 :]
        self.stable = Index(min(self.stable, first - 1))
        self._saving = Index(min(self._saving, first - 1))

    def commit_to(self, index: Index) -> bool:
        """Whether `commit` moved. It never goes back."""
        if index <= self.commit:
            return False
        assert index <= self.last_index, f"commit {index} lies beyond the log's end {self.last_index}: a log was lost"
        self.commit = index
        return True

    def compact(self, snapshot: Snapshot, *, keep_entries: int) -> None:
        """Makes `snapshot` the newest, and drops all but `keep_entries` of what it covers."""
        assert self.snapshot.index < snapshot.index <= self.applied, "only what is applied can be in a snapshot"
        self.snapshot = snapshot
        anchor = Index(snapshot.index - keep_entries)
        term = self.term_at(anchor)
        if anchor > self.anchor_index and term is not None:
            del self._entries[: anchor - self.anchor_index]
            self.anchor_index, self.anchor_term = anchor, term

    def restore(self, snapshot: Snapshot) -> None:
        """A leader's snapshot in place of everything here; handed to the store with the next Ready."""
        assert snapshot.index > self.commit, "a snapshot never takes the log back"
        self.snapshot = self.pending_snapshot = snapshot
        self.anchor_index, self.anchor_term = snapshot.index, snapshot.term
        self._entries.clear()
        self.stable = self._saving = self._saved = self.commit = snapshot.index

    def unsaved(self) -> tuple[Index | None, tuple[Entry, ...]]:
        """From where the store's entries are to be replaced (None: nowhere), and what it lacks. `saved()` follows."""
        truncate_from = Index(self.stable + 1) if self.stable < self._saved else self._stale_from
        self._stale_from = None
        self._saved = self._saving = self.last_index
        return truncate_from, tuple(self._entries[self.stable - self.anchor_index :])

    @property
    def has_unsaved(self) -> bool:
        return self.stable < self.last_index or self.stable < self._saved or self._stale_from is not None

    def saved(self) -> None:
        """The result of `unsaved()` is on stable storage, except entries that were truncated since."""
        self.stable = self._saving

    def unapplied(self, *, max_bytes: int) -> tuple[Entry, ...]:
        """Committed entries for the state machine; none while it waits for a snapshot."""
        if self.pending_snapshot is not None or self.applied >= self.commit:
            return ()
        return self.slice(Index(self.applied + 1), max_bytes=max_bytes, until=self.commit)


def _agreeing(snapshot: Snapshot, entries: Sequence[Entry]) -> tuple[Index, Term, list[Entry]]:
    """Anchor and entries. Where entries trail the snapshot, the first of them is the anchor."""
    if not entries or entries[-1].index < snapshot.index:
        return snapshot.index, snapshot.term, []
    first = entries[0].index
    assert first <= snapshot.index + 1, f"entries {snapshot.index + 1} to {first - 1} are missing from the store"
    if first == snapshot.index + 1:
        return snapshot.index, snapshot.term, list(entries)
    if entries[snapshot.index - first].term != snapshot.term:
        return snapshot.index, snapshot.term, []
    return entries[0].index, entries[0].term, list(entries[1:])
