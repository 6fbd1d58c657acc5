"""From ranges of streams to tasks: cut on batch boundaries by bytes, rows and count, evened out, and packed.

Brokers divide a range, because they store the batches. A large range is divided into parts by its share of all ranges
of the read, so that one huge stream among small ones uses all cores. Small ranges share a task, because a task takes
some 50 ms before its first row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from pyspark.sql.datasource import InputPartition

from natslog.client import NatslogClient, leader_epochs
from natslog.errors import OffsetOutOfRange, StreamNotFound
from natslog.model import Split
from pyspark_natslog.source.confirming import OutdatedAnswers
from pyspark_natslog.source.loss import left_of
from pyspark_natslog.source.options import SourceOptions

_WORTH_SPLITTING_ROWS = 64 * 1024
_WORTH_SPLITTING_BYTES = 8 * 1024 * 1024
_ASKED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets `[start, end)` of the stream with this id; `urls` are the brokers that have it, nearest first.

    `leader_epoch`: the newest one known when it was planned, so that a task accepts no answer of an older leader.
    """

    stream: str
    stream_id: str
    start: int
    end: int
    urls: tuple[str, ...] = ()
    bytes: int = 0
    leader_epoch: int = 0

    @property
    def rows(self) -> int:
        return self.end - self.start


class Task(InputPartition):
    """What one task reads, with all facts that it needs."""

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        super().__init__(tuple((one.stream, one.start, one.end) for one in ranges))
        self.ranges = tuple(ranges)


def plan_tasks(
    client: NatslogClient, options: SourceOptions, ranges: Sequence[OffsetRange], cores: int
) -> list[InputPartition]:
    """Tasks that cover each range once.

    Raises:
        DataLoss: a part of a range is missing, with `failOnDataLoss`.
    """
    ranges = [one for one in ranges if one.rows > 0]
    if not ranges:
        return []
    with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(ranges))) as pool:
        pieces = list(pool.map(partial(_cut, client, options), ranges))
        wanted = _wanted(options, pieces, cores)
        pieces = list(pool.map(partial(_cut_finer, client, options, _shares(pieces, wanted)), ranges, pieces))
    return pack([piece for cut in pieces for piece in cut], options, wanted)


Numbered = tuple[tuple[int, int], ...]
"""Of one range: (number of the task, exclusive end of what it reads), ends rising."""


def numbers_of(tasks: Sequence[InputPartition]) -> dict[str, Numbered]:
    """How the tasks share each stream's range; empty if one task reads everything."""
    shares: dict[str, list[tuple[int, int]]] = {}
    for number, task in enumerate(tasks if len(tasks) > 1 else []):
        assert isinstance(task, Task), "planned here"
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
) -> list[InputPartition]:
    """The tasks as of the batch's first plan: each has the same rows in the same order, without rows that were lost
    since.

    Raises:
        DataLoss: as `plan_tasks`.
    """
    count = 1 + max((number for share in numbered.values() for number, _ in share), default=0)
    held: list[list[OffsetRange]] = [[] for _ in range(count)]
    for whole in ranges:
        share = numbered.get(whole.stream) or ((0, whole.end),)
        for piece in _cut(client, options, whole, min_splits=len(share)):
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
            left = left_of(client, options, whole.stream, whole.stream_id, start, end, error)
            if left == (start, end):
                outdated.one_more(error)
            start, end = left
            continue
        assert (splits[0].start, splits[-1].end) == (start, end), "splits cover the range"
        epoch = leader_epochs.highest(whole.stream_id)
        return [_range(whole, split, epoch) for split in splits]
    return []


def _range(whole: OffsetRange, split: Split, epoch: int) -> OffsetRange:
    return OffsetRange(whole.stream, whole.stream_id, split.start, split.end, split.urls, split.bytes, epoch)


def _wanted(options: SourceOptions, pieces: Sequence[Sequence[OffsetRange]], cores: int) -> int:
    """How many tasks there should be, if there are rows for each."""
    if options.cutting.min_tasks is not None:
        return options.cutting.min_tasks
    rows = sum(piece.rows for cut in pieces for piece in cut)
    if rows < _WORTH_SPLITTING_ROWS and _bytes_of(pieces) < _WORTH_SPLITTING_BYTES:
        return 1
    rounds = -(-_full_tasks(options, pieces) // cores)
    return max(1, rounds) * cores  # otherwise the last round would leave cores idle


def _full_tasks(options: SourceOptions, pieces: Sequence[Sequence[OffsetRange]]) -> int:
    return -(-_bytes_of(pieces) // options.cutting.max_bytes)


def _bytes_of(pieces: Sequence[Sequence[OffsetRange]]) -> int:
    return sum(piece.bytes for cut in pieces for piece in cut)


def _shares(pieces: Sequence[Sequence[OffsetRange]], wanted: int) -> Callable[[Sequence[OffsetRange]], int]:
    """The number of parts for each range, so that all parts are about equal."""
    total_bytes = max(1, _bytes_of(pieces))
    return lambda cut: -(-wanted * sum(piece.bytes for piece in cut) // total_bytes)


def _cut_finer(
    client: NatslogClient,
    options: SourceOptions,
    share: Callable[[Sequence[OffsetRange]], int],
    whole: OffsetRange,
    cut: list[OffsetRange],
) -> list[OffsetRange]:
    if not cut or share(cut) <= len(cut):
        return cut
    rest = OffsetRange(whole.stream, whole.stream_id, cut[0].start, cut[-1].end)
    return _cut(client, options, rest, min_splits=share(cut))


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


def pack(pieces: Sequence[OffsetRange], options: SourceOptions, wanted: int) -> list[InputPartition]:
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
