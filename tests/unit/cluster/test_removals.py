"""When the leader removes messages, and when its records become a snapshot."""

from __future__ import annotations

import msgspec
import pytest

from natslog.cluster.removals import (
    OldestMessage,
    decides_removals,
    is_snapshot_due,
    is_to_be_recorded,
    prepares_companion,
    purged_start,
)
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings

ME, OTHER = BrokerId(1), BrokerId(2)
RECORD = StreamRecord(
    name="orders",
    id=StreamId("ab" * 16),
    settings=StreamSettings(subject="orders.>", min_isr=2, allow_ttl=True),
    created_us=0,
    leader=ME,
    leader_epoch=Epoch(1),
    replicas=(ME, OTHER),
    isr=(ME, OTHER),
)


def with_fields(**changes: object) -> StreamRecord:
    return msgspec.structs.replace(RECORD, **changes)


@pytest.mark.parametrize(
    ("record", "leads", "decides", "purged"),
    [
        (RECORD, True, True, None),
        (RECORD, False, False, None),
        (with_fields(sealed=True, purged_below=7), True, False, 7),
        (with_fields(sealed=True, purged_below=7), False, False, None),
        (with_fields(import_state="importing"), True, False, None),
        (with_fields(import_state="paused", sealed=True, purged_below=7), True, False, None),
    ],
)
def test_only_the_leader_of_a_stream_that_may_change_removes(
    record: StreamRecord, leads: bool, decides: bool, purged: int | None
) -> None:
    assert decides_removals(record, leads=leads) is decides
    assert purged_start(record, leads=leads) == purged


def test_a_companion_log_is_prepared_while_writes_are_possible() -> None:
    assert prepares_companion(RECORD)
    assert not prepares_companion(with_fields(isr=(ME,)))
    assert not prepares_companion(with_fields(settings=StreamSettings(subject="orders.>", min_isr=2)))


def test_a_snapshot_is_made_where_it_is_much_smaller() -> None:
    assert not is_snapshot_due(4 * 1024 * 1024 - 1)
    assert is_snapshot_due(4 * 1024 * 1024)
    assert is_snapshot_due(4 * 1024 * 1024, 1024 * 1024 - 1)
    assert not is_snapshot_due(4 * 1024 * 1024, 1024 * 1024)


def test_hidden_rows_are_recorded_where_rewriting_is_worth_it() -> None:
    assert not is_to_be_recorded(999, 0, waits_for_rewriting=0)
    assert is_to_be_recorded(1000, 0, waits_for_rewriting=0)
    assert not is_to_be_recorded(1000, 16_016, waits_for_rewriting=0)
    assert is_to_be_recorded(1, 0, waits_for_rewriting=1000), "no file is rewritten before these are recorded"
    assert not is_to_be_recorded(0, 0, waits_for_rewriting=1000)


def test_the_next_expiry_follows_from_the_oldest_message() -> None:
    assert OldestMessage(5_000_000, 9).expires_us(2.0, 6_000_000, 9) == 7_000_000
    assert OldestMessage(None, 9).expires_us(2.0, 6_000_000, 9) == 8_000_000, "one that arrives now"
    assert OldestMessage(None, 9).expires_us(2.0, 6_000_000, 10) == 6_000_000, "one has arrived"
