"""What became of messages without acks, judged by those that were acked before and after them."""

from __future__ import annotations

import pytest

from tests.integration.upgrade_load import count_losses

ACKED = {4: 3, 9: 3, 14: 4, 19: 4}
"""Leader epochs by number, of every fifth message."""


def losses(missing: set[int], epochs: dict[int, int] = ACKED, again: tuple[int, ...] = ()) -> tuple[int, list[int]]:
    found = count_losses(range(20), epochs, [one for one in range(20) if one not in missing] + list(again))
    assert found.doubled == list(again)
    return found.lost, found.unexplained


@pytest.mark.parametrize(
    ("missing", "unexplained"),
    [
        (set(), []),
        ({10, 11, 12, 13}, []),  # between two leaders
        ({6}, [6]),
        ({5, 6, 7, 8}, [5, 6, 7, 8]),
        ({16}, [16]),
        ({14}, [14]),  # it was acked
        ({0}, [0]),
    ],
)
def test_only_messages_between_acks_of_two_epochs_may_be_lost(missing: set[int], unexplained: list[int]) -> None:
    assert losses(missing) == (len(missing), unexplained)


def test_a_whole_part_without_acks_within_an_epoch_is_unexplained() -> None:
    without = {number: epoch for number, epoch in ACKED.items() if number != 9} | {4: 3, 14: 3}
    assert losses(set(range(5, 10)), without) == (5, [5, 6, 7, 8, 9])


def test_messages_after_the_last_ack_are_not_judged_and_doubles_are_named() -> None:
    assert losses({18}, {4: 3, 9: 3}) == (1, [])
    assert losses(set(), again=(7,)) == (0, [])


def test_the_time_without_a_leader_is_that_between_two_epochs() -> None:
    assert count_losses([at / 10 for at in range(20)], ACKED, range(20)).without_leader_s == pytest.approx(0.5)
