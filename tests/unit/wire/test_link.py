"""What a link has told nats-py, which subscribes again to it whenever it reconnects."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

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
