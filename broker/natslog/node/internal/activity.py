"""Reports the events of the cluster to the stream `__activity`: see `cluster.activity`.

Theory of operation. Events that follow from the metadata are reported by the metadata leader, in the order of the
metadata log; a new one asks the stream for the number of the last event that is stored, and continues behind it. Events
of one broker (damage, disk space, requests) are reported by that broker, and sessions of brokers by the metadata
leader. All wait in bounded memory until the leader of the stream has stored them. Nothing waits for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from natslog.cluster.activity import STREAM, SUBJECT, Activity, Kind
from natslog.errors import NatslogError
from natslog.model import BrokerId, StreamSettings
from natslog.node.clock import now_us, wait_for_at_most
from natslog.node.cluster_node import ClusterNode
from natslog.node.internal.appending import Row, append_once
from natslog.node.internal.keeper import Keeper
from natslog.node.metadata.changes import Numbered
from natslog.node.replicas.direct_append import not_leading
from natslog.node.replicas.hosting import Hosting
from natslog.security.tokens import without_secrets
from natslog.times import format_timestamp_us

logger = logging.getLogger("natslog.node")

SETTINGS = StreamSettings(
    subject=SUBJECT,
    max_age_s=90 * 86_400.0,
    max_bytes=1024**3,
    compression="zstd",
    dedupe_window_s=0.0,
    acks="never",
)
_EVERY_S = 1.0
_GATHER_S = 0.05  # so that the events of many changes are appended together
_ASK_WITHIN_S = 10.0
_LAST_WITHIN_S = 0.3
_MOST_WAITING = 1000
_MOST_AT_ONCE = 500
_BYTES_AT_ONCE = 1024 * 1024
_METADATA = "metadata"
_PER_START = 1 << 32


class ActivityStream:
    """Of one broker.

    Args:
        directory: of the data folder of this broker. `life`: which start of a process on it this is. Events are
            numbered by both.
    """

    def __init__(
        self, cluster: ClusterNode, hosting: Hosting, keeper: Keeper, *, directory: str, life: Callable[[], int]
    ) -> None:
        self._cluster, self._hosting, self._keeper = cluster, hosting, keeper
        self._changes = cluster.group.changes
        self._producer = f"broker-{directory}"
        self._life, self._reported = life, 0
        self._waiting: deque[Numbered] = deque()
        self._dropped = 0
        self._wanted = self._changes.news
        self._stored: tuple[int, int] | None = None  # metadata term, and number of the last event that is stored
        self._stopped: dict[BrokerId, str] = {}  # incarnations that have no session
        self._has_room = True

    @property
    def dropped(self) -> int:
        """Events that this broker could not report, because too many were waiting."""
        return self._dropped + self._changes.dropped

    @property
    def waiting(self) -> int:
        """Events of this broker that wait to be stored."""
        return len(self._waiting)

    @property
    def _has_cluster(self) -> bool:
        return bool(self._cluster.state.cluster_id)

    # ---- events of this broker ----

    def report(self, kind: Kind, **fields: Any) -> None:
        """Adds an event of this broker. Returns at once; fields are those of `Activity`."""
        if not self._has_cluster:
            return
        self._reported += 1
        number = self._life() * _PER_START + self._reported
        event = Activity(
            id=fields.pop("id", f"{self._producer}.{number}"),
            event=kind,
            time=format_timestamp_us(now_us()),
            cluster=self._cluster.state.cluster_id,
            **fields,
        )
        self._waiting.append((number, event))
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._wanted.set()

    def report_replica(self, kind: Kind, stream: str, stream_id: str, message: str) -> None:
        """Of a replica on this broker."""
        self.report(kind, stream=stream, stream_id=stream_id, broker=self._cluster.me, message=message)

    def report_request(self, facts: dict[str, Any]) -> None:
        """A change that was requested of this broker, as the audit log has it."""
        names = ("method", "path", "query", "body", "status", "request_id")
        shown = {name: facts[name] for name in names if name in facts}
        what = {name: without_secrets(one) if isinstance(one, str) else one for name, one in shown.items()}
        identity = str(facts.get("identity") or "")
        self.report(
            "activity.operator.request",
            broker=self._cluster.me,
            identity=identity or None,
            address=str(facts.get("from") or "") or None,
            request=str(facts.get("change") or "") or None,
            after=what,
        )

    # ---- life ----

    async def deliver_last(self) -> None:
        """Sends the events that wait, if that takes no longer than a moment: after `run` was cancelled."""
        if self._has_cluster:
            with suppress(TimeoutError, NatslogError):
                async with asyncio.timeout(_LAST_WITHIN_S):
                    await self._deliver()

    async def run(self) -> None:
        while True:
            await wait_for_at_most(_EVERY_S, self._wanted.wait())
            await asyncio.sleep(_GATHER_S)
            self._wanted.clear()
            if not self._has_cluster:
                continue
            self._note_room()
            self._note_sessions()
            try:
                await self._keeper.resize(STREAM)  # first: what is missing may be a replica on a broker that is gone
                await self._deliver()
            except NatslogError as error:
                logger.debug("events wait: %s", error.message)
                await asyncio.sleep(_EVERY_S)

    # ---- what is noticed here ----

    def _note_room(self) -> None:
        has_room = self._hosting.around.has_room
        if has_room == self._has_room:
            return
        self._has_room = has_room
        free_bytes = self._cluster.group.disk.free_bytes
        self.report(
            "activity.broker.disk_writable" if has_room else "activity.broker.disk_low",
            broker=self._cluster.me,
            after={"free_bytes": free_bytes},
        )

    def _note_sessions(self) -> None:
        """Of the metadata leader: brokers that have lost their session, or have it again without a restart."""
        alive, brokers = self._cluster.leading.sessions(), self._cluster.state.brokers
        if alive is None:
            self._stopped.clear()
            return
        for broker, record in brokers.items():
            life = record.incarnation
            if broker in alive:
                if self._stopped.pop(broker, None) == life:
                    self.report("activity.broker.returned", broker=broker, after={"incarnation": life})
            elif self._stopped.get(broker) != life:
                self._stopped[broker] = life
                self.report(
                    "activity.broker.stopped", id=f"stopped-{life}", broker=broker, before={"incarnation": life}
                )

    # ---- delivery ----

    async def _deliver(self) -> None:
        if STREAM not in self._cluster.state.streams:
            await self._keeper.create(STREAM, SETTINGS)
        if STREAM in self._cluster.state.streams:
            await self._deliver_changes()
            while self._waiting:
                last = await self._send(self._producer, list(self._waiting))
                while self._waiting and self._waiting[0][0] <= last:
                    self._waiting.popleft()

    async def _deliver_changes(self) -> None:
        """Of the metadata leader."""
        group, changes = self._cluster.group, self._changes
        changes.is_reporting = group.is_leader
        if not group.is_leader:
            return
        term = group.raft.term
        if self._stored is None or self._stored[0] != term:
            self._stored = term, await self._send(_METADATA, [])
        while events := changes.after(self._stored[1]):
            if not group.is_leader:
                return
            self._stored = term, await self._send(_METADATA, events)
            changes.forget(self._stored[1])

    async def _send(self, producer: str, events: Sequence[Numbered]) -> int:
        """The first events, to the leader of the stream. Returns the number of the last one that is stored.

        Raises:
            NatslogError: they are sent again.
        """
        rows = _rows_of(events)
        leader = self._cluster.state.stream(STREAM).leader
        if leader is None:
            raise NatslogError(f"the leader of stream {STREAM} is unavailable")
        requests = self._cluster.requests
        return int(await requests.ask(leader, "activity", _ASK_WITHIN_S, producer=producer, rows=rows))

    async def on_this_broker(self, producer: str, rows: Sequence[Sequence[Any]]) -> int:
        """Appends events to the stream, which is led here. Returns the number of the last one that is stored.

        Raises:
            NoLeader: it is not led here. NatslogError: the call is to be repeated.
        """
        stream = self._hosting.streams.get(STREAM)
        if stream is None:
            raise NatslogError(f"stream {STREAM} is not on this broker")
        if not stream.is_leading:
            raise not_leading(stream)
        return await append_once(stream, producer, msgspec.convert(rows, list[Row]))


def _rows_of(events: Sequence[Numbered]) -> list[Row]:
    """The first events, as far as they fit into one request; at least one of them."""
    rows: list[Row] = []
    size_bytes = 0
    for number, event in events[:_MOST_AT_ONCE]:
        value = msgspec.json.encode(event).decode()
        size_bytes += len(value)
        if rows and size_bytes > _BYTES_AT_ONCE:
            break
        rows.append(Row(number, event.event, event.key, value))
    return rows
