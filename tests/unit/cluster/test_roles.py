"""The two roles of a replica, each rule by itself. (What they do together: tests/sim.)"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.cluster.epochs import EpochHistory
from natslog.cluster.incarnations import is_former_life
from natslog.cluster.roles import (
    Append,
    BeforeStart,
    BeginAt,
    CutTo,
    Diverging,
    Fenced,
    FetchPosition,
    FollowerReplica,
    FollowerStep,
    Halt,
    Ignore,
    LeaderReplica,
    Matching,
    Verdict,
    judge,
    quorum_position,
)
from natslog.cluster.tracks import Track
from natslog.model import StreamRecord, StreamSettings

LATER_MS = 10_000.0


def record_of(isr: tuple[int, ...] = (1, 2, 3), **changes: Any) -> StreamRecord:
    record = StreamRecord(
        name="orders",
        id="aa",
        settings=StreamSettings(subject="orders", replicas=3, min_isr=2),
        created_us=0,
        leader=1,
        leader_epoch=5,
        replicas=(1, 2, 3),
        isr=isr,
    )
    return msgspec.structs.replace(record, **changes)


def leader_of(record: StreamRecord | None = None, *, end: int = 10, high_watermark: int = 0) -> LeaderReplica:
    return LeaderReplica(1, record or record_of(), log_end_offset=end, high_watermark=high_watermark, now_ms=0.0)


def held_by_all(leader: LeaderReplica, offset: int, now_ms: float = 1.0) -> int:
    leader.fetched(2, offset, "a", now_ms)
    return leader.fetched(3, offset, "b", now_ms)


# ---- judging a position ----

EPOCHS = EpochHistory([(2, 0), (4, 6), (5, 8)])


@pytest.mark.parametrize(
    ("position", "verdict"),
    [
        (FetchPosition(5, 10, 5), Matching()),
        (FetchPosition(5, 8, 4), Matching()),
        (FetchPosition(5, 3, 2), Matching()),
        (FetchPosition(5, 0, 0), Matching()),
        (FetchPosition(4, 10, 5), Fenced(5)),
        (FetchPosition(6, 10, 5), Fenced(5)),
        (FetchPosition(0, 0, 0), Fenced(5)),
        (FetchPosition(5, 7, 2), Diverging(2, 6)),
        (FetchPosition(5, 9, 4), Diverging(4, 8)),
        (FetchPosition(5, 7, 3), Diverging(2, 6)),
        (FetchPosition(5, 11, 5), Diverging(5, 10)),
        (FetchPosition(5, 3, 1), Diverging(0, 0)),
    ],
)
def test_judge_of_a_whole_log(position: FetchPosition, verdict: Verdict) -> None:
    assert judge(position, epoch=5, epochs=EPOCHS, log_start_offset=0, log_end_offset=10) == verdict


@pytest.mark.parametrize(
    ("position", "verdict"),
    [
        (FetchPosition(5, 3, 2), BeforeStart(7, 4)),
        (FetchPosition(5, 7, 2), BeforeStart(7, 4)),
        (FetchPosition(5, 7, 4), Matching()),
        (FetchPosition(5, 7, 0), Matching()),
        (FetchPosition(5, 8, 2), BeforeStart(7, 4)),
        (FetchPosition(5, 9, 4), Diverging(4, 8)),
    ],
)
def test_judge_after_retention(position: FetchPosition, verdict: Verdict) -> None:
    epochs = EpochHistory([(4, 6), (5, 8)])
    assert judge(position, epoch=5, epochs=epochs, log_start_offset=7, log_end_offset=10) == verdict


def test_tail_that_was_never_committed_does_not_survive_where_it_begins_below_the_leaders_log_start() -> None:
    """[90, 120) of epoch 1 was never committed. The leader of epoch 2 began at 90, and its retention has passed 100."""
    asked = {"epoch": 2, "epochs": EpochHistory([(1, 0), (2, 90)]), "log_start_offset": 100, "log_end_offset": 200}
    verdict = judge(FetchPosition(2, 120, 1), **asked)
    assert verdict == BeforeStart(100, 2), "it was cut to 100, and kept [90, 100)"
    assert judge(FetchPosition(2, 100, 1), **asked) == BeforeStart(100, 2), "it was taken for the leader's own"
    begun = EpochHistory([(2, 99)])
    assert judge(FetchPosition(2, 100, begun.last_epoch_before(100)), **asked) == Matching()
    follower = follower_of()
    answer = {"epochs": EpochHistory([(1, 0)]), "log_end_offset": 120}
    assert follower.answered(follower.epoch, BeforeStart(100, 2), 1.0, **answer) == BeginAt(100, 2), "and does not halt"


def test_leader_that_knows_no_epoch_below_its_log_start_lets_a_follower_begin_there() -> None:
    asked = {"epoch": 2, "epochs": EpochHistory([(2, 99)]), "log_start_offset": 100, "log_end_offset": 200}
    assert judge(FetchPosition(2, 120, 1), **asked) == BeforeStart(100, 2), "it said that the logs part at 0: a halt"


def test_replica_that_began_at_its_leaders_start_matches_the_next_leader_whose_log_starts_lower() -> None:
    """Retention has dropped all that the first leader had, [20, 20); followers still have what they have."""
    first, other = EpochHistory([(1, 0)]), EpochHistory([(1, 0), (2, 20)])
    verdict = judge(FetchPosition(1, 5, 1), epoch=1, epochs=first, log_start_offset=20, log_end_offset=20)
    assert verdict == BeforeStart(20, 1)
    begun = EpochHistory([(verdict.epoch, verdict.log_start_offset - 1)])
    newcomer = follower_of().position(begun, 20)
    asked = msgspec.structs.replace(newcomer, epoch=2)
    assert judge(asked, epoch=2, epochs=other, log_start_offset=0, log_end_offset=25) == Matching()
    begun.begin(2, 20)  # and where it leads itself: what the other one wrote behind 20 goes, not all it has
    asked = FetchPosition(2, 21, 1)
    assert judge(asked, epoch=2, epochs=begun, log_start_offset=20, log_end_offset=22) == Diverging(1, 20)


# ---- the leader: HW ----


def test_high_watermark_is_the_least_end_of_the_isr_and_never_goes_back() -> None:
    leader = leader_of(end=0)
    leader.appended(10)
    assert leader.fetched(2, 10, "a", 1.0) == 0, "nothing is known of 3"
    assert leader.fetched(3, 8, "b", 1.0) == 8
    assert leader.fetched(3, 10, "b", 1.0) == 10
    assert leader.appended(15) == 10
    assert leader.fetched(3, 9, "b", 1.0) == 10
    assert leader.fetched(9, 15, "x", 1.0) == 10, "no replica"


def test_high_watermark_freezes_below_min_isr() -> None:
    leader = leader_of(record_of(isr=(1,), eligible=(2, 3)), high_watermark=4)
    assert leader.high_watermark == 4
    assert leader.refusal() is not None
    assert leader.update(record_of(isr=(1, 2), version=1), 1.0) == 4
    assert leader.refusal() is None
    assert leader.fetched(2, 10, "a", 1.0) == 10


def test_new_leader_is_exposed_when_all_of_earlier_epochs_is_committed() -> None:
    leader = leader_of(end=10, high_watermark=4)
    held_by_all(leader, 9)
    assert (leader.high_watermark, leader.is_exposed) == (4, False), "9 may be inside a run"
    held_by_all(leader, 10)
    assert (leader.high_watermark, leader.is_exposed) == (10, True)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=8),
    steps=st.lists(st.tuples(st.integers(2, 3), st.integers(0, 40)), max_size=30),
)
def test_high_watermark_never_rests_inside_a_run(sizes: list[tuple[int, bool]], steps: list[tuple[int, int]]) -> None:
    leader, inside, told = leader_of(end=0), set(), iter(sizes)
    ends = {2: 0, 3: 0}
    for follower, more in steps:
        if (size := next(told, None)) is not None:
            start, end = leader.log_end_offset, leader.log_end_offset + size[0]
            leader.appended(end, start if size[1] else None)
            inside |= set(range(start + 1, end)) if size[1] else set()
        ends[follower] = min(leader.log_end_offset, ends[follower] + more)
        high_watermark = leader.fetched(follower, ends[follower], "x", 1.0)
        least = min(leader.log_end_offset, *ends.values())
        assert high_watermark == max(at for at in range(least + 1) if at not in inside), "as far as whole runs go"


def test_follower_that_copies_a_long_run_without_a_pause_stays_in_sync() -> None:
    leader = leader_of(end=0)
    leader.appended(1000, run_start=0)
    now_ms = 0.0
    for offset in range(0, 1000, 100):
        now_ms += 2000.0
        held_by_all(leader, offset, now_ms)
        assert leader.isr_change(now_ms, {}) is None, "it moves on"
    for _ in range(2):
        now_ms += 2000.0
        leader.fetched(2, 900, "a", now_ms)
        leader.fetched(3, 900, "b", now_ms)
    change = leader.isr_change(now_ms, {})
    assert change is not None
    assert change.isr == (1,), "both have stopped"


def test_follower_shows_whole_runs_only() -> None:
    follower = FollowerReplica(2, record_of(), high_watermark=5, last_contact_ms=0.0)
    assert follower.advanced(30, 10) == 10
    assert follower.advanced(30, 10) == 10, "the run from 10 on is not whole here"
    assert follower.advanced(20, 30) == 20


# ---- the leader: the ISR ----


def test_lagging_follower_leaves_and_is_counted_until_that_is_done() -> None:
    leader = leader_of()
    leader.fetched(2, 10, "a", LATER_MS)
    change = leader.isr_change(LATER_MS, {2: LATER_MS})
    assert change is not None
    assert (change.isr, change.incarnations, change.version, change.epoch) == ((1, 2), ("", "a"), 0, 5)
    assert leader.high_watermark == 0
    assert leader.update(record_of(isr=(1, 2), version=1), LATER_MS) == 10


@pytest.mark.parametrize("log", ["messages", "companion"])
def test_first_append_after_a_silence_makes_no_follower_lag_that_is_in_contact(log: str) -> None:
    leader = leader_of()
    companion = with_companion(leader)
    held_by_all(leader, 10)
    for follower, life in ((2, "a"), (3, "b")):
        leader.fetched(follower, 4, life, 1.0, track=companion)
    leader.appended(12 if log == "messages" else 6, now_ms=LATER_MS, track=None if log == "messages" else companion)
    in_contact = {2: LATER_MS, 3: LATER_MS}
    assert leader.isr_change(LATER_MS + 1, in_contact) is None
    assert leader.isr_change(LATER_MS + 2999, in_contact) is None  # what was there 3 s ago they have
    change = leader.isr_change(LATER_MS + 3001, in_contact)
    assert change is not None
    assert change.isr == (1,)


def test_follower_that_is_not_in_contact_leaves_an_idle_stream() -> None:
    leader = leader_of()
    held_by_all(leader, 10)
    change = leader.isr_change(LATER_MS, {2: LATER_MS - 3001, 3: LATER_MS - 2999})
    assert change is not None
    assert change.isr == (1, 3)


def test_follower_that_knew_before_its_leader_that_it_is_out_comes_back_though_it_asks_no_more() -> None:
    leader = leader_of(end=0)
    held_by_all(leader, 0)
    leader.fetched(3, 0, "b", LATER_MS, version=1)  # the leader's disk is slow: it receives version 1 after 3 did
    leader.update(record_of(isr=(1, 2), version=1), LATER_MS)
    change = leader.isr_change(LATER_MS, {2: LATER_MS, 3: LATER_MS})
    assert change is not None
    assert (change.isr, change.version) == ((1, 2, 3), 1)


def test_question_of_a_former_life_is_no_word_about_the_present_one() -> None:
    """It was on its way over a connection that is gone; the life after it may hold less."""
    leader = leader_of(end=0)
    leader.appended(10)
    leader.fetched(2, 4, "d2.3.n", 1.0)
    leader.fetched(3, 10, "d3.1.n", 1.0)
    assert leader.high_watermark == 4
    assert leader.fetched(2, 10, "d2.2.n", 2.0) == 4
    assert leader.followers[2].incarnation == "d2.3.n"
    assert leader.fetched(2, 10, "d2.3.n", 3.0) == 10


@pytest.mark.parametrize(
    ("asked", "known", "is_former"),
    [
        ("d.2.n", "d.3.m", True),
        ("d.9", "d.10", True),
        ("d.3.m", "d.2.n", False),
        ("d.3.m", "d.3.n", False),
        ("d.2.n", "e.3.m", False),
        ("d.2.n", "", False),
        ("", "", False),
    ],
)
def test_former_lives_are_known_by_their_number(asked: str, known: str, is_former: bool) -> None:
    assert is_former_life(asked, known) is is_former


def test_follower_that_asked_before_it_was_put_out_must_ask_again() -> None:
    leader = leader_of(end=0)
    held_by_all(leader, 0)
    leader.update(record_of(isr=(1, 2), version=1), LATER_MS)
    assert leader.isr_change(LATER_MS, {2: LATER_MS, 3: LATER_MS}) is None


def test_follower_of_an_idle_stream_stays_in_sync_while_its_broker_sends_something() -> None:
    leader = leader_of()
    for follower in (2, 3):
        leader.fetched(follower, 10, "a", 0.0)
    assert leader.isr_change(LATER_MS, {2: LATER_MS, 3: LATER_MS}) is None


def test_follower_a_constant_moment_behind_stays_however_much_is_appended_between_its_fetches() -> None:
    """A flood: each fetch brings less than was appended since the one before, and the follower is 300 ms behind."""
    leader = leader_of(end=0)
    per_ms, behind_ms = 100, 300
    for now_ms in range(0, 20_000, 50):
        leader.appended(now_ms * per_ms)
        for follower in (2, 3):
            leader.fetched(follower, max(0, now_ms - behind_ms) * per_ms, "a", float(now_ms))
        change = leader.isr_change(float(now_ms), {2: float(now_ms), 3: float(now_ms)})
        assert change is None, f"at {now_ms} ms: {change}"


def test_follower_that_falls_ever_further_behind_leaves() -> None:
    leader = leader_of(end=0)
    for now_ms in range(0, 8_000, 50):
        leader.appended(now_ms * 100)
        leader.fetched(2, now_ms * 100, "a", float(now_ms))
        leader.fetched(3, now_ms * 50, "b", float(now_ms))
        change = leader.isr_change(float(now_ms), {2: float(now_ms), 3: float(now_ms)})
        if change is not None:
            assert change.isr == (1, 2)
            assert now_ms >= 5_800, "half as fast as the log grows, it is 3 s behind after 6 s"
            return
    raise AssertionError("it holds the high watermark back for ever")


def test_caught_up_follower_joins_and_holds_the_high_watermark_from_then_on() -> None:
    leader = leader_of(record_of(isr=(1, 2)))
    leader.fetched(2, 10, "a", 1.0)
    leader.fetched(3, 9, "b", 1.0)
    assert leader.isr_change(1.0, {}) is None, "9 is below HW"
    leader.fetched(3, 10, "b", 1.0)
    change = leader.isr_change(1.0, {})
    assert change is not None
    assert change.isr == (1, 2, 3)
    leader.appended(12)
    assert leader.fetched(2, 12, "a", 2.0) == 10, "3 counts as soon as the change may come true"
    assert leader.fetched(3, 12, "b", 2.0) == 12


def slow_follower_at(leader: LeaderReplica, now_ms: int) -> None:
    """Messages each 50 ms; broker 3 has a round of 1.5 s: what it requests is what there was 1.5 s ago."""
    leader.appended(now_ms // 50, now_ms=float(now_ms))
    leader.fetched(2, now_ms // 50, "a", float(now_ms))
    if now_ms % 1500 == 0:
        leader.fetched(3, max(0, now_ms - 1500) // 50, "b", float(now_ms))


def test_follower_that_keeps_up_and_is_never_at_the_high_watermark_joins() -> None:
    leader = leader_of(record_of(isr=(1, 2)), end=0)
    for now_ms in range(50, 20_000, 50):
        slow_follower_at(leader, now_ms)
        change = leader.isr_change(float(now_ms), {3: float(now_ms)})
        if change is not None:
            assert change.isr == (1, 2, 3)
            assert now_ms > 6000, "it is given time to join without a wait"
            assert leader.high_watermark <= (now_ms - 1500) // 50, "the HW waited for it"
            return
        assert leader.is_committed or now_ms > 6000
    raise AssertionError("it would stay in the ISR, and never joins it")


@pytest.mark.parametrize(("fetches_until_ms", "may_wait_ms"), [(3000, 0), (5000, 3000)])
def test_high_watermark_does_not_wait_long_for_a_follower_that_requests_nothing_any_more(
    fetches_until_ms: int, may_wait_ms: int
) -> None:
    leader = leader_of(record_of(isr=(1, 2)), end=0)
    waited = []
    for now_ms in range(50, 30_000, 50):
        leader.appended(now_ms // 50, now_ms=float(now_ms))
        leader.fetched(2, now_ms // 50, "a", float(now_ms))
        if now_ms % 1000 == 0 and now_ms <= fetches_until_ms:
            leader.fetched(3, (now_ms - 500) // 50, "b", float(now_ms))
        leader.isr_change(float(now_ms), {3: float(now_ms)})
        if leader.high_watermark < leader.log_end_offset:
            waited.append(now_ms)
    assert len(waited) * 50 <= may_wait_ms, "as for a member of the ISR"
    assert bool(waited) == bool(may_wait_ms)


def test_new_leader_does_not_wait_for_a_follower_that_is_far_behind() -> None:
    leader = leader_of(record_of(isr=(1, 2)), end=1000, high_watermark=900)
    leader.fetched(2, 1000, "a", 1.0)
    leader.fetched(3, 950, "b", 1.0)
    assert leader.isr_change(2.0, {3: 2.0}) is None
    assert leader.is_committed


def test_high_watermark_waits_for_nobody_during_a_transfer() -> None:
    leader = leader_of(record_of(isr=(1, 2)), end=0)
    for now_ms in range(50, 7000, 50):
        slow_follower_at(leader, now_ms)
        leader.isr_change(float(now_ms), {3: float(now_ms)})
    assert leader.high_watermark < leader.log_end_offset
    assert leader.end_waiting() == leader.log_end_offset
    leader.isr_change(7000.0, {3: 7000.0}, may_wait=False)
    assert leader.is_committed


def test_proposal_that_may_still_come_true_is_withdrawn_by_another_version_only() -> None:
    leader = leader_of(record_of(isr=(1, 2)))
    leader.fetched(2, 10, "a", 1.0)
    leader.fetched(3, 10, "b", 1.0)
    assert leader.isr_change(1.0, {}) is not None
    assert leader.isr_change(1000.0, {}) is None, "it is still under way"
    leader.appended(12)
    leader.fetched(2, 12, "a", LATER_MS)
    change = leader.isr_change(LATER_MS, {2: LATER_MS})
    assert change is not None
    assert change.isr == (1, 2), "the same ISR, so that the version moves on"
    assert leader.counted == {1, 2, 3}
    leader.update(record_of(isr=(1, 2), version=1), LATER_MS)
    assert leader.counted == {1, 2}


def test_follower_of_an_earlier_epochs_end_does_not_join_at_a_lagging_high_watermark() -> None:
    leader = leader_of(record_of(isr=(1, 2)), end=10, high_watermark=4)
    leader.fetched(3, 6, "b", 1.0)
    assert leader.isr_change(1.0, {}) is None


def test_restarted_member_is_proven_when_it_has_caught_up() -> None:
    leader = leader_of(record_of(unproven=(3,)))
    leader.fetched(2, 10, "a", 1.0)
    assert leader.isr_change(1.0, {}) is None
    leader.fetched(3, 10, "b", 1.0)
    change = leader.isr_change(1.0, {})
    assert change is not None
    assert (change.isr, change.proven) == ((1, 2, 3), (3,))


# ---- the leader of a stream with a companion log ----


def with_companion(leader: LeaderReplica, end: int = 4, now_ms: float = 1.0) -> Track:
    """Both followers have all messages; nothing is known of their companion logs."""
    held_by_all(leader, leader.log_end_offset, now_ms)
    leader.begin_companion(end, end, now_ms)
    assert leader.companion is not None
    return leader.companion


def test_each_log_has_a_high_watermark_of_its_own_over_the_same_replicas() -> None:
    leader = leader_of()
    companion = with_companion(leader)
    leader.appended(6, now_ms=1.0, track=companion)
    leader.appended(12)
    assert (leader.high_watermark, companion.high_watermark) == (10, 4)
    leader.fetched(2, 6, "a", 2.0, track=companion)
    assert companion.high_watermark == 4, "nothing is known of 3"
    leader.fetched(3, 5, "b", 2.0, track=companion)
    assert (leader.high_watermark, companion.high_watermark) == (10, 5)
    held_by_all(leader, 12)
    assert (leader.high_watermark, companion.high_watermark) == (12, 5)
    leader.update(record_of(isr=(1,), version=1), 3.0)
    leader.appended(7, now_ms=3.0, track=companion)
    assert companion.high_watermark == 5, "below min_isr nothing is committed, in either log"


def test_replica_joins_with_everything_of_both_logs_only() -> None:
    leader = leader_of(record_of(isr=(1, 2)))
    companion = with_companion(leader)
    leader.fetched(2, 4, "a", 2.0, track=companion)
    assert not leader.is_to_join(3)
    assert leader.isr_change(2.0, {}) is None, "it has all messages, and nothing of the companion log is known"
    leader.fetched(3, 3, "b", 2.0, track=companion)
    assert leader.isr_change(2.0, {}) is None
    leader.fetched(3, 4, "b", 3.0, track=companion)
    assert leader.is_to_join(3)
    change = leader.isr_change(3.0, {})
    assert change is not None
    assert change.isr == (1, 2, 3)
    leader.appended(6, now_ms=3.0, track=companion)
    leader.fetched(2, 6, "a", 4.0, track=companion)
    assert companion.high_watermark == 4, "3 counts as soon as the change may come true"


def test_restarted_member_is_proven_with_both_logs_only() -> None:
    leader = leader_of(record_of(unproven=(3,)))
    companion = with_companion(leader)
    leader.fetched(2, 4, "a", 2.0, track=companion)
    assert leader.isr_change(2.0, {}) is None
    leader.fetched(3, 4, "b", 2.0, track=companion)
    change = leader.isr_change(2.0, {})
    assert change is not None
    assert change.proven == (3,)


@pytest.mark.parametrize("lagging", ["messages", "companion"])
def test_follower_that_lags_in_either_log_leaves(lagging: str) -> None:
    leader = leader_of()
    companion = with_companion(leader)
    for follower, life in ((2, "a"), (3, "b")):
        leader.fetched(follower, 4, life, 1.0, track=companion)
    leader.appended(12, now_ms=1.0)
    leader.appended(6, now_ms=1.0, track=companion)
    both = {2: LATER_MS, 3: LATER_MS}
    for at_ms in (1000.0, LATER_MS):
        leader.fetched(2, 12, "a", at_ms)
        leader.fetched(2, 6, "a", at_ms, track=companion)
        if lagging == "messages":
            leader.fetched(3, 6, "b", at_ms, track=companion)
        else:
            leader.fetched(3, 12, "b", at_ms)
    change = leader.isr_change(LATER_MS, both)
    assert change is not None
    assert change.isr == (1, 2)


def test_followers_have_time_to_open_a_new_companion_log() -> None:
    leader = leader_of()
    companion = with_companion(leader, end=0, now_ms=LATER_MS)
    leader.appended(1, now_ms=LATER_MS, track=companion)
    both = {2: LATER_MS + 2500, 3: LATER_MS + 2500}
    assert leader.isr_change(LATER_MS + 2500, both) is None
    assert companion.high_watermark == 0
    leader.fetched(2, 1, "a", LATER_MS + 2600, track=companion)
    change = leader.isr_change(LATER_MS + 3100, both)
    assert change is not None
    assert change.isr == (1, 2)


def test_leader_with_a_companion_log_is_quiet_exposed_and_succeeded_in_both_logs_only() -> None:
    leader = leader_of(end=10, high_watermark=10)
    held_by_all(leader, 10)
    assert leader.is_quiet
    leader.begin_companion(4, 2, 1.0)
    companion = leader.companion
    assert companion is not None
    assert not leader.is_exposed, "records of earlier epochs are not known to be committed"
    assert not leader.is_quiet
    assert not leader.is_caught_up(2)
    leader.fetched(2, 4, "a", 2.0, track=companion)
    leader.fetched(3, 3, "b", 2.0, track=companion)
    assert leader.is_caught_up(2)
    assert not leader.is_caught_up(3)
    assert (leader.is_exposed, leader.is_quiet, leader.is_committed) == (False, False, False)
    leader.fetched(3, 4, "b", 3.0, track=companion)
    assert (leader.is_exposed, leader.is_quiet, leader.is_committed) == (True, True, True)


def test_new_life_of_a_follower_makes_its_end_in_both_logs_unknown() -> None:
    leader = leader_of()
    companion = with_companion(leader)
    leader.fetched(2, 4, "d2.1.n", 1.0, track=companion)
    leader.fetched(3, 4, "b", 1.0, track=companion)
    leader.fetched(2, 10, "d2.2.n", 2.0)
    leader.appended(5, now_ms=2.0, track=companion)
    leader.fetched(3, 5, "b", 2.0, track=companion)
    assert companion.end_of(2) is None, "what its former life had may be lost"
    leader.fetched(2, 5, "d2.1.n", 2.0, track=companion)
    assert companion.end_of(2) is None, "a question of the former life"


def test_member_that_is_put_out_must_ask_again_for_both_logs() -> None:
    leader = leader_of()
    companion = with_companion(leader)
    leader.fetched(2, 4, "a", 2.0, track=companion)
    leader.fetched(3, 4, "b", 2.0, track=companion)
    leader.update(record_of(isr=(1, 2), version=1), 3.0)
    leader.fetched(3, 10, "b", 4.0, version=1)
    assert leader.isr_change(4.0, {}) is None, "its companion log may be why it was put out"
    leader.fetched(3, 4, "b", 5.0, version=1, track=companion)
    change = leader.isr_change(5.0, {})
    assert change is not None
    assert change.isr == (1, 2, 3)


# ---- the follower ----


def follower_of(high_watermark: int = 0) -> FollowerReplica:
    return FollowerReplica(2, record_of(), high_watermark, 0.0)


@pytest.mark.parametrize(
    ("epoch", "verdict", "high_watermark", "step"),
    [
        (5, Matching(), 8, Append()),
        (4, Matching(), 8, Ignore()),
        (6, Diverging(2, 0), 0, Ignore()),
        (5, Fenced(6), 8, Ignore()),
        (5, Diverging(4, 7), 0, CutTo(7)),
        (5, Diverging(3, 7), 0, CutTo(6)),
        (5, Diverging(4, 20), 0, CutTo(8)),
        (5, BeforeStart(20, 4), 8, BeginAt(20, 4)),
    ],
)
def test_follower_does_what_the_leader_of_its_epoch_says(
    epoch: int, verdict: Verdict, high_watermark: int, step: FollowerStep
) -> None:
    follower = follower_of(high_watermark)
    assert follower.answered(epoch, verdict, 1.0, epochs=EPOCHS, log_end_offset=10) == step


@pytest.mark.parametrize("verdict", [Diverging(4, 7), Diverging(0, 0), BeforeStart(7)])
def test_follower_halts_rather_than_cut_what_is_committed(verdict: Verdict) -> None:
    step = follower_of(high_watermark=8).answered(5, verdict, 1.0, epochs=EPOCHS, log_end_offset=10)
    assert isinstance(step, Halt)


def test_followers_high_watermark_is_never_beyond_its_log_nor_goes_back() -> None:
    follower = follower_of()
    assert follower.advanced(20, 10) == 10
    assert follower.advanced(5, 10) == 10
    assert follower.position(EPOCHS, 8) == FetchPosition(5, 8, 4)


def test_leader_that_neither_answers_nor_sends_anything_is_unresponsive() -> None:
    follower = follower_of()
    assert not follower.is_leader_unresponsive(2000.0, 0.0, ())
    assert follower.is_leader_unresponsive(3000.0, 0.0, ())
    assert not follower.is_leader_unresponsive(3000.0, 1000.0, ())
    follower.answered(4, Matching(), 3000.0, epochs=EPOCHS, log_end_offset=10)
    assert follower.is_leader_unresponsive(3000.0, 0.0, ()), "another epoch's answer is none"
    follower.answered(5, Matching(), 3000.0, epochs=EPOCHS, log_end_offset=10)
    assert not follower.is_leader_unresponsive(3000.0, 0.0, ())
    assert not follower.is_leader_unresponsive(3000.0, 0.0, (2, 3)), "others have ended"
    assert follower.is_leader_unresponsive(3000.0, 0.0, (follower.record.leader,)), "its process has ended"


# ---- the longest log ----


def test_quorum_position_needs_a_majority_and_takes_the_longest_log_of_the_newest_epoch() -> None:
    assert quorum_position({1: (5, 10)}, (1, 2, 3)) is None
    assert quorum_position({1: (4, 20), 2: (5, 10)}, (1, 2, 3)) == 2
    assert quorum_position({2: (5, 10), 3: (5, 11)}, (1, 2, 3)) == 3
    assert quorum_position({2: (5, 10), 3: (5, 10)}, (1, 2, 3)) == 2
    assert quorum_position({3: (5, 10), 9: (9, 99)}, (3,)) == 3
    assert quorum_position({1: (5, 10), 9: (9, 99)}, (1, 2, 3)) is None


def test_quorum_position_of_two_logs_is_that_of_a_replica_that_has_what_was_committed_in_both() -> None:
    messages = {1: (5, 10), 2: (5, 9), 3: (5, 9)}
    assert quorum_position(messages, (1, 2, 3), {1: (5, 3), 2: (5, 5), 3: (5, 5)}) == 2, "1 has lost two records"
    assert quorum_position({1: (5, 10), 2: (5, 9)}, (1, 2, 3), {1: (5, 3), 2: (5, 5)}) is None, "either may be whole"
    assert quorum_position({1: (5, 10), 2: (5, 9)}, (1, 2, 3), {1: (5, 5), 2: (5, 5)}) == 1
    assert quorum_position(messages, (1, 2, 3), {1: (5, 3)}) is None
    assert quorum_position({1: (5, 9), 2: (5, 4)}, (1, 2), {1: (5, 1), 2: (5, 3)}) is None, "an operator decides"
    assert quorum_position({1: (5, 9), 2: (5, 4)}, (1, 2), {1: (5, 3), 2: (5, 3)}) == 1
    assert quorum_position({1: (5, 9)}, (1,), {1: (5, 3)}) == 1


@given(
    whole=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    extra=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=5, max_size=5),
    lost=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=2, max_size=2),
    count=st.integers(1, 5),
    silent=st.sets(st.integers(1, 5), max_size=2),
)
def test_quorum_position_of_two_logs_never_names_one_that_lacks_what_was_committed(
    whole: tuple[int, int],
    extra: list[tuple[int, int]],
    lost: list[tuple[int, int]],
    count: int,
    silent: set[int],
) -> None:
    """Up to half have lost any part of either log; all others have what was committed, and perhaps more."""
    ends = {at: (whole[0] + extra[at - 1][0], whole[1] + extra[at - 1][1]) for at in range(1, count + 1)}
    for at, (messages, companion) in zip(range(1, count // 2 + 1), lost, strict=False):
        ends[at] = (max(0, ends[at][0] - messages), max(0, ends[at][1] - companion))
    given = {at: end for at, end in ends.items() if at not in silent}
    chosen = quorum_position(
        {at: (5, end[0]) for at, end in given.items()}, tuple(ends), {at: (5, end[1]) for at, end in given.items()}
    )
    if chosen is None:
        assert len(given) < count or count % 2 == 0, "all positions are known"
    else:
        assert ends[chosen][0] >= whole[0]
        assert ends[chosen][1] >= whole[1]
