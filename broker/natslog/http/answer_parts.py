"""The parts of which an answer with messages consists: made one after another, so that memory and open files are
bounded however long the range is.

Theory of operation. A *stored* part is the files' own bytes, sent by sendfile: whole batches, or the chosen columns of
them behind new headers. Where its first or last batch goes beyond the range and exact rows are asked for, that batch is
cut and encoded anew. A *rewritten* part is made in memory: rows are left out, messages become lines of JSON, or tiny
commits one batch. What is made in memory takes a
slot (`Answers.slot`) for as long as it is made, so that other requests have their turn between two parts. A part is
planned when the one before has been sent: where retention has deleted its messages by then, the answer cannot be ended.
The last small commits are in memory (`RecentCommits`): an answer of only these opens no file and needs no thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import pyarrow as pa
import pyarrow.compute as pc
from aiohttp import web

from natslog.arrow import ipc
from natslog.arrow.covered import covered
from natslog.arrow.messages_json import json_lines
from natslog.arrow.projection import project, schema_of
from natslog.arrow.schema import COLUMNS, MESSAGE_SCHEMA
from natslog.http.answers import Answer
from natslog.http.context import ANSWERS, OWNER, broker_of
from natslog.http.part import QUICK_BYTES, Part, Sendable
from natslog.http.row_shares import Passed, Share
from natslog.log import FileRange, ReadPlan, StreamLog
from natslog.log.removed import AllBut
from natslog.log.segment import read_at
from natslog.node.replicas.stream import HostedStream
from natslog.node.threads import in_thread
from natslog.wire.small_batches import StoredHeader

ARROW_STREAM = "application/vnd.apache.arrow.stream"
NDJSON = "application/x-ndjson"

_STORED_PART_BYTES = 32 * 1024 * 1024
_REWRITTEN_PART_BYTES = 8 * 1024 * 1024
_MAX_DECODED_BYTES = 16 * 1024 * 1024
_TINY_BATCH_BYTES = 16 * 1024
_MANY_BATCHES = 8
_MUCH_BYTES = 1024 * 1024
_ROWS_AT_ONCE = 16_384
_MOST_IN_MEMORY, _MOST_CHOSEN_IN_MEMORY = 4096, 256
"""Rows of an answer that is made in the event loop."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request for messages of a stream.

    Attributes:
        end: None means the high watermark.
        max_bytes: of one answer of one part; None means all of the range, in as many parts as it takes.
        exact: no rows outside the range; else stored batches may come whole, but for purged rows.
        allowed: wildcards of subjects; messages of others are not sent. None: all.
        view: the messages of which a view consists; None: all.
        share: messages of others are not sent. `passed`: messages that were passed are not sent.
        takes_columns: columns of stored batches may come whole too (`natslog.arrow.projection`).
    """

    start: int
    end: int | None
    max_bytes: int | None
    wait_ms: int
    subject: str | None
    columns: tuple[str, ...] | None
    ndjson: bool
    exact: bool
    takes_columns: bool = False
    allowed: tuple[str, ...] | None = None
    view: AllBut | None = None
    share: Share | None = None
    passed: tuple[Passed, ...] = ()

    def beyond(self, start: int) -> Question:
        """The same of messages from there on, without what has been passed before."""
        passed = tuple(one for one in self.passed if max(one.ends) > start)
        return self if len(passed) == len(self.passed) else replace(self, passed=passed)

    @property
    def changes_rows(self) -> bool:
        return self.ndjson or self.filters or self.columns is not None

    @property
    def filters(self) -> bool:
        """Whether it leaves out messages by what is in them."""
        return bool(self.subject is not None or self.allowed is not None or self.share or self.passed)

    @property
    def subjects(self) -> list[tuple[str, ...]]:
        """Lists of wildcards: a message is asked for if one of each list covers its subject."""
        asked: list[tuple[str, ...]] = [] if self.subject is None else [(self.subject,)]
        return asked if self.allowed is None else [*asked, self.allowed]

    @property
    def only_projects(self) -> bool:
        """Whether all that it leaves out are columns."""
        return self.columns is not None and not self.filters and not self.ndjson

    @property
    def takes_whole(self) -> bool:
        """Whether stored batches, or columns of them, may come with rows outside of the range."""
        return not self.exact and (self.columns is None or (self.takes_columns and self.max_bytes is not None))

    @property
    def has_offsets(self) -> bool:
        """Whether the offset of each message is asked for."""
        return self.columns is None or "offset" in self.columns

    @property
    def opening(self) -> bytes:
        """The beginning of the response body."""
        return b"" if self.ndjson else _schema_message(self.columns)

    @property
    def ending(self) -> bytes:
        return b"" if self.ndjson else ipc.END_OF_STREAM


@lru_cache(maxsize=64)
def _schema_message(columns: tuple[str, ...] | None) -> bytes:
    return ipc.schema_message(schema_of(columns or COLUMNS))


class PartMaker:
    """Makes the parts of one answer."""

    def __init__(self, request: web.Request, stream: HostedStream, asked: Question) -> None:
        self._stream, self._asked = stream, asked
        self._answers, self._host = request.app[ANSWERS], request[OWNER] or request.remote or ""
        self._readers = broker_of(request).readers
        self._projects = asked.only_projects

    async def part(self, start: int, end: int | None) -> Part:
        """The next part of `[start, end)`, which is to be closed.

        Raises:
            OffsetOutOfRange, CorruptLog, OSError: it cannot be read. Overloaded: it cannot be made now.
        """
        if (made := piece_in_memory(self._stream, self._asked, start, end)) is not None:
            return Part(self._stream, self._readers, made.end, [made.body], ExitStack(), is_whole=made.is_whole)
        with ExitStack() as held:
            plan, pieces = await self._pieces(start, end, held)
            if pieces is None:
                self._projects = False
                plan, pieces = await self._pieces(start, end, held)
                assert pieces is not None, "any batch can be rewritten"
            is_whole = not any(isinstance(piece, Answer) for piece in pieces)
            return Part(
                self._stream,
                self._readers,
                plan.next_offset,
                pieces,
                held.pop_all(),
                is_whole=is_whole,
                removed_rows=plan.removed_rows,
            )

    async def _pieces(self, start: int, end: int | None, held: ExitStack) -> tuple[ReadPlan, Sequence[Sendable] | None]:
        """The content of the part; `held` closes it. The slot is released before that. None where stored batches are of
        a format of which single columns cannot be sent.
        """
        async with AsyncExitStack() as making:
            threads = self._readers
            has_slot = self._asked.view is not None  # to plan it is to make most of it
            if has_slot:
                threads = await making.enter_async_context(self._answers.slot(self._host))
            plan = held.enter_context(await self._planned(start, end))
            is_rewritten, made_bytes = self._is_rewritten(plan), self._cut_bytes(plan)
            if not has_slot and (plan.length if is_rewritten else made_bytes) > QUICK_BYTES:
                plan.close()  # while other requests run, this one keeps no file open
                threads = await making.enter_async_context(self._answers.slot(self._host))
                plan = held.enter_context(await self._planned(start, end))
                is_rewritten, made_bytes = self._is_rewritten(plan), self._cut_bytes(plan)
            if is_rewritten:
                body = await in_thread(threads, _rewritten, plan, self._asked)
                plan.close()
                return plan, [held.enter_context(await self._answers.keep(body))]
            before, after = await in_thread(threads, _cut, plan, self._asked) if made_bytes else (b"", b"")
            planned_end = plan.next_offset
            stored = await self._stored(plan)
            if stored is None:
                plan.close()
                return plan, None
            if plan.next_offset < planned_end:
                after = b""
            kept = [
                [held.enter_context(await self._answers.keep(memoryview(rows)))] if rows else []
                for rows in (before, after)
            ]
            return plan, [*kept[0], *stored, *kept[1]]

    async def _stored(self, plan: ReadPlan) -> Sequence[Sendable] | None:
        """The batches of the plan, or the columns of them."""
        if self._asked.columns is None or not plan.ranges:
            return plan.ranges
        return await in_thread(self._readers, plan.projected, self._asked.columns)

    async def _planned(self, start: int, end: int | None) -> ReadPlan:
        view = self._asked.view
        asked = self._asked if view is None else replace(self._asked, view=self._renewed(view))
        planning = partial(_plan, self._stream, asked, start, end, projects=self._projects)
        plan = await _held(asyncio.get_running_loop().run_in_executor(self._readers, planning))
        try:
            if asked.view is not None and self._renewed(asked.view) is not asked.view:
                plan.close()  # its messages may have been dropped before its files were opened
                return await self._planned(start, end)
        except BaseException:
            plan.close()
            raise
        return plan

    def _renewed(self, view: AllBut) -> AllBut:
        """Raises ViewExpired."""
        log = self._stream.usable_log()
        return log.latest_views.renewed(view, log.high_watermark, time.monotonic())

    def _is_rewritten(self, plan: ReadPlan) -> bool:
        return _rewrites(plan, self._asked, projects=self._projects)

    def _cut_bytes(self, plan: ReadPlan) -> int:
        """The stored bytes of outer batches of which rows are left out: they were not asked for, or were purged."""
        uneven_bytes = plan.uneven_bytes
        if not uneven_bytes:
            return 0
        begins_purged = bool(plan.ranges) and plan.ranges[0].start < self._stream.usable_log().first_readable_offset
        takes_whole = self._asked.takes_whole and not begins_purged
        if takes_whole and not self._asked.has_offsets:
            takes_whole = not plan.has_uneven_gaps  # the client could not cut it
        return 0 if takes_whole else uneven_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """The answer to a question about `[start, end)`, without what opens and ends it: pieces that follow one another
    can be joined. `is_whole`: it consists of stored batches. `removed_rows`: as of `Part`.
    """

    start: int
    end: int
    body: bytes
    is_whole: bool
    removed_rows: int


def piece_in_memory(stream: HostedStream, asked: Question, start: int, end: int | None) -> Piece | None:
    """Of the last small commits, if `[start, end)` consists of them, and no message in it is hidden. Does not block."""
    log = stream.usable_log()
    end = log.high_watermark if end is None else min(end, log.high_watermark)
    if not _may_be_in_memory(log, asked, start, end):
        return None
    commits = log.recent.commits(start, end)
    if commits is None:
        return None
    projects = asked.only_projects
    is_made = asked.changes_rows or (len(commits) > _MANY_BATCHES and _may_change(asked, projects=projects))
    if not is_made:
        body = b"".join(piece for batch in commits for piece in batch.pieces)
    elif (rows := log.recent.rows(start, end)) is not None:
        body = bytes(_made_anew([rows], start, end, asked))
    else:
        return None
    if asked.max_bytes is not None and len(body) > asked.max_bytes:
        return None
    return Piece(start, end, body, is_whole=not is_made, removed_rows=0)


def _may_be_in_memory(log: StreamLog, asked: Question, start: int, end: int) -> bool:
    """Whether `[start, end)` is little, at the end of the log, and no message in it is hidden."""
    at = log.positions()
    most_rows = _MOST_CHOSEN_IN_MEMORY if asked.ndjson or asked.filters else _MOST_IN_MEMORY
    is_recent = at.high_watermark - start <= _MOST_IN_MEMORY and at.first_readable_offset <= start < end
    is_shown = asked.view is None and not log.visibility.has_rules and not log.visibility.removed.count(start, end)
    return is_recent and end - start <= most_rows and is_shown


def rows_in_memory(stream: HostedStream, asked: Question, start: int, end: int) -> pa.Table | None:
    """As `piece_in_memory`: the rows and columns that are asked for. Does not block."""
    log = stream.usable_log()
    if not _may_be_in_memory(log, asked, start, end):
        return None
    rows = log.recent.rows(start, end)
    return None if rows is None else _chosen([rows], start, end, asked)


def columns_in_memory(stream: HostedStream, asked: Question, start: int, end: int) -> bytes | None:
    """As `piece_in_memory`: the columns that are asked for, as they are stored, of at most `_MANY_BATCHES` commits."""
    log = stream.usable_log()
    if not asked.only_projects or not _may_be_in_memory(log, asked, start, end):
        return None
    commits = log.recent.commits(start, end)
    if commits is None or len(commits) > _MANY_BATCHES:
        return None
    pieces: list[bytes | bytearray | memoryview] = []
    for batch in commits:
        if batch.header.batch_format == ipc.FIRST_FORMAT:
            return None
        stored = memoryview(b"".join(batch.pieces))
        made = project(batch.header, stored, asked.columns or COLUMNS)
        body = stored[batch.header.header_bytes :]
        pieces += [made.header, *(body[first:last] for first, last in made.body)]
    return b"".join(pieces)


def stored_rows(stream: HostedStream, asked: Question, start: int, end: int) -> tuple[pa.Table, int]:
    """The rows and columns that are asked for, of so many offsets as make one part, and where these end.

    Raises:
        OffsetOutOfRange, CorruptLog, OSError: it cannot be read.
    """
    with _plan(stream, asked, start, end) as plan:
        batches = [batch for _, batch in _decoded(plan, _MAX_DECODED_BYTES)]
        return _chosen(batches, plan.start, plan.next_offset, asked), plan.next_offset


def make_piece(stream: HostedStream, asked: Question, start: int, end: int) -> Piece | None:
    """At most about `asked.max_bytes` from `start` on; None where stored batches cannot be cut at both ends.

    Raises:
        OffsetOutOfRange, CorruptLog, OSError: it cannot be read.
    """
    if (made := piece_in_memory(stream, asked, start, end)) is not None:
        return made
    with _plan(stream, asked, start, end) as plan:
        if _rewrites(plan, asked, projects=False):
            body = bytes(_rewritten(plan, asked))
            plan.close()
            return Piece(start, plan.next_offset, body, is_whole=False, removed_rows=plan.removed_rows)
        if plan.uneven_bytes:
            return None
        stored = [read_at(piece.fd, piece.position, piece.length) for piece in plan.ranges]
        if sum(map(len, stored)) < plan.length:
            return None  # whoever reads it by itself finds out why
        joined = b"".join(stored)
        return Piece(start, plan.next_offset, joined, is_whole=True, removed_rows=plan.removed_rows)


def _rewrites(plan: ReadPlan, asked: Question, *, projects: bool) -> bool:
    changes = asked.changes_rows and not projects
    return changes or (_may_change(asked, projects=projects) and _is_crumbly(plan))


def _may_change(asked: Question, *, projects: bool) -> bool:
    """An answer in several parts that are whole has no rewritten ones among them."""
    return asked.exact or asked.max_bytes is not None or projects


def _plan(stream: HostedStream, asked: Question, start: int, end: int | None, *, projects: bool = False) -> ReadPlan:
    """In a thread. Batches that are rewritten are counted when they have been decoded."""
    changes = asked.changes_rows and not projects
    usual_bytes = _REWRITTEN_PART_BYTES if changes else _STORED_PART_BYTES
    limit_bytes = usual_bytes if asked.max_bytes is None else asked.max_bytes
    if changes:
        limit_bytes = min(limit_bytes, usual_bytes)
    plan = stream.usable_log().reader.plan_read(start, end, max_bytes=limit_bytes, hidden=asked.view)
    try:
        if not changes and _may_change(asked, projects=projects):
            _limit_to_alike(plan)
        if asked.max_bytes is not None and not changes and not _is_crumbly(plan):
            plan.limit_unpacked(asked.max_bytes)
    except BaseException:
        plan.close()
        raise
    return plan


async def _held(planning: asyncio.Future[ReadPlan]) -> ReadPlan:
    """The plan; its files are closed even where the client leaves before it is made."""
    try:
        return await asyncio.shield(planning)
    except asyncio.CancelledError:
        planning.add_done_callback(_close_plan)
        raise


def _close_plan(planning: asyncio.Future[ReadPlan]) -> None:
    if not planning.cancelled() and planning.exception() is None:
        planning.result().close()


def _is_crumbly(stored: ReadPlan | FileRange) -> bool:
    """Many tiny commits, as single publishes leave them: sending them as one batch is cheaper for all sides."""
    return stored.batches > _MANY_BATCHES and stored.length < stored.batches * _TINY_BATCH_BYTES


def _limit_to_alike(plan: ReadPlan) -> None:
    """Ends the plan where tiny commits begin, or end, beside much that is sent as it is stored; and where there are too
    many to be rewritten at once.
    """
    kinds = {number: _is_crumbly(one) for number, one in enumerate(plan.ranges)}
    kinds = {number: kind for number, kind in kinds.items() if kind or plan.ranges[number].length >= _MUCH_BYTES}
    other = next((number for number, kind in kinds.items() if kind != next(iter(kinds.values()))), None)
    if other is not None:
        plan.end_before(other)
    if _is_crumbly(plan):
        plan.limit_stored(_REWRITTEN_PART_BYTES)


def _cut(plan: ReadPlan, asked: Question) -> tuple[bytes | memoryview, bytes | memoryview]:
    """In a thread: takes the outer batches out of the plan. Their rows within the range, before and behind the rest."""
    before, after = plan.take_uneven()
    if asked.columns is None:
        return before, after
    return _some_columns(before, asked), _some_columns(after, asked)


def _some_columns(message: memoryview, asked: Question) -> bytes | memoryview:
    assert asked.columns is not None, "some are chosen"
    return _messages_of([ipc.decode_batch(message).select(list(asked.columns))], asked) if message else b""


def _messages_of(batches: list[pa.RecordBatch], asked: Question) -> memoryview:
    """Without what opens and ends an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return memoryview(sink.getvalue()).cast("B")[len(asked.opening) : -len(asked.ending)]


