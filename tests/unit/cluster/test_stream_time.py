"""Stream time: which clocks it follows, how fast, and that it never goes back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.cluster.stream_time import (
    JUMP_FOLLOWED_WITHIN_US,
    SAMPLE_HOLDS_US,
    STEADY_ENOUGH_US,
    ClockReading,
    ClockSample,
    ExpiryClock,
    Steadiness,
    StreamClock,
    agreed_us,
    beginning_us,
)

SECOND = 1_000_000
HOUR = 3600 * SECOND
TRUE = 1_800_000_000 * SECOND
"""The right time when elapsed time is zero."""

# ---- what a majority agrees on ----


@pytest.mark.parametrize(
    ("own_s", "others_s", "brokers", "agreed_s"),
    [
        (0, [0, 0], 3, 0),
        (3600, [0, 0], 3, 0),
        (0, [3600, 0], 3, 0),
        (-3600, [0, 0], 3, 0),
        (0, [3600, 3600], 3, 3600),
        (0, [3600], 3, 0),
        (0, [-3600], 3, -3600),
        (0, [], 3, None),
        (0, [5], 2, 0),
        (0, [], 2, None),
        (0, [9, 9, -9, -9], 5, 0),
        (0, [9, 9, 9], 5, 9),
        (0, [9, 9], 5, 0),
        (0, [9], 5, None),
        (7, [], 1, 7),
    ],
)
def test_agreed_time_is_the_latest_that_a_majority_of_all_brokers_has_reached(
    own_s: int, others_s: list[int], brokers: int, agreed_s: int | None
) -> None:
    samples = [ClockSample(TRUE + one * SECOND, 0) for one in others_s]
    found = agreed_us(samples, TRUE + own_s * SECOND, 0, brokers)
    assert found == (None if agreed_s is None else TRUE + agreed_s * SECOND)


def test_a_sample_goes_on_with_elapsed_time_and_counts_for_some_seconds() -> None:
    samples = [ClockSample(TRUE, 0), ClockSample(TRUE, 0)]
    wrong = TRUE + HOUR
    assert agreed_us(samples, wrong, SAMPLE_HOLDS_US, 3) == TRUE + SAMPLE_HOLDS_US
    assert agreed_us(samples, wrong, SAMPLE_HOLDS_US + 1, 3) is None


@given(st.lists(st.integers(-HOUR, HOUR), min_size=1, max_size=7), st.integers(0, 6))
def test_a_majority_has_reached_the_agreed_time_and_none_a_later_one(clocks: list[int], unknown: int) -> None:
    own, *others = [TRUE + one for one in clocks]
    brokers = len(clocks) + unknown
    found = agreed_us([ClockSample(one, 0) for one in others], own, 0, brokers)
    reached = [sum(one >= time_us for one in [own, *others]) for time_us in [own, *others]]
    if found is None:
        assert 2 * len(clocks) <= brokers
    else:
        assert 2 * sum(one >= found for one in [own, *others]) > brokers
        later = [time_us for time_us, count in zip([own, *others], reached, strict=True) if 2 * count > brokers]
        assert found == max(later)


# ---- one stream ----


def test_a_clock_ahead_alone_is_held_at_the_newest_timestamp_and_elapsed_time() -> None:
    clock = StreamClock(TRUE, 0)
    for seconds in range(1, 8000, 100):
        now = seconds * SECOND
        assert clock.advance(ClockReading(TRUE + now + HOUR, now)) == TRUE + now


def test_a_majority_is_followed_at_once_and_whatever_the_own_clock_says() -> None:
    for own_ahead in (-HOUR, 0, HOUR):
        clock = StreamClock(TRUE - 7 * 24 * HOUR, 0)
        assert clock.advance(ClockReading(TRUE + SECOND + own_ahead, SECOND, TRUE + SECOND)) == TRUE + SECOND


def test_a_clock_behind_does_not_hold_back_a_stream_whose_leader_was_right() -> None:
    clock = StreamClock(TRUE, 0)
    assert clock.advance(ClockReading(TRUE + HOUR, HOUR, TRUE)) == TRUE + HOUR, "the second broker is an hour behind"


def test_stream_time_slows_down_to_half_until_clocks_behind_it_have_come_up() -> None:
    clock = StreamClock(TRUE + HOUR, 0)
    for minutes, ahead_minutes in ((0, 60), (40, 40), (80, 20), (120, 0), (121, 0)):
        now = minutes * 60 * SECOND
        expected = TRUE + now + ahead_minutes * 60 * SECOND
        assert abs(clock.advance(ClockReading(TRUE + now, now, TRUE + now)) - expected) <= 1


def test_a_stream_without_messages_begins_with_the_time_that_is_agreed_on() -> None:
    assert StreamClock(0, 0).advance(ClockReading(TRUE + HOUR, 0, TRUE, 0, TRUE)) == TRUE
    assert StreamClock(0, 0).advance(ClockReading(TRUE, 0)) == TRUE


@pytest.mark.parametrize(
    ("own_s", "others_s", "beginning_s"),
    [(0, [0, 0], 0), (3600, [0, 0], 0), (0, [-3600, 0], 0), (0, [-3600], 0), (-3600, [0], 0), (-3600, [], -3600)],
)
def test_a_stream_does_not_begin_with_a_clock_that_is_behind_another_one(
    own_s: int, others_s: list[int], beginning_s: int
) -> None:
    """It would leap forward as soon as the third clock is known, and what was written before would expire early."""
    samples = [ClockSample(TRUE + one * SECOND, 0) for one in others_s]
    assert beginning_us(samples, TRUE + own_s * SECOND, 0, 3) == TRUE + beginning_s * SECOND


# ---- a single broker ----


class Alone:
    """A single broker with a wall clock that may be wrong, and a stream in it."""

    def __init__(self, newest_us: int, ahead_us: int) -> None:
        self.now, self.ahead_us = 0, ahead_us
        self.steadiness = Steadiness(TRUE + ahead_us, 0)
        self.clock = StreamClock(newest_us, 0)

    def after(self, seconds: float) -> int:
        """How far stream time is ahead of the right time, in microseconds, after so long."""
        for _ in range(20):
            self.now += int(seconds * SECOND / 20)
            wall = TRUE + self.now + self.ahead_us
            self.steadiness = self.steadiness.observed(wall, self.now)
            steady_us = self.steadiness.steady_us(wall, self.now)
            time_us = self.clock.advance(ClockReading(wall, self.now, steady_us=steady_us))
        return time_us - TRUE - self.now


def test_one_boot_an_hour_ahead_leaves_stream_time_where_it_is() -> None:
    alone = Alone(TRUE, HOUR)
    assert alone.after(3500) == 0, "nothing of the last 40 minutes is older than 40 minutes"
    alone.ahead_us = 0
    assert alone.after(10) == 0, "and it was put right in time"


def test_a_clock_that_jumps_while_the_broker_runs_leaves_stream_time_where_it_is() -> None:
    alone = Alone(TRUE, 0)
    assert alone.after(4000) == 0
    alone.ahead_us = HOUR
    assert alone.after(3500) == 0
    alone.ahead_us = 0
    assert alone.after(4000) == 0


@pytest.mark.parametrize("stopped_s", [1, 60, 3600, 7 * 86_400])
def test_a_right_clock_is_followed_after_as_long_as_the_stop_took_and_after_an_hour_at_most(stopped_s: int) -> None:
    alone = Alone(TRUE - stopped_s * SECOND, 0)
    wait_s = min(stopped_s, 3600)
    assert alone.after(wait_s * 0.9) == -stopped_s * SECOND
    assert alone.after(wait_s * 0.2) == 0


def test_a_stream_that_rests_while_its_broker_runs_goes_on_with_its_clock() -> None:
    assert Alone(TRUE, 0).after(30 * 86_400) == 0


def test_steadiness_counts_from_the_last_jump_and_small_corrections_are_none() -> None:
    steadiness = Steadiness(TRUE, 0)
    assert steadiness.observed(TRUE + 10 * SECOND + 900_000, 10 * SECOND) is steadiness
    assert steadiness.steady_us(TRUE + 10 * SECOND, 10 * SECOND) == 10 * SECOND
    assert steadiness.steady_us(TRUE + 12 * SECOND, 10 * SECOND) == 0, "before anybody has observed it"
    after = steadiness.observed(TRUE + 12 * SECOND, 10 * SECOND)
    assert after.steady_us(TRUE + 15 * SECOND, 13 * SECOND) == 3 * SECOND


# ---- always ----

readings = st.lists(
    st.tuples(
        st.integers(0, 2 * HOUR),  # elapsed since the last one
        st.integers(-2 * HOUR, 2 * HOUR),  # the own clock is ahead
        st.none() | st.integers(-HOUR, 3 * HOUR),  # what is agreed on is ahead
        st.integers(0, 2 * HOUR),  # steady
    ),
    min_size=1,
    max_size=20,
)


@given(st.integers(-7 * 24 * HOUR, 2 * HOUR), readings)
def test_stream_time_never_goes_back_and_outruns_elapsed_time_only_where_it_may(
    newest_ahead: int, steps: list[tuple[int, int, int | None, int]]
) -> None:
    last, now = TRUE + newest_ahead, 0
    clock = StreamClock(last, 0)
    for passed, own_ahead, agreed_ahead, steady in steps:
        now += passed
        wall = TRUE + now + own_ahead
        agreed = None if agreed_ahead is None else TRUE + now + agreed_ahead
        time_us = clock.advance(ClockReading(wall, now, agreed, 0 if agreed is not None else steady))
        assert time_us >= last + passed // 2, "it never stands still"
        if time_us > last + passed:
            if agreed is not None:
                assert time_us == agreed
            else:
                assert time_us == wall
                assert steady >= min(time_us - last - passed, STEADY_ENOUGH_US)
        if agreed is not None:
            assert time_us >= agreed, "no broker is behind the majority"
        last = time_us


@given(st.integers(0, HOUR), st.integers(0, HOUR))
def test_readings_that_arrive_out_of_order_do_no_harm(one: int, other: int) -> None:
    clock = StreamClock(TRUE, 0)
    first = clock.advance(ClockReading(TRUE + one, one))
    second = clock.advance(ClockReading(TRUE + other, other))
    assert second >= first
    assert clock.advance(ClockReading(TRUE + HOUR, HOUR)) == TRUE + HOUR


# ---- what expires ----


def expiry_us(clock: ExpiryClock, clocks_us: int, elapsed_us: int, steady_us: int = 0, stream_us: int = 0) -> int:
    """Where the brokers agree on this time, and stream time is it, or later."""
    reading = ClockReading(clocks_us, elapsed_us, clocks_us)
    return clock.advance(max(stream_us, clocks_us), reading, steady_us)


def test_what_expires_follows_stream_time_at_once_while_that_is_in_step_with_elapsed_time() -> None:
    clock = ExpiryClock(TRUE, 0)
    for elapsed_us in range(0, 100 * SECOND, 50_000):
        assert expiry_us(clock, TRUE + elapsed_us, elapsed_us) == TRUE + elapsed_us


def test_a_jump_of_stream_time_is_followed_evenly_within_some_minutes() -> None:
    clock = ExpiryClock(TRUE, 0)
    expiry_us(clock, TRUE, 0, HOUR)
    times = [
        expiry_us(clock, TRUE + HOUR + elapsed_us, elapsed_us, 10 * HOUR) - TRUE
        for elapsed_us in range(SECOND, JUMP_FOLLOWED_WITHIN_US + 2 * SECOND, SECOND)
    ]
    steps = [after - before for before, after in pairwise(times)]
    assert times[0] == SECOND
    assert set(steps[:-2]) == {SECOND + HOUR // 300}
    assert times[-1] == HOUR + JUMP_FOLLOWED_WITHIN_US + SECOND


def test_when_the_clocks_are_corrected_nothing_more_expires_because_of_the_jump() -> None:
    clock, jumped_us = ExpiryClock(TRUE, 0), TRUE + HOUR
    expiry_us(clock, TRUE, 0)
    expiry_us(clock, jumped_us + SECOND, SECOND)
    during_us = expiry_us(clock, jumped_us + 2 * SECOND, 2 * SECOND)
    assert during_us == TRUE + 2 * SECOND + HOUR // 300
    for elapsed_us in range(3 * SECOND, 60 * SECOND, SECOND):
        now_us = expiry_us(clock, TRUE + elapsed_us, elapsed_us, stream_us=jumped_us + elapsed_us)
        assert now_us == max(during_us, TRUE + elapsed_us)


def test_after_a_start_the_time_that_the_own_clock_was_steady_for_counts_as_passed() -> None:
    for steady_us, time_us in [(HOUR, TRUE + HOUR), (HOUR - 1, TRUE)]:
        assert expiry_us(ExpiryClock(TRUE, 0), TRUE + HOUR, 0, steady_us) == time_us
    assert expiry_us(ExpiryClock(0, 0), TRUE, 0) == TRUE, "a stream without messages"


def test_a_majority_that_jumped_is_not_followed_at_once_by_a_new_leader_whose_steady_clock_did_not() -> None:
    clock = ExpiryClock(TRUE, 0)
    assert clock.advance(TRUE + 24 * HOUR, ClockReading(TRUE, 0, TRUE + 24 * HOUR), 240 * HOUR) == TRUE


@given(st.lists(st.tuples(st.integers(0, 2 * HOUR), st.integers(0, 60 * SECOND)), max_size=40), st.integers(0, HOUR))
def test_the_time_of_expiry_never_goes_back_is_never_ahead_and_never_far_behind_for_long(
    steps: list[tuple[int, int]], steady_us: int
) -> None:
    clock, stream_us, elapsed_us, before_us = ExpiryClock(TRUE, 0), TRUE, 0, TRUE
    for jump_us, passed_us in steps:
        stream_us, elapsed_us = stream_us + jump_us + passed_us, elapsed_us + passed_us
        now_us = expiry_us(clock, stream_us, elapsed_us, steady_us)
        assert before_us <= now_us <= stream_us
        assert now_us - before_us >= passed_us
        before_us = now_us
    elapsed_us += JUMP_FOLLOWED_WITHIN_US
    stream_us += JUMP_FOLLOWED_WITHIN_US
    assert expiry_us(clock, stream_us, elapsed_us) == stream_us
