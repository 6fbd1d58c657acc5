"""One life of a broker's process in the simulation: its disk, its time, its part in Raft and the metadata.

What stands here in place of files, sockets and tasks is as thin as it can be; what decides is the production code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from natslog.cluster.commands import BrokerRecord, Command, Proposal, RegisterBroker
from natslog.cluster.controller import Controller
from natslog.cluster.epochs import EpochHistory
from natslog.cluster.lease import Lease
from natslog.cluster.metadata import Metadata
from natslog.cluster.stream_time import ClockReading
from natslog.consensus import HardState, Index, Raft, Snapshot, Term
from natslog.errors import NotMetadataLeader
from natslog.model import BrokerId, Epoch, StreamId
from tests.sim.cluster_clocks import ASK_EVERY_MS as ASK_CLOCKS_EVERY_MS
from tests.sim.cluster_clocks import FIRST_US, BrokerClocks

if TYPE_CHECKING:
    from tests.sim.cluster_world import Cluster

NAMES = ("orders", "returns", "payments")
IDS = {name: StreamId(f"{at:032x}") for at, name in enumerate(NAMES, 1)}
NAME, STREAM = NAMES[0], IDS[NAMES[0]]
TICK_MS = 100.0
SESSION_TICKS = 30
ASK_EVERY_MS = 500.0
COMPACT_ENTRIES = 40

_decode = msgspec.msgpack.Decoder(Proposal).decode
encode = msgspec.msgpack.encode

Entry = tuple[int, int]
"""A record of the stream: (epoch, message)."""


@dataclass(slots=True)
class Log:
    """One replica's log on its disk: `synced` records survive a crash, `checkpoint` is the HW found after one.

    `exists`: the folder is there. `is_damaged`: a hole was found where the records end now. `dropped`: the offsets of
    removed messages whose rows the files lack. `kept_ids`: offsets of such messages whose ids are kept; `ids_serial`
    counts the changes.
    """

    records: list[Entry] = field(default_factory=list)
    synced: int = 0
    checkpoint: int = 0
    exists: bool = False
    is_damaged: bool = False
    dropped: set[int] = field(default_factory=set)
    kept_ids: set[int] = field(default_factory=set)
    ids_serial: int = 0

    def drop(self, offsets: set[int]) -> None:
        """Removed messages from the files; their ids stay."""
        self.kept_ids |= offsets
        self.ids_serial += 1
        self.dropped |= offsets

    def epochs(self) -> EpochHistory:
        history = EpochHistory()
        for at, (epoch, _) in enumerate(self.records):
            history.begin(Epoch(epoch), at)
        return history

    def keep(self, end: int) -> None:
        """Nothing from `end` on is left."""
        del self.records[end:]
        self.dropped = {offset for offset in self.dropped if offset < end}
        self.synced = min(self.synced, end)
        self.checkpoint = min(self.checkpoint, end)

    def delete(self) -> None:
        """The folder is gone."""
        self.keep(0)
        self.kept_ids = set()
        self.exists = self.is_damaged = False


@dataclass(slots=True)
class Disk:
    """What survives a crash. `clean_life`: the one that ended gracefully. `is_full`: logs accept no more data.

    `copy_number`: of the restored copies of disks, this one; 0 for a disk that is none.
    """

    hard_state: HardState = field(default_factory=HardState)
    snapshot: Snapshot = field(default_factory=Snapshot)
    entries: list[Any] = field(default_factory=list)
    logs: dict[StreamId, Log] = field(default_factory=dict)
    lives: list[str] = field(default_factory=list)
    clean_life: str = ""
    is_full: bool = False
    copy_number: int = 0

    def copied(self, copy_number: int) -> Disk:
        """As it is now; what changes later is another disk's."""
        logs = {
            key: replace(log, records=list(log.records), dropped=set(log.dropped), kept_ids=set(log.kept_ids))
            for key, log in self.logs.items()
        }
        lists = {"entries": list(self.entries), "lives": list(self.lives)}
        return replace(self, logs=logs, copy_number=copy_number, **lists)

    def log_of(self, stream_id: StreamId) -> Log:
        return self.logs.setdefault(stream_id, Log())


