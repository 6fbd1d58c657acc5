"""Removal of messages: many of them (`purge`), or one."""

from __future__ import annotations

from msgspec import UNSET

from natslog.errors import OffsetOutOfRange
from natslog.http.context import broker_of, leading, out_of_range, read_from_log, request_id, stated
from natslog.http.endpoint import Call
from natslog.http.shapes import streams as shapes
from natslog.http.shapes.common import Answer
from natslog.model import Offset
from natslog.node.replicas.stream import HostedStream
from natslog.units import offsets_between


async def purge_stream(call: Call[None, shapes.Purge]) -> Answer[shapes.Purged]:
    """Remove messages: all that are committed now, or those below an offset or on some subjects, but for the newest so
    many

    They are no longer served when this is answered; their space is freed in the background.
    """
    request, asked = call.request, call.body
    stream, broker = await leading(request), broker_of(request)
    log, keep = stream.usable_log(), asked.keep or 0
    below = log.high_watermark if asked.below is UNSET else asked.below
    if below > log.high_watermark:
        raise _beyond_end(stream, below)
    if asked.subject:
        purged = await broker.stream_operations.purge_subject(stream, asked.subject, Offset(below), keep)
    else:
        if keep:
            below = await read_from_log(request, stream, lambda log: log.reader.start_of_newest(keep))
        started_at = log.first_readable_offset
        await broker.change_cluster(broker.stream_operations.purge(stream, Offset(below), request_id(request)))
        start = log.first_readable_offset
        purged = start - started_at - log.visibility.removed.count(started_at, start)
    return stated(request, stream, shapes.Purged(stream.name, log.first_readable_offset, purged, log.high_watermark))


async def delete_message(call: Call[shapes.MessagePath, None]) -> Answer[shapes.MessageDeleted]:
    """Remove one message

    When this is answered, it is hidden on all in-sync replicas; its space is freed in the background.
    """
    request, offset = call.request, call.parameters.offset
    stream, broker = await leading(request), broker_of(request)
    await broker.stream_operations.delete_message(stream, offset)
    return stated(request, stream, shapes.MessageDeleted(stream.name, offset))


def _beyond_end(stream: HostedStream, below: int) -> OffsetOutOfRange:
    """There are no messages there yet."""
    log = stream.usable_log()
    error = OffsetOutOfRange(
        f"messages below offset {below} cannot be purged: stream {stream.name!r} has "
        f"{offsets_between(log.first_readable_offset, log.high_watermark)}",
        offset=below,
        log_start_offset=log.first_readable_offset,
        high_watermark=log.high_watermark,
    )
    return out_of_range(stream, error)
