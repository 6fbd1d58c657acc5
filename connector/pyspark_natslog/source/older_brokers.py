"""Plans of reads by brokers of 0.2.0, which have no `/v1/plans`: deleted with 0.4.

They are made of positions, extents and splits, by the same arithmetic. Limits count offsets, because these calls do not
state which messages were removed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from natslog.client import NatslogClient, SplitRange
from natslog.client.confirming import OutdatedAnswers
from natslog.errors import NotFound, OffsetOutOfRange, PayloadTooLarge, StreamNotFound
from natslog.planning import (
    USUAL_ROW_BYTES,
    AskedPlan,
    Division,
    PlannedRange,
    PlannedStream,
    ReadPlan,
    Share,
    Waiting,
    divided_again,
    reach,
    shares_of,
)
from pyspark_natslog.source.confirming import newest
from pyspark_natslog.source.selection import Selection

_OLDER_FOR_S = 60.0
_older_until_s: dict[tuple[str, ...], float] = {}
"""Servers without the call, and the time from which it is tried again. Shared by all clients in this process."""

Parts = dict[str, list[PlannedRange]]


def plan_read(client: NatslogClient, asked: AskedPlan) -> ReadPlan:
    """As `NatslogClient.plan_read`, of brokers of 0.2.0 as well. Raises as that does."""
    if time.monotonic() >= _older_until_s.get(client.servers, 0.0):
        try:
            return client.plan_read(asked)
        except (NotFound, PayloadTooLarge):
            _older_until_s[client.servers] = time.monotonic() + _OLDER_FOR_S
    outdated = OutdatedAnswers()
    while True:
        try:
            return _planned(client, asked)
        except (OffsetOutOfRange, StreamNotFound) as error:  # a stream has changed since its position was stated
            outdated.one_more(error)
            asked = msgspec.structs.replace(asked, seen={}, wait_ms=0)


def _planned(client: NatslogClient, asked: AskedPlan) -> ReadPlan:
    selection = Selection(tuple(sorted(asked.streams or ())), asked.pattern, asked.group)
    plan = ReadPlan(streams={})
    for name, state in sorted(selection.states(client, asked.seen, asked.wait_ms).items()):
        if asked.with_new or name in asked.positions or name in asked.ends:
            plan.streams[name] = stream = PlannedStream(
                id=state.id,
                leader_epoch=state.leader_epoch,
                log_start_offset=state.log_start_offset,
                high_watermark=state.high_watermark,
                lineage=dict(state.lineage),
            )
            reach(stream, asked.positions.get(name), asked.ends.get(name))
            stream.rows = stream.end - stream.start
    for name in asked.positions.keys() - plan.streams.keys():
        plan.others[name] = "deleted" if newest(client, name) is None else "exists"
    if asked.is_repeated:
        _divide_again(client, plan, asked)
    else:
        _divide(client, plan, asked)
    return plan


def _divide_again(client: NatslogClient, plan: ReadPlan, asked: AskedPlan) -> None:
    ranges = {name: (one.start, one.end) for name, one in plan.streams.items()}
    plan.tasks = divided_again(ranges, {name: at.tasks for name, at in asked.positions.items()})
    cut = _cut(client, plan, asked, {name: 1 for name, (start, end) in ranges.items() if start < end})
    for one in [one for task in plan.tasks for one in task]:
        one.urls = cut[one.stream][0].urls


def _divide(client: NatslogClient, plan: ReadPlan, asked: AskedPlan) -> None:
    turns = {name: at for at, name in enumerate(asked.positions)}
    waiting = {
        name: _waiting(client, name, plan.streams[name], asked)
        for name in sorted(plan.streams, key=lambda name: turns.get(name, -1))
    }
    shares = shares_of(waiting, asked.limits)
    for name, stream in plan.streams.items():
        stream.end = _end(client, name, waiting[name], shares[name]) if name in shares else stream.start
    parts = _cut(client, plan, asked, dict.fromkeys(shares, 1))
    taken = {name: (sum(one.end - one.start for one in cut), _bytes(cut)) for name, cut in parts.items()}
    division = Division(asked.tasks, taken)
    coarse = {name: division.parts_of(name) for name, cut in parts.items() if division.parts_of(name) > len(cut)}
    parts |= _cut(client, plan, asked, coarse)
    plan.tasks = division.packed(one for cut in parts.values() for one in cut)


def _waiting(client: NatslogClient, name: str, stream: PlannedStream, asked: AskedPlan) -> Waiting:
    size_bytes: int | None = 0
    if asked.limits.max_bytes is not None and stream.start < stream.end:
        size_bytes = client.extent(name, stream.start, stream.end)[1]
    return Waiting(stream.start, stream.end, stream.end - stream.start, size_bytes)


def _end(client: NatslogClient, name: str, waiting: Waiting, share: Share) -> int:
    end = waiting.end if share.rows is None else waiting.start + share.rows
    if share.bytes is None or share.holds(waiting):
        return end
    return min(end, client.extent(name, waiting.start, waiting.end, max_bytes=share.bytes)[0])


def _bytes(cut: list[PlannedRange]) -> int:
    return sum((one.end - one.start) * USUAL_ROW_BYTES if one.bytes is None else one.bytes for one in cut)


def _cut(client: NatslogClient, plan: ReadPlan, asked: AskedPlan, counts: Mapping[str, int]) -> Parts:
    """The ranges of these streams in at least so many parts: in one request, as far as brokers can."""
    limits = {
        "max_bytes": asked.tasks.max_bytes,
        "max_rows": asked.tasks.max_rows,
        "read_from": asked.tasks.read_from,
        "rack": asked.tasks.rack,
    }
    wanted = {name: plan.streams[name] for name in counts}
    ranges = [SplitRange(name, one.id, one.start, one.end, counts[name]) for name, one in wanted.items()]
    found = client.splits_of_several(ranges, **limits) if len(ranges) > 1 else {}  # type: ignore[arg-type]
    for one in ranges:
        if one.stream not in found:
            found[one.stream] = client.splits(one.stream, one.start, one.end, min_splits=one.min_splits, **limits)  # type: ignore[arg-type]
    return {
        name: [
            PlannedRange(stream=name, start=one.start, end=one.end, rows=one.rows, bytes=one.bytes, urls=one.urls)
            for one in cut
        ]
        for name, cut in found.items()
    }
