"""Pending messages as columns, against a dict; and states as records."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.errors import CorruptLog
from natslog.jetstream.consumers.config import ConsumerConfig
from natslog.jetstream.consumers.machine import Consumer
from natslog.jetstream.consumers.nak import delay_us_of
from natslog.jetstream.consumers.pending import DELIVERED_AS, REDELIVERED, SEQ, TIME_US, Pending
from natslog.jetstream.consumers.state import packed, restore, state_of, state_record, unpacked

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(1, 5), min_size=1, max_size=40)),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 400), max_size=30, unique=True)),
        st.tuples(st.just("ack"), st.lists(st.integers(0, 400), max_size=30)),
        st.tuples(st.just("ack"), st.integers(1, 60).map(lambda last: list(range(1, last)))),
        st.tuples(st.just("queue"), st.lists(st.integers(0, 400), max_size=10, unique=True)),
        st.tuples(st.just("unqueue"), st.lists(st.integers(0, 400), max_size=5, unique=True)),
        st.tuples(st.just("take"), st.lists(st.integers(1, 10), min_size=1, max_size=1)),
        st.tuples(st.just("upto"), st.lists(st.integers(0, 400), min_size=1, max_size=1)),
    ),
    max_size=40,
)


@given(steps=STEPS)
@settings(deadline=None)
def test_pending_is_as_a_dict(steps: list[tuple[str, list[int]]]) -> None:
    pending, rows, queue, last = Pending(), dict[int, int](), list[int](), 0
    for kind, numbers in steps:
        if kind == "append":
            seqs = last + np.cumsum(np.array(numbers, np.int64))
            pending.append(seqs, seqs * 10, time_us=last)
            rows |= {int(seq): int(seq) * 10 for seq in seqs}
            last = int(seqs[-1])
            continue
        at = pending.find(np.array(numbers, np.int64))
        known = [number for number in numbers if number in rows]
        assert (at >= 0).tolist() == [number in rows for number in numbers]
        at = at[at >= 0]
        match kind:
            case "remove":
                pending.remove(at)
                rows = {seq: value for seq, value in rows.items() if seq not in known}
                queue = [seq for seq in queue if seq not in known]
            case "ack":
                ascending = sorted(set(known))
                found, follows = pending.found(np.array(numbers, np.int64)), max(known, default=0) * 10
                assert pending.at(SEQ, found).tolist() == ascending
                seqs, is_among = pending.take(found, follows)
                assert (seqs.tolist(), is_among) == (ascending, bool(known))
                rows = {seq: value for seq, value in rows.items() if seq not in known}
                queue = [seq for seq in queue if seq not in known]
            case "queue":
                pending.queue(at)
                queue += [seq for seq in known if seq not in queue]
            case "unqueue":
                pending.unqueue(at)
                queue = [seq for seq in queue if seq not in known]
            case "take":
                found = pending.next_queued(numbers[0])
                assert found.tolist() == queue[: numbers[0]]
                pending.take_queued(found)
                queue = queue[numbers[0] :]
            case _:
                assert pending.at(SEQ, pending.upto(numbers[0])).tolist() == [seq for seq in rows if seq <= numbers[0]]
        assert len(pending) == len(rows)
        assert pending.column(SEQ).tolist() == list(rows)
        assert pending.column(DELIVERED_AS).tolist() == list(rows.values())
        assert (pending.queued, pending.has_queued) == (len(queue), bool(queue))
        assert len(pending.waiting_positions()) == len(rows) - len(queue)
        if rows:
            assert pending.first() == next(iter(rows.items()))


def test_memory_of_what_is_acked_is_released() -> None:
    pending = Pending()
    for start in range(0, 1_000_000, 1000):
        seqs = np.arange(start, start + 1000, dtype=np.int64) + 1
        pending.append(seqs, seqs, 0)
        pending.remove(pending.find(seqs[:-1]))  # one of each thousand stays
    assert len(pending) == 1000
    assert pending._columns.nbytes < 1_000_000


def consumer() -> Consumer:
    config = ConsumerConfig(name="C", ack_policy="explicit", ack_wait=10**9, max_waiting=5)
    return Consumer("C", config, 1, has_interest=lambda reply: True)


@given(
    gaps=st.lists(st.integers(1, 2**40), max_size=200),
    skip=st.lists(st.integers(1, 100), max_size=20, unique=True).map(sorted),
    exceeded=st.dictionaries(st.integers(1, 100), st.integers(1, 9), max_size=5),
)
@settings(deadline=None)
def test_a_state_is_restored_at_another_time(gaps: list[int], skip: list[int], exceeded: dict[int, int]) -> None:
    one, other = consumer(), consumer()
    seqs = np.cumsum(np.array(gaps, np.int64))
    one.pending.append(seqs, np.arange(len(seqs)) + 7, time_us=5_000, redelivered=np.arange(len(seqs)) % 3)
    one.skip, one.exceeded, one.delivered, one.floor = np.array(skip, np.int64), exceeded, (9, 8), (3, 2)
    one.delivered_us = 4_000
    data = state_of(one, now_us=6_000).to_bytes()
    restore(other, state_record(data, "a test"), 1_000_000, "a test")
    assert other.pending.to_columns()[SEQ].tolist() == seqs.tolist()
    assert other.pending.to_columns()[DELIVERED_AS].tolist() == (np.arange(len(seqs)) + 7).tolist()
    assert other.pending.to_columns()[REDELIVERED].tolist() == (np.arange(len(seqs)) % 3).tolist()
    assert set(other.pending.to_columns()[TIME_US].tolist()) <= {999_000}
    assert (other.skip.tolist(), other.exceeded, other.delivered, other.floor) == (skip, exceeded, (9, 8), (3, 2))
    assert (other.delivered_us, other.acked_us) == (998_000, 0)


def test_many_pending_messages_take_little_room() -> None:
    machine = consumer()
    seqs = np.arange(100_000, dtype=np.int64) + 1
    machine.pending.append(seqs, seqs, 1)
    assert len(state_of(machine, 2).to_bytes()) < 2_000


@pytest.mark.parametrize("data", [b"x", b"\x07" + bytes(7), (2**40).to_bytes(8, "little"), b"\x02" + bytes(7) + b"abc"])
def test_damaged_columns_are_an_error(data: bytes) -> None:
    with pytest.raises(CorruptLog):
        unpacked(data, 4, "a test")


def test_packed_columns_of_nothing() -> None:
    assert packed(np.empty((4, 0), np.int64)) == b""
    assert unpacked(b"", 4, "a test").shape == (4, 0)


@pytest.mark.parametrize(
    ("text", "delay_us"),
    [
        (b"", None),
        (b" ", None),
        (b'{"delay": 1500000}', 1500),
        (b"{}", 0),
        (b"1.5s", 1_500_000),
        (b"1m30s", 90_000_000),
        (b"100ms", 100_000),
        (b"-2s", -2_000_000),
        (b"0", 0),
        (b"5", None),
        (b"s", None),
        (b"{", None),
        (b'{"delay": "1s"}', None),
        ("5µs".encode(), 5),
        (b"\xff", None),
    ],
)
def test_delays_of_negative_acks(text: bytes, delay_us: int | None) -> None:
    assert delay_us_of(text, "C") == delay_us
