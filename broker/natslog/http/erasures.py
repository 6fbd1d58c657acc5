"""Erasure of the messages on a subject, or with a key, and its receipt.

    POST /v1/streams/{name}/erase       {"subject"}, {"key"} or {"key_base64"} → the receipt as it begins
    GET  /v1/streams/{name}/erase?id=   → the receipt, to be asked for until it is complete

The text that is erased is in no path, no record and no receipt.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from aiohttp import web

from natslog.errors import ErasureNotFound, InvalidRequest
from natslog.http import shapes
from natslog.http.access import AUDITED, access
from natslog.http.bodies import json_body
from natslog.http.context import BODY, broker_of, leading, query, stated
from natslog.http.shapes import shape_response
from natslog.model import StreamRecord
from natslog.node.removing import Erased, erased_key, erased_subject
from natslog.node.replicas.receipts import ReplicaReceipt
from natslog.subjects import check_subject
from natslog.times import format_timestamp_us

routes = web.RouteTableDef()

_ID = re.compile("[0-9a-z-]{1,32}")


@routes.post("/v1/streams/{name}/erase")
@access("stream", "manage")
async def erase(request: web.Request) -> web.Response:
    """Messages that are committed now; also those that were deleted or purged, and are stored still."""
    query(request)
    what = await _asked(request)
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


@routes.get("/v1/streams/{name}/erase")
@access("stream", "manage")
async def show_erasure(request: web.Request) -> web.Response:
    erasure_id = query(request, "id").get("id", "")
    if not _ID.fullmatch(erasure_id):
        raise InvalidRequest("give the id of an erasure, as POST has returned it: ?id=…", parameter="id")
    record = await broker_of(request).record(request.match_info["name"])
    return shape_response(await _receipt(request, record, erasure_id))


async def _asked(request: web.Request) -> Erased:
    """The text is not logged. Raises InvalidRequest."""
    try:
        return _what(await json_body(request))
    finally:
        request[BODY] = b"(not logged)"


def _what(body: dict[str, Any]) -> Erased:
    """Raises InvalidRequest."""
    if len(body) != 1 or (name := next(iter(body))) not in ("subject", "key", "key_base64"):
        raise InvalidRequest('give what to erase: {"subject": …}, {"key": …} or {"key_base64": …}, one of them')
    text = body[name]
    if name == "subject":
        return erased_subject(check_subject(text, wildcards=True))
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} must be a string", parameter=name)
    try:
        return erased_key(text.encode() if name == "key" else base64.b64decode(text, validate=True))
    except ValueError as error:  # also that of letters outside of ASCII
        raise InvalidRequest(f"{name} is not valid: {error}", parameter=name) from error


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
