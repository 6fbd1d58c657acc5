"""Streams: list, create, show, edit, seal, delete."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from aiohttp import web
from msgspec import UNSET

from natslog.cluster.stream_changes import importing, require_version
from natslog.errors import InvalidRequest, NatslogError, StreamConflict, StreamNotFound
from natslog.http.access import rights_of, with_counts
from natslog.http.context import broker_of, current_headers, leading, no_leader, request_id, stated
from natslog.http.endpoint import Call, PlainCall
from natslog.http.shapes import streams as shapes
from natslog.http.shapes.common import Answer, shape_response
from natslog.http.shapes.reading import Position
from natslog.http.upkeep import shown_scrub
from natslog.model import StreamId, StreamRecord
from natslog.node.broker import Broker
from natslog.node.replicas.positions import count_messages
from natslog.node.replicas.stream import HostedStream
from natslog.stream_settings import parse_settings
from natslog.subjects import check_name, cover, is_internal
from natslog.times import format_timestamp_us


def shown_stream(broker: Broker, record: StreamRecord, position: dict[str, int] | None) -> shapes.Stream:
    """A stream as the API shows it. Without a position, which its leader alone states, with the reason as `problem`."""
    shown = shapes.Stream(
        name=record.name,
        id=record.id,
        **record.settings.to_json(),
        settings_version=record.settings_version,
        paused=record.paused,
        sealed=record.sealed,
        envelopes=True,
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
    if "compressed" in position:
        shown.compressed = _shown_compression(position["compressed"], position["uncompressed"])
    stream = broker.streams.get(record.name)
    if stream is not None and (problem := stream.problem or stream.scrub_problem) is not None:
        shown.problem = problem.to_json()["error"]
    return shown


def _shown_compression(stored_bytes: int, uncompressed_bytes: int) -> shapes.Compressed:
    return shapes.Compressed(stored_bytes, uncompressed_bytes, round(uncompressed_bytes / max(1, stored_bytes), 3))


def set_position(shown: shapes.Stream | Position, position: dict[str, int]) -> None:
    """The position that the leader states."""
    shown.leader_epoch = position["leader_epoch"]
    shown.log_start_offset = position["log_start_offset"]
    shown.high_watermark = position["high_watermark"]
    if isinstance(shown, shapes.Stream):
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
    told = (
        stream.error_for_clients(problem) if stream is not None and problem is not None else no_leader(broker, record)
    )
    body: dict[str, Any] = told.to_json()["error"]
    return body


async def list_streams(call: Call[shapes.StreamsOf, None]) -> Answer[list[shapes.Stream]]:
    """All streams. A stream whose leader does not answer has a problem and no positions

    Those on which the identity may do anything.
    """
    request = call.request
    broker = broker_of(request)
    is_current = await broker.up_to_date()
    positions = await broker.positions.everywhere()
    rights = rights_of(request)
    streams = [
        with_counts(request, record, shown_stream(broker, record, positions.get(name)))
        for name, record in sorted(broker.state.streams.items())
        if _is_requested(record, call.parameters) and rights.may_see(name, record.recorded_subjects)
    ]
    return shape_response(streams, headers=current_headers(is_current))


def _is_requested(record: StreamRecord, asked: shapes.StreamsOf) -> bool:
    if is_internal(record.name) and not asked.internal:
        return False
    if asked.pattern is not None and not fnmatchcase(record.name, asked.pattern):
        return False
    if asked.subject is not None and not cover(record.settings.subjects, asked.subject):
        return False
    return asked.group is None or record.settings.group == asked.group


async def create_stream(call: Call[None, dict[str, Any]]) -> Answer[shapes.Stream]:
    """Create a stream (200: it exists with the same settings)"""
    request, body = call.request, call.body
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


async def show_stream(call: PlainCall) -> Answer[shapes.Stream]:
    """One stream. Without an available leader it has a problem and no positions"""
    request = call.request
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


async def edit_stream(call: Call[None, dict[str, Any]]) -> Answer[shapes.Stream]:
    """Change settings, pause or resume"""
    request, body = call.request, call.body
    broker, name = broker_of(request), request.match_info["name"]
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


async def seal_stream(call: PlainCall) -> Answer[shapes.Stream]:
    """Make the stream permanently read-only

    Its active segment is closed in the background.
    """
    request = call.request
    stream, broker = await leading(request), broker_of(request)
    await broker.change_cluster(broker.stream_operations.seal(stream, request_id(request)))
    return stated(request, stream, _shown_here(request, stream))


async def delete_stream(call: Call[shapes.DeletedStream, None]) -> web.Response:
    """Delete a stream. If id or if_version is another one by then, nothing is deleted"""
    request, broker = call.request, broker_of(call.request)
    await broker.change_cluster(
        broker.stream_operations.delete(
            request.match_info["name"],
            request_id(request),
            stream_id=None if call.parameters.id is None else StreamId(call.parameters.id),
            if_version=call.parameters.if_version,
        )
    )
    return web.Response(status=204)
