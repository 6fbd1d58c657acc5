"""A broker of the simulation: its replicas, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from natslog.cluster.calm import Calm
from natslog.cluster.commands import Command, LeaveReplicas, StopBroker
from natslog.model import BrokerId, StreamId, StreamRecord, companion_id, stream_of_companion
from tests.sim.cluster_messages import Answer, Fetch
from tests.sim.cluster_process import NAME, STREAM, Disk, Life, Log, Process
from tests.sim.cluster_replica import SimReplica

if TYPE_CHECKING:
    from tests.sim.cluster_world import Cluster

FETCH_EVERY_MS = 60.0
ANNOUNCE_MS = 1500.0
TRANSFER_MS = 1500.0
LEAVE_MS = 700.0
CLOSE_MS = 1500.0
LOOK_AGAIN_MS = 20.0


class Roles(Life):
    """What one life of a broker does with its replicas; a subclass says how it knows of the metadata."""

    replica_type: ClassVar[type[SimReplica]] = SimReplica

    def __init__(self, cluster: Cluster, me: int, disk: Disk) -> None:
        super().__init__(cluster, me, disk)
        self.replicas: dict[StreamId, SimReplica] = {}
        self.leaving: dict[StreamId, SimReplica] = {}
        self.contact_ms: dict[BrokerId, float] = {}
        self.calm = Calm()
        self.is_calm = False
        self.is_stopping = self.is_asked_to_stop = False
        for log in disk.logs.values():
            log.keep(log.synced)
        self.every(FETCH_EVERY_MS, self.fetch)

    def tick(self) -> None:
        super().tick()
        self.report("fit", (self.me, self.has_room))
        self.is_calm = self.calm.goes_on(self, self.world.now_ms, self.contact_ms)
        for replica in list(self.replicas.values()):
            replica.tick()

    def report_leaders(self) -> None:
        for replica in self.replicas.values():
            replica.report()

    # ---- from metadata to replicas ----

    def look_at_records(self) -> None:
        if not self.is_registered or self.is_stopping:
            return
        mine = {one.id: one for one in self.state.streams.values() if self.me in one.replicas}
        for stream_id, record in mine.items():
            replica = self.replicas.get(stream_id)
            if replica is None and stream_id not in self.leaving:
                replica = self.replicas[stream_id] = self.replica_type(self, record)
                replica.changed(record)
            elif replica is not None and replica.record is not record:
                replica.changed(record)
        for stream_id in sorted(set(self.replicas) - set(mine)):
            if (
                replica := self.replicas.pop(stream_id, None)
            ) is not None:  # closing one may have brought us here again
                self.leaving[stream_id] = replica
                replica.changed(None)
        self.delete_files()

    def let_go(self, replica: SimReplica) -> None:
        """Its log is closed for good, in this life."""
        if self.leaving.pop(replica.id, None) is not None:
            self.delete_files()
            self.look_at_records()

    def delete_files(self) -> None:
        """Where there is a tombstone for a replica, and only there, its files go."""
        for one in self.state.tombstones.values():
            if one.broker == self.me and one.id not in self.replicas and one.id not in self.leaving:
                self.disk.log_of(one.id).delete()
                self.disk.log_of(companion_id(one.id)).delete()

    # ---- what arrives ----

    def fetched(self, fetch: Fetch) -> None:
        self.contact_ms[fetch.sender] = self.world.now_ms
        if (replica := self.replicas.get(fetch.stream_id)) is not None:
            replica.fetched(fetch)
        elif (owner := self.owner_of(fetch.stream_id)) is not None:
            owner.companion.fetched(fetch)

    def answered(self, answer: Answer) -> None:
        if (replica := self.replicas.get(answer.stream_id)) is not None:
            replica.answered(answer)
        elif (owner := self.owner_of(answer.stream_id)) is not None:
            owner.companion.answered(answer)

    def owner_of(self, log_id: StreamId) -> SimReplica | None:
        """Of a companion log."""
        return self.replicas.get(stream_of_companion(log_id) or log_id)

    def requested(self, number: int, stream_id: StreamId = STREAM) -> None:
        """A change for the companion log."""
        if (replica := self.replicas.get(stream_id)) is not None:
            replica.companion.requested(number)

    def hand_over(self, where: tuple[StreamId, BrokerId]) -> None:
        stream_id, to = where
        if (replica := self.replicas.get(stream_id)) is not None:
            replica.hand_over(to)

    def published(self, message: int, stream_id: StreamId = STREAM) -> None:
        if (replica := self.replicas.get(stream_id)) is not None:
            replica.published(message)

    def fetch(self) -> None:
        for replica in self.replicas.values():
            replica.companion.fetch()
            replica.fetch()

    # ---- a graceful end ----

    def leave(self) -> None:
        """As a broker does on SIGTERM: announces it, transfers what it leads, leaves the rest, closes its logs."""
        self.is_asked_to_stop = True
        self.command(StopBroker(broker=self.me, incarnation=self.incarnation))
        self.transfer_when_announced(self.world.now_ms + ANNOUNCE_MS)

    @property
    def stopping(self) -> list[BrokerId]:
        """Those that have announced it."""
        return [one.id for one in self.state.brokers.values() if one.is_stopping]

    def transfer_when_announced(self, until_ms: float) -> None:
        if self.me not in self.stopping and self.world.now_ms < until_ms:
            self.when_awake_after(LOOK_AGAIN_MS, lambda: self.transfer_when_announced(until_ms))
            return
        for replica in list(self.replicas.values()):
            if (to := replica.machine.successor(self.stopping)) is not None:
                replica.hand_over(to)
        self.when_awake_after(TRANSFER_MS, self.leave_in_sync_replicas)

    def leave_in_sync_replicas(self) -> None:
        if (command := self.leaving_command()) is not None:
            self.command(command)
        self.when_awake_after(LEAVE_MS, self.close_all)

    def leaving_command(self) -> Command | None:
        ids = tuple(replica.id for replica in self.replicas.values() if replica.leave())
        return LeaveReplicas(broker=self.me, incarnation=self.incarnation, stream_ids=ids) if ids else None

    def close_all(self) -> None:
        self.is_stopping = True
        for replica in [*self.replicas.values(), *self.leaving.values()]:
            replica.stop()
        self.end(self.world.now_ms + CLOSE_MS)

    def end(self, until_ms: float) -> None:
        replicas = [*self.replicas.values(), *self.leaving.values()]
        is_finished = all(replica.machine.is_finished for replica in replicas)
        if is_finished or self.world.now_ms >= until_ms:
            self.cluster.crash(self.me, is_clean=is_finished)
        else:
            self.when_awake_after(LOOK_AGAIN_MS, lambda: self.end(until_ms))

    def when_awake_after(self, delay_ms: float, work: object) -> None:
        assert callable(work)
        self.world.after(delay_ms, lambda: self.when_awake(work))

    # ---- of the first stream: for walks and stories, which have one ----

    @property
    def first(self) -> SimReplica | None:
        return self.replicas.get(STREAM)

    @property
    def log(self) -> Log:
        return self.disk.log_of(STREAM)

    @property
    def record(self) -> StreamRecord | None:
        return self.state.streams.get(NAME)


class Broker(Roles, Process):
    """One life of one broker, in time."""
