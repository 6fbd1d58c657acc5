"""Tests of the checkers: each gets a small correct history, and one in which a guarantee is violated."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.client import Fetched
from natslog.errors import NatslogError, NotLeader, OffsetOutOfRange
from tests.chaos import checkers, damage
from tests.chaos.history import FaultEvent, History, MetadataChange, value_of
from tests.chaos.linearizable import is_linearizable
from tests.chaos.recorders import BoundReader
from tests.cluster_harness import ClusterBroker


def copy_of(numbers: list[int], broker: int = 1, start: int = 0) -> checkers.Copy:
    """A replica that holds these messages of publisher 0."""
    columns: dict[str, Any] = {field.name: pa.nulls(len(numbers), field.type) for field in MESSAGE_SCHEMA}
    columns["offset"] = pa.array(range(start, start + len(numbers)), MESSAGE_SCHEMA.field("offset").type)
    columns["value"] = pa.array([value_of(0, number) for number in numbers], MESSAGE_SCHEMA.field("value").type)
    return checkers.Copy(
        broker, "test", pa.table([columns[name] for name in MESSAGE_SCHEMA.names], MESSAGE_SCHEMA.names)
    )


@pytest.fixture
def history() -> History:
    """Two batches of two; the second was sent after the first was acked."""
    history = History()
    history.started_s = 0.0
    one = history.new_publisher(has_ids=True)
    for batch in (1, 2):
        first = one.begin(2, batch, now_s=10.0 * batch)
        one.acked_s[first : first + 2] = [10.0 * batch + 1] * 2
    return history


def promises(found: list[Any]) -> set[str]:
    return {one.promise for one in found}


def test_a_history_that_is_well_passes(history: History) -> None:
    copies = [copy_of([0, 1, 2, 3]), copy_of([0, 1, 2, 3], broker=2)]
    history.read = {1: hash(value_of(0, 1))}
    assert checkers.judge(history, copies, 10.0, 10.0) == []


@pytest.mark.parametrize(
    ("copies", "promise"),
    [
        ([[0, 1, 2, 3], [0, 1, 2]], "1 no acked loss"),
        ([[0, 1, 2, 3, 1], [0, 1, 2, 3, 1]], "3 once"),
        ([[2, 0, 1, 3], [2, 0, 1, 3]], "3 order"),  # 2 was sent after 0 and 1 were acked
        ([[1, 0, 2, 3], [1, 0, 2, 3]], "3 order"),  # one batch, sent once
        ([[0, 1, 2, 3], [0, 1, 3, 2]], "2 one history"),
    ],
)
def test_a_broken_promise_is_seen(history: History, copies: list[list[int]], promise: str) -> None:
    found = checkers.judge(history, [copy_of(one, at) for at, one in enumerate(copies, 1)], 10.0, 10.0)
    assert promise in promises(found)


def test_an_ack_that_names_another_offset_is_seen(history: History) -> None:
    history.published[0].acked_offset[0] = 1
    assert promises(checkers.check_no_acked_loss(history, [copy_of([0, 1, 2, 3])])) == {"2 one history"}


def test_a_read_that_does_not_stay_is_seen(history: History) -> None:
    history.read = {0: hash(b"something else")}
    assert checkers.check_reads_stay(history, copy_of([0, 1, 2, 3]))
    history.read = {4: hash(value_of(0, 4))}  # read, and gone
    assert checkers.check_reads_stay(history, copy_of([0, 1, 2, 3]))


def test_the_time_without_acks_is_measured_from_the_fault() -> None:
    history = History()
    probe = history.new_publisher(has_ids=False)
    probe.sent_s = [float(at) for at in range(40)]
    probe.acked_s = [at + 0.1 if not 10 <= at < 25 else None for at in range(40)]
    history.faults = [FaultEvent("cut", "", 10.0, True, healed_s=30.0, in_sync_s=31.0)]
    ((_, took),) = checkers.resume_times(history)
    assert took == pytest.approx(15.1, abs=0.2)
    assert checkers.check_resumed(history, within_s=10.0)


def test_something_more_that_breaks_starts_the_time_to_resume_anew() -> None:
    history = History()
    probe = history.new_publisher(has_ids=False)
    probe.sent_s = [float(at) for at in range(40)]
    probe.acked_s = [at + 0.1 if not 10 <= at < 25 else None for at in range(40)]
    history.faults = [
        FaultEvent("pause and kill", "", 10.0, True, healed_s=30.0, in_sync_s=31.0, broken_s=[10.0, 18.0])
    ]
    ((_, took),) = checkers.resume_times(history)
    assert took == pytest.approx(8.0, abs=0.2)
    assert checkers.check_resumed(history, within_s=10.0) == []
    assert checkers.check_resumed(history, within_s=7.0)


@pytest.mark.parametrize(
    ("hit", "replicas", "min_isr", "is_due"),
    [
        ({1, 2}, [1, 2, 3, 4, 5], 3, True),
        ({1, 2, 3}, [1, 2, 3, 4, 5], 3, False),
        ({1}, [1, 2, 3], 2, True),
        ({1, 2}, [1, 2, 3], 2, False),
        ({4, 5}, [1, 2, 3], 2, True),
        ({3, 4, 5}, [1, 2, 3], 2, False),  # its replicas are whole, and no majority of the brokers
    ],
)
def test_a_stream_is_due_while_min_isr_replicas_and_a_majority_are_whole(
    hit: set[int], replicas: list[int], min_isr: int, is_due: bool
) -> None:
    assert checkers.goes_on(hit, 5, replicas, min_isr) is is_due


def test_acked_messages_that_are_missing_are_counted_once(history: History) -> None:
    copies = [copy_of([0, 1, 2, 3]), copy_of([0, 1, 3], broker=2), copy_of([0, 3], broker=3)]
    assert checkers.lost(history, copies[:1]) == 0
    assert checkers.lost(history, copies) == 2


class Answers:
    """A broker's answers to a bound reader, one after another."""

    def __init__(self, history: History) -> None:
        self.reader = BoundReader(history, ClusterBroker(1, Path("unused"), "", "127.0.0.1", 1), "orders")

    def __call__(self, start: int, numbers: list[int], next_offset: int) -> None:
        rows = copy_of(numbers, start=start).rows.combine_chunks().to_batches()
        self.reader.note(Fetched(rows, next_offset, next_offset, 0, "id"))


