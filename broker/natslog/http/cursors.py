"""Cursors and lag: positions of named consumers, and their distance from the high watermark."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from natslog.cluster.commands import DropCursor, SetCursor
from natslog.cluster.cursors import CONSUMER_PREFIX, CursorRecord
from natslog.errors import InvalidRequest, StreamNotFound
from natslog.http.access import require_readable, rights_of, with_counts
from natslog.http.context import broker_of, leading, request_id, stated
from natslog.http.endpoint import Call
from natslog.http.shapes import cursors as shapes
from natslog.http.shapes.common import MAX_OFFSET, Answer, offset_of, shape_response
from natslog.http.shapes.reading import LagOf
from natslog.model import Offset, StreamId, StreamRecord
from natslog.node.clock import now_us
from natslog.node.replicas.consumer_cursors import ConsumerCursor
from natslog.node.replicas.consumer_records import ConsumerNumbers
from natslog.node.replicas.lags import LagJson, has_stopped
from natslog.subjects import check_name
from natslog.times import format_timestamp_us, parse_timestamp_us


def _shown(cursor: CursorRecord) -> shapes.Cursor:
    rewound = None
    if cursor.rewound_from is not None and cursor.rewound_us is not None:
        rewound = shapes.Rewound(cursor.rewound_from, format_timestamp_us(cursor.rewound_us))
    set_at = format_timestamp_us(cursor.set_us)
    return shapes.Cursor(cursor.consumer, cursor.stream, cursor.stream_id, cursor.offset, set_at, rewound)


def _shown_with_lag(request: web.Request, found: ConsumerCursor, lag: LagJson | None) -> shapes.Cursor:
    shown = _shown(found.cursor)
    shown.lag = _shown_lag(request, shown.stream, lag)
    shown.stopped = lag is not None and has_stopped(lag["seconds"], found.cursor.set_us, found.numbers)
    if shown.consumer.startswith(CONSUMER_PREFIX):
        shown.jetstream = _shown_numbers(request, shown.stream, found.numbers)
    return shown


def _shown_numbers(request: web.Request, name: str, numbers: ConsumerNumbers | None) -> shapes.ConsumerNumbers | None:
    record = broker_of(request).state.streams.get(name)
    if numbers is None or record is None or not _may_count(request, record):
        return None
    sequences = {one: shapes.Sequences(*getattr(numbers, one)) for one in ("delivered", "ack_floor")}
    return shapes.ConsumerNumbers(**numbers._asdict() | sequences)


def _shown_lag(request: web.Request, name: str, lag: LagJson | None) -> shapes.Lag | None:
    """As a leader states it, which may be a broker of another version. None where the stream is gone."""
    record = broker_of(request).state.streams.get(name)
    if lag is None or record is None:
        return None
    return with_counts(request, record, msgspec.convert(lag, shapes.Lag))


async def list_cursors(call: Call[shapes.CursorsOf, None]) -> Answer[list[shapes.Cursor]]:
    """All cursors, with their lag; then JetStream consumers, as cursors named `jetstream:NAME` (at most 10,000 of each
    stream)
    """
    request, broker = call.request, broker_of(call.request)
    await broker.require_up_to_date()
    consumer, name = call.parameters.consumer, call.parameters.stream
    found = [ConsumerCursor(one) for one in await broker.cursors.find(consumer=consumer, stream=name)]
    found += await broker.consumer_cursors.find(
        may_see=partial(_may_see, request), may_count=partial(_may_count, request), consumer=consumer, stream=name
    )
    records = broker.state.streams
    found = [one for one in found if (of := records.get(one.cursor.stream)) is not None and _may_see(request, of)]
    lags = await broker.lags.of_cursors([one.cursor for one in found])
    return shape_response([_shown_with_lag(request, *one) for one in zip(found, lags, strict=True)])


def _may_see(request: web.Request, record: StreamRecord) -> bool:
    return rights_of(request).may_see(record.name, record.recorded_subjects)


def _may_count(request: web.Request, record: StreamRecord) -> bool:
    """Counts include messages on all subjects."""
    return rights_of(request).subjects("read", record.name, record.recorded_subjects) is None


async def set_cursors(call: Call[None, shapes.NewCursors]) -> Answer[shapes.CursorsSet]:
    """Set many cursors: all, or none where one is refused"""
    request, given = call.request, call.body.cursors
    broker, rights = broker_of(request), rights_of(request)
    set_us, owner = now_us(), rights.owner
    records: dict[str, StreamRecord] = {}
    for name in {check_name(one.stream) for one in given}:
        try:
            record = records[name] = await broker.record(name)
        except StreamNotFound:
            rights.require_name("cursor", name)  # otherwise the answer is that to a stream which exists
            raise
        rights.limits("cursor", record.name, record.recorded_subjects)
    commands = [
        SetCursor(
            consumer=_settable(one.consumer, one.stream),
            stream=one.stream,
            stream_id=StreamId(one.id or records[one.stream].id),
            offset=Offset(one.offset),
            set_us=_set_us(one.timestamp, set_us),
            owner=owner,
        )
        for one in given
    ]
    await broker.change_cluster(broker.cursors.set_many(commands, request_id(request)))
    return shape_response(shapes.CursorsSet(len(commands)))


async def show_cursor(call: Call[shapes.CursorPath, None]) -> Answer[shapes.Cursor]:
    """The cursor of a consumer (`jetstream:NAME`: a JetStream consumer), and its lag"""
    request, broker = call.request, broker_of(call.request)
    await broker.require_up_to_date()
    found = await _found(request, call.parameters.consumer, call.parameters.stream, counts=True)
    (lag,) = await broker.lags.of_cursors([found.cursor])
    return shape_response(_shown_with_lag(request, found, lag))


async def set_cursor(call: Call[shapes.CursorPath, shapes.NewCursor]) -> Answer[shapes.Cursor]:
    """Set the cursor of a consumer

    With `id`, of the stream of that id only. The response to GET may be sent back unchanged.
    """
    request, body, broker = call.request, call.body, broker_of(call.request)
    name = call.parameters.stream
    consumer = _settable(call.parameters.consumer, name)
    for field, given, expected in (("consumer", body.consumer, consumer), ("stream", body.stream, name)):
        if given is not UNSET and given != expected:
            raise InvalidRequest(f"{field} {given!r} differs from {expected!r} in the path", field=field)
    record = await broker.record(name)
    command = SetCursor(
        consumer=consumer,
        stream=name,
        stream_id=StreamId(body.id or record.id),
        offset=Offset(body.offset),
        set_us=_set_us(body.timestamp, now_us()),
        owner=rights_of(request).owner,
    )
    cursor = await broker.change_cluster(broker.cursors.set(command, request_id(request)))
    return shape_response(_shown(cursor))


def _set_us(timestamp: str | int | UnsetType, now_us: int) -> int:
    """The time of a position. Raises InvalidRequest: it is not a time."""
    return now_us if timestamp is UNSET else parse_timestamp_us(timestamp)


async def drop_cursor(call: Call[shapes.CursorPath, None]) -> web.Response:
    """Delete the cursor of a consumer"""
    broker, name = broker_of(call.request), call.parameters.stream
    command = DropCursor(consumer=_settable(call.parameters.consumer, name), stream=name)
    await broker.record(name)
    await broker.change_cluster(broker.cursors.drop(command, request_id(call.request)))
    return web.Response(status=204)


def _settable(consumer: str, stream: str) -> str:
    """The name itself. Raises InvalidRequest: a cursor of this name can only be shown."""
    if consumer.startswith(CONSUMER_PREFIX):
        name = consumer.removeprefix(CONSUMER_PREFIX)
        raise InvalidRequest(
            f"{consumer!r} is the JetStream consumer {name!r} of stream {stream!r}: its position moves with its acks, "
            f"and cannot be set or deleted as a cursor. The JetStream call CONSUMER.DELETE.{stream}.{name} deletes it "
            f"(nats consumer rm {stream} {name}), and CONSUMER.CREATE.{stream}.{name} creates it where it is to start",
            consumer=consumer,
            stream=stream,
        )
    return check_name(consumer, "consumer name")


async def _found(request: web.Request, consumer: str, stream: str, *, counts: bool = False) -> ConsumerCursor:
    """Raises InvalidRequest, StreamNotFound, CursorNotFound, NoLeader, …"""
    broker = broker_of(request)
    if not consumer.startswith(CONSUMER_PREFIX):
        return ConsumerCursor(await broker.cursors.one(check_name(consumer, "consumer name"), stream))
    record = await broker.record(stream)
    may_count = counts and _may_count(request, record)
    return await broker.consumer_cursors.one(consumer, record, may_count=may_count)


async def stream_lag(call: Call[LagOf, None]) -> Answer[shapes.Lag]:
    """Rows, bytes and seconds between a position and the high watermark"""
    request, asked = call.request, call.parameters
    stream, broker = await leading(request), broker_of(request)
    if asked.cursor is not None:
        await broker.require_up_to_date()
        offset: int = (await _found(request, asked.cursor, stream.record.name)).cursor.offset
    else:
        offset = offset_of(asked.offset, stream.usable_log(), 0)
    lag = await broker.lags.of(stream, offset)
    return stated(request, stream, with_counts(request, stream.record, msgspec.convert(lag, shapes.Lag)))


async def lags(call: Call[None, dict[str, Any]]) -> Answer[dict[str, shapes.Lag | None]]:
    """The lag of an offset in each of several streams; null if the leader of a stream does not answer"""
    request, positions, broker = call.request, call.body, broker_of(call.request)
    for name, offset in positions.items():
        check_name(name)
        _check_offset(offset)
    await require_readable(request, positions)
    found = await broker.lags.everywhere({name: [offset] for name, offset in positions.items()})
    return shape_response(
        {name: _shown_lag(request, name, found[name][0]) if name in found else None for name in positions}
    )


def _check_offset(offset: object) -> int:
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= MAX_OFFSET:
        raise InvalidRequest(f"offset {offset!r} must be a whole number from 0 to {MAX_OFFSET}", field="offset")
    return offset
