"""A hosted stream with real files and threads, and stand-ins for what it only talks to: NATS and the metadata group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from natslog.cluster.activity import Kind
from natslog.cluster.commands import BackgroundCommand, BrokerRecord, Command, IsrChange
from natslog.cluster.features import LATEST_LEVEL
from natslog.cluster.metadata import Metadata
from natslog.config import BrokerConfig
from natslog.log import StoreLimit
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings
from natslog.node.cluster_clock import ClusterClock
from natslog.node.replicas.replicated_log import ReplicatedLog
from natslog.node.replicas.services import Services
from natslog.node.replicas.stream import HostedStream
from natslog.node.replicas.surroundings import BrokerSurroundings
from natslog.node.supervisor import Supervisor
from natslog.node.writes.ingest_memory import IngestMemory
from tests.conftest import rows

ME, OTHER = BrokerId(1), BrokerId(2)
INCARNATION = "folder.1"


class Nats:
    """Records what is subscribed."""

    def __init__(self) -> None:
        self.is_up = True
        self.subjects: list[str] = []

    def lane(self, stream_id: str) -> Nats:
        return self

    async def attach(self, subjects: tuple[str, ...], receiver: Any, *, queue: str = "") -> object:
        self.subjects += subjects
        return subjects

    async def move(self, handle: object, subjects: tuple[str, ...]) -> None:
        self.subjects[:] = subjects

    async def detach(self, handle: object) -> None:
        self.subjects.clear()

    async def flush(self, timeout_s: float) -> None: ...

    def send_now(self, protocol: bytes | memoryview) -> bool:
        return True


async def _nothing(*_: object) -> None:
    pass


_JETSTREAM: Any = SimpleNamespace(
    consumers=SimpleNamespace(lead=_nothing, end=_nothing),
    advisories=SimpleNamespace(began_to_lead=lambda stream: None),
    direct_subjects=lambda record: (),
    receive_direct=lambda stream, frames: None,
    domain=lambda: "",
)


class ReplicaStage:
    """Broker 1 with its folder; the test is the metadata.

    Args: `me`: another broker. `state`: metadata that several stages share.

    Attributes:
        proposed: commands and ISR changes, in order. `bugs`: errors that must have stopped the broker.
    """

    def __init__(
        self,
        folder: Path,
        executor: Executor,
        readers: Executor | None = None,
        *,
        me: BrokerId = ME,
        state: Metadata | None = None,
    ) -> None:
        self.folder, self.me = folder, me
        self.config = BrokerConfig(broker_id=me, data_dir=str(folder), min_free_bytes=0)
        broker = BrokerRecord(id=ME, url="", directory="folder", life=1)
        self.state = state or Metadata(cluster_id="c", feature_level=LATEST_LEVEL, brokers={ME: broker})
        self.has_session = True
        self.disk = SimpleNamespace(free_bytes=2**60, measured_s=0.0)
        self.nats, self.followed = Nats(), list[ReplicatedLog]()
        self.proposed: list[Command | IsrChange] = []
        self.bugs: list[BaseException] = []
        data_dir = SimpleNamespace(
            incarnation=self.state.brokers[me].incarnation,
            after="",
            stream_folder=lambda stream_id, _: folder / stream_id,
        )
        group = SimpleNamespace(state=self.state, has_session=lambda: self.has_session, disk=self.disk)
        clock = ClusterClock(me, folder / "clock")
        clock.refresh([me])
        store = StoreLimit(None)
        self.services = Services(
            config=self.config,
            data_dir=data_dir,  # type: ignore[arg-type]
            group=group,  # type: ignore[arg-type]
            clock=clock,
            nats=self.nats,  # type: ignore[arg-type]
            writers=executor,
            readers=readers or executor,
            memory=IngestMemory(2**20),
            store=store,
            around=BrokerSurroundings(self.config, data_dir, group, clock, store),  # type: ignore[arg-type]
            tasks=Supervisor(self.halt),
            proposals=self,  # type: ignore[arg-type]
            host=self,
            broker=self,
        )

    # ---- the broker ----

    jetstream_api = _JETSTREAM

    def halt(self, what: str, error: BaseException) -> None:
        self.bugs.append(error)

    def report_replica(self, kind: Kind, name: str, stream_id: str, message: str) -> None:
        pass

    def damage_found(self) -> None:
        pass

    def upkeep_due(self) -> None:
        pass

    # ---- what holds its replicas ----

    def follow(self, leader: BrokerId, log: ReplicatedLog) -> None:
        if log not in self.followed:
            self.followed.append(log)

    def forget(self, log: ReplicatedLog) -> None:
        if log in self.followed:
            self.followed.remove(log)

    def propose(self, command: BackgroundCommand) -> None:
        self.proposed.append(command)

    def propose_isr(self, change: IsrChange) -> None:
        self.proposed.append(change)

    def appointed(self, record: StreamRecord) -> None:
        pass

    async def prepare_successor(self, to: BrokerId, stream_id: StreamId) -> None:
        pass

    # ---- the test ----

    async def host(self, record: StreamRecord) -> HostedStream:
        """A replica, reconciled with its record."""
        stream = HostedStream(record, self.me, self.services)
        await self.change(stream, record)
        return stream

    async def change(self, stream: HostedStream, record: StreamRecord | None = None, **changes: Any) -> None:
        """The metadata says this now; returns when the replica has done what follows."""
        record = record or msgspec.structs.replace(stream.record, version=stream.record.version + 1, **changes)
        stream.driver.changed(record)
        await self.wait_until_idle(stream)

    async def wait_until_idle(self, stream: HostedStream) -> None:
        async with asyncio.timeout(20):
            while stream.driver._task is not None:
                await stream.reconciled.wait()


def record_of(name: str = "orders", **changes: Any) -> StreamRecord:
    """Broker 1 leads epoch 1; broker 2 is in sync too."""
    settings = changes.pop("settings", StreamSettings(subject=f"{name}.>", replicas=2, min_isr=1))
    record = StreamRecord(
        name=name,
        id=StreamId(name.encode().hex().ljust(32, "0")),
        settings=settings,
        created_us=0,
        leader=ME,
        leader_epoch=Epoch(1),
        replicas=(ME, OTHER),
        isr=(ME, OTHER),
        holders=(ME, OTHER),
    )
    return msgspec.structs.replace(record, **changes)


def new_record(name: str = "orders", **changes: Any) -> StreamRecord:
    """Of a stream that was created just now: no broker has told that its log exists."""
    return record_of(name, holders=(), **changes)


def append(stream: HostedStream, value: bytes) -> None:
    log = stream.usable_log()
    log.append(rows([value]), 1_000_000)
    stream.driver.appended(log.log_end_offset)


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def run(folder: Path, story: Callable[[ReplicaStage], Awaitable[None]]) -> None:
    """Runs a test in an event loop of its own; no task may have failed."""

    async def told() -> None:
        with threads() as executor:
            stage = ReplicaStage(folder, executor)
            await story(stage)
            assert stage.bugs == []

    asyncio.run(told())