def _rewritten(plan: ReadPlan, asked: Question) -> memoryview:
    """In a thread: exactly the rows and columns asked for, without what opens and ends an Arrow stream."""
    stored = _decoded(plan, min(asked.max_bytes or _MAX_DECODED_BYTES, _MAX_DECODED_BYTES))
    if asked.ndjson or asked.columns is not None:
        return _made_anew([batch for _, batch in stored], plan.start, plan.next_offset, asked)
    pieces: list[bytes | memoryview] = []
    few: list[pa.RecordBatch] = []
    for message, batch in stored:  # batches that are whole and large are sent as they are stored
        if message is None or not _has_all_requested(batch, plan, asked):
            few.append(batch)
        else:
            pieces += [_made_anew(few, plan.start, plan.next_offset, asked), message]
            few = []
    pieces.append(_made_anew(few, plan.start, plan.next_offset, asked))
    return memoryview(b"".join(pieces)) if len(pieces) > 1 else memoryview(pieces[0])


def _has_all_requested(batch: pa.RecordBatch, plan: ReadPlan, asked: Question) -> bool:
    """Whether every row of a stored batch is asked for."""
    offsets = batch.column("offset")
    if not len(offsets) or offsets[0].as_py() < plan.start or offsets[-1].as_py() >= plan.next_offset:
        return False
    if asked.share is not None or asked.passed:
        return False
    distinct = pc.unique(batch.column("subject"))
    return all(pc.all(covered(distinct, patterns)).as_py() for patterns in asked.subjects)


