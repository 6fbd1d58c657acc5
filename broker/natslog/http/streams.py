"""Streams: list, create, look at, edit, delete; where a time is; how a range is cut for parallel readers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from aiohttp import web

from natslog.errors import InvalidRequest
from natslog.http.context import broker_of, log_of, position, query, whole
from natslog.model import parse_settings
from natslog.node.stream import HostedStream
from natslog.subjects import check_name
from natslog.times import format_timestamp_us, parse_timestamp_us

routes = web.RouteTableDef()

_MAX_SPLITS = 100_000


def stream_json(stream: HostedStream) -> dict[str, Any]:
    """A stream as the API shows it."""
    record, log = stream.record, stream.log
    body: dict[str, Any] = {"name": record.name, "id": record.id} | record.settings.to_json()
    body |= {
        "paused": record.paused,
        "created": format_timestamp_us(record.created_us),
        "leader": record.leader,
        "leader_epoch": record.leader_epoch,
        "replicas": record.settings.replicas,
        "replica_ids": list(record.replicas),
        "isr": list(record.isr),
    }
    if log is not None:
        body |= {
            "log_start_offset": log.log_start_offset,
            "high_watermark": log.high_watermark,
            "bytes": log.chain.size_bytes,
            "segments": len(log.chain.segments),
        }
    problem = stream.problem or (log.failure if log is not None else None)
    return body | ({"problem": problem.to_json()["error"]} if problem else {})


async def _json_body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


@routes.get("/v1/streams")
async def list_streams(request: web.Request) -> web.Response:
    query(request)
    streams = broker_of(request).streams
    return web.json_response([stream_json(streams[name]) for name in sorted(streams)])


@routes.post("/v1/streams")
async def create_stream(request: web.Request) -> web.Response:
    body = await _json_body(request)
    name = check_name(body.pop("name", None))
    stream, created = await broker_of(request).create_stream(name, parse_settings(body))
    return web.json_response(stream_json(stream), status=201 if created else 200)


@routes.get("/v1/streams/{name}")
async def show_stream(request: web.Request) -> web.Response:
    query(request)
    return web.json_response(stream_json(broker_of(request).hosted(request.match_info["name"])))


@routes.patch("/v1/streams/{name}")
async def edit_stream(request: web.Request) -> web.Response:
    broker, name, body = broker_of(request), request.match_info["name"], await _json_body(request)
    stream = broker.hosted(name)
    paused = body.pop("paused", None)
    if paused is not None and not isinstance(paused, bool):
        raise InvalidRequest("paused must be true or false")
    if body:
        stream = await broker.edit_stream(name, parse_settings(body, stream.record.settings))
    if paused is not None:
        stream = await broker.pause_stream(name, paused)
    return web.json_response(stream_json(stream))


@routes.delete("/v1/streams/{name}")
async def delete_stream(request: web.Request) -> web.Response:
    await broker_of(request).delete_stream(request.match_info["name"])
    return web.Response(status=204)


@routes.get("/v1/streams/{name}/offsets")
async def offset_at(request: web.Request) -> web.Response:
    """The first offset at or after a time; beyond the newest message: the high watermark, and no timestamp."""
    values = query(request, "timestamp")
    if "timestamp" not in values:
        raise InvalidRequest("name a time: ?timestamp=2026-11-20T10:30:00Z or epoch milliseconds")
    timestamp_us = parse_timestamp_us(values["timestamp"])
    reader = log_of(request).reader
    loop = asyncio.get_running_loop()
    offset, found_us = await loop.run_in_executor(broker_of(request).readers, reader.offset_at, timestamp_us)
    found = None if found_us is None else format_timestamp_us(found_us)
    return web.json_response({"offset": offset, "timestamp": found})


@routes.get("/v1/streams/{name}/splits")
async def splits(request: web.Request) -> web.Response:
    values = query(request, "start", "end", "max_bytes", "max_rows", "min_splits")
    log, broker = log_of(request), broker_of(request)
    start = position(values, "start", log.log_start_offset, log)
    end = position(values, "end", log.high_watermark, log)
    max_rows = whole(values, "max_rows", None, low=1)
    if max_rows is not None and (end - start) // max_rows > _MAX_SPLITS:
        raise InvalidRequest(f"max_rows {max_rows} would make more than {_MAX_SPLITS} splits of this range")
    cut = await asyncio.get_running_loop().run_in_executor(
        broker.readers,
        lambda: log.reader.splits(
            start,
            end,
            max_bytes=whole(values, "max_bytes", None, low=1),
            max_rows=max_rows,
            min_splits=whole(values, "min_splits", 1, low=1, high=_MAX_SPLITS),
        ),
    )
    urls = broker.config.client_urls
    return web.json_response([msgspec.to_builtins(msgspec.structs.replace(split, urls=urls)) for split in cut])
