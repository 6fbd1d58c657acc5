"""The leader of `__cursors`: holds the table of all cursors, answers reads, and appends changes in groups.

Theory of operation. The table is built from the log when it is first needed in an epoch. Calls wait in a queue; one
task takes all that wait, appends their rows as one batch, and answers them when it is committed. While it is, the next
group gathers: many calls share one fsync. When many rows were appended, the whole table is appended as one batch, and
what lies before it is purged: so the log that must be read stays small.

Invariants. A call is answered when its rows are committed. What a read returns is committed. Where the outcome of an
append is unknown, the table is built again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from contextvars import Context
from dataclasses import dataclass

import msgspec

from natslog.cluster.commands import PurgeStream
from natslog.cluster.cursor_table import ROW_SUBJECT, STREAM, Change, Changes, CursorRow, CursorTable
from natslog.cluster.cursor_table import Row as TableRow
from natslog.cluster.cursors import CursorRecord
from natslog.cluster.metadata import Metadata
from natslog.cluster.roles import LeaderReplica
from natslog.errors import NatslogError, NotReady, Overloaded, StorageUnavailable
from natslog.log import StreamLog
from natslog.log_events import event
from natslog.model import Offset
from natslog.node.internal.appending import Row, append
from natslog.node.metadata.group import MetadataGroup
from natslog.node.replicas.direct_append import not_leading, wait_until_committed
from natslog.node.replicas.hosting import Hosting
from natslog.node.replicas.positions import Positions
from natslog.node.replicas.stream import HostedStream
from natslog.node.supervisor import Supervisor

logger = logging.getLogger("natslog.node")

_PLAN_BYTES = 16 * 1024 * 1024
_MOST_ROWS = 50_000
_MOST_WAITING = 200_000
_MOST_AT_ONCE = 20_000


@dataclass(slots=True)
class _Call:
    changes: Sequence[Change]
    request: str
    done: asyncio.Future[list[CursorRecord | None]]


class CursorLeader:
    """Of one broker; it answers where the broker leads `__cursors`."""

    def __init__(
        self, group: MetadataGroup, hosting: Hosting, positions: Positions, readers: Executor, tasks: Supervisor
    ) -> None:
        self._group, self._hosting, self._positions = group, hosting, positions
        self._readers, self._tasks = readers, tasks
        self._table = CursorTable()
        self._of: LeaderReplica | None = None  # the role that the table belongs to
        self._turn = asyncio.Lock()  # of building the table, and of appending
        self._checked_version = -1  # of the metadata, when cursors of deleted streams were removed
        self._waiting: list[_Call] = []
        self._waiting_rows = 0
        self._writing: asyncio.Task[None] | None = None

    @property
    def _state(self) -> Metadata:
        return self._group.state

    # ---- calls ----

    async def find(self, *, consumer: str | None, stream: str | None) -> list[CursorRecord]:
        """The cursors on streams that exist. Raises NoLeader, NotReady, CorruptLog."""
        led = self._led()
        if led.leading is None or led.leading is not self._of:
            async with self._turn:
                led = await self._prepared()
        found = self._table.shown(self._state, consumer=consumer, stream=stream)
        self._check_leading(led)
        return found

    async def change(self, changes: Sequence[Change], request: str) -> list[CursorRecord | None]:
        """Makes all changes or none. Returns each cursor as it is afterwards, when that is committed.

        Raises:
            StreamNotFound, StreamRecreated, CursorNotFound, …: the call is refused. NoLeader, NotEnoughReplicas,
            StorageFull, …: it may be made or not, and is made once if it is repeated.
        """
        if self._waiting_rows + len(changes) > _MOST_WAITING:
            raise Overloaded("too many cursors are waiting to be stored: repeat the request, and send fewer at once")
        call = _Call(changes, request, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._waiting_rows += len(changes)
        if self._writing is None:
            self._writing = self._tasks.start(self._write(), "cursors", context=Context())
        return await asyncio.shield(call.done)

    async def remove_stale(self) -> None:
        """Deletes the cursors of streams that are gone. Raises as `change`."""
        stream, version = self._hosting.streams.get(STREAM), self._state.version
        if stream is None or version == self._checked_version or not self._positions.may_be_stated_by(stream):
            return
        async with self._turn:
            led = await self._prepared()
            await self._append(led, self._table.stale(self._state))
        self._checked_version = version

    # ---- the table ----

    def _led(self) -> HostedStream:
        stream = self._hosting.streams.get(STREAM)
        if stream is None:
            raise NotReady(f"stream {STREAM} is not on this broker: repeat the request")
        self._check_leading(stream)
        return stream

    def _check_leading(self, stream: HostedStream) -> None:
        if not self._positions.may_be_stated_by(stream):
            raise not_leading(stream)

    async def _prepared(self) -> HostedStream:
        """The stream, with the table of its present epoch."""
        led = self._led()
        await self._prepare(led)
        return led

    async def _prepare(self, led: HostedStream) -> None:
        leading = led.leading
        if leading is None:
            raise not_leading(led)
        if leading is self._of:
            return
        self._of = None
        log = led.usable_log()
        end = log.log_end_offset
        try:
            table = await asyncio.get_running_loop().run_in_executor(self._readers, table_of, log, end)
        except OSError as error:
            raise StorageUnavailable(f"stream {STREAM}: its log cannot be read: {error}") from error
        await wait_until_committed(led, leading, end)
        self._table, self._of, self._checked_version = table, leading, -1
        logger.info(
            "stream %s: %d cursors were read from %d rows",
            STREAM,
            len(table.cursors),
            table.rows,
            extra=event("cursors.read", stream=STREAM, count=len(table.cursors)),
        )

    # ---- appending ----

    async def _write(self) -> None:
        try:
            while self._waiting:
                async with self._turn:
                    await self._write_group(self._taken())
        finally:
            self._writing = None

    def _taken(self) -> list[_Call]:
        """The calls that wait; so many at once that they are appended quickly."""
        rows = count = 0
        for call in self._waiting:
            rows += len(call.changes)
            if count and rows > _MOST_AT_ONCE:
                break
            count += 1
        calls, self._waiting = self._waiting[:count], self._waiting[count:]
        self._waiting_rows -= sum(len(call.changes) for call in calls)
        return calls

    async def _write_group(self, calls: list[_Call]) -> None:
        found: list[tuple[_Call, list[CursorRecord | None]]] = []
        try:
            led = await self._prepared()
            changes = Changes(self._table, self._state)
            for call in calls:
                try:
                    found.append((call, changes.add(call.changes, call.request)))
                except NatslogError as error:
                    _refuse(call, error)
            await self._append(led, changes.rows)
        except Exception as error:
            for call in calls:
                _refuse(call, error)
            if isinstance(error, NatslogError):
                return
            raise
        for call, cursors in found:
            if not call.done.done():
                call.done.set_result(cursors)
        await self._shorten(led)

    async def _append(self, led: HostedStream, rows: list[TableRow]) -> int:
        """Returns the offset of the first row, when all are committed and in the table."""
        if not rows:
            return -1
        leading = self._of
        try:
            stored = await append(
                led, lambda: [Row(0, ROW_SUBJECT, key, msgspec.json.encode(row).decode()) for key, row in rows]
            )
            if led.leading is not leading:
                raise not_leading(led)
        except BaseException:
            self._of = None  # the rows may be stored or not
            raise
        self._table.adopt(rows)
        return stored.start

    async def _shorten(self, led: HostedStream) -> None:
        """Best effort: otherwise a later leader has more to read."""
        if self._table.rows < _MOST_ROWS + 4 * len(self._table.cursors):
            return
        try:
            start = await self._append(led, self._table.whole())
            self._table.rows = len(self._table.cursors)
            command = PurgeStream(name=STREAM, id=led.id, below=Offset(start if start >= 0 else 0))
            await self._group.propose(command)
        except NatslogError as error:
            logger.warning(
                "stream %s: its earlier rows are removed later: %s",
                STREAM,
                error.message,
                extra=event("cursors.rows_not_removed", stream=STREAM, reason=error.code),
            )


def _refuse(call: _Call, error: Exception) -> None:
    if not call.done.done():
        call.done.set_exception(error)
        call.done.exception()  # the request may be gone


def table_of(log: StreamLog, end: int) -> CursorTable:
    """Reads the table from the log, up to an offset. In a thread.

    Raises:
        CorruptLog, OSError: it cannot be read.
    """
    table, decoder = CursorTable(), msgspec.json.Decoder(CursorRow)
    start = log.first_readable_offset
    while start < end:
        with log.reader.plan_read(start, max_bytes=_PLAN_BYTES, uncommitted=True) as plan:
            for _, batch in plan.rows():
                columns = [batch.column(name).to_pylist() for name in ("offset", "key", "value")]
                table.adopt(
                    (key.decode(), decoder.decode(value))
                    for offset, key, value in zip(*columns, strict=True)
                    if start <= offset < end
                )
            start = plan.next_offset
    return table