class Life:
    """One life of a process on a disk: time, fsync, and what it knows of the metadata."""

    def __init__(self, cluster: Cluster, me: int, disk: Disk) -> None:
        self.cluster, self.world, self.me, self.disk = cluster, cluster.world, BrokerId(me), disk
        life = len(disk.lives) + 1
        record = BrokerRecord(id=self.me, url="", directory=str(me), life=life, nonce=nonce_of(life, disk))
        self.incarnation = record.incarnation
        disk.lives.append(self.incarnation)
        self.is_up = True
        self.began_ms = self.world.now_ms
        self.is_paused = False
        self.ended: set[BrokerId] = set()  # brokers whose processes have ended, as far as this one has noticed
        self.inbox: list[Callable[[], None]] = []
        self.state = state_of(disk.snapshot)
        after, disk.clean_life = disk.clean_life, ""
        self.listed = listed_lives(self.me, disk)
        registration = RegisterBroker(broker=record, after=after, lives=self.listed)
        self.registration = Proposal(id=self.incarnation, command=registration)

    @property
    def is_registered(self) -> bool:
        known = self.state.brokers.get(self.me)
        return known is not None and known.incarnation == self.incarnation

    @property
    def has_room(self) -> bool:
        return not self.disk.is_full

    @property
    def has_time(self) -> bool:
        return True

    def admits(self, broker: BrokerId, listed: Sequence[str]) -> bool:
        """Whether there may be a connection with the life whose folder lists these lives."""
        known = self.state.brokers.get(broker)
        return known is None or known.incarnation in listed

    def reading(self) -> ClockReading:
        """Of all clocks that are known here. Without time, there is one clock, and it stands still."""
        return ClockReading(FIRST_US, 0)

    def command(self, command: Command) -> None:
        self.cluster.proposals += 1
        self.propose(Proposal(id="", command=command))

    # ---- time ----

    def every(self, interval_ms: float, work: Callable[[], None]) -> None:
        def again() -> None:
            if self.is_up:
                if not self.is_paused:
                    work()
                self.world.after(interval_ms, again)

        self.world.after(self.world.random.uniform(0, interval_ms), again)

    def when_awake(self, work: Callable[[], None]) -> None:
        """Now, or in its turn when the process is continued; never in another life."""
        if self.is_paused:
            self.inbox.append(work)
        elif self.is_up:
            work()

    def pause(self, duration_ms: float) -> None:
        self.is_paused = True
        self.world.after(duration_ms, self.wake)

    def wake(self) -> None:
        self.is_paused = False
        waiting, self.inbox = self.inbox, []
        for work in waiting:
            self.when_awake(work)

    def sync(self, done: Callable[[], None]) -> None:
        """An fsync that takes its time."""
        slow = self.cluster.slow_disk == self.me
        self.world.after(self.world.random.uniform(0.2, 400.0 if slow else 4.0), lambda: self.when_awake(done))

    # ---- what differs ----

    @property
    def has_session(self) -> bool:
        raise NotImplementedError

    @property
    def may_state_positions(self) -> bool:
        """Whether what is known here of the metadata is recent enough."""
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError

    def propose(self, proposal: Proposal) -> None:
        raise NotImplementedError

    def report(self, method: str, message: Any) -> None:
        """Tells the metadata leader."""
        raise NotImplementedError

    def barrier(self, then: Callable[[], None]) -> None:
        """Calls `then` when all of the metadata that anyone was told of before now is known here; never, if nobody can
        say so.
        """
        raise NotImplementedError

    def look_at_records(self) -> None:
        """The metadata may have changed."""
        raise NotImplementedError

    def report_leaders(self) -> None:
        """Those that do not respond, or have ended."""
        raise NotImplementedError


