"""Erasure of the messages on a subject, or with a key, and its receipt, to be requested until it is complete.

The text that is erased is in no path, no record, no receipt and no log.
"""

from __future__ import annotations

from aiohttp import web

from natslog.errors import ErasureNotFound
from natslog.http.access import AUDITED
from natslog.http.context import broker_of, leading, stated
from natslog.http.endpoint import Call
from natslog.http.shapes import streams as shapes
from natslog.http.shapes.common import Answer, shape_response
from natslog.model import StreamRecord
from natslog.node.replicas.receipts import ReplicaReceipt
from natslog.times import format_timestamp_us


async def erase(call: Call[None, shapes.Erase]) -> Answer[shapes.Erasure]:
    """Erase the messages on a subject, or with a key, that are committed now. They are hidden when this is answered;
    each replica then writes the files that have them again

    Also those that were deleted or purged, and are stored still.
    """
    request, what = call.request, call.body.erased()
    stream, broker = await leading(request), broker_of(request)
    begun = await broker.stream_operations.erase(stream, what)
    if begun is None:
        shown = shapes.Erasure(
            name=stream.name, id=None, erases=what.erases, messages=0, requested_at=None, complete=True, replicas=[]
        )
    else:
        request[AUDITED] = {"erasure": begun.id, "erases": what.erases, "messages": begun.messages}
        shown = await _receipt(request, stream.record, begun.id)
    return stated(request, stream, shown, status=202)


async def show_erasure(call: Call[shapes.ErasureOf, None]) -> Answer[shapes.Erasure]:
    """The receipt of an erasure: which files each replica has written again, and whether it has finished"""
    record = await broker_of(call.request).record(call.request.match_info["name"])
    return shape_response(await _receipt(call.request, record, call.parameters.id))


async def _receipt(request: web.Request, record: StreamRecord, erasure_id: str) -> shapes.Erasure:
    """Raises ErasureNotFound: no replica that answers has it."""
    replicas = await broker_of(request).receipts.everywhere(record, erasure_id)
    known = next((one for one in replicas if "problem" not in one), None)
    if known is None:
        problems = [one["problem"] for one in replicas]
        if all(one["code"] == ErasureNotFound.code for one in problems):
            raise ErasureNotFound(f"stream {record.name!r} has no erasure {erasure_id!r}", stream=record.name)
    shown = [_shown(one) for one in replicas]
    return shapes.Erasure(
        name=record.name,
        id=erasure_id,
        erases=known["erases"] if known else "subject",
        messages=known["messages"] if known else 0,
        requested_at=format_timestamp_us(known["requested_us"]) if known else None,
        complete=all(one.completed_at is not None for one in shown),
        replicas=shown,
    )


def _shown(receipt: ReplicaReceipt) -> shapes.ReplicaErasure:
    if "problem" in receipt:
        return shapes.ReplicaErasure(broker=receipt["broker"], problem=receipt["problem"])
    completed_us = receipt["completed_us"]
    return shapes.ReplicaErasure(
        broker=receipt["broker"],
        completed_at=format_timestamp_us(completed_us) if completed_us else None,
        files=[
            shapes.ErasedFile(
                file["name"],
                file["bytes_before"],
                file["bytes_after"],
                file["rows"],
                format_timestamp_us(file["at_us"]),
            )
            for file in receipt["files"]
        ],
        remaining=receipt["remaining"],
    )
