"""A stream on this broker: executes the decisions of its `cluster.replica.Replica` on files, NATS and links.

Theory of operation. Every input goes to the state machine first; then `_act` executes the result: it releases messages
that the high watermark (HW) has passed, passes on notices, and executes steps one after another in a separate task of
the stream. This module makes no decisions. The log is written by one owner at a time: the ingest while the replica
leads, steps otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, assert_never

from natslog.arrow.batch_line import FIRST_FORMAT, LATEST_FORMAT
from natslog.cluster.features import BATCH_FORMAT_LEVEL
from natslog.cluster.replica import Replica
from natslog.cluster.replica_steps import (
    BeginEpoch,
    Close,
    Copy,
    Damaged,
    Drain,
    Follow,
    Halted,
    Notice,
    Open,
    Propose,
    ProposeIsr,
    Repair,
    SetAside,
    Step,
    StopWriting,
    Subscribe,
    Unfollow,
    Unsubscribe,
)
from natslog.cluster.roles import BeginAt, CutTo, FetchPosition, FollowerReplica, LeaderReplica, Verdict
from natslog.errors import (
    CorruptLog,
    NatslogError,
    NoLeader,
    ShuttingDown,
    StorageFailed,
    StreamPaused,
    StreamSealed,
)
from natslog.ingest.ack_rules import AckRules
from natslog.log import ReplicaLog
from natslog.log.segment import ActiveSegment
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings
from natslog.node.clock import monotonic_ms
from natslog.node.cluster_clock import StreamTime
from natslog.node.replicas.log_folder import storage_error
from natslog.node.replicas.services import Services
from natslog.node.threads import in_thread
from natslog.node.writes.dedupe_rebuild import rebuilt_dedupe
from natslog.node.writes.ingest_memory import IngestStats
from natslog.node.writes.stream_ingest import StreamIngest

logger = logging.getLogger("natslog.node")

_SUBSCRIBE_WITHIN_S = 2.0
_TAIL_BYTES = 1024 * 1024
_WRITTEN_POLL_S = 0.01


class SessionMark(Protocol):
    """The interface of a follower's session for a stream."""

    def mark(self, stream_id: StreamId, *, has_records: bool) -> None: ...

    def is_outpaced(self, stream_id: StreamId) -> bool: ...


