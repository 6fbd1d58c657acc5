"""Cursors and lag: positions of named consumers, and their distance from the high watermark."""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web
from msgspec import UNSET

from natslog.cluster.commands import DropCursor, SetCursor
from natslog.cluster.cursors import CONSUMER_PREFIX, CursorRecord
from natslog.errors import InvalidRequest, StreamNotFound, did_you_mean
from natslog.http import shapes
from natslog.http.access import access, require_readable, rights_of, with_counts
from natslog.http.bodies import json_body, read_body
from natslog.http.context import BODY, broker_of, leading, position, query, request_id, stated
from natslog.http.shapes import MAX_CURSORS_AT_ONCE, MAX_OFFSET, NewCursor, shape_response
from natslog.model import Offset, StreamId, StreamRecord
from natslog.node.clock import now_us
from natslog.node.replicas.consumer_cursors import ConsumerCursor
from natslog.node.replicas.consumer_records import ConsumerNumbers
from natslog.node.replicas.lags import LagJson, has_stopped
from natslog.subjects import check_name
from natslog.times import format_timestamp_us, parse_timestamp_us

routes = web.RouteTableDef()

_BODY = NewCursor.__struct_fields__
_MAX_MANY_BYTES = 4 * 1024 * 1024


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


@routes.get("/v1/cursors")
@access("checked")
async def list_cursors(request: web.Request) -> web.Response:
    """All, or those of a consumer or stream; `lag` is null where the stream's leader does not answer. JetStream
    consumers follow the cursors that are set.
    """
    values, broker = query(request, "consumer", "stream"), broker_of(request)
    await broker.require_up_to_date()
    consumer, name = values.get("consumer"), values.get("stream")
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


@routes.post("/v1/cursors")
@access("checked", "cursor")
async def set_cursors(request: web.Request) -> web.Response:
    """`{"cursors": [{"consumer": …, "stream": …, "offset": 42}, …]}`: all are set, or none."""
    query(request)
    broker, rights = broker_of(request), rights_of(request)
    request[BODY] = await read_body(request, _MAX_MANY_BYTES)
    try:
        given = msgspec.json.decode(request[BODY], type=shapes.NewCursors).cursors
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise InvalidRequest(
            f'the body must be {{"cursors": [{{"consumer", "stream", "offset", …}}, …]}}: {error}'
        ) from error
    if len(given) > MAX_CURSORS_AT_ONCE:
        raise InvalidRequest(
            f"at most {MAX_CURSORS_AT_ONCE} cursors can be set in one request: this one has {len(given)}"
        )
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
            set_us=set_us if one.timestamp is UNSET else parse_timestamp_us(one.timestamp),
            owner=owner,
        )
        for one in given
    ]
    await broker.change_cluster(broker.cursors.set_many(commands, request_id(request)))
    return shape_response(shapes.CursorsSet(len(commands)))


@routes.get("/v1/cursors/{consumer}/{stream}")
@access("stream", parameter="stream")
async def show_cursor(request: web.Request) -> web.Response:
    query(request)
    broker = broker_of(request)
    await broker.require_up_to_date()
    consumer, stream = request.match_info["consumer"], check_name(request.match_info["stream"])
    found = await _found(request, consumer, stream, counts=True)
    (lag,) = await broker.lags.of_cursors([found.cursor])
    return shape_response(_shown_with_lag(request, found, lag))


@routes.put("/v1/cursors/{consumer}/{stream}")
@access("stream", "cursor", parameter="stream")
async def set_cursor(request: web.Request) -> web.Response:
    """`{"offset": 42}`: the next offset that the consumer has not read; with `"id"`, of the stream of that id only;
    with `"timestamp"`, the time of this position. The response to GET may be sent back unchanged.
    """
    query(request)
    (consumer, name), body, broker = _names(request), await json_body(request), broker_of(request)
    for field in body:
        if field not in _BODY:
            raise InvalidRequest(f"unknown field {field!r}{did_you_mean(field, _BODY)}", field=field)
    offset, stream_id = _check_offset(body.get("offset")), body.get("id")
    for field, expected in (("consumer", consumer), ("stream", name)):
        if body.get(field, expected) != expected:
            raise InvalidRequest(f"{field} {body[field]!r} differs from {expected!r} in the path", field=field)
    set_us = parse_timestamp_us(body["timestamp"]) if "timestamp" in body else now_us()
    if stream_id is not None and not isinstance(stream_id, str):
        raise InvalidRequest(f"id {stream_id!r} must be the id of the stream, as GET /v1/streams shows it", field="id")
    record = await broker.record(name)
    command = SetCursor(
        consumer=consumer,
        stream=name,
        stream_id=StreamId(stream_id or record.id),
        offset=Offset(offset),
        set_us=set_us,
        owner=rights_of(request).owner,
    )
    cursor = await broker.change_cluster(broker.cursors.set(command, request_id(request)))
    return shape_response(_shown(cursor))


@routes.delete("/v1/cursors/{consumer}/{stream}")
@access("stream", "cursor", parameter="stream")
async def drop_cursor(request: web.Request) -> web.Response:
    query(request)
    consumer, name = _names(request)
    broker = broker_of(request)
    command = DropCursor(consumer=consumer, stream=name)
    await broker.record(name)
    await broker.change_cluster(broker.cursors.drop(command, request_id(request)))
    return web.Response(status=204)


def _names(request: web.Request) -> tuple[str, str]:
    """Of a cursor that is to be changed. Raises InvalidRequest."""
    stream = check_name(request.match_info["stream"])
    return _settable(request.match_info["consumer"], stream), stream


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


@routes.get("/v1/streams/{name}/lag")
@access("stream", "read")
async def stream_lag(request: web.Request) -> web.Response:
    """The messages between `offset` (or a consumer's `cursor`) and the high watermark."""
    values = query(request, "offset", "cursor")
    if len(values) != 1:
        raise InvalidRequest("give a position: ?offset=42 or ?cursor=CONSUMER")
    stream, broker = await leading(request), broker_of(request)
    if "cursor" in values:
        await broker.require_up_to_date()
        offset: int = (await _found(request, values["cursor"], stream.record.name)).cursor.offset
    else:
        offset = position(values, "offset", 0, stream.usable_log())
    lag = await broker.lags.of(stream, offset)
    return stated(request, stream, _shown_lag(request, stream.record.name, lag))


@routes.post("/v1/lags")
@access("checked", changes=False)
async def lags(request: web.Request) -> web.Response:
    """`{"orders": 42, "returns": 7}`: the lag at each, in one answer; null where a stream's leader does not answer."""
    query(request)
    positions, broker = await json_body(request), broker_of(request)
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
