"""Each trap of the design with its rule switched off turns a simulation red: otherwise they would prove nothing.

Not here, because nothing depends on it: a leader that stays subscribed although its session has lapsed (its messages
are never acked, as its ISR asks another leader; who waits for no ack loses nothing that was promised), and the order by
epoch among positions of unproven logs (whoever holds everything committed has it in front of whatever is left over, so
that the longest log of a majority holds it too; by epoch it is the one that keeps most of the newest).
One seed in 20,000 notices an epoch that begins before a majority's clocks are known; a unit test of `HostedStream`
always does. One walk in 3,500 notices a leader that is chosen among unproven replicas by the log of messages alone;
unit tests of `quorum_position` and of the controller always do. One seed in 30,000 notices a member of the ISR that
lost the end of its log and takes over no kept ids; a unit test of `Replica` always does. No seed notices what is
dropped from files too early, because other records hide it; `tests/unit/log/test_removal_model.py` does. Followers of
the simulation fetch an idle log all the time, so that none is late at the first append after a silence: a unit test of
`LeaderReplica` has that.
`test_transcripts` has what needs a chain of events too long for chance: questions of an older epoch (KIP-320), and a
replica moved away and back.
"""

from __future__ import annotations

import pytest

from tests.sim.cluster_mutants import DIRECTED, IN_TIME, WALKING
from tests.sim.cluster_walk import first_red_walk
from tests.sim.cluster_world import first_red
from tests.sim.test_cluster import two_stop_and_the_last_dies, writes_resume_without_leader

SEEDS = 300
WALKS = 2000
NOTICED_LATE = {
    "ids of dropped rows are forgotten": 106,
    "a folder that is missing opens as an empty log": 527,
    "proposal applied twice on retry": 85,
    "a damaged replica serves what is left": 358,
    "beyond the end without a barrier": 317,
    "who takes office keeps a part of a run": 41,
    "refused proposals are repeated for ever": 24,
    "late registration of a life that is over accepted": 81,
    "appointment of a stale version accepted": 859,
    "positions are stated without a session": 106,
    "hearing of a metadata leader begins a session": 132,
    "companion: ends of a former life count": 3487,
    "companion: one that is missing opens as an empty log": 381,
    "companion: a leader serves before its records are delivered": 5,
    "removal: messages removed before a rule was added count": 26,
    "removal: a restarted follower serves before its records are delivered": 68,
}
"""Rules that many seeds do not need, with the first seed or walk that did when this was written. It is tried first: the
search for one takes up to a minute.
"""

SEARCHED_LONG = (
    *NOTICED_LATE,
    "who is eligible stays so when min_isr is lowered",
    "a damaged replica stays in the ISR",
    "KIP-279: one step back instead of a walk",
    "lives have a number and no nonce",
    "a new leader admits at its lagging HW",
    "companion: joins by messages alone",
    "a follower's HW inside a run",
    "a full disk keeps its leaderships",
)
"""Rules for which the search takes seconds."""


def _likely_first(name: str, count: int) -> list[int]:
    return [NOTICED_LATE.get(name, 0), *range(count)]


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.long) if one in SEARCHED_LONG else one for one in IN_TIME]
)
def test_rule_switched_off_is_noticed_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    IN_TIME[name](monkeypatch)
    assert first_red(_likely_first(name, SEEDS)) is not None, f"{name}: {SEEDS} seeds saw nothing wrong"


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.long) if one in SEARCHED_LONG else one for one in WALKING]
)
def test_rule_switched_off_is_noticed_on_a_walk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WALKING[name](monkeypatch)
    assert first_red_walk(_likely_first(name, WALKS)) is not None, f"{name}: {WALKS} walks saw nothing wrong"


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.long) if one in SEARCHED_LONG else one for one in DIRECTED]
)
def test_rule_switched_off_keeps_writes_from_resuming(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DIRECTED[name](monkeypatch)
    with pytest.raises(AssertionError, match="nothing is ack"):
        _both_stories()


def _both_stories() -> None:
    two_stop_and_the_last_dies()
    writes_resume_without_leader("full")
