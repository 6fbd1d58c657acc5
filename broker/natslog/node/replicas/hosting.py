"""The replicas of this broker: created from the metadata, called with the time, closed, deleted.

Theory of operation. After commands were applied, every record that has changed is passed to the local replica
(`reconcile`), whose state machine decides the next steps (`cluster.replica`, executed by `step_executor`). Four times a
second every replica that is not quiet is called with the time (`cluster.calm`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from typing import Any

from natslog.cluster.calm import Calm
from natslog.cluster.commands import LeaveReplicas, StopBroker
from natslog.cluster.features import STOP_LEVEL
from natslog.cluster.metadata import Metadata
from natslog.cluster.tracks import Timeouts
from natslog.config import BrokerConfig
from natslog.errors import BrokerUnavailable, CorruptLog, NatslogError
from natslog.log import ReplicaLog, StoreLimit
from natslog.log.stored_ids import NO_IDS
from natslog.log_events import event
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, stream_of_companion
from natslog.node.clock import monotonic_ms
from natslog.node.cluster_clock import ClusterClock
from natslog.node.data_dir import OF_FILE_SYSTEM, DataDir, stream_id_of
from natslog.node.metadata.group import MetadataGroup
from natslog.node.peers.handshake import Hello
from natslog.node.peers.links import DialledLink
from natslog.node.peers.messages import FetchRequest, TransferLeadership
from natslog.node.peers.pieces import piece
from natslog.node.peers.questions import Reply
from natslog.node.replicas.fetch_sessions import FetchSession
from natslog.node.replicas.fetcher import Fetcher
from natslog.node.replicas.log_folder import storage_error
from natslog.node.replicas.proposals import Proposals
from natslog.node.replicas.replicated_log import ReplicatedLog
from natslog.node.replicas.services import ReplicaOwner, Services
from natslog.node.replicas.stream import HostedStream
from natslog.node.replicas.surroundings import BrokerSurroundings
from natslog.node.supervisor import Supervisor
from natslog.node.threads import in_thread
from natslog.node.writes.ingest_memory import IngestMemory
from natslog.wire.lanes import NatsLanes

logger = logging.getLogger("natslog.node")

_TICK_S = 0.25
_TELL_WITHIN_S = 1.5
_PREPARE_WITHIN_S = 7.0
_PREPARED_AT_ONCE = 16


class Hosting:
    """Args: `requests`: tasks on behalf of other brokers. `broker`: what the replicas call from `start` on."""

    def __init__(
        self,
        config: BrokerConfig,
        data_dir: DataDir,
        group: MetadataGroup,
        *,
        clock: ClusterClock,
        nats: NatsLanes,
        writers: Executor,
        readers: Executor,
        memory: IngestMemory,
        link_to: Callable[[BrokerId], DialledLink | None],
        ended: Callable[[], frozenset[BrokerId]],
        requests: Supervisor,
        broker: ReplicaOwner,
    ) -> None:
        self.me = BrokerId(config.broker_id)
        self.streams: dict[str, HostedStream] = {}
        self.sessions: dict[BrokerId, FetchSession] = {}
        self.fetchers: dict[BrokerId, Fetcher] = {}
        self._data_dir, self._group, self._nats = data_dir, group, nats
        self._writers, self._readers = writers, readers
        self._link_to, self.ended, self._requests, self._broker = link_to, ended, requests, broker
        self._by_id: dict[StreamId, HostedStream] = {}
        self._leaving: set[HostedStream] = set()
        self._deleting: set[StreamId] = set()
        self._tasks = Supervisor(broker.halt)
        self._seen: Metadata | None = None
        self._due: set[str] = set()  # streams to be compared with the metadata, although it has not changed
        self._calm = Calm()
        self._is_closing = False
        self._preparing = asyncio.Semaphore(_PREPARED_AT_ONCE)
        self.leaders_appointed = 0
        store = StoreLimit(config.max_store_bytes)
        self.around = BrokerSurroundings(config, data_dir, group, clock, store)
        self.services = Services(
            config=config,
            data_dir=data_dir,
            group=group,
            clock=clock,
            nats=nats,
            writers=writers,
            readers=readers,
            memory=memory,
            store=store,
            around=self.around,
            tasks=self._tasks,
            proposals=Proposals(self.me, group.submit),
            host=self,
            broker=broker,
        )

    # ---- queries ----

    def find(self, stream_id: StreamId) -> HostedStream | None:
        return self._by_id.get(stream_id)

    def require(self, name: str) -> HostedStream:
        """Raises BrokerUnavailable: there is no replica of this stream here, or not yet."""
        stream = self.streams.get(name)
        if stream is None:
            raise BrokerUnavailable(f"broker {self.me} does not have stream {name!r} yet: repeat the request")
        return stream

    def require_log(self, stream_id: str) -> tuple[HostedStream, ReplicaLog]:
        """Raises BrokerUnavailable: there is no log of this stream here."""
        stream = self.find(StreamId(stream_id))
        if stream is None or stream.log is None:
            raise BrokerUnavailable(f"broker {self.me} has no replica of the stream")
        return stream, stream.log

    def find_log(self, log_id: StreamId) -> ReplicatedLog | None:
        """As brokers name it to each other: a stream stands for its log of messages. None where it is not open."""
        if (stream := self._by_id.get(log_id)) is not None:
            return stream.messages
        stream_id = stream_of_companion(log_id)
        owner = None if stream_id is None else self._by_id.get(stream_id)
        return None if owner is None or owner.companion.log is None else owner.companion.log.replicated

    def start(self) -> None:
        self._tasks.start(self._tick(), "replicas")
        self.reconcile()

    # ---- from metadata to replicas ----

    def reconcile(self) -> None:
        """Passes what has changed in the metadata to the local replicas. Costs nothing while nothing has."""
        state = self._group.state
        if self._is_closing or not self.around.is_registered:
            return
        names = state.index.take_changed() | self._due
        if state is not self._seen:
            names |= self.streams.keys()
            self._seen = state
        self._due = set()
        for name in names:
            record, stream = state.streams.get(name), self.streams.get(name)
            if record is not None and self.me not in record.replicas:
                record = None
            if stream is not None and (record is None or record.id != stream.id):
                self._leave(stream)
            if record is not None:
                self._host(record)

    def _host(self, record: StreamRecord) -> None:
        stream = self._by_id.get(record.id)
        if stream is None:
            if record.id in self._deleting or self._is_leaving(record.id):
                return  # it is due again when that has ended
            stream = self._by_id[record.id] = self.streams[record.name] = HostedStream(record, self.me, self.services)
        elif stream.record is record:
            return
        stream.driver.changed(record)

    def _leave(self, stream: HostedStream) -> None:
        del self._by_id[stream.id], self.streams[stream.name]
        self._tasks.start(self._stop_hosting(stream), f"closing stream {stream.name}")

    def _is_leaving(self, stream_id: StreamId) -> bool:
        return any(stream.id == stream_id for stream in self._leaving)

    async def _stop_hosting(self, stream: HostedStream) -> None:
        """Deleted, or moved away; the files stay until their tombstone is due."""
        self._leaving.add(stream)
        stream.driver.changed(None)
        await stream.driver.finished()
        self._leaving.discard(stream)
        self._due.add(stream.name)  # it may have been moved back meanwhile
        self.reconcile()

    async def _tick(self) -> None:
        while not self._is_closing:
            await asyncio.sleep(_TICK_S)
            self.reconcile()
            now_ms = monotonic_ms()
            contact_ms = {broker: session.last_contact_s * 1000 for broker, session in self.sessions.items()}
            is_calm = self._calm.goes_on(self.around, now_ms, contact_ms)
            for stream in list(self.streams.values()):
                if not (is_calm and stream.driver.pass_time_if_quiet(now_ms, self._calm.away)):
                    stream.driver.tick(contact_ms)

    async def reconciled(self, stream: HostedStream) -> None:
        """Returns when the replica is as its record says, as far as it can be."""
        while not stream.driver.replica.is_reconciled:
            await stream.reconciled.wait()

    # ---- for the replicas: `services.ReplicaHost` ----

    def follow(self, leader: BrokerId, log: ReplicatedLog) -> None:
        if leader not in self.fetchers:
            self.fetchers[leader] = Fetcher(
                leader,
                link=lambda: self._link_to(leader),
                incarnation=self._data_dir.incarnation,
                executor=self._writers,
                pace=self.services.pace,
                on_bug=self._broker.halt,
            )
        self.fetchers[leader].follow(log)

    def forget(self, log: ReplicatedLog) -> None:
        for fetcher in self.fetchers.values():
            fetcher.forget(log)

    def appointed(self, record: StreamRecord) -> None:
        self.leaders_appointed += 1
        for broker in record.replicas:
            if (session := self.sessions.get(broker)) is not None:
                session.expect(record.id)

    async def prepare_successor(self, to: BrokerId, stream_id: StreamId) -> None:
        """Best effort: without it, publishers wait until the next leader has read the message ids."""
        try:
            async with self._preparing:
                if (link := self._link_to(to)) is not None:
                    await link.ask("prepare_to_lead", _PREPARE_WITHIN_S, stream_id=stream_id)
        except NatslogError as error:
            logger.debug("broker %d did not prepare to lead the stream %s: %s", to, stream_id, error)

    # ---- reports to the metadata leader ----

    def reaches_nats(self) -> bool:
        """Whether streams that are led here can take messages."""
        return self._nats.is_reachable and self.around.has_room

    def unresponsive_leaders(self, ended: Collection[BrokerId]) -> list[tuple[StreamId, Epoch]]:
        """Streams whose leader is one of these brokers, or has not responded for too long."""
        now_ms = monotonic_ms()
        silent_since_ms = now_ms - Timeouts().unresponsive_ms
        return [
            (stream.id, epoch)
            for fetcher in self.fetchers.values()
            if fetcher.last_contact_ms < silent_since_ms or fetcher.leader in ended
            for stream in fetcher.streams
            if (epoch := stream.unresponsive_leader(now_ms, fetcher.last_contact_ms, ended)) is not None
        ]

    def unproven_positions(self) -> list[tuple[StreamId, int, Epoch, int]]:
        """Where the logs end that this broker restarted with uncleanly: (stream, record version, last epoch, end)."""
        unproven = [stream for stream in self.streams.values() if self.me in stream.record.unproven]
        return [where for stream in unproven for where in stream.driver.replica.unproven_positions()]

    # ---- for other brokers ----

    def serve_fetch(self, peer: Hello, request: FetchRequest, reply: Reply) -> None:
        """A request of a follower; with a new session if it begins one, or has restarted."""
        session = self.sessions.get(peer.broker)
        if session is None or request.begins or session.incarnation != request.incarnation:
            if session is not None:
                session.close()
            session = self.sessions[peer.broker] = FetchSession(
                peer.broker, self.find_log, self._readers, self._requests.start
            )
        session.serve(request, reply)

    async def kept_ids(self, stream_id: str, at: int) -> dict[str, Any]:
        """Message ids that the log here keeps of removed rows (`StoredIds`), from byte `at` on. None if they are
        damaged: who leads reports that.

        Raises:
            BrokerUnavailable: there is no log of this stream here. StorageFailed: they cannot be read.
        """
        stream, log = self.require_log(stream_id)
        try:
            found = await in_thread(self._readers, log.ids.kept.read)
        except CorruptLog:
            found = NO_IDS
        except OSError as error:
            raise storage_error(error, f"stream {stream.name!r}: message ids cannot be read") from error
        return piece(found.to_bytes(), at)

    async def prepare_to_lead(self, stream_id: str) -> bool:
        """Returns when the replica here has read what it needs to lead the stream.

        Raises:
            BrokerUnavailable: there is no log of this stream here. CorruptLog, FileUnavailable: it cannot be read.
        """
        stream, log = self.require_log(stream_id)
        await stream.driver.steps.prepare_to_lead(log)
        return True

    # ---- the end ----

    def transfer_leaderships(self, frame: TransferLeadership) -> None:
        """As the metadata leader requested."""
        for stream_id, to in frame.streams:
            if (stream := self.find(stream_id)) is not None:
                self._tasks.start(
                    stream.driver.transfer_leadership(to), f"transferring the leadership of {stream.name}"
                )

    async def transfer_all_leadership(self) -> None:
        """Before the broker stops: announces that, transfers the metadata leadership and those of streams to other
        brokers, then leaves the in-sync replicas of streams that others lead, if enough remain.

        The metadata leadership goes first: what follows needs a metadata leader that remains.
        """
        if self._group.state.feature_level >= STOP_LEVEL:
            await self._announce_stop(StopBroker(broker=self.me, incarnation=self._data_dir.incarnation))
        stopping = [one.id for one in self._group.state.brokers.values() if one.is_stopping]
        await self._group.step_down(stopping)
        streams = list(self.streams.values())
        successors = [
            (stream, to) for stream in streams if (to := stream.driver.replica.successor(stopping)) is not None
        ]
        await asyncio.gather(*(stream.driver.transfer_leadership(to) for stream, to in successors))
        leaving = tuple(stream.id for stream in streams if stream.driver.leave())
        if leaving:
            await self._announce_stop(
                LeaveReplicas(broker=self.me, incarnation=self._data_dir.incarnation, stream_ids=leaving)
            )

    async def _announce_stop(self, command: StopBroker | LeaveReplicas) -> None:
        """Best effort: without a metadata leader the broker stops all the same."""
        try:
            async with asyncio.timeout(_TELL_WITHIN_S):
                await self._group.propose(command)
        except (TimeoutError, NatslogError) as error:
            logger.info(
                "the metadata leader did not confirm in time that this broker stops: %s (%s)",
                "leadership may be transferred to it"
                if isinstance(command, StopBroker)
                else "it is in sync until then",
                error or "no answer",
                extra=event("broker.stop_not_confirmed"),
            )

    async def close(self) -> list[BaseException]:
        """Stops accepting messages, appends and acknowledges received ones, closes the logs. Returns the errors."""
        self._is_closing = True
        closed = set[Fetcher]()
        while still := set(self.fetchers.values()) - closed:  # the metadata may name another leader meanwhile
            await asyncio.gather(*(fetcher.close() for fetcher in still))
            closed |= still
        # No more records are copied from here on.
        stopping = [stream.driver.stop() for stream in {*self._by_id.values(), *self._leaving}]
        outcomes = await asyncio.gather(*stopping, return_exceptions=True)
        await self._tasks.stop()
        return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]

    async def delete_files(self, stream_id: StreamId) -> None:
        """Removes the files of a stream that is not hosted. Raises OSError."""
        assert stream_id not in self._by_id, "a stream that is being served is not deleted"
        self._deleting.add(stream_id)  # moved back here meanwhile, it is opened when the old files are gone
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._readers, self._data_dir.remove_stream, stream_id)
        finally:
            self._deleting.discard(stream_id)
            if (record := self._group.state.index.by_id.get(stream_id)) is not None:
                self._due.add(record.name)
            self.reconcile()

    def folder_bytes(self, stream_id: StreamId) -> int:
        """The files of a stream that is not hosted; 0 where there are none. Blocks."""
        folder = self._data_dir.stream_folder(stream_id)
        try:
            return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        except OSError:  # they are being removed
            return 0

    def warn_of_strays(self, state: Metadata) -> None:
        known = {record.id for record in state.streams.values()} | {one.id for one in state.tombstones.values()}
        for folder in sorted(self._data_dir.streams.iterdir()):
            if folder.name != OF_FILE_SYSTEM and stream_id_of(folder) not in known:
                logger.warning(
                    "%s belongs to no known stream; it is not changed",
                    folder,
                    extra=event("stream.unknown_folder", path=folder),
                )