class HostedStream:
    """A replica on this broker.

    Attributes:
        record: as the metadata has it now, or had it last.
        sessions: followers' links that are notified of new data.
        advanced: set, and replaced, whenever HW moves or the role changes.
        watchers: set at the same times, and not replaced.
        sent_bytes: to readers, from this replica, as far as answers were begun.
        scrubbed_bytes: read back by scrubbing. scrub_damaged: damaged ranges that it found.
        leader_log_start: of a follower: the log start of its leader.
    """

    def __init__(self, record: StreamRecord, me: BrokerId, services: Services) -> None:
        self.me = me
        self.record = record
        self.stats = IngestStats()
        self.sent_bytes = 0
        self.scrubbed_bytes = 0
        self.scrub_damaged = 0
        self.sessions: set[SessionMark] = set()
        self.advanced = asyncio.Event()
        self.watchers: set[asyncio.Event] = set()
        self.leader_log_start = 0
        self._services = services
        self._nats = services.nats.lane(record.id)
        self._replica = Replica(me, record, services, monotonic_ms())
        self._folder = services.log_folder(record)
        self._log: ReplicaLog | None = None
        self._ingest: StreamIngest | None = None
        self._subscription: object | None = None
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._reconciled: asyncio.Event | None = None  # made where somebody waits for it
        self._is_quiet = False
        self._adopted = record  # whose settings are in force
        self._is_transferring = False
        self._has_led = False

    # ---- its state: from the event loop ----

    @property
    def leader_epoch(self) -> Epoch:
        """The epoch of the current role; all responses of this replica are of this epoch."""
        role = self._replica.leading or self._replica.following
        return role.epoch if role is not None else self.record.leader_epoch

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def id(self) -> StreamId:
        return self.record.id

    @property
    def log(self) -> ReplicaLog | None:
        """None where it is not open; `problem` says why."""
        return self._log

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.usable_log().folder

    @property
    def ingest(self) -> StreamIngest | None:
        """Of the leader."""
        return self._ingest

    @property
    def leading(self) -> LeaderReplica | None:
        return self._replica.leading

    @property
    def following(self) -> FollowerReplica | None:
        return self._replica.following

    @property
    def is_leading(self) -> bool:
        """Whether it leads, accepts messages, and may state positions."""
        return self._replica.is_leading

    @property
    def is_ready(self) -> bool:
        """Whether it leads and its subscription was requested."""
        return self._replica.is_ready

    @property
    def may_serve(self) -> bool:
        """Whether ranges below the HW known here may be served from here."""
        return self._replica.may_serve

    @property
    def is_transferring(self) -> bool:
        return self._replica.is_transferring

    @property
    def is_reconciled(self) -> bool:
        return self._replica.is_reconciled

    @property
    def damage(self) -> NatslogError | None:
        return self._replica.damage

    @property
    def scrub_problem(self) -> NatslogError | None:
        """Which offsets scrubbing found damaged here. All others are served."""
        return self._log.scrub.problem if self._log is not None else None

    @property
    def has_others_in_sync(self) -> bool:
        """Whether another in-sync replica could serve in place of this one."""
        return any(broker != self.me for broker in self.record.isr)

    @property
    def is_to_be_repaired(self) -> bool:
        """Whether it is damaged, and is repaired from another replica."""
        return self._replica.damage is not None and self._replica.others_hold_it

    @property
    def problem(self) -> NatslogError | None:
        """Why the replica does not serve, or not fully."""
        return self._replica.problem or (self._log.failure if self._log is not None else None)

    def as_told(self, problem: NatslogError) -> NatslogError:
        """The error for clients if this replica has a problem: retriable if another replica may become leader."""
        if not self._replica.others_hold_it:
            return problem
        return NoLeader(
            f"broker {self.me} cannot use its replica of stream {self.name!r}: send the request to another broker, "
            f"or repeat it in a moment. {problem.message}",
            stream=self.name,
            broker=self.me,
            problem=problem.code,
        )

    @property
    def outpaces_replica(self) -> bool:
        """Whether a replica is catching up, and the log grows as fast as it can copy."""
        return any(session.is_outpaced(self.id) for session in self.sessions)

    @property
    def successor(self) -> BrokerId | None:
        return self._replica.successor

    @property
    def feature_level(self) -> int:
        return self._services.level

    @property
    def batch_format(self) -> int:
        """In which batches are appended at this level."""
        return LATEST_FORMAT if self.feature_level >= BATCH_FORMAT_LEVEL else FIRST_FORMAT

    def usable_log(self) -> ReplicaLog:
        """Raises the problem where there is one."""
        if self._log is None:
            raise self._replica.problem or CorruptLog(f"the log of stream {self.name!r} is not open yet")
        return self._log

    def unresponsive_leader(self, contact_ms: float) -> Epoch | None:
        return self._replica.unresponsive_leader(contact_ms)

    def unproven_position(self) -> tuple[int, Epoch, int] | None:
        return self._replica.unproven_position()

    def is_at_tail(self, offset: int) -> bool:
        """Whether the remaining records are few, and in the segment that was just written."""
        last = self.usable_log().chain.last
        if not isinstance(last, ActiveSegment) or offset < last.base_offset:
            return False
        first = last.index.first_covering(offset)
        return first == len(last.index) or last.size_bytes - last.index.positions[first] <= _TAIL_BYTES

    # ---- inputs ----

    def changed(self, record: StreamRecord | None) -> None:
        """The metadata has this record now; None: deleted, or moved away."""
        if record is not None:
            self.record = record
        self._replica.changed(record)
        self._adopt_settings()
        self._act()

    def tick(self, contact_ms: dict[BrokerId, float]) -> None:
        failure = self._log.failure if self._log is not None else None
        if isinstance(failure, StorageFailed):
            self._replica.damaged(failure)
        self._replica.tick(monotonic_ms(), contact_ms)
        self._act()
        self._is_quiet = self._task is None and self._replica.is_quiet

    def is_quiet(self, away: frozenset[BrokerId]) -> bool:
        """Whether a tick may be replaced by `pass_time` while `Calm` goes on. `away`: followers without contact."""
        if not self._is_quiet or (away and self._replica.is_followed_by_any(away)):
            return False
        return self._log is None or self._log.failure is None

    def pass_time(self, now_ms: float) -> None:
        self._replica.pass_time(now_ms)

    def appended(self, end_offset: int, run_start: int | None = None) -> None:
        """The leader's log ends here now, on stable storage; from `run_start` on it is one run, where given."""
        self._replica.appended(end_offset, run_start)
        self._mark_sessions()
        self._progress()

    def fetched(self, follower: BrokerId, position: FetchPosition, incarnation: str) -> Verdict:
        """A follower asks from this position on."""
        verdict = self._replica.fetched(follower, position, incarnation, monotonic_ms())
        self._progress()
        return verdict

    def judged(self, position: FetchPosition) -> Verdict:
        return self._replica.judged(position)

    def note_damage(self, error: NatslogError) -> None:
        """Data on disk is damaged. From any thread."""

        def note() -> None:
            self._replica.damaged(error)
            self._act()

        self._loop.call_soon_threadsafe(note)

    async def transfer_leadership(self, to: BrokerId) -> None:
        """Returns when it was transferred, or could not be in time: then this replica remains leader."""
        if not self._replica.transfer(to, monotonic_ms()):
            return
        self._is_transferring = True
        self._act()
        while self._is_transferring:
            await self.reconciled.wait()

    async def written(self) -> None:
        """Returns when all that was received is appended, and committed as far as that is possible soon."""
        if self._ingest is not None:
            await self._ingest.drained()
        while self.is_leading and self.usable_log().high_watermark < self.usable_log().log_end_offset:  # noqa: ASYNC110
            await asyncio.sleep(_WRITTEN_POLL_S)  # `advanced` stays set where the broker stops

    def leave(self) -> bool:
        """Fetches no more. Returns whether this broker is to leave the in-sync replicas of the stream."""
        is_to_leave = self._replica.leave()
        self._act()
        return is_to_leave

    async def stop(self) -> None:
        """Returns when received messages are appended, and acknowledged as far as they are committed, and the log is
        closed.
        """
        self._replica.stop()
        self._act()
        await self.finished()

    async def finished(self) -> None:
        """Returns when the log is permanently closed."""
        while not self._replica.is_finished:
            await self.reconciled.wait()

    # ---- following: called by the fetcher ----

    def position(self) -> FetchPosition | None:
        return self._replica.position()

    def is_behind(self, leader_high_watermark: int) -> bool:
        """Whether the leader has committed more than the log here holds."""
        return self._log is not None and leader_high_watermark > self._log.log_end_offset

    async def answered(
        self, epoch: Epoch, verdict: Verdict, append: Callable[[ReplicaLog], Any] | None, high_watermark: int
    ) -> bool:
        """Processes a leader's answer. Returns whether the log has changed, so that the position is to be sent at once.

        Args:
            append: appends the records of the answer, where it has any; may return an awaitable.

        Raises:
            NatslogError: the log could not be changed; it is asked for again later.
        """
        step = self._replica.answered(
            epoch,
            verdict,
            high_watermark=high_watermark,
            has_records=append is not None,
            now_ms=monotonic_ms(),
        )
        if step is None:
            self._act()
            return False
        try:
            await self._change_log(step, append)
        except NatslogError as error:
            self._replica.failed(error)
            raise
        except asyncio.CancelledError:  # the fetcher is closed; the result of the thread is in the log
            self._replica.failed(ShuttingDown("fetching has ended"))
            raise
        else:
            self._replica.done()
        finally:
            self._note_reconciled()
            self._act()
        return True

    def leader_starts_at(self, epoch: Epoch, log_start_offset: int) -> None:
        """The leader of this epoch has removed messages below this offset: its retention decides, and maintenance
        applies it.
        """
        following = self._replica.following
        if following is not None and following.epoch == epoch:
            self.leader_log_start = log_start_offset

    def log_start_moved(self) -> None:
        """Retention has removed the oldest messages of the log that is led here. From any thread."""
        self._loop.call_soon_threadsafe(self._mark_sessions)

    async def _change_log(self, step: Copy | CutTo | BeginAt, append: Callable[[ReplicaLog], Any] | None) -> None:
        log = self.usable_log()
        match step:
            case Copy():
                assert append is not None, "records are copied where there are some"
                if (work := append(log)) is not None:
                    await work
            case CutTo(end_offset=end):
                logger.warning(
                    "stream %s: truncated from %d to %d, where it differs from the leader's log",
                    self.name,
                    log.log_end_offset,
                    end,
                )
                await self._in_thread(log.cut_to, end)
            case BeginAt(log_start_offset=start, epoch=epoch):
                logger.warning("stream %s: the log starts again at %d, the start of the leader's log", self.name, start)
                await self._in_thread(log.begin_at, start, epoch)

    async def _in_thread(self, work: Callable[..., Any], *arguments: object) -> Any:
        return await in_thread(self._services.writers, work, *arguments)

    # ---- results of an input ----

    def _act(self) -> None:
        self._note_role()
        self._progress()
        step = self._replica.next_step() if self._task is None else None
        self._dispatch_notices()
        if step is not None:
            self._task = self._services.spawn(self._carry_out(step), f"stream {self.name}")
        if self._is_transferring and not self._replica.is_transferring:
            self._is_transferring = False
            self._note_reconciled()

    def _progress(self) -> None:
        """HW may have moved. No step follows from that: commits and fetches, of which there are many, end here."""
        self._is_quiet = False
        self._release()
        self._dispatch_notices()

    def _release(self) -> None:
        """HW is here now."""
        if self._log is None or self._log.chain.committed == self._replica.high_watermark:
            return
        self._log.chain.committed = self._replica.high_watermark
        self._wake()
        if self._replica.leading is not None:
            self._mark_sessions(has_records=False)
        if self._ingest is not None:
            self._ingest.release(self._replica.high_watermark)

    def _mark_sessions(self, *, has_records: bool = True) -> None:
        """There is new data for the followers: records, another log start or role, or only another HW."""
        for session in self.sessions:
            session.mark(self.id, has_records=has_records)

    def _wake(self) -> None:
        self.advanced.set()
        self.advanced = asyncio.Event()
        for watcher in self.watchers:
            watcher.set()

    def _dispatch_notices(self) -> None:
        for notice in self._replica.take_notices():
            self._dispatch(notice)

    def _dispatch(self, notice: Notice) -> None:
        services = self._services
        match notice:
            case Follow(leader=leader):
                services.fetcher_of(leader).follow(self)
            case Unfollow():
                services.forget(self)
            case Propose(command=command):
                services.propose(command)
            case ProposeIsr(change=change):
                services.propose_isr(change)
            case Halted(why=why):
                logger.critical("%s", why)
            case Damaged(error=error):
                logger.error("stream %s: %s", self.name, error.message)
            case _:
                assert_never(notice)

    async def _carry_out(self, first: Step) -> None:
        step: Step | None = first
        while step is not None:
            try:
                await self._perform(step)
            except NatslogError as error:
                logger.error("stream %s: %s", self.name, error.message)
                self._replica.failed(error)
            else:
                if not isinstance(step, Open):
                    self._replica.done()
            self._note_role()
            self._release()
            self._adopt_settings()
            step = self._replica.next_step()
            self._dispatch_notices()
        self._task = None
        self._note_reconciled()
        self._act()

    @property
    def reconciled(self) -> asyncio.Event:
        """Set, and replaced, whenever the replica matches its record as far as possible, and when a transfer of its
        leadership has ended.
        """
        if self._reconciled is None:
            self._reconciled = asyncio.Event()
        return self._reconciled

    def _note_reconciled(self) -> None:
        if self._reconciled is not None:
            self._reconciled.set()
            self._reconciled = None

    def _note_role(self) -> None:
        """If it became leader, or stopped being leader, waiting readers and followers are notified."""
        leading = self._replica.leading
        if self._has_led == (leading is not None):
            return
        self._has_led = leading is not None
        if leading is not None:
            self._services.leaders_appointed += 1
            log = logger.info if leading.epoch > 1 else logger.debug
            log("stream %s: this broker leads epoch %d from offset %d", self.name, leading.epoch, leading.epoch_start)
        else:
            logger.info("stream %s: this broker stopped leading", self.name)
        self._mark_sessions()
        self._wake()

    async def _perform(self, step: Step) -> None:
        """Executes a step. Raises NatslogError: it failed."""
        match step:
            case Open(must_exist=must_exist):
                await self._open(must_exist)
            case SetAside():
                await self._in_thread(self._folder.set_aside, self.name)
            case Repair():
                await self._in_thread(self._folder.repair, self.usable_log(), self.name)
            case Close():
                log, self._log = self.usable_log(), None
                await self._in_thread(log.close)
            case BeginEpoch(epoch=epoch):
                await self._begin_epoch(epoch)
            case Subscribe(subjects=subjects):
                await self._subscribe(subjects)
            case Unsubscribe():
                if self._subscription is not None:
                    handle, self._subscription = self._subscription, None
                    await self._nats.detach(handle)
            case Drain():
                if self._ingest is not None:
                    await self._ingest.drained()
            case StopWriting(abandon=abandon):
                await self._stop_writing(abandon=abandon)
            case Copy() | CutTo() | BeginAt():
                raise AssertionError("what an answer asks for is done where the answer is taken")
            case _:
                assert_never(step)

    async def _open(self, must_exist: bool) -> None:
        record = self.record
        log = await self._in_thread(lambda: self._folder.open(record, must_exist=must_exist))
        log.chain.purged_below = record.purged_below
        self._services.store.add(log.chain.size_bytes)  # until all are measured again
        self._log = log
        self._replica.opened(log)
        if log.chain.damages:
            self._replica.damaged(log.failure or CorruptLog("a part of the log is damaged"))
        elif (found := log.scrub.problem) is not None and self.has_others_in_sync:
            self._replica.damaged(found)

    async def _begin_epoch(self, epoch: Epoch) -> None:
        log, record, services = self.usable_log(), self.record, self._services
        _require_what_was_purged(log, record)
        try:
            await self._in_thread(log.begin_epoch, epoch)
        except OSError as error:
            raise storage_error(error, f"stream {record.name!r}: its epoch could not begin") from error
        ingest = StreamIngest(
            record.name,
            log,
            stream_time=StreamTime(services.clock, log.newest_timestamp_us, log.idle_s),
            sender=self._nats,
            executor=services.writers,
            memory=services.memory,
            refuses=_refusal_of(record),
            ack_rules=self._ack_rules(record.settings),
            stats=self.stats,
            appended=self.appended,
            refusal=self._replica.refusal,
            batch_format=lambda: self.batch_format,
        )
        ingest.dedupe, damage = await self._in_thread(rebuilt_dedupe, record.settings.dedupe_window_s, log)
        if damage is not None:
            logger.error("stream %s: some message ids cannot be read: %s", record.name, damage.message)
            if len(record.replicas) > 1:  # a replica that has all of them should lead
                raise damage
        self._ingest = ingest
        self._adopted = record
        ingest.start(services.on_bug)

    async def _subscribe(self, subjects: tuple[str, ...]) -> None:
        """Returns when the server has the subscription, or NATS is unreachable: then it gets it on reconnection."""
        nats, ingest, group = self._nats, self._ingest, self.record.settings.group or ""
        assert ingest is not None, "a leader has an ingest"
        if self._subscription is not None:
            await nats.move(self._subscription, subjects)
            return
        self._subscription = await nats.attach(subjects, ingest.receive, queue=group)
        if nats.is_up:
            try:
                await nats.flush(_SUBSCRIBE_WITHIN_S)
            except NatslogError as error:
                logger.warning("stream %s: NATS did not confirm the subscription: %s", self.name, error.message)

    async def _stop_writing(self, *, abandon: bool) -> None:
        if self._ingest is not None:
            await (self._ingest.abandon() if abandon else self._ingest.stop())
            self._ingest = None

    def _ack_rules(self, settings: StreamSettings) -> AckRules:
        return AckRules.of(settings.acks, settings.subjects, self._services.config.ack_reply_prefixes)

    def _adopt_settings(self) -> None:
        """What was edited, in force at once."""
        record, was = self.record, self._adopted
        if self._log is not None:
            self._log.settings = record.settings
            self._log.chain.purged_below = record.purged_below
        if self._ingest is None or record is was:
            return
        self._adopted = record
        self._ingest.refuses = _refusal_of(record)
        if record.settings != was.settings:
            self._ingest.ack_rules = self._ack_rules(record.settings)
        if record.settings.dedupe_window_s != was.settings.dedupe_window_s:
            self._ingest.change_window(record.settings.dedupe_window_s)


def _refusal_of(record: StreamRecord) -> NatslogError | None:
    """Why the stream takes no messages, if an operator decided so."""
    if record.sealed:
        return StreamSealed(
            f"stream {record.name!r} is sealed and therefore permanently read-only: write to another stream"
        )
    if record.paused:
        return StreamPaused(f"stream {record.name!r} is paused: resume it, then send the message again")
    return None


def _require_what_was_purged(log: ReplicaLog, record: StreamRecord) -> None:
    """What is appended below `purged_below` would never be read.

    Raises:
        CorruptLog: the log ends before messages that were committed when the stream was purged.
    """
    if log.log_end_offset < record.purged_below:
        raise CorruptLog(
            f"stream {record.name!r}: the log ends at {log.log_end_offset}, and it was purged below offset "
            f"{record.purged_below}: committed messages are missing. Restore the folder from a newer copy, or delete "
            "the stream and create it again",
            stream=record.name,
            start=log.log_end_offset,
            end=record.purged_below,
        )
