"""Executes the steps of a replica: on its files, on NATS, and on the parts that write while it leads.

The log is written by one owner at a time: the ingest while the replica leads, copies otherwise. What the steps are, and
when, is decided by `cluster.replica`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, assert_never

from natslog.cluster.replica_steps import (
    BeginEpoch,
    Close,
    Copy,
    Drain,
    Open,
    OpenCompanion,
    Repair,
    SetAside,
    Step,
    StopWriting,
    Subscribe,
    Unsubscribe,
)
from natslog.cluster.roles import BeginAt, CutTo
from natslog.errors import CorruptLog, NatslogError
from natslog.ingest.ack_rules import AckRules
from natslog.log import ReplicaLog
from natslog.log_events import event
from natslog.model import Epoch, StreamRecord
from natslog.node.cluster_clock import StreamTime
from natslog.node.replicas.companion import CompanionLog
from natslog.node.replicas.direct_requests import DirectRequests
from natslog.node.replicas.log_folder import storage_error
from natslog.node.replicas.replicated_log import ReplicatedLog
from natslog.node.replicas.settings_in_force import adopt_settings, refusal_of
from natslog.node.replicas.standby import Standby
from natslog.node.threads import in_thread
from natslog.node.writes.dedupe_rebuild import PreparedDedupe, prepared_dedupe, rebuilt_dedupe
from natslog.node.writes.stream_ingest import StreamIngest
from natslog.wire.frames import Frames

if TYPE_CHECKING:
    from natslog.node.replicas.replica_driver import ReplicaDriver
    from natslog.node.replicas.services import Services
    from natslog.node.replicas.stream import HostedStream

logger = logging.getLogger("natslog.node")

_SUBSCRIBE_WITHIN_S = 2.0
_PREPARED_FOR_S = 30.0


class StepExecutor:
    """Of one replica. In the event loop.

    Attributes:
        messages: the log of messages, while it is open. ingest: of the leader. nats: the connection of this stream.
        standby: the subscription of a follower.
    """

    def __init__(self, driver: ReplicaDriver, stream: HostedStream, services: Services) -> None:
        self.messages: ReplicatedLog | None = None
        self.ingest: StreamIngest | None = None
        self.nats = services.nats.lane(driver.record.id)
        self._driver, self._stream, self._services = driver, stream, services
        self._folder = services.log_folder(driver.record)
        self._subscription: object | None = None
        self._is_unsubscribing = False
        self._direct = DirectRequests(self.nats)
        self.standby = Standby(driver, self.nats, services, self._ack_rules)
        self._adopted = driver.record  # whose settings are in force
        self._prepared: PreparedDedupe | None = None
        self._preparing = asyncio.Lock()

    @property
    def is_subscribed(self) -> bool:
        """Whether messages are still received."""
        return self._subscription is not None or self._is_unsubscribing

    async def perform(self, step: Step) -> None:
        """Raises NatslogError: it failed."""
        driver, companion = self._driver, self._driver.companion
        match step:
            case Open(must_exist=must_exist):
                await self._open(must_exist)
            case OpenCompanion(must_exist=must_exist, epoch=epoch):
                await self._open_companion(must_exist, epoch)
            case SetAside():
                await driver.in_thread(self._folder.set_aside, driver.name)
            case Repair(messages=messages, companion=of_companion):
                await self._repair(messages, of_companion)
            case Close():
                await self.standby.quiesced()
                log = self._log()
                for one in driver.replicated:
                    one.mark_sessions()  # followers request from another leader
                self.messages = None
                await companion.close_log()
                await driver.in_thread(log.close)
            case BeginEpoch(epoch=epoch):
                await self._begin_epoch(epoch)
            case Subscribe(subjects=subjects, group=group):
                await self._subscribe(subjects, group)
                await self.serve_direct_requests()
                await self._services.jetstream.consumers.lead(self._stream)
                self._services.jetstream.advisories.began_to_lead(self._stream)
            case Unsubscribe():
                await self._services.jetstream.consumers.end(self._stream)
                await self._direct.serve((), _not_received)
                await self._unsubscribe()
            case Drain():
                if self.ingest is not None:
                    await self.ingest.drained()
                await companion.drained()
            case StopWriting(abandon=abandon):
                await companion.stop_writing()
                if self.ingest is not None:
                    await (self.ingest.abandon() if abandon else self.ingest.stop())
                    self.ingest = None
            case Copy() | CutTo() | BeginAt():
                raise AssertionError("what an answer asks for is done where the answer is taken")
            case _:
                assert_never(step)

    def _log(self) -> ReplicaLog:
        assert self.messages is not None, "the step is of an open log"
        return self.messages.log

    # ---- files ----

    async def _open(self, must_exist: bool) -> None:
        driver, record = self._driver, self._driver.record
        log = await driver.in_thread(lambda: self._folder.open(record, must_exist=must_exist))
        adopt_settings(log, record)
        log.visibility.on_applied, log.visibility.on_damage = driver.advance_start, driver.repairs_rows
        self._services.store.add(log.chain.size_bytes)  # until all are measured again
        self.messages = ReplicatedLog(driver, log)
        driver.replica.opened(log)
        if log.chain.damages:
            driver.replica.damaged(log.failure or CorruptLog("a part of the log is damaged"))

    async def _open_companion(self, must_exist: bool, epoch: Epoch | None) -> None:
        """All committed records are delivered before the replica has the log: what was removed is hidden first."""
        driver, record = self._driver, self._driver.record
        log = await driver.in_thread(lambda: self._folder.companion.open(record, must_exist=must_exist))
        self._services.store.add(log.chain.size_bytes)
        opened = CompanionLog(driver, log)
        try:
            if log.failure is not None:
                raise log.failure
            if epoch is not None:
                await driver.in_thread(log.begin_epoch, epoch)
            await opened.deliver()
        except (NatslogError, OSError) as error:
            await opened.close()
            what = f"stream {record.name!r}: its companion log cannot be used"
            raise error if isinstance(error, NatslogError) else storage_error(error, what) from error
        driver.companion.log = opened
        driver.replica.companion_opened(log, opened.delivered)
        if epoch is not None:
            opened.begin_writing()

    async def _repair(self, messages: bool, of_companion: bool) -> None:
        driver = self._driver
        if messages:
            await driver.in_thread(self._folder.repair, self._log(), driver.name)
        if of_companion:
            await driver.companion.close_log()
            await driver.in_thread(self._folder.companion.set_aside, driver.name)
        what = f"the log from offset {self._log().log_end_offset} on" if messages else "the companion log"
        driver.report("activity.replica.repaired", f"{what} is fetched again from the leader")

    # ---- leading ----

    async def _begin_epoch(self, epoch: Epoch) -> None:
        driver, services, log, record = self._driver, self._services, self._log(), self._driver.record
        companion = driver.companion.log
        _require_what_was_purged(log, record)
        try:
            for one in (log, companion.log) if companion is not None else (log,):
                await driver.in_thread(one.begin_epoch, epoch)
        except OSError as error:
            raise storage_error(error, f"stream {record.name!r}: its epoch could not begin") from error
        ingest = StreamIngest(
            record.name,
            log,
            stream_time=StreamTime(services.clock, log.newest_timestamp_us, log.idle_s),
            sender=self.nats,
            executor=services.writers,
            memory=services.memory,
            pace=services.pace,
            refuses=refusal_of(record),
            ack_rules=self._ack_rules(record),
            stats=driver.stats,
            appended=driver.appended,
            written=driver.send_written,
            refusal=driver.refusal,
            domain=services.jetstream.domain,
        )
        async with self._preparing:  # what was begun is completed sooner than begun again
            prepared, self._prepared = self._prepared, None
        ingest.dedupe, damage = await driver.in_thread(rebuilt_dedupe, record.settings.dedupe_window_s, log, prepared)
        if damage is not None:
            logger.error(
                "stream %s: some message ids cannot be read: %s",
                record.name,
                damage.message,
                extra=event("stream.dedupe_partial", stream=record.name),
            )
            if len(record.replicas) > 1:  # a replica that has all of them should lead
                raise damage
        self.ingest, self._adopted = ingest, record
        ingest.start(services.broker.halt)
        if companion is not None:
            companion.begin_writing()

    async def _subscribe(self, subjects: tuple[str, ...], group: str | None) -> None:
        """Returns when the server has the subscription, or NATS is unreachable: then it gets it on reconnection."""
        ingest = self.ingest
        assert ingest is not None, "a leader has an ingest"
        self._subscription = self._subscription or await self.standby.taken_over(subjects, ingest)
        if self._subscription is not None:
            await self.nats.move(self._subscription, subjects)
            return
        self._subscription = await self.nats.attach(subjects, ingest.receive, queue=group or "")
        if self.nats.is_up:
            try:
                await self.nats.flush(_SUBSCRIBE_WITHIN_S)
            except NatslogError as error:
                logger.warning(
                    "stream %s: NATS did not confirm the subscription: %s",
                    self._driver.name,
                    error.message,
                    extra=event("stream.subscription_not_confirmed", stream=self._driver.name),
                )

    async def _unsubscribe(self) -> None:
        if self._subscription is not None:
            handle, self._subscription = self._subscription, None
            self._is_unsubscribing = True
            await self.nats.detach(handle)
            self._is_unsubscribing = False

    async def serve_direct_requests(self) -> None:
        """Subscribes to the direct requests that the record permits, as long as this broker is subscribed as the
        leader.
        """
        services = self._services
        subjects = services.jetstream.direct_subjects(self._driver.record) if self._subscription is not None else ()
        await self._direct.serve(subjects, partial(services.jetstream.receive_direct, self._stream))

    # ---- message ids, before it leads ----

    async def prepare_to_lead(self, log: ReplicaLog) -> None:
        """Reads the message ids that the leader has to know, before that one stops taking messages.

        Raises:
            CorruptLog, FileUnavailable: the log cannot be read.
        """
        window_s = self._driver.record.settings.dedupe_window_s
        async with self._preparing:
            known, self._prepared = self._prepared, None
            prepared = await in_thread(self._services.readers, prepared_dedupe, window_s, log, known)
            self._prepared = prepared

        def forget() -> None:
            if self._prepared is prepared:
                self._prepared = None

        asyncio.get_running_loop().call_later(_PREPARED_FOR_S, forget)

    async def forget_prepared(self) -> None:
        """What was read lacks ids that are stored now."""
        async with self._preparing:
            self._prepared = None

    # ---- settings ----

    def adopt_settings(self) -> None:
        """What was edited, in force at once."""
        driver, ingest, record, was = self._driver, self.ingest, self._driver.record, self._adopted
        if self.messages is not None:
            adopt_settings(self.messages.log, record)
        if ingest is None or record is was:
            return
        driver.advance_start()
        self._adopted = record
        ingest.refuses = refusal_of(record)
        if record.settings != was.settings:
            ingest.ack_rules = self._ack_rules(record)
        takes_messages_now = was.import_state and not record.import_state  # ids of imported ones count
        if record.settings.dedupe_window_s != was.settings.dedupe_window_s or takes_messages_now:
            ingest.change_window(record.settings.dedupe_window_s)

    def _ack_rules(self, record: StreamRecord) -> AckRules:
        settings, services = record.settings, self._services
        return AckRules.of(settings.acks, settings.subjects, services.config.ack_reply_prefixes, services.is_recorded)


def _not_received(frames: Frames) -> None:
    """No subject is subscribed to."""


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