def test_bound_reader_that_sees_each_offset_once_and_in_order_is_fine(history: History) -> None:
    answer = Answers(history)
    answer(0, [0, 1], 2)
    answer(2, [], 2)
    answer(2, [2, 3], 4)
    assert history.violations == []
    assert checkers.check_followed(history, copy_of([0, 1, 2, 3])) == []


@pytest.mark.parametrize(
    ("start", "numbers", "next_offset", "promise"),
    [
        (1, [1, 2], 3, "4 once and in order"),  # offset 1 again
        (3, [3], 4, "4 once and in order"),  # offset 2 left out
        (2, [], 4, "4 once and in order"),  # the same, with no rows
        (2, [2], 1, "4 once and in order"),  # sent back
        (2, [3], 3, "2 one history"),  # another reader saw message 2 there
    ],
)
def test_bound_reader_sees_what_is_wrong(
    history: History, start: int, numbers: list[int], next_offset: int, promise: str
) -> None:
    history.read = {2: hash(value_of(0, 2))}
    answer = Answers(history)
    answer(0, [0, 1], 2)
    answer(start, numbers, next_offset)
    assert promise in promises(history.violations)


def test_bound_reader_that_does_not_come_to_the_end_is_seen(history: History) -> None:
    Answers(history)(0, [0, 1], 2)
    assert promises(checkers.check_followed(history, copy_of([0, 1, 2, 3]))) == {"4 once and in order"}


@pytest.mark.parametrize(
    ("error", "is_broken"), [(OffsetOutOfRange("beyond the end"), True), (NotLeader("another broker"), False)]
)
def test_bound_reader_is_told_to_ask_again_and_never_that_it_is_beyond_the_end(
    history: History, error: NatslogError, is_broken: bool
) -> None:
    reader = Answers(history).reader
    reader.refused(error)
    assert promises(history.violations) == ({"4 once and in order"} if is_broken else set())


@pytest.mark.parametrize("seed", range(6))
def test_a_torn_write_leaves_what_was_there(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "active"
    path.write_bytes(b"acked" * 100)
    damage.tear(path, random.Random(seed))
    assert path.read_bytes().startswith(b"acked" * 100)
    assert path.stat().st_size > 500


def change(kind: str, outcome: str, began_s: float, ended_s: float) -> MetadataChange:
    return MetadataChange("register", kind, outcome, began_s, ended_s, 1)


@pytest.mark.parametrize(
    ("changes", "is_fine"),
    [
        ([("create", "made", 0, 1), ("delete", "gone", 2, 3), ("create", "made", 4, 5)], True),
        ([("create", "made", 0, 1), ("create", "made", 2, 3)], False),
        ([("create", "made", 0, 1), ("delete", "missing", 2, 3)], False),
        ([("create", "made", 0, 3), ("delete", "missing", 1, 2)], True),  # at the same time
        ([("create", "made", 0, 1), ("delete", "unknown", 2, 3), ("create", "made", 4, 5)], True),
        ([("create", "unknown", 0, 1), ("delete", "missing", 2, 3), ("delete", "gone", 4, 5)], True),  # done late
        ([("delete", "gone", 0, 1), ("create", "unknown", 2, 3)], False),  # nothing is done before it began
    ],
)
def test_changes_of_metadata_are_judged(changes: list[Any], is_fine: bool) -> None:
    assert is_linearizable([change(*one) for one in changes]) is is_fine
