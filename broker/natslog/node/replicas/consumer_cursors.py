"""JetStream consumers, shown as cursors: their positions, as the leaders of their streams state them.

The name of such a cursor is `jetstream:` and the name of the consumer. No other cursor can have this name, because
names of cursors have no colon. It cannot be set or deleted, and nothing is stored for it: its position is that of the
consumer. How far that is, and what its numbers are, is decided where consumers are served
(`natslog.jetstream.consumers`); see `node.replicas.jetstream.Consumers`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from natslog.cluster.cursor_table import not_found
from natslog.cluster.cursors import CONSUMER_PREFIX, CursorRecord
from natslog.errors import NoLeader
from natslog.model import BrokerId, Offset, StreamRecord
from natslog.node.cluster_node import ClusterNode
from natslog.node.replicas.consumer_records import ConsumerNumbers, ConsumerPosition
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.positions import Positions
from natslog.node.replicas.stream import HostedStream

logger = logging.getLogger("natslog.node")

_ASK_WITHIN_S = 2.0
_NUMBERS_WITHIN_S = 1.0  # in addition to the time for counting
_AT_ONCE = 100  # streams and consumers, before others get the event loop
COUNT_WITHIN_S = 0.5
"""For how long a leader brings numbers of consumers up to date in one request. It reads messages to count those that
are left for a consumer with filters."""


class ConsumerCursor(NamedTuple):
    """`numbers`: None if the consumer is not served."""

    cursor: CursorRecord
    numbers: ConsumerNumbers | None = None


class ConsumerCursors:
    """Of one broker. Also answers the request `consumer_positions` of other brokers."""

    def __init__(self, cluster: ClusterNode, hosting: Hosting, positions: Positions) -> None:
        self._cluster, self._hosting, self._positions = cluster, hosting, positions

    async def on_this_broker(
        self, names: Sequence[str], consumer: str | None = None, count_within_s: float = 0.0
    ) -> dict[str, list[ConsumerPosition]]:
        """By stream, of those that are led here: all consumers or the one of this name, with their numbers, which are
        brought up to date for so long, for all streams together.
        """
        deadline_s, found = time.monotonic() + count_within_s, dict[str, list[ConsumerPosition]]()
        looked_at = 0
        for name in names:
            if looked_at >= _AT_ONCE:
                looked_at = 0
                await asyncio.sleep(0)
            looked_at += 1
            if (stream := self._led(name)) is not None:
                positions = await self._hosting.services.jetstream.consumers.numbers(stream, consumer, deadline_s)
                looked_at += len(positions)
                if self._led(name) is stream:
                    found[name] = positions
        return found

    def led_here(self) -> dict[str, list[ConsumerPosition]]:
        """Of all streams that are led here and have consumers."""
        names = [name for name, stream in self._hosting.streams.items() if len(stream.consumers)]
        led = ((name, stream) for name in names if (stream := self._led(name)) is not None)
        consumers = self._hosting.services.jetstream.consumers
        return {name: found for name, stream in led if (found := consumers.positions(stream))}

    def _led(self, name: str) -> HostedStream | None:
        stream = self._positions.led(name)
        return stream if stream is not None and stream.has_companion_records else None

    async def find(
        self,
        *,
        may_see: Callable[[StreamRecord], bool],
        may_count: Callable[[StreamRecord], bool],
        consumer: str | None = None,
        stream: str | None = None,
    ) -> list[ConsumerCursor]:
        """By stream and name; of a cursor's name, or of a stream, where these are given. Those of streams whose leader
        does not answer are missing.

        Args:
            may_see: whether those of a stream are shown at all. may_count: whether messages of it may be read to bring
                their numbers up to date. They are asked before any leader is.
        """
        if consumer is not None and not consumer.startswith(CONSUMER_PREFIX):
            return []
        known = self._cluster.state.streams
        asked = list(known.values()) if stream is None else [known[stream]] if stream in known else []
        records, counted = dict[str, StreamRecord](), set[str]()
        for at, record in enumerate(asked):
            if at % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            if record.has_companion and may_see(record):
                records[record.name] = record
                if may_count(record):
                    counted.add(record.name)
        name = None if consumer is None else consumer.removeprefix(CONSUMER_PREFIX)
        found, now = await self._everywhere(list(records.values()), name, counted), self._cluster.state.streams
        return [
            ConsumerCursor(cursor_of(now[name], one), one.numbers)
            for name in sorted(found)
            if name in now and now[name].id == records[name].id
            for one in found[name]
        ]

    async def one(self, consumer: str, record: StreamRecord, *, may_count: bool = False) -> ConsumerCursor:
        """Args: may_count: as of `find`. Raises CursorNotFound; NoLeader: repeat the call."""
        counted = {record.name} if may_count else set[str]()
        found = await self._everywhere([record], consumer.removeprefix(CONSUMER_PREFIX), counted)
        if record.name not in found:
            raise NoLeader(
                f"the leader of stream {record.name!r}, which states the positions of its JetStream consumers, does "
                "not answer: repeat the request in a moment",
                stream=record.name,
            )
        for position in found[record.name]:
            return ConsumerCursor(cursor_of(record, position), position.numbers)
        raise not_found(consumer, record.name)

    async def _everywhere(
        self, records: Sequence[StreamRecord], consumer: str | None, counted: Collection[str]
    ) -> dict[str, list[ConsumerPosition]]:
        """Args: counted: the streams of which messages may be read for the numbers."""
        by_leader: dict[tuple[BrokerId, float], list[str]] = {}
        for record in records:
            if record.leader is not None and record.has_companion:  # it has the records of consumers
                count_within_s = COUNT_WITHIN_S if record.name in counted else 0.0
                by_leader.setdefault((record.leader, count_within_s), []).append(record.name)
        found: dict[str, list[ConsumerPosition]] = {one.name: [] for one in records if not one.has_companion}
        asks = (self._ask(leader, names, consumer, within_s) for (leader, within_s), names in by_leader.items())
        for answer in await asyncio.gather(*asks):
            found |= answer
        return found

    async def _ask(
        self, leader: BrokerId, names: list[str], consumer: str | None, count_within_s: float
    ) -> Mapping[str, list[ConsumerPosition]]:
        """Asks again for the positions alone, so that the time that numbers need never costs them. A leader of a
        version before supports nothing else.
        """
        if leader == self._cluster.me:
            return await self.on_this_broker(names, consumer, count_within_s)
        found = None
        if consumer is not None or count_within_s:
            arguments = {"names": names, "consumer": consumer, "count_within_s": count_within_s}
            found = await self._answer(leader, count_within_s + _NUMBERS_WITHIN_S, arguments)
        if found is None and (found := await self._answer(leader, _ASK_WITHIN_S, {"names": names})) is not None:
            found = {
                name: [one for one in positions if consumer in (None, one.name)] for name, positions in found.items()
            }
        return found or {}

    async def _answer(
        self, leader: BrokerId, within_s: float, arguments: Mapping[str, Any]
    ) -> dict[str, list[ConsumerPosition]] | None:
        answer = await self._cluster.requests.ask_if_up(leader, "consumer_positions", within_s, **arguments)
        return None if answer is None else msgspec.convert(answer, dict[str, list[ConsumerPosition]])


def cursor_of(record: StreamRecord, position: ConsumerPosition) -> CursorRecord:
    return CursorRecord(
        consumer=CONSUMER_PREFIX + position.name,
        stream=record.name,
        stream_id=record.id,
        offset=Offset(position.offset),
        set_us=position.set_us,
    )
