"""What the replicas of a broker share: its threads, its connection to NATS, its metadata, its memory; and the parts of
the broker that they call.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from natslog.cluster.activity import Kind
from natslog.cluster.features import MERGING_LEVEL
from natslog.cluster.replica_steps import Surroundings
from natslog.config import BrokerConfig
from natslog.log import LogOptions, StoreLimit
from natslog.log.recent_commits import RecentRoom
from natslog.log.subject_counts import KeptCounts
from natslog.model import BrokerId, StreamId, StreamRecord
from natslog.node.cluster_clock import ClusterClock
from natslog.node.data_dir import DataDir
from natslog.node.metadata.group import MetadataGroup
from natslog.node.replicas.jetstream import JetStream
from natslog.node.replicas.log_folder import LogFolder
from natslog.node.replicas.proposals import Proposals
from natslog.node.supervisor import Supervisor
from natslog.node.writes.ingest_memory import IngestMemory, LatencyHistogram
from natslog.node.writes.pace import DiskPace
from natslog.wire.lanes import NatsLanes

STANDBY_BYTES = 128 * 1024 * 1024
"""What a broker keeps of all streams that it stands by for."""

if TYPE_CHECKING:
    from natslog.node.replicas.replicated_log import ReplicatedLog


class ReplicaHost(Protocol):
    """What holds the replicas of a broker, as each of them uses it."""

    def follow(self, leader: BrokerId, log: ReplicatedLog) -> None:
        """Fetches it from this broker, from its present position on."""

    def forget(self, log: ReplicatedLog) -> None:
        """Fetches it no more."""

    def ended(self) -> frozenset[BrokerId]:
        """Brokers whose processes have ended since a link to them was up."""

    def appointed(self, record: StreamRecord) -> None:
        """This broker leads the stream from now on, and its followers come."""

    async def prepare_successor(self, to: BrokerId, stream_id: StreamId) -> None:
        """Returns when that broker has read what it needs to lead the stream, or does not answer."""


class ReplicaOwner(Protocol):
    """The broker, as its replicas use it."""

    @property
    def jetstream_api(self) -> JetStream: ...

    def halt(self, what: str, error: BaseException) -> None:
        """A bug: the broker stops."""

    def report_replica(self, kind: Kind, name: str, stream_id: str, message: str) -> None:
        """An event of a stream's replica, for `__activity`."""

    def damage_found(self) -> None:
        """In a sealed segment, which is to be repaired."""

    def upkeep_due(self) -> None:
        """There are files to seal or to remove. From any thread."""


@dataclass(frozen=True, slots=True)
class Services:
    """Args: `writers`, `readers`: threads for blocking work. `tasks`: those of the replicas. `standby_memory`: for what
    followers that stand by keep.
    """

    config: BrokerConfig
    data_dir: DataDir
    group: MetadataGroup
    clock: ClusterClock
    nats: NatsLanes
    writers: Executor
    readers: Executor
    memory: IngestMemory
    store: StoreLimit
    around: Surroundings
    tasks: Supervisor
    proposals: Proposals
    host: ReplicaHost
    broker: ReplicaOwner
    pace: DiskPace = field(default_factory=DiskPace)
    kept_counts: KeptCounts = field(default_factory=KeptCounts)
    recent_room: RecentRoom = field(default_factory=RecentRoom)
    standby_memory: IngestMemory = field(default_factory=lambda: IngestMemory(STANDBY_BYTES))
    commit_latency: LatencyHistogram = field(default_factory=LatencyHistogram)

    @property
    def jetstream(self) -> JetStream:
        return self.broker.jetstream_api

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
            closed_early=self.broker.upkeep_due,
        )
        return LogFolder(self.data_dir.stream_folder(record.id, record.name), options)
