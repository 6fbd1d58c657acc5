"""Who may talk to this broker: what it says of itself on a link, and what the other side must be to be let in."""

from __future__ import annotations

import logging

from natslog.config import BrokerConfig
from natslog.errors import ClusterMismatch, NatslogError, natslog_version
from natslog.model import BrokerId
from natslog.node.clock import monotonic_ms, now_us
from natslog.node.data_dir import DataDir
from natslog.node.metadata.group import MetadataGroup
from natslog.node.peers.messages import PROTOCOL, Hello, Welcome

logger = logging.getLogger("natslog.cluster")

SAY_EVERY_MS = 30_000.0
_CLOCKS_APART_S = 30.0


class Admission:
    """Attributes: `clocks_apart_s`: how far another broker's clock is ahead of this one's."""

    def __init__(self, config: BrokerConfig, data_dir: DataDir, group: MetadataGroup) -> None:
        self.me = BrokerId(config.broker_id)
        self.config = config
        self.group = group
        self.clocks_apart_s: dict[BrokerId, float] = {}
        self._data_dir = data_dir
        self._refused_ms: dict[str, float] = {}

    @property
    def cluster_id(self) -> str:
        return self._data_dir.identity.cluster_id

    def hello(self, nonce: str) -> Hello:
        identity = self._data_dir.identity
        return Hello(
            broker=self.me,
            url=self.config.url,
            directory=identity.directory,
            life=self._data_dir.life,
            cluster_id=identity.cluster_id,
            protocol=PROTOCOL,
            version=natslog_version(),
            wall_us=now_us(),
            nonce=nonce,
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
        self._note_clock(hello)

    def _check_member(self, hello: Hello) -> None:
        """Raises ClusterMismatch.

        Members may have been added while this broker was down, and one of them may be the metadata leader, from which
        alone it learns of them. So another broker of this cluster is let in while this one follows no leader, or where
        it is that leader. Raft is safe with messages of brokers that are no members.
        """
        leads_here = self.group.leader if self.group.has_session() else None
        if hello.cluster_id and hello.cluster_id == self.cluster_id and leads_here in (None, hello.broker):
            return
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
                f"broker {hello.broker} is no member of this cluster. If it was removed: give it an empty data folder, "
                f"then natslog cluster add {hello.url}. If it was added a moment ago, it is let in as soon as broker "
                f"{self.me} has learned of it",
                broker=hello.broker,
            )

    def _note_clock(self, hello: Hello) -> None:
        apart_s = (hello.wall_us - now_us()) / 1e6
        known_s = self.clocks_apart_s.get(hello.broker, 0.0)
        self.clocks_apart_s[hello.broker] = apart_s
        if abs(apart_s) > _CLOCKS_APART_S >= abs(known_s):
            logger.warning(
                "the clocks of broker %d and of this one are %.0f s apart: set them right (NTP). Nothing is lost, "
                "but timestamps of messages are those of the leader's clock",
                hello.broker,
                apart_s,
            )

    def welcome_for(self, hello: Hello) -> Welcome | None:
        member = self.group.raft.membership.find(hello.broker)
        if hello.cluster_id or not self.cluster_id or member is None or member.directory != hello.directory:
            return None
        return Welcome(cluster_id=self.cluster_id)

    def refused(self, error: NatslogError) -> None:
        if monotonic_ms() - self._refused_ms.get(error.message, -SAY_EVERY_MS) >= SAY_EVERY_MS:
            self._refused_ms = {error.message: monotonic_ms()}
            logger.warning("a broker's link was refused: %s", error.message)
