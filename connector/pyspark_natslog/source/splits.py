"""From ranges of streams to tasks: cut on batch boundaries by bytes, rows and count, evened out, and packed.

Brokers divide a range, because they store the batches. A large range is divided into parts by its share of all ranges
of the read, so that one huge stream among small ones uses all cores. Small ranges share a task, because a task takes
some 50 ms before its first row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from pyspark.sql.datasource import InputPartition

from natslog.client import NatslogClient, SplitRange, leader_epochs
from natslog.client.confirming import OutdatedAnswers
from natslog.errors import OffsetOutOfRange, StreamNotFound
from natslog.model import Split
from pyspark_natslog.source.loss import left_of, log_start_in
from pyspark_natslog.source.options import Cutting, SourceOptions

_WORTH_SPLITTING_ROWS = 64 * 1024
_WORTH_SPLITTING_BYTES = 8 * 1024 * 1024
_USUAL_ROW_BYTES = _WORTH_SPLITTING_BYTES // _WORTH_SPLITTING_ROWS
_ASKED_AT_ONCE = 8
_ROUNDS = 2  # of tasks on all cores, before tasks become larger


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets `[start, end)` of the stream with this id; `urls` are the brokers that have it, nearest first.

    `bytes`: estimated from the rows if they are unknown to this reader. `leader_epoch`: the newest one known when it
    was planned, so that a task accepts no answer of an older leader. `as_of`: the high watermark of the latest view,
    if only that is read. `is_open`: it begins where the log did, so that what retention removes before it is read is
    not missing.
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

    @property
    def rows(self) -> int:
        return self.end - self.start


class Task(InputPartition):
    """What one task reads, with all facts that it needs. `traceparent`: the span that its spans are children of."""

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        super().__init__(tuple((one.stream, one.start, one.end) for one in ranges))
        self.ranges = tuple(ranges)
        self.traceparent = ""


def plan_tasks(client: NatslogClient, options: SourceOptions, ranges: Sequence[OffsetRange], cores: int) -> list[Task]:
    """Tasks that cover each range once.

    Raises:
        DataLoss: a part of a range is missing, with `failOnDataLoss`.
    """
    ranges = [one for one in ranges if one.rows > 0]
    if not ranges:
        return []
    pieces = _cut_all(client, options, ranges)
    wanted = _wanted(options, pieces, cores)
    pieces = _cut_finer(client, options, wanted, pieces)
    return pack([piece for cut in pieces for piece in cut], options, wanted)


Numbered = tuple[tuple[int, int], ...]
"""Of one range: (number of the task, exclusive end of what it reads), ends rising."""


def numbers_of(tasks: Sequence[Task]) -> dict[str, Numbered]:
    """How the tasks share each stream's range; empty if one task reads everything."""
    shares: dict[str, list[tuple[int, int]]] = {}
    for number, task in enumerate(tasks if len(tasks) > 1 else []):
        for one in task.ranges:
            shares.setdefault(one.stream, []).append((one.end, number))
    numbered = {}
    for stream, ends in shares.items():
        ends.sort()
        last_of_its_run = [at + 1 == len(ends) or ends[at + 1][1] != ends[at][1] for at in range(len(ends))]
        numbered[stream] = tuple(
            (number, end) for (end, number), last in zip(ends, last_of_its_run, strict=True) if last
        )
    return numbered


def plan_again(
    client: NatslogClient,
    options: SourceOptions,
    ranges: Sequence[OffsetRange],
    numbered: Mapping[str, Numbered],
) -> list[Task]:
    """The tasks as of the batch's first plan: each has the same rows in the same order, without rows that were lost
    since.

    Raises:
        DataLoss: as `plan_tasks`.
    """
    count = 1 + max((number for share in numbered.values() for number, _ in share), default=0)
    held: list[list[OffsetRange]] = [[] for _ in range(count)]
    shares = [numbered.get(whole.stream) or ((0, whole.end),) for whole in ranges]
    for share, pieces in zip(shares, _cut_all(client, options, ranges, list(map(len, shares))), strict=True):
        for piece in pieces:
            for number, part in _shared(piece, share):
                held[number].append(part)
    return [Task(sorted(parts, key=lambda part: (part.stream, part.start))) for parts in held]


def _shared(piece: OffsetRange, share: Numbered) -> list[tuple[int, OffsetRange]]:
    """The piece in parts of one task each."""
    parts, start = [], piece.start
    for number, end in share:
        if start < min(end, piece.end):
            part = replace(piece, start=start, end=min(end, piece.end), bytes=0)
            parts.append((number, part))
            start = part.end
    return parts


def _cut_all(
    client: NatslogClient, options: SourceOptions, ranges: Sequence[OffsetRange], min_splits: Sequence[int] = ()
) -> list[list[OffsetRange]]:
    """Each range in parts that the options allow, without lost rows: in one request, as far as brokers can."""
    counts = min_splits or [1] * len(ranges)
    found: dict[str, list[Split]] = {}
    if len(ranges) > 1:
        cutting = options.cutting
        found = client.splits_of_several(
            [
                SplitRange(one.stream, one.stream_id, one.start, one.end, count)
                for one, count in zip(ranges, counts, strict=True)
            ],
            max_bytes=cutting.max_bytes,
            max_rows=cutting.max_rows,
            read_from=cutting.read_from,
            rack=cutting.rack,
        )

    def cut(whole: OffsetRange, count: int) -> list[OffsetRange]:
        splits = found.get(whole.stream)
        return _cut(client, options, whole, count) if splits is None else _ranges(whole, splits)

    with ThreadPoolExecutor(min(_ASKED_AT_ONCE, max(1, len(ranges)))) as pool:
        return list(pool.map(cut, ranges, counts))


