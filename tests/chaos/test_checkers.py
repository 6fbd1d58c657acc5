"""The checkers see what they are for: each gets a small history that is well, and one in which a promise is broken."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from natslog.arrow.schema import MESSAGE_SCHEMA
from tests.chaos import checkers
from tests.chaos.history import FaultEvent, History, MetadataChange, value_of
from tests.chaos.linearizable import is_linearizable


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
