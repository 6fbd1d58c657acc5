"""Planning a read: from positions and limits to tasks. Pure; broker and readers share the types and the arithmetic.

Theory of operation. `reach` compares a position with the bounds of its stream: where reading begins and ends, and
what is lost. `shares_of` divides the limits of a trigger among the streams that have something to read. `Division` says
into how many parts each range is to be cut, and packs the parts into tasks: a large range is divided by its share of
all bytes of the read, so that one huge stream among small ones uses all cores; small ranges share a task, because a
task takes some 50 ms before its first row. Whoever has the logs measures ranges and cuts them
(`natslog.node.replicas.read_plans`).

Invariants. Rows are messages that exist: removed offsets use up no limit, and are read with the rows before them. Where
a limit is smaller than the number of streams with rows, the first streams get something: a reader that names those
first that have waited longest reads every stream.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from natslog.subjects import MAX_NAME_CHARS

MAX_OFFSET = 2**62
MAX_WAIT_MS = 60_000
MAX_RANGES = 100_000
"""Of a plan."""
MAX_TASKS = 100_000
_BINS_TRIED = 8
_MAX_TASK_NUMBER = 1_000_000  # of older versions

_WORTH_SPLITTING_ROWS = 64 * 1024
_WORTH_SPLITTING_BYTES = 8 * 1024 * 1024
USUAL_ROW_BYTES = _WORTH_SPLITTING_BYTES // _WORTH_SPLITTING_ROWS
_ROUNDS = 2  # of tasks on all cores, before tasks become larger

Problem = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/Problem"})]
Offset = Annotated[int, Meta(ge=0, le=MAX_OFFSET)]
Wait = Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)]
Limit = Annotated[int, Meta(ge=1, le=2**63 - 1)]
TaskEnds: TypeAlias = list[tuple[Annotated[int, Meta(ge=0, le=_MAX_TASK_NUMBER)], Offset]]
"""Of one range: (number of the task, exclusive end of what it reads), ends rising."""


class ReadPosition(msgspec.Struct, forbid_unknown_fields=True):
    """Where a reader continues in the stream with this id.

    `end`: of the range that is to be read; what the log does not have of it is lost. Without it, all that the limits
    allow is read. `is_open`: the reader begins where the log did, so that what was removed since is not lost. `tasks`:
    of a batch that is planned again, how it was divided; empty where one task read everything.
    """

    id: str
    start: Offset
    end: Offset | None = None
    is_open: bool = False
    tasks: TaskEnds = []


class ReadLimits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How much is read at once, about. `min_rows`: nothing is read if fewer messages wait."""

    min_rows: Limit | None = None
    max_rows: Limit | None = None
    max_bytes: Limit | None = None


class TaskLimits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How a read becomes tasks. `cores`: how many run at once. `min_tasks` null: as many as that, if there is enough to
    read. `usual_bytes`: of a task; up to `max_bytes` if there is more to read than two such tasks for each core.
    `read_from`, `rack`: which replicas come first.
    """

    cores: Annotated[int, Meta(ge=1, le=MAX_TASKS)] = 1
    min_tasks: Annotated[int, Meta(ge=1, le=MAX_TASKS)] | None = None
    max_rows: Limit | None = None
    usual_bytes: Limit = 64 * 1024 * 1024
    max_bytes: Limit = 512 * 1024 * 1024
    read_from: Literal["nearest", "leader", "any"] = "nearest"
    rack: str | None = None


class AskedPlan(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is read next. Streams are selected as for `/v1/positions`; one without a position is read from its start.

    `positions`: in the order in which streams get a part of a limit that is too small for all; new streams come first.
    `with_new`: false: streams with neither a position nor an end are left out.
    `ends`: id and offset that a stream is not read beyond. `is_repeated`: the tasks are those of the positions. `seen`:
    id and high watermark of each stream, as the reader has them; the answer waits until one of them differs, but not
    longer than `wait_ms`.
    """

    streams: frozenset[str] | None = None
    pattern: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    group: str | None = None
    positions: dict[str, ReadPosition] = {}
    ends: dict[str, tuple[str, Offset]] = {}
    with_new: bool = True
    limits: ReadLimits = msgspec.field(default_factory=ReadLimits)
    tasks: TaskLimits = msgspec.field(default_factory=TaskLimits)
    is_repeated: bool = False
    seen: dict[str, tuple[str, int]] = {}
    wait_ms: Wait = 0


