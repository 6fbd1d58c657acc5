"""Direct appends: parts uploaded as Arrow IPC streams, committed together, once for each (producer, batch).

All are for the stream's leader; others answer with 307. A producer counts its batches upwards.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from aiohttp import web

from natslog import tracing
from natslog.errors import InvalidRequest
from natslog.http.access import LIMITS, PAID_BYTES, limits_of, rights_of
from natslog.http.bodies import chunks_of, read_body
from natslog.http.context import broker_of, leading
from natslog.http.endpoint import Call
from natslog.http.part import QUICK_BYTES
from natslog.http.shapes import writing as shapes
from natslog.http.shapes.common import Answer, shape_response
from natslog.ingest.staged_rows import RowRules
from natslog.model import Appended
from natslog.node.replicas.direct_append import Commit, append_following, commit, wait_until_committed
from natslog.node.replicas.stream import HostedStream
from natslog.node.stream_operations import require_not_internal
from natslog.node.threads import in_thread
from natslog.node.writes.staging import BatchKey, PartInMemory
from natslog.subjects import cover, has_wildcard

MOST_ROWS_BYTES = 16 * 1024 * 1024
"""Of rows that are appended in one request; more rows are staged as parts."""
MOST_STORED_BYTES = 64 * 1024 * 1024
"""Of these rows, as a log stores them."""


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


async def stage(call: Call[shapes.PartPath, None]) -> Answer[shapes.StagedPart]:
    """Stage rows: an Arrow IPC stream with value and, if wanted, subject, key, headers"""
    request, of = call.request, call.parameters
    stream, broker = await leading(request), broker_of(request)
    key, rules = _key(of, stream), _rules(request, stream, of.subject)
    if (request.content_length or 0) > broker.staging.max_bytes:
        raise broker.staging.too_large(request.content_length or 0)
    chunks = request.app[LIMITS].received(rights_of(request), chunks_of(request))
    try:
        staged = await broker.staging.receive(key, of.part, of.attempt, rules, chunks)
    finally:
        request[PAID_BYTES] = request.content.total_bytes
    receipt = msgspec.structs.asdict(staged.receipt)
    return shape_response(shapes.StagedPart(**receipt, bytes=staged.size_bytes))


async def append_rows(call: Call[shapes.RowsPath, None]) -> Answer[Appended]:
    """Append rows in one request, as the batch that follows another one, exactly once

    The body is an uncompressed Arrow IPC stream with the columns of a part. The batch is appended if `after` is the
    last batch of its producer, or 0 and the producer has none. A repetition is answered with what is stored; any other
    batch is a conflict.
    """
    request, of = call.request, call.parameters
    stream = await leading(request)
    key, rules = _key(of, stream), _rules(request, stream, of.subject)
    data, broker = await read_body(request, MOST_ROWS_BYTES), broker_of(request)
    max_bytes = min(MOST_STORED_BYTES, broker.staging.max_bytes)
    make = partial(PartInMemory.of, data, rules, f"batch {of.batch} of {of.producer}", max_bytes)
    rows = make() if len(data) <= QUICK_BYTES else await in_thread(broker.readers, make)
    with broker.staging.in_memory(len(data) + rows.size_bytes):
        return shape_response(await append_following(stream, key, of.after, rows))


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
    if stream.leading is not None:  # what is stored here may be about to be committed
        await wait_until_committed(stream, stream.leading, stream.usable_log().log_end_offset)
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
