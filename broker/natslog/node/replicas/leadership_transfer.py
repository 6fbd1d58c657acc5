"""Leadership given away in order: this broker stops taking messages, lets the other catch up, and proposes it.

Where that fails in time, it goes on leading: nothing was given away before the metadata says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from natslog.cluster.commands import AppointLeaders, Appointment, DisableReplicas
from natslog.errors import NatslogError
from natslog.model import BrokerId, StreamId
from natslog.node.metadata.group import MetadataGroup
from natslog.node.replicas.stream import HostedStream
from natslog.wire.link import NatsLink

logger = logging.getLogger("natslog.node")

_HANDOVER_WITHIN_S = 3.0
_LEAVE_WITHIN_S = 1.5
_LOOK_AGAIN_S = 0.005


class HandingOver:
    """Args: `find`: a stream by its id; `spawn`: runs a task that the broker watches over."""

    def __init__(
        self,
        group: MetadataGroup,
        nats: NatsLink,
        *,
        find: Callable[[StreamId], HostedStream | None],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._group, self._nats, self._find, self._spawn = group, nats, find, spawn

    def hand_over(self, stream_id: StreamId, to: BrokerId) -> None:
        """Asked by the metadata leader, or by this broker's end."""
        stream = self._find(stream_id)
        if stream is not None and stream.leading is not None and not stream.is_handing_over:
            self._spawn(self.handed_over(stream, to), f"handing over {stream.record.name}")

    async def handed_over(self, stream: HostedStream, to: BrokerId) -> None:
        """Stops taking messages, lets `to` catch up, and proposes it; where that fails, it goes on leading."""
        leading = stream.leading
        if leading is None or to not in leading.record.isr:
            return
        stream.is_handing_over = True
        try:
            await stream.unsubscribe(self._nats)
            async with asyncio.timeout(_HANDOVER_WITHIN_S):
                while stream.leading is leading and not self._has_all(stream, to):  # noqa: ASYNC110 (`advanced` stays set)
                    await asyncio.sleep(_LOOK_AGAIN_S)
                if stream.leading is not leading:
                    return
                record = leading.record
                appointment = Appointment(stream_id=record.id, version=record.version, leader=to, isr=record.isr)
                await self._group.propose(AppointLeaders(appointments=(appointment,)))
        except (TimeoutError, NatslogError):
            logger.warning("stream %s: could not be handed over to broker %d; it stays", stream.record.name, to)
        finally:
            stream.is_handing_over = False

    @staticmethod
    def _has_all(stream: HostedStream, to: BrokerId) -> bool:
        return (
            stream.leading is not None
            and (stream.ingest is None or not stream.ingest.waits_for_commit)
            and stream.leading.is_caught_up(to)
        )

    async def leave(self, streams: list[HostedStream], incarnation: str) -> None:
        """Before the broker ends: out of the ISR of what others lead, where enough are left in it, so that nobody waits
        until it is missed.
        """
        following = [one for one in streams if one.wanted.leader not in (None, one.me) and one.me in one.wanted.isr]
        spared = [one.record.id for one in following if len(one.wanted.isr) > one.wanted.settings.min_isr]
        if spared:
            me = following[0].me
            leaving = DisableReplicas(broker=me, incarnation=incarnation, stream_ids=tuple(spared))
            try:
                async with asyncio.timeout(_LEAVE_WITHIN_S):
                    await self._group.propose(leaving)
            except (TimeoutError, NatslogError):
                logger.info("the others will notice that this broker is gone")

    async def all_of(self, streams: list[HostedStream]) -> None:
        """Before the broker ends: whatever another in-sync replica can lead."""
        works = []
        for stream in streams:
            leading = stream.leading
            if leading is None:
                continue
            others = [one for one in leading.record.isr if one != stream.me and one not in leading.record.unproven]
            if others:
                works.append(self.handed_over(stream, others[0]))
        await asyncio.gather(*works)
