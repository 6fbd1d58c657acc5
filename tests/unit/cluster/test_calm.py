"""When ticks of quiet replicas may be left out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from natslog.cluster.calm import Calm
from natslog.model import BrokerId

ONE, TWO = BrokerId(2), BrokerId(3)


@dataclass
class Around:
    incarnation: str = "a"
    is_registered: bool = True
    has_session: bool = True
    has_room: bool = True
    has_time: bool = True


def test_first_tick_is_not_left_out_and_the_next_ones_are() -> None:
    calm = Calm()
    assert [calm.goes_on(Around(), now_ms, {}) for now_ms in (0.0, 250.0, 500.0)] == [False, True, True]


@pytest.mark.parametrize("what", ["incarnation", "is_registered", "has_session", "has_room", "has_time"])
def test_each_change_of_the_surroundings_ends_it_for_one_tick(what: str) -> None:
    calm, around = Calm(), Around()
    calm.goes_on(around, 0.0, {})
    setattr(around, what, "b" if what == "incarnation" else 0)
    assert [calm.goes_on(around, now_ms, {}) for now_ms in (250.0, 500.0)] == [False, True]


def test_follower_without_contact_concerns_its_own_streams_only() -> None:
    calm = Calm()
    calm.goes_on(Around(), 0.0, {ONE: 0.0, TWO: 0.0})
    assert calm.goes_on(Around(), 1400.0, {ONE: 0.0, TWO: 1300.0})
    assert calm.away == frozenset()
    assert calm.goes_on(Around(), 1500.0, {ONE: 0.0, TWO: 1300.0})
    assert calm.away == {ONE}
    assert calm.goes_on(Around(), 60_000.0, {ONE: 0.0, TWO: 59_900.0})
    assert calm.away == {ONE}
    assert calm.goes_on(Around(), 60_250.0, {ONE: 60_200.0, TWO: 60_200.0})
    assert calm.away == frozenset()


def test_new_follower_ends_it() -> None:
    calm = Calm()
    calm.goes_on(Around(), 0.0, {ONE: 0.0})
    assert not calm.goes_on(Around(), 250.0, {ONE: 200.0, TWO: 240.0})
