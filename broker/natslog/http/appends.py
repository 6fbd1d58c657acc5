"""Direct appends: parts uploaded as Arrow IPC streams, committed together, once for each (producer, batch).

    PUT    /v1/streams/{name}/appends/{producer}/{batch}/parts/{part}?attempt=&subject=   → rows, bytes, digest, content
    POST   /v1/streams/{name}/appends/{producer}/{batch}   {"parts": [{part, attempt, rows, digest, content}]}
                                                           → start, end, duplicate
    DELETE /v1/streams/{name}/appends/{producer}/{batch}
    GET    /v1/streams/{name}/appends/{producer}           → the batch it committed last

All are for the stream's leader; others answer with 307. A producer counts its batches upwards.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial

import msgspec
from aiohttp import web

from natslog import tracing
from natslog.errors import InvalidRequest
from natslog.http import shapes
from natslog.http.access import LIMITS, PAID_BYTES, access, limits_of, rights_of
from natslog.http.bodies import chunks_of, read_body
from natslog.http.context import broker_of, leading, query, whole
from natslog.http.shapes import shape_response
from natslog.ingest.staged_rows import RowRules
from natslog.node.replicas.direct_append import Commit, commit
from natslog.node.replicas.stream import HostedStream
from natslog.node.stream_operations import require_not_internal
from natslog.node.writes.staging import BatchKey
from natslog.subjects import check_name, check_subject, cover, has_wildcard

routes = web.RouteTableDef()

_BATCH = "/v1/streams/{name}/appends/{producer}/{batch}"
_MAX_COMMIT_BYTES = 16 * 1024 * 1024
_CONTENT = re.compile(r"[0-9a-f]{32}")


def _key(request: web.Request, stream: HostedStream) -> BatchKey:
    """Raises InvalidRequest."""
    require_not_internal(stream.name)
    path = request.match_info
    batch = int(whole({"batch": path["batch"]}, "batch", 0))
    return stream.record.id, check_name(path["producer"], "producer"), batch


def _rules(request: web.Request, stream: HostedStream, given: str | None) -> RowRules:
    """Raises InvalidRequest: the stream does not record the default subject. Forbidden: the identity may not publish
    to it.
    """
    recorded = stream.record.settings.subjects
    allowed, largest = limits_of(request, "publish", stream.record), stream.record.settings.max_message_bytes
    if given is None:
        is_only_one = len(recorded) == 1 and not has_wildcard(recorded[0])
        return RowRules(recorded, recorded[0] if is_only_one else None, allowed, largest)
    check_subject(given, wildcards=False)
    rules = RowRules(recorded, given, allowed, largest)
    if not cover(recorded, given):
        raise InvalidRequest(f"the stream records {rules.shown}, not the subject {given!r}", subject=given)
    return rules


@routes.put(_BATCH + "/parts/{part}")
@access("stream", "publish")
async def stage(request: web.Request) -> web.Response:
    values = query(request, "attempt", "subject")
    part, attempt = check_name(request.match_info["part"], "part"), int(whole(values, "attempt", 0))
    stream, broker = await leading(request), broker_of(request)
    key, rules = _key(request, stream), _rules(request, stream, values.get("subject"))
    if (request.content_length or 0) > broker.staging.max_bytes:
        raise broker.staging.too_large(request.content_length or 0)
    chunks = request.app[LIMITS].received(rights_of(request), chunks_of(request))
    try:
        staged = await broker.staging.receive(key, part, attempt, rules, chunks)
    finally:
        request[PAID_BYTES] = request.content.total_bytes
    receipt = msgspec.structs.asdict(staged.receipt)
    return shape_response(shapes.StagedPart(**receipt, bytes=staged.size_bytes))


@routes.post(_BATCH)
@access("stream", "publish")
async def commit_batch(request: web.Request) -> web.Response:
    query(request)
    name = request.match_info["name"]
    attributes = tracing.messaging("commit", "process", name)
    with tracing.span(f"commit {name}", "server", attributes, parent=request.headers) as span:
        stream, broker = await leading(request), broker_of(request)
        body = await _commit_body(request)
        allowed = limits_of(request, "publish", stream.record)
        requested = Commit(_key(request, stream), body.parts, body.on_conflict, allowed)
        appended = await commit(stream, broker.staging, broker.staged_copies, requested)
        span.set(tracing.of_run(name, appended.start, appended.end))
        return shape_response(appended)


async def _commit_body(request: web.Request) -> shapes.Commit:
    data = await read_body(request, _MAX_COMMIT_BYTES)
    try:
        body = msgspec.json.decode(data, type=shapes.Commit)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise InvalidRequest(
            'the body must be {"parts": [{"part", "attempt", "rows", "digest", "content"}, …], "on_conflict": '
            f'"fail", "skip" or "append"}}: {error}'
        ) from error
    named = [(receipt.part, receipt.attempt) for receipt in body.parts]
    if len({part for part, _ in named}) < len(named):
        raise InvalidRequest("a part is named twice: name one attempt of each part")
    if not all(receipt.content is None or _CONTENT.fullmatch(receipt.content) for receipt in body.parts):
        raise InvalidRequest("content must be 32 hexadecimal digits, as the upload of the part returned it")
    return body


@routes.delete(_BATCH)
@access("stream", "publish")
async def abort(request: web.Request) -> web.Response:
    """Deletes the staged parts; committed rows are not affected."""
    query(request)
    stream = await leading(request)
    await broker_of(request).staging.drop(_key(request, stream))
    return web.Response(status=204)


@routes.get("/v1/streams/{name}/appends/{producer}")
@access("stream", "publish")
async def last_batch(request: web.Request) -> web.Response:
    """The batch that this producer committed last, and where its uploads should go."""
    query(request)
    producer = check_name(request.match_info["producer"], "producer")
    stream, broker = await leading(request), broker_of(request)
    log = stream.usable_log()
    find = partial(log.last_run, producer, is_committed=True)
    run = await asyncio.get_running_loop().run_in_executor(broker.readers, find)
    body = shapes.LastBatch(producer, broker.config.client_urls)
    if run is not None:
        body.batch, body.start, body.end = run.batch, run.start, run.end
        body.digest = None if run.digest is None else f"{run.digest:032x}"
    return shape_response(body)
