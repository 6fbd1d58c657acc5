"""The files of a stream: closing the active segment, scrubbing, and repair."""

from __future__ import annotations

from aiohttp import web

from natslog.http.context import broker_of, leading, stated
from natslog.http.endpoint import Call, PlainCall
from natslog.http.shapes import streams as shapes
from natslog.http.shapes.common import Answer, OffsetRange, shape_response
from natslog.node.replicas.scrubbing import ReplicaScrub
from natslog.times import format_timestamp_us


def shown_scrub(scrub: ReplicaScrub) -> shapes.ReplicaScrub:
    """The state of the scrubbing of one replica as the API shows it."""
    if "problem" in scrub:
        return shapes.ReplicaScrub(broker=scrub["broker"], problem=scrub["problem"])
    completed_us = scrub["completed_us"]
    return shapes.ReplicaScrub(
        broker=scrub["broker"],
        scrubbed_at=format_timestamp_us(completed_us) if completed_us else None,
        scrub_progress=scrub["progress"],
        damaged=[OffsetRange(start, end) for start, end in scrub["damaged"]],
        lost=[OffsetRange(start, end) for start, end in scrub.get("lost", ())],
    )


async def roll_stream(call: PlainCall) -> Answer[shapes.Rolled]:
    """Close the active segment. All messages below `sealed_end` are in Arrow files"""
    request = call.request
    stream, broker = await leading(request), broker_of(request)
    sealed_end = await broker.upkeep.roll(stream)
    return stated(request, stream, shapes.Rolled(stream.name, sealed_end, str(stream.folder)))


async def show_scrub(call: PlainCall) -> Answer[shapes.Scrub]:
    """The state of the scrubbing of each replica"""
    return await _scrub(call.request, begin=False)


async def begin_scrub(call: PlainCall) -> Answer[shapes.Scrub]:
    """Read all sealed segments of each replica back from its disk, and compare them with their CRCs"""
    return await _scrub(call.request, begin=True)


async def _scrub(request: web.Request, *, begin: bool) -> Answer[shapes.Scrub]:
    broker = broker_of(request)
    record = await broker.record(request.match_info["name"])
    found = await broker.scrubber.everywhere(record, begin=begin)
    return shape_response(shapes.Scrub(record.name, list(map(shown_scrub, found))), status=202 if begin else 200)


async def repair_stream(call: Call[None, shapes.Repair]) -> Answer[shapes.Repaired]:
    """Repair all replicas; offsets that are damaged on every replica become removed ones"""
    broker = broker_of(call.request)
    record = await broker.record(call.request.match_info["name"])
    found = await broker.change_cluster(broker.scrubber.repairs.accept_loss_everywhere(record))
    replicas = [
        shapes.ReplicaLoss(one["broker"], problem=one["problem"])
        if "problem" in one
        else shapes.ReplicaLoss(one["broker"], [OffsetRange(start, end) for start, end in one["lost"]])
        for one in found
    ]
    return shape_response(shapes.Repaired(record.name, replicas))
