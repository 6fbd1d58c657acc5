"""What a link has told nats-py, which subscribes again to it whenever it reconnects."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from natslog.wire.link import NatsLink


class Connection:
    """The parts of nats-py's client that a link calls. Each exchange notes what would be subscribed on reconnection."""

    def __init__(self) -> None:
        self.is_closed, self.is_connected = False, True
        self.subscribed: dict[int, str] = {}
        self.seen: list[set[str]] = []

    async def subscribe(self, subject: str, queue: str) -> Any:
        sid = max(self.subscribed, default=0) + len(self.seen) + 1
        self.subscribed[sid] = subject
        return SimpleNamespace(_id=sid)

    async def _send_unsubscribe(self, sid: int) -> None:
        self.seen.append(set(self.subscribed.values()))

    def _remove_sub(self, sid: int) -> None:
        self.subscribed.pop(sid, None)

    async def flush(self, timeout: float = 0) -> None:
        self.seen.append(set(self.subscribed.values()))


def test_a_removed_subject_is_not_subscribed_again_when_nats_reconnects(
    monkeypatch: Any,
) -> None:
    connection: Any = Connection()

    async def story() -> None:
        link = NatsLink("nats://127.0.0.1:1", name="test")
        monkeypatch.setattr(NatsLink, "is_reachable", True)
        monkeypatch.setattr(link, "flush", connection.flush)
        link._client = connection
        link._demux = SimpleNamespace(receivers={}, join=lambda sid, group: None)  # type: ignore[assignment]
        handle = await link.attach(("a", "b"), lambda frames: None)
        connection.seen.clear()
        await link.move(handle, ("b", "c"))
        assert connection.seen
        assert all("a" not in subjects for subjects in connection.seen)
        assert set(connection.subscribed.values()) == {"b", "c"}
        connection.seen.clear()
        await link.detach(handle)
        assert connection.seen
        assert not any(connection.seen)

    asyncio.run(story())


def test_cancellation_is_not_lost_when_the_server_answers_at_the_same_moment() -> None:
    """Before Python 3.12, `asyncio.wait_for`, which nats-py uses, returns the result instead: a task that ends by being
    cancelled would go on, and whoever waits for its end for ever.
    """

    async def main() -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        class Answered(Connection):
            async def _flush_pending(self, force_flush: bool) -> None:
                pass

            async def flush(self, timeout: float = 0) -> None:
                await asyncio.wait_for(answer, timeout)

        connection: Any = Answered()
        link = NatsLink("nats://127.0.0.1:1", name="test")
        link._client = connection
        task = asyncio.create_task(link.flush())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answer.set_result(None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        async def clean_up() -> str:
            """Of a task that was cancelled before."""
            try:
                await asyncio.Event().wait()
            finally:
                await link.flush()
                ended.append("cleaned up")
            return ""

        ended: list[str] = []
        cleaning = asyncio.create_task(clean_up())
        await asyncio.sleep(0)
        cleaning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cleaning
        assert ended

    asyncio.run(main())
