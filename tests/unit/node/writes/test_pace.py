"""When a small commit begins: with copies outstanding, and after acks; and whether the event loop makes it, by how long
they took there.
"""

from __future__ import annotations

import pytest

from natslog.node.writes.pace import COPIES_WITHIN_S, CommitTiming, DiskPace


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


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def of_known_disk(clock: Clock) -> DiskPace:
    pace = DiskPace(clock)
    pace.took_in_thread(0.001)
    for _ in range(30):
        pace.took(0.0)
    return pace


def test_nothing_is_known_of_a_disk_until_a_thread_has_written_to_it() -> None:
    clock = Clock()
    pace = DiskPace(clock)
    clock.now_s += 1000
    assert not pace.is_quick
    pace.took_in_thread(0.01)
    assert pace.is_quick


def test_a_disk_is_taken_for_fast_until_it_is_slow() -> None:
    pace = of_known_disk(Clock())
    assert pace.is_quick
    for _ in range(100):
        pace.took(0.0004)
        assert pace.is_quick


def test_one_slow_write_is_none_of_a_slow_disk() -> None:
    pace = of_known_disk(Clock())
    for _ in range(10):
        pace.took(0.09)
        assert pace.is_quick
        for _ in range(100):
            pace.took(0.0003)


def test_a_disk_of_two_milliseconds_blocks_the_event_loop_for_half_of_the_time() -> None:
    """Beyond that threads write, several at once."""
    clock = Clock()
    pace, blocked_s, began_s = of_known_disk(clock), 0.0, clock.now_s
    for _ in range(20):
        pace.took(0.002)
        clock.now_s += 0.1
    while clock.now_s < began_s + 10:
        clock.now_s += 0.0001
        if pace.is_quick:
            pace.took(0.002)
            clock.now_s += 0.002
            blocked_s += 0.002
    assert 3.5 < blocked_s < 6, blocked_s


def test_a_disk_that_has_stopped_is_left_to_threads_at_once() -> None:
    pace = of_known_disk(Clock())
    pace.took(0.1)
    assert not pace.is_quick


def test_slow_writes_are_followed_by_threads_and_then_by_an_attempt() -> None:
    clock = Clock()
    pace = of_known_disk(clock)
    for _ in range(10):
        pace.took(0.02)
        clock.now_s += 0.2
        assert pace.is_quick, "the mean is still below three milliseconds"
    pace.took(0.02)
    assert not pace.is_quick
    clock.now_s += 1.9
    assert not pace.is_quick
    clock.now_s += 0.2
    assert pace.is_quick
    pace.took(0.02)
    assert not pace.is_quick, "it is still slow"


def test_a_disk_that_is_fast_again_is_used_from_the_event_loop_again() -> None:
    clock = Clock()
    pace = of_known_disk(clock)
    for _ in range(50):
        pace.took(0.05)
    clock.now_s += 5.1
    for _ in range(30):
        assert pace.is_quick
        pace.took(0.0003)
    clock.now_s = 0.0
    assert pace.is_quick, "by its mean, not by the attempts"


def test_the_event_loop_waits_for_at_most_a_hundredth_of_the_time_and_tries_again_after_half_a_minute() -> None:
    clock = Clock()
    pace = of_known_disk(clock)
    began_s, blocked_s = clock.now_s, 0.0
    while clock.now_s < began_s + 600:
        if pace.is_quick:
            clock.now_s += 0.05
            blocked_s += 0.05
            pace.took(0.05)
        clock.now_s += 0.01
    assert blocked_s <= 0.011 * 600
    pace.took(20.0)
    clock.now_s += 30.1
    assert pace.is_quick


def test_what_threads_take_counts_only_if_it_is_very_long() -> None:
    """They wait for the interpreter: fifty busy streams kept each other in threads."""
    clock = Clock()
    pace = of_known_disk(clock)
    for _ in range(1000):
        pace.took_in_thread(0.01)
    assert pace.is_quick
    pace.took_in_thread(0.2)
    assert not pace.is_quick
    clock.now_s += 20.1
    assert pace.is_quick
