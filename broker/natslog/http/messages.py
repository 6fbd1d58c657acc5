"""Reading messages: Arrow IPC straight from the files by sendfile, or rewritten where rows or columns change.

An Arrow answer is either *whole* (`Natslog-Batches: whole`): the stored batches that cover the range, byte for byte,
each with its CRC; the client slices the first and the last. Or *exact*: filtered, projected, or coalesced from tiny
commits; just the rows asked for. `Natslog-Next-Offset` says where to go on, whatever the rows are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from aiohttp import web

from natslog.arrow import ipc
from natslog.arrow.messages_json import json_lines
from natslog.arrow.schema import COLUMNS, MESSAGE_SCHEMA
from natslog.errors import CorruptLog, InvalidRequest, OffsetOutOfRange, StorageUnavailable
from natslog.http.context import (
    ANSWERS,
    broker_of,
    check_still_leading,
    confirmed_out_of_range,
    epoch_headers,
    leading,
    position,
    query,
    whole,
)
from natslog.http.sending import UnreadableFile, disconnecting_slow_client, send_file
from natslog.log import ReadPlan, StreamLog
from natslog.node.broker import Broker
from natslog.node.replicas.stream import HostedStream
from natslog.node.threads import in_thread
from natslog.subjects import check_subject, wildcard_regex

logger = logging.getLogger("natslog.http")
routes = web.RouteTableDef()

Result = TypeVar("Result")

ARROW_STREAM = "application/vnd.apache.arrow.stream"
NDJSON = "application/x-ndjson"

_DEFAULT_BYTES = 8 * 1024 * 1024
_MAX_BYTES = 1024 * 1024 * 1024
_MAX_REWRITTEN_BYTES = 8 * 1024 * 1024
_QUICK_BYTES = 256 * 1024
_MAX_DECODED_BYTES = 16 * 1024 * 1024
_MAX_WAIT_MS = 60_000
_TINY_BATCH_BYTES = 16 * 1024
_MANY_BATCHES = 8
_ROWS_AT_ONCE = 16_384


@dataclass(frozen=True, slots=True)
class _Question:
    start: int
    end: int | None
    max_bytes: int
    wait_ms: int
    subject: str | None
    columns: tuple[str, ...] | None
    ndjson: bool

    @property
    def changes_rows(self) -> bool:
        return self.ndjson or self.subject is not None or self.columns is not None

    def is_committed_range(self, log: StreamLog) -> bool:
        """Whether it names a range all of which is committed and here: then any replica serves it, whoever leads."""
        return self.end is not None and log.log_start_offset <= self.start <= self.end <= log.high_watermark


def _question(request: web.Request, log: StreamLog) -> _Question:
    values = query(request, "start", "end", "max_bytes", "wait_ms", "subject", "columns")
    start = position(values, "start", log.log_start_offset, log)
    end = position(values, "end", 0, log) if "end" in values else None
    if end is not None and start > end:
        raise InvalidRequest(f"start {start} is beyond end {end}", start=start, end=end)
    subject = values.get("subject")
    if subject is not None:
        check_subject(subject, wildcards=True)
    columns = tuple(values["columns"].split(",")) if values.get("columns") else None
    for name in columns or ():
        if name not in COLUMNS:
            raise InvalidRequest(f"unknown column {name[:40]!r}; known are {', '.join(COLUMNS)}", column=name[:40])
    if columns is not None and len(set(columns)) < len(columns):
        raise InvalidRequest("a column is named twice: each can be asked for once", parameter="columns")
    return _Question(
        start=start,
        end=end,
        max_bytes=whole(values, "max_bytes", _DEFAULT_BYTES, low=1, high=_MAX_BYTES),
        wait_ms=whole(values, "wait_ms", 0, high=_MAX_WAIT_MS),
        subject=subject,
        columns=columns,
        ndjson=_wants_ndjson(request.headers.get("Accept", "")),
    )


def _wants_ndjson(accept: str) -> bool:
    kinds = [part.split(";")[0].strip() for part in accept.split(",")]
    if NDJSON in kinds and ARROW_STREAM not in kinds:
        return True
    if not set(kinds) & {"", "*/*", "application/*", ARROW_STREAM, NDJSON}:
        raise InvalidRequest(f"Accept {accept!r}: messages come as {ARROW_STREAM} or {NDJSON}")
    return False


@routes.get("/v1/streams/{name}/messages", allow_head=False)
async def messages(request: web.Request) -> web.StreamResponse:
    broker = broker_of(request)
    stream, asked, states_end = await _serving(request)
    log = stream.usable_log()
    await _wait_for_data(stream, log, asked)
    async with AsyncExitStack() as making:
        plan = making.enter_context(await _or_elsewhere(request, stream, _held(_planning(broker, log, asked))))
        if not asked.changes_rows and not _is_crumbly(plan):
            headers = _headers(request, stream, plan, states_end)
            stream.sent_bytes += plan.length
            return await _send_whole(request, stream, plan, headers)
        answers, threads = request.app[ANSWERS], broker.readers
        if plan.length > _QUICK_BYTES:
            plan.close()  # while others have their turn, this one keeps no file open
            threads = await making.enter_async_context(answers.slot(request.remote or ""))
            plan = making.enter_context(await _or_elsewhere(request, stream, _held(_planning(broker, log, asked))))
        rewriting = in_thread(threads, _rewritten, plan, asked)  # it reads the plan's files
        body = await _or_elsewhere(request, stream, rewriting)
        headers = _headers(request, stream, plan, states_end) | {"Natslog-Batches": "exact"}
        stream.sent_bytes += len(body)
        answer = await answers.keep(body)
    with answer:
        return await answer.send(request, NDJSON if asked.ndjson else ARROW_STREAM, headers, broker.readers)


def _planning(broker: Broker, log: StreamLog, asked: _Question) -> asyncio.Future[ReadPlan]:
    limit_bytes = min(asked.max_bytes, _MAX_REWRITTEN_BYTES) if asked.changes_rows else asked.max_bytes
    plan = partial(log.reader.plan_read, asked.start, asked.end, max_bytes=limit_bytes)
    return asyncio.get_running_loop().run_in_executor(broker.readers, plan)


async def _serving(request: web.Request) -> tuple[HostedStream, _Question, bool]:
    """The stream in the path, what is asked of it, and whether the answer states where the stream ends: that is the
    leader's to say. A range that is named, and known to be committed here, comes from any replica. Raises as `leading`.
    """
    stream = broker_of(request).streams.get(request.match_info["name"])
    if stream is not None and stream.may_serve and not _names_position(request):
        asked = _question(request, stream.usable_log())
        if asked.is_committed_range(stream.usable_log()):
            return stream, asked, False
    stream = await leading(request)
    return stream, _question(request, stream.usable_log()), True


def _names_position(request: web.Request) -> bool:
    """Whether a bound is left to the broker, or named (`earliest`, `latest`): only the leader knows where that is."""
    return not all(request.query.get(bound, "").strip().isdecimal() for bound in ("start", "end"))


def _headers(request: web.Request, stream: HostedStream, plan: ReadPlan, states_end: bool) -> dict[str, str]:
    """From a replica that does not lead, the high watermark is what it knows to be committed: there may be more.

    Raises:
        As `stated`, where the answer states the stream's end.
    """
    log = stream.usable_log()
    if states_end:
        check_still_leading(request, stream)
    return epoch_headers(stream) | {
        "Natslog-Next-Offset": str(plan.next_offset),
        "Natslog-High-Watermark": str(log.high_watermark),
        "Natslog-Log-Start-Offset": str(log.log_start_offset),
    }


async def _or_elsewhere(request: web.Request, stream: HostedStream, work: Awaitable[Result]) -> Result:
    """The work's result. What it finds damaged here, or cannot read now, is whole on another in-sync replica.

    Raises:
        HTTPTemporaryRedirect: to that one. CorruptLog, StorageUnavailable: there is no other. OffsetOutOfRange: as the
            leader says it.
    """
    try:
        return await work
    except OffsetOutOfRange as error:  # of a replica that does not lead, this says nothing of the stream
        raise await confirmed_out_of_range(request, stream, error) from error
    except CorruptLog as error:
        if stream.record.settings.replicas == 1:
            raise
        stream.note_damage(error)
        raise _redirect_to_another(request, stream) or error from error
    except OSError as error:  # the disk fails, or there are too many open files: what is stored may be whole
        logger.warning("stream %s: not read: %s", stream.name, error)
        unavailable = StorageUnavailable(f"stream {stream.name!r} cannot be read at this broker now: {error.strerror}")
        raise _redirect_to_another(request, stream) or unavailable from error


def _redirect_to_another(request: web.Request, stream: HostedStream) -> web.HTTPTemporaryRedirect | None:
    """To another in-sync replica; None where there is none."""
    broker = broker_of(request)
    others = [one for one in stream.record.isr if one != broker.cluster.me]
    urls = [url for one in others if (url := broker.url_of(one)) is not None]
    return web.HTTPTemporaryRedirect(urls[0] + request.path_qs) if urls else None


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


async def _wait_for_data(stream: HostedStream, log: StreamLog, asked: _Question) -> None:
    """The long poll: returns when there is something at `start`, or the time is up."""
    if asked.start != log.high_watermark or asked.end == asked.start or not asked.wait_ms:
        return
    try:
        async with asyncio.timeout(asked.wait_ms / 1000):
            while asked.start >= log.high_watermark:
                advanced = stream.advanced
                if advanced.is_set() or not stream.is_leading:
                    return  # the broker is stopping, or the role has changed
                await advanced.wait()
    except TimeoutError:
        return


def _is_crumbly(plan: ReadPlan) -> bool:
    """Many tiny commits, as at the tail of a slow stream: cheaper for everyone as one batch."""
    small = plan.length < min(plan.batches * _TINY_BATCH_BYTES, _MAX_REWRITTEN_BYTES)
    return plan.batches > _MANY_BATCHES and small


async def _send_whole(
    request: web.Request, stream: HostedStream, plan: ReadPlan, headers: dict[str, str]
) -> web.StreamResponse:
    """The files' own bytes. Where they cannot be read to the end the connection ends: nothing else can be said then."""
    opening = ipc.schema_message()
    response = web.StreamResponse(headers=headers | {"Natslog-Batches": "whole"})
    response.content_type = ARROW_STREAM
    response.content_length = len(opening) + plan.length + len(ipc.END_OF_STREAM)
    await response.prepare(request)
    with disconnecting_slow_client(request):
        await response.write(opening)
        readers = broker_of(request).readers
        for piece in plan.ranges:
            try:
                await send_file(request, piece.fd, piece.position, piece.length, readers)
            except UnreadableFile as error:
                stream.usable_log().reader.forget_proofs(piece.path)  # so that whoever asks again is told
                stream.note_damage(CorruptLog(f"{piece.path}: {error}", file=str(piece.path), position=piece.position))
                raise ConnectionResetError("the answer cannot be ended") from error
        await response.write(ipc.END_OF_STREAM)
        await response.write_eof()
    return response


