"""A stream on this broker: its record, its log, its role, its ingest and subscription."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from natslog.cluster.replica import FetchPosition, FollowerReplica, LeaderReplica
from natslog.errors import CorruptLog, NatslogError
from natslog.log import ReplicaLog
from natslog.log.segment import ActiveSegment
from natslog.model import BrokerId, StreamId, StreamRecord
from natslog.node.clock import monotonic_ms, now_us
from natslog.node.writes.ingest_memory import IngestStats
from natslog.node.writes.stream_ingest import StreamIngest
from natslog.wire.link import NatsLink

logger = logging.getLogger("natslog.node")

_USUAL_SHARE = 0.25
_UNSEALED_IN_PEACE = 8
_LONGEST_PAUSE_S = 0.25
_TAIL_BYTES = 1024 * 1024


class SessionMark(Protocol):
    """A follower's session, as a stream sees it."""

    def mark(self, stream_id: StreamId, *, has_records: bool) -> None: ...


class Pacer:
    """Keeps background work of one thread to a share of a core, so that commits have the rest."""

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        self.is_stopping = is_stopping
        self.share = _USUAL_SHARE
        self._worked_s = time.thread_time()

    def pause(self) -> None:
        """Sleeps as long as the work since the last pause asks for."""
        worked_s = time.thread_time() - self._worked_s
        if not self.is_stopping():
            time.sleep(min(_LONGEST_PAUSE_S, worked_s * (1 / self.share - 1)))
        self._worked_s = time.thread_time()


