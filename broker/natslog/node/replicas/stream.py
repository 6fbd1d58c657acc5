"""A stream on this broker: executes the decisions of its `cluster.replica.Replica` on files, NATS and links.

Theory of operation. Every input goes to the state machine first; then `_act` executes the result: it releases messages
that the high watermark (HW) has passed, passes on notices, and executes steps one after another in a separate task of
the stream. This module makes no decisions. The log is written by one owner at a time: the ingest while the replica
leads, steps otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, assert_never

from natslog.cluster.activity import Kind
from natslog.cluster.features import STOP_LEVEL
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
    OpenCompanion,
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
from natslog.cluster.stream_changes import importing
from natslog.errors import (
    CorruptAnswer,
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
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.erasing import ErasedOffsets
from natslog.log.removed import from_bytes
from natslog.log.rules import Expiry, Rule
from natslog.log.sealed import SealedSegment
from natslog.log.segment import ActiveSegment
from natslog.log.stored_ids import StoredIds
from natslog.log_events import event
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, StreamSettings, companion_id
from natslog.node.clock import monotonic_ms, wait_for_at_most
from natslog.node.cluster_clock import StreamTime
from natslog.node.replicas.companion import Companion, OnRecords
from natslog.node.replicas.companion_log import Delivered, Record
from natslog.node.replicas.consumer_records import KINDS, ConsumerRecords
from natslog.node.replicas.direct_requests import DirectRequests
from natslog.node.replicas.log_folder import storage_error
from natslog.node.replicas.services import Services
from natslog.node.threads import in_thread
from natslog.node.writes.dedupe_rebuild import PreparedDedupe, prepared_dedupe, rebuilt_dedupe
from natslog.node.writes.ingest_memory import IngestStats
from natslog.node.writes.stream_ingest import StreamIngest
from natslog.wire.frames import Frames

logger = logging.getLogger("natslog.node")

REMOVED = "removed"
"""Kind of the records of a companion log that name removed offsets, as a bitmap (`natslog.log.removed`)."""
ERASED = "erased"
"""Kind of those that name erased offsets (`natslog.log.erasing.ErasedOffsets`)."""

RULES = "rules"
"""Kind of those that state the settings version by which a rule was added: what is recorded before does not count."""

_SUBSCRIBE_WITHIN_S = 2.0
_TAIL_BYTES = 1024 * 1024
_LEADS_EVERY_S = 0.2
_PREPARED_FOR_S = 30.0
_COMPANION_WITHIN_S = 5.0


class SessionMark(Protocol):
    """The interface of a follower's session for a stream."""

    def mark(self, stream_id: StreamId, *, has_records: bool, end_offset: int | None = None) -> None: ...

    def answer(self) -> None: ...

    def send_written(self, stream: HostedStream, batch: EncodedBatch) -> bool: ...

    def is_outpaced(self, stream_id: StreamId) -> bool: ...


