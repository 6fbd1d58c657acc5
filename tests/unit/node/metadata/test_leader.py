"""Decisions that the state machine refuses are proposed ever more seldom."""

from __future__ import annotations

from natslog.cluster.commands import AppointLeaders, Appointment, FinishMoves
from natslog.node.metadata.leader import Repeats

APPOINTING = AppointLeaders(appointments=(Appointment(stream_id="a", version=3, leader=2, isr=(2,)),))


def test_a_refused_decision_is_not_proposed_at_every_look() -> None:
    """It was: ten times a second, for ever."""
    repeats, proposed = Repeats(), 0
    for tick in range(10 * 3600):
        proposed += len(repeats.due([APPOINTING], version=7, now_ms=100.0 * tick))
    assert proposed <= 3600 / 10 + 10


def test_a_new_decision_and_a_changed_state_are_not_held_back() -> None:
    repeats = Repeats()
    other = AppointLeaders(appointments=(Appointment(stream_id="b", version=1, leader=1, isr=(1,)),))
    assert repeats.due([APPOINTING], 7, 0.0) == [APPOINTING]
    assert repeats.due([APPOINTING, other], 7, 100.0) == [other]
    assert repeats.due([APPOINTING], 8, 150.0) == [APPOINTING]


def test_the_time_of_a_finished_move_makes_no_other_decision_of_it() -> None:
    repeats = Repeats()
    assert repeats.due([FinishMoves(moves=(("a", 1),), moved_us=1)], 7, 0.0) != []
    assert repeats.due([FinishMoves(moves=(("a", 1),), moved_us=2)], 7, 100.0) == []
