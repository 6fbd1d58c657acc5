"""Streams: list, create, show, edit, delete; where a time is; how a range is cut for parallel readers."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from aiohttp import web
from msgspec import UNSET

from natslog.cluster.features import BATCH_FORMAT_LEVEL, ENVELOPES_LEVEL
from natslog.cluster.stream_changes import importing, require_version
from natslog.errors import InvalidRequest, NatslogError, OffsetOutOfRange, StreamConflict, StreamNotFound
from natslog.http import shapes
from natslog.http.access import access, limits_of, require_still, rights_of, with_counts
from natslog.http.bodies import json_body
from natslog.http.context import (
    broker_of,
    current_headers,
    leading,
    no_leader,
    out_of_range,
    position,
    query,
    read_from_log,
    request_id,
    stated,
    whole,
)
from natslog.http.shapes import MAX_SPLITS, shape_response
from natslog.log import StreamLog
from natslog.model import Offset, Split, StreamId, StreamRecord, parse_settings
from natslog.node.broker import Broker
from natslog.node.replicas.positions import count_messages
from natslog.node.replicas.scrubbing import ReplicaScrub
from natslog.node.replicas.stream import HostedStream
from natslog.security.decisions import is_whole
from natslog.subjects import MAX_NAME_CHARS, check_name, check_subject, cover, is_internal
from natslog.times import format_timestamp_us, parse_timestamp_us
from natslog.units import offsets_between

routes = web.RouteTableDef()

READ_FROM = ("nearest", "leader", "any")


def shown_stream(broker: Broker, record: StreamRecord, position: dict[str, int] | None) -> shapes.Stream:
    """A stream as the API shows it. Without a position, which its leader alone states, with the reason as `problem`."""
    shown = shapes.Stream(
        name=record.name,
        id=record.id,
        **record.settings.to_json(),
        settings_version=record.settings_version,
        paused=record.paused,
        sealed=record.sealed,
        envelopes=broker.cluster.state.feature_level >= ENVELOPES_LEVEL,
        former_subjects=list(record.former_subjects),
        lineage=list(record.lineage),
        import_state=record.import_state,
        created=format_timestamp_us(record.created_us),
        leader=record.leader,
        leader_epoch=record.leader_epoch,
        replica_ids=list(record.replicas),
        isr=list(record.isr),
        target_replica_ids=list(record.target) if record.target else UNSET,
        jetstream=UNSET if record.settings.jetstream is None else record.settings.jetstream,
    )
    if position is None:
        shown.problem = problem_of(broker, record)
        return shown
    set_position(shown, position)
    if "compressed" in position:  # brokers of 0.1.0 do not state it
        shown.compressed = _shown_compression(position["compressed"], position["uncompressed"])
    stream = broker.streams.get(record.name)
    if stream is not None and (problem := stream.problem or stream.scrub_problem) is not None:
        shown.problem = problem.to_json()["error"]
    return shown


def shown_scrub(scrub: ReplicaScrub) -> shapes.ReplicaScrub:
    """The state of the scrubbing of one replica as the API shows it."""
    if "problem" in scrub:
        return shapes.ReplicaScrub(broker=scrub["broker"], problem=scrub["problem"])
    completed_us = scrub["completed_us"]
    return shapes.ReplicaScrub(
        broker=scrub["broker"],
        scrubbed_at=format_timestamp_us(completed_us) if completed_us else None,
        scrub_progress=scrub["progress"],
        damaged=[shapes.OffsetRange(start, end) for start, end in scrub["damaged"]],
        lost=[shapes.OffsetRange(start, end) for start, end in scrub.get("lost", ())],
    )


def _shown_compression(stored_bytes: int, uncompressed_bytes: int) -> shapes.Compressed:
    return shapes.Compressed(stored_bytes, uncompressed_bytes, round(uncompressed_bytes / max(1, stored_bytes), 3))


def set_position(shown: shapes.Stream | shapes.Position, position: dict[str, int]) -> None:
    """The position that the leader states."""
    shown.leader_epoch = position["leader_epoch"]
    shown.log_start_offset = position["log_start_offset"]
    shown.high_watermark = position["high_watermark"]
    if isinstance(shown, shapes.Stream) and "messages" in position:  # brokers of 0.1.0 do not state it
        shown.messages = position["messages"]
    shown.bytes = position["bytes"]
    shown.segments = position["segments"]


def problem_of(broker: Broker, record: StreamRecord) -> dict[str, Any]:
    """Why the leader of a stream states no position."""
    if record.import_state == "importing":
        unfinished: dict[str, Any] = importing(record).to_json()["error"]
        return unfinished
    stream = broker.streams.get(record.name)
    problem = stream.problem if stream is not None else None
    told = stream.as_told(problem) if stream is not None and problem is not None else no_leader(broker, record)
    body: dict[str, Any] = told.to_json()["error"]
    return body


@routes.get("/v1/streams")
@access("checked")
async def list_streams(request: web.Request) -> web.Response:
    """All streams on which the identity may do anything; of a group, with names like a glob, or that record a plain
    subject, where those are given. Internal streams are listed with `internal=true` only.

    `Natslog-Current: false`: no majority confirmed that this broker has received all changes; the list may be outdated.
    """
    values = query(request, "pattern", "group", "subject", "internal")
    if "subject" in values:
        check_subject(values["subject"], wildcards=False)
    if len(values.get("pattern", "")) > MAX_NAME_CHARS:
        raise InvalidRequest(
            f"a pattern may have at most {MAX_NAME_CHARS} characters, as names do", parameter="pattern"
        )
    if values.get("internal", "true") not in ("true", "false"):
        raise InvalidRequest(f"internal {values['internal']!r} must be true or false", parameter="internal")
    broker = broker_of(request)
    is_current = await broker.up_to_date()
    positions = await broker.positions.everywhere()
    rights = rights_of(request)
    streams = [
        with_counts(request, record, shown_stream(broker, record, positions.get(name)))
        for name, record in sorted(broker.state.streams.items())
        if _is_asked_for(record, values) and rights.may_see(name, record.recorded_subjects)
    ]
    return shape_response(streams, headers=current_headers(is_current))


def _is_asked_for(record: StreamRecord, values: dict[str, str]) -> bool:
    if is_internal(record.name) and values.get("internal") != "true":
        return False
    if "pattern" in values and not fnmatchcase(record.name, values["pattern"]):
        return False
    if "subject" in values and not cover(record.settings.subjects, values["subject"]):
        return False
    return "group" not in values or record.settings.group == values["group"]


@routes.post("/v1/streams")
@access("checked")
async def create_stream(request: web.Request) -> web.Response:
    body = await json_body(request)
    name = check_name(body.pop("name", None))
    broker = broker_of(request)
    settings, rights = parse_settings(body), rights_of(request)
    for subject in settings.subjects:
        rights.require_subject("manage", name, subject)
    existing = broker.state.streams.get(name)
    if existing is not None and not rights.may_see(name, existing.recorded_subjects):
        raise StreamConflict(f"stream {name!r} exists, and is not yours: choose another name", stream=name)
    creating = broker.stream_operations.create(name, settings, request_id(request), owner=rights.owner)
    created = await broker.change_cluster(creating)
    return shape_response(await _shown(request, name), status=201 if created else 200)


async def _shown(request: web.Request, name: str) -> shapes.Stream:
    """After a change: as the metadata has it, and with the position that its leader states."""
    broker = broker_of(request)
    record = broker.state.stream(name)
    return with_counts(request, record, shown_stream(broker, record, await broker.positions.of_one(record)))


@routes.get("/v1/streams/{name}")
@access("stream")
async def show_stream(request: web.Request) -> web.Response:
    query(request)
    broker = broker_of(request)
    try:
        stream = await leading(request)
    except StreamNotFound:
        raise
    except NatslogError:  # shown all the same, with its problem
        return shape_response(shown_stream(broker, await broker.record(request.match_info["name"]), None))
    await count_messages(stream)
    return stated(request, stream, _shown_here(request, stream))


def _shown_here(request: web.Request, stream: HostedStream) -> shapes.Stream:
    """A stream that is led here."""
    broker = broker_of(request)
    shown = shown_stream(broker, stream.record, broker.positions.of(stream))
    shown.scrub = shown_scrub(broker.scrubber.state(stream, stream.usable_log()))
    return with_counts(request, stream.record, shown)


@routes.patch("/v1/streams/{name}")
@access("stream", "manage")
async def edit_stream(request: web.Request) -> web.Response:
    broker, name, body = broker_of(request), request.match_info["name"], await json_body(request)
    record = await broker.record(name)
    if_version = _precondition(body, record)
    paused = body.pop("paused", None)
    if paused is not None and not isinstance(paused, bool):
        raise InvalidRequest("paused must be true or false")
    if paused is not None and body and if_version is not None:
        raise InvalidRequest("with if_version, paused is changed by a request of its own", parameter="if_version")
    if {"subject", "subjects"} & set(body):
        for subject in parse_settings(body, record.settings).subjects:
            rights_of(request).require_subject("manage", name, subject)
    asked, operations = request_id(request), broker.stream_operations
    if body:
        await broker.change_cluster(operations.edit(record, body, asked, if_version=if_version))
    if paused is not None:
        pausing = operations.pause(record, paused, None if body else asked, if_version=if_version)
        await broker.change_cluster(pausing)
    return shape_response(await _shown(request, name))


def _precondition(body: dict[str, Any], record: StreamRecord) -> int | None:
    """Takes `id` and `if_version` out of the body of an edit. Returns the version, where it is given.

    Raises:
        InvalidRequest; StreamRecreated: the id is that of a former stream.
    """
    stream_id, if_version = body.pop("id", None), body.pop("if_version", None)
    if stream_id is not None and not isinstance(stream_id, str):
        raise InvalidRequest(f"id {stream_id!r} must be the id of the stream", parameter="id")
    if if_version is not None and (isinstance(if_version, bool) or not isinstance(if_version, int) or if_version < 0):
        raise InvalidRequest(
            f"if_version {if_version!r} must be the settings_version that the stream had when it was read",
            parameter="if_version",
        )
    require_version(record, None if stream_id is None else StreamId(stream_id), None)
    return if_version


@routes.post("/v1/streams/{name}/roll")
@access("stream", "manage")
async def roll_stream(request: web.Request) -> web.Response:
    """Closes the active segment at the leader, so that other programs can read all that was stored until now."""
    query(request)
    stream, broker = await leading(request), broker_of(request)
    sealed_end = await broker.upkeep.roll(stream)
    return stated(request, stream, shapes.Rolled(stream.name, sealed_end, str(stream.folder)))


@routes.get("/v1/streams/{name}/scrub")
@access("stream")
async def show_scrub(request: web.Request) -> web.Response:
    query(request)
    return await _scrub(request, begin=False)


@routes.post("/v1/streams/{name}/scrub")
@access("stream", "manage")
async def begin_scrub(request: web.Request) -> web.Response:
    """Begins a pass on all replicas: the sealed segments are read back from the disk, from the first one on."""
    query(request)
    return await _scrub(request, begin=True)


async def _scrub(request: web.Request, *, begin: bool) -> web.Response:
    broker = broker_of(request)
    record = await broker.record(request.match_info["name"])
    found = await broker.scrubber.everywhere(record, begin=begin)
    return shape_response(shapes.Scrub(record.name, list(map(shown_scrub, found))), status=202 if begin else 200)


@routes.post("/v1/streams/{name}/repair")
@access("stream", "manage")
async def repair_stream(request: web.Request) -> web.Response:
    """Repairs damaged sealed segments of all replicas; offsets that are damaged on all of them become removed ones."""
    query(request)
    body, broker = await json_body(request), broker_of(request)
    if body != {"accept_loss": True}:
        raise InvalidRequest(
            'damage is repaired automatically where it can be; to accept the loss of the rest: {"accept_loss": true}',
            parameter="accept_loss",
        )
    record = await broker.record(request.match_info["name"])
    if broker.cluster.state.feature_level < BATCH_FORMAT_LEVEL:
        raise InvalidRequest("accepting a loss requires feature level 2: run natslog cluster finalize-upgrade")
    found = await broker.change_cluster(broker.scrubber.repairs.accept_loss_everywhere(record))
    replicas = [
        shapes.ReplicaLoss(one["broker"], problem=one["problem"])
        if "problem" in one
        else shapes.ReplicaLoss(one["broker"], [shapes.OffsetRange(start, end) for start, end in one["lost"]])
        for one in found
    ]
    return shape_response(shapes.Repaired(record.name, replicas))


@routes.post("/v1/streams/{name}/purge")
@access("stream", "manage")
async def purge_stream(request: web.Request) -> web.Response:
    """Removes the messages below an offset (`{"below": N}`), or all that are committed now; with `{"subject": S}` only
    those whose subject S covers; with `{"keep": N}` all but the newest N. They are no longer served when this is
    answered; their space is freed in the background.
    """
    query(request)
    body = await json_body(request) if request.can_read_body else {}
    stream, broker = await leading(request), broker_of(request)
    log = stream.usable_log()
    subject, keep = _purge_choice(body)
    below = _purge_bound(body, stream)
    if subject is not None:
        purged = await broker.stream_operations.purge_subject(stream, subject, below, keep)
    else:
        if keep:
            below = await read_from_log(request, stream, lambda log: Offset(log.reader.start_of_newest(keep)))
        started_at = log.first_readable_offset
        await broker.change_cluster(broker.stream_operations.purge(stream, Offset(below), request_id(request)))
        start = log.first_readable_offset
        purged = start - started_at - log.visibility.removed.count(started_at, start)
    return stated(request, stream, shapes.Purged(stream.name, log.first_readable_offset, purged, log.high_watermark))


def _purge_choice(body: dict[str, Any]) -> tuple[str | None, int]:
    """Of which subject, and how many of the newest messages stay. Raises InvalidRequest."""
    unknown = sorted(set(body) - {"below", "subject", "keep"})
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0]!r}; known are below, subject, keep", parameter=unknown[0])
    subject, keep = body.get("subject"), body.get("keep", 0)
    if subject is not None:
        check_subject(subject, wildcards=True)
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise InvalidRequest(f"keep {keep!r} must be a number of messages: a whole number", parameter="keep")
    if keep and "below" in body:
        raise InvalidRequest("below and keep exclude each other: give one of them", parameter="keep")
    return subject, keep


@routes.delete("/v1/streams/{name}/messages/{offset}")
@access("stream", "manage")
async def delete_message(request: web.Request) -> web.Response:
    """Removes one message. When this is answered, it is hidden on all in-sync replicas; its space is freed in the
    background.
    """
    query(request)
    text = request.match_info["offset"]
    if not text.isdecimal() or not text.isascii() or len(text) > 18:
        raise InvalidRequest(f"offset {text[:40]!r} must be a whole number", parameter="offset")
    stream, broker = await leading(request), broker_of(request)
    await broker.stream_operations.delete_message(stream, int(text))
    return stated(request, stream, shapes.MessageDeleted(stream.name, int(text)))


def _purge_bound(body: dict[str, Any], stream: HostedStream) -> Offset:
    """Raises InvalidRequest; OffsetOutOfRange: there are no messages there yet."""
    log = stream.usable_log()
    if "below" not in body:
        return Offset(log.high_watermark)
    below = body["below"]
    if isinstance(below, bool) or not isinstance(below, int) or below < 0:
        raise InvalidRequest(f"below {below!r} must be an offset: a whole number of at least 0", parameter="below")
    if below > log.high_watermark:
        error = OffsetOutOfRange(
            f"messages below offset {below} cannot be purged: stream {stream.name!r} has "
            f"{offsets_between(log.first_readable_offset, log.high_watermark)}",
            offset=below,
            log_start_offset=log.first_readable_offset,
            high_watermark=log.high_watermark,
        )
        raise out_of_range(stream, error)
    return Offset(below)


@routes.post("/v1/streams/{name}/seal")
@access("stream", "manage")
async def seal_stream(request: web.Request) -> web.Response:
    """Makes the stream permanently read-only; its active segment is closed in the background."""
    query(request)
    stream, broker = await leading(request), broker_of(request)
    await broker.change_cluster(broker.stream_operations.seal(stream, request_id(request)))
    return stated(request, stream, _shown_here(request, stream))


@routes.delete("/v1/streams/{name}")
@access("stream", "manage")
async def delete_stream(request: web.Request) -> web.Response:
    values = query(request, "id", "if_version")
    broker, name, if_version = broker_of(request), request.match_info["name"], whole(values, "if_version", None)
    stream_id = StreamId(values["id"]) if "id" in values else None
    deleting = broker.stream_operations.delete(name, request_id(request), stream_id=stream_id, if_version=if_version)
    await broker.change_cluster(deleting)
    return web.Response(status=204)


@routes.get("/v1/streams/{name}/offsets")
@access("stream", "read")
async def first_offset(request: web.Request) -> web.Response:
    """The first message at or after a time, or on a subject and at or after an offset. Without one: the high watermark,
    and no timestamp.
    """
    values = query(request, "timestamp", "subject", "start")
    if ("timestamp" in values) == ("subject" in values) or ("start" in values and "subject" not in values):
        raise InvalidRequest(
            "give a time, ?timestamp=2026-11-20T10:30:00Z or epoch milliseconds; or a subject, ?subject=orders.eu, and "
            "perhaps from which offset on, &start=5000"
        )
    stream = await leading(request)
    if "subject" in values:
        offset, found_us = await _next_on_subject(request, stream, values["subject"], whole(values, "start", 0))
    else:
        timestamp_us = parse_timestamp_us(values["timestamp"])
        offset, found_us = await read_from_log(
            request, stream, lambda log: log.reader.offset_at(timestamp_us, log.first_readable_offset)
        )
    found = None if found_us is None else format_timestamp_us(found_us)
    return stated(request, stream, shapes.OffsetAt(offset, found))


async def _next_on_subject(
    request: web.Request, stream: HostedStream, subject: str, start: int
) -> tuple[int, int | None]:
    check_subject(subject, wildcards=False)
    allowed = limits_of(request, "read", stream.record)
    if allowed is not None and not is_whole(allowed, (subject,)):
        return stream.usable_log().high_watermark, None

    def look_up(log: StreamLog) -> tuple[int, int | None]:
        offset = log.subjects.next(subject, start)
        for rows in log.visible_rows(offset, offset + 1) if offset >= 0 else ():
            return offset, rows.column("timestamp")[0].value
        return log.high_watermark, None

    found = await read_from_log(request, stream, look_up)
    require_still(request)
    return found


@routes.get("/v1/streams/{name}/extent")
@access("stream", "read")
async def extent(request: web.Request) -> web.Response:
    """About how many bytes a range takes, and how many messages it has; with `max_bytes`, how far so many reach."""
    values = query(request, "start", "end", "max_bytes")
    stream = await leading(request)
    start, end = _range(values, stream.usable_log())
    max_bytes = whole(values, "max_bytes", None, low=1)

    def look(log: StreamLog) -> shapes.Extent:
        found = log.reader.extent(start, end, max_bytes)
        return shapes.Extent(found.start, found.end, found.bytes, log.reader.count(found.start, found.end))

    shown = with_counts(request, stream.record, await read_from_log(request, stream, look))
    return stated(request, stream, shown)


def _range(values: dict[str, str], log: StreamLog) -> tuple[int, int]:
    start = position(values, "start", log.first_readable_offset, log)
    return start, position(values, "end", log.high_watermark, log)


@routes.get("/v1/streams/{name}/splits")
@access("stream", "read")
async def splits(request: web.Request) -> web.Response:
    values = query(request, "start", "end", "max_bytes", "max_rows", "min_splits", "rack", "read_from")
    stream, broker = await leading(request), broker_of(request)
    start, end = _range(values, stream.usable_log())
    max_bytes = whole(values, "max_bytes", None, low=1)
    max_rows = whole(values, "max_rows", None, low=1)
    min_splits = whole(values, "min_splits", 1, low=1, high=MAX_SPLITS)
    if max_rows is not None and (end - start) // max_rows > MAX_SPLITS:
        raise InvalidRequest(f"max_rows {max_rows} would divide this range into more than {MAX_SPLITS} splits")
    cut = await read_from_log(
        request,
        stream,
        lambda log: log.reader.splits(start, end, max_bytes=max_bytes, max_rows=max_rows, min_splits=min_splits),
    )
    read_from = values.get("read_from", "nearest")
    if read_from not in READ_FROM:
        raise InvalidRequest(f"read_from {read_from!r} must be {', '.join(READ_FROM)}", parameter="read_from")
    urls = replica_urls(broker, stream.record, read_from, values.get("rack"))
    return stated(request, stream, [with_counts(request, stream.record, one) for one in shown_splits(cut, urls)])


def shown_splits(cut: list[Split], urls: tuple[tuple[str, ...], ...]) -> list[shapes.Split]:
    """Splits as the API shows them. `urls`: of replicas, as from `replica_urls`."""
    return [
        shapes.Split(split.start, split.end, split.rows, split.bytes, in_turn(urls, number))
        for number, split in enumerate(cut)
    ]


def replica_urls(broker: Broker, record: StreamRecord, read_from: str, rack: str | None) -> tuple[tuple[str, ...], ...]:
    """URLs of in-sync replicas in groups, the preferred group first: by default those of the client's rack.
    Nothing where this broker does not know its own name.
    """
    if record.replicas == (broker.cluster.me,):
        return (broker.config.client_urls,)
    rack = broker.config.rack if rack is None else rack
    known = [broker.state.brokers[one] for one in record.isr if one in broker.state.brokers]
    first = [
        one
        for one in known
        if (read_from == "nearest" and rack and one.rack == rack) or (read_from == "leader" and one.id == record.leader)
    ]
    return tuple(one.url for one in first), tuple(one.url for one in known if one not in first)


def in_turn(urls: tuple[tuple[str, ...], ...], number: int) -> tuple[str, ...]:
    """Each split begins with another one of the equally near."""
    return tuple(url for group in urls for url in _rotated(group, number))


def _rotated(group: tuple[str, ...], by: int) -> tuple[str, ...]:
    at = by % len(group) if group else 0
    return (*group[at:], *group[:at])