class HostedStream:
    """A replica on this broker.

    Attributes:
        record: as the metadata has it now, or had it last.
        sessions: followers' links that are notified of new data.
        advanced: set, and replaced, whenever HW moves or the role changes.
        watchers: set at the same times, and not replaced.
        sent_bytes: to readers, from this replica, as far as answers were begun.
        scrubbed_bytes: read back by scrubbing. scrub_damaged: damaged ranges that it found. scrub_repaired:
            those that were repaired from another replica. lost_ranges: offsets that are damaged on every replica.
            lost_offsets: how many of them were accepted as lost.
        leader_log_start: of a follower: the log start of its leader.
        companion_committed: called with the committed records of the companion log (offset, kind, record), in order, on
            every replica; see `Companion`. companion_from: the offset to begin with. Both are set before the log opens.
        consumers: of the JetStream API.
    """

    def __init__(self, record: StreamRecord, me: BrokerId, services: Services) -> None:
        self.me = me
        self.record = record
        self.stats = IngestStats(services.commit_latency)
        self.sent_bytes = 0
        self.scrubbed_bytes = 0
        self.scrub_damaged = self.scrub_repaired = self.lost_offsets = 0
        self.lost_ranges: set[tuple[int, int]] = set()
        self.sessions: set[SessionMark] = set()
        self.advanced = asyncio.Event()
        self.watchers: set[asyncio.Event] = set()
        self.leader_log_start = 0
        self.companion_committed: OnRecords | None = self._take_records
        self.companion_from = 0
        self.consumers = ConsumerRecords()
        self._services = services
        self._nats = services.nats.lane(record.id)
        self._replica = Replica(me, record, services, monotonic_ms())
        self._folder = services.log_folder(record)
        self._log: ReplicaLog | None = None
        self._companion: Companion | None = None
        self._ingest: StreamIngest | None = None
        self._subscription: object | None = None
        self._is_unsubscribing = False
        self._direct = DirectRequests(self._nats)
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._reconciled: asyncio.Event | None = None  # made where somebody waits for it
        self._is_quiet = False
        self._adopted = record  # whose settings are in force
        self._is_transferring = False
        self._has_led = False
        self._prepared: PreparedDedupe | None = None
        self._preparing = asyncio.Lock()
        self._refusal: NatslogError | None = None  # that of the replica, for other threads

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
    def companion(self) -> Companion | None:
        """The companion log; None where there is none, or it is not open."""
        return self._companion

    @property
    def logs(self) -> list[ReplicaLog]:
        """Those that are open."""
        companion = self._companion
        return [log for log in (self._log, None if companion is None else companion.log) if log is not None]

    @property
    def companion_bytes(self) -> int:
        """The size of the companion log; 0 where there is none."""
        return 0 if self._companion is None else self._companion.log.chain.size_bytes

    @property
    def high_watermark(self) -> int:
        return self._replica.high_watermark

    @property
    def companion_high_watermark(self) -> int:
        return self._replica.companion_high_watermark

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
    def is_subscribed(self) -> bool:
        """Whether messages are still received."""
        return self._subscription is not None or self._is_unsubscribing

    @property
    def has_companion_records(self) -> bool:
        """Whether it leads, and has all committed records of the companion log, if there is one."""
        return self.is_leading and not (self.record.has_companion and self._companion is None)

    @property
    def may_serve(self) -> bool:
        """Whether ranges below the HW known here may be served from here."""
        return self._replica.may_serve and self.record.import_state != "importing"

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
        return self._replica.problem or next((log.failure for log in self.logs if log.failure is not None), None)

    def as_told(self, problem: NatslogError) -> NatslogError:
        """The error for clients if this replica has a problem: retriable if another replica may become leader."""
        if not self._replica.others_hold_it or self._is_lost(problem):
            return problem
        return NoLeader(
            f"broker {self.me} cannot use its replica of stream {self.name!r}: send the request to another broker, "
            f"or repeat it in a moment. {problem.message}",
            stream=self.name,
            broker=self.me,
            problem=problem.code,
        )

    def _is_lost(self, problem: NatslogError) -> bool:
        """Whether it is damage that every replica has."""
        start, end = problem.facts.get("start"), problem.facts.get("end")
        if not isinstance(problem, CorruptLog) or start is None or end is None:
            return False
        return any(first < end and start < last for first, last in self.lost_ranges)

    @property
    def outpaces_replica(self) -> bool:
        """Whether a replica is catching up, and the log grows as fast as it can copy."""
        return any(session.is_outpaced(self.id) for session in self.sessions)

    def successor(self, stopping: Collection[BrokerId]) -> BrokerId | None:
        return self._replica.successor(stopping)

    def usable_log(self) -> ReplicaLog:
        """Raises the problem where there is one."""
        if self._log is None:
            raise self._replica.problem or CorruptLog(f"the log of stream {self.name!r} is not open yet")
        return self._log

    def unresponsive_leader(self, contact_ms: float) -> Epoch | None:
        return self._replica.unresponsive_leader(contact_ms)

    def unproven_positions(self) -> list[tuple[StreamId, int, Epoch, int]]:
        """(log, record version, last epoch, log end offset) of each log, where the metadata leader has to know them."""
        messages, companion = self._replica.unproven_position(), self._replica.unproven_companion_position()
        found = [] if messages is None else [(self.id, *messages)]
        return found if companion is None else [*found, (companion_id(self.id), *companion)]

    def refusal(self) -> NatslogError | None:
        """Why nothing may be appended now, to either log. From any thread."""
        return self._refusal

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
        if self._companion is not None and isinstance(failure := self._companion.log.failure, StorageFailed):
            self._replica.damaged(failure, is_companion=True)
        self._replica.tick(monotonic_ms(), contact_ms)
        self._act()
        self._is_quiet = self._task is None and self._replica.is_quiet

    def pass_time_if_quiet(self, now_ms: float, away: frozenset[BrokerId]) -> bool:
        """Passes the time to a replica that is quiet, while `Calm` goes on. False, and nothing is done: it is to be
        ticked. `away`: followers without contact.
        """
        if not self._is_quiet or (away and self._replica.is_followed_by_any(away)):
            return False
        if self._companion is not None and self._companion.log.failure is not None:
            return False
        if self._log is not None and self._log.failure is not None:
            return False
        self._replica.pass_time(now_ms)
        return True

    def send_written(self, batch: EncodedBatch) -> bool:
        """A commit of the leader is written, and is synced next: followers sync it meanwhile. Whether one has it."""
        return sum(session.send_written(self, batch) for session in self.sessions) > 0

    def appended(self, end_offset: int, run_start: int | None = None) -> None:
        """The leader's log ends here now, on stable storage; from `run_start` on it is one run, where given."""
        self._replica.appended(end_offset, run_start)
        self._mark_sessions(end_offset=end_offset)
        self._progress()
        for session in tuple(self.sessions):
            session.answer()

    def fetched(
        self, follower: BrokerId, position: FetchPosition, incarnation: str, *, is_companion: bool = False
    ) -> Verdict:
        """A follower asks from this position on."""
        verdict = self._replica.fetched(follower, position, incarnation, monotonic_ms(), is_companion=is_companion)
        self._progress()
        return verdict

    def judged(self, position: FetchPosition, *, is_companion: bool = False) -> Verdict:
        return self._replica.judged(position, is_companion=is_companion)

    def report(self, kind: Kind, message: str) -> None:
        """An event of this replica, for `__activity`."""
        self._services.report(kind, self.name, self.id, message)

    def note_damage(self, error: NatslogError, *, is_companion: bool = False) -> None:
        """Data on disk is damaged. From any thread. A sealed segment is repaired in place (`range_repair`)."""

        def note() -> None:
            log = None if is_companion else self._log
            if log is not None and self.has_others_in_sync and isinstance(error, CorruptLog) and _is_sealed(log, error):
                if log.scrub.note(error):
                    self.report("activity.replica.damaged", error.message)
                    self._services.wake_scrubber()
            else:
                self.repair_all(error)

        self._loop.call_soon_threadsafe(note)

    def _repairs_rows(self, error: CorruptLog) -> bool:
        """See `Visibility.on_damage`. From any thread."""
        if self._is_lost(error) or not self.has_others_in_sync:
            return False
        self.note_damage(error)
        return True

    def repair_all(self, error: NatslogError) -> None:
        """The log is truncated at the damage, and the rest is fetched again. In the event loop."""
        self._replica.damaged(error)
        self._act()

    async def transfer_leadership(self, to: BrokerId) -> None:
        """Returns when it was transferred, or could not be in time: then this replica remains leader."""
        has_ids = self.record.settings.dedupe_window_s > 0 and self._services.group.state.feature_level >= STOP_LEVEL
        if has_ids and self.is_leading and to != self._replica.me and to in self.record.isr:
            await self._services.prepare_successor(to, self.id)
        if not self._replica.transfer(to, monotonic_ms()):
            return
        self._is_transferring = True
        self._act()
        while self._is_transferring:
            await self.reconciled.wait()

    async def prepare_to_lead(self) -> None:
        """Reads the message ids that the leader has to know, before that one stops taking messages.

        Raises:
            CorruptLog, FileUnavailable: the log is not open, or cannot be read.
        """
        log, window_s = self.usable_log(), self.record.settings.dedupe_window_s
        async with self._preparing:
            known, self._prepared = self._prepared, None
            prepared = await in_thread(self._services.readers, prepared_dedupe, window_s, log, known)
            self._prepared = prepared

        def forget() -> None:
            if self._prepared is prepared:
                self._prepared = None

        self._loop.call_later(_PREPARED_FOR_S, forget)

    async def written(self) -> None:
        """Returns when all that was received is appended, and committed as far as that is possible soon."""
        if self._ingest is not None:
            await self._ingest.drained()
        await self._committed(lambda log: log.log_end_offset)

    async def _committed(self, end: Callable[[ReplicaLog], int]) -> None:
        """Returns when HW is there, or this replica does not lead any more."""
        moved = asyncio.Event()
        self.watchers.add(moved)
        try:
            while self.is_leading and (log := self.usable_log()).high_watermark < end(log):
                moved.clear()
                await wait_for_at_most(_LEADS_EVERY_S, moved.wait())  # a session that ends sets no event
        finally:
            self.watchers.discard(moved)

    async def attach(self, subjects: tuple[str, ...], receiver: Callable[[Frames], None]) -> object:
        """Subscribes on the connection of this stream; returns a handle for `detach`. Raises NatsUnavailable."""
        return await self._nats.attach(subjects, receiver)

    async def detach(self, handle: object) -> None:
        await self._nats.detach(handle)

    def send_now(self, protocol: bytes) -> bool:
        """As `NatsLink.send_now`, on the connection of this stream."""
        return self._nats.send_now(protocol)

    async def send(self, protocol: bytes) -> bool:
        """Raw NATS protocol, on the connection of this stream; waits where the server accepts less than is sent."""
        return await self._nats.send(protocol)

    def send_if_drained(self, protocol: bytes | memoryview, most_unsent_bytes: int) -> bool:
        """As `send_now`, if no more than this waits for the server; otherwise False, and nothing is sent."""
        return self._nats.unsent_bytes <= most_unsent_bytes and self._nats.send_now(protocol)

    @property
    def is_settled(self) -> bool:
        """Whether `settled`, asked for on the connection of the stream, returns at once. In the leader."""
        log = self._log
        if self._ingest is None or log is None:
            return False
        return self._ingest.is_settled and log.high_watermark >= log.log_end_offset

    async def settled(self, *, is_on_its_connection: bool = False) -> None:
        """Returns when all that publishers have sent before the call is committed, or was refused. In the leader.

        Args:
            is_on_its_connection: what asks for it came over the connection of the stream, so messages did before it.

        Raises:
            NatsUnavailable: the server does not answer, so messages may be on their way.
        """
        if self._ingest is None:
            return
        if not is_on_its_connection:
            await self._nats.flush()
        await self._ingest.settled()
        end = self.usable_log().log_end_offset
        await self._committed(lambda _: end)

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

    # ---- the companion log ----

    async def prepare_companion(self) -> None:
        """So that the first records do not wait for the companion log to be created. Raises as `append_companion`."""
        if not self.record.has_companion:
            await self._writable_companion()

    async def append_companion(self, records: Sequence[Record]) -> int:
        """Appends records (kind, bytes) to the companion log of a stream that is led here, as one commit; the log is
        created if there is none. Returns the offset behind them when they are committed and delivered here.

        Raises:
            InvalidRequest: the records are too large. StorageFull, …: nothing was appended. NoLeader,
                NotEnoughReplicas: the message states whether the change may have taken effect.
        """
        return await (await self._writable_companion()).append(records)

    async def shorten_companion(self, snapshot: Sequence[Record]) -> None:
        """Appends records that stand for all that were delivered here until now, and removes those. The snapshot is
        taken immediately before this call, without an `await` between. Records that are not delivered yet are kept.

        Raises:
            As `append_companion`; where it fails, nothing was removed.
        """
        covers = self._replica.companion_delivered
        await (await self._writable_companion()).shorten(snapshot, covers)

    async def _writable_companion(self) -> Companion:
        """The companion log, which is created if necessary. Raises NoLeader."""
        try:
            async with asyncio.timeout(_COMPANION_WITHIN_S):
                while True:
                    if self._replica.leading is None or self.is_transferring:
                        raise NoLeader(
                            f"the leadership of stream {self.name!r} is changing: repeat the request", stream=self.name
                        )
                    companion = self._companion
                    if companion is not None and companion.is_writing and self._replica.is_companion_held:
                        return companion
                    self._replica.create_companion()
                    self._dispatch_notices()
                    self._is_quiet = False  # a proposal that is lost is made again by a tick
                    await self.reconciled.wait()
        except TimeoutError as error:
            problem = self.problem
            raise NoLeader(
                f"the companion log of stream {self.name!r} could not be created in time, and nothing was changed: "
                f"repeat the request{'' if problem is None else '. ' + problem.message}",
                stream=self.name,
            ) from error

    def companion_appended(self, end_offset: int) -> None:
        """The companion log that is led here ends here now, on stable storage."""
        self._replica.companion_appended(end_offset)
        self._progress()

    def companion_delivered(self, offset: int) -> None:
        """All committed records below were passed on."""
        could_serve = self._replica.may_serve
        self._replica.delivered(offset)
        if could_serve != self._replica.may_serve:
            self._wake()

    # ---- following: called by the fetcher ----

    def position(self, *, is_companion: bool = False) -> FetchPosition | None:
        return self._replica.position(is_companion=is_companion)

    def is_behind(self, leader_high_watermark: int) -> bool:
        """Whether the leader has committed more than the log here holds."""
        return self._log is not None and leader_high_watermark > self._log.log_end_offset

    def lacks_ids(self, epoch: Epoch, serial: int) -> bool:
        return self._replica.lacks_ids(epoch, serial)

    async def adopt_ids(self, epoch: Epoch, serial: int, data: bytes) -> None:
        """Message ids that the leader keeps of removed rows, as `kept_ids` has answered.

        Raises:
            CorruptAnswer: they are none. StorageFull, StorageFailed: they could not be stored.
        """
        try:
            found = StoredIds.from_bytes(data)
        except ValueError as error:
            raise CorruptAnswer(f"stream {self.name!r}: the leader sent message ids that are incomplete") from error
        try:
            await self._in_thread(self.usable_log().ids.adopt, found)
        except OSError as error:
            raise storage_error(error, f"stream {self.name!r}: message ids could not be stored") from error
        async with self._preparing:
            self._prepared = None  # it lacks them
        self._replica.adopted_ids(epoch, serial)

    async def answered(
        self,
        epoch: Epoch,
        verdict: Verdict,
        append: Callable[[ReplicaLog], Any] | None,
        high_watermark: int,
        *,
        companion: Companion | None = None,
    ) -> bool:
        """Processes a leader's answer. Returns whether the log has changed, so that the position is to be sent at once.

        Args:
            append: appends the records of the answer, where it has any; may return an awaitable.
            companion: the log that the answer is for; None: the log of messages.

        Raises:
            NatslogError: the log could not be changed; it is asked for again later.
        """
        if companion is None and self._log is not None and self._log.is_to_be_rolled:
            append = self._append_to_new_segment(append)
        step = self._replica.answered(
            epoch,
            verdict,
            high_watermark=high_watermark,
            has_records=append is not None,
            now_ms=monotonic_ms(),
            is_companion=companion is not None,
        )
        if step is None:
            self._act()
            return False
        try:
            await self._change_log(self.usable_log() if companion is None else companion.log, step, append)
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

    def _append_to_new_segment(self, append: Callable[[ReplicaLog], Any] | None) -> Callable[[ReplicaLog], Any]:
        """Rolls the open segment of a follower first, so that it is sealed: its erased rows can go then, or its small
        batches are merged.
        """

        async def rolled(log: ReplicaLog) -> None:
            await self._in_thread(log.roll)
            if append is not None and (work := append(log)) is not None:
                await work

        return rolled

    def roll_soon(self) -> None:
        """Of a follower: with the next answer of its leader, which is requested now."""
        following = self._replica.following
        if following is not None and (leader := following.record.leader) is not None:
            self._services.fetcher_of(leader).follow(self)

    def leader_starts_at(self, epoch: Epoch, log_start_offset: int) -> None:
        """The leader of this epoch has removed messages below this offset: its retention decides, and maintenance
        applies it.
        """
        following = self._replica.following
        if following is not None and following.epoch == epoch:
            self.leader_log_start = log_start_offset
            if self._log is not None:
                self._log.chain.limited_below = max(self._log.chain.limited_below, log_start_offset)

    def log_start_moved(self) -> None:
        """Retention has removed the oldest messages of the log that is led here. From any thread."""
        self._loop.call_soon_threadsafe(self._mark_sessions)

    async def _change_log(
        self, log: ReplicaLog, step: Copy | CutTo | BeginAt, append: Callable[[ReplicaLog], Any] | None
    ) -> None:
        match step:
            case Copy():
                assert append is not None, "records are copied where there are some"
                if (work := append(log)) is not None:
                    await work
            case CutTo(end_offset=end):
                logger.warning(
                    "%s: truncated from %d to %d, where it differs from the leader's log",
                    log.folder,
                    log.log_end_offset,
                    end,
                    extra=event(
                        "log.truncated", stream=self.name, path=log.folder, offset=log.log_end_offset, end_offset=end
                    ),
                )
                await self._in_thread(log.cut_to, end)
            case BeginAt(log_start_offset=start, epoch=epoch):
                logger.warning(
                    "%s: the log starts again at %d, the start of the leader's log",
                    log.folder,
                    start,
                    extra=event("log.started_again", stream=self.name, path=log.folder, offset=start, epoch=epoch),
                )
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
        elif self._task is None:
            self._note_reconciled()

    def _progress(self) -> None:
        """HW may have moved. No step follows from that: commits and fetches, of which there are many, end here."""
        self._is_quiet = False
        self._release()
        self._dispatch_notices()

    def _release(self) -> None:
        """HW is here now."""
        self._refusal = self._replica.refusal()
        if self._companion is not None:
            self._companion.advance(self._replica.companion_high_watermark)
        if self._log is None or self._log.chain.committed == self._replica.high_watermark:
            return
        self._log.chain.committed = self._replica.high_watermark
        if not self._log.visibility.has_rules:  # with rules, as soon as they were applied
            self._advance_start()
        self._wake()
        if self._replica.leading is not None:
            self._mark_sessions(has_records=False)
        if self._ingest is not None:
            self._ingest.release(self._replica.high_watermark)

    def _advance_start(self) -> None:
        """The leader applies limits of messages and bytes to what is committed now. From any thread."""
        log = self._log
        if log is None or not self._has_led or self.record.sealed or self.record.import_state:
            return
        try:
            log.limits.advance()
        except CorruptLog as error:
            self.note_damage(error)

    def _mark_sessions(self, *, has_records: bool = True, end_offset: int | None = None) -> None:
        """There is new data for the followers: records, another log start or role, or only another HW.

        Args:
            end_offset: of the log now, where it has grown.
        """
        for session in self.sessions:
            session.mark(self.id, has_records=has_records, end_offset=end_offset)

    def _mark_all_sessions(self) -> None:
        """Of both logs."""
        self._mark_sessions()
        if self._companion is not None:
            self._companion.mark_sessions()

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
                for one in self._followed:
                    services.fetcher_of(leader).follow(one)
            case Unfollow():
                for one in self._followed:
                    services.forget(one)
            case Propose(command=command):
                services.propose(command)
            case ProposeIsr(change=change):
                services.propose_isr(change)
            case Halted(why=why):
                logger.critical("%s", why, extra=event("replica.halted", stream=self.name))
            case Damaged(error=error):
                logger.error(
                    "stream %s: %s", self.name, error.message, extra=event("replica.damaged", stream=self.name)
                )
                self.report("activity.replica.damaged", error.message)
            case _:
                assert_never(notice)

    @property
    def _followed(self) -> list[HostedStream | Companion]:
        return [self] if self._companion is None else [self, self._companion]

    async def _carry_out(self, first: Step) -> None:
        step: Step | None = first
        while step is not None:
            try:
                await self._perform(step)
            except NatslogError as error:
                logger.error(
                    "stream %s: %s",
                    self.name,
                    error.message,
                    extra=event("stream_unavailable", stream=self.name, reason=error.code),
                )
                self._replica.failed(error)
            else:
                if not isinstance(step, Open | OpenCompanion):
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
            self._services.expect_followers(self.record)
            epoch, start = leading.epoch, leading.epoch_start
            what = ("stream %s: this broker leads epoch %d from offset %d", self.name, epoch, start)
            if epoch > 1:
                logger.info(*what, extra=event("stream.led", stream=self.name, epoch=epoch, offset=start))
            else:
                logger.debug(*what)
        else:
            logger.info(
                "stream %s: this broker stopped leading", self.name, extra=event("stream.released", stream=self.name)
            )
        self._mark_all_sessions()
        self._wake()

    async def _perform(self, step: Step) -> None:
        """Executes a step. Raises NatslogError: it failed."""
        match step:
            case Open(must_exist=must_exist):
                await self._open(must_exist)
            case OpenCompanion(must_exist=must_exist, epoch=epoch):
                await self._open_companion(must_exist, epoch)
            case SetAside():
                await self._in_thread(self._folder.set_aside, self.name)
            case Repair(messages=messages, companion=companion):
                if messages:
                    await self._in_thread(self._folder.repair, self.usable_log(), self.name)
                if companion:
                    await self._close_companion()
                    await self._in_thread(self._folder.companion.set_aside, self.name)
                what = (
                    "the companion log"
                    if not messages
                    else f"the log from offset {self.usable_log().log_end_offset} on"
                )
                self.report("activity.replica.repaired", f"{what} is fetched again from the leader")
            case Close():
                log, self._log = self.usable_log(), None
                await self._close_companion()
                await self._in_thread(log.close)
            case BeginEpoch(epoch=epoch):
                await self._begin_epoch(epoch)
            case Subscribe(subjects=subjects, group=group):
                await self._subscribe(subjects, group)
                await self.serve_direct_requests()
                await self._services.lead_consumers(self)
                self._services.began_to_lead(self)
            case Unsubscribe():
                await self._services.end_consumers(self)
                await self._direct.serve((), _not_received)
                if self._subscription is not None:
                    handle, self._subscription = self._subscription, None
                    self._is_unsubscribing = True
                    await self._nats.detach(handle)
                    self._is_unsubscribing = False
            case Drain():
                if self._ingest is not None:
                    await self._ingest.drained()
                if self._companion is not None:
                    await self._companion.drained()
            case StopWriting(abandon=abandon):
                await self._stop_writing(abandon=abandon)
            case Copy() | CutTo() | BeginAt():
                raise AssertionError("what an answer asks for is done where the answer is taken")
            case _:
                assert_never(step)

    async def _open(self, must_exist: bool) -> None:
        record = self.record
        log = await self._in_thread(lambda: self._folder.open(record, must_exist=must_exist))
        self._adopt_rules(log, record)
        log.visibility.on_applied, log.visibility.on_damage = self._advance_start, self._repairs_rows
        self._services.store.add(log.chain.size_bytes)  # until all are measured again
        self._log = log
        self._replica.opened(log)
        if log.chain.damages:
            self._replica.damaged(log.failure or CorruptLog("a part of the log is damaged"))

    async def _open_companion(self, must_exist: bool, epoch: Epoch | None) -> None:
        """All committed records are delivered before the replica has the log: what was removed is hidden first."""
        record, services = self.record, self._services
        log = await self._in_thread(lambda: self._folder.companion.open(record, must_exist=must_exist))
        services.store.add(log.chain.size_bytes)
        companion = Companion(self, log, services, self.companion_from)
        try:
            if log.failure is not None:
                raise log.failure
            if epoch is not None:
                await self._in_thread(log.begin_epoch, epoch)
            await companion.deliver()
        except (NatslogError, OSError) as error:
            await companion.close()
            what = f"stream {record.name!r}: its companion log cannot be used"
            raise error if isinstance(error, NatslogError) else storage_error(error, what) from error
        self._companion = companion
        self._replica.companion_opened(log, companion.delivered)
        if epoch is not None:
            companion.begin_writing()

    async def _close_companion(self) -> None:
        if self._companion is not None:
            companion, self._companion = self._companion, None
            await companion.close()

    async def _begin_epoch(self, epoch: Epoch) -> None:
        log, record, services = self.usable_log(), self.record, self._services
        _require_what_was_purged(log, record)
        try:
            for one in self.logs:
                await self._in_thread(one.begin_epoch, epoch)
        except OSError as error:
            raise storage_error(error, f"stream {record.name!r}: its epoch could not begin") from error
        ingest = StreamIngest(
            record.name,
            log,
            stream_time=StreamTime(services.clock, log.newest_timestamp_us, log.idle_s),
            sender=self._nats,
            executor=services.writers,
            memory=services.memory,
            pace=services.pace,
            refuses=_refusal_of(record),
            ack_rules=self._ack_rules(record.settings),
            stats=self.stats,
            appended=self.appended,
            written=self.send_written,
            refusal=self.refusal,
            domain=lambda: services.domain(),
        )
        async with self._preparing:  # what was begun is completed sooner than begun again
            prepared, self._prepared = self._prepared, None
        ingest.dedupe, damage = await self._in_thread(rebuilt_dedupe, record.settings.dedupe_window_s, log, prepared)
        if damage is not None:
            logger.error(
                "stream %s: some message ids cannot be read: %s",
                record.name,
                damage.message,
                extra=event("stream.dedupe_partial", stream=record.name),
            )
            if len(record.replicas) > 1:  # a replica that has all of them should lead
                raise damage
        self._ingest = ingest
        self._adopted = record
        ingest.start(services.on_bug)
        if self._companion is not None:
            self._companion.begin_writing()

    async def _subscribe(self, subjects: tuple[str, ...], group: str | None) -> None:
        """Returns when the server has the subscription, or NATS is unreachable: then it gets it on reconnection."""
        nats, ingest = self._nats, self._ingest
        assert ingest is not None, "a leader has an ingest"
        if self._subscription is not None:
            await nats.move(self._subscription, subjects)
            return
        self._subscription = await nats.attach(subjects, ingest.receive, queue=group or "")
        if nats.is_up:
            try:
                await nats.flush(_SUBSCRIBE_WITHIN_S)
            except NatslogError as error:
                logger.warning(
                    "stream %s: NATS did not confirm the subscription: %s",
                    self.name,
                    error.message,
                    extra=event("stream.subscription_not_confirmed", stream=self.name),
                )

    async def serve_direct_requests(self) -> None:
        """Subscribes to the direct requests that the record permits, as long as this broker is subscribed as the
        leader.
        """
        services = self._services
        subjects = services.direct_subjects(self.record) if self._subscription is not None else ()
        await self._direct.serve(subjects, partial(services.receive_direct, self))

    async def _stop_writing(self, *, abandon: bool) -> None:
        if self._companion is not None:
            await self._companion.stop_writing()
        if self._ingest is not None:
            await (self._ingest.abandon() if abandon else self._ingest.stop())
            self._ingest = None

    def _ack_rules(self, settings: StreamSettings) -> AckRules:
        services = self._services
        return AckRules.of(settings.acks, settings.subjects, services.config.ack_reply_prefixes, services.is_recorded)

    def _adopt_settings(self) -> None:
        """What was edited, in force at once."""
        record, was = self.record, self._adopted
        if self._log is not None:
            self._adopt_rules(self._log, record)
        if self._ingest is None or record is was:
            return
        self._advance_start()
        self._adopted = record
        self._ingest.refuses = _refusal_of(record)
        if record.settings != was.settings:
            self._ingest.ack_rules = self._ack_rules(record.settings)
        takes_messages_now = was.import_state and not record.import_state  # ids of imported ones count
        if record.settings.dedupe_window_s != was.settings.dedupe_window_s or takes_messages_now:
            self._ingest.change_window(record.settings.dedupe_window_s)

    def _take_records(self, records: list[Delivered]) -> None:
        """Committed records of the companion log."""
        log, source = self.usable_log(), f"companion log of stream {self.name!r}"
        for _, kind, data in records:
            if kind == REMOVED:
                log.visibility.removed.record(from_bytes(data, source))
            elif kind == ERASED:
                erased = ErasedOffsets.from_bytes(data, source)
                log.visibility.removed.record(erased.bitmap(source))  # first: views that begin now do not have them
                log.erasures.add(erased, source)
                self._services.wake_upkeep()
            elif kind == RULES:
                log.visibility.count_anew(int(data), log.log_start_offset)
                self._adopt_rules(log, self.record)
            elif kind in KINDS:
                self.consumers.apply(kind, data, source)

    @property
    def removes_messages(self) -> bool:
        """Whether single messages may be hidden or expire, or an added rule waits for its record."""
        log, record = self._log, self.record
        return log is not None and (log.visibility.is_in_use or log.visibility.rules_version < record.rules_version)

    @staticmethod
    def _adopt_rules(log: ReplicaLog, record: StreamRecord) -> None:
        """Which messages are hidden."""
        log.settings = record.settings
        log.chain.purged_below = record.purged_below
        log.visibility.set_rules(rules_of(record), log.log_start_offset, record.rules_version)
        settings = record.settings
        tombstones_us = int(settings.tombstone_retention_s * 1e6) if settings.compact else None
        log.visibility.set_expiry(Expiry(settings.allow_ttl, tombstones_us), log.log_start_offset)


