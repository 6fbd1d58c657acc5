"""A stream on this broker, as the rest of the broker sees it: its state, and what may be requested of it.

The replica itself is in the parts: `cluster.replica` decides, `replica_driver` passes inputs to it and acts on the
results, `step_executor` has the files and the subscription, `companion` the companion log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from natslog.cluster.activity import Kind
from natslog.cluster.damage import has_others_in_sync
from natslog.cluster.roles import FollowerReplica, LeaderReplica
from natslog.errors import CorruptLog, NatslogError, NoLeader
from natslog.log import ReplicaLog
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord
from natslog.node.clock import wait_for_at_most
from natslog.node.replicas.replica_driver import ReplicaDriver
from natslog.node.replicas.replicated_log import ReplicatedLog, is_at_tail
from natslog.node.replicas.services import Services
from natslog.node.writes.stream_ingest import StreamIngest

_LEADS_EVERY_S = 0.2


class HostedStream:
    """A replica on this broker. In the event loop, where nothing else is stated.

    Attributes:
        driver: passes inputs to the replica. companion: the companion log. nats: the connection of this stream.
        consumers: of the JetStream API.
        sent_bytes: to readers, from this replica, as far as answers were begun.
        scrubbed_bytes: read back by scrubbing. scrub_damaged: damaged ranges that it found. scrub_repaired:
            those that were repaired from another replica. losses: offsets that are damaged on every replica.
    """

    def __init__(self, record: StreamRecord, me: BrokerId, services: Services) -> None:
        self.me = me
        self.driver = ReplicaDriver(self, record, me, services)
        self.companion = self.driver.companion
        self.consumers = self.companion.consumers
        self.losses = self.driver.losses
        self.stats = self.driver.stats
        self.watchers = self.driver.watchers
        self.nats = self.driver.steps.nats
        self.sent_bytes = 0
        self.scrubbed_bytes = 0
        self.scrub_damaged = self.scrub_repaired = 0
        self._services = services
        self._replica, self._steps = self.driver.replica, self.driver.steps

    # ---- the record ----

    @property
    def record(self) -> StreamRecord:
        """As the metadata has it now, or had it last."""
        return self.driver.record

    @property
    def name(self) -> str:
        return self.driver.record.name

    @property
    def id(self) -> StreamId:
        return self.driver.record.id

    # ---- its log ----

    @property
    def messages(self) -> ReplicatedLog | None:
        """The log of messages, as other brokers copy it; None where it is not open."""
        return self._steps.messages

    @property
    def log(self) -> ReplicaLog | None:
        """None where it is not open; `problem` says why."""
        messages = self._steps.messages
        return None if messages is None else messages.log

    def usable_log(self) -> ReplicaLog:
        """Raises the problem where there is one."""
        if (log := self.log) is None:
            raise self._replica.problem or CorruptLog(f"the log of stream {self.name!r} is not open yet")
        return log

    @property
    def logs(self) -> list[ReplicaLog]:
        """Those that are open."""
        return [log for log in (self.log, self.companion.files) if log is not None]

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.usable_log().folder

    def is_at_tail(self, offset: int) -> bool:
        """Whether the remaining records are few, and in the segment that was just written."""
        return is_at_tail(self.usable_log(), offset)

    @property
    def leader_log_start(self) -> int:
        """Of a follower: the log start of its leader."""
        messages = self._steps.messages
        return 0 if messages is None else messages.leader_log_start

    @property
    def high_watermark(self) -> int:
        return self._replica.logs.high_watermark

    @property
    def advanced(self) -> asyncio.Event:
        """Set, and replaced, whenever HW moves or the role changes."""
        return self.driver.advanced

    @property
    def removes_messages(self) -> bool:
        """Whether single messages may be hidden or expire, or an added rule waits for its record."""
        log = self.log
        return log is not None and (
            log.visibility.is_in_use or log.visibility.rules_version < self.record.rules_version
        )

    # ---- its role ----

    @property
    def leading(self) -> LeaderReplica | None:
        return self._replica.leading

    @property
    def following(self) -> FollowerReplica | None:
        return self._replica.following

    @property
    def leader_epoch(self) -> Epoch:
        """The epoch of the current role; all responses of this replica are of this epoch."""
        role = self._replica.leading or self._replica.following
        return role.epoch if role is not None else self.record.leader_epoch

    @property
    def ingest(self) -> StreamIngest | None:
        """Of the leader."""
        return self._steps.ingest

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
        return self._steps.is_subscribed

    @property
    def has_companion_records(self) -> bool:
        """Whether it leads, and has all committed records of the companion log, if there is one."""
        return self._replica.is_leading and not self.companion.is_missing

    @property
    def may_serve(self) -> bool:
        """Whether ranges below the HW known here may be served from here."""
        return self._replica.may_serve and self.record.import_state != "importing"

    @property
    def is_transferring(self) -> bool:
        """See `Replica.is_transferring`."""
        return self._replica.is_transferring

    @property
    def reconciled(self) -> asyncio.Event:
        """See `ReplicaDriver.reconciled`."""
        return self.driver.reconciled

    @property
    def outpaces_replica(self) -> bool:
        """Whether a replica is catching up, and the log grows as fast as it can copy."""
        messages = self._steps.messages
        return messages is not None and messages.is_outpaced()

    # ---- problems ----

    @property
    def problem(self) -> NatslogError | None:
        """Why the replica does not serve, or not fully."""
        return self._replica.problem or next((log.failure for log in self.logs if log.failure is not None), None)

    def error_for_clients(self, problem: NatslogError) -> NatslogError:
        """The error for clients if this replica has a problem: retriable if another replica may become leader."""
        if self.losses.is_final(problem, others_hold_it=self._replica.context.others_hold_it):
            return problem
        return NoLeader(
            f"broker {self.me} cannot use its replica of stream {self.name!r}: send the request to another broker, "
            f"or repeat it in a moment. {problem.message}",
            stream=self.name,
            broker=self.me,
            problem=problem.code,
        )

    @property
    def damage(self) -> NatslogError | None:
        """What was found damaged here, and takes the replica out of the candidates until it is repaired."""
        return self._replica.logs.damage

    @property
    def scrub_problem(self) -> NatslogError | None:
        """Which offsets scrubbing found damaged here. All others are served."""
        log = self.log
        return None if log is None else log.scrub.problem

    @property
    def has_others_in_sync(self) -> bool:
        """Whether another in-sync replica could serve in place of this one."""
        return has_others_in_sync(self.record, self.me)

    @property
    def is_to_be_repaired(self) -> bool:
        """Whether it is damaged, and is repaired from another replica."""
        return self._replica.logs.damage is not None and self._replica.context.others_hold_it

    def note_damage(self, error: NatslogError) -> None:
        """Messages on disk are damaged. From any thread."""
        self.driver.note_damage(error)

    def report(self, kind: Kind, message: str) -> None:
        """An event of this replica, for `__activity`."""
        self.driver.report(kind, message)

    # ---- requests ----

    async def written(self) -> None:
        """Returns when all that was received is appended, and committed as far as that is possible soon."""
        if self.ingest is not None:
            await self.ingest.drained()
        await self._committed(lambda log: log.log_end_offset)

    @property
    def is_quiescent(self) -> bool:
        """Whether `quiesced`, requested on the connection of the stream, returns at once. In the leader."""
        log, ingest = self.log, self.ingest
        return (
            log is not None and ingest is not None and ingest.is_quiescent and log.high_watermark >= log.log_end_offset
        )

    async def quiesced(self, *, is_on_its_connection: bool = False) -> None:
        """Returns when all that publishers have sent before the call is committed, or was refused. In the leader.

        Args:
            is_on_its_connection: what asks for it came over the connection of the stream, so messages did before it.

        Raises:
            NatsUnavailable: the server does not answer, so messages may be on their way.
        """
        if self.ingest is None:
            return
        if not is_on_its_connection:
            await self.nats.flush()
        await self.ingest.quiesced()
        end = self.usable_log().log_end_offset
        await self._committed(lambda _: end)

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

    async def serve_direct_requests(self) -> None:
        """See `StepExecutor.serve_direct_requests`."""
        await self._steps.serve_direct_requests()

    def roll_soon(self) -> None:
        """Of a follower: with the next answer of its leader, which is requested now."""
        following, messages = self._replica.following, self._steps.messages
        if following is not None and messages is not None and (leader := following.record.leader) is not None:
            self._services.host.follow(leader, messages)
