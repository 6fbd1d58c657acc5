"""One broker: its folder, its metadata, its streams, its link to NATS. HTTP stands in front of it and holds no state.

Order of things. Start: claim the folder, read the metadata, recover the logs, connect to NATS, subscribe. Stop:
unsubscribe
(what the server had sent still arrives), commit and ack it, close the logs, let go of NATS and of the folder.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from natslog.cluster.metadata import (
    BrokerRecord,
    BuryStream,
    Command,
    CreateStream,
    DeleteStream,
    EditStream,
    PauseStream,
    RegisterBroker,
)
from natslog.config import BrokerConfig
from natslog.errors import NatslogError, NotEnoughBrokers, ShuttingDown, StorageFailed, StreamNotFound
from natslog.log import LogOptions, StreamLog
from natslog.model import BrokerId, StreamId, StreamRecord, StreamSettings
from natslog.node.clock import now_us
from natslog.node.data_dir import DataDir
from natslog.node.metadata_store import MetadataStore
from natslog.node.stream import HostedStream, rebuild_dedupe
from natslog.node.stream_ingest import MemoryBudget, StreamIngest
from natslog.subjects import check_name
from natslog.wire.link import NatsCredentials, NatsLink
from natslog.wire.warmup import warm_up

logger = logging.getLogger("natslog.node")

_WRITER_THREADS = 8
_READER_THREADS = 8
_STOP_WITHIN_S = 4.0


class Broker:
    """Open with `await Broker(config).start()`; everything but construction runs in one event loop."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.streams: dict[str, HostedStream] = {}
        self.budget = MemoryBudget(config.ingest_memory_bytes)
        self.stopping = False
        self.stopping_soon = asyncio.Event()
        self.failed: BaseException | None = None
        self.readers = ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="read")
        self._writers = ThreadPoolExecutor(_WRITER_THREADS, thread_name_prefix="write")
        self._data_dir = DataDir(Path(config.data_dir), config.broker_id)
        try:
            self.metadata = MetadataStore(self._data_dir.path / "metadata", self._data_dir.cluster_id)
        except BaseException:
            self._data_dir.release()
            raise
        credentials = NatsCredentials(config.nats_creds_file, config.nats_user, config.nats_password_file)
        self.link = NatsLink(
            config.nats_url,
            name=f"natslog-broker-{config.broker_id}",
            credentials=credentials,
            on_state=self._on_nats_state,
        )
        self._nats_down_since: float | None = None
        self._changing = asyncio.Lock()
        self._maintenance: asyncio.Task[None] | None = None
        self.has_started = False

    # ---- life ----

    async def start(self) -> Broker:
        """Recovers all logs, then connects; returns when messages are taken or NATS is being waited for."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writers, warm_up)
        me = BrokerRecord(id=BrokerId(self.config.broker_id), url=self.config.url, rack=self.config.rack)
        await self._propose(RegisterBroker(broker=me))
        await self.link.open()
        for record in list(self.metadata.state.streams.values()):
            await self._host(record)
        self._warn_of_strays()
        self._maintenance = asyncio.create_task(self._maintain(), name="maintenance")
        self._maintenance.add_done_callback(self._stop_on_bug)
        self.has_started = True
        return self

    async def stop(self) -> None:
        """Stops taking messages, commits and acks what has come, and leaves, within 5 s."""
        if self.stopping:
            return
        self.stopping = True
        for stream in self.streams.values():
            if stream.ingest is not None:
                stream.ingest.committed.set()  # long polls answer now
        if self._maintenance is not None:
            self._maintenance.cancel()
        try:
            async with asyncio.timeout(_STOP_WITHIN_S):
                hosted = list(self.streams.values())
                await asyncio.gather(*(stream.unsubscribe(self.link) for stream in hosted))
                await asyncio.gather(*(stream.stop(self._writers) for stream in hosted))
                await self.link.close()
        except TimeoutError:
            logger.error("not everything was committed within %.0f s; what was not, was not acked", _STOP_WITHIN_S)
        self._writers.shutdown(wait=False)
        self.readers.shutdown(wait=False)
        self._data_dir.release()

    def _stop_on_bug(self, task: asyncio.Task[None]) -> None:
        """A task that must not end has ended with an exception: halt rather than go on half alive."""
        if not task.cancelled() and task.exception() is not None:
            self.failed = task.exception()
            logger.critical("stopping: %s failed", task.get_name(), exc_info=self.failed)
            self.stopping_soon.set()

    def _on_nats_state(self, up: bool) -> None:
        if not up:
            self._nats_down_since = time.monotonic()
            logger.warning(
                "lost NATS at %s; reconnecting. What is published without acks until then is not recorded",
                self.link.url,
            )
        elif self._nats_down_since is not None:
            seconds = time.monotonic() - self._nats_down_since
            logger.warning("NATS is back after %.1f s; %d streams subscribed again", seconds, len(self.streams))
        else:
            logger.info("connected to NATS at %s", self.link.url)

    @property
    def data_path(self) -> Path:
        return self._data_dir.path

    def not_ready_because(self) -> str | None:
        """Why this broker cannot serve fully now; None if it can."""
        if self.stopping:
            return "shutting down"
        if not self.has_started:
            return "recovering logs"
        if not self.link.is_up:
            return f"no connection to NATS at {self.link.url}"
        return None

    # ---- streams ----

    def hosted(self, name: str) -> HostedStream:
        """Raises StreamNotFound."""
        if name not in self.streams:
            raise StreamNotFound(f"there is no stream {name!r}", stream=name)
        return self.streams[name]

    async def create_stream(self, name: str, settings: StreamSettings) -> tuple[HostedStream, bool]:
        """The stream, and whether it is new (False: it was there with the same settings).

        Raises:
            InvalidRequest, StreamConflict, NotEnoughBrokers.
        """
        check_name(name)
        async with self._changing:
            brokers = sorted(self.metadata.state.brokers)
            if settings.replicas > len(brokers):
                raise NotEnoughBrokers(
                    f"{settings.replicas} replicas need as many brokers, and there are {len(brokers)}",
                    brokers=len(brokers),
                    replicas=settings.replicas,
                )
            stream_id = StreamId(secrets.token_hex(16))
            placement = tuple(brokers[: settings.replicas])
            created = await self._propose(
                CreateStream(name=name, id=stream_id, settings=settings, created_us=now_us(), placement=placement)
            )
            if created:
                await self._host(self.metadata.state.stream(name))
        return self.hosted(name), created

    async def edit_stream(self, name: str, settings: StreamSettings) -> HostedStream:
        """Raises StreamNotFound, InvalidRequest."""
        async with self._changing:
            before = self.hosted(name)
            await self._propose(EditStream(name=name, settings=settings))
            record = self.metadata.state.stream(name)
            resubscribe = record.settings.subject != before.record.settings.subject
            before.record = record
            if before.log is not None:
                before.log.settings = settings
            if before.ingest is not None:
                before.ingest.dedupe.window_us = int(settings.dedupe_window_s * 1_000_000)
            if resubscribe:
                await before.unsubscribe(self.link)
                await before.subscribe(self.link)
        return before

    async def pause_stream(self, name: str, paused: bool) -> HostedStream:
        """Raises StreamNotFound."""
        async with self._changing:
            await self._propose(PauseStream(name=name, paused=paused))
            stream = self.hosted(name)
            stream.record = self.metadata.state.stream(name)
            if stream.ingest is not None:
                stream.ingest.paused = paused
        return stream

    async def delete_stream(self, name: str) -> None:
        """The stream is gone at once; its files after a grace period.

        Raises:
            StreamNotFound.
        """
        async with self._changing:
            stream = self.hosted(name)
            await self._propose(DeleteStream(name=name, deleted_us=now_us()))
            del self.streams[name]
            await stream.unsubscribe(self.link)
            await stream.stop(self._writers)
            if stream.ingest is not None:
                stream.ingest.committed.set()

    async def _propose(self, command: Command) -> bool:
        if self.stopping:
            raise ShuttingDown("this broker is shutting down: ask again when it is back")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._writers, self.metadata.propose, command)
        except OSError as error:
            raise StorageFailed(
                f"the change could not be stored ({error.strerror or error}); nothing changed"
            ) from error

    async def _host(self, record: StreamRecord) -> None:
        loop = asyncio.get_running_loop()
        stream = HostedStream(record, None)
        self.streams[record.name] = stream
        try:
            stream.log = await loop.run_in_executor(self._writers, self._open_log, record)
        except NatslogError as error:
            stream.problem = error
        except OSError as error:
            stream.problem = StorageFailed(f"stream {record.name!r}: its folder cannot be used: {error}")
        if stream.log is None:
            logger.error("stream %s is not served: %s", record.name, stream.problem)
            return
        ingest = StreamIngest(
            record.name,
            stream.log,
            sender=self.link,
            executor=self._writers,
            budget=self.budget,
            paused=record.paused,
        )
        await loop.run_in_executor(self._writers, rebuild_dedupe, ingest.dedupe, stream.log)
        stream.ingest = ingest
        ingest.start(self._stop_on_bug)
        await stream.subscribe(self.link)

    def _open_log(self, record: StreamRecord) -> StreamLog:
        config = self.config
        options = LogOptions(config.segment_bytes, config.segment_age_s, config.min_free_bytes)
        return StreamLog(self._data_dir.stream_folder(record.id), record.id, record.settings, options)

    # ---- upkeep ----

    async def _maintain(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.config.retention_interval_s)
            for stream in list(self.streams.values()):
                if stream.ingest is not None:
                    stream.ingest.roll_if_due()
                await loop.run_in_executor(self.readers, stream.maintain)
            await self._bury_tombstones()

    async def _bury_tombstones(self) -> None:
        """Removes the files of streams deleted longer ago than the grace period."""
        grace_us = int(self.config.tombstone_grace_s * 1_000_000)
        for tombstone in list(self.metadata.state.tombstones.values()):
            if now_us() - tombstone.deleted_us >= grace_us:
                folder = self._data_dir.stream_folder(tombstone.id)
                if folder.exists():
                    await asyncio.get_running_loop().run_in_executor(self.readers, shutil.rmtree, folder)
                logger.info("stream %s (%s), deleted before: files removed", tombstone.name, tombstone.id)
                await self._propose(BuryStream(id=tombstone.id))

    def _warn_of_strays(self) -> None:
        state = self.metadata.state
        known = {record.id for record in state.streams.values()} | set(state.tombstones)
        for folder in sorted(self._data_dir.streams.iterdir()):
            if folder.name not in known:
                logger.warning("%s belongs to no known stream; it is left alone", folder)
