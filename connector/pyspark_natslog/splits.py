"""What a task is told: one range of one stream, and all it needs to read it on its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from natslog.client import NatslogClient
from natslog.errors import OffsetOutOfRange
from pyspark_natslog.loss import Loss, report_loss
from pyspark_natslog.options import SourceOptions
from pyspark_natslog.schema import to_spark

logger = logging.getLogger("pyspark_natslog")

_WORTH_SPLITTING_ROWS = 64 * 1024


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
    splits = client.splits(
        stream,
        start,
        end,
        max_bytes=None if options.min_partitions else 64 * 1024 * 1024,
        max_rows=options.max_records_per_partition,
        min_splits=wanted,
    )
    return [OffsetRange(stream, stream_id, split.start, split.end, split.urls) for split in splits]


def read_range(options: SourceOptions, columns: Sequence[str], partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a task's range, as they come from the file. Runs on executors."""
    if not isinstance(partition, OffsetRange):
        return  # Spark makes one empty partition where a batch read has none
    client = options.client()
    narrowed = [name for name in columns if name != "stream"] if _is_narrow(columns) else None
    start = partition.start
    while start < partition.end:
        try:
            batches = client.read(
                partition.stream,
                start,
                partition.end,
                subject=options.subject_filter,
                columns=narrowed,
                prefer=partition.urls,
                expected_id=partition.stream_id,
            )
            for batch in batches:
                yield to_spark(batch, partition.stream, columns)
            return
        except OffsetOutOfRange as error:
            log_start = int(error.facts.get("log_start_offset", 0))
            reached = int(error.facts.get("offset", start))
            if not reached < log_start:
                raise
            lost_to = min(log_start, partition.end)
            report_loss(options, Loss(partition.stream, reached, lost_to, "retention removed these messages"))
            start = lost_to


def _is_narrow(columns: Sequence[str]) -> bool:
    """Whether leaving columns out at the broker saves more than sending whole batches as they lie in the file."""
    return "value" not in columns