class LostRange(msgspec.Struct, frozen=True):
    """Offsets `[start, end)` that cannot be read; `end` null where it is not known.

    `why`: `removed` by retention or a purge; `recreated`: another stream has the name now; `forked`: the stream was
    restored from an export that ends at `start`; `shorter`: the log ends before them.
    """

    start: int
    end: int | None
    why: Literal["removed", "recreated", "forked", "shorter"]


class PlannedStream(msgspec.Struct, kw_only=True):
    """A stream as its leader states it, and the offsets `[start, end)` that are read now.

    `lineage`: id of each stream that it was restored from, and the offset up to which positions of that are valid.
    `rows`: messages that wait, read now or not; null if they are unknown to this reader.
    """

    id: str
    leader_epoch: int
    log_start_offset: int
    high_watermark: int
    lineage: dict[str, int] = {}
    start: int = 0
    end: int = 0
    rows: int | None = 0
    lost: list[LostRange] = []


class PlannedRange(msgspec.Struct, kw_only=True):
    """Offsets `[start, end)` of a stream; `urls` of replicas that have them, the preferred one first. `rows`, `bytes`:
    null if they are unknown to this reader, or the read is repeated.
    """

    stream: str
    start: int
    end: int
    rows: int | None
    bytes: int | None
    urls: tuple[str, ...]


class ReadPlan(msgspec.Struct, kw_only=True):
    """The selected streams; of the other streams with a position, whether they exist; and what each task reads.

    `problem`: why the leader of a stream states no position now; then there is nothing else.
    """

    streams: dict[str, PlannedStream]
    others: dict[str, Literal["exists", "deleted"]] = {}
    tasks: list[list[PlannedRange]] = []
    problem: Problem | None = None


# ---- where reading begins and ends ----


def reach(stream: PlannedStream, position: ReadPosition | None, limit: tuple[str, int] | None = None) -> None:
    """Sets `start`, `end` and `lost` of the stream for a reader at this position, or for a new one (None).

    Args:
        limit: the reader reads the stream with this id not beyond this offset.
    """
    low, high = stream.log_start_offset, stream.high_watermark
    stream.start, stream.end = low, high
    if position is not None:
        stream.start, stream.end, stream.lost = _reachable(stream, position)
    if limit is not None and limit[0] == stream.id:
        stream.end = max(stream.start, min(stream.end, limit[1]))


def _reachable(stream: PlannedStream, position: ReadPosition) -> tuple[int, int, list[LostRange]]:
    low, high, lost = stream.log_start_offset, stream.high_watermark, list[LostRange]()
    start, end = position.start, position.end
    valid_to = MAX_OFFSET if position.id == stream.id else stream.lineage.get(position.id)
    if valid_to is None:
        return low, (high if end is None else low), [LostRange(start, end, "recreated")]
    if (start if end is None else end) > valid_to:
        lost.append(LostRange(valid_to, start if end is None else end, "forked"))
        start, end = min(start, valid_to), (None if end is None else valid_to)
    if start < low:
        kept = low if end is None else min(low, end)
        if not position.is_open and start < kept:
            lost.append(LostRange(start, kept, "removed"))
        start = kept
    if start > high:
        lost.append(LostRange(high, start, "shorter"))
        start = high
    if end is not None and end > high:
        lost.append(LostRange(max(start, high), end, "shorter"))
    end = high if end is None else min(high, end)
    return start, max(start, end), lost


# ---- how much of it ----


@dataclass(frozen=True, slots=True)
class Waiting:
    """What can be read of a stream: offsets `[start, end)` with so many messages of about so many stored bytes.

    `bytes` None: unknown to this reader.
    """

    start: int
    end: int
    rows: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Share:
    """What one stream gets of the limits; None: as much as it has."""

    rows: int | None = None
    bytes: int | None = None

    def holds(self, waiting: Waiting) -> bool:
        """Whether all that waits is within the share."""
        has_room = self.bytes is None or (waiting.bytes is not None and waiting.bytes <= self.bytes)
        return has_room and (self.rows is None or waiting.rows <= self.rows)


