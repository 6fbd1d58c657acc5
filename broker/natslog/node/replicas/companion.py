"""The companion log of a stream on this broker: a second, small log of the same replicas, for records that are not
messages.

Theory of operation. The stream's replica decides about both logs (`cluster.replica`); this class has the files of the
companion log, and what follows from its high watermark (HW):

- The leader appends: requests are queued, and one task appends all that wait as one commit, in a thread. A request is
  answered when HW has passed its records and the owner of the stream was given them.
- Every replica delivers: when HW has moved, the records below it are read from the log and passed to the owner, in
  order.
- Followers copy it as they copy the log of messages; between brokers it has an id of its own (`companion_id`).

It is kept small by snapshots: the leader begins a new segment with the records that stand for all earlier ones, and
removes the segments before it. Followers cut their segments elsewhere, so they keep one segment more.

Invariants. One writer at a time: the task that appends while the replica leads, copies otherwise. Every committed
record from `companion_from` on is delivered, in order; after a repair some are delivered again. Only records that a
committed snapshot stands for are removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from natslog.cluster.roles import FetchPosition, LeaderReplica, Verdict
from natslog.errors import (
    CorruptLog,
    InvalidRequest,
    NatslogError,
    NoLeader,
    NotEnoughReplicas,
    OffsetOutOfRange,
    StorageFailed,
)
from natslog.log import ReplicaLog
from natslog.log.segment import ActiveSegment
from natslog.log_events import event
from natslog.model import BrokerId, Epoch, StreamId, StreamRecord, companion_id
from natslog.node.replicas.companion_log import Delivered, Record, read_records, rows_of, size_of
from natslog.node.threads import in_thread

if TYPE_CHECKING:
    from natslog.node.replicas.services import Services
    from natslog.node.replicas.stream import HostedStream, SessionMark

logger = logging.getLogger("natslog.node")

_COMMIT_BYTES = 8 * 1024 * 1024
MAX_RECORDS_BYTES = 32 * 1024 * 1024
"""Of one request: it is one commit, and a commit must fit into a frame between brokers."""
_COMMITTED_WITHIN_S = 30.0
_READ_AGAIN_S = 1.0
_TAIL_BYTES = 1024 * 1024

OnRecords = Callable[[list[Delivered]], None]


@dataclass(slots=True)
class _Request:
    """Records to be appended. `done`: the offset behind them, when they are committed and delivered. `covers`: of a
    snapshot, it stands for all records below this offset; then it begins a segment.
    """

    records: Sequence[Record]
    done: asyncio.Future[int]
    covers: int | None = None
    end_offset: int = 0


class Companion:
    """See the module. In the event loop.

    Args:
        stream: whose log it is. `start`: the offset from which on records are delivered.

    Attributes:
        sessions: as of a `HostedStream`. leader_log_start: of a follower: the log start of its leader.
        delivered: all records below were passed to the owner.
    """

    def __init__(self, stream: HostedStream, log: ReplicaLog, services: Services, start: int) -> None:
        self.stream = stream
        self.id: StreamId = companion_id(stream.id)
        self.log = log
        self.sessions: set[SessionMark] = set()
        self.leader_log_start = 0
        self.delivered = max(start, log.log_start_offset)
        self.is_writing = False
        self._services = services
        self._queue: deque[_Request] = deque()
        self._uncommitted: deque[_Request] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._delivery: asyncio.Task[None] | None = None
        self._is_closed = False

    # ---- as a `HostedStream`, for sessions and fetchers ----

    @property
    def name(self) -> str:
        return f"{self.stream.name} (companion log)"

    @property
    def record(self) -> StreamRecord:
        return self.stream.record

    @property
    def leading(self) -> LeaderReplica | None:
        return self.stream.leading

    @property
    def high_watermark(self) -> int:
        return self.stream.companion_high_watermark

    def usable_log(self) -> ReplicaLog:
        return self.log

    def is_at_tail(self, offset: int) -> bool:
        """Whether the remaining records are few, and in the segment that was just written."""
        last = self.log.chain.last
        return isinstance(last, ActiveSegment) and offset >= last.base_offset and last.size_bytes <= _TAIL_BYTES

    def judged(self, position: FetchPosition) -> Verdict:
        return self.stream.judged(position, is_companion=True)

    def fetched(self, follower: BrokerId, position: FetchPosition, incarnation: str) -> Verdict:
        return self.stream.fetched(follower, position, incarnation, is_companion=True)

    def note_damage(self, error: NatslogError) -> None:
        self.stream.note_damage(error, is_companion=True)

    def unresponsive_leader(self, contact_ms: float) -> Epoch | None:
        """Reported for the stream."""

    def position(self) -> FetchPosition | None:
        return self.stream.position(is_companion=True)

    def is_behind(self, leader_high_watermark: int) -> bool:
        return leader_high_watermark > self.log.log_end_offset

    def leader_starts_at(self, epoch: Epoch, log_start_offset: int) -> None:
        following = self.stream.following
        if following is not None and following.epoch == epoch:
            self.leader_log_start = log_start_offset

    async def answered(
        self, epoch: Epoch, verdict: Verdict, append: Callable[[ReplicaLog], Any] | None, high_watermark: int
    ) -> bool:
        """As `HostedStream.answered`."""
        taken = self._append_to_new_segment(append) if append is not None and self._is_to_roll() else append
        return await self.stream.answered(epoch, verdict, taken, high_watermark, companion=self)

    def _append_to_new_segment(self, append: Callable[[ReplicaLog], Any]) -> Callable[[ReplicaLog], Any]:
        async def rolled(log: ReplicaLog) -> None:
            await self._in_thread(log.roll)
            if (work := append(log)) is not None:
                await work

        return rolled

    def _is_to_roll(self) -> bool:
        """Whether the leader has removed records that are in the segment that is written here: when the next ones are
        removed, so is this segment.
        """
        last = self.log.chain.last
        is_open = isinstance(last, ActiveSegment) and len(last.index) > 0 and self.log.failure is None
        return is_open and last is not None and last.base_offset < self.leader_log_start

    # ---- what follows from HW ----

    def advance(self, high_watermark: int) -> None:
        """HW is here now."""
        chain = self.log.chain
        if chain.committed != high_watermark:
            chain.committed = high_watermark
            if self.leading is not None:
                self.mark_sessions(has_records=False)
        self.deliver_soon()  # also where the log was begun at HW, behind records that are not to be delivered

    def mark_sessions(self, *, has_records: bool = True) -> None:
        for session in self.sessions:
            session.mark(self.id, has_records=has_records)

    def deliver_soon(self) -> None:
        if self._delivery is None and not self._is_closed and self.delivered < self.log.high_watermark:
            self._delivery = self._services.tasks.start(self._deliver_all(), f"records of {self.name}")

    async def _deliver_all(self) -> None:
        try:
            await self.deliver()
        except (NatslogError, OSError) as error:
            logger.error(
                "%s: records could not be read: %s",
                self.name,
                error,
                extra=event("stream.records_unreadable", stream=self.name),
            )
            if isinstance(error, CorruptLog):
                self.note_damage(error)
            asyncio.get_running_loop().call_later(_READ_AGAIN_S, self.deliver_soon)
        finally:
            self._delivery = None

    async def deliver(self) -> None:
        """Passes all committed records to the owner of the stream.

        Raises:
            NatslogError, OSError: they cannot be read.
        """
        while not self._is_closed and self.delivered < (end := self.log.high_watermark):
            on_records = self.stream.companion_committed
            records: list[Delivered] = []
            if on_records is not None:
                try:
                    records, end = await self._in_thread(read_records, self.log, self.delivered, end)
                except OffsetOutOfRange:
                    if (log_start := self.log.log_start_offset) <= self.delivered:
                        raise
                    self.delivered = log_start  # a snapshot stands for those that were removed
                    self._release()
                    continue
            if self._is_closed:
                return
            if records and on_records is not None:
                on_records(records)
            self.delivered = end
            self._release()

    def _release(self) -> None:
        while self._uncommitted and self._uncommitted[0].end_offset <= self.delivered:
            request = self._uncommitted.popleft()
            if not request.done.done():
                request.done.set_result(request.end_offset)
        self.stream.companion_delivered(self.delivered)

    # ---- leading ----

    def begin_writing(self) -> None:
        """This replica leads."""
        self.is_writing = True

    async def append(self, records: Sequence[Record]) -> int:
        """As `HostedStream.append_companion`."""
        if not records:
            return self.log.log_end_offset
        if (size_bytes := size_of(records)) > MAX_RECORDS_BYTES:
            raise InvalidRequest(
                f"records of {size_bytes} bytes cannot be stored at once, at most {MAX_RECORDS_BYTES} can: request "
                "less at once",
                stream=self.stream.name,
            )
        return await self._committed(self._request(records))

    async def shorten(self, snapshot: Sequence[Record], covers: int) -> None:
        """As `HostedStream.shorten_companion`. `covers`: the snapshot stands for all records below this offset."""
        requests = [self._request(part, covers if not at else None) for at, part in enumerate(_parts_of(snapshot))]
        for request in requests:
            await self._committed(request)
        start = requests[0].end_offset - len(requests[0].records)
        await self._in_thread(self.log.upkeep.drop_before, start)
        self.mark_sessions()

    def _request(self, records: Sequence[Record], covers: int | None = None) -> _Request:
        if not self.is_writing:
            raise self._not_leading()
        request = _Request(records, asyncio.get_running_loop().create_future(), covers)
        self._queue.append(request)
        if self._writer is None:
            self._writer = self._services.tasks.start(self._write(), f"appending to {self.name}")
        return request

    async def _committed(self, request: _Request) -> int:
        try:
            async with asyncio.timeout(_COMMITTED_WITHIN_S):
                return await asyncio.shield(request.done)
        except TimeoutError as error:
            raise NotEnoughReplicas(
                f"the change to stream {self.stream.name!r} is stored on this broker, but not yet on all in-sync "
                "replicas, so that it may or may not take effect: repeat the request",
                stream=self.stream.name,
            ) from error

    async def _write(self) -> None:
        while self._queue:
            taken = self._taken()
            try:
                await self._append(taken)
            except NatslogError as error:
                for request in taken:
                    _fail(request, error)
        self._writer = None

    def _taken(self) -> list[_Request]:
        """The requests of the next commit. A snapshot begins one."""
        taken = [self._queue.popleft()]
        size_bytes = size_of(taken[0].records)
        while self._queue and self._queue[0].covers is None:
            size_bytes += size_of(self._queue[0].records)
            if size_bytes > _COMMIT_BYTES:
                break
            taken.append(self._queue.popleft())
        return taken

    async def _append(self, taken: list[_Request]) -> None:
        """Raises NatslogError: nothing was appended."""
        stream, ingest = self.stream, self.stream.ingest
        if not self.is_writing or ingest is None:
            raise self._not_leading()
        if (refusal := stream.refusal()) is not None:
            raise refusal
        time_us = ingest.stream_time.now_us()

        def append() -> int:
            if taken[0].covers is not None:
                taken[0].records = self._whole_snapshot(taken[0].records, taken[0].covers)
            records = [record for request in taken for record in request.records]
            if not records:  # a snapshot of nothing
                return self.log.log_end_offset
            return self.log.append(rows_of(records), time_us)[0]

        offset = await self._in_thread(append)
        for request in taken:
            offset = request.end_offset = offset + len(request.records)
        self._uncommitted += taken
        self.mark_sessions()
        stream.companion_appended(offset)
        self._release()  # what was nothing is delivered

    def _whole_snapshot(self, snapshot: Sequence[Record], covers: int) -> list[Record]:
        """With copies of the records that were appended since it was made. It begins a segment. Blocks."""
        since: list[Record] = []
        start, end = max(covers, self.log.log_start_offset), self.log.log_end_offset
        try:
            while start < end:
                found, start = read_records(self.log, start, end, uncommitted=True)
                since += [(kind, value) for _, kind, value in found]
        except OSError as error:
            raise StorageFailed(f"{self.name}: its records cannot be read: {error}") from error
        self.log.roll()
        return [*snapshot, *since]

    async def stop_writing(self) -> None:
        """Returns when nothing is appended any more. Requests that are not answered yet fail."""
        self.is_writing = False
        if self._writer is not None:
            await asyncio.wait([self._writer])
        unanswered = NoLeader(
            f"the leadership of stream {self.stream.name!r} is changing, so that the change may or may not have taken "
            "effect: repeat the request",
            stream=self.stream.name,
        )
        while self._uncommitted:
            _fail(self._uncommitted.popleft(), unanswered)

    async def drained(self) -> None:
        """Returns when all that was requested is appended."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    def _not_leading(self) -> NoLeader:
        name = self.stream.name
        return NoLeader(f"the leadership of stream {name!r} is changing: repeat the request", stream=name)

    # ---- the end ----

    async def close(self) -> None:
        """No record is delivered afterwards, and the files do not change any more."""
        self._is_closed = True
        await self.stop_writing()
        if self._delivery is not None:
            await asyncio.wait([self._delivery])
        await self._in_thread(self.log.close)

    async def _in_thread(self, work: Callable[..., Any], *arguments: object) -> Any:
        return await in_thread(self._services.writers, work, *arguments)


def _fail(request: _Request, error: NatslogError) -> None:
    if not request.done.done():
        request.done.set_exception(error)
        request.done.exception()  # the requester may be gone


def _parts_of(records: Sequence[Record]) -> list[Sequence[Record]]:
    """Each for a commit of its own; one part without records if there are none."""
    parts: list[list[Record]] = [[]]
    size_bytes = 0
    for record in records:
        size_bytes += size_of([record])
        if size_bytes > _COMMIT_BYTES and parts[-1]:
            parts.append([])
            size_bytes = size_of([record])
        parts[-1].append(record)
    return list(parts)
