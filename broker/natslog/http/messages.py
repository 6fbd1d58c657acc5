"""Reading messages: Arrow IPC straight from the files by sendfile, or rewritten where rows or columns change.

An Arrow answer is either *whole* (`Natslog-Batches: whole`): the stored batches that cover the range, byte for byte,
each with its CRC; the client slices the first and the last. Or *exact*: just the rows asked for. `Natslog-Next-Offset`
is the offset of the next request, whatever the rows are.

With `max_bytes` an answer is one part (`answer_parts`), of known length. Without it, the response continues to the end
of the range, in as many parts as necessary; several parts are sent in chunks. A response that cannot be completed lacks
the last chunk, and an Arrow stream its end-of-stream marker.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

from aiohttp import web

from natslog import tracing
from natslog.errors import CorruptLog, InvalidRequest, NatslogError, OffsetOutOfRange, StorageUnavailable
from natslog.http.access import LIMITS, limits_of, polling, require_still, rights_of
from natslog.http.answer_parts import ARROW_STREAM, NDJSON, PartMaker, Question
from natslog.http.context import (
    broker_of,
    check_still_leading,
    confirmed_out_of_range,
    epoch_headers,
    leading,
)
from natslog.http.endpoint import Call
from natslog.http.part import Part
from natslog.http.polls import POLLS, Poll
from natslog.http.sending import Body, disconnecting_slow_client
from natslog.http.shapes.reading import MessagesOf
from natslog.http.views import latest_view
from natslog.log import StreamLog
from natslog.log_events import event
from natslog.node.replicas.stream import HostedStream
from natslog.security.decisions import is_whole

logger = logging.getLogger("natslog.http")
Result = TypeVar("Result")


def _question(request: web.Request, asked: MessagesOf, stream: HostedStream) -> Question:
    start, end = asked.within(stream.usable_log())
    if asked.end is not None and start > end:
        raise InvalidRequest(f"start {start} is beyond end {end}", start=start, end=end)
    allowed = limits_of(request, "read", stream.record)
    if allowed is not None and asked.subject is not None and is_whole(allowed, (asked.subject,)):
        allowed = None  # what is asked for leaves out the rest
    return Question(
        start=start,
        end=None if asked.end is None else end,
        max_bytes=asked.max_bytes,
        wait_ms=asked.wait_ms,
        subject=asked.subject,
        allowed=allowed,
        columns=asked.columns or None,
        ndjson=_wants_ndjson(request.headers.get("Accept", "")),
        exact=_wants_exact_rows(request, asked),
        takes_columns=request.headers.get("Natslog-Columns") == "whole",
    )


def _wants_exact_rows(request: web.Request, asked: MessagesOf) -> bool:
    """By the parameter; or by a header, which Python clients send."""
    return request.headers.get("Natslog-Batches") != "whole" if asked.exact is None else asked.exact


def _wants_ndjson(accept: str) -> bool:
    kinds = [part.split(";")[0].strip() for part in accept.split(",")]
    if NDJSON in kinds and ARROW_STREAM not in kinds:
        return True
    if not set(kinds) & {"", "*/*", "application/*", ARROW_STREAM, NDJSON}:
        raise InvalidRequest(f"Accept {accept!r}: messages are sent as {ARROW_STREAM} or {NDJSON}")
    return False


async def messages(call: Call[MessagesOf, None]) -> web.StreamResponse:
    """Messages as an Arrow IPC stream, or as one line of JSON per message with Accept: application/x-ndjson. Any
    in-sync replica serves a range with a numeric, committed end; the leader answers all other requests. Without
    max_bytes the response has all messages up to end, or up to the high watermark at the time of the request; a
    response without its terminating chunk is incomplete
    """
    request = call.request
    name = request.match_info["name"]
    attributes = tracing.messaging("fetch", "receive", name)
    with tracing.span(f"fetch {name}", "server", attributes, parent=request.headers) as span:
        stream, asked, states_end = await _serving(request, call.parameters)
        with request.app[POLLS].poll(stream, asked) as poll:
            with polling(request) if asked.wait_ms else nullcontext():
                await poll.turn()
                require_still(request)  # the stream may record other subjects than when the wait began
            return await _answered(request, stream, asked, states_end, poll, span)


async def _answered(
    request: web.Request, stream: HostedStream, asked: Question, states_end: bool, poll: Poll, span: tracing.Span
) -> web.StreamResponse:
    limits, rights = request.app[LIMITS], rights_of(request)
    view = asked.view
    end = _end(stream.usable_log(), asked) if poll.end is None else poll.end
    maker = PartMaker(request, stream, asked)
    part = poll.take_part()
    if part is None:
        part = await or_elsewhere(request, stream, maker.part(asked.start, end))
    with part:
        is_last = asked.max_bytes is not None or part.next_offset >= end
        opening, ending = (b"", b"") if part.is_framed else (asked.opening, asked.ending)
        length = len(opening) + part.length + len(ending) if is_last else None
        headers = _headers(request, stream, part.next_offset if is_last else end, states_end)
        headers |= _headers_of_rows(part, asked, is_last=is_last)
        headers |= {} if view is None else {"Natslog-As-Of": str(view.end)}
        kind = NDJSON if asked.ndjson else ARROW_STREAM
        body = await Body.begun(request, headers, kind, length, broker_of(request).readers)
        limits.charge(rights, part.length)
        with disconnecting_slow_client(request):
            await body.send_bytes(opening)
            await part.send(body)
    await limits.sent(rights)
    at, sent_bytes = part.next_offset, part.length
    while not is_last and at < end:
        with await further(request, stream, maker.part(at, end)) as part, disconnecting_slow_client(request):
            limits.charge(rights, part.length)
            await part.send(body)
        await limits.sent(rights)
        at, sent_bytes = part.next_offset, sent_bytes + part.length
    span.set({"natslog.first_offset": asked.start, "natslog.next_offset": at, "natslog.bytes": sent_bytes})
    with disconnecting_slow_client(request):
        await body.send_bytes(ending)
        return await body.end()


def _headers_of_rows(part: Part, asked: Question, *, is_last: bool) -> dict[str, str]:
    """Of which rows the answer consists. An identity that may read some subjects only gets no counts of rows."""
    batches = _kind_of_batches(part, asked, is_last=is_last)
    if asked.allowed is not None:
        return {"Natslog-Batches": batches, "Natslog-Limited": "true"}
    if batches == "exact" and is_last and part.removed_rows:
        return {"Natslog-Batches": batches, "Natslog-Removed": str(part.removed_rows)}
    return {"Natslog-Batches": batches}


def _kind_of_batches(part: Part, asked: Question, *, is_last: bool) -> str:
    if not part.is_whole or (asked.exact and not is_last):
        return "exact"
    if asked.columns is None:
        return "whole"
    return "columns" if asked.takes_whole else "exact"


def _end(log: StreamLog, asked: Question) -> int:
    """Where the range ends that this request is about, whatever is stored meanwhile."""
    return log.high_watermark if asked.end is None else min(asked.end, log.high_watermark)


async def further(request: web.Request, stream: HostedStream, making: Awaitable[Result]) -> Result:
    """A part that follows others.

    Raises:
        ConnectionResetError: there is none. The connection is closed, so that the client detects an incomplete
            response: an error can no longer be sent.
    """
    try:
        return await making
    except (NatslogError, OSError) as error:
        if isinstance(error, CorruptLog):
            stream.note_damage(error)
        logger.warning(
            f"stream {stream.name}: the response to the reader at {request.remote} is incomplete: {error}",
            extra=event("response.incomplete", stream=stream.name, address=request.remote),
        )
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the answer cannot be ended") from error


async def _serving(request: web.Request, given: MessagesOf) -> tuple[HostedStream, Question, bool]:
    """The stream in the path, what is asked of it, and whether the response states where the stream ends, which only
    the leader may do. A numeric range that is committed here is served by any replica. Raises as `leading`.
    """
    stream = broker_of(request).streams.get(request.match_info["name"])
    if stream is not None and stream.may_serve and not _names_position(given) and given.view is None:
        asked = _question(request, given, stream)
        if _is_committed(asked, stream.usable_log()):
            return stream, asked, False
    stream = await leading(request)
    asked = _question(request, given, stream)
    if given.view is not None:
        asked = await _of_view(request, stream, asked, given.as_of)
    return stream, asked, True


async def _of_view(request: web.Request, stream: HostedStream, asked: Question, as_of: int | None) -> Question:
    """Of the latest view only. Raises InvalidRequest, ViewExpired, CorruptLog."""
    view = await latest_view(request, stream, as_of)
    end = view.end if asked.end is None else asked.end
    if end > view.end or asked.start > end:
        raise InvalidRequest(f"the view is of the offsets below {view.end}", parameter="end", as_of=view.end)
    return replace(asked, view=view, end=end)


def _is_committed(asked: Question, log: StreamLog) -> bool:
    """Whether it names a range that is completely committed and stored here: any replica serves such a range."""
    return asked.end is not None and log.first_readable_offset <= asked.start <= asked.end <= log.high_watermark


def _names_position(asked: MessagesOf) -> bool:
    """Whether a bound is not given, or is symbolic (`earliest`, `latest`): only the leader can determine it."""
    return not (isinstance(asked.start, int) and isinstance(asked.end, int))


def _headers(request: web.Request, stream: HostedStream, next_offset: int, states_end: bool) -> dict[str, str]:
    """From a replica that does not lead, the high watermark is that of this replica: the leader may have more messages.

    Raises:
        As `stated`, where the answer states the stream's end.
    """
    log = stream.usable_log()
    if states_end:
        check_still_leading(request, stream)
    return epoch_headers(stream) | {
        "Natslog-Next-Offset": str(next_offset),
        "Natslog-High-Watermark": str(log.high_watermark),
        "Natslog-Log-Start-Offset": str(log.first_readable_offset),
    }


async def or_elsewhere(request: web.Request, stream: HostedStream, work: Awaitable[Result]) -> Result:
    """The result of the work. Data that is damaged here, or cannot be read now, is intact on another in-sync replica.

    Raises:
        HTTPTemporaryRedirect: to that one. CorruptLog, StorageUnavailable: there is no other replica. OffsetOutOfRange:
            with the epoch of the leader.
    """
    try:
        return await work
    except OffsetOutOfRange as error:  # on a replica that is not leader, this gives no information about the stream
        raise await confirmed_out_of_range(request, stream, error) from error
    except CorruptLog as error:
        if len(stream.record.replicas) == 1:
            raise
        stream.note_damage(error)
        raise _redirect_to_another(request, stream) or error from error
    except OSError as error:  # the disk fails, or there are too many open files: the stored data may be intact
        logger.warning(
            f"stream {stream.name}: reading failed: {error}", extra=event("stream.read_failed", stream=stream.name)
        )
        unavailable = StorageUnavailable(f"stream {stream.name!r} cannot be read at this broker now: {error.strerror}")
        raise _redirect_to_another(request, stream) or unavailable from error


def _redirect_to_another(request: web.Request, stream: HostedStream) -> web.HTTPTemporaryRedirect | None:
    """To another in-sync replica; None where there is none."""
    broker = broker_of(request)
    others = [one for one in stream.record.isr if one != broker.cluster.me]
    urls = [url for one in others if (url := broker.url_of(one)) is not None]
    return web.HTTPTemporaryRedirect(urls[0] + request.path_qs) if urls else None
