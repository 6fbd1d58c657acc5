"""What one task reads: ranges of streams, as brokers plan them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pyspark.sql.datasource import InputPartition

from natslog.client import leader_epochs
from natslog.planning import PlannedRange, ReadPlan
from pyspark_natslog.source.offsets import StreamOffset


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets `[start, end)` of the stream with this id; `urls` are the brokers that have it, nearest first.

    `bytes`: 0 if they are unknown to this reader. `leader_epoch`: the newest one known when it was planned, so that a
    task accepts no answer of an older leader. `as_of`: the high watermark of the latest view, if only that is read.
    `is_open`: it begins where the log did, so that what retention removes before it is read is not missing. `passed`:
    rows that are left out, as requests have them; "": none.
    """

    stream: str
    stream_id: str
    start: int
    end: int
    urls: tuple[str, ...] = ()
    bytes: int = 0
    leader_epoch: int = 0
    as_of: int | None = None
    is_open: bool = False
    passed: str = ""

    @property
    def rows(self) -> int:
        return self.end - self.start


class Task(InputPartition):
    """What one task reads, with all facts that it needs. `traceparent`: the span that its spans are children of."""

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        super().__init__(tuple((one.stream, one.start, one.end) for one in ranges))
        self.ranges = tuple(ranges)
        self.traceparent = ""


def tasks_of(
    plan: ReadPlan,
    open_streams: Collection[str],
    as_of: Mapping[str, int] = MappingProxyType({}),
    begin: Mapping[str, StreamOffset] = MappingProxyType({}),
) -> list[Task]:
    """The tasks of a plan; none if there is nothing to read.

    Args:
        open_streams: those that are read from where their logs began. `as_of`: the latest view of each stream, if only
            that is read. `begin`: positions in front of the ranges.
    """

    def range_of(one: PlannedRange) -> OffsetRange:
        stream_id, before = plan.streams[one.stream].id, begin.get(one.stream)
        return OffsetRange(
            one.stream,
            stream_id,
            one.start,
            one.end,
            one.urls,
            one.bytes or 0,
            leader_epochs.highest(stream_id),
            as_of.get(one.stream),
            one.stream in open_streams,
            ";".join(passed.to_text() for passed in before.passed_beyond(one.start)) if before else "",
        )

    return [Task(list(map(range_of, task))) for task in plan.tasks] if any(plan.tasks) else []
