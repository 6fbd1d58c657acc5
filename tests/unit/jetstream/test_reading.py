"""How many messages are left for a consumer with filters: counted in parts if the time for it is limited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from natslog.jetstream.consumers.reading import ConsumerReader
from natslog.log import ReplicaLog, subject_index
from natslog.log.removed import offset_range
from tests.conftest import open_log, rows

NOW_US = 1_790_000_000_000_000
PAST_S = 0.0


def append(log: ReplicaLog) -> None:
    for subject, count in (("orders.a", 2), ("orders.b", 3)):
        log.append(rows([b"x"] * count, subject), NOW_US)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ReplicaLog]:
    """With 25 messages in 10 batches, 15 of them on `orders.b`."""
    found = open_log(tmp_path)
    for _ in range(5):
        append(found)
    yield found
    found.close()


def reader() -> ConsumerReader:
    return ConsumerReader(("orders.b", "orders.c.>"), "a consumer")


def parts(counting: ConsumerReader, log: ReplicaLog, next_seq: int) -> list[int | None]:
    """The results of counts that have no time, until one has the number."""
    found: list[int | None] = [counting.count_until(log, next_seq, PAST_S)]
    while found[-1] is None:
        found.append(counting.count_until(log, next_seq, PAST_S))
    return found


def test_count_without_time_is_continued_by_the_next_one(log: ReplicaLog) -> None:
    counting = reader()
    assert parts(counting, log, 4) == [None] * 8 + [14], "a batch each"
    assert counting.known_left(log, 4) == counting.count_left(log, 4) == reader().count_left(log, 4) == 14


def test_count_continues_with_what_was_delivered_and_stored_meanwhile(log: ReplicaLog) -> None:
    counting = reader()
    assert [counting.count_until(log, 4, PAST_S) for _ in range(3)] == [None] * 3  # the rows up to offset 10
    assert counting.known_left(log, 4) is None
    counting.delivered(log, 6, 2)
    append(log)
    assert counting.count_until(log, 6, PAST_S) is None
    assert counting.count_left(log, 6) == 15
    counting.delivered(log, 9, 1)
    assert counting.count_left(log, 9) == reader().count_left(log, 9) == 14


def test_count_that_was_not_finished_begins_again_if_messages_in_it_are_removed(log: ReplicaLog) -> None:
    counting = reader()
    assert [counting.count_until(log, 4, PAST_S) for _ in range(3)] == [None] * 3
    log.visibility.removed.record(offset_range(7, 9))
    assert counting.count_left(log, 4) == reader().count_left(log, 4) == 12


def test_count_that_the_index_states_needs_no_time(log: ReplicaLog) -> None:
    log.subjects.counts()
    assert reader().count_until(log, 1, PAST_S) == 15


def test_count_with_a_deadline_does_not_read_the_log_for_the_index(
    log: ReplicaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject_index, "_FEW_BYTES", 0)
    counting = reader()
    assert parts(counting, log, 1) == [None] * 9 + [15], "a batch each"
    assert not log.subjects.is_used
    assert reader().count_left(log, 1) == 15
    assert log.subjects.is_used


def test_count_with_a_deadline_does_not_wait_for_the_index_that_is_being_made(log: ReplicaLog) -> None:
    log.subjects.counts()
    with log.subjects._lock:
        assert reader().count_until(log, 1, time.monotonic() + 60) == 15
