"""Plans of reads of streams with leaders on any broker; see `natslog.planning`.

Theory of operation. The leader of a stream states its bounds and measures what waits there, and cuts it where a limit
or the size of a task requires that. So there are at most two rounds of requests, each to all leaders at once. Logs are
read in a reader's thread. As for all positions, an answer counts only if the broker still leads the stream afterwards,
with a session (`Positions`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import msgspec

from natslog.errors import BrokerUnavailable, InvalidRequest, NatslogError, NotFound, OffsetOutOfRange
from natslog.log import StreamLog
from natslog.model import BrokerId, Split, StreamRecord
from natslog.node.cluster_node import ClusterNode
from natslog.node.replicas.positions import Positions
from natslog.node.replicas.stream import HostedStream
from natslog.planning import (
    MAX_RANGES,
    AskedPlan,
    Division,
    PlannedRange,
    PlannedStream,
    ReadPlan,
    ReadPosition,
    Share,
    Waiting,
    divided_again,
    reach,
    shares_of,
)

_ASK_WITHIN_S = 20.0
_OLDER_FOR_S = 60.0
_TRIES = 3  # retention may remove a position while it is looked up
_PACKED_AT_ONCE = 500

Asked = TypeVar("Asked", bound=msgspec.Struct)
Answer = TypeVar("Answer", bound=msgspec.Struct)
Result = TypeVar("Result")


class _Place(msgspec.Struct):
    """Where a reader is in a stream; see `AskedPlan`. `is_measured`: rows and bytes are stated."""

    id: str
    position: ReadPosition | None
    end: tuple[str, int] | None
    is_measured: bool


class _Found(msgspec.Struct):
    """The stream, and about how many stored bytes wait."""

    stream: PlannedStream
    bytes: int = 0


class _Cutting(msgspec.Struct):
    """The beginning of `[start, end)` that is within the share, cut into parts."""

    id: str
    start: int
    end: int
    max_rows: int | None
    max_bytes: int | None
    part_rows: int | None
    part_bytes: int
    min_parts: int


class _Cut(msgspec.Struct):
    parts: list[Split]


class Unstated(Exception):
    """The leader of this stream does not answer."""

    def __init__(self, record: StreamRecord) -> None:
        super().__init__(record.name)
        self.record = record


class ReadPlans:
    """Also answers the requests `read_places` and `read_cuts` of other brokers."""

    def __init__(self, cluster: ClusterNode, positions: Positions, readers: Executor) -> None:
        self._cluster, self._positions, self._readers = cluster, positions, readers
        self._older_until_s: dict[int, float] = {}  # brokers that have no such requests

    async def plan(self, records: Sequence[StreamRecord], asked: AskedPlan) -> ReadPlan:
        """What is read next of these streams; without URLs.

        Raises:
            Unstated. InvalidRequest: the plan would be too large. NotFound: a leader is of an older version.
            CorruptLog, OSError: a log cannot be read.
        """
        by_name = {record.name: record for record in records}
        places = {
            name: _Place(record.id, asked.positions.get(name), asked.ends.get(name), not asked.is_repeated)
            for name, record in by_name.items()
        }
        found = await self._of_leaders("read_places", by_name, places, _Found)
        plan = ReadPlan(streams={name: one.stream for name, one in found.items()})
        if asked.is_repeated:
            ranges = {name: (one.start, one.end) for name, one in plan.streams.items()}
            plan.tasks = divided_again(ranges, {name: at.tasks for name, at in asked.positions.items()})
        else:
            await self._divide(plan, by_name, {name: one.bytes for name, one in found.items()}, asked)
        return plan

    async def _divide(
        self, plan: ReadPlan, records: Mapping[str, StreamRecord], sizes: Mapping[str, int], asked: AskedPlan
    ) -> None:
        """Sets the tasks, and ends of streams that are not read to their end."""
        turns = {name: at for at, name in enumerate(asked.positions)}
        in_turn = sorted(plan.streams, key=lambda name: turns.get(name, -1))
        waiting = {name: _waiting(plan.streams[name], sizes[name]) for name in in_turn}
        shares = shares_of(waiting, asked.limits)
        division = Division(asked.tasks, {name: _about(waiting[name], share) for name, share in shares.items()})
        if sum(map(division.most_parts_of, shares)) > MAX_RANGES:
            raise _too_many_parts()
        cuttings = {
            name: _Cutting(
                records[name].id,
                waiting[name].start,
                waiting[name].end,
                share.rows,
                share.bytes,
                asked.tasks.max_rows,
                asked.tasks.max_bytes,
                division.parts_of(name),
            )
            for name, share in shares.items()
            if not share.holds(waiting[name]) or division.most_parts_of(name) > 1
        }
        cut = await self._of_leaders("read_cuts", records, cuttings, _Cut)
        parts = []
        for name, stream in plan.streams.items():
            found = cut[name].parts if name in cut else _whole(waiting[name]) if name in shares else []
            stream.end = found[-1].end if found else stream.start
            parts += [
                PlannedRange(stream=name, start=one.start, end=one.end, rows=one.rows, bytes=one.bytes, urls=())
                for one in found
            ]
        if len(parts) > MAX_RANGES:
            raise _too_many_parts()
        loop = asyncio.get_running_loop()
        is_short = len(parts) <= _PACKED_AT_ONCE
        plan.tasks = (
            division.packed(parts) if is_short else await loop.run_in_executor(self._readers, division.packed, parts)
        )

    # ---- at the leaders ----

    async def _of_leaders(
        self, what: str, records: Mapping[str, StreamRecord], asked: Mapping[str, Asked], kind: type[Answer]
    ) -> dict[str, Answer]:
        """What the leader of each stream answers."""
        by_leader: dict[Any, dict[str, Asked]] = {}
        for name, one in asked.items():
            by_leader.setdefault(records[name].leader, {})[name] = one
        asks = [self._of_leader(what, leader, streams, kind) for leader, streams in by_leader.items()]
        answers = [await asks[0]] if len(asks) == 1 else await asyncio.gather(*asks)  # a task costs time
        found = {name: one for answer in answers for name, one in answer.items()}
        for name in asked:
            if name not in found:
                raise Unstated(records[name])
        return found

    async def _of_leader(
        self, what: str, leader: BrokerId | None, asked: Mapping[str, Asked], kind: type[Answer]
    ) -> dict[str, Answer]:
        if leader == self._cluster.me:
            return await self._here(asked, _WORK[what])
        link = None if leader is None else self._cluster.link_to(leader)
        if leader is None or link is None:
            return {}
        now_s = asyncio.get_running_loop().time()
        if now_s < self._older_until_s.get(leader, 0.0):
            raise _older(leader)
        try:
            answer = await link.ask(what, _ASK_WITHIN_S, asked=asked)
        except BrokerUnavailable:
            return {}
        except NatslogError as error:
            if f"KeyError('{what}')" not in error.message:
                raise
            self._older_until_s[leader] = now_s + _OLDER_FOR_S
            raise _older(leader) from error
        return msgspec.convert(answer, dict[str, kind])  # type: ignore[valid-type]

    async def places_here(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Of streams that are led here; the others are omitted."""
        return await self._here(msgspec.convert(asked, dict[str, _Place]), _found)

    async def cuts_here(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The same."""
        return await self._here(msgspec.convert(asked, dict[str, _Cutting]), _cut)

    async def _here(
        self, asked: Mapping[str, Any], work: Callable[[HostedStream, StreamLog, Any], Any]
    ) -> dict[str, Any]:
        led = {name: stream for name, one in asked.items() if (stream := self._led(name, one.id)) is not None}
        jobs = [(name, stream, stream.usable_log(), asked[name]) for name, stream in led.items()]
        if all(isinstance(one, _Place) and _is_at_end(log, one) for _, _, log, one in jobs):  # usual for an idle query
            found = _all_of(jobs, work)
        else:
            found = await asyncio.get_running_loop().run_in_executor(self._readers, _all_of, jobs, work)
        return {name: one for name, one in found.items() if self._led(name, asked[name].id) is led[name]}

    def _led(self, name: str, stream_id: str) -> HostedStream | None:
        stream = self._positions.led(name)
        return stream if stream is not None and stream.record.id == stream_id else None


def _too_many_parts() -> InvalidRequest:
    return InvalidRequest(f"this would divide the ranges into more than {MAX_RANGES} parts")


def _older(leader: int) -> NotFound:
    return NotFound(f"broker {leader} is of an older version, which plans no reads: upgrade it, or use /v1/splits")


def _waiting(stream: PlannedStream, size_bytes: int) -> Waiting:
    assert stream.rows is not None, "it was measured"
    return Waiting(stream.start, stream.end, stream.rows, size_bytes)


def _about(waiting: Waiting, share: Share) -> tuple[int, int]:
    """Rows and bytes of what is read."""
    rows, size_bytes = waiting.rows, waiting.bytes or 0
    taken = rows if share.rows is None else min(share.rows, rows)
    size_bytes = size_bytes * taken // max(1, rows) if taken < rows else size_bytes
    return taken, size_bytes if share.bytes is None else min(share.bytes, size_bytes)


def _whole(waiting: Waiting) -> list[Split]:
    return [Split(start=waiting.start, end=waiting.end, rows=waiting.rows, bytes=waiting.bytes)]


# ---- in a reader's thread ----


def _is_at_end(log: StreamLog, place: _Place) -> bool:
    return place.position is not None and place.position.id == place.id and place.position.start == log.high_watermark


def _all_of(
    jobs: Sequence[tuple[str, HostedStream, StreamLog, Any]], work: Callable[[HostedStream, StreamLog, Any], Any]
) -> dict[str, Any]:
    return {name: work(stream, log, asked) for name, stream, log, asked in jobs}


def _found(stream: HostedStream, log: StreamLog, place: _Place) -> _Found:
    found = PlannedStream(
        id=stream.record.id,
        leader_epoch=stream.leader_epoch,
        log_start_offset=log.first_readable_offset,
        high_watermark=log.high_watermark,
        lineage={fork.id: fork.offset for fork in stream.record.lineage},
    )
    reach(found, place.position, place.end)
    if found.start == found.end or not place.is_measured:
        return _Found(found)

    def measured(first: int) -> tuple[int, int]:
        return log.reader.count(first, found.end), log.reader.extent(first, found.end).bytes

    found.rows, size_bytes = _from_first_readable(log, found.start, found.end, measured) or (0, 0)
    return _Found(found, size_bytes)


def _cut(_: HostedStream, log: StreamLog, asked: _Cutting) -> _Cut:
    """What was removed since the range was stated is in the first part: its reader reports the loss, or ignores it."""
    limits = {"max_bytes": asked.part_bytes, "max_rows": asked.part_rows}

    def parts(first: int) -> list[Split]:
        end = log.reader.reach(first, asked.end, max_rows=asked.max_rows, max_bytes=asked.max_bytes)
        return log.reader.splits(first, end, min_splits=asked.min_parts, **limits)

    found = _from_first_readable(log, asked.start, asked.end, parts)
    if not found:
        return _Cut([Split(start=asked.start, end=asked.end, rows=None, bytes=None)])
    return _Cut([msgspec.structs.replace(found[0], start=asked.start), *found[1:]])


def _from_first_readable(log: StreamLog, start: int, end: int, work: Callable[[int], Result]) -> Result | None:
    """The result of `work` on `[start, end)`, from where the log begins for readers: limits of a stream may move that
    with every commit. None: nothing of it is left, or the log start moves faster than the log is read.
    """
    for _ in range(_TRIES):
        first = max(start, log.first_readable_offset)
        if first >= end:
            return None
        with contextlib.suppress(OffsetOutOfRange):
            return work(first)
    return None


_WORK: dict[str, Callable[[HostedStream, StreamLog, Any], Any]] = {"read_places": _found, "read_cuts": _cut}