def _not_received(frames: Frames) -> None:
    """No subject is subscribed to."""


def rules_of(record: StreamRecord) -> tuple[Rule, ...]:
    """Oldest first; the last one is in force for new messages. Roll-ups of imported messages have no effect."""
    settings, rules, epoch = record.settings, [], Epoch(0)
    rolls_up = settings.allow_rollup and not record.import_state
    for former in record.former_rules:
        rules.append(Rule(epoch, former.max_messages_per_subject, former.compact, former.allow_rollup))
        epoch = former.until_epoch
    return (*rules, Rule(epoch, settings.max_messages_per_subject, settings.compact, rolls_up))


def _refusal_of(record: StreamRecord) -> NatslogError | None:
    """Why the stream takes no messages, if an operator decided so."""
    if record.sealed:
        return StreamSealed(
            f"stream {record.name!r} is sealed and therefore permanently read-only: write to another stream"
        )
    if record.import_state == "importing":
        return importing(record)
    if record.paused:
        return StreamPaused(f"stream {record.name!r} is paused: resume it, then send the message again")
    return None


def _is_sealed(log: ReplicaLog, error: CorruptLog) -> bool:
    """Whether the error names offsets of one sealed segment."""
    start, end = error.facts.get("start"), error.facts.get("end")
    if not isinstance(start, int) or not isinstance(end, int):
        return False
    return any(
        isinstance(segment, SealedSegment) and segment.base_offset <= start and end <= following.base_offset
        for segment, following in pairwise(log.chain.snapshot())
    )


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
