"""Positions of streams: log start, high watermark, size. Only the leader of a stream states them, and only with a
session.

A broker without a session may have been replaced as a leader: its high watermark may be too low. See
`node.metadata.session`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence, Set
from typing import Any, TypeAlias

from natslog.errors import CorruptLog
from natslog.model import BrokerId, StreamRecord
from natslog.node.cluster_node import ClusterNode
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.stream import HostedStream

logger = logging.getLogger("natslog.node")

_ASK_WITHIN_S = 2.0

Position: TypeAlias = dict[str, int]


class Positions:
    """Also answers the request `leading` of other brokers."""

    def __init__(self, cluster: ClusterNode, hosting: Hosting) -> None:
        self._cluster, self._hosting = cluster, hosting

    def may_be_stated_by(self, stream: HostedStream) -> bool:
        """Whether this broker leads the stream, and it can be read."""
        return stream.record.import_state != "importing" and self.is_led_here(stream)

    def is_led_here(self, stream: HostedStream) -> bool:
        """Whether this broker leads the stream, according to metadata that is recent enough to be certain."""
        return _is_leading(stream) and self._cluster.has_session()

    def led_here(self) -> Iterator[tuple[str, HostedStream]]:
        """The streams whose positions may be stated here."""
        if self._cluster.has_session():
            for name, stream in self._hosting.streams.items():
                if stream.record.import_state != "importing" and _is_leading(stream):
                    yield name, stream

    def led(self, name: str) -> HostedStream | None:
        """A stream whose positions may be stated here, with its log open; None: there is no such stream."""
        stream = self._hosting.streams.get(name)
        is_led = stream is not None and stream.log is not None and self.may_be_stated_by(stream)
        return stream if is_led else None

    @staticmethod
    def of(stream: HostedStream) -> Position:
        """Raises why its log cannot be used."""
        log = stream.usable_log()
        compressed = log.compression.totals(log.chain)
        return {
            "log_start_offset": log.first_readable_offset,
            "high_watermark": log.high_watermark,
            "messages": log.reader.known_count(),
            "bytes": log.chain.size_bytes,
            "segments": len(log.chain.segments),
            "leader_epoch": stream.leader_epoch,
        } | ({} if compressed is None else dict(zip(("compressed", "uncompressed"), compressed, strict=True)))

    async def on_this_broker(self, name: str | None = None) -> dict[str, Position]:
        """Of the streams that this broker leads, or of that one."""
        streams = self._hosting.streams
        asked = streams.items() if name is None else [(name, streams[name])] if name in streams else []
        if name is not None and asked:
            await count_messages(streams[name])
        return {name: self.of(stream) for name, stream in asked if self.may_be_stated_by(stream)}

    async def of_one(self, record: StreamRecord) -> Position | None:
        """As the stream's leader states it now; None where it does not answer."""
        found = await self._cluster.requests.ask_if_up(record.leader, "leading", _ASK_WITHIN_S, name=record.name)
        return None if found is None else found.get(record.name)

    async def of_several(self, records: Sequence[StreamRecord]) -> dict[str, Position]:
        """Of these streams, as far as their leaders answer."""
        if len(records) == 1:
            position = await self.of_one(records[0])
            return {} if position is None else {records[0].name: position}
        leaders = {record.leader for record in records}
        return await self._of_leaders(leaders, [record.name for record in records])

    async def everywhere(self) -> dict[str, Position]:
        """Of every stream whose leader answers; the others are missing."""
        streams = self._cluster.state.streams
        return await self._of_leaders({record.leader for record in streams.values()}, list(streams))

    async def _of_leaders(self, leaders: Set[BrokerId | None], names: Sequence[str]) -> dict[str, Position]:
        """Of the streams with these names, if these brokers lead them."""
        streams = self._hosting.streams
        found = {
            name: self.of(stream)
            for name in names
            if (stream := streams.get(name)) is not None and self.may_be_stated_by(stream)
        }
        others: dict[BrokerId, dict[str, Any]] = {one: {} for one in leaders - {self._cluster.me} if one is not None}
        for answer in (await self._cluster.requests.ask_others("leading", _ASK_WITHIN_S, others)).values():
            _add_newer(found, answer)
        return found


def _is_leading(stream: HostedStream) -> bool:
    record = stream.record
    return record.leader == stream.me and record.leader_epoch == stream.leader_epoch and stream.is_leading


async def count_messages(stream: HostedStream) -> None:
    """Rules that hide messages are applied to all that are committed: in a thread, if there is much to do. If a part is
    damaged, to those before it.
    """
    log = stream.log
    if log is None or log.visibility.is_applied(log.high_watermark):
        return
    with contextlib.suppress(CorruptLog, OSError):  # it is being repaired; or a file cannot be opened now
        await asyncio.get_running_loop().run_in_executor(None, log.visibility.removed_below, log.high_watermark)


def _add_newer(found: dict[str, Position], answer: dict[str, Any]) -> None:
    """Of two that state a position of the same stream, the one with the higher leader epoch leads it."""
    for name, position in answer.items():
        if name not in found or position.get("leader_epoch", 0) > found[name].get("leader_epoch", 0):
            found[name] = position
