"""How often a request is repeated, and after which pauses, by a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest

from natslog.client.rounds import Rounds
from natslog.errors import BrokerUnavailable, NatslogError, NoLeader, PartsUnavailable, QuotaExceeded

OPTIONS: dict[str, Any] = {
    "retries": 2,
    "retry_interval_s": 0.25,
    "patience_s": 0.0,
    "leader_within_s": 15.0,
    "parts_within_s": 0.0,
    "now_s": 100.0,
}


def pauses(rounds: Rounds, what: NatslogError | str | None, *, now_s: float = 100.0, status: int = 503) -> list[float]:
    """Of all rounds, in each of which this happens; at most 50."""
    found: list[float] = []
    while len(found) < 50 and (pause_s := rounds.pause_s(now_s)) is not None:
        found.append(pause_s)
        now_s += pause_s
        rounds.begin()
        if isinstance(what, NatslogError):
            rounds.refused("http://a", what, status=status)
        elif what is not None:
            rounds.unreachable(what)
        rounds.end()
    return found


def test_pauses_are_twice_as_long_each_up_to_eight_times_the_first() -> None:
    assert pauses(Rounds(**OPTIONS | {"retries": 6}), "refused") == [0.0, 0.25, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_rounds_go_on_while_the_time_allows_it() -> None:
    found = pauses(Rounds(**OPTIONS | {"patience_s": 10.0}), "refused")
    assert len(found) > 3
    assert sum(found[:-1]) < 10.0 <= sum(found)


@pytest.mark.parametrize(
    ("error", "status", "within_s"),
    [
        (NoLeader("an election"), 503, 15.0),
        (BrokerUnavailable("valid, and outdated"), 200, 15.0),
        (PartsUnavailable("not here"), 503, 30.0),
        (BrokerUnavailable("overloaded"), 503, 0.0),
    ],
)
def test_what_comes_by_itself_is_waited_for(error: NatslogError, status: int, within_s: float) -> None:
    rounds = Rounds(**OPTIONS | {"parts_within_s": 30.0 if isinstance(error, PartsUnavailable) else 0.0})
    found = pauses(rounds, error, status=status)
    assert sum(found) >= within_s
    assert (len(found) == 3) == (within_s == 0.0)


def test_a_broker_states_its_own_pause_up_to_half_a_minute() -> None:
    error = QuotaExceeded("too many requests", retry_after_s=7)
    assert pauses(Rounds(**OPTIONS), error) == [0.0, 7.0, 7.0]
    assert pauses(Rounds(**OPTIONS), QuotaExceeded("too many requests", retry_after_s=1e9)) == [0.0, 30.0, 30.0]
    assert pauses(Rounds(**OPTIONS), QuotaExceeded("too many requests", retry_after_s="soon")) == [0.0, 0.25, 0.5]


def test_a_new_token_gives_one_more_round() -> None:
    rounds = Rounds(**OPTIONS | {"retries": 0})
    rounds.begin()
    rounds.token_replaced("401")
    rounds.end()
    assert rounds.pause_s(100.0) is not None
    rounds.begin()
    rounds.end()
    assert rounds.pause_s(100.0) is None


def test_what_a_broker_answers_is_reported_rather_than_what_another_does_not() -> None:
    rounds = Rounds(**OPTIONS)
    rounds.begin()
    rounds.refused("http://a", BrokerUnavailable("overloaded"), status=503)
    rounds.unreachable("http://b: refused")
    rounds.end()
    assert (rounds.problem, rounds.has_answer) == ("http://a: overloaded", True)
    rounds.begin()
    rounds.unreachable("http://b: refused")
    rounds.end()
    assert (rounds.problem, rounds.has_answer) == ("http://b: refused", False)
