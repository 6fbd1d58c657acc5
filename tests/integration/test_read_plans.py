"""Reads are planned by the rows that exist: removed messages cost no batch and no task."""

from __future__ import annotations

from typing import Any

import pytest

from natslog.client import NatslogClient
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.reader import BatchReader
from pyspark_natslog.source.schema import spark_schema
from pyspark_natslog.source.stream_reader import StreamReader
from tests.harness import BrokerProcess, publish_acked


def reader_of(url: str, stream: str, **options: Any) -> StreamReader:
    parsed = SourceOptions.parse({"servers": url, "stream": stream} | options, streaming=True)
    return StreamReader(parsed, spark_schema(parsed.selected_columns()))


def offsets_of(reader: Any, tasks: Any) -> list[int]:
    return sorted(row["offset"] for task in tasks for batch in reader.read(task) for row in batch.to_pylist())


def sparse(client: NatslogClient, nats_url: str, name: str, rows: int, updates: int) -> list[int]:
    """A stream of `rows` subjects with one message each, the last of which was replaced. Returns its offsets."""
    client.create_stream(name, f"{name}.>", max_messages_per_subject=1)
    for at in range(rows - 1):
        publish_acked(nats_url, f"{name}.pinned-{at}", [b"x"])
    publish_acked(nats_url, f"{name}.hot", [b"x"] * updates)
    return [*range(rows - 1), rows - 2 + updates]


def test_a_limit_of_a_trigger_counts_rows_that_exist(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    left = sparse(client, nats_url, name, rows=2, updates=1_000)
    reader = reader_of(broker.url, name, maxOffsetsPerTrigger="10")
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert offsets_of(reader, reader.partitions(start, end)) == left
    assert end[name]["offset"] == 1_001, "one batch has both rows, and the gap"
    assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end


def test_a_limit_of_a_task_counts_rows_that_exist(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    left = sparse(client, nats_url, name, rows=11, updates=6_000)
    for limit, most in (("100", 1), ("4", 4)):
        options = {"servers": broker.url, "stream": name, "maxRecordsPerPartition": limit}
        parsed = SourceOptions.parse(options, streaming=False)
        reader = BatchReader(parsed, spark_schema(parsed.selected_columns()))
        tasks = reader.partitions()
        assert offsets_of(reader, tasks) == left
        assert len(tasks) <= most
        assert max(len(offsets_of(reader, [task])) for task in tasks) <= int(limit)


@pytest.mark.parametrize("limit", [{"maxOffsetsPerTrigger": "3"}, {"maxBytesPerTrigger": "1"}])
def test_every_batch_of_a_limited_query_has_rows(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, limit: dict[str, str]
) -> None:
    left = sparse(client, nats_url, name, rows=7, updates=500)
    reader = reader_of(broker.url, name, **limit)
    at, found = reader.initialOffset(), list[int]()
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        rows = offsets_of(reader, reader.partitions(at, end))
        assert 1 <= len(rows) <= 3
        at, found = end, found + rows
    assert found == left
    assert at[name]["offset"] == left[-1] + 1
