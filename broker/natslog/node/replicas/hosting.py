"""The replicas that this broker keeps: opened, given the roles that the metadata says, repaired, closed.

Theory of operation. Whenever commands were applied, every record is compared with the replica here; where they differ,
a task of that stream's own settles it, under the stream's `writing` lock: the old role ends, the new one begins. Twice
in a row or ten times, the last word of the metadata is what it ends with.

Invariants. Roles are taken only in a life that the metadata knows. A leader has its epoch on stable storage and is
subscribed to NATS before it counts as ready. A replica with damage neither leads nor follows until the metadata has
taken it out of the in-sync replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from natslog.cluster.commands import ChangeIsrs, DisableReplicas, IsrChange
from natslog.cluster.metadata import Metadata
from natslog.cluster.replica import FollowerReplica, LeaderReplica
from natslog.config import BrokerConfig
from natslog.errors import NatslogError, StorageFailed, StreamNotFound
from natslog.log import LogOptions
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord
from natslog.node.clock import monotonic_ms
from natslog.node.data_dir import DataDir
from natslog.node.metadata.group import MetadataGroup
from natslog.node.peers.links import DialledLink
from natslog.node.replicas.fetch_sessions import FetchSession
from natslog.node.replicas.fetcher import Fetcher
from natslog.node.replicas.leadership_transfer import HandingOver
from natslog.node.replicas.log_opening import open_log
from natslog.node.replicas.repair import may_be_mended, mend, set_aside
from natslog.node.replicas.stream import HostedStream
from natslog.node.writes.dedupe_rebuild import rebuilt_dedupe
from natslog.node.writes.ingest_memory import IngestMemory
from natslog.node.writes.stream_ingest import StreamIngest
from natslog.wire.link import NatsLink

logger = logging.getLogger("natslog.node")

_WATCH_S = 0.25
_MEND_AGAIN_MS = 3000.0
_SUBSCRIBE_WITHIN_S = 2.0


class Hosting:
    """Args: everything a replica needs of its broker; `on_bug` is told what must stop it."""

    def __init__(
        self,
        config: BrokerConfig,
        data_dir: DataDir,
        group: MetadataGroup,
        *,
        nats: NatsLink,
        writers: Executor,
        readers: Executor,
        memory: IngestMemory,
        link_to: Callable[[BrokerId], DialledLink | None],
        on_bug: Callable[[str, BaseException], None],
    ) -> None:
        self.me = BrokerId(config.broker_id)
        self.streams: dict[str, HostedStream] = {}
        self.sessions: dict[BrokerId, FetchSession] = {}
        self.fetchers: dict[BrokerId, Fetcher] = {}
        self.leaders_appointed = 0
        self._config, self._data_dir, self._group, self._nats = config, data_dir, group, nats
        self._writers, self._readers, self._memory = writers, readers, memory
        self._link_to, self._on_bug = link_to, on_bug
        self._by_id: dict[StreamId, HostedStream] = {}
        self._settling: dict[StreamId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._burying: set[StreamId] = set()
        self._seen_version = -1
        self._is_closing = False
        self.handing_over = HandingOver(group, nats, find=self.find, spawn=self._spawn)

    # ---- what there is ----

    def find(self, stream_id: StreamId) -> HostedStream | None:
        return self._by_id.get(stream_id)

    def hosted(self, name: str) -> HostedStream:
        """Raises StreamNotFound."""
        if name not in self.streams:
            raise StreamNotFound(f"there is no stream {name!r} on this broker", stream=name)
        return self.streams[name]

    @property
    def is_registered(self) -> bool:
        known = self._group.state.brokers.get(self.me)
        return known is not None and known.incarnation == self._data_dir.incarnation

    def start(self) -> None:
        self._spawn(self._watch(), "roles")
        self.look()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(task.get_name(), error)

    # ---- from metadata to roles ----

    def look(self) -> None:
        """Compares what the metadata says with what is here. Costs nothing while nothing changed."""
        state = self._group.state
        if self._is_closing or not self.is_registered or state.version == self._seen_version:
            return
        self._seen_version = state.version
        mine = {record.id: record for record in state.streams.values() if self.me in record.replicas}
        mine = {stream_id: record for stream_id, record in mine.items() if stream_id not in self._burying}
        for stream_id, record in mine.items():
            stream = self._by_id.get(stream_id)
            if stream is None:
                stream = self._by_id[stream_id] = self.streams[record.name] = HostedStream(record, self.me)
                self._settle_soon(stream)
            elif stream.wanted is not record and stream.wanted != record:
                stream.wanted = record
                self._settle_soon(stream)
        for stream_id in set(self._by_id) - set(mine):
            stream = self._by_id.pop(stream_id)
            if self.streams.get(stream.record.name) is stream:
                del self.streams[stream.record.name]
            self._spawn(self._let_go(stream), f"closing stream {stream.record.name}")

    def _settle_soon(self, stream: HostedStream) -> None:
        """One task for each stream; a role that has not changed is brought up to date at once."""
        running = self._settling.get(stream.record.id)
        if running is not None and not running.done():
            return
        if stream.log is not None and self._same_role(stream) and self._same_settings(stream):
            self._bring_up_to_date(stream, stream.wanted)
            return
        stream_id = stream.record.id
        self._settling[stream_id] = self._spawn(self._settle(stream), f"roles of stream {stream.record.name}")

    async def settled(self, stream: HostedStream) -> None:
        """Returns when the replica is as its record says, as far as it can be."""
        running = self._settling.get(stream.record.id)
        if running is not None and not running.done():
            await asyncio.wait([running])

    @staticmethod
    def _same_role(stream: HostedStream) -> bool:
        record, wanted = stream.record, stream.wanted
        same = (record.leader, record.leader_epoch) == (wanted.leader, wanted.leader_epoch)
        return same and (stream.leading is not None or stream.following is not None or wanted.leader is None)

    @staticmethod
    def _same_settings(stream: HostedStream) -> bool:
        return (stream.record.settings, stream.record.paused) == (stream.wanted.settings, stream.wanted.paused)

    async def _settle(self, stream: HostedStream) -> None:
        while True:
            wanted = stream.wanted
            async with stream.writing:
                if stream.log is None:
                    await self._open(stream)
                if stream.log is not None:
                    await self._take_role(stream, wanted)
            stream.settled.set()
            stream.settled = asyncio.Event()
            if stream.wanted is wanted or self._is_closing:
                return

    async def _take_role(self, stream: HostedStream, wanted: StreamRecord) -> None:
        await self._adopt_settings(stream, wanted)
        if self._same_role(stream) and stream.record.leader_epoch == wanted.leader_epoch and stream.has_role_of(wanted):
            self._bring_up_to_date(stream, wanted)
            return
        await self._end_role(stream)
        stream.record = wanted
        if stream.damage is not None or stream.usable_log().chain.damages:
            await mend(stream, self._writers)
        if stream.damage is not None or wanted.leader is None or self._is_closing:
            return
        if wanted.leader == self.me:
            await self._lead(stream, wanted)
        elif self.me in wanted.replicas:
            log = stream.usable_log()
            stream.following = FollowerReplica(self.me, wanted, log.high_watermark, monotonic_ms())
            self._fetcher(wanted.leader).follow(stream)

    def _bring_up_to_date(self, stream: HostedStream, wanted: StreamRecord) -> None:
        stream.updated(wanted)
        if stream.following is not None and wanted.leader is not None and self.me not in wanted.isr:
            self._fetcher(wanted.leader).follow(stream)  # asks once more, knowing that it is out

    async def _adopt_settings(self, stream: HostedStream, wanted: StreamRecord) -> None:
        was, settings = stream.record.settings, wanted.settings
        stream.usable_log().settings = settings
        if stream.ingest is not None:
            stream.ingest.paused = wanted.paused
            if settings.dedupe_window_s != was.dedupe_window_s:
                stream.ingest.change_window(settings.dedupe_window_s)
            if settings.subject != was.subject and stream.subscription is not None:
                await self._nats.move(stream.subscription, settings.subject, queue=settings.group or "")

    async def _end_role(self, stream: HostedStream) -> None:
        if stream.following is not None:
            for fetcher in self.fetchers.values():
                fetcher.forget(stream)
            stream.following = None
        if stream.leading is not None:
            logger.info("stream %s: leads no more", stream.record.name)
            stream.leading, stream.is_ready, stream.is_handing_over = None, False, False
            for session in stream.sessions:
                session.mark(stream.record.id, has_records=True)  # tells them that this one leads no more
            await stream.unsubscribe(self._nats)
            assert stream.ingest is not None, "who leads has an ingest"
            ingest, stream.ingest = stream.ingest, None
            await ingest.abandon()
            stream.advanced.set()
            stream.advanced = asyncio.Event()

    async def _lead(self, stream: HostedStream, record: StreamRecord) -> None:
        loop, log = asyncio.get_running_loop(), stream.usable_log()
        try:
            await loop.run_in_executor(self._writers, log.begin_epoch, record.leader_epoch)
        except (OSError, NatslogError) as error:
            stream.problem = StorageFailed(f"stream {record.name!r}: its epoch could not begin: {error}")
            stream.note_damage(stream.problem)
            return
        ingest = StreamIngest(
            record.name,
            log,
            sender=self._nats,
            executor=self._writers,
            memory=self._memory,
            paused=record.paused,
            stats=stream.stats,
            appended=stream.appended,
            refusal=stream.refusal,
        )
        window_s = record.settings.dedupe_window_s
        ingest.dedupe, damage = await loop.run_in_executor(self._writers, rebuilt_dedupe, window_s, log)
        if damage is not None:
            logger.error("stream %s: some message ids cannot be read: %s", record.name, damage.message)
            if record.settings.replicas > 1:  # a replica that has them all is to lead
                stream.note_damage(damage)
                return
        stream.ingest = ingest
        ingest.start(self._on_bug)
        stream.leading = LeaderReplica(
            self.me,
            record,
            log_end_offset=log.settled_end_offset,
            high_watermark=log.high_watermark,
            now_ms=monotonic_ms(),
        )
        stream.appended(log.settled_end_offset)
        self.leaders_appointed += 1
        await self._subscribe(stream)
        stream.is_ready = True
        stream.advanced.set()
        stream.advanced = asyncio.Event()
        log_of = logger.info if record.leader_epoch > 1 else logger.debug
        log_of("stream %s: leads epoch %d from %d", record.name, record.leader_epoch, log.log_end_offset)

    async def _subscribe(self, stream: HostedStream) -> None:
        """Returns when the server has the subscription, or NATS is not there (then it gets it when it is back)."""
        if not self._group.has_session():
            return
        await stream.subscribe(self._nats)
        if self._nats.is_up:
            try:
                await self._nats.flush(_SUBSCRIBE_WITHIN_S)
            except NatslogError as error:
                logger.warning(
                    "stream %s: NATS did not confirm the subscription: %s", stream.record.name, error.message
                )

    def _fetcher(self, leader: BrokerId) -> Fetcher:
        if leader not in self.fetchers:
            self.fetchers[leader] = Fetcher(
                leader,
                link=lambda: self._link_to(leader),
                incarnation=self._data_dir.incarnation,
                executor=self._writers,
            )
        return self.fetchers[leader]

    # ---- logs ----

    async def _open(self, stream: HostedStream) -> None:
        config, folder = self._config, self._data_dir.stream_folder(stream.wanted.id)
        in_order = bool(self._data_dir.after)
        options = LogOptions(config.segment_bytes, config.segment_age_s, config.min_free_bytes, in_order)
        await open_log(stream, folder, options, self._writers)

    async def _let_go(self, stream: HostedStream) -> None:
        """Deleted, or moved away; the files stay until their tombstone is due."""
        async with stream.writing:
            await self._end_role(stream)
            if stream.log is not None:
                await asyncio.get_running_loop().run_in_executor(self._writers, stream.log.close)
                stream.log = None

    # ---- watching ----

    async def _watch(self) -> None:
        while not self._is_closing:
            await asyncio.sleep(_WATCH_S)
            self.look()
            changes: list[IsrChange] = []
            heard_ms = {broker: session.heard_s * 1000 for broker, session in self.sessions.items()}
            for stream in list(self.streams.values()):
                if stream.leading is not None and len(stream.record.replicas) > 1:
                    change = stream.leading.isr_change(monotonic_ms(), heard_ms)
                    if change is not None:
                        changes.append(change)
                await self._watch_one(stream)
            if changes:
                self._group.submit(ChangeIsrs(broker=self.me, changes=tuple(changes)))
            self._report_damage()

    async def _watch_one(self, stream: HostedStream) -> None:
        """A leader that hears no metadata leader stops taking messages, without a word: another may lead by now."""
        if stream.leading is not None and stream.is_ready and not stream.is_handing_over:
            if not self._group.has_session():
                if stream.subscription is not None:
                    logger.warning("stream %s: no metadata leader is heard; it takes no messages", stream.record.name)
                    await stream.unsubscribe(self._nats)
            elif stream.subscription is None and not stream.writing.locked():
                async with stream.writing:
                    if stream.leading is not None:
                        await self._subscribe(stream)
        if stream.log is None and stream.damage is None and isinstance(stream.problem, StorageFailed):
            self._settle_soon(stream)  # it may open now: there is room again, say

    def _report_damage(self) -> None:
        for stream in self._by_id.values():
            failure = stream.log.failure if stream.log is not None else None
            if isinstance(failure, StorageFailed) and len(stream.wanted.replicas) > 1:
                stream.note_damage(failure)  # another replica, with a disk that works, shall lead
        damaged = [stream for stream in self._by_id.values() if stream.damage is not None]
        counted = [stream.record.id for stream in damaged if self.me in stream.wanted.candidates]
        counted = [one for one in counted if self._by_id[one].following is None]  # nothing is asked for any more
        if counted:
            self._group.submit(
                DisableReplicas(broker=self.me, incarnation=self._data_dir.incarnation, stream_ids=tuple(counted))
            )
        for stream in damaged:
            if stream.following is not None and not stream.writing.locked():
                self._spawn(self._stop_following(stream), f"quarantine of stream {stream.record.name}")
            is_due = monotonic_ms() >= stream.mend_not_before_ms
            if self.me not in stream.wanted.candidates and not stream.writing.locked() and is_due:
                stream.mend_not_before_ms = monotonic_ms() + _MEND_AGAIN_MS
                self._spawn(self._recover(stream), f"mending stream {stream.record.name}")

    async def _stop_following(self, stream: HostedStream) -> None:
        async with stream.writing:
            if stream.following is not None:
                await self._end_role(stream)

    async def _recover(self, stream: HostedStream) -> None:
        async with stream.writing:
            if stream.log is not None and isinstance(stream.log.failure, StorageFailed) and may_be_mended(stream):
                await self._end_role(stream)
                await asyncio.get_running_loop().run_in_executor(self._writers, stream.log.close)
                stream.log = stream.damage = None
                await self._open(stream)  # what is on disk now is what it has; the rest comes from the leader
            elif stream.log is None:
                try:
                    await set_aside(stream, self._data_dir.stream_folder(stream.wanted.id), self._writers)
                except OSError as error:
                    logger.error("stream %s: its damaged folder could not be set aside: %s", stream.record.name, error)
                    return
                if stream.damage is None:
                    await self._open(stream)
            if stream.log is not None:
                await self._end_role(stream)
                await self._take_role(stream, stream.wanted)

    # ---- what the metadata leader must hear ----

    def missed(self) -> list[tuple[StreamId, Epoch]]:
        """Streams whose leader has been silent for too long."""
        now_ms = monotonic_ms()
        return [
            (stream.record.id, stream.following.epoch)
            for fetcher in self.fetchers.values()
            for stream in fetcher.streams
            if stream.following is not None and stream.following.misses_leader(now_ms, fetcher.heard_ms)
        ]

    def positions(self) -> list[tuple[StreamId, int, Epoch, int]]:
        """Where the logs end that this broker restarted with after an unclean end: whoever leads may be gone."""
        found = []
        for stream in self.streams.values():
            record, log = stream.wanted, stream.log
            is_asked = record.leader != self.me and self.me in record.unproven and stream.leading is None
            if is_asked and log is not None and stream.damage is None and not stream.writing.locked():
                end = log.log_end_offset
                found.append((record.id, record.version, log.epochs.last_epoch_before(end), end))
        return found

    # ---- the end ----

    async def close(self) -> list[BaseException]:
        """Stops taking messages, appends and acks what came, closes the logs. Returns what went wrong."""
        self._is_closing = True
        hosted = list(self._by_id.values())
        problems: list[Any] = []
        for fetcher in self.fetchers.values():
            await fetcher.close()  # nothing more is copied from here on
        steps: tuple[Callable[[HostedStream], Awaitable[Any]], ...] = (
            lambda stream: stream.unsubscribe(self._nats),
            lambda stream: stream.stop(self._writers),
        )
        for step in steps:
            problems += await asyncio.gather(*(step(stream) for stream in hosted), return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        return [problem for problem in problems if isinstance(problem, BaseException)]

    async def bury(self, stream_id: StreamId) -> None:
        """Removes the files of a stream that is not hosted. Raises OSError."""
        assert stream_id not in self._by_id, "a stream that is being served is not buried"
        self._burying.add(stream_id)  # moved back here meanwhile, it is opened when the old files are gone
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._readers, self._data_dir.remove_stream, stream_id)
        finally:
            self._burying.discard(stream_id)
            self._seen_version = -1
            self.look()

    def warn_of_strays(self, state: Metadata) -> None:
        known = {record.id for record in state.streams.values()} | {one.id for one in state.tombstones.values()}
        for folder in sorted(self._data_dir.streams.iterdir()):
            if folder.name.removesuffix(".removed") not in known:
                logger.warning("%s belongs to no known stream; it is left alone", folder)
