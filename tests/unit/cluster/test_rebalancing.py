"""Moves that even out the loads of brokers: few, and within racks and placement tags."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from math import ceil, floor
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from natslog.cluster import rebalancing
from natslog.cluster.rebalancing import Move, Place, Placed, loads_of, rebalanced
from natslog.model import BrokerId


def places(count: int, racks: int = 0, tags: Mapping[int, set[str]] = MappingProxyType({})) -> list[Place]:
    return [
        Place(BrokerId(one), f"r{one % racks}" if racks else "", frozenset(tags.get(one, ())))
        for one in range(1, count + 1)
    ]


def stream(name: str, *replicas: int, size: int = 0, tags: tuple[str, ...] = ()) -> Placed:
    return Placed(name, tuple(map(BrokerId, replicas)), size, frozenset(tags))


def after(streams: list[Placed], moves: list[Move]) -> list[Placed]:
    targets = {move.name: move.after for move in moves}
    return [Placed(one.name, targets.get(one.name, one.replicas), one.size_bytes, one.tags) for one in streams]


def racks_of(brokers: tuple[BrokerId, ...], known: list[Place]) -> int:
    return len({place.rack for place in known if place.id in brokers})


def test_a_broker_that_joined_gets_its_share_and_nothing_else_moves() -> None:
    streams = [stream(f"s{at}", *[1 + (at + turn) % 3 for turn in range(3)], size=100) for at in range(12)]
    moves = rebalanced(places(4), streams)
    copies = [move for move in moves if move.copied_bytes]
    assert len(copies) == 9, "36 replicas on 4 brokers: 9 for the new one"
    assert all(set(move.after) - set(move.before) == {4} for move in copies)
    loads = loads_of(streams, moves)
    assert [load.replicas for load in loads.values()] == [9] * 4
    assert [load.leaders for load in loads.values()] == [3] * 4
    assert [load.size_bytes for load in loads.values()] == [900] * 4


def test_what_is_even_is_left_alone() -> None:
    streams = [stream(f"s{at}", *[1 + (at + turn) % 3 for turn in range(3)], size=at) for at in range(13)]
    assert rebalanced(places(3), streams) == []
    assert rebalanced(places(1), [stream("a", 1)]) == []
    assert rebalanced(places(3), []) == []
    assert rebalanced([], [stream("a", 1)]) == []


def test_of_streams_that_could_be_moved_those_that_even_out_bytes_are() -> None:
    sizes = [900, 500, 30, 20, 10, 5]
    streams = [stream(f"s{size}", 1, size=size) for size in sizes]
    loads = loads_of(streams, rebalanced(places(2), streams))
    assert [load.replicas for load in loads.values()] == [3, 3]
    assert abs(loads[BrokerId(1)].size_bytes - loads[BrokerId(2)].size_bytes) < 500


def test_a_large_replica_is_exchanged_for_a_small_one() -> None:
    streams = [stream("a", 1, size=500), stream("b", 1, size=500), stream("c", 2, size=1), stream("d", 2, size=1)]
    moves = rebalanced(places(2), streams)
    assert [(load.replicas, load.size_bytes) for load in loads_of(streams, moves).values()] == [(2, 501), (2, 501)]
    assert len(moves) == 2


def test_leaders_are_evened_out_without_copying_along_a_chain() -> None:
    streams = [stream("a", 1, 2), stream("b", 1, 2), stream("c", 2, 3), stream("d", 2, 3), stream("e", 1, 2)]
    streams += [stream("f", 3, 4)]
    moves = rebalanced(places(3), streams)
    assert {load.leaders for broker, load in loads_of(streams, moves).items() if broker < 4} == {2}
    assert not any(move.copied_bytes for move in moves if move.name != "f")


def test_racks_and_placement_tags_are_respected() -> None:
    known = places(4, racks=2, tags={3: {"ssd"}, 1: {"ssd"}})  # racks r1: 1, 3; r0: 2, 4
    streams = [stream(f"s{at}", 1, 2, tags=("ssd",) if at % 2 else ()) for at in range(8)]
    done = after(streams, rebalanced(known, streams))
    assert all(racks_of(one.replicas, known) == 2 for one in done)
    tags = {place.id: place.tags for place in known}
    moved = [(one, before) for one, before in zip(done, streams, strict=True) if one.replicas != before.replicas]
    assert moved
    assert all(one.tags <= tags[broker] for one, before in moved for broker in set(one.replicas) - set(before.replicas))


def test_replicas_on_brokers_that_are_drained_or_down_stay() -> None:
    streams = [stream("a", 9, 1), stream("b", 9, 1), stream("c", 9, 1), stream("d", 9, 1)]
    done = after(streams, rebalanced(places(2), streams))
    assert all(9 in one.replicas for one in done)
    assert Counter(broker for one in done for broker in one.replicas) == {9: 4, 1: 2, 2: 2}


@pytest.mark.long
@settings(deadline=None)
@given(some.randoms(use_true_random=False), some.integers(2, 7), some.integers(0, 40), some.integers(0, 3))
def test_loads_are_even_afterwards_and_a_second_plan_is_empty(
    drawn: random.Random, brokers: int, count: int, racks: int
) -> None:
    known = places(brokers, racks)
    streams = []
    for at in range(count):
        replicas = drawn.sample(range(1, brokers + 1), drawn.randint(1, min(3, brokers)))
        streams.append(stream(f"s{at}", *replicas, size=drawn.choice([0, 1, 10, 10_000, drawn.randrange(1 << 40)])))
    moves = rebalanced(known, streams)
    done = after(streams, moves)
    for one, before in zip(done, streams, strict=True):
        assert len(set(one.replicas)) == len(before.replicas)
        assert racks_of(one.replicas, known) >= racks_of(before.replicas, known) or not racks
    total = Counter(broker for one in done for broker in one.replicas)
    counts = [total[place.id] for place in known]
    if not racks:
        assert max(counts) - min(counts) <= 1
        # A pair of moves is made for bytes only: without these, only what is above the average moves.
        same = [Placed(one.name, one.replicas, 0) for one in streams]
        copies = sum(len(set(move.after) - set(move.before)) for move in rebalanced(known, same))
        had = Counter(broker for one in streams for broker in one.replicas)
        size = sum(had.values())
        ceilings = size % brokers
        shares = [ceil(size / brokers) if at < ceilings else floor(size / brokers) for at in range(brokers)]
        ordered = sorted((had[place.id] for place in known), reverse=True)
        assert copies == sum(max(0, one - share) for one, share in zip(ordered, shares, strict=True))
    assert rebalanced(known, done) == []


@pytest.mark.parametrize("brokers", [4, 9])
def test_the_work_grows_with_the_streams_and_not_with_their_square(
    brokers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a plan of 2,000 streams keeps a broker from other work."""
    looks, may_move = 0, rebalancing._Plan._may_move

    def counted(plan: rebalancing._Plan, *given: Any) -> bool:
        nonlocal looks
        looks += 1
        return may_move(plan, *given)

    monkeypatch.setattr(rebalancing._Plan, "_may_move", counted)
    drawn = random.Random(1)
    streams = [
        stream(f"s{at}", *[1 + (at + turn) % 3 for turn in range(3)], size=drawn.randrange(1 << 36))
        for at in range(2000)
    ]
    assert rebalanced(places(brokers, racks=3), streams)
    assert looks < 60 * len(streams)
