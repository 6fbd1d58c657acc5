"""Requests about many streams at once, for readers: positions, with or without waiting for news, and splits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from fnmatch import fnmatchcase

from aiohttp import web

from natslog import model
from natslog.errors import NatslogError
from natslog.http.access import polling, require_readable, rights_of, with_counts
from natslog.http.context import broker_of, current_headers
from natslog.http.endpoint import Call
from natslog.http.ranges import replica_urls, shown_splits
from natslog.http.shapes.common import Answer, shape_response
from natslog.http.shapes.reading import AskedPositions, AskedRange, AskedSplits, Position, SplitsOfSeveral
from natslog.http.streams import problem_of, set_position
from natslog.log import StreamLog
from natslog.model import StreamRecord
from natslog.node.broker import Broker
from natslog.node.replicas.stream import HostedStream
from natslog.subjects import is_internal


async def positions(call: Call[None, AskedPositions]) -> Answer[list[Position]]:
    """Positions of several streams (all without `streams`, `pattern` and `group`). With `seen` (id and high watermark
    of each) and `wait_ms`: waits until one of them differs
    """
    records, headers = await selected(call.request, call.body)
    found = await broker_of(call.request).positions.of_several(records)
    shown = [_shown(call.request, record, found.get(record.name)) for record in records]
    return shape_response(shown, headers=headers)


async def selected(request: web.Request, asked: AskedPositions) -> tuple[list[StreamRecord], dict[str, str]]:
    """The streams that are asked for, exist, and may be read, after the wait; and whether that is current, as headers.

    Raises:
        Forbidden, Unauthorized: a stream that is named may not be read.
    """
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


def _shown(request: web.Request, record: StreamRecord, position: dict[str, int] | None) -> Position:
    shown = Position(name=record.name, id=record.id, leader_epoch=record.leader_epoch)
    if record.lineage:
        shown.lineage = list(record.lineage)
    if position is None:
        shown.problem = problem_of(broker_of(request), record)
    else:
        set_position(shown, position)
    return with_counts(request, record, shown)


async def splits(call: Call[None, AskedSplits]) -> Answer[SplitsOfSeveral]:
    """Committed ranges of several streams divided into splits: `splits` by stream; `elsewhere`: streams without a
    replica here, by the URL of their leader

    Ranges that cannot be divided now are in neither: a request for that stream alone states why.
    """
    request, asked = call.request, call.body
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
    return shape_response(SplitsOfSeveral(body, elsewhere))


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


def _cut_all(asked: AskedSplits, work: Sequence[tuple[AskedRange, StreamLog]]) -> dict[str, list[model.Split]]:
    """In a reader's thread. What cannot be read now is omitted."""
    found = {}
    for one, log in work:
        limits = {"max_bytes": asked.max_bytes, "max_rows": asked.max_rows}
        try:
            found[one.stream] = log.reader.splits(one.start, one.end, min_splits=one.min_splits, **limits)
        except (NatslogError, OSError):
            continue
    return found