def _decoded(plan: ReadPlan) -> list[pa.RecordBatch]:
    """The plan's batches, as many as fit into memory once they are decompressed; the plan then ends with them."""
    batches: list[pa.RecordBatch] = []
    size_bytes = 0
    for message in plan.messages():
        batch = ipc.decode_batch(message)
        if batches and size_bytes + batch.nbytes > _MAX_DECODED_BYTES:
            plan.next_offset = batch.column("offset")[0].as_py()
            break
        batches.append(batch)
        size_bytes += batch.nbytes
    return batches


def _rewritten(plan: ReadPlan, asked: _Question) -> memoryview:
    """In a thread: exactly the rows and columns asked for."""
    batches = _decoded(plan)
    table = pa.Table.from_batches(batches, schema=MESSAGE_SCHEMA)
    offsets = table.column("offset")
    keep = pc.and_(pc.greater_equal(offsets, asked.start), pc.less(offsets, plan.next_offset))
    if asked.subject is not None:
        matches = pc.match_substring_regex(table.column("subject"), wildcard_regex(asked.subject))
        keep = pc.and_(keep, matches)
    table = table.filter(keep)
    if asked.columns is not None:
        table = table.select(list(asked.columns))
    if asked.ndjson:
        return memoryview(b"".join(map(json_lines, table.to_batches(max_chunksize=_ROWS_AT_ONCE))))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.combine_chunks().to_batches():
            writer.write_batch(batch)
    return memoryview(sink.getvalue())
