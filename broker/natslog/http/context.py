"""What handlers share: the broker behind a request, which broker answers it, and the id of a change."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from natslog.cluster.stream_changes import importing
from natslog.errors import (
    InvalidRequest,
    NatslogError,
    NoLeader,
    NotLeader,
    NotReady,
    OffsetOutOfRange,
)
from natslog.http.answers import Answers
from natslog.http.shapes.common import Answer, Shape, shape_response
from natslog.log import StreamLog
from natslog.model import StreamRecord
from natslog.node.broker import Broker
from natslog.node.metadata.entries import Request
from natslog.node.replicas.stream import HostedStream
from natslog.request_ids import HEADER

Result = TypeVar("Result")

BROKER = web.AppKey("broker", Broker)
ANSWERS = web.AppKey("answers", Answers)
DOCUMENT = web.AppKey("document", bytes)
"""`/openapi.json`."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""
REQUEST_ID = web.RequestKey("request_id", str)
BODY = web.RequestKey("body", bytes)
"""What was received, where it is kept."""
OWNER = web.RequestKey("owner", str)
"""The identity behind the request; "" without security."""


def broker_of(request: web.Request) -> Broker:
    """The broker, once it has loaded its streams. Raises NotReady before that."""
    broker = request.app[BROKER]
    if not broker.has_started:
        raise NotReady("the broker is starting: repeat the request in a moment")
    return broker


async def leading(request: web.Request) -> HostedStream:
    """The stream in the path, where this broker leads it and has a session: so that it may state positions.

    What is answered after an `await` goes through `stated`.

    Raises:
        StreamNotFound, NoLeader, NotLeader, StreamImporting, or why it cannot be served.
        HTTPTemporaryRedirect: to the broker that leads it.
    """
    stream = await leading_any(request)
    if stream.record.import_state == "importing":
        raise importing(stream.record)
    return stream


async def leading_any(request: web.Request) -> HostedStream:
    """The same, also while the stream is being imported. Raises as `leading`."""
    broker = broker_of(request)
    record = await broker.record(request.match_info["name"])
    stream = broker.streams.get(record.name)
    if stream is not None and broker.positions.is_led_here(stream):
        return stream
    if stream is not None and record.leader == broker.cluster.me and stream.problem is not None:
        raise stream.error_for_clients(stream.problem)
    raise _elsewhere(request, record)


def _elsewhere(request: web.Request, record: StreamRecord) -> web.HTTPTemporaryRedirect | NatslogError:
    """The alternative to this broker: the leader of the stream, or a retry in a moment."""
    broker = broker_of(request)
    url = None if record.leader in (None, broker.cluster.me) else broker.url_of(record.leader)
    if url is None or not broker.has_session():
        return no_leader(broker, record)
    if _has_come_around(request):
        return NotLeader(
            f"stream {record.name!r} is led by broker {record.leader} at {url}: send the request to it",
            stream=record.name,
            leader=record.leader,
            url=url,
        )
    return web.HTTPTemporaryRedirect(url + request.path_qs)


def no_leader(broker: Broker, record: StreamRecord) -> NoLeader:
    """Why no position of a stream is stated here now. It passes: the same request may be sent again."""
    if not broker.has_session():
        return NoLeader(
            f"broker {broker.cluster.me} has no session with the metadata leader, so another broker may already lead "
            f"stream {record.name!r}: send the request to another broker, or repeat it in a moment. Ranges with "
            "numeric start and end are served here if the end is committed",
            stream=record.name,
            broker=broker.cluster.me,
        )
    return NoLeader(
        f"stream {record.name!r} has no available leader; its replicas are on brokers {list(record.replicas)}, the "
        f"in-sync replicas on {list(record.isr)}: it becomes available when enough of these brokers are running (see "
        "natslog cluster status)",
        stream=record.name,
        replicas=list(record.replicas),
        isr=list(record.isr),
    )


