"""The broker's connections to NATS: several, so that a flood on one stream does not interrupt the connection of all
streams.

Theory of operation. A NATS server drops the connection of a client that takes its messages too slowly, with all
messages that it had not sent yet ("slow consumer" in the server's log; the client only detects that the connection is
closed). Messages that were published without acks are then lost. Each stream has its place on one of `LANES`
connections, by its id, so such a loss concerns the streams of one connection. All of them are counted: `lost`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from functools import partial

from natslog.wire.link import NatsCredentials, NatsLink

LANES = 4


def lane_of(stream_id: str) -> int:
    """Which of the connections the stream's messages come over."""
    return zlib.crc32(stream_id.encode()) % LANES


class NatsLanes:
    """Kept up until `close`.

    Args:
        url: one or more server URLs, comma-separated.
        name: shown in the server's connection list, with the number of the connection behind it.
        on_state: called with True when all connections are up, and with False when the first of them is lost.

    Attributes:
        lost: how many connections were lost so far. `shown_url`: the URLs without user and password.
    """

    def __init__(self, url: str, *, name: str, credentials: NatsCredentials, on_state: Callable[[bool], None]) -> None:
        self._links = [
            NatsLink(url, name=f"{name}-{lane}", credentials=credentials, on_state=partial(self._lane_state, lane))
            for lane in range(LANES)
        ]
        self._on_state = on_state
        self._down = set(range(LANES))
        self.lost = 0
        self.shown_url = self._links[0].shown_url

    def _lane_state(self, lane: int, up: bool) -> None:
        was_up = not self._down
        if up:
            self._down.discard(lane)
        else:
            self.lost += 1
            self._down.add(lane)
        if was_up != (is_up := not self._down):
            self._on_state(is_up)

    def lane(self, stream_id: str) -> NatsLink:
        """The connection that the stream's messages come over."""
        return self._links[lane_of(stream_id)]

    @property
    def up(self) -> int:
        """How many of the connections are up."""
        return sum(link.is_up for link in self._links)

    @property
    def is_up(self) -> bool:
        return all(link.is_up for link in self._links)

    @property
    def is_reachable(self) -> bool:
        """Whether the server answers on every connection."""
        return all(link.is_reachable for link in self._links)

    async def open(self) -> None:
        """Starts connecting; returns at once, whether or not a server is there.

        Raises:
            ConfigError: the credentials cannot be read.
        """
        for link in self._links:
            await link.open()

    async def close(self) -> None:
        """Sent data is flushed first if a server is connected."""
        await asyncio.gather(*(link.close() for link in self._links))
