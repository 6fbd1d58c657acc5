"""Rows that are appended exactly once in real time, by the offsets of the source rows which they come from."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import nats
import pytest
from nats.errors import NoRespondersError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from natslog.client import NatslogClient
from pyspark_natslog.jar import jar_path
from pyspark_natslog.real_time import real_time_writer
from tests.columnar.test_real_time_sink import Writing, by_format, numbers
from tests.columnar.test_switching import PROGRAM
from tests.harness import BrokerProcess, all_values, eventually, publish_acked, running

pytestmark = pytest.mark.timeout(180)

KILLS = int(os.environ.get("KILLS", "4"))
Plan = Callable[[DataFrame], DataFrame]
Starting = Callable[..., Any]


@pytest.fixture
def out(client: NatslogClient, name: str) -> str:
    client.create_stream(name, f"{name}.>")
    client.create_stream(f"{name}-out", f"out.{name}")
    return f"{name}-out"


@pytest.fixture(autouse=True)
def short_batches(spark: SparkSession) -> Iterator[None]:
    spark.conf.set("spark.sql.streaming.realTimeMode.minBatchDuration", "500ms")
    spark.conf.set("spark.sql.streaming.realTimeMode.allowlistCheck", "false")
    yield
    for query in spark.streams.active:
        query.stop()


@pytest.fixture
def started(spark: SparkSession, broker: BrokerProcess, name: str, out: str, folder: Path) -> Starting:
    """Starts a query from the stream to the other one, on the same checkpoint each time."""

    def start(
        duration: str, plan: Plan = lambda rows: rows, *, writing: Writing = by_format, readers: int = 1, **trigger: Any
    ) -> Any:
        read = spark.readStream.format("natslog").options(servers=broker.url, stream=name, realTimeReaders=readers)
        writer = writing(plan(read.load()), servers=broker.url, stream=out, exactlyOnce="true", subject=f"out.{name}")
        writer = writer.outputMode("update").option("checkpointLocation", str(folder / "checkpoint"))
        return writer.trigger(**(trigger or {"realTime": duration})).start()

    return start


def stored(client: NatslogClient, out: str, query: Any, count: int) -> list[bytes]:
    """The values in the target once there are so many."""
    eventually(lambda: len(all_values(client, out)) >= count or not query.isActive, 60, f"{count} rows in {out}")
    assert query.exception() is None, query.exception()
    return all_values(client, out)


@pytest.mark.parametrize("writing", [by_format, real_time_writer])
def test_rows_of_a_batch_that_did_not_end_are_stored_once(
    started: Starting, client: NatslogClient, nats_url: str, name: str, out: str, writing: Writing
) -> None:
    """Also where the message ids of the target would be forgotten."""
    client.edit_stream(out, dedupe_window="1ms")
    for round_ in range(3):
        publish_acked(nats_url, f"{name}.a", numbers(10 * round_, 10))
        query = started("1 hour", writing=writing)
        assert stored(client, out, query, 10 * round_ + 10) == numbers(0, 10 * round_ + 10)
        query.stop()
        assert query.lastProgress is None, "no batch has ended"
    query = started("1 seconds", writing=writing)
    eventually(lambda: query.lastProgress is not None or not query.isActive, 60)
    publish_acked(nats_url, f"{name}.a", numbers(30, 5))
    assert stored(client, out, query, 35) == numbers(0, 35)


def test_rows_are_stored_with_key_headers_and_tombstones(
    started: Starting, client: NatslogClient, nats_url: str, name: str, out: str
) -> None:
    def plan(rows: DataFrame) -> DataFrame:
        headers = F.when(F.col("offset") != 1, F.create_map(F.lit("Offset"), F.col("offset").cast("string")))
        value = F.when(F.col("offset") != 3, F.col("value"))
        key = F.when(F.col("offset") != 2, F.concat(F.lit("k"), F.col("offset")))
        return rows.select("stream", "offset", value.alias("value"), key.alias("key"), headers.alias("headers"))

    def with_tombstones(rows: DataFrame, **options: str) -> Any:
        return by_format(rows, **options, tombstones="true")

    publish_acked(nats_url, f"{name}.a", numbers(0, 4))
    query = started("1 hour", plan, writing=with_tombstones)
    stored(client, out, query, 4)
    found = [
        (row["key"], row["value"], row["headers"])
        for row in (row for batch in client.read(out) for row in batch.to_pylist())
    ]
    marked = [{"key": "Offset", "value": "3"}, {"key": "Natslog-Tombstone", "value": "true"}]
    assert found == [
        (b"k0", b"0", [{"key": "Offset", "value": "0"}]),
        (b"k1", b"1", None),
        (None, b"2", [{"key": "Offset", "value": "2"}]),
        (b"k3", b"", marked),
    ]


def test_filters_and_rows_that_become_several_are_stored_once(
    started: Starting, client: NatslogClient, nats_url: str, name: str, out: str
) -> None:
    """A query that is changed computes only what was not stored yet."""

    def thrice(rows: DataFrame) -> DataFrame:
        kept = rows.where("cast(cast(value as string) as int) % 2 = 0")
        return kept.select("stream", "offset", F.explode(F.array(*[F.col("value")] * 3)).alias("value"))

    publish_acked(nats_url, f"{name}.a", numbers(0, 10))
    query = started("1 hour", thrice)
    expected = [number for number in numbers(0, 10) if int(number) % 2 == 0 for _ in range(3)]
    assert stored(client, out, query, 15) == expected
    query.stop()
    publish_acked(nats_url, f"{name}.a", numbers(10, 2))
    query = started("1 hour")
    eventually(lambda: b"11" in all_values(client, out) or not query.isActive, 60)
    found = [value for value in all_values(client, out) if value != b"9"]  # which may have been filtered before
    assert found == [*expected, b"10", b"11"]


def test_number_of_readers_changes_in_the_middle_of_a_batch(
    started: Starting, client: NatslogClient, nats_url: str, name: str, out: str
) -> None:
    count = 0
    for readers in (1, 2, 1):
        for number in range(30):
            publish_acked(nats_url, f"{name}.{number % 7}", numbers(count + number, 1))
        count += 30
        query = started("1 hour", readers=readers)
        found = stored(client, out, query, count)
        assert sorted(map(int, found)) == list(range(count))
        for subject in range(7):
            mine = [int(value) for value in found if int(value) % 30 % 7 == subject]
            assert mine == sorted(mine), "the order of a subject"
        query.stop()


def test_a_stream_that_is_read_twice_has_both_outputs(
    spark: SparkSession,
    started: Starting,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    name: str,
    out: str,
) -> None:
    """Each source of a query has positions of its own in the target."""

    def both(rows: DataFrame) -> DataFrame:
        other = spark.readStream.format("natslog").options(servers=broker.url, stream=name).load()
        a, b = (one.select("stream", "offset", F.concat(F.lit(mark), F.col("value").cast("string")).alias("value"))
                for one, mark in ((rows, "a"), (other, "b")))  # fmt: skip
        return a.union(b)

    for turn in range(2):
        publish_acked(nats_url, f"{name}.a", numbers(20 * turn, 20))
        query = started("1 hour", both)
        found = stored(client, out, query, 40 * (turn + 1))
        assert sorted(found) == sorted(mark + value for mark in (b"a", b"b") for value in numbers(0, 20 * (turn + 1)))
        query.stop()


def test_a_row_that_is_refused_ends_the_query_at_once(
    started: Starting, client: NatslogClient, nats_url: str, name: str, out: str
) -> None:
    """Not only when the next row comes, or the batch ends."""
    publish_acked(nats_url, f"{name}.a", numbers(0, 1))
    query = started("1 hour", lambda rows: rows.withColumn("value", F.lit(None).cast("binary")))
    eventually(lambda: not query.isActive, 60, "the query ends")
    assert "value is null" in str(query.exception())


def _in_python(rows: DataFrame) -> DataFrame:
    same = F.udf(lambda value: value, StringType())
    return rows.select("stream", "offset", same(F.col("value").cast("string")).alias("value"))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(lambda rows: rows.repartition(1), id="exchange"),
        pytest.param(_in_python, id="python"),
        pytest.param(lambda rows: rows.withColumn("offset", F.col("offset") + 1), id="changed"),
        pytest.param(lambda rows: rows.withColumn("stream", F.lit("other")), id="other stream"),
    ],
)
def test_plans_that_do_not_pass_rows_one_by_one_are_refused(
    started: Starting, client: NatslogClient, nats_url: str, name: str, out: str, plan: Plan
) -> None:
    publish_acked(nats_url, f"{name}.a", numbers(0, 10))
    query = started("1 seconds", plan)
    eventually(lambda: not query.isActive, 60, "the query ends")
    assert "exactlyOnce=true is for queries in real time" in str(query.exception())
    assert all_values(client, out) == [], "nothing was stored, and so nothing is lost"


@contextmanager
def driver(broker: BrokerProcess, folder: Path, *arguments: str) -> Iterator[None]:
    """A query in a process of its own, which is killed; it must not have ended before."""
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "JAR": str(jar_path()), "MASTER": "local[2]"}
    command = [sys.executable, str(PROGRAM), "copy", broker.url, "s", str(folder), *arguments]
    with open(folder / "driver.log", "w+") as log:
        process = subprocess.Popen(command, env=environment, stderr=log, start_new_session=True)
        try:
            yield
            assert process.poll() is None, f"the query has ended: {log.seek(0)} {log.read()[-5000:]}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@pytest.mark.long
@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("is_exact", [True, False], ids=["exactly once", "over NATS"])
def test_drivers_and_brokers_that_are_killed_lose_and_double_no_row(tmp_path: Path, is_exact: bool) -> None:
    """At any moment. Over NATS this holds within the deduplication window, with one reader."""
    random = Random(1)
    with running(tmp_path / "own") as (server, broker):
        broker.client().create_stream("s", "s.>")
        broker.client().create_stream("s-out", "out", dedupe_window="1ms" if is_exact else "1h")
        stopping, sent = threading.Event(), []

        async def publish() -> None:
            connection = await nats.connect(server.url)
            while not stopping.is_set():
                number = len(sent)
                headers = {"Natslog-Key": str(number % 7), "Nats-Msg-Id": str(number)}
                with suppress(TimeoutError, NoRespondersError):
                    await connection.request(f"s.{number % 7}", b"%d" % number, timeout=2, headers=headers)
                    sent.append(number)
                await asyncio.sleep(0.005)
            await connection.close()

        publisher = threading.Thread(target=lambda: asyncio.run(publish()))
        publisher.start()
        try:
            for turn in range(KILLS):
                before = broker.client().stream("s-out")["high_watermark"]
                arguments = [str(turn % 2 + 1)] if is_exact else ["1", server.url]
                with driver(broker, tmp_path, *arguments):
                    end = time.monotonic() + 60
                    while time.monotonic() < end and broker.client().stream("s-out")["high_watermark"] == before:
                        time.sleep(0.1)
                    assert time.monotonic() < end, f"turn {turn}: no row comes"
                    time.sleep(random.uniform(0, 4))
                    if turn % 3 == 1:
                        broker.kill()
                        broker.start()
                        time.sleep(random.uniform(0, 3))
            stopping.set()
            publisher.join(30)
            with driver(broker, tmp_path, *(["1"] if is_exact else ["1", server.url])):
                whole = lambda: len(all_values(broker.client(), "s-out")) >= len(sent)  # noqa: E731
                eventually(whole, 60, "all rows")
                time.sleep(2)
        finally:
            stopping.set()
        found = [int(value) for value in all_values(broker.client(), "s-out")]
        stored_unacked = len(sent) in found  # the last one, whose ack did not come in time
        assert sorted(found) == list(range(len(sent) + stored_unacked)), "each once"
        for key in range(7):
            mine = [number for number in found if number % 7 == key]
            assert mine == sorted(mine), "the order of a subject"


def test_micro_batches_are_refused(
    started: Starting, client: NatslogClient, nats_url: str, name: str, out: str
) -> None:
    publish_acked(nats_url, f"{name}.a", numbers(0, 10))
    query = started("", availableNow=True)
    eventually(lambda: not query.isActive, 60, "the query ends")
    assert "exactlyOnce=true is for queries in real time" in str(query.exception())
    assert all_values(client, out) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "option stream is missing: exactlyOnce requires the stream to append to"),
        ({"stream": "a b"}, "stream name"),
        ({"stream": "out", "ack": "flush"}, "ack"),
        ({"stream": "out", "path": "nats"}, "path"),
    ],
)
def test_wrong_options_are_named(spark: SparkSession, options: dict[str, str], words: str, folder: Path) -> None:
    rows = spark.readStream.format("rate").load().selectExpr("'s' as stream", "value as offset", "'v' as value")
    writer = by_format(rows, exactlyOnce="true", **options).option("checkpointLocation", str(folder / "checkpoint"))
    with pytest.raises(Exception, match=words):
        writer.outputMode("update").start().awaitTermination(60)


def test_columns_of_the_source_are_required(spark: SparkSession, folder: Path) -> None:
    rows = spark.readStream.format("rate").load().selectExpr("'v' as value")
    writer = by_format(rows, exactlyOnce="true", stream="out").option("checkpointLocation", str(folder / "checkpoint"))
    with pytest.raises(Exception, match="exactlyOnce requires the columns stream and offset"):
        writer.outputMode("update").start().awaitTermination(60)
