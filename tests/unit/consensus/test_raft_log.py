from __future__ import annotations

import pytest

from natslog.consensus import Entry, Index, Snapshot, Term
from natslog.consensus.raft_log import RaftLog


def entry(index: int, term: int, data: bytes = b"") -> Entry:
    return Entry(Index(index), Term(term), "command", data)


def log_of(*terms: int, commit: int = 0) -> RaftLog:
    """Terms of the entries from 1 on, all of them stored."""
    return RaftLog(Snapshot(), [entry(index, term) for index, term in enumerate(terms, 1)], Index(commit))


def snapshot(index: int, term: int) -> Snapshot:
    return Snapshot(index=Index(index), term=Term(term))


def test_term_at_knows_anchor_and_entries_only() -> None:
    log = log_of(1, 1, 2)
    assert [log.term_at(Index(index)) for index in range(5)] == [0, 1, 1, 2, None]


def test_slice_is_bounded_but_never_empty() -> None:
    log = RaftLog(Snapshot(), [entry(index, 1, bytes(100)) for index in (1, 2, 3)], Index(0))
    assert len(log.slice(Index(1), max_bytes=10)) == 1
    assert len(log.slice(Index(1), max_bytes=300)) == 2
    assert len(log.slice(Index(1), max_bytes=10_000)) == 3
    assert [one.index for one in log.slice(Index(1), max_bytes=10_000, until=Index(2))] == [1, 2]
    assert log.slice(Index(4), max_bytes=10) == ()


def test_find_conflict_names_the_first_that_differs_or_is_new() -> None:
    log = log_of(1, 1, 2)
    assert log.find_conflict([entry(2, 1), entry(3, 2)]) is None
    assert log.find_conflict([entry(2, 1), entry(3, 3)]) == 1
    assert log.find_conflict([entry(3, 2), entry(4, 2)]) == 1


def test_find_by_term_steps_over_whole_terms() -> None:
    log = log_of(1, 1, 4, 4, 5)
    assert log.find_by_term(Index(9), Term(3)) == 2
    assert log.find_by_term(Index(4), Term(4)) == 4
    assert log.find_by_term(Index(5), Term(0)) == 0


def test_append_over_stored_entries_asks_the_store_to_truncate() -> None:
    log = log_of(1, 1, 1)
    log.append([entry(2, 2)])
    assert log.unsaved() == (2, (entry(2, 2),))
    log.saved()
    assert (log.stable, log.last_index, log.has_unsaved) == (2, 2, False)


def test_truncation_while_saving_is_saved_again() -> None:
    log = log_of(1)
    log.append([entry(2, 1), entry(3, 1)])
    assert log.unsaved() == (None, (entry(2, 1), entry(3, 1)))
    log.append([entry(3, 2)])
    log.saved()
    assert log.stable == 2
    assert log.unsaved() == (3, (entry(3, 2),))


def test_committed_entry_is_never_replaced() -> None:
    with pytest.raises(AssertionError, match="committed to 2"):
        log_of(1, 1, commit=2).append([entry(2, 2)])


def test_commit_beyond_the_log_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="a log was lost"):
        log_of(1).commit_to(Index(2))


def test_compact_keeps_trailing_entries() -> None:
    log = log_of(1, 1, 2, 2, 3, commit=5)
    log.applied = Index(4)
    log.compact(snapshot(4, 2), keep_entries=2)
    assert (log.anchor_index, log.anchor_term, log.last_index) == (2, 1, 5)
    assert log.term_at(Index(1)) is None
    assert log.term_at(Index(5)) == 3


def test_restore_replaces_everything_and_waits_to_be_saved() -> None:
    log = log_of(1, 1, 1)
    log.restore(snapshot(7, 4))
    assert (log.anchor_index, log.last_index, log.last_term, log.commit) == (7, 7, 4, 7)
    assert log.pending_snapshot == snapshot(7, 4)
    assert log.unsaved() == (None, ())


def test_start_with_entries_that_trail_the_snapshot_keeps_them() -> None:
    log = RaftLog(snapshot(3, 2), [entry(2, 1), entry(3, 2), entry(4, 2)], Index(4))
    assert (log.anchor_index, log.last_index, log.applied, log.commit) == (2, 4, 3, 4)


@pytest.mark.parametrize("entries", [[entry(1, 1), entry(2, 1)], [entry(5, 1), entry(6, 1)]])
def test_start_with_entries_a_snapshot_replaced_drops_them_from_the_store(entries: list[Entry]) -> None:
    log = RaftLog(snapshot(5, 3), entries, Index(1))
    assert (log.last_index, log.last_term, log.commit) == (5, 3, 5)
    assert log.unsaved() == (entries[0].index, ())
    assert not log.has_unsaved


def test_start_with_a_gap_is_refused() -> None:
    with pytest.raises(AssertionError, match="missing from the store"):
        RaftLog(snapshot(2, 1), [entry(5, 1)], Index(0))
