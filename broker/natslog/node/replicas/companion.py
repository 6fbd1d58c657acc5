"""The companion log of a stream on this broker: a second, small log of the same replicas, for records that are not
messages.

Theory of operation. The stream's replica decides about both logs (`cluster.replica`). `Companion` is what a stream
does with its companion log, whether that is open or not; `CompanionLog` has its files while it is open, and does what
follows from its high watermark (HW):

- The leader appends: requests are queued, and one task appends all that wait as one commit, in a thread. A request is
  answered when HW has passed its records and the owner of the stream was given them.
- Every replica delivers: when HW has moved, the records below it are read from the log and passed to the owner, in
  order.
- Followers copy it as they copy the log of messages; between brokers it has an id of its own (`companion_id`).

It is kept small by snapshots: the leader begins a new segment with the records that stand for all earlier ones, and
removes the segments before it. Followers cut their segments elsewhere, so they keep one segment more.

Invariants. One writer at a time: the task that appends while the replica leads, copies otherwise. Every committed
record from `Companion.start` on is delivered, in order; after a repair some are delivered again. Only records that a
committed snapshot stands for are removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from natslog.log.erasing import ErasedOffsets
from natslog.log.removed import from_bytes
from natslog.log_events import event
from natslog.node.replicas.companion_records import (
    ERASED,
    REMOVED,
    RULES,
    Delivered,
    Record,
    read_records,
    rows_of,
    size_of,
)
from natslog.node.replicas.consumer_records import KINDS, ConsumerRecords
from natslog.node.replicas.replicated_log import ReplicatedLog
from natslog.node.replicas.settings_in_force import adopt_settings

if TYPE_CHECKING:
    from natslog.node.replicas.replica_driver import ReplicaDriver

logger = logging.getLogger("natslog.node")

_COMMIT_BYTES = 8 * 1024 * 1024
MAX_RECORDS_BYTES = 32 * 1024 * 1024
"""Of one request: it is one commit, and a commit must fit into a frame between brokers."""
_COMMITTED_WITHIN_S = 30.0
_READ_AGAIN_S = 1.0
_CREATED_WITHIN_S = 5.0

OnRecords = Callable[[list[Delivered]], None]


class Companion:
    """Of one stream. In the event loop.

    Attributes:
        log: while it is open. consumers: of the JetStream API, as its records state them.
        on_records: called with the committed records (offset, kind, record), in order, on every replica. start: the
            offset to begin with. Both are set before the log opens.
    """

    def __init__(self, driver: ReplicaDriver) -> None:
        self.log: CompanionLog | None = None
        self.consumers = ConsumerRecords()
        self.on_records: OnRecords = self._take_records
        self.start = 0
        self._driver = driver

    @property
    def files(self) -> ReplicaLog | None:
        return None if self.log is None else self.log.log

    @property
    def size_bytes(self) -> int:
        """0 where there is none."""
        return 0 if self.log is None else self.log.log.chain.size_bytes

    @property
    def is_missing(self) -> bool:
        """Whether there is one that is not open here."""
        return self._driver.record.has_companion and self.log is None

    def advance(self, high_watermark: int) -> None:
        """HW is here now."""
        if self.log is not None:
            self.log.advance(high_watermark)

    # ---- leading ----

    async def prepare(self) -> None:
        """So that the first records do not wait for the log to be created. Raises as `append`."""
        if not self._driver.record.has_companion:
            await self._writable()

    async def append(self, records: Sequence[Record]) -> int:
        """Appends records (kind, bytes), in the leader of the stream, as one commit; the log is created if there is
        none. Returns the offset behind them when they are committed and delivered here.

        Raises:
            InvalidRequest: the records are too large. StorageFull, …: nothing was appended. NoLeader,
                NotEnoughReplicas: the message states whether the change may have taken effect.
        """
        return await (await self._writable()).append(records)

    async def shorten(self, snapshot: Sequence[Record]) -> None:
        """Appends records that stand for all that were delivered here until now, and removes those. The snapshot is
        taken immediately before this call, without an `await` between. Records that are not delivered yet are kept.

        Raises:
            As `append`; where it fails, nothing was removed.
        """
        covers = self._driver.replica.logs.companion_delivered
        await (await self._writable()).shorten(snapshot, covers)

    async def _writable(self) -> CompanionLog:
        """The log, which is created if necessary. Raises NoLeader."""
        driver, replica = self._driver, self._driver.replica
        try:
            async with asyncio.timeout(_CREATED_WITHIN_S):
                while True:
                    if replica.leading is None or replica.is_transferring:
                        raise _leadership_is_changing(driver.name)
                    if self.log is not None and self.log.is_writing and replica.context.is_companion_held:
                        return self.log
                    replica.create_companion()
                    driver.progress()  # a proposal that is lost is made again by a tick
                    await driver.reconciled.wait()
        except TimeoutError as error:
            failures = (log.failure for log in (driver.log, self.files) if log is not None)
            problem = replica.problem or next((failure for failure in failures if failure is not None), None)
            raise NoLeader(
                f"the companion log of stream {driver.name!r} could not be created in time, and nothing was changed: "
                f"repeat the request{'' if problem is None else '. ' + problem.message}",
                stream=driver.name,
            ) from error

    async def drained(self) -> None:
        """Returns when all that was requested is appended."""
        if self.log is not None:
            await self.log.drained()

    async def stop_writing(self) -> None:
        if self.log is not None:
            await self.log.stop_writing()

    async def close_log(self) -> None:
        if self.log is not None:
            log, self.log = self.log, None
            await log.close()

    # ---- on every replica ----

    def _take_records(self, records: list[Delivered]) -> None:
        driver, log, source = self._driver, self._driver.log, f"companion log of stream {self._driver.name!r}"
        assert log is not None, "the companion log is open only while the log of messages is"
        for _, kind, data in records:
            if kind == REMOVED:
                log.visibility.removed.record(from_bytes(data, source))
            elif kind == ERASED:
                erased = ErasedOffsets.from_bytes(data, source)
                log.visibility.removed.record(erased.bitmap(source))  # first: views that begin now do not have them
                log.erasures.add(erased, source)
                driver.services.broker.upkeep_due()
            elif kind == RULES:
                log.visibility.count_anew(int(data), log.log_start_offset)
                adopt_settings(log, driver.record)
            elif kind in KINDS:
                self.consumers.apply(kind, data, source)


@dataclass(slots=True)
class _Request:
    """Records to be appended. `done`: the offset behind them, when they are committed and delivered. `covers`: of a
    snapshot, it stands for all records below this offset; then it begins a segment.
    """

    records: Sequence[Record]
    done: asyncio.Future[int]
    covers: int | None = None
    end_offset: int = 0


class CompanionLog:
    """See the module. In the event loop.

    Attributes:
        replicated: as other brokers copy it.
        delivered: all records below were passed to the owner.
    """

    def __init__(self, driver: ReplicaDriver, log: ReplicaLog) -> None:
        self.log = log
        self.replicated = ReplicatedLog(driver, log, is_companion=True)
        self.delivered = max(driver.companion.start, log.log_start_offset)
        self.is_writing = False
        self._driver = driver
        self._queue: deque[_Request] = deque()
        self._uncommitted: deque[_Request] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._delivery: asyncio.Task[None] | None = None
        self._is_closed = False

    # ---- what follows from HW ----

    def advance(self, high_watermark: int) -> None:
        """HW is here now."""
        chain = self.log.chain
        if chain.committed != high_watermark:
            chain.committed = high_watermark
            if self._driver.replica.leading is not None:
                self.replicated.mark_sessions(has_records=False)
        self.deliver_soon()  # also where the log was begun at HW, behind records that are not to be delivered

    def deliver_soon(self) -> None:
        if self._delivery is None and not self._is_closed and self.delivered < self.log.high_watermark:
            self._delivery = self._driver.services.tasks.start(
                self._deliver_all(), f"records of {self.replicated.name}"
            )

    async def _deliver_all(self) -> None:
        try:
            await self.deliver()
        except (NatslogError, OSError) as error:
            logger.error(
                "%s: records could not be read: %s",
                self.replicated.name,
                error,
                extra=event("stream.records_unreadable", stream=self.replicated.name),
            )
            if isinstance(error, CorruptLog):
                self.replicated.note_damage(error)
            asyncio.get_running_loop().call_later(_READ_AGAIN_S, self.deliver_soon)
        finally:
            self._delivery = None

    async def deliver(self) -> None:
        """Passes all committed records to the owner of the stream.

        Raises:
            NatslogError, OSError: they cannot be read.
        """
        while not self._is_closed and self.delivered < (end := self.log.high_watermark):
            try:
                records, end = await self._driver.in_thread(read_records, self.log, self.delivered, end)
            except OffsetOutOfRange:
                if (log_start := self.log.log_start_offset) <= self.delivered:
                    raise
                self.delivered = log_start  # a snapshot stands for those that were removed
                self._release()
                continue
            if self._is_closed:
                return
            if records:
                self._driver.companion.on_records(records)
            self.delivered = end
            self._release()

    def _release(self) -> None:
        while self._uncommitted and self._uncommitted[0].end_offset <= self.delivered:
            request = self._uncommitted.popleft()
            if not request.done.done():
                request.done.set_result(request.end_offset)
        replica = self._driver.replica
        could_serve = replica.may_serve
        replica.delivered(self.delivered)
        if could_serve != replica.may_serve:
            self._driver.wake()

    # ---- leading ----

    def begin_writing(self) -> None:
        """This replica leads."""
        self.is_writing = True

    async def append(self, records: Sequence[Record]) -> int:
        """As `Companion.append`."""
        if not records:
            return self.log.log_end_offset
        if (size_bytes := size_of(records)) > MAX_RECORDS_BYTES:
            raise InvalidRequest(
                f"records of {size_bytes} bytes cannot be stored at once, at most {MAX_RECORDS_BYTES} can: request "
                "less at once",
                stream=self._driver.name,
            )
        return await self._committed(self._request(records))

    async def shorten(self, snapshot: Sequence[Record], covers: int) -> None:
        """As `Companion.shorten`. `covers`: the snapshot stands for all records below this offset."""
        requests = [self._request(part, covers if not at else None) for at, part in enumerate(_parts_of(snapshot))]
        for request in requests:
            await self._committed(request)
        start = requests[0].end_offset - len(requests[0].records)
        await self._driver.in_thread(self.log.upkeep.drop_before, start)
        self.replicated.mark_sessions()

    def _request(self, records: Sequence[Record], covers: int | None = None) -> _Request:
        if not self.is_writing:
            raise _leadership_is_changing(self._driver.name)
        request = _Request(records, asyncio.get_running_loop().create_future(), covers)
        self._queue.append(request)
        if self._writer is None:
            self._writer = self._driver.services.tasks.start(self._write(), f"appending to {self.replicated.name}")
        return request

    async def _committed(self, request: _Request) -> int:
        try:
            async with asyncio.timeout(_COMMITTED_WITHIN_S):
                return await asyncio.shield(request.done)
        except TimeoutError as error:
            raise NotEnoughReplicas(
                f"the change to stream {self._driver.name!r} is stored on this broker, but not yet on all in-sync "
                "replicas, so that it may or may not take effect: repeat the request",
                stream=self._driver.name,
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
        driver, ingest = self._driver, self._driver.steps.ingest
        if not self.is_writing or ingest is None:
            raise _leadership_is_changing(driver.name)
        if (refusal := driver.refusal()) is not None:
            raise refusal
        time_us = ingest.stream_time.now_us()

        def append() -> int:
            if taken[0].covers is not None:
                taken[0].records = self._whole_snapshot(taken[0].records, taken[0].covers)
            records = [record for request in taken for record in request.records]
            if not records:  # a snapshot of nothing
                return self.log.log_end_offset
            return self.log.append(rows_of(records), time_us)[0]

        offset = await self._driver.in_thread(append)
        for request in taken:
            offset = request.end_offset = offset + len(request.records)
        self._uncommitted += taken
        self.replicated.mark_sessions()
        driver.replica.appended(offset, is_companion=True)
        driver.progress()
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
            raise StorageFailed(f"{self.replicated.name}: its records cannot be read: {error}") from error
        self.log.roll()
        return [*snapshot, *since]

    async def stop_writing(self) -> None:
        """Returns when nothing is appended any more. Requests that are not answered yet fail."""
        self.is_writing = False
        if self._writer is not None:
            await asyncio.wait([self._writer])
        unanswered = NoLeader(
            f"the leadership of stream {self._driver.name!r} is changing, so that the change may or may not have taken "
            "effect: repeat the request",
            stream=self._driver.name,
        )
        while self._uncommitted:
            _fail(self._uncommitted.popleft(), unanswered)

    async def drained(self) -> None:
        """Returns when all that was requested is appended."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    # ---- the end ----

    async def close(self) -> None:
        """No record is delivered afterwards, and the files do not change any more."""
        self._is_closed = True
        await self.stop_writing()
        if self._delivery is not None:
            await asyncio.wait([self._delivery])
        await self._driver.in_thread(self.log.close)


def _leadership_is_changing(name: str) -> NoLeader:
    return NoLeader(f"the leadership of stream {name!r} is changing: repeat the request", stream=name)


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
