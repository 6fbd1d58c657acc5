"""Offsets that every replica has lost. (The repair itself: tests/sim/test_damage.)"""

from __future__ import annotations

from natslog.cluster.damage import Losses
from natslog.errors import CorruptLog, NatslogError


def damaged(start: int, end: int) -> CorruptLog:
    return CorruptLog("a batch is damaged", start=start, end=end)


def test_losses_are_those_of_a_segment_until_it_is_repaired_or_they_are_accepted() -> None:
    losses = Losses()
    assert losses.note((12, 15))
    assert not losses.note((12, 15)), "it is reported once"
    assert losses.note((40, 41))
    assert losses.cover(damaged(14, 20))
    assert not losses.cover(damaged(15, 20))
    assert not losses.cover(NatslogError("of another kind"))
    losses.resolved((10, 30), [(12, 14)])
    assert (losses.ranges, losses.accepted) == ({(40, 41)}, 2)


def test_a_reader_that_goes_through_losses_is_not_disturbed() -> None:
    """`cover` is called from threads, while the event loop notes others."""
    losses = Losses()
    losses.note((1, 2))
    known = iter(losses.ranges)
    losses.note((3, 4))
    assert list(known) == [(1, 2)]
