"""What a task is told: one range of one stream, and all it needs to read it on its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from natslog.client import NatslogClient
from natslog.errors import NatslogError, OffsetOutOfRange, StreamNotFound, StreamRecreated
from pyspark_natslog.loss import Loss, report_loss
from pyspark_natslog.payload.decoding import Shaper
from pyspark_natslog.source_options import SourceOptions

logger = logging.getLogger("pyspark_natslog")

_WORTH_SPLITTING_ROWS = 64 * 1024
_TASK_BYTES = 256 * 1024 * 1024  # about a second of work: a task costs some 50 ms before its first row


class OffsetRange(InputPartition):
    """Offsets `[start, end)` of the stream with this id; `urls` are the brokers that have it, nearest first."""

    def __init__(self, stream: str, stream_id: str, start: int, end: int, urls: Sequence[str]) -> None:
        super().__init__((stream, stream_id, start, end))
        self.stream = stream
        self.stream_id = stream_id
        self.start = start
        self.end = end
        self.urls = tuple(urls)


def plan_range(
    client: NatslogClient, options: SourceOptions, stream: str, stream_id: str, start: int, end: int, cores: int
) -> list[InputPartition]:
    """Ranges that cover `[start, end)` once, as many as the options ask for (by default the cores, if there is
    enough).
    """
    if start >= end:
        return []
    wanted = options.min_partitions or (cores if end - start >= _WORTH_SPLITTING_ROWS else 1)
    cut = partial(client.splits, stream, start, end, max_rows=options.max_records_per_partition)
    try:
        splits = cut(max_bytes=None if options.min_partitions else _TASK_BYTES, min_splits=wanted)
        if not options.min_partitions and len(splits) > cores and len(splits) % cores:
            splits = cut(min_splits=-(-len(splits) // cores) * cores)  # or the last round leaves cores idle
    except (OffsetOutOfRange, StreamNotFound) as error:
        start = behind_loss(client, options, stream, stream_id, start, end, error)
        return plan_range(client, options, stream, stream_id, start, end, cores)
    assert (splits[0].start, splits[-1].end) == (start, end), "splits cover the range"
    return [OffsetRange(stream, stream_id, split.start, split.end, split.urls) for split in splits]


def read_range(options: SourceOptions, columns: Sequence[str], partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a task's range, as they come from the file. Runs on executors."""
    if not isinstance(partition, OffsetRange):
        return  # Spark makes one empty partition where a batch read has none
    client = options.client()
    shaper = Shaper(options.payload, columns)
    start = partition.start
    while start < partition.end:
        try:
            batches = client.read(
                partition.stream,
                start,
                partition.end,
                subject=options.subject_filter,
                columns=shaper.stored_columns,
                prefer=partition.urls,
                expected_id=partition.stream_id,
            )
            for batch in batches:
                yield from shaper.shape(batch, partition.stream)
            return
        except (OffsetOutOfRange, StreamNotFound, StreamRecreated) as error:
            reached = int(error.facts.get("offset", start))
            start = behind_loss(client, options, partition.stream, partition.stream_id, reached, partition.end, error)


def behind_loss(
    client: NatslogClient,
    options: SourceOptions,
    stream: str,
    stream_id: str,
    start: int,
    end: int,
    error: NatslogError,
) -> int:
    """Where `[start, end)` can be read on, after what happened between planning and reading was reported as loss.

    Raises:
        DataLoss: with `failOnDataLoss`. The error itself, where nothing that is known explains it.
    """
    try:
        info = client.position(stream)
    except StreamNotFound:
        report_loss(options, Loss(stream, start, end, "the stream was deleted"))
        return end
    if info["id"] != stream_id:
        why = f"the stream was deleted and created again (id {info['id']}, not {stream_id})"
        report_loss(options, Loss(stream, start, end, why))
        return end
    log_start, high_watermark = int(info["log_start_offset"]), int(info["high_watermark"])
    if start < log_start:
        lost_to = min(log_start, end)
        report_loss(options, Loss(stream, start, lost_to, "retention removed these messages"))
        return lost_to
    if end > high_watermark:
        why = f"the log ends at {high_watermark}: it is shorter than it was"
        report_loss(options, Loss(stream, max(start, high_watermark), end, why))
        return end
    raise error