class HostedStream:
    """A replica, and the role it has: leading (with ingest and a subscription), following, or neither for now.

    Attributes:
        record: as its role was made from; `wanted`: as the metadata has it now.
        log: None where it could not be opened; `problem` says why, and every read and write answers with it.
        writing: held by whoever writes the log or changes the role.
        sessions: followers' links that want to hear of it.
        advanced: set, and replaced, whenever the high watermark moves.
        damage: what was found damaged and is not repaired yet.
        sent_bytes: to readers, from this replica, as far as answers were begun.
    """

    def __init__(self, record: StreamRecord, me: BrokerId, log: ReplicaLog | None = None) -> None:
        self.me = me
        self.record = self.wanted = record
        self.log = log
        self.problem: NatslogError | None = None
        self.damage: NatslogError | None = None
        self.mend_not_before_ms = 0.0
        self.leading: LeaderReplica | None = None
        self.following: FollowerReplica | None = None
        self.ingest: StreamIngest | None = None
        self.stats = IngestStats()
        self.sent_bytes = 0
        self.subscription: object | None = None
        self.writing = asyncio.Lock()
        self.sessions: set[SessionMark] = set()
        self.advanced = asyncio.Event()
        self.is_handing_over = False
        self.is_ready = False
        self.settled = asyncio.Event()

    def has_role_of(self, record: StreamRecord) -> bool:
        """Whether its role is the one that this record asks for."""
        if record.leader == self.me:
            return self.leading is not None
        return self.leading is None and (record.leader is None or self.following is not None)

    def usable_log(self) -> ReplicaLog:
        """Raises the problem where there is one."""
        if self.log is None:
            raise self.problem or CorruptLog(f"the log of stream {self.record.name!r} could not be opened")
        return self.log

    # ---- where it stands: the event loop ----

    @property
    def is_leading(self) -> bool:
        """Whether it leads, takes messages, and knows what is committed."""
        return self.leading is not None and self.is_ready and self.leading.is_exposed

    @property
    def may_serve(self) -> bool:
        """Whether readers may be served from here, up to the high watermark known here."""
        return self.is_leading or (self.following is not None and self.me in self.wanted.isr and self.damage is None)

    def appended(self, end_offset: int, run_start: int | None = None) -> int:
        """The leader's log ends here now, on stable storage; in a run from `run_start` on, where given. Returns HW."""
        if self.leading is None:
            return 0
        high_watermark = self.leading.appended(end_offset, run_start)
        for session in self.sessions:
            session.mark(self.record.id, has_records=True)
        self._moved(high_watermark)
        return high_watermark

    def fetched(self, follower: BrokerId, position: FetchPosition, incarnation: str) -> None:
        """A follower, whose log matches, has everything below its position on its stable storage."""
        assert self.leading is not None, "only a leader is fetched from"
        now_ms = monotonic_ms()
        self._moved(self.leading.fetched(follower, position.offset, incarnation, now_ms, position.version))

    def updated(self, record: StreamRecord) -> None:
        """The record says something new within the same epoch."""
        self.record = record
        if self.leading is not None:
            self._moved(self.leading.update(record, monotonic_ms()))
        elif self.following is not None:
            self.following.record = record

    def followed(self, leader_high_watermark: int) -> None:
        """After an append of what the leader sent."""
        assert self.following is not None, "only a follower follows"
        self._moved(self.following.advanced(leader_high_watermark, self.usable_log().settled_end_offset))

    def _moved(self, high_watermark: int) -> None:
        chain = self.usable_log().chain
        if high_watermark == chain.committed:
            return
        chain.committed = high_watermark
        self.advanced.set()
        self.advanced = asyncio.Event()
        if self.leading is not None:
            for session in self.sessions:
                session.mark(self.record.id, has_records=False)
        if self.ingest is not None:
            self.ingest.release(high_watermark)

    def refusal(self) -> NatslogError | None:
        """Why nothing may be appended now. From any thread."""
        leading = self.leading
        return leading.refusal() if leading is not None else None

    def is_at_tail(self, offset: int) -> bool:
        """Whether what follows is little, and in the segment that was written just now."""
        last = self.usable_log().chain.last
        if not isinstance(last, ActiveSegment) or offset < last.base_offset:
            return False
        first = last.index.first_covering(offset)
        return first == len(last.index) or last.size_bytes - last.index.positions[first] <= _TAIL_BYTES

    def note_damage(self, error: NatslogError) -> None:
        """Something on disk is not what was written. From any thread; what follows is decided elsewhere."""
        if self.damage is None:
            self.damage = error
            logger.error("stream %s: %s", self.record.name, error.message)

    # ---- NATS ----

    async def subscribe(self, link: NatsLink) -> None:
        if self.ingest is not None and self.subscription is None:
            settings = self.record.settings
            self.subscription = await link.attach(settings.subject, self.ingest.receive, queue=settings.group or "")

    async def unsubscribe(self, link: NatsLink) -> None:
        if self.subscription is not None:
            handle, self.subscription = self.subscription, None
            await link.detach(handle)

    async def stop(self, executor: Executor) -> None:
        """Appends what was received, acks what is committed, then closes the log. The subscription must be gone."""
        if self.ingest is not None:
            await self.ingest.stop()
        if self.log is not None:
            await asyncio.get_running_loop().run_in_executor(executor, self.log.close)

    def maintain(self, pacer: Pacer) -> None:
        """In a thread, beside commits: checkpoints, drops what is past retention, seals. One failing stops no other."""
        log = self.log  # it may be let go of, or opened anew, at any time
        if log is None:
            return
        for work in (log.checkpoint, lambda: self._drop_expired(log), lambda: _seal_all(log, pacer)):
            try:
                work()
            except (NatslogError, OSError) as error:
                logger.error("stream %s: upkeep failed, to be tried again: %s", self.record.name, error)

    def _drop_expired(self, log: ReplicaLog) -> None:
        if dropped := log.enforce_retention(now_us()):
            logger.info("stream %s: retention dropped %d segments", self.record.name, dropped)


def _seal_all(log: ReplicaLog, pacer: Pacer) -> None:
    pacer.share = _USUAL_SHARE if len(log.chain.unsealed) <= _UNSEALED_IN_PEACE else 1.0
    while not pacer.is_stopping() and log.seal_next(pacer.pause):
        pass
