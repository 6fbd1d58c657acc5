"""What a change of one stream costs does not grow with the number of streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

from natslog.model import BrokerId
from natslog.node.peers.requests import Requests
from natslog.node.replicas.positions import Positions
from tests.unit.node.replicas.replica_stage import ME, OTHER, record_of


class Streams(dict[str, Any]):
    """Looked up by name only."""

    def items(self) -> NoReturn:
        raise AssertionError("all streams are gone through")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all streams are gone through")


class Link:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def ask(self, what: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self.asked.append({"what": what} | arguments)
        return {"orders": {"high_watermark": 7}}


def test_position_of_one_stream_is_asked_of_its_leader_alone() -> None:
    link = Link()
    cluster: Any = SimpleNamespace(me=ME, has_session=lambda: True)
    hosting: Any = SimpleNamespace(streams=Streams())
    positions = Positions(cluster, hosting)
    broker: Any = SimpleNamespace(answerers={"leading": positions.on_this_broker})
    cluster.requests = Requests(ME, {OTHER: link}.get, broker)  # type: ignore[arg-type]
    assert asyncio.run(positions.of_one(record_of(leader=OTHER))) == {"high_watermark": 7}
    assert link.asked == [{"what": "leading", "name": "orders"}]
    assert asyncio.run(positions.of_one(record_of(leader=ME))) is None, "it is not led here yet"
    assert asyncio.run(positions.of_one(record_of(leader=BrokerId(3)))) is None
    assert asyncio.run(positions.of_one(record_of(leader=None))) is None
