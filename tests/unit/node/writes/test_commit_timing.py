"""When a small commit begins: with copies outstanding, and after acks."""

from __future__ import annotations

import pytest

from natslog.node.writes.commit_timing import COPIES_WITHIN_S, CommitTiming


def test_a_commit_begins_at_once_where_no_copies_are_awaited() -> None:
    assert CommitTiming().pause_s(1, 100.0) == 0.0


def test_a_commit_waits_for_the_copies_of_the_one_before_but_not_for_long() -> None:
    timing = CommitTiming()
    timing.copying(100.0)
    assert timing.pause_s(5, 100.001) == pytest.approx(COPIES_WITHIN_S - 0.001)
    assert timing.pause_s(5, 100.0 + COPIES_WITHIN_S) == 0.0, "a follower is slow"
    timing.copying(101.0)
    timing.acked(1, 5, 101.001, is_last=True)
    assert timing.pause_s(6, 101.001) == 0.0


def test_acks_of_one_commit_leave_the_copies_of_another_awaited() -> None:
    timing = CommitTiming()
    timing.copying(100.0)
    timing.acked(1, 1, 100.001, is_last=False)
    assert timing.pause_s(100, 100.001) > 0


def test_a_commit_waits_for_as_many_messages_as_were_acked() -> None:
    timing = CommitTiming()
    timing.acked(8, 4, 100.0, is_last=True)
    assert timing.pause_s(4, 100.0001) > 0
    assert timing.pause_s(11, 100.0002) > 0
    assert timing.pause_s(12, 100.0003) == 0.0
    assert timing.pause_s(1, 100.0004) == 0.0, "they came"


def test_the_pause_is_longer_where_copies_take_longer() -> None:
    timing = CommitTiming()
    timing.copying(100.0)
    timing.acked(8, 0, 100.004, is_last=True)
    assert timing.pause_s(1, 100.0055) == pytest.approx(0.0005)
    assert timing.pause_s(1, 100.0061) == 0.0
    timing = CommitTiming()
    timing.copying(200.0)
    timing.acked(8, 0, 203.0, is_last=True)
    assert timing.pause_s(1, 203.0) == pytest.approx(COPIES_WITHIN_S / 2)


def test_one_publisher_that_waits_for_each_ack_never_waits_here() -> None:
    timing = CommitTiming()
    for at in range(100):
        timing.copying(float(at))
        timing.acked(1, 0, at + 0.002, is_last=True)
        assert timing.pause_s(1, at + 0.0021) == 0.0


def test_publishers_that_do_not_wait_for_acks_are_delayed_less_and_less_often() -> None:
    """A message a millisecond, whatever was acked."""
    timing, pauses = CommitTiming(), 0
    for at in range(1000):
        timing.copying(at * 0.005 - 0.0015)
        timing.acked(5, 0, at * 0.005, is_last=True)
        pauses += timing.pause_s(1, at * 0.005 + 0.0002) > 0
        timing.pause_s(1, at * 0.005 + 0.0012)
    assert 5 < pauses < 30


def test_after_success_each_commit_waits_again() -> None:
    timing = CommitTiming()
    for at in range(100):
        timing.copying(at * 0.005 - 0.0015)
        timing.acked(5, 0, at * 0.005, is_last=True)
        timing.pause_s(1, at * 0.005 + 0.0012)
    pauses = 0
    for at in range(1000, 1200):
        timing.copying(at * 0.005 - 0.0015)
        timing.acked(5, 0, at * 0.005, is_last=True)
        pauses += timing.pause_s(2, at * 0.005 + 0.0002) > 0
        timing.pause_s(5, at * 0.005 + 0.0004)
    assert pauses > 100
