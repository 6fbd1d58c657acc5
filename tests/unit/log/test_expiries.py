"""Which messages expire when: compared with a dictionary, and stored in few bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE
from natslog.log.expiry import TOMBSTONE_HEADER, TTL_HEADER, Expiries
from natslog.log.rules import NO_EXPIRY, Expiry
from tests.conftest import open_log

SECOND_US = 1_000_000

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(-5 * SECOND_US, 50 * SECOND_US), max_size=20)),
        st.tuples(st.just("due"), st.integers(-5 * SECOND_US, 55 * SECOND_US)),
        st.tuples(st.just("store"), st.just(0)),
    ),
    max_size=30,
)


@given(STEPS)
def test_what_is_due_equals_a_dictionary(steps: list[tuple[str, object]]) -> None:
    expiries, model, added = Expiries(), dict[int, int](), 0
    for kind, value in steps:
        if kind == "add":
            assert isinstance(value, list)
            offsets = range(added, added + len(value))
            expiries.add(np.array(offsets, np.int64), np.array(value, np.int64))
            model |= {offset: -(-us // 1000) for offset, us in zip(offsets, value, strict=True)}
            added += len(value)
        elif kind == "due":
            assert isinstance(value, int)
            due = sorted(offset for offset, ms in model.items() if ms * 1000 <= value)
            assert expiries.due(value).tolist() == due
            model = {offset: ms for offset, ms in model.items() if offset not in due}
        else:
            expiries = Expiries.from_bytes(*expiries.to_bytes())
        assert expiries.next_us() == min((ms * 1000 for ms in model.values()), default=None)
        assert bool(expiries) == bool(model)


def test_a_file_of_a_version_that_knows_seconds_only_expires_nothing_early() -> None:
    expiries = Expiries()
    expiries.add(np.array([0, 1, 2]), np.array([1_000_000, 1_000_001, 1_999_999]))
    seconds, _ = expiries.to_bytes()
    again = Expiries.from_bytes(seconds)
    assert again.due(1_999_999).tolist() == [0]
    assert again.due(2_000_000).tolist() == [1, 2]


@pytest.mark.parametrize("data", [b"\x05" + bytes(7), b"\x05" + bytes(7) + b"nonsense", b"\xff" * 8])
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Expiries.from_bytes(data)


def test_expiries_at_random_times_take_few_bytes_in_the_file() -> None:
    random, expiries = np.random.default_rng(1), Expiries()
    for at in range(0, 200_000, 10_000):
        expiries.add(np.arange(at, at + 10_000), random.integers(0, 86_400 * SECOND_US, 10_000))
    data = expiries.to_bytes()
    assert sum(map(len, data)) < 8 * 200_000
    again = Expiries.from_bytes(*data)
    assert again.due(86_400 * SECOND_US).tolist() == list(range(200_000))


HOUR_US = 3600 * SECOND_US


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (Expiry(tombstones_us=HOUR_US), Expiry(tombstones_us=SECOND_US)),
        (Expiry(tombstones_us=SECOND_US), Expiry(tombstones_us=HOUR_US)),
        (Expiry(tombstones_us=SECOND_US), Expiry(has_own=True)),
        (Expiry(has_own=True), Expiry(tombstones_us=SECOND_US)),
        (Expiry(has_own=True, tombstones_us=SECOND_US), NO_EXPIRY),
    ],
)
def test_edited_expiry_concerns_stored_messages_and_is_the_same_after_a_restart(
    log_folder: Path, was: Expiry, now: Expiry
) -> None:
    log = open_log(log_folder)
    log.append(RowBuffers.of(tombstone_and_message_with_ttl()), 1)
    log.visibility.set_expiry(was, 0)
    log.upkeep.apply_rules()
    log.visibility.set_expiry(now, 0)
    log.upkeep.apply_rules()
    edited = log.visibility.expired(10 * SECOND_US, leads=False)
    log.close()
    again = open_log(log_folder)
    again.visibility.set_expiry(now, 0)
    again.upkeep.apply_rules()
    expected = {0} if now.tombstones_us == SECOND_US else set()
    expected |= {1} if now.has_own else set()
    assert set(edited) == set(again.visibility.expired(10 * SECOND_US, leads=False)) == expected
    again.close()


def tombstone_and_message_with_ttl() -> pa.RecordBatch:
    headers = [[(TOMBSTONE_HEADER, "")], [(TTL_HEADER, "2s")]]
    columns = [
        pa.array(["orders", "orders"]),
        pa.array([b"k", None], pa.binary()),
        pa.array(headers, HEADERS_TYPE),
        pa.array([b"", b"x"], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PAYLOAD_SCHEMA)