def _made_anew(batches: list[pa.RecordBatch], start: int, end: int, asked: Question) -> memoryview:
    table = _chosen(batches, start, end, asked)
    if asked.ndjson:
        return memoryview(b"".join(map(json_lines, table.to_batches(max_chunksize=_ROWS_AT_ONCE))))
    batches = table.combine_chunks().to_batches()
    return _messages_of(batches, asked) if batches else memoryview(b"")


def _chosen(batches: list[pa.RecordBatch], start: int, end: int, asked: Question) -> pa.Table:
    """The rows in `[start, end)` and columns of these batches that are asked for."""
    table = pa.Table.from_batches(batches, schema=MESSAGE_SCHEMA)
    offsets = table.column("offset")
    keep = pc.and_(pc.greater_equal(offsets, start), pc.less(offsets, end))
    for patterns in asked.subjects:
        keep = pc.and_(keep, covered(table.column("subject"), patterns))
    if asked.share is not None:
        keep = pc.and_(keep, asked.share.holds(table))
    for passed in asked.passed:
        if start < max(passed.ends):
            keep = pc.and_not(keep, passed.holds(table))
    table = table.filter(keep)
    return table if asked.columns is None else table.select(list(asked.columns))


def _decoded(plan: ReadPlan, max_bytes: int) -> list[tuple[memoryview | None, pa.RecordBatch]]:
    """The plan's batches, decoded and, where they are large, encoded; as many as take `max_bytes` decompressed, but
    one; the plan then ends with them. Their rows count as taken from it.
    """
    found: list[tuple[StoredHeader, memoryview | None, pa.RecordBatch]] = []
    size_bytes = 0
    for header, stored in plan.batches_and_rows():
        message = None if isinstance(stored, pa.RecordBatch) or len(stored) < _TINY_BATCH_BYTES else stored
        batch = stored if isinstance(stored, pa.RecordBatch) else ipc.decode_batch(stored)
        if found and size_bytes + batch.nbytes > max_bytes:
            plan.next_offset = header.base_offset
            break
        found.append((header, message, batch))
        size_bytes += batch.nbytes
    for header, _, batch in found:
        within = ipc.rows_within(header, batch, plan.start, plan.next_offset)
        plan.rows_taken += within.stop - within.start
    return [(message, batch) for _, message, batch in found]