def _cut(client: NatslogClient, options: SourceOptions, whole: OffsetRange, min_splits: int = 1) -> list[OffsetRange]:
    """The range in parts that the options allow, without lost rows."""
    cutting, start, end, outdated = options.cutting, whole.start, whole.end, OutdatedAnswers()
    while start < end:
        try:
            splits = client.splits(
                whole.stream,
                start,
                end,
                max_bytes=cutting.max_bytes,
                max_rows=cutting.max_rows,
                min_splits=min_splits,
                read_from=cutting.read_from,
                rack=cutting.rack,
            )
        except (OffsetOutOfRange, StreamNotFound) as error:
            if whole.is_open and (first := log_start_in(error)) > start:
                start = min(first, end)
                continue
            left = left_of(client, options, whole.stream, whole.stream_id, start, end, error)
            if left == (start, end):
                outdated.one_more(error)
            start, end = left
            continue
        assert (splits[0].start, splits[-1].end) == (start, end), "splits cover the range"
        return _ranges(whole, splits)
    return []


def _ranges(whole: OffsetRange, splits: Sequence[Split]) -> list[OffsetRange]:
    epoch = leader_epochs.highest(whole.stream_id)
    return [
        replace(
            whole,
            start=split.start,
            end=split.end,
            urls=split.urls,
            bytes=_size_bytes(split),
            leader_epoch=epoch,
        )
        for split in splits
    ]


def _size_bytes(split: Split) -> int:
    return (split.end - split.start) * _USUAL_ROW_BYTES if split.bytes is None else split.bytes


def _wanted(options: SourceOptions, pieces: Sequence[Sequence[OffsetRange]], cores: int) -> int:
    """How many tasks there should be, if there are rows for each."""
    if options.cutting.min_tasks is not None:
        return options.cutting.min_tasks
    rows = sum(piece.rows for cut in pieces for piece in cut)
    if rows < _WORTH_SPLITTING_ROWS and _bytes_of(pieces) < _WORTH_SPLITTING_BYTES:
        return 1
    rounds = -(-_full_tasks(options.cutting, _bytes_of(pieces), cores) // cores)
    return max(1, rounds) * cores  # otherwise the last round would leave cores idle


def _full_tasks(cutting: Cutting, size_bytes: int, cores: int) -> int:
    """Large tasks for large reads: the fixed time of a task is that of reading some 15 MiB."""
    task_bytes = min(cutting.max_bytes, max(cutting.usual_bytes, -(-size_bytes // (_ROUNDS * cores))))
    return -(-size_bytes // task_bytes)


def _bytes_of(pieces: Sequence[Sequence[OffsetRange]]) -> int:
    return sum(piece.bytes for cut in pieces for piece in cut)


def _cut_finer(
    client: NatslogClient, options: SourceOptions, wanted: int, pieces: list[list[OffsetRange]]
) -> list[list[OffsetRange]]:
    """The ranges that have more than their share of all bytes, cut into more parts, so that all are about equal."""
    total_bytes = max(1, _bytes_of(pieces))
    shares = [-(-wanted * sum(piece.bytes for piece in cut) // total_bytes) for cut in pieces]
    coarse = [at for at, cut in enumerate(pieces) if cut and shares[at] > len(cut)]
    wholes = [replace(pieces[at][0], end=pieces[at][-1].end, urls=(), bytes=0) for at in coarse]
    finer = dict(zip(coarse, _cut_all(client, options, wholes, [shares[at] for at in coarse]), strict=True))
    return [finer.get(at, cut) for at, cut in enumerate(pieces)]


@dataclass(slots=True)
class _Bin:
    ranges: list[OffsetRange] = field(default_factory=list)
    bytes: int = 0
    rows: int = 0

    def has_room(self, piece: OffsetRange, max_bytes: int, max_rows: int | None) -> bool:
        fits = max_rows is None or self.rows + piece.rows <= max_rows
        return not self.ranges or (fits and self.bytes + piece.bytes <= max_bytes)

    def add(self, piece: OffsetRange) -> None:
        self.ranges.append(piece)
        self.bytes += piece.bytes
        self.rows += piece.rows


def pack(pieces: Sequence[OffsetRange], options: SourceOptions, wanted: int) -> list[Task]:
    """At least `wanted` tasks if there are as many pieces, of about equal size. A task exceeds the limits only if a
    single piece does.
    """
    cutting = options.cutting
    bins = [_Bin() for _ in range(min(wanted, len(pieces)))]
    for piece in sorted(pieces, key=lambda one: -one.bytes):
        smallest = min(bins, key=lambda one: (one.bytes, len(one.ranges)))
        if not smallest.has_room(piece, cutting.max_bytes, cutting.max_rows):
            roomy = (one for one in bins if one.has_room(piece, cutting.max_bytes, cutting.max_rows))
            smallest = next(roomy, _Bin())
            if not smallest.ranges:
                bins.append(smallest)
        smallest.add(piece)
    return [Task(sorted(one.ranges, key=lambda piece: (piece.stream, piece.start))) for one in bins]
