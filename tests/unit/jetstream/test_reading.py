"""What a consumer has read and not delivered yet; how many messages are left for one with filters, counted in parts if
the time for it is limited.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from natslog.jetstream.consumers.deliveries import Wanted
from natslog.jetstream.consumers.reading import ConsumerReader, Window
from natslog.log import ReplicaLog, subject_index
from natslog.log.removed import offset_range
from natslog.wire.small_batches import SMALL_BYTES
from tests.conftest import open_log, rows

NOW_US = 1_790_000_000_000_000
PAST_S = 0.0


def append(log: ReplicaLog) -> None:
    """Two batches, each of which is read by itself: small ones are read together."""
    for subject, count in (("orders.a", 2), ("orders.b", 3)):
        log.append(rows([bytes(SMALL_BYTES)] * count, subject), NOW_US)


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


def wanted(start: int) -> Wanted:
    return Wanted(np.empty(0, np.int64), start, 4)


def window_of(log: ReplicaLog, reading: ConsumerReader, start: int) -> Window:
    return reading.read(log, wanted(start), None)


def test_what_was_read_is_kept_while_messages_are_removed_that_were_delivered(log: ReplicaLog) -> None:
    reading = ConsumerReader((), "a consumer")
    first = window_of(log, reading, 1)
    assert len(first) == 25
    for next_seq, acked in ((5, (0, 2)), (9, (2, 4)), (13, (4, 11))):
        reading.delivered(log, next_seq, 4)
        log.visibility.removed.record(offset_range(*acked))
        assert window_of(log, reading, next_seq) is first is reading.ready(log, wanted(next_seq), None)


def test_what_was_read_is_dropped_if_messages_of_it_are_removed_that_were_not_delivered(log: ReplicaLog) -> None:
    reading = ConsumerReader((), "a consumer")
    first = window_of(log, reading, 1)
    reading.delivered(log, 5, 4)
    log.visibility.removed.record(offset_range(4, 5))
    assert reading.ready(log, wanted(5), None) is not first
    assert window_of(log, reading, 5).seqs.tolist() == list(range(6, 26))


def test_removals_between_a_read_and_its_delivery_are_found_by_the_next_one(log: ReplicaLog) -> None:
    reading = ConsumerReader((), "a consumer")
    window_of(log, reading, 1)
    log.visibility.removed.record(offset_range(20, 21))
    reading.delivered(log, 5, 4)
    assert 21 not in window_of(log, reading, 5).seqs.tolist()


def test_what_is_removed_while_it_is_read_is_not_in_what_was_read(
    log: ReplicaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, visible_rows = ConsumerReader((), "a consumer"), log.reader.visible_rows

    def removing(start: int, end: int) -> Iterator[Any]:
        for number, batch in enumerate(visible_rows(start, end)):
            yield batch
            if number == 1:
                log.visibility.removed.record(offset_range(1, 3))

    monkeypatch.setattr(log.reader, "visible_rows", removing)
    found = window_of(log, reading, 1)
    assert found.seqs.tolist() == [1, *range(4, 26)]
    monkeypatch.undo()
    reading.delivered(log, 5, 2)
    assert window_of(log, reading, 5) is found


def test_what_was_read_is_not_delivered_from_another_place_or_log(log: ReplicaLog, tmp_path: Path) -> None:
    reading = ConsumerReader((), "a consumer")
    first = window_of(log, reading, 1)
    reading.delivered(log, 5, 4)
    assert window_of(log, reading, 3) is not first, "it was not looked at from there on"
    other = open_log(tmp_path / "other")
    append(other)
    assert len(window_of(other, reading, 1)) == 5
    other.close()


def test_messages_that_are_hidden_while_a_delivery_is_noted_are_found(
    log: ReplicaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of another consumer applies a rule between the two counts."""
    reading = ConsumerReader((), "a consumer")
    first, count = window_of(log, reading, 1), log.visibility.removed.count
    counts = list[tuple[int, int]]()

    def counting(start: int, end: int) -> int:
        found = count(start, end)
        counts.append((start, end))
        if len(counts) == 1:
            log.visibility.removed.record(offset_range(20, 21))
        return found

    monkeypatch.setattr(log.visibility.removed, "count", counting)
    reading.delivered(log, 5, 4)
    monkeypatch.undo()
    assert len(counts) > 1
    assert window_of(log, reading, 5) is not first
    assert 21 not in window_of(log, reading, 5).seqs.tolist()