class Process(Life):
    """With Raft and (while it leads Raft) the controller."""

    def __init__(self, cluster: Cluster, me: int, disk: Disk) -> None:
        super().__init__(cluster, me, disk)
        self.raft = Raft(
            me=self.me,
            hard_state=disk.hard_state,
            snapshot=disk.snapshot,
            entries=tuple(disk.entries),
            seed=cluster.world.random.getrandbits(32),
        )
        self.raft.trailing_entries = 10
        self.applied = disk.snapshot.index
        self.controller: tuple[Term, Controller] | None = None
        self.lives = {self.me: self.incarnation}
        self.reads = 0
        self.confirmed: dict[int, Callable[[int], None]] = {}
        self.barriers: list[tuple[int, Callable[[], None]]] = []
        self.lease = Lease()
        self.clocks = BrokerClocks(self)
        self.committed_before = min(disk.hard_state.commit, disk.entries[-1].index if disk.entries else self.applied)
        self.every(TICK_MS, self.tick)
        self.every(ASK_EVERY_MS, self.keep_lease)
        self.every(ASK_CLOCKS_EVERY_MS, self.clocks.ask)

    # ---- metadata ----

    def tick(self) -> None:
        self.raft.tick()
        if not self.is_registered:
            self.propose(self.registration)
        if self.raft.role == "leader":
            self.control()
        self.pump()

    @property
    def has_session(self) -> bool:
        return self.raft.ticks_since_leader() < SESSION_TICKS

    @property
    def may_state_positions(self) -> bool:
        return self.has_session and self.lease.is_valid(self.world.now_ms / 1000)

    def keep_lease(self) -> None:
        asked_s = self.world.now_ms / 1000
        self.barrier(lambda: self.lease.confirmed(asked_s))

    def pump(self) -> None:
        disk = self.disk
        while (ready := self.raft.ready()) is not None:
            if ready.snapshot is not None:
                disk.snapshot, disk.entries = ready.snapshot, []
                self.state, self.applied = state_of(ready.snapshot), ready.snapshot.index
            if ready.truncate_from is not None:
                disk.entries = [entry for entry in disk.entries if entry.index < ready.truncate_from]
            disk.entries += ready.entries
            if ready.hard_state is not None:
                disk.hard_state = ready.hard_state
            for message in ready.messages:
                self.cluster.send(self.me, message.to, "step", (self.incarnation, message))
            for entry in ready.committed:
                self.apply(entry)
            self.raft.advance(ready)
            for read in ready.reads:
                self.confirmed.pop(read.context, lambda index: None)(read.index)
            if ready.committed or ready.snapshot is not None:
                self.look_at_records()
        if self.applied - disk.snapshot.index > COMPACT_ENTRIES:
            self.compact()
        passed = [then for index, then in self.barriers if index <= self.applied]
        self.barriers = [(index, then) for index, then in self.barriers if index > self.applied]
        for then in passed:
            then()

    def admits(self, broker: BrokerId, listed: Sequence[str]) -> bool:
        """Not before all is applied that was known to be committed when the former life ended."""
        return self.applied >= self.committed_before and super().admits(broker, listed)

    # ---- clocks ----

    @property
    def has_time(self) -> bool:
        return len(self.cluster.numbers) == 1 or self.reading().agreed_us is not None

    def reading(self) -> ClockReading:
        return self.clocks.reading()

    def asked_for_clock(self, asker: BrokerId) -> None:
        self.cluster.send(self.me, asker, "told_clock", (self.me, self.clocks.wall_us))

    def told_clock(self, answer: tuple[BrokerId, int]) -> None:
        self.clocks.told(*answer)

    # ---- linearizable reads ----

    def barrier(self, then: Callable[[], None]) -> None:
        def confirmed(index: int) -> None:
            self.barriers.append((index, then))
            self.pump()

        if self.raft.role == "leader":
            self.read_index(confirmed)
        elif self.raft.leader is not None:
            self.cluster.send(self.me, self.raft.leader, "asked_for_index", (self.me, confirmed))

    def read_index(self, confirmed: Callable[[int], None]) -> None:
        self.reads += 1
        try:
            self.raft.read_index(self.reads)
        except NotMetadataLeader:
            return
        self.confirmed[self.reads] = confirmed
        self.pump()

    def asked_for_index(self, question: tuple[BrokerId, Callable[[int], None]]) -> None:
        asker, confirmed = question
        self.read_index(lambda index: self.cluster.send(self.me, asker, "told_index", (confirmed, index)))

    def told_index(self, answer: tuple[Callable[[int], None], int]) -> None:
        confirmed, index = answer
        confirmed(index)

    def apply(self, entry: Any) -> None:
        self.applied = entry.index
        if entry.kind == "command":
            proposal = _decode(entry.data)
            outcome = self.state.decide(proposal)
            self.cluster.checker.applied(self, entry.index, proposal, outcome)

    def compact(self) -> None:
        disk = self.disk
        disk.snapshot = self.raft.compact(Index(self.applied), encode(self.state))
        disk.entries = [entry for entry in disk.entries if entry.index >= self.raft.log.anchor_index]

    def step(self, received: tuple[str, Any]) -> None:
        incarnation, message = received
        self.lives[message.sender] = incarnation  # a connection is of one life of either side
        self.raft.step(message)
        self.pump()

    def propose(self, proposal: Proposal) -> None:
        """To the metadata leader; in bad times also, later, to whoever is met (as a request that is retried)."""
        if self.raft.role == "leader":
            self.proposed(proposal)
        elif self.raft.leader is not None:
            self.cluster.send(self.me, self.raft.leader, "proposed", proposal)
        if self.world.late_share and self.world.random.random() < 0.3:
            to = self.world.random.choice(self.cluster.numbers)
            late_ms = self.world.random.uniform(100, 4000)
            self.world.after(late_ms, lambda: self.cluster.send(self.me, to, "proposed", proposal))

    def process_ended(self, broker: BrokerId) -> None:
        self.ended.add(broker)
        self.raft.member_ended(broker)
        self.pump()
        self.report_leaders()

    def report(self, method: str, message: Any) -> None:
        if self.raft.leader is not None:
            self.cluster.send(self.me, self.raft.leader, method, message)

    def proposed(self, proposal: Proposal) -> None:
        try:
            self.raft.propose(encode(proposal))
        except NotMetadataLeader:
            return
        self.pump()

    def control(self) -> None:
        if self.controller is None or self.controller[0] != self.raft.term:
            self.controller = (self.raft.term, Controller(self.world.now_ms))
        active = self.raft.active_within(SESSION_TICKS)
        known = self.state.brokers
        alive = {one for one in active if one in known and known[one].incarnation == self.lives.get(one)}
        decisions = self.controller[1].decide(self.state, alive, self.world.now_ms)
        for command in decisions.commands:
            self.command(command)
        for handover in decisions.transfers:
            self.cluster.send(self.me, handover.leader, "hand_over", (handover.stream_id, handover.to))

    def reported(self, report: tuple[StreamId, BrokerId, Epoch]) -> None:
        if self.controller is not None and self.raft.role == "leader":
            stream_id, by, epoch = report
            self.controller[1].reported_unresponsive(stream_id, epoch, by, self.world.now_ms)

    def positioned(self, where: tuple[StreamId, BrokerId, int, Epoch, int]) -> None:
        if self.controller is not None and self.raft.role == "leader":
            stream_id, by, version, last_epoch, end = where
            self.controller[1].reported_position(stream_id, version, by, last_epoch, end, self.world.now_ms)

    def fit(self, report: tuple[BrokerId, bool]) -> None:
        """Whether a broker can take messages."""
        if self.controller is not None and self.raft.role == "leader":
            self.controller[1].reported_nats(*report, self.world.now_ms)


def listed_lives(number: BrokerId, disk: Disk) -> tuple[str, ...]:
    """With the one that the cluster was founded with."""
    return (f"{number}.0.n0", *disk.lives)


def nonce_of(life: int, disk: Disk) -> str:
    """Of a life on this disk, and on no copy of it."""
    return f"n{life}c{disk.copy_number}" if disk.copy_number else f"n{life}"


def state_of(snapshot: Snapshot) -> Metadata:
    if not snapshot.data:
        return Metadata(cluster_id="sim")
    return msgspec.msgpack.decode(snapshot.data, type=Metadata)
