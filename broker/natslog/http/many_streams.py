"""Requests about many streams at once, for readers: positions, with or without waiting for news, and splits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from aiohttp import web

from natslog.errors import InvalidRequest, NatslogError
from natslog.http import shapes
from natslog.http.access import access, polling, require_readable, rights_of, with_counts
from natslog.http.bodies import read_body
from natslog.http.context import broker_of, current_headers, query
from natslog.http.shapes import MAX_SPLITS, MAX_WAIT_MS, AskedPositions, AskedRange, AskedSplits, shape_response
from natslog.http.streams import READ_FROM, problem_of, replica_urls, set_position, shown_splits
from natslog.log import StreamLog
from natslog.model import Split, StreamRecord
from natslog.node.broker import Broker
from natslog.node.replicas.stream import HostedStream
from natslog.subjects import MAX_NAME_CHARS, is_internal

routes = web.RouteTableDef()

_MAX_BODY_BYTES = 4 * 1024 * 1024


async def _body(request: web.Request, kind: type[Any]) -> Any:
    query(request)
    try:
        return msgspec.json.decode(await read_body(request, _MAX_BODY_BYTES), type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise InvalidRequest(f"the body is not as described in /openapi.json: {error}") from error


@routes.post("/v1/positions")
@access("checked", changes=False)
async def positions(request: web.Request) -> web.Response:
    """The positions of streams. With `seen` and `wait_ms`, it waits until one of them differs from what was seen."""
    asked: AskedPositions = await _body(request, AskedPositions)
    records, headers = await selected(request, asked)
    found = await broker_of(request).positions.of_several(records)
    shown = [_shown(request, record, found.get(record.name)) for record in records]
    return shape_response(shown, headers=headers)


async def selected(request: web.Request, asked: AskedPositions) -> tuple[list[StreamRecord], dict[str, str]]:
    """The streams that are asked for, exist, and may be read, after the wait; and whether that is current, as headers.

    Raises:
        InvalidRequest. Forbidden, Unauthorized: a stream that is named may not be read.
    """
    if len(asked.pattern or "") > MAX_NAME_CHARS:
        raise InvalidRequest(f"a pattern may have at most {MAX_NAME_CHARS} characters, as names do", field="pattern")
    if not 0 <= asked.wait_ms <= MAX_WAIT_MS:
        raise InvalidRequest(f"wait_ms {asked.wait_ms} must be a whole number from 0 to {MAX_WAIT_MS}")
    broker = broker_of(request)
    await require_readable(request, asked.streams or ())
    if asked.wait_ms:
        with polling(request):
            await broker.watching.everywhere(
                asked.seen, asked.wait_ms, lambda: {(record.name, record.id) for record in _readable(request, asked)}
            )
    is_current = await broker.up_to_date()
    await require_readable(request, asked.streams or ())
    return _readable(request, asked), current_headers(is_current)


def _readable(request: web.Request, asked: AskedPositions) -> list[StreamRecord]:
    """The streams that are asked for, exist, and may be read by the identity."""
    streams, names, rights = broker_of(request).state.streams, asked.streams, rights_of(request)
    listed = [record for record in streams.values() if not is_internal(record.name)] if names is None else []
    named = listed if names is None else [streams[name] for name in sorted(names) if name in streams]
    return [
        record
        for record in named
        if (asked.pattern is None or fnmatchcase(record.name, asked.pattern))
        and (asked.group is None or record.settings.group == asked.group)
        and rights.subjects("read", record.name, record.recorded_subjects) != ()
    ]


def _shown(request: web.Request, record: StreamRecord, position: dict[str, int] | None) -> shapes.Position:
    shown = shapes.Position(name=record.name, id=record.id, leader_epoch=record.leader_epoch)
    if record.lineage:
        shown.lineage = list(record.lineage)
    if position is None:
        shown.problem = problem_of(broker_of(request), record)
    else:
        set_position(shown, position)
    return with_counts(request, record, shown)


@routes.post("/v1/splits")
@access("checked", changes=False)
async def splits(request: web.Request) -> web.Response:
    """Committed ranges of several streams, divided. Streams without a replica here are in `elsewhere`, by the URL of
    their leader; ranges that cannot be divided now are in neither: a request for that stream alone says why.
    """
    asked: AskedSplits = await _body(request, AskedSplits)
    _check(asked)
    await require_readable(request, [one.stream for one in asked.ranges])
    broker = broker_of(request)
    served = {one.stream: (one, stream) for one in asked.ranges if (stream := _serving(broker, one)) is not None}
    work = [(one, stream.usable_log()) for one, stream in served.values()]
    found = await asyncio.get_running_loop().run_in_executor(broker.readers, _cut_all, asked, work)
    body = {
        name: [
            with_counts(request, served[name][1].record, one)
            for one in shown_splits(cut, replica_urls(broker, served[name][1].record, asked.read_from, asked.rack))
        ]
        for name, cut in found.items()
    }
    elsewhere: dict[str, list[str]] = {}
    for one in asked.ranges:
        if one.stream not in served and (url := _leader_url(broker, one.stream)) is not None:
            elsewhere.setdefault(url, []).append(one.stream)
    return shape_response(shapes.SplitsOfSeveral(body, elsewhere))


def _check(asked: AskedSplits) -> None:
    """Raises InvalidRequest."""
    if asked.read_from not in READ_FROM:
        raise InvalidRequest(f"read_from {asked.read_from!r} must be {', '.join(READ_FROM)}", field="read_from")
    limits = [limit for limit in (asked.max_bytes, asked.max_rows) if limit is not None]
    if min([*limits, *(one.min_splits for one in asked.ranges)], default=1) < 1:
        raise InvalidRequest("max_bytes, max_rows and min_splits must be at least 1")
    if any(count > 1 for count in Counter(one.stream for one in asked.ranges).values()):
        raise InvalidRequest("a stream is named twice: name each stream once")
    most = sum(max(one.min_splits, (one.end - one.start) // (asked.max_rows or 2**62)) for one in asked.ranges)
    if most > MAX_SPLITS:
        raise InvalidRequest(f"this would divide the ranges into more than {MAX_SPLITS} splits")


def _serving(broker: Broker, one: AskedRange) -> HostedStream | None:
    """The replica here, if the range is committed and stored in it."""
    stream = broker.streams.get(one.stream)
    if stream is None or stream.record.id != one.id or not stream.may_serve or stream.log is None:
        return None
    is_there = stream.log.first_readable_offset <= one.start < one.end <= stream.log.high_watermark
    return stream if is_there else None


def _leader_url(broker: Broker, name: str) -> str | None:
    record = broker.state.streams.get(name)
    if record is None or record.leader in (None, broker.cluster.me):
        return None
    return broker.url_of(record.leader)


def _cut_all(asked: AskedSplits, work: Sequence[tuple[AskedRange, StreamLog]]) -> dict[str, list[Split]]:
    """In a reader's thread. What cannot be read now is omitted."""
    found = {}
    for one, log in work:
        limits = {"max_bytes": asked.max_bytes, "max_rows": asked.max_rows}
        try:
            found[one.stream] = log.reader.splits(one.start, one.end, min_splits=one.min_splits, **limits)
        except (NatslogError, OSError):
            continue
    return found