def shares_of(waiting: Mapping[str, Waiting], limits: ReadLimits) -> dict[str, Share]:
    """The share of each stream that is read now. A stream without messages, but with removed offsets, is read to its
    end: that uses up no limit.
    """
    rows = {name: one.rows for name, one in waiting.items()}
    if limits.min_rows is not None and sum(rows.values()) < limits.min_rows:
        return {}
    taken = rows if limits.max_rows is None else share_limit(rows, limits.max_rows)
    shares = {name: Share(None if limits.max_rows is None else count) for name, count in taken.items() if count}
    if limits.max_bytes is not None:
        for name, size_bytes in _shared_bytes({name: waiting[name] for name in shares}, limits.max_bytes).items():
            shares[name] = Share(shares[name].rows, size_bytes)
    return shares | {name: Share() for name, one in waiting.items() if one.end > one.start and not one.rows}


def _shared_bytes(waiting: Mapping[str, Waiting], max_bytes: int) -> dict[str, int]:
    """Where sizes are unknown, the limit is divided in proportion to rows."""
    sizes = {name: one.bytes for name, one in waiting.items() if one.bytes is not None}
    if len(sizes) == len(waiting):
        shares = share_limit(sizes, max_bytes) if sum(sizes.values()) > max_bytes else sizes
    else:
        rows = sum(one.rows for one in waiting.values())
        shares = {name: max_bytes * one.rows // rows for name, one in waiting.items()}
    return {name: max(1, share) for name, share in shares.items()}


def share_limit(waiting: Mapping[str, int], limit: int) -> dict[str, int]:
    """`limit` rows (or bytes) divided among streams in proportion to what waits in each. Each stream with waiting rows
    gets at least one; where the limit does not allow this, the first ones do. The whole limit is used.
    """
    total = sum(waiting.values())
    if total <= limit:
        return dict(waiting)
    nonempty = [name for name, rows in waiting.items() if rows]
    if limit < len(nonempty):
        return dict.fromkeys(waiting, 0) | dict.fromkeys(nonempty[:limit], 1)
    shares = {name: max(1, rows * limit // total) if rows else 0 for name, rows in waiting.items()}
    by_size = sorted(waiting, key=lambda name: (-waiting[name], name))
    while (left := limit - sum(shares.values())) != 0:  # rounding, at most a row or so for each stream
        for name in by_size:
            step = min(1, left, waiting[name] - shares[name]) if left > 0 else -min(1, -left, max(0, shares[name] - 1))
            shares[name] += step
            left -= step
    return shares


# ---- in which tasks ----


class Division:
    """Into how many parts ranges are cut, so that there is enough for each task.

    Args:
        taken: rows and bytes of each range that is read now, about.
    """

    def __init__(self, limits: TaskLimits, taken: Mapping[str, tuple[int, int]]) -> None:
        self._limits, self._taken = limits, taken
        self._rows, self._bytes = (sum(one[at] for one in taken.values()) for at in (0, 1))
        self.tasks = self._task_count()

    def _task_count(self) -> int:
        """How many tasks there should be, if there are rows for each."""
        limits = self._limits
        if limits.min_tasks is not None:
            return limits.min_tasks
        if self._rows < _WORTH_SPLITTING_ROWS and self._bytes < _WORTH_SPLITTING_BYTES:
            return 1
        rounds = -(-full_tasks(limits, self._bytes) // limits.cores)
        return max(1, rounds) * limits.cores  # otherwise the last round would leave cores idle

    def parts_of(self, name: str) -> int:
        """The least number of parts of a range: its share of all bytes."""
        return max(1, -(-self.tasks * self._taken[name][1] // max(1, self._bytes)))

    def most_parts_of(self, name: str) -> int:
        """How many parts there will be about, by all limits."""
        rows, size_bytes = self._taken[name]
        by_rows = 0 if self._limits.max_rows is None else -(-rows // self._limits.max_rows)
        return max(self.parts_of(name), by_rows, -(-size_bytes // self._limits.max_bytes))

    def packed(self, parts: Iterable[PlannedRange]) -> list[list[PlannedRange]]:
        """At least as many tasks as there should be if there are as many parts, of about equal size. A task exceeds the
        limits only if a single part does.
        """
        parts = list(parts)
        bins = [_Bin() for _ in range(min(self.tasks, len(parts)))]
        by_size = [(0, 0, number) for number in range(len(bins))]  # a heap: bytes, parts, number of the bin
        for part in sorted(parts, key=lambda one: -_size_bytes(one)):
            number = self._bin_with_room(bins, by_size, part)
            bins[number].add(part)
            heapq.heappush(by_size, (bins[number].bytes, len(bins[number].parts), number))
        return [_in_order(one.parts) for one in bins]

    def _bin_with_room(self, bins: list[_Bin], by_size: list[tuple[int, int, int]], part: PlannedRange) -> int:
        """Takes a bin out of the heap: the smallest one with room among the smallest few, or a new one."""
        passed_over = list[tuple[int, int, int]]()
        number = len(bins)
        while by_size and len(passed_over) < _BINS_TRIED:
            smallest = heapq.heappop(by_size)
            if bins[smallest[2]].has_room(part, self._limits):
                number = smallest[2]
                break
            passed_over.append(smallest)
        for one in passed_over:
            heapq.heappush(by_size, one)
        if number == len(bins):
            bins.append(_Bin())
        return number


def full_tasks(limits: TaskLimits, size_bytes: int) -> int:
    """Large tasks for large reads: the fixed time of a task is that of reading some 15 MiB."""
    most_bytes = max(limits.usual_bytes, -(-size_bytes // (_ROUNDS * limits.cores)))
    return -(-size_bytes // min(limits.max_bytes, most_bytes))


@dataclass(slots=True)
class _Bin:
    parts: list[PlannedRange] = field(default_factory=list)
    bytes: int = 0
    rows: int = 0

    def has_room(self, part: PlannedRange, limits: TaskLimits) -> bool:
        fits = limits.max_rows is None or self.rows + _rows(part) <= limits.max_rows
        return not self.parts or (fits and self.bytes + _size_bytes(part) <= limits.max_bytes)

    def add(self, part: PlannedRange) -> None:
        self.parts.append(part)
        self.bytes += _size_bytes(part)
        self.rows += _rows(part)


def _rows(part: PlannedRange) -> int:
    return part.end - part.start if part.rows is None else part.rows


def _size_bytes(part: PlannedRange) -> int:
    return (part.end - part.start) * USUAL_ROW_BYTES if part.bytes is None else part.bytes


def _in_order(parts: list[PlannedRange]) -> list[PlannedRange]:
    return sorted(parts, key=lambda part: (part.stream, part.start))


def divided_again(ranges: Mapping[str, tuple[int, int]], ends: Mapping[str, TaskEnds]) -> list[list[PlannedRange]]:
    """The tasks of a repeated batch: each has the same rows in the same order, without rows that were lost since. One
    whose rows are all lost is empty.

    Args:
        ranges: offsets `[start, end)` of each stream that can still be read. `ends`: how each was divided.
    """
    count = 1 + max((number for share in ends.values() for number, _ in share), default=0)
    tasks: list[list[PlannedRange]] = [[] for _ in range(count)]
    for name, (start, upto) in ranges.items():
        for number, end in ends.get(name) or [(0, upto)]:
            if start < min(end, upto):
                tasks[number].append(
                    PlannedRange(stream=name, start=start, end=min(end, upto), rows=None, bytes=None, urls=())
                )
                start = min(end, upto)
    return list(map(_in_order, tasks))


def task_ends(tasks: Sequence[Sequence[PlannedRange]]) -> dict[str, TaskEnds]:
    """How the tasks share each stream's range; empty if one task reads everything."""
    shares: dict[str, list[tuple[int, int]]] = {}
    for number, task in enumerate(tasks if len(tasks) > 1 else []):
        for one in task:
            shares.setdefault(one.stream, []).append((one.end, number))
    found: dict[str, TaskEnds] = {}
    for stream, ends in shares.items():
        ends.sort()
        is_last = [at + 1 == len(ends) or ends[at + 1][1] != ends[at][1] for at in range(len(ends))]
        found[stream] = [(number, end) for (end, number), last in zip(ends, is_last, strict=True) if last]
    return found
