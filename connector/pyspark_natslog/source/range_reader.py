"""Runs in a task on an executor: reads the rows of its ranges."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from natslog.client import NatslogClient, leader_epochs
from natslog.client.confirming import OutdatedAnswers
from natslog.errors import CorruptLog, OffsetOutOfRange, StreamNotFound, StreamRecreated
from natslog.tracing import Span
from pyspark_natslog.payload.decoding import Shaper
from pyspark_natslog.source.joining import joined
from pyspark_natslog.source.loss import left_of
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.spans import range_span
from pyspark_natslog.source.splits import OffsetRange, Task
from pyspark_natslog.spans import task_ended


def read_task(options: SourceOptions, columns: Sequence[str], partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """All rows of a task's ranges.

    Raises:
        DataLoss: a part of them is missing, with `failOnDataLoss`.
    """
    if not isinstance(partition, Task):
        return  # Spark makes one empty partition if a batch read has none
    try:
        with options.client() as client:
            for one in partition.ranges:
                with range_span(partition, one) as span:
                    yield from _read_range(client, options, columns, one, span)
    finally:
        task_ended()
        _leave_modules_out_of_collections()


@cache
def _leave_modules_out_of_collections() -> None:
    """Once for each process, when everything is imported. PySpark collects garbage after each task of a worker that it
    uses again, which took 45 ms for the objects of imported modules: as long as reading 200,000 rows. Garbage in cycles
    that exists at this moment stays.
    """
    gc.freeze()


def _read_range(
    client: NatslogClient, options: SourceOptions, columns: Sequence[str], part: OffsetRange, span: Span
) -> Iterator[pa.RecordBatch]:
    shaper = Shaper(options.payload, columns, options.bucket, headers_as_map=options.headers_as_map)
    asked_columns = None if shaper.is_payload_needed else shaper.needed_columns
    start, end, outdated = part.start, part.end, OutdatedAnswers()
    leader_epochs.note(part.stream_id, part.leader_epoch)
    while start < end:
        try:
            answers = client.answers(
                part.stream,
                start,
                end,
                subject=options.subject_filter,
                columns=asked_columns,
                prefer=part.urls,
                expected_id=part.stream_id,
                as_of=part.as_of,
                passed=part.passed or None,
                is_open=part.is_open,
            )
            for fetched in span.steps(answers):
                for batch in joined(fetched.batches):
                    yield from shaper.shape(batch, part.stream)
                start = fetched.next_offset
                if asked_columns is None and any(map(shaper.needs_little_of, fetched.batches)):
                    asked_columns = shaper.needed_columns
                    break
        except (OffsetOutOfRange, StreamNotFound, StreamRecreated, CorruptLog) as error:
            left = left_of(client, options, part.stream, part.stream_id, start, end, error)
            if left == (start, end):
                outdated.one_more(error)
            start, end = left
