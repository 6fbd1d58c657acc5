"""The streaming reader against a real broker, called as Spark calls it: outages, loss, streams that change."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from natslog.client import NatslogClient
from natslog.errors import BrokerUnavailable, DataLoss
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.schema import spark_schema
from pyspark_natslog.source.splits import OffsetRange, Task
from pyspark_natslog.source.stream_reader import StreamReader
from tests.harness import BrokerProcess, publish_acked, running


def reader_of(url: str, stream: str, **options: Any) -> StreamReader:
    parsed = SourceOptions.parse({"servers": url, "stream": stream} | options, streaming=True)
    return StreamReader(parsed, spark_schema(parsed.selected_columns()))


def position(client: NatslogClient, stream: str, offset: int) -> dict[str, Any]:
    return {stream: {"id": client.stream(stream)["id"], "offset": offset}}


def moved(client: NatslogClient, stream: str, offset: int) -> dict[str, Any]:
    """A position that was reached: with the epoch of the leader that stated it, if there may be older ones."""
    epoch = client.stream(stream)["leader_epoch"]
    return {stream: position(client, stream, offset)[stream] | ({"epoch": epoch} if epoch > 1 else {})}


def offsets_read(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    read = [row for part in reader.partitions(start, end) for batch in reader.read(part) for row in batch.to_pylist()]
    return sorted(row["offset"] for row in read)


@pytest.fixture
def stream(client: NatslogClient, nats_url: str, name: str) -> str:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"%d" % at for at in range(100)])
    return name


@pytest.mark.long
def test_limit_and_all_available(broker: BrokerProcess, client: NatslogClient, stream: str) -> None:
    reader = reader_of(broker.url, stream, maxOffsetsPerTrigger="30")
    start = reader.initialOffset()
    assert start == position(client, stream, 0)
    assert reader.latestOffset(start, reader.getDefaultReadLimit()) == moved(client, stream, 30)
    assert reader.latestOffset(start, ReadAllAvailable()) == moved(client, stream, 100)
    end = position(client, stream, 100)
    assert reader.latestOffset(end, ReadMaxRows(30)) == end
    assert offsets_read(reader, position(client, stream, 7), position(client, stream, 93)) == list(range(7, 93))
    assert reader.partitions(end, end) == []


def test_outage_returns_the_same_position_and_ends_no_query(
    broker: BrokerProcess, client: NatslogClient, stream: str
) -> None:
    reader = reader_of(broker.url, stream)
    start = reader.initialOffset()
    away = reader_of("http://127.0.0.1:1", stream, fetchTimeout="200ms", fetchRetries="0")
    assert away.latestOffset(start, ReadAllAvailable()) == start


@pytest.mark.long
def test_available_now_waits_for_a_broker_and_then_fails_rather_than_ends(tmp_path: Path) -> None:
    """The same position again would tell Spark that the run is done."""
    with running(tmp_path / "own") as (server, broker):
        broker.client().create_stream("orders", "orders")
        publish_acked(server.url, "orders", [b"x"] * 10)
        reader = reader_of(broker.url, "orders", fetchTimeout="10s", fetchRetries="0")  # as long as a start may take
        impatient = reader_of(broker.url, "orders", fetchTimeout="1s", fetchRetries="0")
        start = reader.initialOffset()
        for one in (reader, impatient):
            one.prepareForTriggerAvailableNow()
        broker.kill()
        back = threading.Timer(1.5, broker.start)
        back.start()
        assert reader.latestOffset(start, ReadAllAvailable())["orders"]["offset"] == 10
        back.join()
        broker.kill()
        started = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            impatient.latestOffset(start, ReadAllAvailable())
        assert time.monotonic() - started > 3


@pytest.mark.parametrize("available_now", [False, pytest.param(True, marks=pytest.mark.long)])
def test_log_shorter_than_the_checkpoint_is_loss(
    broker: BrokerProcess, client: NatslogClient, stream: str, available_now: bool
) -> None:
    beyond = position(client, stream, 500)
    strict, lenient = reader_of(broker.url, stream), reader_of(broker.url, stream, failOnDataLoss="false")
    for reader in (strict, lenient):
        if available_now:
            reader.prepareForTriggerAvailableNow()
    with pytest.raises(DataLoss, match="offsets 100 to 499 are lost.*shorter"):
        strict.latestOffset(beyond, ReadAllAvailable())
    assert lenient.latestOffset(beyond, ReadAllAvailable()) == position(client, stream, 100), "it goes on at the end"
    assert lenient.partitions(beyond, position(client, stream, 100)) == []


@pytest.mark.long
def test_deleted_stream_names_the_position(broker: BrokerProcess, client: NatslogClient, stream: str) -> None:
    reader = reader_of(broker.url, stream)
    at = position(client, stream, 77)
    client.delete_stream(stream)
    with pytest.raises(DataLoss, match="offsets 77 and later are lost: the stream was deleted"):
        reader.latestOffset(at, ReadAllAvailable())


@pytest.mark.long
def test_stream_recreated_between_plan_and_read_is_loss_or_skipped(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str
) -> None:
    strict, lenient = reader_of(broker.url, stream), reader_of(broker.url, stream, failOnDataLoss="false")
    (part,) = strict.partitions(position(client, stream, 0), position(client, stream, 100))
    assert isinstance(part, Task)
    client.delete_stream(stream)
    with pytest.raises(DataLoss, match="the stream was deleted"):
        list(strict.read(part))
    client.create_stream(stream, stream)
    publish_acked(nats_url, stream, [b"new"] * 5)
    with pytest.raises(DataLoss, match="deleted and created again"):
        list(strict.read(part))
    assert list(lenient.read(part)) == []


@pytest.mark.long
def test_offsets_that_the_log_no_longer_has_between_plan_and_read_are_loss(
    broker: BrokerProcess, client: NatslogClient, stream: str
) -> None:
    stream_id = client.stream(stream)["id"]
    part = Task([OffsetRange(stream, stream_id, 90, 120, (broker.url,))])
    with pytest.raises(DataLoss, match="offsets 100 to 119 are lost.*shorter"):
        list(reader_of(broker.url, stream).read(part))
    lenient = reader_of(broker.url, stream, failOnDataLoss="false")
    assert sum(batch.num_rows for batch in lenient.read(part)) == 10


def test_stream_added_to_the_options_starts_at_its_start(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, stream: str
) -> None:
    client.create_stream(f"{stream}-b", f"{stream}.b")
    publish_acked(nats_url, f"{stream}.b", [b"x"] * 3)
    old = position(client, stream, 100)
    reader = reader_of(broker.url, f"{stream},{stream}-b")
    end = reader.latestOffset(old, ReadAllAvailable())
    joined = moved(client, f"{stream}-b", 3)[f"{stream}-b"] | {"start": 0}
    assert end == old | {f"{stream}-b": joined}
    assert offsets_read(reader, old, end) == [0, 1, 2]
