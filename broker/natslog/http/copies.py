"""Where a stream lies: the files of its log at the leader, and how far each replica has copied it."""

from __future__ import annotations

from natslog.errors import Forbidden
from natslog.http.access import limits_of
from natslog.http.context import broker_of, leading, no_leader, stated
from natslog.http.endpoint import PlainCall
from natslog.http.shapes import streams as shapes
from natslog.http.shapes.common import Answer
from natslog.log import StreamLog
from natslog.log.segment import ActiveSegment
from natslog.times import format_timestamp_us

_MOST_SEGMENTS = 1_000


async def segments(call: PlainCall) -> Answer[shapes.Segments]:
    """The files of the log at the leader, the newest 1,000. It needs the right to read all subjects

    Nothing is read from files.
    """
    request = call.request
    stream = await leading(request)
    if limits_of(request, "read", stream.record) is not None:
        raise Forbidden(
            "the sizes of files include messages on other subjects: the right to read all of the stream is needed",
            stream=stream.name,
        )
    found = _segments(stream.usable_log())
    return stated(request, stream, shapes.Segments(stream.name, len(found), found[: -_MOST_SEGMENTS - 1 : -1]))


def _segments(log: StreamLog) -> list[shapes.Segment]:
    files = log.chain.snapshot()
    ends = [following.base_offset for following in files[1:]] + [log.chain.log_end_offset]
    found = []
    for one, end in zip(files, ends, strict=bool(files)):
        newest_us = one.max_timestamp_us if isinstance(one, ActiveSegment) else one.known and one.known.newest_us
        newest = format_timestamp_us(newest_us) if newest_us else None
        found.append(shapes.Segment(one.base_offset, end, one.size_bytes, not isinstance(one, ActiveSegment), newest))
    return found


async def replicas(call: PlainCall) -> Answer[shapes.Progress]:
    """How far each replica has copied the log"""
    request = call.request
    stream = await leading(request)
    if (leader := stream.leading) is None:
        raise no_leader(broker_of(request), stream.record)
    end, in_sync = leader.log_end_offset, stream.record.isr
    found = [shapes.ReplicaProgress(leader.me, True, True, end, 0)]
    for broker, copy in leader.messages.copies.items():
        behind = end - (stream.usable_log().chain.log_start_offset if copy.end_offset is None else copy.end_offset)
        found.append(shapes.ReplicaProgress(broker, False, broker in in_sync, copy.end_offset, max(0, behind)))
    return stated(request, stream, shapes.Progress(stream.name, end, leader.high_watermark, found))
