"""The subscription of a stream's leader to direct requests of the JetStream API.

It is made and ended together with the one to the stream's subjects, and on the same connection: so a request comes
after all messages that the same publisher has sent before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from natslog.wire.frames import Frames
from natslog.wire.link import NatsLink


class DirectRequests:
    """Of one stream. In the event loop."""

    def __init__(self, nats: NatsLink) -> None:
        self._nats = nats
        self._lock = asyncio.Lock()
        self._attachment: object | None = None
        self._subjects: tuple[str, ...] = ()

    async def serve(self, subjects: tuple[str, ...], receiver: Callable[[Frames], None]) -> None:
        """Subscribes to these subjects and no others. Raises NatsUnavailable: nats-py refuses the subscription."""
        async with self._lock:
            if subjects == self._subjects:
                return
            self._subjects = ()
            if self._attachment is not None:
                attachment, self._attachment = self._attachment, None
                await self._nats.detach(attachment)
            if subjects:
                self._attachment = await self._nats.attach(subjects, receiver)
            self._subjects = subjects
