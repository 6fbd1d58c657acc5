"""Direct appends: parts uploaded as Arrow IPC streams, committed together, once for each (producer, batch).

All are for the stream's leader; others answer with 307. A producer counts its batches upwards.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

import msgspec
from aiohttp import web

from natslog import tracing
from natslog.errors import InvalidRequest
from natslog.http.access import LIMITS, PAID_BYTES, limits_of, rights_of
from natslog.http.bodies import chunks_of
from natslog.http.context import broker_of, leading
from natslog.http.endpoint import Call
from natslog.http.shapes import writing as shapes
from natslog.http.shapes.common import Answer, shape_response
from natslog.ingest.staged_rows import RowRules
from natslog.model import Appended
from natslog.node.replicas.direct_append import Commit, commit
from natslog.node.replicas.stream import HostedStream
from natslog.node.stream_operations import require_not_internal
from natslog.node.writes.staging import BatchKey, StagedPart
from natslog.subjects import cover, has_wildcard

_ALL_ROWS = "rows"  # the part of a batch that is one request


def _key(of: shapes.BatchPath, stream: HostedStream) -> BatchKey:
    """Raises InvalidRequest."""
    require_not_internal(stream.name)
    return stream.record.id, of.producer, of.batch


def _rules(request: web.Request, stream: HostedStream, given: str | None) -> RowRules:
    """Raises InvalidRequest: the stream does not record the default subject. Forbidden: the identity may not publish
    to it.
    """
    recorded = stream.record.settings.subjects
    allowed, largest = limits_of(request, "publish", stream.record), stream.record.settings.max_message_bytes
    if given is None:
        is_only_one = len(recorded) == 1 and not has_wildcard(recorded[0])
        return RowRules(recorded, recorded[0] if is_only_one else None, allowed, largest)
    rules = RowRules(recorded, given, allowed, largest)
    if not cover(recorded, given):
        raise InvalidRequest(f"the stream records {rules.shown}, not the subject {given!r}", subject=given)
    return rules


async def _staged(
    request: web.Request, stream: HostedStream, key: BatchKey, part: str, attempt: int, subject: str | None
) -> StagedPart:
    """The uploaded rows. Raises as `Staging.receive`."""
    staging, rules = broker_of(request).staging, _rules(request, stream, subject)
    if (request.content_length or 0) > staging.max_bytes:
        raise staging.too_large(request.content_length or 0)
    chunks = request.app[LIMITS].received(rights_of(request), chunks_of(request))
    try:
        return await staging.receive(key, part, attempt, rules, chunks)
    finally:
        request[PAID_BYTES] = request.content.total_bytes


async def stage(call: Call[shapes.PartPath, None]) -> Answer[shapes.StagedPart]:
    """Stage rows: an Arrow IPC stream with value and, if wanted, subject, key, headers"""
    of = call.parameters
    stream = await leading(call.request)
    staged = await _staged(call.request, stream, _key(of, stream), of.part, of.attempt, of.subject)
    receipt = msgspec.structs.asdict(staged.receipt)
    return shape_response(shapes.StagedPart(**receipt, bytes=staged.size_bytes))


async def append_rows(call: Call[shapes.RowsPath, None]) -> Answer[Appended]:
    """Append rows in one request, as the batch that follows another one, exactly once

    The body is an Arrow IPC stream as that of a part. The batch is appended if `after` is the last batch of its
    producer, or if the producer has none. A repetition is answered with what is stored; any other batch is a conflict.
    """
    request, of = call.request, call.parameters
    stream, broker = await leading(request), broker_of(request)
    key = _key(of, stream)
    try:
        # An attempt of its own: a repetition does not replace the rows of a request that is still under way.
        staged = await _staged(request, stream, key, _ALL_ROWS, time.monotonic_ns(), of.subject)
        requested = Commit(key, [staged.receipt], after=of.after, allowed=limits_of(request, "publish", stream.record))
        return shape_response(await commit(stream, broker.staging, broker.staged_copies, requested))
    finally:
        await broker.staging.drop(key)


async def commit_batch(call: Call[shapes.BatchPath, shapes.Commit]) -> Answer[Appended]:
    """Commit staged parts as one run, exactly once"""
    request, body = call.request, call.body
    name = request.match_info["name"]
    attributes = tracing.messaging("commit", "process", name)
    with tracing.span(f"commit {name}", "server", attributes, parent=request.headers) as span:
        stream, broker = await leading(request), broker_of(request)
        allowed = limits_of(request, "publish", stream.record)
        requested = Commit(_key(call.parameters, stream), body.parts, body.on_conflict, allowed)
        appended = await commit(stream, broker.staging, broker.staged_copies, requested)
        span.set(tracing.of_run(name, appended.start, appended.end))
        return shape_response(appended)


async def abort(call: Call[shapes.BatchPath, None]) -> web.Response:
    """Delete the staged parts

    Committed rows are not affected.
    """
    stream = await leading(call.request)
    await broker_of(call.request).staging.drop(_key(call.parameters, stream))
    return web.Response(status=204)


async def last_batches(call: Call[shapes.ProducersQuery, None]) -> Answer[shapes.LastBatches]:
    """The last committed batches of producers"""
    stream, broker = await leading(call.request), broker_of(call.request)
    find = partial(stream.usable_log().last_runs, call.parameters.prefix)
    runs = await asyncio.get_running_loop().run_in_executor(broker.readers, find)
    return shape_response(shapes.LastBatches({run.producer: run.batch for run in runs}))


async def last_batch(call: Call[shapes.ProducerPath, None]) -> Answer[shapes.LastBatch]:
    """The last batch that this producer committed"""
    producer = call.parameters.producer
    stream, broker = await leading(call.request), broker_of(call.request)
    log = stream.usable_log()
    find = partial(log.last_run, producer, is_committed=True)
    run = await asyncio.get_running_loop().run_in_executor(broker.readers, find)
    body = shapes.LastBatch(producer, broker.config.client_urls)
    if run is not None:
        body.batch, body.start, body.end = run.batch, run.start, run.end
        body.digest = None if run.digest is None else f"{run.digest:032x}"
    return shape_response(body)
