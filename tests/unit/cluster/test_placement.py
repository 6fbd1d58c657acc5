"""Where replicas go."""

from __future__ import annotations

import msgspec
import pytest

from natslog.cluster.commands import BrokerRecord, CreateStream, RegisterBroker
from natslog.cluster.metadata import Metadata
from natslog.cluster.placement import Loads
from natslog.errors import NotEnoughBrokers
from natslog.model import StreamSettings


def state_of(racks: str, placements: tuple[tuple[int, ...], ...] = ()) -> Metadata:
    """Brokers 1, 2, 3 … in racks named by a letter each ("-": none), and streams that are placed so."""
    state = Metadata(cluster_id="c")
    for number, rack in enumerate(racks, 1):
        state.apply(RegisterBroker(broker=BrokerRecord(id=number, url="", rack=rack.strip("-"), nonce="n")))
    for at, placement in enumerate(placements):
        settings = StreamSettings(subject="s", replicas=len(placement))
        name = f"s{at}"
        state.apply(CreateStream(name=name, id=name, settings=settings, created_us=0, placement=placement))
    return state


def test_place_puts_racks_apart_before_it_counts_replicas() -> None:
    loads = Loads(state_of("aabb", ((3,), (3,), (4,), (4,), (4,))))
    assert set(loads.place(2, (1, 2, 3, 4))) == {1, 3}


def test_place_with_fewer_racks_than_replicas_uses_the_least_loaded_of_a_rack() -> None:
    loads = Loads(state_of("aab", ((1,),)))
    assert set(loads.place(3, (1, 2, 3))) == {1, 2, 3}
    assert set(Loads(state_of("aab", ((1,),))).place(2, (1, 2, 3))) == {2, 3}


def test_brokers_without_a_rack_are_each_their_own() -> None:
    assert set(Loads(state_of("----", ((1,),))).place(3, (1, 2, 3, 4))) == {2, 3, 4}


def test_place_takes_the_fewest_replicas_then_the_fewest_leaders() -> None:
    loads = Loads(state_of("---", ((1, 2), (1, 3))))
    assert loads.place(2, (1, 2, 3)) == (2, 3)
    assert Loads(state_of("---", ((1, 2), (2, 3), (1, 3)))).place(1, (1, 2, 3)) == (3,)


def test_first_of_a_placement_is_the_one_with_the_fewest_leaders() -> None:
    loads = Loads(state_of("---", ((1,), (1,))))
    assert loads.place(3, (1, 2, 3))[0] == 2


def test_many_streams_placed_at_once_are_spread_evenly() -> None:
    loads = Loads(state_of("aabbcc"))
    placed = [loads.place(3, (1, 2, 3, 4, 5, 6)) for _ in range(60)]
    for number in range(1, 7):
        assert sum(number in one for one in placed) == 30
        assert sum(number == one[0] for one in placed) == 10
    assert all(len({(number + 1) // 2 for number in one}) == 3 for one in placed), "one in each rack"


def test_place_on_fewer_brokers_than_replicas_is_refused() -> None:
    with pytest.raises(NotEnoughBrokers, match="3 replicas") as refusal:
        Loads(state_of("--")).place(3, (1, 2))
    assert refusal.value.facts == {"brokers": 2, "replicas": 3}


def test_replace_keeps_the_place_in_the_order_and_racks_apart() -> None:
    state = state_of("abcab", ((1, 2, 3),))
    loads, record = Loads(state), state.streams["s0"]
    assert loads.replace(record, 2, (1, 3, 4, 5)) == (1, 5, 3), "rack b lost a replica and gets it back"
    with pytest.raises(NotEnoughBrokers, match="no other broker is available"):
        loads.replace(record, 2, (1, 3))


def test_resize_keeps_the_leader_and_who_is_in_sync() -> None:
    state = state_of("-----", ((1, 2, 3),))
    record = msgspec.structs.replace(state.stream("s0"), leader=3, isr=(2, 3))
    loads = Loads(state)
    assert loads.resize(record, 1, (1, 2, 3, 4, 5)) == (3,)
    assert loads.resize(record, 2, (1, 2, 3, 4, 5)) == (2, 3)
    assert loads.resize(record, 3, (1, 2, 3, 4, 5)) == (1, 2, 3)
    assert loads.resize(record, 5, (1, 2, 3, 4, 5)) == (1, 2, 3, 4, 5)
    with pytest.raises(NotEnoughBrokers):
        loads.resize(record, 4, (1, 2, 3))


def test_resize_that_is_taken_back_prefers_who_has_the_files() -> None:
    state = state_of("-----", ((1, 2, 3),))
    record = msgspec.structs.replace(state.stream("s0"), target=(1,))
    assert Loads(state).resize(record, 3, (1, 2, 3, 4, 5)) == (1, 2, 3)


def tagged(*tags: str) -> Metadata:
    """Brokers 1, 2, 3 … with these tags, and a stream on 1 and 2 that requires the tag x."""
    state = Metadata(cluster_id="c")
    for number, text in enumerate(tags, 1):
        state.apply(RegisterBroker(broker=BrokerRecord(id=number, url="", tags=tuple(text.split()), nonce="n")))
    settings = StreamSettings(subject="s", replicas=2, placement_tags=("x",))
    state.apply(CreateStream(name="s", id="s", settings=settings, created_us=0, placement=(1, 2)))
    return state


def test_replicas_are_placed_on_brokers_with_all_tags_of_the_stream() -> None:
    state = tagged("x y", "x", "y", "x y z", "")
    assert set(Loads(state).place(2, (1, 2, 3, 4, 5), ("x", "y"))) == {1, 4}
    assert set(Loads(state).place(5, (1, 2, 3, 4, 5))) == {1, 2, 3, 4, 5}
    with pytest.raises(NotEnoughBrokers, match="tags"):
        Loads(state).place(3, (1, 2, 3, 4, 5), ("x", "y"))


def test_moved_and_added_replicas_go_to_brokers_with_the_tags() -> None:
    state = tagged("x", "x", "", "x y")
    record = state.stream("s")
    assert Loads(state).replace(record, 2, (1, 2, 3, 4)) == (1, 4)
    assert Loads(state).resize(record, 3, (1, 2, 3, 4)) == (1, 2, 4)
    with pytest.raises(NotEnoughBrokers):
        Loads(state).resize(record, 4, (1, 2, 3, 4))
    with pytest.raises(NotEnoughBrokers):
        Loads(state).replace(record, 2, (1, 2, 3))


def test_replicas_leave_brokers_that_do_not_have_the_tags_any_more() -> None:
    state = tagged("x", "", "x", "x y")
    record = state.stream("s")
    assert Loads(state).resize(record, 2, (1, 2, 3, 4)) == (1, 3)
    assert Loads(state).resize(record, 1, (1, 2, 3, 4), ("y",)) == (4,)
