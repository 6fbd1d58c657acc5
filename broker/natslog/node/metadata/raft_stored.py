"""The contents of a Raft store as a value: hard state, snapshot, and the entries after it; and how its files are read.

Invariants. Indexes have no gap and terms never decrease; no entry is of a later term than the hard state. Snapshot
index <= commit <= last index. A term and a commit index never decrease, and committed entries are never truncated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from natslog.cluster.encoding import written_by_newer
from natslog.consensus.types import Entry, HardState, Index, Snapshot, Term
from natslog.errors import CorruptLog
from natslog.log.checked_file import read_checked
from natslog.node.data_dir import REMEDY

NO_SNAPSHOT = Snapshot()
FILES = ("wal-*", "snapshot", "log-" + "[0-9]" * 20)
"""Beside `hard-state`; the last two at feature level 1 only."""


class Save(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A change of the store, in this order: a snapshot (where the log does not hold its index and term, it replaces the
    whole log), the log cut from `truncate_from` on, entries at its end, the hard state.
    """

    hard_state: HardState | None
    truncate_from: Index | None
    entries: tuple[Entry, ...]
    snapshot: Snapshot | None = None


class Stored(msgspec.Struct, frozen=True):
    """The state of a store; a new one holds nothing."""

    hard_state: HardState = HardState()
    snapshot: Snapshot = NO_SNAPSHOT
    entries: tuple[Entry, ...] = ()

    @property
    def last_index(self) -> Index:
        return Index(self.snapshot.index + len(self.entries))

    @property
    def last_term(self) -> Term:
        return self.entries[-1].term if self.entries else self.snapshot.term

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether the log has this index, of this term."""
        terms = (self.snapshot.term, *(entry.term for entry in self.entries))
        return self.last_index >= snapshot.index and terms[snapshot.index - self.snapshot.index] == snapshot.term

    def after(self, save: Save) -> Stored:
        truncate_from, entries, snapshot = save.truncate_from, save.entries, save.snapshot
        was, now, log = self.hard_state, save.hard_state or self.hard_state, self
        assert now.term >= was.term, f"the term falls from {was.term} to {now.term}"
        assert now.commit >= was.commit, f"commit falls from {was.commit} to {now.commit}"
        if snapshot is not None:
            assert self.holds(snapshot) or snapshot.index >= was.commit, "committed entries stay"
            kept = self.entries[snapshot.index - self.snapshot.index :] if self.holds(snapshot) else ()
            log = Stored(was, snapshot, kept)
            now = HardState(term=now.term, vote=now.vote, commit=max(now.commit, snapshot.index))
        if truncate_from is not None and truncate_from <= log.last_index:
            assert truncate_from > was.commit, f"entries to {was.commit} are committed"
            log = Stored(was, log.snapshot, log.entries[: truncate_from - log.snapshot.index - 1])
        terms = [log.last_term, *(entry.term for entry in entries)]
        assert terms == sorted(terms), f"terms fall after entry {log.last_index}: {terms}"
        assert all(entry.index == at for at, entry in enumerate(entries, log.last_index + 1)), "indexes have no gap"
        new = Stored(now, log.snapshot, (*log.entries, *entries))
        assert new.last_term <= now.term, f"entries of term {new.last_term}, and the term is {now.term}"
        assert now.commit <= new.last_index, f"commit {now.commit} is beyond the end, {new.last_index}"
        return new


def read(path: Path, kind: str, version: int, content: Any) -> Any:
    """The content of a checked file, or None if there is none. Raises CorruptLog, DataDirError, UpgradeRequired."""
    try:
        found = read_checked(path, kind, version)
    except (CorruptLog, msgspec.DecodeError) as error:
        raise damage(path, f"the file is not a complete {kind} file") from error
    try:
        return msgspec.convert(found, content)
    except msgspec.ValidationError as error:
        raise written_by_newer(path, error) from error


def damage(path: Path, what: str) -> CorruptLog:
    return CorruptLog(f"{path}: {what}. {REMEDY}", file=str(path))
