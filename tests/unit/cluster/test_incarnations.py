"""Which life of a data folder may be registered after which."""

from __future__ import annotations

import copy

import pytest

from natslog.cluster.commands import (
    BrokerRecord,
    CreateStream,
    ForgetBroker,
    Proposal,
    RegisterBroker,
)
from natslog.cluster.incarnations import is_life
from natslog.cluster.metadata import Metadata
from natslog.errors import InvalidRequest, OutdatedFolder, from_json
from natslog.model import BrokerId, StreamSettings

Lives = tuple[str, ...]


def life(number: int, nonce: str, *, broker: int = 1, directory: str = "d1") -> BrokerRecord:
    return BrokerRecord(id=broker, url=f"http://log{broker}", directory=directory, life=number, nonce=nonce)


def cluster(*registered: BrokerRecord) -> Metadata:
    state = Metadata(cluster_id="c")
    for broker in registered:
        state.apply(RegisterBroker(broker=broker))
    settings = StreamSettings(subject="orders", replicas=1, min_isr=1)
    state.apply(CreateStream(name="orders", id="aa", settings=settings, created_us=1, placement=(1,)))
    return state


def register(state: Metadata, broker: BrokerRecord, *lives: str, after: str = "") -> bool:
    return state.apply(RegisterBroker(broker=broker, after=after, lives=lives))


def test_life_of_the_folder_that_was_registered_follows_it() -> None:
    state = cluster(life(1, "a"))
    assert register(state, life(2, "b"), "d1.1.a", "d1.2.b")
    assert register(state, life(4, "d"), "d1.1.a", "d1.2.b", "d1.3.c", "d1.4.d"), "life 3 was never registered"
    assert state.brokers[1].incarnation == "d1.4.d"


@pytest.mark.parametrize(
    ("again", "lives"),
    [
        (life(2, "x"), ("d1.1.a", "d1.2.x")),  # of the copy of life 1: the same number as the registered one
        (life(5, "y"), ("d1.1.a", "d1.2.x", "d1.3.x", "d1.4.x", "d1.5.y")),  # started until it had the higher number
        (life(3, "z"), ()),
        (life(1, "z"), ("d1.2.b", "d1.1.z")),  # numbers never fall
    ],
)
def test_older_copy_of_the_folder_is_refused_and_changes_nothing(again: BrokerRecord, lives: Lives) -> None:
    state = cluster(life(1, "a"))
    register(state, life(2, "b"), "d1.1.a", "d1.2.b")
    before = copy.deepcopy(state)
    with pytest.raises(OutdatedFolder, match=r"older copy.*d1\.2\.b.*cluster remove 1 --force.*add http://log1"):
        register(state, again, *lives)
    assert state == before


def test_refusal_reaches_the_broker_as_what_it_is() -> None:
    state = cluster(life(2, "b"))
    outcome = state.decide(Proposal(id="p", command=RegisterBroker(broker=life(2, "x"), lives=("d1.1.a",))))
    assert outcome.error is not None
    error = from_json(outcome.error)
    assert isinstance(error, OutdatedFolder)
    assert error.facts == {"broker": 1, "registered": "d1.2.b"}


def test_same_life_registered_again_changes_nothing() -> None:
    state = cluster(life(2, "b"))
    assert not register(state, life(2, "b"))


def test_late_registration_of_a_life_that_is_over_is_refused() -> None:
    state = cluster(life(1, "a"))
    register(state, life(3, "c"), "d1.1.a", "d1.2.b", "d1.3.c")
    with pytest.raises(OutdatedFolder):
        register(state, life(2, "b"), "d1.1.a", "d1.2.b")


def test_other_folder_is_a_new_one_and_the_replaced_one_is_refused() -> None:
    state = cluster(life(7, "g"))
    assert register(state, life(1, "n", directory="d2"))
    assert state.stream("orders").isr == (), "what the lost folder held is gone"
    with pytest.raises(OutdatedFolder):
        register(state, life(8, "h"), "d1.7.g", "d1.8.h")


def test_forgotten_broker_registers_anew() -> None:
    state = Metadata(cluster_id="c")
    register(state, life(7, "g"))
    state.apply(ForgetBroker(broker=1))
    assert register(state, life(1, "n", directory="d2"))


def test_clean_end_proves_the_logs_only_of_the_life_with_the_same_nonce() -> None:
    state = cluster(life(1, "a"))
    register(state, life(2, "b"), "d1.1.a", "d1.2.b", after="d1.1.a")
    assert state.stream("orders").unproven == (), "it ended in order right before"
    register(state, life(3, "c"), "d1.1.a", "d1.2.b", "d1.3.c", after="d1.2.x")
    assert state.stream("orders").unproven == (1,)


def test_first_life_with_a_nonce_follows_the_last_one_without() -> None:
    """It was registered at level 1, and the broker has not started since."""
    state = cluster()
    state.brokers[BrokerId(1)] = life(6, "")
    with pytest.raises(InvalidRequest, match=r"nonce"):
        register(state, life(7, ""), "d1.6")
    with pytest.raises(OutdatedFolder):
        register(state, life(6, "x"), "d1.5", "d1.6.x")  # the copy of life 5
    assert register(state, life(7, "g"), "d1.5", "d1.6", "d1.7.g")


def test_life_is_recognised_by_both_of_its_names() -> None:
    assert is_life("d1.6.a", "d1.6.a")
    assert is_life("d1.6", "d1.6.a")
    assert not is_life("d1.6.b", "d1.6.a")
    assert not is_life("d1.6", "d1.60.a")
