"""Places for who has proven nothing yet are few, and the oldest goes first."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.errors import ClusterMismatch
from natslog.node.peers import reception
from natslog.node.peers.handshake import Dialling
from natslog.node.peers.places import Places
from tests.unit.node.peers.nodes import two


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60))
def test_places_are_bounded_in_all_and_for_each_address_and_the_oldest_goes(calls: list[tuple[str, bool]]) -> None:
    places: Places[int] = Places(most=5, most_of_one=2)
    model: list[tuple[int, str]] = []
    for number, (address, takes) in enumerate(calls):
        if takes and model:
            name, _ = model.pop(0)
            assert places.take(str(name)) == name
        lost = places.put(str(number), address, number)
        model.append((number, address))
        expected = [name for name, other in model if other == address][:-2] or [name for name, _ in model][:-5]
        assert lost == (expected[0] if expected else None)
        model = [(name, other) for name, other in model if name != lost]
        assert len(places) == len(model) <= 5
        assert max(Counter(other for _, other in model).values()) <= 2


def test_answered_hello_expires(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(reception, "HANDSHAKE_S", 0.05)

    async def main() -> None:
        async with two(tmp_path) as (one, other):
            dialling = Dialling(one.keys, one.hello(other.config.url))
            link = dialling.met(*other.reception.introduced(dialling.body, dialling.proof, "a")).link
            await asyncio.sleep(0.1)
            with pytest.raises(ClusterMismatch, match="within"):
                other.reception.admitted(link)
            link = dialling.met(*other.reception.introduced(dialling.body, dialling.proof, "a")).link
            assert other.reception.admitted(link)[0].broker == 1

    asyncio.run(main())
