"""One of the logs of a replica, as brokers copy it from each other: the log of messages, or the companion log.

Sessions of followers (`fetch_sessions`) and fetchers (`fetcher`) work with this. What a position, a request or an
answer means is decided by the replica (`cluster.replica`), for both logs in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

from natslog.cluster.replica_steps import Copy
from natslog.cluster.roles import BeginAt, CutTo, FetchPosition, LeaderReplica, Verdict
from natslog.errors import CorruptAnswer, NatslogError, ShuttingDown
from natslog.log import ReplicaLog
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.segment import ActiveSegment
from natslog.log.stored_ids import StoredIds
from natslog.log_events import event
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, companion_id
from natslog.node.clock import monotonic_ms
from natslog.node.replicas.log_folder import storage_error

if TYPE_CHECKING:
    from natslog.node.replicas.replica_driver import ReplicaDriver

logger = logging.getLogger("natslog.node")

_TAIL_BYTES = 1024 * 1024

Append = Callable[[ReplicaLog], Any]
"""Appends the records of an answer; may return an awaitable."""


class SessionMark(Protocol):
    """The interface of a follower's session for a log."""

    def mark(self, log_id: StreamId, *, has_records: bool, end_offset: int | None = None) -> None: ...

    def answer(self) -> None: ...

    def send_written(self, replicated: ReplicatedLog, batch: EncodedBatch) -> bool: ...

    def is_outpaced(self, log_id: StreamId) -> bool: ...


