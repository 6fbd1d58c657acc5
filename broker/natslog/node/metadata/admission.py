"""Who may talk to this broker: what it says of itself on a link, and what the other side must be to be let in."""

from __future__ import annotations

import logging

from natslog.cluster.incarnations import outdated_folder
from natslog.config import BrokerConfig
from natslog.errors import ClusterMismatch, NatslogError, natslog_version
from natslog.model import BrokerId
from natslog.node.clock import elapsed_us, monotonic_ms, now_us
from natslog.node.cluster_clock import ClusterClock
from natslog.node.data_dir import DataDir
from natslog.node.metadata.group import MetadataGroup
from natslog.node.peers.messages import PROTOCOL, Hello, Welcome

logger = logging.getLogger("natslog.cluster")

SAY_EVERY_MS = 30_000.0


class Admission:
    """Attributes: `clock`: what time it is, as far as this broker may go by it."""

    def __init__(self, config: BrokerConfig, data_dir: DataDir, group: MetadataGroup) -> None:
        self.me = BrokerId(config.broker_id)
        self.config = config
        self.group = group
        self.clock = ClusterClock(self.me, data_dir.path / "clock")
        self._data_dir = data_dir
        self._refused_ms: dict[str, float] = {}
        self._stored_commit = group.raft.commit

    @property
    def cluster_id(self) -> str:
        return self._data_dir.identity.cluster_id

    def hello(self, nonce: str) -> Hello:
        identity = self._data_dir.identity
        return Hello(
            broker=self.me,
            url=self.config.url,
            directory=identity.directory,
            life=self._data_dir.life.number,
            cluster_id=identity.cluster_id,
            protocol=PROTOCOL,
            version=natslog_version(),
            wall_us=now_us(),
            nonce=nonce,
            lives=self._data_dir.life.shown,
        )

    def check_peer(self, hello: Hello) -> None:
        mine = self._data_dir.identity
        if hello.directory == mine.directory:
            raise ClusterMismatch(f"{hello.url} is this broker itself", itself=True)
        if hello.broker == self.me:
            raise ClusterMismatch(
                f"two brokers have the id {self.me}: this one at {self.config.url} and one at {hello.url}. Give each "
                "its own broker_id",
                broker=self.me,
            )
        if mine.cluster_id and hello.cluster_id and mine.cluster_id != hello.cluster_id:
            raise ClusterMismatch(
                f"broker {hello.broker} at {hello.url} belongs to cluster {hello.cluster_id}, and broker {self.me} to "
                f"{mine.cluster_id}: correct the seeds, or give the newcomer an empty data folder",
                broker=hello.broker,
            )
        self._check_member(hello)
        self.clock.note(hello.broker, hello.wall_us, elapsed_us())

    def _check_member(self, hello: Hello) -> None:
        membership = self.group.raft.membership
        member = membership.find(hello.broker)
        if member is not None and member.directory != hello.directory:
            raise ClusterMismatch(
                f"broker {hello.broker} at {hello.url} has another data folder than the one that is the "
                f"cluster's. If that one is lost: natslog cluster remove {hello.broker} --force, then natslog cluster "
                f"add {hello.url}; otherwise start the broker with its own folder",
                broker=hello.broker,
            )
        if member is None and membership.members and hello.cluster_id:
            raise ClusterMismatch(
                f"broker {hello.broker} is no member of this cluster (any more): give it an empty data folder, then "
                f"natslog cluster add {hello.url}",
                broker=hello.broker,
            )
        if self.group.raft.applied < self._stored_commit:  # of a start; they tell which lives are registered
            raise ConnectionRefusedError("the metadata that is stored here is not applied yet")
        self._check_lives(hello)

    def _check_lives(self, hello: Hello) -> None:
        """Raises OutdatedFolder: the folder is a copy from before the life that is registered. It holds an old vote."""
        known = self.group.state.brokers.get(hello.broker)
        if known is not None and known.directory == hello.directory and known.incarnation not in hello.lives:
            raise outdated_folder(known, hello.url)

    def check_still_current(self, peer: Hello) -> None:
        """For an open link: a newer life of that broker may have been applied here since the handshake. (At feature
        level 1 a life is registered by another name than the handshake has.) Raises OutdatedFolder.
        """
        known = self.group.state.brokers.get(peer.broker)
        if known is not None and known.nonce:
            self._check_lives(peer)

    def welcome_for(self, hello: Hello) -> Welcome | None:
        member = self.group.raft.membership.find(hello.broker)
        if hello.cluster_id or not self.cluster_id or member is None or member.directory != hello.directory:
            return None
        return Welcome(cluster_id=self.cluster_id)

    def refused(self, error: NatslogError) -> None:
        if monotonic_ms() - self._refused_ms.get(error.message, -SAY_EVERY_MS) >= SAY_EVERY_MS:
            self._refused_ms = {error.message: monotonic_ms()}
            logger.warning("a broker's link was refused: %s", error.message)
