"""Cursors, from any broker: they are in the stream `__cursors`.

Theory of operation. A call goes to the leader of `__cursors`: to `CursorLeader` here, or over the link to another
broker. While there is no leader, it is repeated for some seconds, as a change of the metadata is; the id of the request
makes a repetition harmless. The stream is created with the first cursor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from natslog.cluster.commands import DropCursor, SetCursor
from natslog.cluster.cursor_table import STREAM, SUBJECT, Change, not_found
from natslog.cluster.cursors import CursorRecord, cursor_key
from natslog.cluster.metadata import Metadata
from natslog.consensus import Index
from natslog.errors import BrokerUnavailable, InvalidRequest, NatslogError, NoLeader, NotLeader, NotReady, ShuttingDown
from natslog.model import BrokerId, StreamSettings
from natslog.node.clock import wait_for_at_most
from natslog.node.cluster_node import ClusterNode
from natslog.node.internal.cursor_leader import CursorLeader
from natslog.node.internal.keeper import Keeper
from natslog.node.metadata.entries import Request
from natslog.node.peers.questions import Answerer

logger = logging.getLogger("natslog.node")

SETTINGS = StreamSettings(subject=SUBJECT, compression="zstd", dedupe_window_s=0.0, acks="never")
_WITHIN_S = 10.0
_ASK_WITHIN_S = 35.0
_EVERY_S = 1.0
_AGAIN_S = 0.05
_PASSING = (NoLeader, NotLeader, NotReady, BrokerUnavailable, ShuttingDown)
"""Errors while another leader is being chosen, or this one is not ready."""


class Cursors:
    """Of one broker. Attributes: `answerers`: of requests of other brokers."""

    def __init__(self, cluster: ClusterNode, leader: CursorLeader, keeper: Keeper) -> None:
        self._cluster, self._leader, self._keeper = cluster, leader, keeper
        self.answerers: dict[str, Answerer] = {
            "cursors": self._answer_find,
            "change_cursors": self._answer_change,
            "create_cursors": self._answer_create,
        }

    @property
    def _state(self) -> Metadata:
        return self._cluster.state

    # ---- calls: the metadata here is up to date ----

    async def find(
        self, *, consumer: str | None = None, stream: str | None = None, within_s: float = _WITHIN_S
    ) -> list[CursorRecord]:
        """The cursors, by name; of a consumer, or on a stream, where these are given.

        Raises:
            NoLeader, MetadataUnavailable, …: repeat the call.
        """
        if STREAM not in self._state.streams:
            return []
        found = await self._of_leader("cursors", within_s, consumer=consumer, stream=stream)
        return msgspec.convert(found, list[CursorRecord])

    async def one(self, consumer: str, stream: str) -> CursorRecord:
        """Raises StreamNotFound, CursorNotFound; as `find`."""
        self._state.stream(stream)
        found = await self.find(consumer=consumer, stream=stream)
        if not found:
            raise not_found(consumer, stream)
        return found[0]

    async def set(self, command: SetCursor, request: Request) -> CursorRecord:
        """Sets one cursor. Returns it as it is afterwards.

        Raises:
            StreamNotFound, StreamRecreated, TooManyCursors, StorageQuotaExceeded; as `find`.
        """
        (found,) = await self._change([command], request.id)
        if found is None:
            raise not_found(command.consumer, command.stream)
        return found

    async def set_many(self, commands: Sequence[SetCursor], request: Request) -> None:
        """Sets all of them or none. Raises as `set`; InvalidRequest: one is named twice."""
        if len({cursor_key(one.consumer, one.stream) for one in commands}) < len(commands):
            raise InvalidRequest("a cursor is named twice: name each consumer and stream once")
        if commands:
            await self._change(commands, request.id)

    async def drop(self, command: DropCursor, request: Request) -> None:
        """Raises StreamNotFound, CursorNotFound; as `find`."""
        await self._change([command], request.id)

    async def _change(self, changes: Sequence[Change], request: str) -> list[CursorRecord | None]:
        given = [msgspec.to_builtins(one) for one in changes]
        found = await self._of_leader("change_cursors", _WITHIN_S, changes=given, request=request)
        return msgspec.convert(found, list[CursorRecord | None])

    async def _of_leader(self, what: str, within_s: float, **arguments: Any) -> Any:
        """The answer of the leader of the stream. Raises its refusal, or why there is none in time."""
        give_up_at = time.monotonic() + within_s
        while True:
            try:
                return await self._ask_leader(what, arguments)
            except NatslogError as error:
                if not isinstance(error, _PASSING) or time.monotonic() > give_up_at:
                    raise
                logger.debug("%s is repeated: %s", what, error.message)
            await wait_for_at_most(_AGAIN_S, self._cluster.group.changed())

    async def _ask_leader(self, what: str, arguments: dict[str, Any]) -> Any:
        record = self._state.streams.get(STREAM)
        if record is None:
            await self._create()
        leader = None if record is None else record.leader
        arguments = arguments | {"as_of": self._cluster.group.raft.applied}
        if leader == self._cluster.me:
            return await self.answerers[what](**arguments)
        return await self._ask(leader, what, **arguments)

    async def _ask(self, broker: BrokerId | None, what: str, **arguments: Any) -> Any:
        link = None if broker is None else self._cluster.link_to(broker)
        if link is None:
            raise NoLeader(f"stream {STREAM!r} has no available leader: repeat the request in a moment", stream=STREAM)
        return await link.ask(what, _ASK_WITHIN_S, **arguments)

    async def _create(self) -> None:
        """By the metadata leader."""
        group = self._cluster.group
        if group.is_leader:
            await self._answer_create()
        elif group.leader is None:
            raise group.unavailable()
        else:
            await self._ask(group.leader, "create_cursors")

    # ---- answers to other brokers. `as_of`: what the other broker has applied of the metadata is applied here ----

    async def _answer_find(self, consumer: str | None, stream: str | None, as_of: int) -> Any:
        await self._cluster.group.applied(Index(as_of))
        return msgspec.to_builtins(await self._leader.find(consumer=consumer, stream=stream))

    async def _answer_change(self, changes: list[Any], request: str, as_of: int) -> Any:
        await self._cluster.group.applied(Index(as_of))
        commands = [msgspec.convert(one, SetCursor | DropCursor) for one in changes]
        return msgspec.to_builtins(await self._leader.change(commands, request))

    async def _answer_create(self) -> None:
        await self._keeper.create(STREAM, SETTINGS)

    # ---- life ----

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self._keeper.resize(STREAM)
                await self._leader.remove_stale()
            except NatslogError as error:
                logger.debug("the cursors are kept as they are: %s", error.message)
