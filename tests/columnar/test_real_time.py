"""Queries in real time (`.trigger(realTime=…)`), read from the tail of streams."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from nats.errors import NoRespondersError
from pyspark.sql import DataFrame, Row, SparkSession

from natslog.client import NatslogClient
from tests.harness import BrokerProcess, eventually, publish_acked, running, with_nats
from tests.spark.test_named_sources import SETTINGS

pytestmark = pytest.mark.timeout(180)
SHORT = "1 seconds"


@pytest.fixture(autouse=True)
def real_time(spark: SparkSession) -> Iterator[None]:
    """Batches of a second, and a sink in Python; all queries of a test are ended."""
    settings = {"minBatchDuration": "500ms", "allowlistCheck": "false"}
    for name, value in settings.items():
        spark.conf.set(f"spark.sql.streaming.realTimeMode.{name}", value)
    yield
    for query in spark.streams.active:
        query.stop()


@pytest.fixture
def stream(client: NatslogClient, name: str) -> str:
    client.create_stream(name, f"{name}.>")
    return name


class Query:
    """One that writes each row into a file, as a line of JSON."""

    def __init__(self, read: DataFrame, folder: Path, **trigger: Any) -> None:
        self._folder, self._file = folder, folder / uuid4().hex
        self._file.touch()
        writer = read.writeStream.foreach(_appending(str(self._file))).outputMode("update")
        self.running = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(**trigger).start()

    def all_rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file.read_text().splitlines()]

    def rows(self, column: str = "offset") -> list[Any]:
        return [row[column] for row in self.all_rows()]

    def until(self, count: int) -> list[Any]:
        """The offsets, when there are so many."""

        def found() -> list[Any] | None:
            rows = self.rows()
            assert self.running.isActive or len(rows) >= count, str(self.running.exception())[-3000:]
            return rows if len(rows) >= count else None

        rows: list[Any] = eventually(found, 60, f"{count} rows")
        return rows

    def stop(self) -> None:
        """Once the end of its last batch is in the checkpoint."""
        batch = self.running.lastProgress["batchId"] if self.running.lastProgress else -1
        eventually(lambda: (self.running.lastProgress or {"batchId": -1})["batchId"] > batch, 30, "a batch ends")
        self.running.stop()

    def position(self, stream: str) -> dict[str, Any]:
        """The newest one in the checkpoint."""
        files = sorted((self._folder / "checkpoint/offsets").glob("[0-9]*"), key=lambda path: int(path.name))
        position: dict[str, Any] = json.loads(files[-1].read_text().splitlines()[-1])[stream]
        return position


def _appending(file: str) -> Callable[[Row], None]:
    def plain(value: Any) -> Any:
        return value.timestamp() if hasattr(value, "timestamp") else value.decode()

    def append(row: Row) -> None:
        text = json.dumps(row.asDict(recursive=True), default=plain)
        with open(file, "a") as opened:  # one write: the test may read it at any time
            opened.write(text + "\n")

    return append


def read(spark: SparkSession, broker: BrokerProcess, stream: str, **options: Any) -> DataFrame:
    return spark.readStream.format("natslog").options(servers=broker.url, stream=stream, **options).load()


def values(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def texts(first: int, count: int) -> list[str]:
    return [value.decode() for value in values(first, count)]


def test_rows_are_handed_on_as_they_come(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, stream: str, folder: Path
) -> None:
    publish_acked(nats_url, f"{stream}.a", values(0, 100))
    reading = read(spark, broker, stream).selectExpr(
        "*", "cast(reflect('java.lang.System', 'currentTimeMillis') as long) / 1000 as taken"
    )
    query = Query(reading, folder, realTime="3 seconds")
    query.until(100)
    for number in range(100, 120):
        publish_acked(nats_url, f"{stream}.b", values(number, 1))
    assert query.until(120) == list(range(120)), "in order, each once"
    assert query.rows("value") == texts(0, 120)
    assert set(query.rows("stream")) == {stream}
    assert query.rows("subject") == [f"{stream}.a"] * 100 + [f"{stream}.b"] * 20
    waits = [row["taken"] - row["timestamp"] for row in query.all_rows()[100:]]
    assert sorted(waits)[10] < 1, "they are not kept until the batch ends"
    query.stop()
    assert query.position(stream)["offset"] == 120


def test_a_query_goes_on_from_its_checkpoint_in_either_mode(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, stream: str, folder: Path
) -> None:
    done = 0
    for turn, trigger in enumerate(({"realTime": SHORT}, {"availableNow": True}, {"realTime": SHORT}) * 2):
        publish_acked(nats_url, f"{stream}.a", values(done, 50))
        query = Query(read(spark, broker, stream), folder, **trigger)
        if "realTime" in trigger:
            query.until(50)
            publish_acked(nats_url, f"{stream}.a", values(done + 50, 5))
            assert query.until(55) == list(range(done, done + 55)), turn
            query.stop()
            done += 55
        else:
            assert query.running.awaitTermination(60)
            assert query.rows() == list(range(done, done + 50)), turn
            done += 50
        assert query.position(stream)["offset"] == done


def test_streams_are_read_by_a_task_each(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, client: NatslogClient, name: str, folder: Path
) -> None:
    names = [f"{name}-{number}" for number in range(2)]
    for one in names:
        client.create_stream(one, one)
        publish_acked(nats_url, one, values(0, 10))
    query = Query(read(spark, broker, ",".join(names)), folder, realTime=SHORT)
    query.until(20)
    for one in names:
        publish_acked(nats_url, one, values(10, 10))
    query.until(40)
    for one in names:
        assert [row["offset"] for row in query.all_rows() if row["stream"] == one] == list(range(20))
    query.stop()
    assert [query.position(one)["offset"] for one in names] == [20, 20]


def test_new_streams_of_a_pattern_are_read_from_the_next_batch_on(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, client: NatslogClient, name: str, folder: Path
) -> None:
    client.create_stream(f"{name}-a", f"{name}.a")
    publish_acked(nats_url, f"{name}.a", values(0, 5))
    reading = spark.readStream.format("natslog").options(servers=broker.url, streamPattern=f"{name}-*").load()
    query = Query(reading, folder, realTime=SHORT)
    query.until(5)
    client.create_stream(f"{name}-b", f"{name}.b")
    publish_acked(nats_url, f"{name}.b", values(0, 5))
    query.until(10)
    assert sorted(query.rows()) == sorted([*range(5)] * 2)


def test_offsets_without_messages_are_passed_over(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, client: NatslogClient, stream: str, folder: Path
) -> None:
    publish_acked(nats_url, f"{stream}.a", values(0, 10))
    for offset in (0, 4, 9):
        client.delete_message(stream, offset)
    query = Query(read(spark, broker, stream), folder, realTime=SHORT)
    assert query.until(7) == [1, 2, 3, 5, 6, 7, 8]
    query.stop()
    assert query.position(stream)["offset"] == 10


def test_chosen_columns_and_subjects(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, stream: str, folder: Path
) -> None:
    publish_acked(nats_url, f"{stream}.a", values(0, 3), headers={"k": "v"})
    publish_acked(nats_url, f"{stream}.b", values(3, 3), headers={"k": "v"})
    options = {"subjectFilter": f"{stream}.b", "columns": "headers,value,offset", "includeHeaders": "true"}
    query = Query(read(spark, broker, stream, **options), folder, realTime=SHORT)
    assert query.until(3) == [3, 4, 5]
    assert query.rows("value") == texts(3, 3)
    assert query.rows("headers") == [[{"key": "k", "value": "v"}]] * 3


def test_a_query_outlasts_a_broker_that_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    with running(tmp_path / "own") as (nats, broker):
        broker.client().create_stream("s", "s")
        stopping, acked = threading.Event(), []

        async def publish(connection: Any) -> None:
            while not stopping.is_set():
                with suppress(TimeoutError, NoRespondersError):
                    acked.append(await connection.request("s", b"%d" % len(acked), timeout=0.5))
                await asyncio.sleep(0.01)

        query = Query(read(spark, broker, "s", retryInterval="100ms"), tmp_path, realTime=SHORT)
        publisher = threading.Thread(target=with_nats, args=(nats.url, publish))
        publisher.start()
        for _ in range(2):
            query.until(len(acked) + 20)
            broker.kill()
            time.sleep(2)
            broker.start()
        stopping.set()
        publisher.join(10)
        end = broker.client().stream("s")["high_watermark"]
        assert query.until(end) == list(range(end)), "each once, in order"
        query.running.stop()


def loss_of(reading: DataFrame, folder: Path, lose: Callable[[], object]) -> tuple[Query, str]:
    """A query that is stopped while messages that it has not read are lost, and what it ends with afterwards."""
    first = Query(reading, folder, realTime=SHORT)
    first.until(5)
    first.stop()
    lose()
    second = Query(reading, folder, realTime=SHORT)
    if second.running.exception() is None:
        eventually(lambda: second.rows() or not second.running.isActive, 60)
    return second, str(second.running.exception())


def test_messages_that_were_removed_before_they_were_read_are_a_loss(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, client: NatslogClient, stream: str, folder: Path
) -> None:
    publish_acked(nats_url, f"{stream}.a", values(0, 5))

    def lose() -> None:
        publish_acked(nats_url, f"{stream}.a", values(5, 10))
        client.purge(stream, 8)

    _, why = loss_of(read(spark, broker, stream), folder, lose)
    assert "offsets 5 to 7 are lost" in why
    query = Query(read(spark, broker, stream, failOnDataLoss="false"), folder, realTime=SHORT)
    assert query.until(7) == list(range(8, 15))


@pytest.mark.parametrize(
    ("options", "why"),
    [({"maxOffsetsPerTrigger": "10"}, "in real time a batch ends by its time"), ({}, "tasks need as many cores")],
)
def test_what_cannot_be_run_in_real_time_is_refused(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, name: str, folder: Path, options: Any, why: str
) -> None:
    names = [f"{name}-{number}" for number in range(1 if options else 3)]  # Spark has two cores
    for one in names:
        client.create_stream(one, one)
    query = Query(read(spark, broker, ",".join(names), **options), folder, realTime=SHORT)
    eventually(lambda: not query.running.isActive, 60)
    assert why in str(query.running.exception())


def test_named_sources_are_added_and_removed(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, client: NatslogClient, name: str, folder: Path
) -> None:
    streams = {source: f"{name}-{source}" for source in ("a", "b", "c")}
    for stream in streams.values():
        client.create_stream(stream, stream)
    found: list[tuple[str, int]] = []

    def run(*sources: str, expected_rows: int) -> None:
        for stream in streams.values():
            publish_acked(nats_url, stream, values(0, 2))
        reads = [
            spark.readStream.format("natslog").name(source).options(servers=broker.url, stream=streams[source]).load()
            for source in sources
        ]
        query = Query(reads[0].union(reads[1]), folder, realTime=SHORT)
        query.until(expected_rows)
        query.stop()
        found.extend((row["stream"], row["offset"]) for row in query.all_rows())

    for setting, value in SETTINGS.items():
        spark.conf.set(setting, value)
    try:
        run("a", "b", expected_rows=4)
        run("b", "c", expected_rows=6)  # two of b, and all of c
        run("a", "c", expected_rows=6)  # a goes on where it was: four of a, two of c
    finally:
        for setting in SETTINGS:
            spark.conf.unset(setting)
    expected = {"a": 6, "b": 4, "c": 6}
    assert sorted(found) == [(streams[one], offset) for one, count in expected.items() for offset in range(count)]
