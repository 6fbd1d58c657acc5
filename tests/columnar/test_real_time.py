"""Queries in real time (`.trigger(realTime=…)`), read from the tail of streams."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psutil
import pyarrow as pa
import pytest
from nats.errors import NoRespondersError
from pyspark.sql import DataFrame, Row, SparkSession

from natslog.arrow import ipc
from natslog.arrow.projection import encode_rows, schema_of
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.client import NatslogClient
from pyspark_natslog.jar import jar_path
from tests.columnar.test_hostile import STREAM, Server
from tests.columnar.test_switching import PROGRAM
from tests.harness import BrokerProcess, eventually, publish_acked, running, with_nats
from tests.integration.test_tail import rows_of, tail_of
from tests.spark.test_named_sources import SETTINGS

pytestmark = pytest.mark.timeout(180)
SHORT = "1 seconds"


@contextmanager
def short_batches(spark: SparkSession) -> Iterator[None]:
    """Batches of a second, and a sink in Python, are permitted; all queries are ended."""
    settings = {"minBatchDuration": "500ms", "allowlistCheck": "false"}
    for name, value in settings.items():
        spark.conf.set(f"spark.sql.streaming.realTimeMode.{name}", value)
    yield
    for query in spark.streams.active:
        query.stop()


@pytest.fixture(autouse=True)
def real_time(spark: SparkSession) -> Iterator[None]:
    with short_batches(spark):
        yield


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


@pytest.mark.parametrize("by", ["subject", "key"])
def test_readers_that_share_a_stream_end_exactly_and_others_go_on(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, client: NatslogClient, name: str, folder: Path, by: str
) -> None:
    """Each turn goes on behind readers that were stopped at different places, with another number of them, or as
    micro-batches: each row is read once, and in the order of its subject, or key.
    """
    client.create_stream(name, f"{name}.>")
    rows: list[dict[str, Any]] = []
    published = 0
    for readers in (2, 1, 2, 0, 2, 2):
        for _ in range(10):
            number = published % 7
            subject = f"{name}.{number if by == 'subject' else 0}"
            publish_acked(nats_url, subject, values(published, 20), headers={"Natslog-Key": f"k{number}"})
            published += 20
        trigger = {"realTime": SHORT} if readers else {"availableNow": True}
        options = {"realTimeReaders": str(readers), "realTimeReadersBy": by} if readers else {}
        query = Query(read(spark, broker, name, **options), folder, **trigger)
        if readers:
            query.until(published - len(rows))
            query.stop()
        else:
            assert query.running.awaitTermination(60)
        rows += query.all_rows()
        assert sorted(row["offset"] for row in rows) == list(range(published)), readers
    for _, group in groupby(sorted(rows, key=itemgetter("key")), itemgetter("key")):
        offsets = [row["offset"] for row in group]
        assert offsets == sorted(offsets)


def test_a_position_of_several_readers_is_gone_on_from_exactly(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, stream: str, folder: Path
) -> None:
    """The readers of a batch ended at different offsets; the checkpoint is written by hand."""
    for number in range(30):
        publish_acked(nats_url, f"{stream}.{number % 5}", values(number, 1))
    query = Query(read(spark, broker, stream, realTimeReaders="2"), folder, realTime=SHORT)
    query.until(30)
    query.stop()
    share_of = shares(broker, stream)
    ends = (4, 21)
    expected = [offset for offset in range(30) if offset >= ends[share_of[offset]]]
    newest = max((folder / "checkpoint/offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    *head, last = newest.read_text().splitlines()
    position = json.loads(last)
    position[stream] |= {"offset": min(ends), "passed": [{"by": "subject", "ends": ends}]}
    for number, (trigger, options) in enumerate(
        (({"realTime": SHORT}, {"realTimeReaders": "2"}), ({"realTime": SHORT}, {}), ({"availableNow": True}, {}))
    ):
        copy = folder / str(number)
        shutil.copytree(folder / "checkpoint", copy / "checkpoint")
        place = copy / "checkpoint/offsets" / newest.name
        place.write_text("\n".join([*head, json.dumps(position)]))
        place.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
        query = Query(read(spark, broker, stream, **options), copy, **trigger)
        assert sorted(query.until(len(expected))) == expected
        if "realTime" in trigger:
            query.stop()
        else:
            assert query.running.awaitTermination(60)
        assert query.position(stream) == {"id": position[stream]["id"], "offset": 30}


def shares(broker: BrokerProcess, stream: str) -> list[int]:
    """Of which of two shares each of the first 30 messages is."""
    found = {}
    for share in range(2):
        with tail_of(broker, stream, 0, share=f"subject:{share}/2", columns="offset") as tail:
            found |= dict.fromkeys(rows_of(tail.until(30), "offset"), share)
    assert len(set(found.values())) == 2, "both have rows"
    return [found[offset] for offset in range(30)]


def test_drivers_that_are_killed_lose_no_row(broker: BrokerProcess, nats_url: str, stream: str, folder: Path) -> None:
    """At any moment, also between the end of a batch and its mark in the checkpoint, with two readers and with one."""
    published = 0
    for turn in range(6):
        arguments = ["follow", broker.url, stream, str(folder), str(turn % 2 + 1)]
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "JAR": str(jar_path())}
        driver = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            env=environment,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            for number in range(20):
                publish_acked(nats_url, f"{stream}.{number % 5}", values(published, 10))
                published += 10
            rows = set(range(published))
            eventually(lambda rows=rows: found_in(folder) >= rows, 90, f"turn {turn}: every row", every_s=0.1)
            time.sleep(0.1 * turn)
            publish_acked(nats_url, f"{stream}.5", values(published, 10))
            published += 10
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait(30)


def found_in(folder: Path) -> set[int]:
    file = folder / "offsets"
    return {int(line) for line in file.read_text().splitlines() if line} if file.exists() else set()


@pytest.mark.parametrize("trigger", [{"realTime": SHORT}, {"availableNow": True}], ids=str)
def test_a_batch_whose_mark_is_missing_is_repeated(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, stream: str, folder: Path, trigger: dict[str, Any]
) -> None:
    """The driver ended after the positions of a batch were stored, and before the batch was marked as complete."""
    publish_acked(nats_url, f"{stream}.a", values(0, 10))
    query = Query(read(spark, broker, stream), folder, realTime=SHORT)
    query.until(10)
    query.stop()
    marks = sorted((folder / "checkpoint/commits").glob("[0-9]*"), key=lambda path: int(path.name))
    marks[-1].unlink()
    marks[-1].with_name(f".{marks[-1].name}.crc").unlink()
    publish_acked(nats_url, f"{stream}.a", values(10, 10))
    query = Query(read(spark, broker, stream), folder, **trigger)
    eventually(lambda: [offset for offset in query.rows() if offset >= 10] == list(range(10, 20)), 60, "the new rows")
    query.stop() if "realTime" in trigger else query.running.awaitTermination(60)
    assert query.position(stream)["offset"] == 20


def test_connections_of_batches_that_have_ended_are_closed(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, stream: str, folder: Path
) -> None:
    publish_acked(nats_url, f"{stream}.a", values(0, 1))
    query = Query(read(spark, broker, stream), folder, realTime=SHORT)
    query.until(1)

    def connected() -> int:
        port = urlsplit(broker.url).port
        jvm: Any = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
        found = psutil.Process(int(jvm.pid)).net_connections("tcp")
        return sum(one.raddr.port == port for one in found if one.raddr and one.status == psutil.CONN_ESTABLISHED)

    before = connected()
    batch = query.running.lastProgress["batchId"] if query.running.lastProgress else 0
    eventually(lambda: query.running.lastProgress["batchId"] >= batch + 5, 60, "five batches")
    assert connected() <= before + 1


def test_a_stream_that_is_deleted_does_not_end_the_query_of_others(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, client: NatslogClient, name: str, folder: Path
) -> None:
    for one in ("a", "b"):
        client.create_stream(f"{name}-{one}", f"{name}.{one}")
        publish_acked(nats_url, f"{name}.{one}", values(0, 5))
    options = {"servers": broker.url, "streamPattern": f"{name}-*", "failOnDataLoss": "false"}
    query = Query(spark.readStream.format("natslog").options(**options).load(), folder, realTime="5 seconds")
    query.until(10)
    client.delete_stream(f"{name}-a")
    for number in range(5, 15):
        publish_acked(nats_url, f"{name}.b", values(number, 1))
        time.sleep(0.2)
    assert sorted(query.until(20)) == sorted([*range(5), *range(15)])
    assert query.running.isActive


# ---- servers that answer as no broker does ----


@pytest.fixture
def hostile() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def query_of(spark: SparkSession, hostile: Server, folder: Path) -> Query:
    options = {"servers": hostile.url, "stream": STREAM, "retryInterval": "10ms", "fetchRetries": "2", "lag": "false"}
    return Query(spark.readStream.format("natslog").options(**options).load(), folder, realTime="5 seconds")


def tail_message(start: int, end: int) -> bytes:
    rows = pa.RecordBatch.from_pylist(
        [
            {"offset": at, "timestamp": at, "subject": "s", "key": None, "headers": None, "value": b""}
            for at in range(start, end)
        ],
        schema=MESSAGE_SCHEMA,
    )
    columns = ["offset", "timestamp", "subject", "key", "value"]  # as the query asks for them
    return ipc.schema_message(schema_of(columns)) + bytes(encode_rows(rows.select(columns), start, end))


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        (tail_message(1, 3), "the response goes on at offset 1, not 0"),
        (tail_message(0, 3)[:-1] + b"?", "has a wrong CRC32C"),
        (b"no Arrow, and long enough for a prefix", "is not an Arrow IPC message"),
    ],
    ids=["gap", "CRC", "bytes"],
)
def test_tails_that_are_damaged_each_time_end_the_query(
    spark: SparkSession, hostile: Server, folder: Path, tail: bytes, why: str
) -> None:
    hostile.tails = lambda: iter([tail])
    query = query_of(spark, hostile, folder)
    eventually(lambda: not query.running.isActive, 60)
    assert why in str(query.running.exception())
    assert query.rows() == []


def test_brokers_that_have_no_tails_are_named(spark: SparkSession, hostile: Server, folder: Path) -> None:
    hostile.tails = lambda: iter([b'{"error": {"code": "not_found", "message": "no such path", "retriable": false}}'])
    hostile.status_of_tails = 404
    query = query_of(spark, hostile, folder)
    eventually(lambda: not query.running.isActive, 60)
    assert "the brokers do not serve tails of streams" in str(query.running.exception())


def test_a_tail_on_which_nothing_comes_is_requested_again(spark: SparkSession, hostile: Server, folder: Path) -> None:
    stopping, asked = threading.Event(), []

    def silent() -> Iterator[bytes]:
        asked.append(time.monotonic())
        yield tail_message(0, 3) if len(asked) == 1 else b""
        stopping.wait(30)

    hostile.tails = silent
    options = {"servers": hostile.url, "stream": STREAM, "lag": "false"}
    query = Query(spark.readStream.format("natslog").options(**options).load(), folder, realTime="30 seconds")
    try:
        assert query_rows_are_kept(query, asked)
    finally:
        stopping.set()


def query_rows_are_kept(query: Query, asked: list[float]) -> bool:
    """The second request comes after the broker was silent for 5 s, in the same batch, and not much earlier."""
    eventually(lambda: len(asked) >= 2, 25, "the tail is requested again", is_promise=True)
    return asked[1] - asked[0] > 4 and query.running.isActive
