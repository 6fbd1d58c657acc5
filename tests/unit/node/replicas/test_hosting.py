"""Closing the replicas of a broker."""

from __future__ import annotations

import asyncio

from natslog.model import BrokerId
from natslog.node.replicas.hosting import Hosting
from natslog.node.supervisor import Supervisor


class _Fetcher:
    """Args: `meanwhile`: called while it is being closed."""

    def __init__(self, hosting: Hosting, *meanwhile: BrokerId) -> None:
        self.is_closed = False
        self._hosting, self._meanwhile = hosting, meanwhile

    async def close(self) -> None:
        await asyncio.sleep(0)
        for leader in self._meanwhile:
            self._hosting.fetchers[leader] = _Fetcher(self._hosting)  # type: ignore[assignment]
        self.is_closed = True


def test_fetchers_that_are_made_while_others_are_closed_are_closed_too() -> None:
    """The metadata goes on while a broker stops: another broker may become the leader of a stream."""
    hosting = Hosting.__new__(Hosting)
    hosting._by_id, hosting._leaving = {}, set()
    hosting._tasks = Supervisor(lambda what, error: None)
    hosting.fetchers = {}
    hosting.fetchers[BrokerId(1)] = _Fetcher(hosting, BrokerId(3))  # type: ignore[assignment]
    hosting.fetchers[BrokerId(2)] = _Fetcher(hosting)  # type: ignore[assignment]
    assert asyncio.run(hosting.close()) == []
    assert sorted(hosting.fetchers) == [1, 2, 3]
    assert all(fetcher.is_closed for fetcher in hosting.fetchers.values())  # type: ignore[attr-defined]
