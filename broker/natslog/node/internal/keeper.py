"""Creates the internal streams, and keeps them on as many brokers as they should be on: up to three.

The metadata leader does so. A stream is created when there is something to append to it. It gets another replica when
there is another broker, and loses one where a broker is drained and no other one can take its place.
"""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import suppress

import msgspec

from natslog.cluster.commands import CreateStream, ResizeReplicas
from natslog.cluster.metadata import Metadata
from natslog.cluster.placement import Loads
from natslog.errors import NatslogError, StreamConflict
from natslog.log_events import event
from natslog.model import BrokerId, StreamId, StreamRecord, StreamSettings, default_min_isr
from natslog.node.clock import now_us
from natslog.node.cluster_node import ClusterNode

logger = logging.getLogger("natslog.node")

_MOST_REPLICAS = 3
_BROKERS_WITHIN_S = 10.0


class Keeper:
    """Of one broker; it changes something only while this broker is the metadata leader."""

    def __init__(self, cluster: ClusterNode) -> None:
        self._cluster = cluster
        self._wanted_since_s: float | None = None

    @property
    def _state(self) -> Metadata:
        return self._cluster.state

    async def create(self, name: str, settings: StreamSettings) -> None:
        """Once all brokers of a new cluster are registered, or after a while. Raises NatslogError."""
        if not self._cluster.group.is_leader or name in self._state.streams or self._waits_for_brokers():
            return
        usable = self._cluster.usable()
        if not usable:
            return
        count = min(_MOST_REPLICAS, len(usable))
        command = CreateStream(
            name=name,
            id=StreamId(secrets.token_hex(16)),
            settings=_sized(settings, count),
            created_us=now_us(),
            placement=Loads(self._state).place(count, usable),
        )
        with suppress(StreamConflict):  # it was created meanwhile, with another number of replicas
            await self._cluster.group.propose(command)

    def _waits_for_brokers(self) -> bool:
        """Otherwise the stream of a new cluster would be on its first broker only, and be copied a moment later."""
        if self._wanted_since_s is None:
            self._wanted_since_s = time.monotonic()
        missing = len(self._cluster.group.raft.membership.members) > len(self._cluster.usable())
        return missing and time.monotonic() - self._wanted_since_s < _BROKERS_WITHIN_S

    async def resize(self, name: str) -> None:
        """The stream to as many replicas as there can be. Raises NatslogError."""
        record = self._state.streams.get(name)
        if record is None or not self._cluster.group.is_leader or (target := self._target(record)) is None:
            return
        logger.info(
            "stream %s: its replicas are to be on brokers %s",
            name,
            list(target),
            extra=event("stream.replicas_planned", stream=name),
        )
        command = ResizeReplicas(name=name, target=target, min_isr=default_min_isr(len(target)))
        await self._cluster.group.propose(command)

    def _target(self, record: StreamRecord) -> tuple[BrokerId, ...] | None:
        """Where the replicas should be; None: as they are."""
        brokers = self._state.brokers
        staying = [one for one in brokers if not brokers[one].is_draining]
        kept = [one for one in record.replicas if one in staying]
        count = min(_MOST_REPLICAS, len(staying))
        if record.target or not kept or count == len(record.replicas):
            return None
        if count < len(record.replicas):
            return tuple(kept[:count]) if len(kept) >= count else None
        usable = [*dict.fromkeys([*kept, *self._cluster.usable()])]
        if len(usable) < count:  # a broker that is not connected cannot be copied to
            return None
        try:
            return Loads(self._state).resize(record, count, usable)
        except NatslogError:
            return None


def _sized(settings: StreamSettings, replicas: int) -> StreamSettings:
    return msgspec.structs.replace(settings, replicas=replicas, min_isr=default_min_isr(replicas))