def stated(request: web.Request, stream: HostedStream, body: Shape, *, status: int = 200) -> Answer[Shape]:
    """An answer that states positions, made from what `stream` holds. It is checked last, when nothing more is read.

    Raises:
        As `leading`: this broker does not lead the stream any more, or its session has ended meanwhile.
    """
    check_still_leading(request, stream)
    return shape_response(body, status=status, headers=epoch_headers(stream))


def check_still_leading(request: web.Request, stream: HostedStream) -> None:
    """What was read from the stream until now was true until now. Raises as `stated`."""
    if not broker_of(request).positions.may_be_stated_by(stream):
        raise _elsewhere(request, stream.record)


def epoch_headers(stream: HostedStream) -> dict[str, str]:
    """With these headers a client recognises a response that is older than that of a newer leader."""
    return {"Natslog-Leader-Epoch": str(stream.leader_epoch), "Natslog-Stream-Id": stream.record.id}


async def read_from_log(request: web.Request, stream: HostedStream, work: Callable[[StreamLog], Result]) -> Result:
    """What `work` finds in the log of a stream led here, in a reader's thread.

    Raises:
        OffsetOutOfRange: with the epoch of the leader. Whatever else `work` raises; as `stated`.
    """
    log = stream.usable_log()
    try:
        return await asyncio.get_running_loop().run_in_executor(broker_of(request).readers, work, log)
    except OffsetOutOfRange as error:
        raise await confirmed_out_of_range(request, stream, error) from error


async def confirmed_out_of_range(
    request: web.Request, stream: HostedStream, error: OffsetOutOfRange
) -> OffsetOutOfRange:
    """The same, once the metadata index has been read: every change that was committed before this request arrived is
    then applied here, so that no position that a reader received from another leader is reported as out of range.

    Raises:
        MetadataUnavailable: no majority could be asked. As `stated`.
    """
    check_still_leading(request, stream)
    epoch = stream.leader_epoch
    await broker_of(request).require_up_to_date()
    check_still_leading(request, stream)
    if stream.leader_epoch != epoch:
        raise no_leader(broker_of(request), stream.record)
    return out_of_range(stream, error)


def current_headers(is_current: bool) -> dict[str, str]:
    """`false`: no majority confirmed that this broker has received all changes; the answer may be outdated."""
    return {"Natslog-Current": str(is_current).lower()}


def out_of_range(stream: HostedStream, error: OffsetOutOfRange) -> OffsetOutOfRange:
    """The same error, with the epoch of the leader."""
    facts = {"id": stream.record.id, "leader_epoch": stream.leader_epoch}
    return OffsetOutOfRange(error.message, **(error.facts | facts))


def _has_come_around(request: web.Request) -> bool:
    """Another broker has already redirected the request to this one; its metadata is older or newer."""
    return request.headers.get("Natslog-Redirected") == "true"


def require_used_id(request: web.Request) -> None:
    """Of a change: if the client gives an id, it is the one of the request. Raises InvalidRequest."""
    if request.headers.get(HEADER, request[REQUEST_ID]) != request[REQUEST_ID]:
        raise InvalidRequest(f"{HEADER} must be 8 to 64 letters, digits and dashes")


def request_id(request: web.Request) -> Request:
    """The id of a change, so that a retry is applied once, and the client's host. It is made of the id that the client
    gives, the call and its body: a client that uses an id for two changes makes both. Raises InvalidRequest.
    """
    given = request.headers.get(HEADER)
    owner = request[OWNER]
    if given is None:
        return Request(request[REQUEST_ID], owner or request.remote or "", request.remote or "")
    require_used_id(request)
    stated = f"{given}\n{owner}\n{request.method} {request.path_qs}\n".encode("utf-8", "surrogatepass")
    made = hashlib.sha256(stated + request.get(BODY, b""))
    return Request(made.hexdigest()[:32], owner or request.remote or "", request.remote or "")
