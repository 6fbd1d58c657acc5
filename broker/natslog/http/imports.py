"""Imports of exported streams, and what a backup of a whole cluster has besides streams.

All calls of an import but the first one are answered by the stream's leader. See `node.replicas.importing`.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator

import msgspec
from pyroaring import BitMap64

from natslog.arrow.restamping import checked_batches
from natslog.cluster.security_commands import AddRule, AssignRole, CreateToken, SecurityCommand, SetQuota
from natslog.errors import CorruptLog, Forbidden, InvalidRequest, SecurityConflict, StreamConflict, StreamRecreated
from natslog.http.access import limits_of, rights_of
from natslog.http.bodies import read_body
from natslog.http.context import broker_of, leading, leading_any, read_from_log, request_id, stated
from natslog.http.endpoint import Call, PlainCall
from natslog.http.shapes import imports as shapes
from natslog.http.shapes.common import Answer, Range, shape_response
from natslog.log import StreamLog
from natslog.log.removed import from_bytes, offset_range, to_bytes
from natslog.model import Fork, JetStreamSettings, Offset, StreamRecord
from natslog.node.replicas.consumer_records import ConsumerOrigin
from natslog.node.replicas.importing import append_batches, require_complete
from natslog.node.replicas.stream import HostedStream
from natslog.node.stream_operations import Origin
from natslog.security import tokens
from natslog.security.records import (
    EVERYONE,
    Security,
    check_action,
    check_identity,
    check_role,
    check_stream_pattern,
    check_subject_pattern,
    check_who,
)
from natslog.stream_settings import parse_settings
from natslog.subjects import check_name

MOST_BYTES = 80 * 1024 * 1024
"""Of the batches of one request: one of the largest fits."""
_MOST_OFFSETS = 1 << 27
_DIGEST = re.compile(r"[0-9a-f]{64}")


async def begin_import(call: Call[None, shapes.NewImport]) -> Answer[shapes.Import]:
    """Create a stream to import an export into, or continue the import (200)"""
    request, body = call.request, call.body
    broker, name = broker_of(request), check_name(request.match_info["name"])
    origin = Origin(Offset(body.first_offset), _checked_lineage(body.lineage, body.first_offset), tuple(body.subjects))
    settings, owner = parse_settings(body.settings), rights_of(request).owner
    settings = msgspec.structs.replace(settings, managed_by=None)  # natslog apply --prune must not delete the copy
    if isinstance(body.jetstream, JetStreamSettings):
        settings = msgspec.structs.replace(settings, jetstream=body.jetstream)
    importing = broker.stream_operations.begin_import(name, origin, settings, request_id(request), owner=owner)
    created = await broker.change_cluster(importing)
    return shape_response(_shown(broker.state.stream(name)), status=201 if created else 200)


def _checked_lineage(lineage: tuple[Fork, ...], first_offset: int) -> tuple[Fork, ...]:
    """Raises InvalidRequest."""
    forks = [fork.offset for fork in lineage]
    if forks != sorted(forks) or not first_offset <= forks[-1] or len({fork.id for fork in lineage}) < len(forks):
        raise InvalidRequest("the offsets of a lineage must ascend, none be named twice, and first_offset not be above")
    return lineage


def _shown(record: StreamRecord, stream: HostedStream | None = None) -> shapes.Import:
    shown = shapes.Import(
        record.name, record.id, record.import_state or "resumed", record.first_offset, list(record.lineage)
    )
    if stream is not None:
        log = stream.usable_log()
        shown.next_offset, shown.newest_timestamp_us = log.log_end_offset, log.newest_timestamp_us
    return shown


async def show_import(call: PlainCall) -> Answer[shapes.Import]:
    """How far the import into a stream is"""
    await broker_of(call.request).require_up_to_date()  # the leader has the beginning of the import when it states this
    stream = await leading_any(call.request)
    return shape_response(_shown(stream.record, stream))


async def append_import(call: Call[shapes.ImportedInto, None]) -> Answer[shapes.Import]:
    """Append the next stored batches of an export, at the offsets that they have. Those that are there already are
    passed over
    """
    request, broker = call.request, broker_of(call.request)
    stream = await leading_any(request)
    _require_id(stream, call.parameters.id)
    data = await read_body(request, MOST_BYTES)
    subjects, loop = stream.record.recorded_subjects, asyncio.get_running_loop()
    batches = await loop.run_in_executor(broker.readers, checked_batches, data, subjects)
    await append_batches(stream, batches)
    return shape_response(_shown(stream.record, stream))


async def show_removed(call: Call[Range, None]) -> Answer[shapes.Removals]:
    """Which offsets of a range the stream does not have any more, because they were deleted, purged, erased, or hidden
    by newer messages; not those that retention has removed
    """
    request = call.request
    stream = await leading(request)
    if limits_of(request, "read", stream.record) is not None:
        raise Forbidden(f"removed messages are shown to those who may read all subjects of stream {stream.name!r}")
    start, end = call.parameters.within(stream.usable_log())
    if end - start > _MOST_OFFSETS:
        raise InvalidRequest(f"at most {_MOST_OFFSETS} offsets can be requested at once", parameter="end")
    purged = offset_range(start, min(end, stream.record.purged_below))
    removed, subjects, keys = await read_from_log(request, stream, lambda log: _removed(log, start, end))
    shown = shapes.Removals(*(_base64(one) for one in (removed | purged, subjects, keys)))
    return stated(request, stream, shown)


def _removed(log: StreamLog, start: int, end: int) -> tuple[BitMap64, BitMap64, BitMap64]:
    """In a thread."""
    erased, within = log.erasures.all_rows(), offset_range(start, end)
    hidden = log.visibility.removed_below(log.high_watermark).hidden_within(start, end)
    return hidden | (erased.all & within), erased.dropped & within, erased.emptied & within


def _bitmap(text: str) -> BitMap64:
    """Raises ValueError, CorruptLog."""
    return from_bytes(base64.b64decode(text, validate=True), "the request") if text else BitMap64()


def _base64(offsets: BitMap64) -> str:
    return base64.b64encode(to_bytes(offsets)).decode() if offsets else ""


async def remove_imported(call: Call[None, shapes.RemovedImports]) -> Answer[shapes.Import]:
    """Remove messages that are imported already, and that the original does not have any more"""
    request, body = call.request, call.body
    stream, broker = await leading_any(request), broker_of(request)
    _require_id(stream, body.id)
    if stream.record.import_state != "importing":
        raise StreamConflict(f"stream {stream.name!r} is not being imported: repeat the import", stream=stream.name)
    removals = body.removals
    try:
        removed, subjects, keys = map(_bitmap, (removals.removed, removals.erased_subjects, removals.erased_keys))
    except (ValueError, CorruptLog) as error:
        raise InvalidRequest(f"the removed offsets cannot be read: {error}", parameter="removals") from error
    await broker.stream_operations.remove_imported(stream, removed, subjects, keys)
    return shape_response(_shown(stream.record, stream))


async def import_consumers(call: Call[None, shapes.ImportedConsumers]) -> Answer[shapes.ConsumersOfImport]:
    """Consumers of a JetStream stream that is imported: they go on where they were, when the stream is resumed"""
    request, body = call.request, call.body
    stream, broker = await leading_any(request), broker_of(request)
    _require_id(stream, body.id)
    if not stream.record.import_state:
        raise StreamConflict(f"stream {stream.name!r} was resumed: its consumers are in use", stream=stream.name)
    origins = [ConsumerOrigin(one.config, one.created_us, one.ack_floor) for one in body.consumers]
    refused = await broker.jetstream_api.consumers.import_consumers(stream, origins)
    shown = [shapes.RefusedConsumer(name, reason) for name, reason in refused]
    return shape_response(shapes.ConsumersOfImport(sorted(stream.consumers.consumers), shown))


async def finish_import(call: Call[None, shapes.FinishedImport]) -> Answer[shapes.Import]:
    """Complete an import: the stream can be read from now on, and resumed"""
    request, body = call.request, call.body
    stream, broker = await leading_any(request), broker_of(request)
    _require_id(stream, body.id)
    lineage = _checked_lineage(body.lineage, stream.record.first_offset)
    if stream.record.import_state == "importing":
        require_complete(stream, lineage)
        await broker.stream_operations.record_gaps(stream)
    finishing = broker.stream_operations.finish_import(
        stream, lineage, resumes=body.resume, request=request_id(request)
    )
    await broker.change_cluster(finishing)
    return shape_response(_shown(broker.state.stream(stream.name), stream))


def _require_id(stream: HostedStream, expected: str) -> None:
    if expected != stream.id:
        raise StreamRecreated(
            f"stream {stream.name!r} has the id {stream.id}, not {expected}: it was deleted and created again. Repeat "
            "the import",
            stream=stream.name,
            id=stream.id,
        )


# ---- tokens, rules, roles and quotas ----


async def show_security(call: PlainCall) -> Answer[shapes.StoredSecurity]:
    """All tokens (digests of their secrets), roles, rules and quotas"""
    broker = broker_of(call.request)
    await broker.require_up_to_date()
    security = broker.state.security
    return shape_response(
        shapes.StoredSecurity(security is not None, security or Security()), headers={"Cache-Control": "no-store"}
    )


async def restore_security(call: Call[None, shapes.StoredSecurity]) -> Answer[shapes.RestoredSecurity]:
    """Add those of a backup that do not exist"""
    broker, added = broker_of(call.request), shapes.RestoredSecurity()
    known = broker.state.security
    if known is None:
        raise InvalidRequest(
            "security is not enabled in this cluster: set security = true in the configuration of its brokers, or "
            "leave out tokens and rules (--no-access)"
        )
    for kind, command in list(_additions(known, call.body.security)):  # all are checked before one is made
        made = await broker.change_cluster(broker.cluster.group.propose(command, None))
        setattr(added, kind, getattr(added, kind) + made)
    return shape_response(added)


def _additions(known: Security, asked: Security) -> Iterator[tuple[str, SecurityCommand]]:
    """What is not known, checked as any request. Raises InvalidRequest, SecurityConflict."""
    for token in asked.tokens.values():
        check_identity(token.identity)
        if not _DIGEST.fullmatch(token.digest) or not token.note.isprintable():
            raise InvalidRequest(f"token {token.id[:40]!r} is not valid")
        stored = known.tokens.get(tokens.checked_id(token.id))
        if stored is None:
            yield "tokens", CreateToken(token=token, roles=())
        elif stored.digest != token.digest:
            raise SecurityConflict(f"token {token.id} exists with another secret: revoke it, then repeat the import")
    for identity, roles in asked.roles.items():
        for role in roles:
            command = AssignRole(identity=check_identity(identity), role=check_role(role), is_assigned=True)
            yield "roles", command
    for rule in asked.rules.values():
        yield (
            "rules",
            AddRule(
                who=check_who(rule.who),
                action=check_action(rule.action),
                stream=check_stream_pattern(rule.stream),
                subject=check_subject_pattern(rule.subject),
            ),
        )
    for identity, quota in asked.quotas.items():
        if any(limit is not None and limit < 0 for limit in msgspec.structs.astuple(quota)):
            raise InvalidRequest(f"the quota of {identity[:40]!r} has a negative limit")
        if (identity if identity == EVERYONE else check_identity(identity)) not in known.quotas:
            yield "quotas", SetQuota(identity=identity, quota=quota)
