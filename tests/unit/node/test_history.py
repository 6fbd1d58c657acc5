"""The history of all brokers is requested once for each sample, however many pages show it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from natslog.node import history
from natslog.node.history import History


class _Counting(History):
    """Without a broker."""

    def __init__(self) -> None:
        self.asked = 0
        self._gathered, self._gathered_s = None, 0.0

    def of_broker(self) -> dict[str, list[float]]:
        return {}

    async def _of_each(self, what: str, own: Any) -> dict[Any, Any]:
        self.asked += 1
        await asyncio.sleep(0.01)
        return {1: {"at": [float(self.asked)]}}


def test_pages_share_what_was_gathered_until_the_next_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        shared = _Counting()
        first = asyncio.create_task(shared.everywhere())
        await asyncio.sleep(0)
        first.cancel()  # its page was closed: the others get the result all the same
        found = await asyncio.gather(*(shared.everywhere() for _ in range(5)))
        assert found == [{1: {"at": [1.0]}}] * 5
        assert shared.asked == 1
        monkeypatch.setattr(history, "EVERY_S", 0.0)
        assert await shared.everywhere() == {1: {"at": [2.0]}}

    asyncio.run(story())
