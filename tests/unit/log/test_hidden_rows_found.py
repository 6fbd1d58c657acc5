"""Defects of reading with hidden messages that a review found: each of these tests fails before it is corrected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from natslog.arrow import ipc
from natslog.arrow.restamping import checked_batches
from natslog.log import ReplicaLog, log_reader
from natslog.log.log_reader import LogReader
from natslog.log.rules import Rule
from natslog.model import Epoch
from tests.unit.log.test_visibility import Message, Replica, rows_of

SMALL = 6_000


def filled(replica: Replica, *, commits: int = 30, subject: Callable[[int], str] = str) -> None:
    for at in range(commits):
        rows: list[Message] = [(subject(2 * at), None, None), (subject(2 * at + 1), None, None)]
        replica.log.append(rows_of(rows, 2 * at), 1_000_000 + at)
    replica.log.roll()


def seals_after_first(log: ReplicaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment is sealed when a plan has its first batches."""
    extend, calls = LogReader._extend, list[int]()

    def extended(self: LogReader, *arguments: Any) -> bool:
        is_extended = extend(self, *arguments)
        calls.append(1)
        if len(calls) == 1:
            assert log.upkeep.seal_next()
        return is_extended

    monkeypatch.setattr(LogReader, "_extend", extended)


@pytest.mark.parametrize("hidden", [set(), {1, 5}, set(range(1, 60, 3))], ids=["none", "few", "many"])
def test_a_segment_may_be_sealed_while_a_plan_is_made(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch, hidden: set[int]
) -> None:
    replica = Replica(log_folder)
    filled(replica)
    replica.record(hidden)
    seals_after_first(replica.log, monkeypatch)
    with replica.log.reader.plan_read(0, max_bytes=SMALL) as plan:
        found = [at for _, one in plan.walked_messages() for at in ipc.decode_batch(one).column("offset").to_pylist()]
        assert found == [at for at in range(plan.next_offset) if at not in hidden]


def test_rules_are_applied_once_where_a_segment_is_sealed_meanwhile(
    log_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(log_folder)
    filled(replica, subject="s{}".format)
    monkeypatch.setattr(log_reader, "_READ_AT_ONCE_BYTES", SMALL)
    replica.set_rules((Rule(Epoch(0), 1),))
    seals_after_first(replica.log, monkeypatch)
    replica.log.upkeep.apply_rules()
    assert not replica.log.visibility.removed, "each subject has one message"


@pytest.mark.parametrize("hidden", [range(1000, 2000), range(2000, 3000), [5, *range(2000, 3000)]])
def test_what_is_read_of_a_log_with_hidden_segments_can_be_imported(log_folder: Path, hidden: Any) -> None:
    replica = Replica(log_folder)
    for number in range(3):
        replica.log.append(rows_of([("a" * 300, None, None)] * 1000, 1000 * number), 1_000_000 + number)
        replica.log.roll()
        replica.log.upkeep.seal_next()
    replica.record(set(hidden))
    with replica.log.reader.plan_read(0, max_bytes=1 << 24) as plan:
        batches = checked_batches(b"".join(plan.messages()), [">"])
    times = [header.max_timestamp_us for header, _ in batches]
    assert times == sorted(times)


def test_a_view_has_the_keys_of_before_compaction_began(log_folder: Path) -> None:
    replica = Replica(log_folder)
    replica.set_rules((Rule(Epoch(0), 5),))
    replica.log.append(rows_of([("a", "k", None), ("a", "l", None)], 0), 1_000_000)
    replica.log.begin_epoch(Epoch(2))
    replica.set_rules((Rule(Epoch(0), 5), Rule(Epoch(2), None, compacts=True)))
    replica.log.append(rows_of([("a", "m", None)], 2), 1_000_000)
    assert sorted(replica.log.latest_views.begin(None, 0.0).visible) == [0, 1, 2]


def test_rows_that_rewriting_had_to_keep_are_dropped_when_they_no_longer_count(log_folder: Path) -> None:
    replica = Replica(log_folder)
    replica.set_rules((Rule(Epoch(0), 2),))
    log, subjects = replica.log, list[Message]((f"s{at}", None, None) for at in range(50))
    for number in range(4):
        log.append(rows_of(subjects, 50 * number), 1_000_000)
        log.roll()
        log.upkeep.seal_next()
        if number == 1:
            replica.record(set(range(50, 100)))
            log.upkeep.rewrite_next(2**60)
    log.append(rows_of([("z", None, None)], 200), 1_000_000)
    log.upkeep.apply_rules()
    replica.record(set(log.visibility.removed.derived(0, log.sealed_end_offset)))
    while log.upkeep.rewrite_next(2**60):
        pass
    assert [sum(one.index.rows) for one in log.chain.segments] == [0, 0, 50, 50, 1]
