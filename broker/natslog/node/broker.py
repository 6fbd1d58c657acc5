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
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from natslog.cluster.metadata import (
    BrokerRecord,
    BuryStream,
    Command,
    CreateStream,
    DeleteStream,
    EditStream,
    PauseStream,
    RegisterBroker,
    Tombstone,
)
from natslog.config import BrokerConfig
from natslog.errors import NatslogError, NotEnoughBrokers, ShuttingDown, StorageFailed, StreamNotFound
from natslog.ingest.warmup import compile_aside, warm_up
from natslog.log import LogOptions, StreamLog
from natslog.model import BrokerId, StreamId, StreamRecord, StreamSettings
from natslog.node.clock import now_us
from natslog.node.data_dir import DataDir
from natslog.node.dedupe_rebuild import rebuilt_dedupe
from natslog.node.metadata_store import MetadataStore
from natslog.node.stream import HostedStream, Pacer
from natslog.node.stream_ingest import IngestMemory, StreamIngest
from natslog.subjects import check_name
from natslog.wire.link import NatsCredentials, NatsLink

logger = logging.getLogger("natslog.node")

Result = TypeVar("Result")

_WRITER_THREADS = 8
_READER_THREADS = 8
_STOP_WITHIN_S = 4.0
_RECOVERY_BYTES = 1024 * 1024 * 1024  # of all streams: what a start may have to read, some seconds' worth


