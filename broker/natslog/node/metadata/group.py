"""This broker's member of the metadata group: Raft with a store, links and a clock, and the state machine.

Theory of operation. Every broker is a member and applies every command, so it has the same state as all, with a short
delay. A change is proposed with its own id to the metadata leader, repeatedly, until its outcome is applied from the
log on this broker. A client therefore reads its own writes, and a retry is applied once. One task drives Raft: save (in
a thread), then send, then apply.

Invariants. Nothing is sent before the data that it depends on is saved, and nothing at all while the disk hangs. A save
that fails stops the broker, because its promises can no longer be verified. `state` changes between two steps of the
event loop, never within one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from natslog.cluster.commands import BackgroundCommand, Command, Outcome, Proposal, needs_room
from natslog.cluster.encoding import decode_state, encode_proposal, encode_state
from natslog.cluster.metadata import Metadata
from natslog.consensus import (
    AppendRequest,
    HardState,
    Index,
    Member,
    Membership,
    Message,
    Raft,
    Ready,
    Snapshot,
    SnapshotChunk,
    Term,
    require_storable,
)
from natslog.errors import (
    InvalidRequest,
    MembershipChanging,
    MetadataUnavailable,
    NatslogError,
    NotMetadataLeader,
    Overloaded,
    StorageFull,
    UpgradeRequired,
    from_json,
)
from natslog.log_events import event
from natslog.model import BrokerId
from natslog.node.clock import monotonic_ms
from natslog.node.disk_reserve import DiskReserve
from natslog.node.metadata.changes import RecentChanges
from natslog.node.metadata.disk_pulse import DiskPulse
from natslog.node.metadata.entries import (
    ElapsedTime,
    Request,
    check_entries,
    check_message,
    commands_of,
    highest_level,
)
from natslog.node.metadata.raft_store import RaftStore

logger = logging.getLogger("natslog.metadata")

TICK_S = 0.1
ELECTION_TICKS = 10
SESSION_TICKS = 30
_PROPOSE_AGAIN_S = 1.0
_PROPOSE_WITHIN_S = 10.0
_COMPACT_EVERY = 1024
_MOST_UNCOMMITTED = 2048


def founding_snapshot(state: Metadata, members: tuple[Member, ...]) -> Snapshot:
    """The initial state of a new group: its first members, and a metadata state."""
    return Snapshot(index=Index(1), term=Term(1), membership=Membership(members=members), data=encode_state(state))


class MetadataGroup:
    """Opens the stored state; `start` starts the clock.

    Args:
        send: passes Raft's messages to the links. forward: passes a proposal to the metadata leader's broker.
        on_applied: called in the event loop after commands were applied. on_leader: called when another broker leads,
            or none does.
        on_bug: called with the error that stopped the group: the broker must stop. raise_level: stores a feature level
        in the folder, durably (blocking), so that an older natslog refuses it. It is
            called before anything of that level is stored.

    Raises:
        CorruptLog, DataDirError: what was stored cannot be read; the broker must not start.
    """

    def __init__(
        self,
        folder: Path,
        me: BrokerId,
        *,
        send: Callable[[list[Message]], None],
        forward: Callable[[BrokerId, Proposal], None],
        on_applied: Callable[[], None],
        on_leader: Callable[[], None],
        on_bug: Callable[[str, BaseException], None],
        raise_level: Callable[[int], None],
    ) -> None:
        self.reserve = DiskReserve(folder / "reserve")
        self.store = RaftStore(folder, reserve=self.reserve)
        self.disk = DiskPulse(folder / "pulse", self.reserve)
        self.me = me
        self._send, self._forward, self._on_bug = send, forward, on_bug
        self._on_applied, self._on_leader = on_applied, on_leader
        self._raise_level = raise_level
        self._elapsed = ElapsedTime()
        self.changes = RecentChanges()
        self.elections = 0
        self._leader_seen_s = 0.0  # of the monotonic clock
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="raft")
        self._news = asyncio.Event()
        self._applied_something = asyncio.Event()
        self._led_by: BrokerId | None = None
        self._another_leads: asyncio.Future[None]
        self._waiting: dict[str, list[asyncio.Future[Outcome]]] = {}  # of each request that waits, by proposal
        self._reads: dict[int, asyncio.Future[Index]] = {}
        self._read_numbers = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._open()

    def _open(self) -> None:
        store = self.store
        self.state = decode_state(store.snapshot.data)
        check_entries(store.entries)
        self._raise_level(self.state.feature_level)
        self.raft = Raft(
            me=self.me,
            hard_state=store.hard_state,
            snapshot=store.snapshot,
            entries=store.entries,
            seed=secrets.randbits(32),
            election_ticks=ELECTION_TICKS,
        )
        self._compacted = store.snapshot.index

    def found(self, snapshot: Snapshot) -> None:
        """Starts a new group from this snapshot; nothing may have been stored before."""
        assert self.store.is_blank, "a group is founded once"
        self._raise_level(decode_state(snapshot.data).feature_level)
        self.store.save(HardState(term=snapshot.term, commit=snapshot.index), None, (), snapshot)
        self._open()

    def start(self) -> None:
        self._leader_seen_s = time.monotonic()
        self._another_leads = asyncio.get_running_loop().create_future()
        self.disk.start(self._on_bug)
        self._tasks = [
            asyncio.create_task(self._tick(), name="metadata clock"),
            asyncio.create_task(self._drive(), name="metadata group"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._watch)
        if self.raft.membership.voters == (self.me,):
            self.raft.campaign()
        self._news.set()

    def _watch(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(task.get_name(), error)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._saver.shutdown(wait=True)
        self.disk.close()
        self.store.close()

    # ---- driving ----

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.raft.tick()
            self._note_leader()
            self._news.set()

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        was_leader = False
        while True:
            await self._news.wait()
            self._news.clear()
            while (ready := self.raft.ready()) is not None:
                commands = commands_of(ready.committed)
                if (level := highest_level(ready.snapshot, commands)) > self.state.feature_level:
                    await loop.run_in_executor(self._saver, self._raise_level, level)
                if ready.must_sync:
                    await loop.run_in_executor(self._saver, self._save, ready)
                if not self.disk.hangs:
                    self._send(list(ready.messages))
                self._apply(ready, commands)
                self.raft.advance(ready)
                self._confirm(ready)
                if self.raft.applied - self._compacted >= _COMPACT_EVERY:
                    await self._compact()
            if self.is_leader != was_leader:
                was_leader = self.is_leader
                self.elections += was_leader
                logger.info(
                    "this broker %s the metadata (term %d)",
                    "leads" if was_leader else "no longer leads",
                    self.raft.term,
                    extra=event("metadata.led", peer=self.raft.leader, term=self.raft.term),
                )
            if not was_leader:
                self._fail_reads()
            if self._led_by != self.leader:
                self._led_by = self.leader
                self._another_leads.set_result(None)
                self._another_leads = loop.create_future()
                self._on_leader()

    def _save(self, ready: Ready) -> None:
        self.store.save(ready.hard_state, ready.truncate_from, ready.entries, ready.snapshot)

    def _apply(self, ready: Ready, commands: Iterable[tuple[Index, Proposal]]) -> None:
        """`commands`: the committed ones of it."""
        level = self.state.feature_level
        if ready.snapshot is not None:
            self.state = decode_state(ready.snapshot.data)
            self._compacted = ready.snapshot.index
            for proposal_id in list(self._waiting):
                if (outcome := self.state.outcome_of(proposal_id)) is not None:
                    self._complete(proposal_id, outcome)
        for index, proposal in commands:
            outcome = self.changes.decide(self.state, index, proposal)
            logger.debug("metadata: %s → %s", proposal.command, outcome)
            self._complete(proposal.id, outcome)
        if self.state.feature_level > level and level:
            logger.info(
                "the cluster is at feature level %d",
                self.state.feature_level,
                extra=event("cluster.feature_level", feature_level=self.state.feature_level),
            )
        if ready.committed or ready.snapshot is not None:
            self._applied_something.set()
            self._applied_something = asyncio.Event()
            self._on_applied()

    def _complete(self, proposal_id: str, outcome: Outcome) -> None:
        for future in self._waiting.get(proposal_id, ()):
            if not future.done():
                future.set_result(outcome)

    async def _compact(self) -> None:
        if self.raft.log.pending_snapshot is not None:
            return  # a newer one was received meanwhile, and is to be stored first
        snapshot = self.raft.compact(self.raft.applied, encode_state(self.state))
        self._compacted = snapshot.index
        await asyncio.get_running_loop().run_in_executor(self._saver, self.store.compact, snapshot)

    # ---- messages of others ----

    def received(self, messages: tuple[Message, ...]) -> None:
        """Raises ClusterMismatch: no correct member sends one of these; those before it are processed."""
        self._news.set()
        try:
            for message in messages:
                if message.to == self.me:
                    check_message(message)
                    self.raft.step(message)
                    if isinstance(message, AppendRequest | SnapshotChunk):
                        self._note_leader()
        except UpgradeRequired as error:
            self._on_bug("metadata group", error)

    def member_ended(self, broker: BrokerId) -> None:
        """The process of this broker has ended."""
        self.raft.member_ended(broker)
        self._news.set()

    def forwarded(self, proposal: Proposal) -> None:
        """A proposal of another broker, for the leader; dropped if this broker is not leader: it is sent again."""
        if self.is_leader:
            try:
                self._propose_here(proposal)
            except NatslogError as error:
                logger.debug("a forwarded proposal was refused: %s", error.message)

    # ---- changes ----

    @property
    def is_leader(self) -> bool:
        return self.raft.role == "leader"

    @property
    def leader(self) -> BrokerId | None:
        return self.raft.leader

    @property
    def is_alone(self) -> bool:
        """Whether this broker is the only voter: no other one can decide anything."""
        return self.raft.membership.voters == (self.me,)

    def has_session(self) -> bool:
        """Whether a message of the metadata leader was received lately, and this broker can answer it.

        Ticks do not pass while the process is stopped: monotonic time must agree with them.
        """
        is_recent = self.raft.ticks_since_leader() < SESSION_TICKS
        is_recent = is_recent and time.monotonic() - self._leader_seen_s < SESSION_TICKS * TICK_S
        return is_recent and (self.is_alone or not self.disk.hangs)

    def _note_leader(self) -> None:
        if self.raft.ticks_since_leader() == 0:
            self._leader_seen_s = time.monotonic()

    def submit(self, command: BackgroundCommand) -> None:
        """Proposes without waiting: the outcome is visible in the state, and the change is proposed again if it is
        missing.
        """
        try:
            self._propose_once(Proposal(id="", command=command))
        except NatslogError as error:
            logger.debug("the change %s was not proposed: %s", type(command).__name__, error.message)

    async def propose(self, command: Command, request: Request | None = None) -> bool:
        """Returns whether the command, applied, changed anything; by then it is applied here.

        Raises:
            The error of the state machine's refusal. MetadataUnavailable: no outcome in time; the change may still be
            applied. StorageFull: the disk of this broker is full, and the command would need more of it.
            InvalidRequest: a number in it cannot be stored.
        """
        if needs_room(command) and not self.reserve.has_room_now():
            raise StorageFull(
                f"the disk of broker {self.me} is full: its reserve is used only for changes that free space. Free "
                "space on that disk, or delete streams, then repeat the request",
                broker=self.me,
            )
        request = request or Request(secrets.token_hex(8), f"broker {self.me}")
        proposal = Proposal(id=request.id, command=command, client=request.client, address=request.address)
        require_storable(msgspec.to_builtins(command))
        if (known := self.state.outcome_of(proposal.id)) is not None:
            return _result(known)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(proposal.id, []).append(future)
        try:
            async with asyncio.timeout(_PROPOSE_WITHIN_S):
                while not future.done():
                    try:
                        self._propose_once(proposal)
                    except NotMetadataLeader as error:
                        logger.debug("%s", error.message)
                    news = (future, self._another_leads)
                    await asyncio.wait(news, timeout=_PROPOSE_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            return _result(future.result())
        except TimeoutError as error:
            raise self.unavailable() from error
        finally:
            self._waiting[proposal.id].remove(future)
            if not self._waiting[proposal.id]:
                del self._waiting[proposal.id]

    def unavailable(self) -> MetadataUnavailable:
        voters = self.raft.membership.voters
        return MetadataUnavailable(
            "the metadata of the cluster cannot be changed now: no metadata leader is connected to a majority of the "
            f"brokers {list(voters)}. Start the missing brokers (natslog cluster status shows them), then repeat the "
            "request",
            voters=list(voters),
        )

    def _propose_once(self, proposal: Proposal) -> None:
        if self.is_leader:
            self._propose_here(proposal)
        elif self.leader is not None:
            self._forward(self.leader, proposal)

    def _propose_here(self, proposal: Proposal) -> None:
        if self.raft.last_index - self.raft.commit > _MOST_UNCOMMITTED:
            raise Overloaded(
                "too many metadata changes are waiting to be committed: repeat the request later, and send requests "
                "less often"
            )
        now_ms = monotonic_ms()
        self._elapsed.begin_term(self.raft.term)
        term, _ = self.raft.propose(encode_proposal(self._elapsed.dated(proposal, now_ms)))
        self._elapsed.proposed(term, now_ms)
        self._news.set()

    # ---- linearizable reads ----

    async def read_index(self, timeout_s: float = 2.0) -> Index:
        """On the leader: an index that includes all changes that were answered before now.

        Raises:
            NotMetadataLeader: this broker does not lead. MetadataUnavailable: no majority confirmed it in time.
        """
        self._read_numbers += 1
        number, future = self._read_numbers, asyncio.get_running_loop().create_future()
        self._reads[number] = future
        try:
            self.raft.read_index(number)
            self._news.set()
            async with asyncio.timeout(timeout_s):
                return Index(await future)
        except TimeoutError as error:
            raise self.unavailable() from error
        finally:
            self._reads.pop(number, None)

    async def applied(self, index: Index, timeout_s: float = 2.0) -> None:
        """Returns when everything up to `index` is applied here. Raises MetadataUnavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.raft.applied < index:
                    await self._applied_something.wait()
        except TimeoutError as error:
            raise self.unavailable() from error

    async def changed(self) -> None:
        """Returns after the next commands were applied."""
        await self._applied_something.wait()

    def _confirm(self, ready: Ready) -> None:
        for read in ready.reads:
            future = self._reads.get(read.context)
            if future is not None and not future.done():
                future.set_result(read.index)

    def _fail_reads(self) -> None:
        for future in self._reads.values():
            if not future.done():
                future.set_exception(self.unavailable())

    # ---- members ----

    async def change_members(self, change: Callable[[Membership], Membership]) -> None:
        """Of the leader: returns when the change is committed.

        Raises:
            NotMetadataLeader, MembershipChanging, InvalidRequest: it was refused. MetadataUnavailable: not in time.
        """
        wanted = change(self.raft.membership)
        if wanted == self.raft.membership:
            return
        term, index = self.raft.propose_membership(wanted)
        self._news.set()
        await self.applied(index, _PROPOSE_WITHIN_S)
        if self.raft.membership != wanted:
            raise MembershipChanging(f"the membership change in term {term} was lost: repeat the request")

    async def unresponsive(self, brokers: set[BrokerId]) -> set[BrokerId]:
        """On the leader: those of the given members that send no answer from now on, within an election timeout.

        A session is not sufficient: it remains for three seconds after the failure of its broker.
        """
        asked, unresponsive = self.raft.now, brokers
        for _ in range(ELECTION_TICKS):
            await asyncio.sleep(TICK_S)
            unresponsive = brokers - self.raft.active_since(asked + 1)
            if not unresponsive:
                break
        return unresponsive

    def transfer(self, to: BrokerId) -> None:
        """Transfers the metadata leadership. Raises NotMetadataLeader, InvalidRequest."""
        if to not in self.raft.membership.voters:
            raise InvalidRequest(
                f"broker {to} is not a voter of this cluster: choose one of {list(self.raft.membership.voters)}"
            )
        self.raft.transfer(to)
        self._news.set()

    async def step_down(self, stopping: Collection[BrokerId]) -> None:
        """Before this broker stops: returns when another one leads, or none can take over now.

        Args:
            stopping: brokers that stop, too.
        """
        if (to := self.raft.successor(stopping)) is None:
            return
        try:
            self.transfer(to)
        except NotMetadataLeader as error:  # a transfer is under way
            logger.debug("%s", error.message)
        deadline_s = time.monotonic() + ELECTION_TICKS * TICK_S  # then the transfer is abandoned
        while self.leader in (None, self.me) and (left_s := deadline_s - time.monotonic()) > 0:
            await asyncio.wait((self._another_leads,), timeout=left_s)


def _result(outcome: Outcome) -> bool:
    if outcome.error is not None:
        raise from_json(outcome.error)
    return outcome.changed
