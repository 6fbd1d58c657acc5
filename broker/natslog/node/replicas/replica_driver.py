"""Drives the replica of one stream on this broker: passes every input to `cluster.replica`, and acts on the result.

Theory of operation. Every input goes to the state machine first; then `act` executes the result: it releases messages
that the high watermark (HW) has passed, passes on notices, and executes steps one after another in a separate task of
the stream (`step_executor`). What is decided is in `cluster`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, assert_never

from natslog.cluster.activity import Kind
from natslog.cluster.damage import Losses, Remedy, range_of, remedy_for
from natslog.cluster.features import STOP_LEVEL
from natslog.cluster.removals import decides_removals
from natslog.cluster.replica import Replica
from natslog.cluster.replica_steps import (
    Damaged,
    Follow,
    Halted,
    Notice,
    Open,
    OpenCompanion,
    Propose,
    ProposeIsr,
    StandBy,
    Step,
    Unfollow,
)
from natslog.errors import CorruptLog, NatslogError, StorageFailed
from natslog.log import ReplicaLog
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.sealed import SealedSegment
from natslog.log_events import event
from natslog.model import BrokerId, Epoch, StreamRecord
from natslog.node.clock import monotonic_ms
from natslog.node.replicas.companion import Companion
from natslog.node.replicas.replicated_log import ReplicatedLog
from natslog.node.replicas.services import Services
from natslog.node.replicas.step_executor import StepExecutor
from natslog.node.threads import in_thread
from natslog.node.writes.ingest_memory import IngestStats

if TYPE_CHECKING:
    from natslog.node.replicas.stream import HostedStream

logger = logging.getLogger("natslog.node")


class ReplicaDriver:
    """In the event loop, where nothing else is stated.

    Attributes:
        record: as the metadata has it now, or had it last.
        advanced: set, and replaced, whenever HW moves or the role changes.
        watchers: set at the same times, and not replaced.
        losses: offsets that are damaged on every replica.
    """

    def __init__(self, stream: HostedStream, record: StreamRecord, me: BrokerId, services: Services) -> None:
        self.me = me
        self.record = record
        self.advanced = asyncio.Event()
        self.watchers: set[asyncio.Event] = set()
        self.losses = Losses()
        self.stats = IngestStats(services.commit_latency)
        self.replica = Replica(me, record, services.around, monotonic_ms())
        self.companion = Companion(self)
        self.steps = StepExecutor(self, stream, services)
        self.services = services
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._reconciled: asyncio.Event | None = None  # made where it is waited for
        self._is_quiet = False
        self._is_transferring = False
        self._led_epoch: Epoch | None = None  # of which all were notified
        self._refusal: NatslogError | None = None  # that of the replica, for other threads

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def log(self) -> ReplicaLog | None:
        messages = self.steps.messages
        return None if messages is None else messages.log

    def refusal(self) -> NatslogError | None:
        """Why nothing may be appended now, to either log. From any thread."""
        return self._refusal

    async def in_thread(self, work: Callable[..., Any], *arguments: object) -> Any:
        return await in_thread(self.services.writers, work, *arguments)

    # ---- inputs ----

    def changed(self, record: StreamRecord | None) -> None:
        """The metadata has this record now; None: deleted, or moved away."""
        if record is not None:
            self.record = record
        self.replica.changed(record)
        self.steps.adopt_settings()
        self.act()

    def tick(self, contact_ms: dict[BrokerId, float]) -> None:
        for log, is_companion in ((self.log, False), (self.companion.files, True)):
            if log is not None and isinstance(log.failure, StorageFailed):
                self.replica.damaged(log.failure, is_companion=is_companion)
        self.replica.tick(monotonic_ms(), contact_ms)
        self.act()
        self._is_quiet = self._task is None and self.replica.is_quiet

    def pass_time_if_quiet(self, now_ms: float, away: frozenset[BrokerId]) -> bool:
        """Passes the time to a replica that is quiet, while `Calm` goes on. False, and nothing is done: it is to be
        ticked. `away`: followers without contact.
        """
        if not self._is_quiet or (away and self.replica.is_followed_by_any(away)):
            return False
        if any(log is not None and log.failure is not None for log in (self.log, self.companion.files)):
            return False
        self.replica.pass_time(now_ms)
        return True

    def appended(self, end_offset: int, run_start: int | None = None) -> None:
        """The leader's log ends here now, on stable storage; from `run_start` on it is one run, where given."""
        self.replica.appended(end_offset, run_start)
        if (messages := self.steps.messages) is not None:
            messages.mark_sessions(end_offset=end_offset)
            self.progress()
            messages.answer_sessions()

    def send_written(self, batch: EncodedBatch) -> bool:
        """See `ReplicatedLog.send_written`."""
        messages = self.steps.messages
        return messages is not None and messages.send_written(batch)

    # ---- the end of a role ----

    async def transfer_leadership(self, to: BrokerId) -> None:
        """Returns when it was transferred, or could not be in time: then this replica remains leader."""
        record, services = self.record, self.services
        has_ids = record.settings.dedupe_window_s > 0 and services.group.state.feature_level >= STOP_LEVEL
        if has_ids and self.replica.is_leading and to != self.me and to in record.isr:
            await services.host.prepare_successor(to, record.id)
        if not self.replica.transfer(to, monotonic_ms()):
            return
        self._is_transferring = True
        self.act()
        while self._is_transferring:
            await self.reconciled.wait()

    def leave(self) -> bool:
        """Fetches no more. Returns whether this broker is to leave the in-sync replicas of the stream."""
        is_to_leave = self.replica.leave()
        self.act()
        return is_to_leave

    async def stop(self) -> None:
        """Returns when received messages are appended, and acknowledged as far as they are committed, and the log is
        closed.
        """
        self.replica.stop()
        self.act()
        await self.finished()

    async def finished(self) -> None:
        """Returns when the log is permanently closed."""
        while not self.replica.is_finished:
            await self.reconciled.wait()

    # ---- damage ----

    def note_damage(self, error: NatslogError, *, found_in: ReplicatedLog | None = None) -> None:
        """Data on disk is damaged. From any thread. Args: found_in: None: the log of messages that is open then."""

        def note() -> None:
            if found_in is not None and found_in not in self.replicated:
                return
            is_companion = found_in is not None and found_in.is_companion
            log = None if is_companion else self.log
            is_sealed = log is not None and _is_in_sealed_segment(log, error)
            remedy = remedy_for(error, self.record, is_in_sealed_segment=is_sealed)
            if remedy is Remedy.LOG or log is None or not isinstance(error, CorruptLog):
                self.repair_all(error, is_companion=is_companion)
            elif log.scrub.note(error):
                self.report("activity.replica.damaged", error.message)
                self.services.broker.damage_found()

        self._loop.call_soon_threadsafe(note)

    def repair_all(self, error: NatslogError, *, is_companion: bool = False) -> None:
        """The log is truncated at the damage, and the rest is fetched again; a companion log as a whole."""
        self.replica.damaged(error, is_companion=is_companion)
        self.act()

    def repairs_rows(self, error: CorruptLog) -> bool:
        """See `Visibility.on_damage`. From any thread."""
        if not self.losses.are_repairable(error, self.record, self.me):
            return False
        self.note_damage(error)
        return True

    def report(self, kind: Kind, message: str) -> None:
        """An event of this replica, for `__activity`."""
        self.services.broker.report_replica(kind, self.name, self.record.id, message)

    # ---- results of an input ----

    def act(self) -> None:
        self._note_role()
        self.progress()
        step = self.replica.next_step() if self._task is None else None
        self.dispatch_notices()
        if step is not None:
            self._task = self.services.tasks.start(self._carry_out(step), f"stream {self.name}")
        if self._is_transferring and not self.replica.is_transferring:
            self._is_transferring = False
            self.note_reconciled()
        elif self._task is None:
            self.note_reconciled()

    def progress(self) -> None:
        """HW may have moved. No step follows from that: commits and fetches, of which there are many, end here."""
        self._is_quiet = False
        self._release()
        self.dispatch_notices()

    def _release(self) -> None:
        """HW is here now."""
        leading, messages, high_watermark = self.replica.leading, self.steps.messages, self.replica.logs.high_watermark
        self._refusal = None if leading is None else leading.refusal()
        self.companion.advance(self.replica.logs.companion_high_watermark)
        if messages is None or messages.log.chain.committed == high_watermark:
            return
        log = messages.log
        log.chain.committed = high_watermark
        if not log.visibility.has_rules:  # with rules, as soon as they were applied
            self.advance_start()
        self.wake()
        if leading is not None:
            messages.mark_sessions(has_records=False)
        if self.steps.ingest is not None:
            self.steps.ingest.release(high_watermark)

    def advance_start(self) -> None:
        """The leader applies limits of messages and bytes to what is committed now. From any thread."""
        log = self.log
        if log is None or not decides_removals(self.record, leads=self._led_epoch is not None):
            return
        try:
            log.limits.advance()
        except CorruptLog as error:
            self.note_damage(error)

    def log_start_moved(self) -> None:
        """Retention has removed the oldest messages of the log that is led here. From any thread."""

        def mark() -> None:
            if self.steps.messages is not None:
                self.steps.messages.mark_sessions()

        self._loop.call_soon_threadsafe(mark)

    def wake(self) -> None:
        """HW has moved, or the role has changed."""
        self.advanced.set()
        self.advanced = asyncio.Event()
        for watcher in self.watchers:
            watcher.set()

    def dispatch_notices(self) -> None:
        for notice in self.replica.take_notices():
            self._dispatch(notice)

    def _dispatch(self, notice: Notice) -> None:
        services = self.services
        match notice:
            case Follow(leader=leader):
                for one in self.replicated:
                    services.host.follow(leader, one)
            case Unfollow():
                for one in self.replicated:
                    services.host.forget(one)
            case StandBy(subjects=subjects):
                self.steps.standby.subscribe(subjects)
            case Propose(command=command):
                services.proposals.propose(command)
            case ProposeIsr(change=change):
                services.proposals.propose_isr(change)
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
    def replicated(self) -> list[ReplicatedLog]:
        """The logs that are open."""
        companion = self.companion.log
        both = self.steps.messages, None if companion is None else companion.replicated
        return [one for one in both if one is not None]

    # ---- steps ----

    async def _carry_out(self, first: Step) -> None:
        step: Step | None = first
        while step is not None:
            try:
                await self.steps.perform(step)
            except NatslogError as error:
                logger.error(
                    "stream %s: %s",
                    self.name,
                    error.message,
                    extra=event("stream_unavailable", stream=self.name, reason=error.code),
                )
                self.replica.failed(error)
            else:
                if not isinstance(step, Open | OpenCompanion):
                    self.replica.done()
            self._note_role()
            self._release()
            self.steps.adopt_settings()
            step = self.replica.next_step()
            self.dispatch_notices()
        self._task = None
        self.note_reconciled()
        self.act()

    @property
    def reconciled(self) -> asyncio.Event:
        """Set, and replaced, whenever the replica matches its record as far as possible, and when a transfer of its
        leadership has ended.
        """
        if self._reconciled is None:
            self._reconciled = asyncio.Event()
        return self._reconciled

    def note_reconciled(self) -> None:
        if self._reconciled is not None:
            self._reconciled.set()
            self._reconciled = None

    def _note_role(self) -> None:
        """If it became leader of an epoch, or stopped being leader, waiting readers and followers are notified."""
        leading = self.replica.leading
        led_epoch = None if leading is None else leading.epoch
        if self._led_epoch == led_epoch:
            return
        self._led_epoch = led_epoch
        if leading is not None:
            self.services.host.appointed(self.record)
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
        for one in self.replicated:
            one.mark_sessions()
        self.wake()


def _is_in_sealed_segment(log: ReplicaLog, error: NatslogError) -> bool:
    """Whether the error names offsets of one sealed segment."""
    damaged = range_of(error)
    return damaged is not None and any(
        isinstance(segment, SealedSegment) and segment.base_offset <= damaged[0] and damaged[1] <= following.base_offset
        for segment, following in pairwise(log.chain.snapshot())
    )