class Broker:
    """Open with `await Broker(config).start()`; everything but construction runs in one event loop."""

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.streams: dict[str, HostedStream] = {}
        self.memory = IngestMemory(config.ingest_memory_bytes)
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
        self._stop_upkeep = asyncio.Event()
        self._changes: set[asyncio.Task[Any]] = set()
        self.has_started = False

    # ---- life ----

    async def start(self) -> Broker:
        """Recovers all logs, then connects; returns when messages are taken or NATS is being waited for."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writers, compile_aside)
        await loop.run_in_executor(self._writers, warm_up)
        me = BrokerRecord(id=BrokerId(self.config.broker_id), url=self.config.url, rack=self.config.rack)
        await self._propose(RegisterBroker(broker=me))
        await self.link.open()
        await asyncio.gather(*(self._host(record) for record in self.metadata.state.streams.values()))
        self._warn_of_strays()
        self._maintenance = asyncio.create_task(self._maintain(), name="maintenance")
        self._maintenance.add_done_callback(self._halt_if_failed)
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
        self._stop_upkeep.set()
        try:
            async with asyncio.timeout(_STOP_WITHIN_S):
                await self._stop_all()
        except TimeoutError:
            # The folder stays locked until this process is gone: a thread may still be writing to it.
            logger.error("not everything was committed within %.0f s; what was not, was not acked", _STOP_WITHIN_S)
        else:
            self._data_dir.release()
        self._writers.shutdown(wait=False)
        self.readers.shutdown(wait=False)

    async def _stop_all(self) -> None:
        hosted = list(self.streams.values())
        problems = await asyncio.gather(*(stream.unsubscribe(self.link) for stream in hosted), return_exceptions=True)
        problems += await asyncio.gather(*(stream.stop(self._writers) for stream in hosted), return_exceptions=True)
        if self._maintenance is not None:
            await asyncio.wait([self._maintenance])
        await self.link.close()
        for problem in problems:
            if isinstance(problem, BaseException):
                logger.error("while stopping: %s", problem, exc_info=problem)

    def _halt_if_failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._halt(task.get_name(), error)

    def _halt(self, what: str, error: BaseException) -> None:
        """What must not end has ended with an exception: stop rather than go on half alive."""
        self.failed = error
        logger.critical("stopping: %s failed", what, exc_info=error)
        self.stopping_soon.set()

    def _on_nats_state(self, up: bool) -> None:
        if not up:
            self._nats_down_since = time.monotonic()
            logger.warning(
                "lost NATS at %s; reconnecting. What is published without acks until then is not recorded",
                self.link.shown_url,
            )
        elif self._nats_down_since is not None:
            seconds = time.monotonic() - self._nats_down_since
            logger.warning("NATS is back after %.1f s; %d streams subscribed again", seconds, len(self.streams))
        else:
            logger.info("connected to NATS at %s", self.link.shown_url)

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
            return f"no connection to NATS at {self.link.shown_url}"
        return None

    # ---- streams ----

    def hosted(self, name: str) -> HostedStream:
        """Raises StreamNotFound."""
        if name not in self.streams:
            raise StreamNotFound(f"there is no stream {name!r}", stream=name)
        return self.streams[name]

    async def _to_the_end(self, change: Coroutine[Any, Any, Result]) -> Result:
        """Carries a change out even where the client that asked for it hangs up in the middle."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def create_stream(self, name: str, settings: StreamSettings) -> tuple[HostedStream, bool]:
        """The stream, and whether it is new (False: it was there with the same settings).

        Raises:
            InvalidRequest, StreamConflict, NotEnoughBrokers.
        """
        return await self._to_the_end(self._create_stream(name, settings))

    async def _create_stream(self, name: str, settings: StreamSettings) -> tuple[HostedStream, bool]:
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
        return await self._to_the_end(self._edit_stream(name, settings))

    async def _edit_stream(self, name: str, settings: StreamSettings) -> HostedStream:
        async with self._changing:
            before = self.hosted(name)
            await self._propose(EditStream(name=name, settings=settings))
            record = self.metadata.state.stream(name)
            was = before.record.settings
            resubscribe = settings.subject != was.subject
            before.record = record
            if before.log is not None:
                before.log.settings = settings
            if before.ingest is not None and settings.dedupe_window_s != was.dedupe_window_s:
                before.ingest.change_window(settings.dedupe_window_s)
            if resubscribe and before.subscription is not None:
                await self.link.move(before.subscription, settings.subject, queue=settings.group or "")
        return before

    async def pause_stream(self, name: str, paused: bool) -> HostedStream:
        """Raises StreamNotFound."""
        return await self._to_the_end(self._pause_stream(name, paused))

    async def _pause_stream(self, name: str, paused: bool) -> HostedStream:
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
        await self._to_the_end(self._delete_stream(name))

    async def _delete_stream(self, name: str) -> None:
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
            memory=self.memory,
            paused=record.paused,
        )
        window_s = record.settings.dedupe_window_s
        ingest.dedupe = await loop.run_in_executor(self._writers, rebuilt_dedupe, window_s, stream.log)
        stream.ingest = ingest
        ingest.start(self._halt)
        await stream.subscribe(self.link)

    def _open_log(self, record: StreamRecord) -> StreamLog:
        config = self.config
        options = LogOptions(config.segment_bytes, config.segment_age_s, config.min_free_bytes)
        return StreamLog(self._data_dir.stream_folder(record.id), record.id, record.settings, options)

    # ---- upkeep ----

    async def _maintain(self) -> None:
        loop = asyncio.get_running_loop()
        while not await self._is_stopping_within(self.config.retention_interval_s):
            for stream in list(self.streams.values()):
                if isinstance(stream.problem, StorageFailed):
                    await self._host(stream.record)  # it may open now: there is room again, say
            due = self._rolled_and_due([stream for stream in self.streams.values() if stream.ingest is not None])
            await loop.run_in_executor(self.readers, self._maintain_all, due)
            await self._bury_tombstones()

    @staticmethod
    def _rolled_and_due(streams: list[HostedStream]) -> list[HostedStream]:
        """Ends active segments that are full or old, and the costliest ones where a start would have too much to read.

        Returns:
            The streams with work for a thread. A look at one that rests costs microseconds.
        """
        recovery_bytes = {stream.record.name: stream.usable_log().recovery_bytes for stream in streams}
        excess = sum(recovery_bytes.values()) - _RECOVERY_BYTES
        for stream in sorted(streams, key=lambda one: recovery_bytes[one.record.name], reverse=True):
            log, ingest = stream.usable_log(), stream.ingest
            assert ingest is not None, "only such streams are looked at"
            if excess > 0 or log.is_roll_due(now_us()):
                ingest.roll()
                excess -= recovery_bytes[stream.record.name]
        return [stream for stream in streams if stream.usable_log().needs_upkeep()]

    def _maintain_all(self, streams: list[HostedStream]) -> None:
        """In a thread."""
        pacer = Pacer(self._stop_upkeep.is_set)
        for stream in streams:
            if not pacer.is_stopping():
                stream.maintain(pacer)

    async def _is_stopping_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stop_upkeep.wait()
        except TimeoutError:
            return False

    async def _bury_tombstones(self) -> None:
        """Removes the files of streams deleted longer ago than the grace period; what fails is tried again."""
        grace_us = int(self.config.tombstone_grace_s * 1_000_000)
        for tombstone in list(self.metadata.state.tombstones.values()):
            if now_us() - tombstone.deleted_us < grace_us or self._stop_upkeep.is_set():
                continue
            try:
                await self._bury(tombstone)
            except (NatslogError, OSError) as error:
                logger.error("the files of deleted stream %s could not be removed yet: %s", tombstone.name, error)

    async def _bury(self, tombstone: Tombstone) -> None:
        hosted = {stream.record.id for stream in self.streams.values()}
        assert tombstone.id not in hosted, "a stream that is being served is not deleted"
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