class ReplicatedLog:
    """From the opening of a log until it is closed. In the event loop.

    Attributes:
        id: as brokers name it to each other. sessions: followers' links that are notified of new data.
        leader_log_start: of a follower: the log start of its leader.
    """

    def __init__(self, driver: ReplicaDriver, log: ReplicaLog, *, is_companion: bool = False) -> None:
        self.id = companion_id(driver.record.id) if is_companion else driver.record.id
        self.name = f"{driver.record.name} (companion log)" if is_companion else driver.record.name
        self.log = log
        self.is_companion = is_companion
        self.sessions: set[SessionMark] = set()
        self.leader_log_start = 0
        self._driver, self._replica = driver, driver.replica

    @property
    def record(self) -> StreamRecord:
        return self._driver.record

    @property
    def leading(self) -> LeaderReplica | None:
        return self._replica.leading

    @property
    def high_watermark(self) -> int:
        logs = self._replica.logs
        return logs.companion_high_watermark if self.is_companion else logs.high_watermark

    def is_at_tail(self, offset: int) -> bool:
        """Whether the records from `offset` on are few, and in the segment that was just written."""
        return is_at_tail(self.log, offset)

    def note_damage(self, error: NatslogError) -> None:
        """From any thread. Nothing is done if this log is closed by then: another one may be open in its place."""
        self._driver.note_damage(error, found_in=self)

    # ---- leading: for the sessions of followers ----

    def mark_sessions(self, *, has_records: bool = True, end_offset: int | None = None) -> None:
        """There is new data for the followers: records, another log start or role, or only another HW.

        Args:
            end_offset: of the log now, where it has grown.
        """
        for session in self.sessions:
            session.mark(self.id, has_records=has_records, end_offset=end_offset)

    def answer_sessions(self) -> None:
        for session in tuple(self.sessions):
            session.answer()

    def send_written(self, batch: EncodedBatch) -> bool:
        """A commit of the leader is written, and is synced next: followers sync it meanwhile. Whether one has it."""
        return sum(session.send_written(self, batch) for session in self.sessions) > 0

    def is_outpaced(self) -> bool:
        """Whether a replica is catching up, and the log grows as fast as it can copy."""
        return any(session.is_outpaced(self.id) for session in self.sessions)

    def judged(self, position: FetchPosition) -> Verdict:
        return self._replica.judged(position, is_companion=self.is_companion)

    def fetched(self, follower: BrokerId, position: FetchPosition, incarnation: str) -> Verdict:
        """A follower requests records from this position on."""
        verdict = self._replica.fetched(follower, position, incarnation, monotonic_ms(), is_companion=self.is_companion)
        self._driver.progress()
        return verdict

    # ---- following: for the fetcher ----

    def position(self) -> FetchPosition | None:
        return self._replica.position(is_companion=self.is_companion)

    def unresponsive_leader(self, now_ms: float, contact_ms: float, ended: Collection[BrokerId]) -> Epoch | None:
        """For both logs it is reported once."""
        return None if self.is_companion else self._replica.unresponsive_leader(now_ms, contact_ms, ended)

    def is_behind(self, leader_high_watermark: int) -> bool:
        """Whether the leader has committed more than the log here holds."""
        return leader_high_watermark > self.log.log_end_offset

    def leader_starts_at(self, epoch: Epoch, log_start_offset: int) -> None:
        """The leader of this epoch has removed what lies below this offset. Of messages its retention decides, and
        maintenance applies it here.
        """
        following = self._replica.following
        if following is not None and following.epoch == epoch:
            self.leader_log_start = log_start_offset
            if not self.is_companion:
                self.log.chain.limited_below = max(self.log.chain.limited_below, log_start_offset)

    def lacks_ids(self, epoch: Epoch, serial: int) -> bool:
        """See `Replica.lacks_ids`."""
        return not self.is_companion and self._replica.lacks_ids(epoch, serial)

    async def adopt_ids(self, epoch: Epoch, serial: int, data: bytes) -> None:
        """Message ids that the leader keeps of removed rows, as `kept_ids` has answered.

        Raises:
            CorruptAnswer: they are none. StorageFull, StorageFailed: they could not be stored.
            ShuttingDown: the log was closed meanwhile.
        """
        self._require_open()
        try:
            found = StoredIds.from_bytes(data)
        except ValueError as error:
            raise CorruptAnswer(f"stream {self.name!r}: the leader sent message ids that are incomplete") from error
        try:
            await self._driver.in_thread(self.log.ids.adopt, found)
        except OSError as error:
            raise storage_error(error, f"stream {self.name!r}: message ids could not be stored") from error
        self._require_open()
        await self._driver.steps.forget_prepared()  # it lacks them
        self._replica.adopted_ids(epoch, serial)

    def _require_open(self) -> None:
        if self not in self._driver.replicated:
            raise ShuttingDown(f"the log of {self.name} was closed")

    async def answered(self, epoch: Epoch, verdict: Verdict, append: Append | None, high_watermark: int) -> bool:
        """Processes a leader's answer. Returns whether the log has changed, so that the position is to be sent at once.

        Args:
            append: None where the answer has no records.

        Raises:
            NatslogError: the log could not be changed; it is asked for again later.
        """
        if self._is_to_roll() and (append is not None or not self.is_companion):
            append = self._append_to_new_segment(append)
        step = self._replica.answered(
            epoch,
            verdict,
            high_watermark=high_watermark,
            has_records=append is not None,
            now_ms=monotonic_ms(),
            is_companion=self.is_companion,
        )
        if step is None:
            self._driver.act()
            return False
        try:
            await self._change(step, append)
        except NatslogError as error:
            self._replica.failed(error)
            raise
        except asyncio.CancelledError:  # the fetcher is closed; the result of the thread is in the log
            self._replica.failed(ShuttingDown("fetching has ended"))
            raise
        else:
            self._replica.done()
        finally:
            self._driver.note_reconciled()
            self._driver.act()
        return True

    def _is_to_roll(self) -> bool:
        """Whether the open segment of a follower is to be sealed. Of messages: because its erased rows can go then, or
        its small batches are merged. Of the companion log: because the leader has removed records that are in it; when
        the next ones are removed, so is this segment.
        """
        if not self.is_companion:
            return self.log.is_to_be_rolled
        last = self.log.chain.last
        is_open = isinstance(last, ActiveSegment) and len(last.index) > 0 and self.log.failure is None
        return is_open and last is not None and last.base_offset < self.leader_log_start

    def _append_to_new_segment(self, append: Append | None) -> Append:
        async def rolled(log: ReplicaLog) -> None:
            await self._driver.in_thread(log.roll)
            if append is not None and (work := append(log)) is not None:
                await work

        return rolled

    async def _change(self, step: Copy | CutTo | BeginAt, append: Append | None) -> None:
        log, name = self.log, self.record.name
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
                        "log.truncated", stream=name, path=log.folder, offset=log.log_end_offset, end_offset=end
                    ),
                )
                await self._driver.in_thread(log.cut_to, end)
            case BeginAt(log_start_offset=start, epoch=epoch):
                logger.warning(
                    "%s: the log starts again at %d, the start of the leader's log",
                    log.folder,
                    start,
                    extra=event("log.started_again", stream=name, path=log.folder, offset=start, epoch=epoch),
                )
                await self._driver.in_thread(log.begin_at, start, epoch)


def is_at_tail(log: ReplicaLog, offset: int) -> bool:
    """Whether the records from `offset` on are few, and in the segment that was just written."""
    last = log.chain.last
    if not isinstance(last, ActiveSegment) or offset < last.base_offset:
        return False
    first = last.index.first_covering(offset)
    return first == len(last.index) or last.size_bytes - last.index.positions[first] <= _TAIL_BYTES
