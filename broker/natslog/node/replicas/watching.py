"""Waits until one of many streams has new messages, for readers that are at the end of all of them.

Theory of operation. A reader names the high watermark that it has seen of each stream. Each leader waits for its own
streams: a reader's broker waits for those led here, and sends the request `watch` to the other leaders. The wait ends
when one of them has news: another high watermark, another stream with the name, or another leader. The caller then
reads the positions; the wait itself states none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from natslog.errors import NatslogError
from natslog.model import BrokerId
from natslog.node.cluster_node import ClusterNode
from natslog.node.replicas.positions import Positions
from natslog.node.replicas.stream import HostedStream

logger = logging.getLogger("natslog.node")

_CHECK_EVERY_S = 0.5
"""How soon a stream that was created, deleted or got another leader is noticed; messages end the wait at once."""
_UNWATCHED_S = 0.1
_ANSWER_WITHIN_S = 2.0

Seen: TypeAlias = Mapping[str, Sequence[Any]]
"""By the name of a stream: its id and its high watermark."""


class Watching:
    """Also answers the request `watch` of other brokers."""

    def __init__(self, cluster: ClusterNode, positions: Positions) -> None:
        self._cluster, self._positions = cluster, positions

    async def on_this_broker(self, seen: Seen, wait_ms: int) -> None:
        """Returns when a stream led here differs from what was seen, or after the wait."""
        led = {name: stream for name in seen if (stream := self._positions.led(name)) is not None}
        news = asyncio.Event()
        for stream in led.values():
            stream.watchers.add(news)
        try:
            async with asyncio.timeout(wait_ms / 1000):
                while not any(self._differs(stream, seen[name]) for name, stream in led.items()):
                    news.clear()
                    await news.wait()
        except TimeoutError:
            return
        finally:
            for stream in led.values():
                stream.watchers.discard(news)

    def _differs(self, stream: HostedStream, seen: Sequence[Any]) -> bool:
        if self._positions.led(stream.name) is not stream or stream.log is None:
            return True
        return [stream.record.id, stream.log.high_watermark] != list(seen)

    async def everywhere(self, seen: Seen, wait_ms: int, selected: Callable[[], set[tuple[str, str]]]) -> None:
        """The same for streams with leaders on any broker; also returns when other streams are selected.

        Args:
            selected: name and id of each stream that the reader reads.
        """
        loop = asyncio.get_running_loop()
        until_s, known = loop.time() + wait_ms / 1000, {(name, one[0]) for name, one in seen.items()}
        if not seen or selected() != known:
            return
        tasks = [asyncio.ensure_future(one) for one in self._waits(seen, wait_ms)]
        applied = self._cluster.group.raft.applied
        try:
            while (left_s := until_s - loop.time()) > 0:
                done, _ = await asyncio.wait(
                    tasks, timeout=min(_CHECK_EVERY_S, left_s), return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    return
                if applied != (applied := self._cluster.group.raft.applied) and selected() != known:
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _waits(self, seen: Seen, wait_ms: int) -> list[Any]:
        """One for each leader."""
        by_leader: dict[BrokerId | None, dict[str, Sequence[Any]]] = {}
        for name, one in seen.items():
            by_leader.setdefault(self._cluster.state.streams[name].leader, {})[name] = one
        return [self._at(leader, theirs, wait_ms) for leader, theirs in by_leader.items()]

    async def _at(self, leader: BrokerId | None, seen: Seen, wait_ms: int) -> None:
        """Returns soon if the leader does not answer: the positions are then read again instead."""
        try:
            if leader is not None:
                within_s = wait_ms / 1000 + _ANSWER_WITHIN_S
                await self._cluster.requests.ask(leader, "watch", within_s, seen=seen, wait_ms=wait_ms)
                return
        except NatslogError as error:
            logger.debug("news of broker %d are unknown: %s", leader, error)
        await asyncio.sleep(_UNWATCHED_S)
