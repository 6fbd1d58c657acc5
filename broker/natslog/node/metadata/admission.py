"""Admission of other brokers: the hello of this broker on a link, and the conditions for the other side."""

from __future__ import annotations

import logging

from natslog.cluster.commands import BrokerRecord
from natslog.cluster.features import FIRST_LEVEL, FIRST_VERSION, LATEST_LEVEL
from natslog.cluster.incarnations import outdated_folder
from natslog.config import BrokerConfig
from natslog.errors import ClusterMismatch, NatslogError, NotReady, natslog_version
from natslog.log_events import event
from natslog.model import BrokerId
from natslog.node.clock import elapsed_us, monotonic_ms, now_us
from natslog.node.cluster_clock import ClusterClock
from natslog.node.data_dir import DataDir
from natslog.node.metadata.group import MetadataGroup
from natslog.node.peers.handshake import PROTOCOL, Hello
from natslog.node.peers.keys import KeyRing
from natslog.node.peers.messages import Welcome

logger = logging.getLogger("natslog.cluster")

LOG_EVERY_MS = 30_000.0
_MOST_REFUSALS_SAID = 32


class Admission:
    """Attributes: `clock`: the time that this broker may use."""

    def __init__(self, config: BrokerConfig, data_dir: DataDir, group: MetadataGroup, keys: KeyRing) -> None:
        self.me = BrokerId(config.broker_id)
        self.keys = keys
        self.config = config
        self.group = group
        self.clock = ClusterClock(self.me, data_dir.path / "clock")
        self._data_dir = data_dir
        self._refused_ms: dict[str, float] = {}
        self._checked: dict[BrokerId, tuple[BrokerRecord | None, Hello]] = {}  # `check_still_current`
        self._stored_commit = group.raft.commit

    @property
    def cluster_id(self) -> str:
        return self._data_dir.identity.cluster_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every URL at which other brokers may dial this broker."""
        return (self.config.url, *self.config.peer_urls)

    def hello(self, dialled: str = "") -> Hello:
        identity = self._data_dir.identity
        return Hello(
            protocol=PROTOCOL,
            version=natslog_version(),
            broker=self.me,
            url=self.config.url,
            directory=identity.directory,
            life=self._data_dir.life.number,
            cluster_id=identity.cluster_id,
            min_level=FIRST_LEVEL,
            max_level=LATEST_LEVEL,
            wall_us=now_us(),
            dialled=dialled,
            keys=self.keys.ids,
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
                f"broker {hello.broker} at {hello.url} belongs to cluster {hello.cluster_id}, but broker {self.me} "
                f"belongs to cluster {mine.cluster_id}: correct the seeds, or give the new broker an empty data "
                "folder",
                broker=hello.broker,
            )
        self._check_member(hello)
        self._check_level(hello)

    def _check_member(self, hello: Hello) -> None:
        """Raises ClusterMismatch. NotReady, OutdatedFolder: as they say."""
        membership = self.group.raft.membership
        member = membership.find(hello.broker)
        if member is not None and member.directory != hello.directory:
            raise ClusterMismatch(
                f"broker {hello.broker} at {hello.url} has a data folder that is not the registered one. If the "
                f"registered folder is lost: natslog cluster remove {hello.broker} --force, then natslog cluster add "
                f"{hello.url}; otherwise start the broker with its registered folder. If the broker was replaced "
                f"while broker {self.me} was down, broker {self.me} receives this change from the metadata leader",
                broker=hello.broker,
            )
        if member is None and membership.members and hello.cluster_id and not self._may_be_newer(hello):
            raise ClusterMismatch(
                f"broker {hello.broker} is not a member of this cluster. If it was removed: give it an empty data "
                f"folder, then natslog cluster add {hello.url}. If it was added a moment ago, it is accepted as soon "
                f"as broker {self.me} has received this change",
                broker=hello.broker,
            )
        if self.group.raft.applied < self._stored_commit:  # of a start; they name the registered lives
            raise NotReady(
                "this broker has not applied its stored metadata yet: the connection is tried again in a moment"
            )
        self._check_lives(hello)

    def _may_be_newer(self, hello: Hello) -> bool:
        """Members may have been added while this broker was down, and one of them may be the metadata leader, which is
        the only source of this change. Therefore an unknown broker of this cluster is accepted while no leader is
        followed, or if it is that leader. Raft remains safe: the vote of a broker that is not a member does not count.
        """
        leader = self.group.leader if self.group.has_session() else None
        return hello.cluster_id == self.cluster_id and leader in (None, hello.broker)

    def _check_lives(self, hello: Hello) -> None:
        """Raises OutdatedFolder: the folder is a copy from before the life that is registered. It has an old vote."""
        known = self.group.state.brokers.get(hello.broker)
        if known is not None and known.directory == hello.directory and known.incarnation not in hello.lives:
            raise outdated_folder(known, hello.url)

    def check_still_current(self, peer: Hello) -> None:
        """For an open link: a newer life of that broker may have been applied here since the handshake. Raises
        OutdatedFolder.
        """
        known = self.group.state.brokers.get(peer.broker)
        checked = self._checked.get(peer.broker)
        if checked is not None and checked[0] is known and checked[1] is peer:
            return  # as for the frame before
        self._check_lives(peer)
        self._checked[peer.broker] = known, peer

    def _check_level(self, hello: Hello) -> None:
        level = self.group.state.feature_level
        if not self.cluster_id or hello.supports(level):
            return
        if hello.max_level < level:
            remedy = f"run natslog {FIRST_VERSION.get(level, natslog_version())} or later on that broker"
        else:
            remedy = (
                f"run natslog {natslog_version()} on that broker, and run natslog cluster finalize-upgrade "
                "before installing the later version"
            )
        raise ClusterMismatch(
            f"the cluster is at feature level {level}, but natslog {hello.version} of broker {hello.broker} at "
            f"{hello.url} supports levels {hello.min_level} to {hello.max_level}: {remedy}",
            broker=hello.broker,
        )

    def admitted(self, hello: Hello) -> None:
        """The peer is authenticated: its clock is used only from now on."""
        self.clock.note(hello.broker, hello.wall_us, elapsed_us())

    def welcome_for(self, hello: Hello) -> Welcome | None:
        member = self.group.raft.membership.find(hello.broker)
        if hello.cluster_id or not self.cluster_id or member is None or member.directory != hello.directory:
            return None
        return Welcome(cluster_id=self.cluster_id)

    def refused(self, error: NatslogError) -> None:
        """Logs each refusal every 30 s, and at most 32 different ones in that time: an attack must not fill the log."""
        if isinstance(error, NotReady):
            return  # it passes
        now_ms = monotonic_ms()
        self._refused_ms = {said: at for said, at in self._refused_ms.items() if now_ms - at < LOG_EVERY_MS}
        if error.message not in self._refused_ms and len(self._refused_ms) < _MOST_REFUSALS_SAID:
            self._refused_ms[error.message] = now_ms
            logger.warning(
                "the connection of a broker was refused: %s",
                error.message,
                extra=event("peer.refused", reason=error.code),
            )
