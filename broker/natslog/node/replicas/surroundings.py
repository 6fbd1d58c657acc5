"""The current state of a broker that all its replicas share."""

from __future__ import annotations

from natslog.cluster.replica_steps import Surroundings
from natslog.config import BrokerConfig
from natslog.log import StoreLimit
from natslog.model import BrokerId
from natslog.node.cluster_clock import ClusterClock
from natslog.node.data_dir import DataDir
from natslog.node.metadata.group import MetadataGroup


class BrokerSurroundings(Surroundings):
    """Args: `store`: the limit of all streams together."""

    def __init__(
        self, config: BrokerConfig, data_dir: DataDir, group: MetadataGroup, clock: ClusterClock, store: StoreLimit
    ) -> None:
        self._config, self._data_dir, self._group, self._clock, self._store = config, data_dir, group, clock, store

    @property
    def incarnation(self) -> str:
        return self._data_dir.incarnation

    @property
    def is_registered(self) -> bool:
        known = self._group.state.brokers.get(BrokerId(self._config.broker_id))
        return known is not None and known.incarnation == self.incarnation

    @property
    def has_session(self) -> bool:
        return self._group.has_session()

    @property
    def has_room(self) -> bool:
        return self.has_disk_room and self._store.has_room

    @property
    def has_disk_room(self) -> bool:
        """Whether the fullest disk of the data folder has room for messages."""
        disk = self._group.disk
        return self._store.disk_has_room(disk.free_bytes, self._config.min_free_bytes, disk.measured_s)

    @property
    def has_time(self) -> bool:
        return self._clock.has_time
