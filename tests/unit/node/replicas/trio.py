"""Three brokers in one process: hosted streams on real files that copy from each other over links in memory. The
metadata is one state, to which proposals are applied at once; the test appoints leaders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from natslog.cluster.commands import (
    AppointLeaders,
    Appointment,
    BackgroundCommand,
    BrokerRecord,
    ChangeIsrs,
    Command,
    CreateStream,
    IsrChange,
    RegisterBroker,
)
from natslog.cluster.features import LATEST_LEVEL
from natslog.cluster.metadata import Metadata
from natslog.model import BrokerId, StreamId, StreamRecord, StreamSettings, stream_of_companion
from natslog.node.clock import monotonic_ms
from natslog.node.peers.messages import FetchRequest, FetchResponse
from natslog.node.replicas.fetch_sessions import FetchSession
from natslog.node.replicas.fetcher import Fetcher
from natslog.node.replicas.replicated_log import ReplicatedLog
from natslog.node.replicas.stream import HostedStream
from natslog.node.writes.pace import DiskPace
from tests.unit.node.replicas.replica_stage import ReplicaStage, append

NAME, STREAM = "orders", StreamId("ab" * 16)
_TICK_S = 0.02
_WITHIN_S = 30.0
Delivered = tuple[int, str, bytes]


class Link:
    """From a follower to its leader."""

    def __init__(self, trio: Trio, follower: BrokerId, leader: BrokerId) -> None:
        self.trio, self.follower, self.leader = trio, follower, leader
        self.peer: object = None
        self._on_fetched: Any = None

    def begin_fetching(self, on_fetched: Any) -> None:
        self._on_fetched = on_fetched

    def send(self, request: FetchRequest) -> bool:
        self.trio.spawn(self._serve(request))
        return True

    async def _serve(self, request: FetchRequest) -> None:
        session = self.trio.session(self.leader, self.follower, request)
        session.serve(request, self._reply)

    def _reply(self, response: FetchResponse, payload: list[bytes]) -> None:
        if (self.follower, self.leader) not in self.trio.cut:
            self._on_fetched(response, memoryview(b"".join(payload)))


class _Stage(ReplicaStage):
    """One broker: its proposals are applied, and its replicas follow those of the others."""

    def __init__(self, trio: Trio, me: BrokerId) -> None:
        super().__init__(trio.folder / str(me), trio.executor, me=me, state=trio.state)
        self._trio = trio

    def follow(self, leader: BrokerId, log: ReplicatedLog) -> None:
        self._trio.fetcher(self.me, leader).follow(log)

    def forget(self, log: ReplicatedLog) -> None:
        for fetcher in self._trio.fetchers_of(self.me):
            fetcher.forget(log)

    def propose(self, command: BackgroundCommand) -> None:
        self._trio.apply(command)

    def propose_isr(self, change: IsrChange) -> None:
        self._trio.apply(ChangeIsrs(broker=self.me, changes=(change,)))


class Trio:
    """Attributes: `given`: what the owner of each replica was given. `cut`: (follower, leader) pairs that are
    disconnected.
    """

    def __init__(self, folder: Path, executor: ThreadPoolExecutor, *, replicas: int, min_isr: int) -> None:
        self.folder, self.executor = folder, executor
        self.numbers = tuple(BrokerId(one) for one in range(1, replicas + 1))
        self.state = Metadata(cluster_id="c", feature_level=LATEST_LEVEL)
        settings = StreamSettings(subject=f"{NAME}.>", replicas=replicas, min_isr=min_isr)
        for number in self.numbers:
            self._register(number, 1)
        self.state.apply(CreateStream(name=NAME, id=STREAM, settings=settings, created_us=0, placement=self.numbers))
        self.stages: dict[BrokerId, ReplicaStage] = {}
        self.streams: dict[BrokerId, HostedStream] = {}
        self.given: dict[BrokerId, list[Delivered]] = {}
        self.cut: set[tuple[BrokerId, BrokerId]] = set()
        self._sessions: dict[tuple[BrokerId, BrokerId], FetchSession] = {}
        self._fetchers: dict[tuple[BrokerId, BrokerId], Fetcher] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._bugs: list[BaseException] = []
        self._is_spread = True

    def _register(self, number: BrokerId, life: int, *, is_clean: bool = False) -> None:
        known = self.state.brokers.get(number)
        after = known.incarnation if is_clean and known is not None else ""
        broker = BrokerRecord(id=number, url="", directory=f"d{number}", life=life, nonce="n")
        lives = (*([known.incarnation] if known is not None else []), broker.incarnation)
        self.state.apply(RegisterBroker(broker=broker, after=after, lives=lives))

    # ---- what brokers do ----

    def start(self, number: int, companion_from: int = 0) -> HostedStream:
        me = BrokerId(number)
        stage = self.stages[me] = _Stage(self, me)
        stream = self.streams[me] = HostedStream(self.record, me, stage.services)
        given = self.given[me] = []
        stream.companion.on_records, stream.companion.start = given.extend, companion_from
        stream.driver.changed(self.record)
        return stream

    def fetcher(self, me: BrokerId, leader: BrokerId) -> Fetcher:
        if (me, leader) not in self._fetchers:
            link: Any = Link(self, me, leader)
            self._fetchers[me, leader] = Fetcher(
                leader,
                link=lambda: None if (me, leader) in self.cut or leader not in self.streams else link,
                incarnation=self.state.brokers[me].incarnation,
                executor=self.executor,
                pace=DiskPace(),
                on_bug=lambda what, error: self._bugs.append(error),
            )
        return self._fetchers[me, leader]

    def fetchers_of(self, me: BrokerId) -> list[Fetcher]:
        return [fetcher for (follower, _), fetcher in self._fetchers.items() if follower == me]

    def session(self, leader: BrokerId, follower: BrokerId, request: FetchRequest) -> FetchSession:
        known = self._sessions.get((leader, follower))
        if known is None or request.begins or known.incarnation != request.incarnation:
            if known is not None:
                known.close()
            known = FetchSession(follower, lambda log_id: self._find(leader, log_id), self.executor, self.spawn)
            self._sessions[leader, follower] = known
        return known

    def _find(self, broker: BrokerId, log_id: StreamId) -> ReplicatedLog | None:
        stream = self.streams.get(broker)
        if stream is None or not stream_of_companion(log_id):
            return None if stream is None else stream.messages
        return None if stream.companion.log is None else stream.companion.log.replicated

    async def stop(self, number: int) -> None:
        """In order."""
        stream = self.streams.pop(BrokerId(number))
        await self._stop_fetching(number)
        await stream.driver.stop()

    async def kill(self, number: int) -> None:
        """Nothing is closed; what it writes from now on is of no use to anyone."""
        self.streams.pop(BrokerId(number))
        await self._stop_fetching(number)

    async def _stop_fetching(self, number: int) -> None:
        for follower, leader in list(self._fetchers):
            if follower == number:
                await self._fetchers.pop((follower, leader)).close()
        for leader, follower in list(self._sessions):
            if number in (leader, follower):
                self._sessions.pop((leader, follower)).close()

    def restart(self, number: int, companion_from: int = 0, *, is_clean: bool = False) -> HostedStream:
        self._register(BrokerId(number), self.state.brokers[BrokerId(number)].life + 1, is_clean=is_clean)
        self._spread_soon()
        return self.start(number, companion_from)

    # ---- the metadata ----

    @property
    def record(self) -> StreamRecord:
        return self.state.streams[NAME]

    def apply(self, command: Command) -> None:
        self.state.apply(command)
        self._spread_soon()

    def _spread_soon(self) -> None:
        if self._is_spread:
            self._is_spread = False
            asyncio.get_running_loop().call_soon(self._spread)

    def _spread(self) -> None:
        self._is_spread = True
        for stream in list(self.streams.values()):
            if stream.record is not self.record:
                stream.driver.changed(self.record)

    def appoint(self, leader: int, *isr: int) -> None:
        members = tuple(BrokerId(one) for one in isr)
        appointment = Appointment(stream_id=STREAM, version=self.record.version, leader=BrokerId(leader), isr=members)
        self.apply(AppointLeaders(appointments=(appointment,)))
        assert self.record.leader == leader, f"not appointed: {self.record}"

    # ---- time ----

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for number, stream in list(self.streams.items()):
                contact_ms = {
                    follower: session.last_contact_s * 1000
                    for (leader, follower), session in self._sessions.items()
                    if leader == number
                }
                stream.driver.tick(contact_ms)

    def spawn(self, work: Any, name: str = "") -> None:
        task = asyncio.create_task(work, name=name or None)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Returns when the condition holds."""
        deadline_ms = monotonic_ms() + 1000 * _WITHIN_S
        while not condition():
            assert monotonic_ms() < deadline_ms, f"{what or 'it'} did not come true: {self.record}, {self.given}"
            await asyncio.sleep(0.005)

    async def led(self, number: int) -> HostedStream:
        """When it leads and serves."""
        stream = self.streams[BrokerId(number)]
        await self.until(lambda: stream.is_leading, f"broker {number} leads")
        return stream

    async def in_sync(self, *numbers: int) -> None:
        await self.until(lambda: set(self.record.isr) == set(numbers), f"{numbers} are in sync")

    async def all_given(self, *values: bytes) -> None:
        """When every replica that is up was given exactly these, in this order."""
        wanted = list(values)
        await self.until(
            lambda: all([value for *_, value in self.given[one]] == wanted for one in self.streams), "all are given"
        )

    def publish(self, value: bytes) -> None:
        """To the leader's log of messages."""
        assert self.record.leader is not None, "there is a leader"
        append(self.streams[self.record.leader], value)

    async def end(self) -> None:
        for number in list(self.streams):
            await self.stop(number)
        for task in list(self._tasks):
            task.cancel()
        bugs = self._bugs + [bug for stage in self.stages.values() for bug in stage.bugs]
        assert not bugs, bugs


def run(
    folder: Path,
    story: Callable[[Trio], Awaitable[None]],
    *,
    replicas: int = 3,
    min_isr: int = 2,
) -> None:
    """Runs a test with all brokers up, and broker 1 leading."""

    async def told() -> None:
        with ThreadPoolExecutor(4) as executor:
            trio = Trio(folder, executor, replicas=replicas, min_isr=min_isr)
            for number in trio.numbers:
                trio.start(number)
            ticking = asyncio.create_task(trio.tick())
            try:
                await trio.led(1)
                await story(trio)
                await trio.end()
            finally:
                ticking.cancel()

    asyncio.run(told())
