"""Ranges of a stream: where a time or a subject is, how large a range is, and how it is cut for parallel readers."""

from __future__ import annotations

from aiohttp import web

from natslog import model
from natslog.errors import InvalidRequest
from natslog.http.access import limits_of, require_still, with_counts
from natslog.http.context import broker_of, leading, read_from_log, stated
from natslog.http.endpoint import Call
from natslog.http.shapes.common import Answer
from natslog.http.shapes.reading import MAX_SPLITS, Extent, ExtentOf, OffsetAt, OffsetsOf, ReadFrom, Split, SplitsOf
from natslog.log import StreamLog
from natslog.model import StreamRecord
from natslog.node.broker import Broker
from natslog.node.replicas.stream import HostedStream
from natslog.security.decisions import is_whole
from natslog.times import format_timestamp_us, parse_timestamp_us


async def first_offset(call: Call[OffsetsOf, None]) -> Answer[OffsetAt]:
    """The first message at or after a time, or on a subject and at or after an offset

    Without one: the high watermark, and no timestamp.
    """
    request, asked = call.request, call.parameters
    stream = await leading(request)
    if asked.timestamp is not None:
        timestamp_us = parse_timestamp_us(asked.timestamp)
        offset, found_us = await read_from_log(
            request, stream, lambda log: log.reader.offset_at(timestamp_us, log.first_readable_offset)
        )
    else:
        assert asked.subject is not None, "a time or a subject is given"
        offset, found_us = await _next_on_subject(request, stream, asked.subject, asked.start or 0)
    found = None if found_us is None else format_timestamp_us(found_us)
    return stated(request, stream, OffsetAt(offset, found))


async def _next_on_subject(
    request: web.Request, stream: HostedStream, subject: str, start: int
) -> tuple[int, int | None]:
    allowed = limits_of(request, "read", stream.record)
    if allowed is not None and not is_whole(allowed, (subject,)):
        return stream.usable_log().high_watermark, None

    def look_up(log: StreamLog) -> tuple[int, int | None]:
        offset = log.subjects.next(subject, start)
        for rows in log.reader.visible_rows(offset, offset + 1) if offset >= 0 else ():
            return offset, rows.column("timestamp")[0].value
        return log.high_watermark, None

    found = await read_from_log(request, stream, look_up)
    require_still(request)
    return found


async def extent(call: Call[ExtentOf, None]) -> Answer[Extent]:
    """The approximate stored size of a range, or the end of the range that has a given size"""
    request, asked = call.request, call.parameters
    stream = await leading(request)
    start, end = asked.within(stream.usable_log())

    def extent_of(log: StreamLog) -> Extent:
        found = log.reader.extent(start, end, asked.max_bytes)
        return Extent(found.start, found.end, found.bytes, log.reader.count(found.start, found.end))

    shown = with_counts(request, stream.record, await read_from_log(request, stream, extent_of))
    return stated(request, stream, shown)


async def splits(call: Call[SplitsOf, None]) -> Answer[list[Split]]:
    """A range divided into splits for parallel readers"""
    request, asked = call.request, call.parameters
    stream, broker = await leading(request), broker_of(request)
    start, end = asked.within(stream.usable_log())
    if asked.max_rows is not None and (end - start) // asked.max_rows > MAX_SPLITS:
        raise InvalidRequest(f"max_rows {asked.max_rows} would divide this range into more than {MAX_SPLITS} splits")
    limits = {"max_bytes": asked.max_bytes, "max_rows": asked.max_rows}
    cut = await read_from_log(
        request, stream, lambda log: log.reader.splits(start, end, min_splits=asked.min_splits, **limits)
    )
    urls = replica_urls(broker, stream.record, asked.read_from, asked.rack)
    return stated(request, stream, [with_counts(request, stream.record, one) for one in shown_splits(cut, urls)])


def shown_splits(cut: list[model.Split], urls: tuple[tuple[str, ...], ...]) -> list[Split]:
    """Splits as the API shows them. `urls`: of replicas, as from `replica_urls`."""
    return [
        Split(split.start, split.end, split.rows, split.bytes, in_turn(urls, number))
        for number, split in enumerate(cut)
    ]


def replica_urls(
    broker: Broker, record: StreamRecord, read_from: ReadFrom, rack: str | None
) -> tuple[tuple[str, ...], ...]:
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
