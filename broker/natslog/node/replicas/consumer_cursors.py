"""JetStream consumers, shown as cursors: their positions, as the leaders of their streams state them.

The name of such a cursor is `jetstream:` and the name of the consumer. No other cursor can have this name, because
names of cursors have no colon. It cannot be set or deleted, and nothing is stored for it: its position is that of the
consumer. How far that is, is decided where consumers are served (`natslog.jetstream.consumers`), which sets
`Services.consumer_positions`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from natslog.cluster.cursor_table import not_found
from natslog.cluster.cursors import CONSUMER_PREFIX, CursorRecord
from natslog.errors import NatslogError, NoLeader
from natslog.model import BrokerId, Offset, StreamRecord
from natslog.node.cluster_node import ClusterNode
from natslog.node.replicas.consumer_records import ConsumerPosition
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.positions import Positions

logger = logging.getLogger("natslog.node")

_ASK_WITHIN_S = 2.0


class ConsumerCursors:
    """Of one broker. Also answers the request `consumer_positions` of other brokers."""

    def __init__(self, cluster: ClusterNode, hosting: Hosting, positions: Positions) -> None:
        self._cluster, self._hosting, self._positions = cluster, hosting, positions

    async def here(self, names: Sequence[str]) -> dict[str, list[ConsumerPosition]]:
        """By stream, of those that are led here and have consumers: an empty list for a stream without."""
        return {name: found for name in names if (found := self._led(name)) is not None}

    def led_here(self) -> dict[str, list[ConsumerPosition]]:
        """Of all streams that are led here and have consumers."""
        names = [name for name, stream in self._hosting.streams.items() if len(stream.consumers)]
        return {name: found for name in names if (found := self._led(name))}

    def _led(self, name: str) -> list[ConsumerPosition] | None:
        stream = self._hosting.streams.get(name)
        if stream is None or stream.log is None or not self._positions.may_be_stated_by(stream):
            return None
        if not stream.has_companion_records:
            return None
        return self._hosting.services.consumer_positions(stream) if len(stream.consumers) else []

    async def find(self, *, consumer: str | None = None, stream: str | None = None) -> list[CursorRecord]:
        """By stream and name; of a cursor's name, or of a stream, where these are given. Those of streams whose leader
        does not answer are missing.
        """
        if consumer is not None and not consumer.startswith(CONSUMER_PREFIX):
            return []
        known = self._cluster.state.streams
        records = list(known.values()) if stream is None else [known[stream]] if stream in known else []
        found = await self._everywhere(records)
        cursors = [cursor_of(known[name], one) for name in sorted(found) if name in known for one in found[name]]
        return [one for one in cursors if consumer in (None, one.consumer)]

    async def one(self, consumer: str, record: StreamRecord) -> CursorRecord:
        """Raises CursorNotFound; NoLeader: repeat the call."""
        found = await self._everywhere([record])
        if record.name not in found:
            raise NoLeader(
                f"the leader of stream {record.name!r}, which states the positions of its JetStream consumers, does "
                "not answer: repeat the request in a moment",
                stream=record.name,
            )
        for position in found[record.name]:
            if CONSUMER_PREFIX + position.name == consumer:
                return cursor_of(record, position)
        raise not_found(consumer, record.name)

    async def _everywhere(self, records: Sequence[StreamRecord]) -> dict[str, list[ConsumerPosition]]:
        by_leader: dict[BrokerId, list[str]] = {}
        for record in records:
            if record.leader is not None and record.has_companion:  # it has the records of consumers
                by_leader.setdefault(record.leader, []).append(record.name)
        found: dict[str, list[ConsumerPosition]] = {one.name: [] for one in records if not one.has_companion}
        found |= await self.here(by_leader.pop(self._cluster.me, []))
        for answer in await asyncio.gather(*(self._ask(leader, names) for leader, names in by_leader.items())):
            found |= answer
        return found

    async def _ask(self, leader: BrokerId, names: list[str]) -> Mapping[str, list[ConsumerPosition]]:
        link = self._cluster.link_to(leader)
        if link is None:
            return {}
        try:
            answer: Any = await link.ask("consumer_positions", _ASK_WITHIN_S, names=names)
        except NatslogError as error:
            logger.debug("the positions of consumers that broker %d serves are unknown: %s", leader, error.message)
            return {}
        return msgspec.convert(answer, dict[str, list[ConsumerPosition]])


def cursor_of(record: StreamRecord, position: ConsumerPosition) -> CursorRecord:
    return CursorRecord(
        consumer=CONSUMER_PREFIX + position.name,
        stream=record.name,
        stream_id=record.id,
        offset=Offset(position.offset),
        set_us=position.set_us,
    )
