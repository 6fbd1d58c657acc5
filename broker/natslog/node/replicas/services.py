"""The services that the replicas of a broker share: its threads, its connection to NATS, its metadata, its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from natslog.cluster.activity import Kind
from natslog.cluster.commands import BackgroundCommand, IsrChange
from natslog.cluster.features import MERGING_LEVEL
from natslog.config import BrokerConfig
from natslog.log import LogOptions, StoreLimit
from natslog.log.recent_commits import RecentRoom
from natslog.log.subject_counts import KeptCounts
from natslog.model import BrokerId, StreamId, StreamRecord
from natslog.node.cluster_clock import ClusterClock
from natslog.node.data_dir import DataDir
from natslog.node.metadata.group import MetadataGroup
from natslog.node.replicas.consumer_records import ConsumerOrigin, ConsumerPosition
from natslog.node.replicas.log_folder import LogFolder
from natslog.node.writes.ingest_memory import IngestMemory, LatencyHistogram
from natslog.node.writes.pace import DiskPace
from natslog.wire.frames import Frames
from natslog.wire.lanes import NatsLanes

OnBug = Callable[[str, BaseException], None]


class Followed(Protocol):
    """Where a follower fetches from; see `Fetcher`."""

    def follow(self, stream: Any) -> None: ...


async def _nothing() -> None:
    """Without the JetStream API, no consumer is served."""


async def _no_numbers(stream: Any, name: str | None, deadline_s: float) -> list[ConsumerPosition]:
    """Without the JetStream API, there are no consumers."""
    return []


async def _no_consumers(stream: Any, origins: Sequence[ConsumerOrigin]) -> list[tuple[str, str]]:
    raise AssertionError("the JetStream API is part of every broker")


@dataclass(slots=True)
class Services:
    """Args: `writers`, `readers`: threads for blocking work. `spawn`: runs a task that the broker supervises. `report`:
    an event of a stream's replica, for `__activity`. `direct_subjects`: of the JetStream API, to which the leader
    of a stream subscribes; `receive_direct`: takes the requests to them. `domain`: of JetStream, or empty.
    `began_to_lead`: this broker leads the stream, and has subscribed to its subjects: also after these were edited.
    `expect_followers`: it leads the stream from now on, and its followers come. `prepare_successor`: returns when
    that broker has read what it needs to lead the stream, or does not answer. `lead_consumers`, `end_consumers`:
    the consumers of a stream are served by this broker from now on, or not any more. `import_consumers`: those of
    an imported stream become these; returns the names of others, and why they were refused. `consumer_positions`:
    of the consumers of a stream that this broker leads. `consumer_numbers`: the same with their numbers, of all or
    of one of them, as exactly as that is possible until `deadline_s` of `time.monotonic`.
    """

    config: BrokerConfig
    data_dir: DataDir
    group: MetadataGroup
    clock: ClusterClock
    nats: NatsLanes
    writers: Executor
    readers: Executor
    memory: IngestMemory
    on_bug: OnBug
    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    fetcher_of: Callable[[BrokerId], Followed]
    forget: Callable[[Any], None]
    propose: Callable[[BackgroundCommand], None]
    propose_isr: Callable[[IsrChange], None]
    store: StoreLimit
    report: Callable[[Kind, str, str, str], None] = lambda kind, name, stream_id, message: None
    leaders_appointed: int = 0
    pace: DiskPace = field(default_factory=DiskPace)
    kept_counts: KeptCounts = field(default_factory=KeptCounts)
    recent_room: RecentRoom = field(default_factory=RecentRoom)
    commit_latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    wake_scrubber: Callable[[], None] = lambda: None
    wake_upkeep: Callable[[], None] = lambda: None
    direct_subjects: Callable[[StreamRecord], tuple[str, ...]] = lambda record: ()
    domain: Callable[[], str] = lambda: ""
    receive_direct: Callable[[Any, Frames], None] = lambda stream, frames: None
    began_to_lead: Callable[[Any], None] = lambda stream: None
    expect_followers: Callable[[StreamRecord], None] = lambda record: None
    prepare_successor: Callable[[BrokerId, StreamId], Awaitable[None]] = lambda broker, stream_id: _nothing()
    lead_consumers: Callable[[Any], Awaitable[None]] = lambda stream: _nothing()
    end_consumers: Callable[[Any], Awaitable[None]] = lambda stream: _nothing()
    import_consumers: Callable[[Any, Sequence[ConsumerOrigin]], Awaitable[list[tuple[str, str]]]] = _no_consumers
    consumer_positions: Callable[[Any], list[ConsumerPosition]] = lambda stream: []
    consumer_numbers: Callable[[Any, str | None, float], Awaitable[list[ConsumerPosition]]] = _no_numbers

    def is_recorded(self, subject: str) -> bool:
        """Whether any stream records this subject."""
        return self.group.state.index.subjects.covers(subject)

    def log_folder(self, record: StreamRecord) -> LogFolder:
        config = self.config
        options = LogOptions(
            config.segment_bytes,
            config.segment_age_s,
            config.min_free_bytes,
            ended_in_order=bool(self.data_dir.after),
            store=self.store,
            kept_counts=self.kept_counts,
            recent_room=self.recent_room,
            merges_segments=self.group.state.feature_level >= MERGING_LEVEL,
            closed_early=lambda: self.wake_upkeep(),
        )
        return LogFolder(self.data_dir.stream_folder(record.id, record.name), options)

    # ---- `cluster.replica_steps.Surroundings` ----

    @property
    def incarnation(self) -> str:
        return self.data_dir.incarnation

    @property
    def is_registered(self) -> bool:
        known = self.group.state.brokers.get(BrokerId(self.config.broker_id))
        return known is not None and known.incarnation == self.data_dir.incarnation

    @property
    def has_session(self) -> bool:
        return self.group.has_session()

    @property
    def has_room(self) -> bool:
        return self.has_disk_room and self.store.has_room

    @property
    def has_disk_room(self) -> bool:
        """Whether the fullest disk of the data folder has room for messages."""
        disk = self.group.disk
        return self.store.disk_has_room(disk.free_bytes, self.config.min_free_bytes, disk.measured_s)

    @property
    def has_time(self) -> bool:
        return self.clock.has_time
