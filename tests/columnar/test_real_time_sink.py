"""Rows that are written in real time, and what only the sink in the JVM can be asked for."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from natslog.client import NatslogClient
from natslog.nats_server import NatsServer
from pyspark_natslog import real_time_writer
from tests.harness import BrokerProcess, all_values, eventually, publish_acked, running
from tests.nats_login import METHODS, Login, server_with

pytestmark = pytest.mark.timeout(180)

Writing = Callable[..., DataStreamWriter]


def by_format(rows: DataFrame, **options: str) -> DataStreamWriter:
    sink = rows.writeStream.format("natslog").options(**options)
    return sink.option("asyncProgressTrackingEnabled", "false")


@pytest.fixture
def out(client: NatslogClient, name: str) -> str:
    """A stream `NAME`, and `NAME-out` beside it on the subject `out.NAME`."""
    client.create_stream(name, name)
    client.create_stream(f"{name}-out", f"out.{name}")
    return f"{name}-out"


@pytest.fixture(autouse=True)
def short_batches(spark: SparkSession) -> Iterator[None]:
    spark.conf.set("spark.sql.streaming.realTimeMode.minBatchDuration", "500ms")
    yield
    for query in spark.streams.active:
        query.stop()


@pytest.fixture
def started(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, name: str, folder: Path
) -> Callable[[Writing, str], Any]:
    """Starts a query in real time from the stream to the other one."""

    def start(writing: Writing, duration: str) -> Any:
        spark.conf.set("spark.sql.streaming.realTimeMode.allowlistCheck", str(writing is real_time_writer).lower())
        read = spark.readStream.format("natslog").options(servers=broker.url, stream=name).load()
        rows = read.selectExpr("value", "key", "map('Offset', cast(offset as string)) as headers")
        writer = writing(rows, natsServers=nats_url, servers=broker.url, subject=f"out.{name}")
        writer = writer.outputMode("update").option("checkpointLocation", str(folder / "checkpoint"))
        return writer.trigger(realTime=duration).start()

    return start


def numbers(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


@pytest.mark.parametrize("writing", [by_format, real_time_writer])
def test_rows_are_stored_as_they_come_and_once_when_the_batch_is_repeated(
    started: Any, client: NatslogClient, nats_url: str, name: str, out: str, writing: Writing
) -> None:
    """The query is stopped in the middle of a batch of an hour."""
    query = started(writing, "1 hour")
    for first in (0, 10, 20):
        publish_acked(nats_url, name, numbers(first, 10))
        eventually(lambda: len(all_values(client, out)) == first + 10 or not query.isActive, 60)  # noqa: B023
        assert query.exception() is None
    query.stop()
    assert query.lastProgress is None, "no batch has ended"

    publish_acked(nats_url, name, numbers(30, 10))
    query = started(writing, "1 seconds")
    eventually(lambda: query.lastProgress is not None or not query.isActive, 60)
    query.stop()
    assert query.exception() is None
    assert all_values(client, out) == numbers(0, 40)


def test_both_ways_to_write_in_real_time_send_the_same_ids(
    started: Any, client: NatslogClient, nats_url: str, name: str, out: str
) -> None:
    publish_acked(nats_url, name, numbers(0, 50))
    for writing, last in ((by_format, b"one"), (real_time_writer, b"other")):
        publish_acked(nats_url, name, [last])  # it comes behind the rows that are sent again
        query = started(writing, "1 hour")
        eventually(lambda: last in all_values(client, out), 60)  # noqa: B023
        query.stop()
    assert all_values(client, out) == [*numbers(0, 50), b"one", b"other"]


def test_batch_in_real_time_fails_while_rows_are_not_acked(
    spark: SparkSession, started: Any, client: NatslogClient, nats_url: str, name: str, out: str
) -> None:
    """It must not be reported as done: a restarted query would go on behind these rows."""

    def impatient(rows: DataFrame, **options: str) -> DataStreamWriter:
        return by_format(rows, **options, ackTimeout="1s")

    client.edit_stream(out, paused=True)
    publish_acked(nats_url, name, numbers(0, 5))
    query = started(impatient, "2 seconds")
    eventually(lambda: not query.isActive, 60)
    assert "rows were not acked" in str(query.exception())
    client.edit_stream(out, paused=False)
    query = started(by_format, "1 seconds")
    eventually(lambda: query.lastProgress is not None or not query.isActive, 60)
    query.stop()
    assert sorted(set(all_values(client, out))) == numbers(0, 5)


def test_options_of_the_writer_are_checked(spark: SparkSession) -> None:
    rows = spark.readStream.format("rate").load().selectExpr("cast(value as string) as value")
    for options, words in (
        ({}, "requires a subject"),
        ({"subject": "a", "akc": "none"}, "did you mean 'ack'"),
        ({"subject": "a", "envelope": "true"}, "option envelope: the sink in the JVM does not have it"),
        ({"subject": "a", "path": "http"}, "option path=http: the sink in the JVM does not have it"),
        ({"subject": "a", "txnAppId": "a", "txnVersion": "1"}, "a streaming query numbers its batches itself"),
    ):
        with pytest.raises(Exception, match=re.escape(words)):
            real_time_writer(rows, **options)


def test_changed_rows_of_an_aggregation_are_published(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, out: str, folder: Path
) -> None:
    """Output mode update, which Spark does not offer to sinks in Python."""
    for count in (3, 4):
        publish_acked(nats_url, name, [b"a"] * count)
        read = spark.readStream.format("natslog").options(servers=broker.url, stream=name).load()
        counts = read.groupBy("value").count().selectExpr("value as key", "cast(count as string) as value")
        options = {"natsServers": nats_url, "servers": broker.url, "subject": f"out.{name}"}
        writer = counts.writeStream.format("natslog").options(**options).outputMode("update")
        writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()
    assert all_values(client, out) == [b"3", b"7"]


# ---- the connection ----


@pytest.mark.parametrize("method", METHODS)
def test_every_login_of_the_python_sink_is_accepted(
    spark: SparkSession, tmp_path: Path, method: Callable[[Path], Login]
) -> None:
    login = method(tmp_path)

    def options(files: dict[str, Any]) -> dict[str, str]:
        names = {one: "nats" + "".join(part.capitalize() for part in one.split("_")) for one in files}
        return {names[one]: str(value).lower() if value is True else value for one, value in files.items() if value}

    with server_with(tmp_path, login.configuration) as server:
        writer = spark.sql("select 'x' as value").write.format("natslog").mode("append")
        writer = writer.options(natsServers=server.url, ack="flush", subject="a")
        writer.options(**options(login.right)).save()
        wrong = spark.sql("select 'x' as value").write.format("natslog").mode("append")
        wrong = wrong.options(natsServers=server.url, ack="flush", subject="a", **options(login.wrong))
        said = login.said.replace("handshake first", "natsTlsHandshakeFirst")
        with pytest.raises(Exception, match=re.escape(said)) as refused:
            wrong.save()
        assert not [secret for secret in login.secret if secret in str(refused.value)]


def test_rows_are_stored_once_each_while_the_nats_server_restarts(spark: SparkSession, folder: Path) -> None:
    rows = spark.range(0, 4000, 1, 1).where("java_method('java.lang.Thread', 'sleep', 1L) is not null")
    rows = rows.selectExpr("cast(id as string) as value")
    with running(folder / "own") as (server, broker):
        client = broker.client()
        client.create_stream("s", "s")
        writer = rows.write.format("natslog").options(natsServers=server.url, servers=broker.url, subject="s")
        writing = threading.Thread(target=writer.mode("append").save)
        writing.start()
        for stored in (200, 1500):
            eventually(lambda: client.stream("s")["high_watermark"] > stored, 60)  # noqa: B023
            port = int(server.url.rpartition(":")[2])
            server.stop()
            server = NatsServer(port, folder / "own" / "nats-again.log").start()
        writing.join(120)
        assert not writing.is_alive()
        assert sorted(int(value) for value in all_values(client, "s")) == list(range(4000))


def test_refused_subject_ends_the_write(spark: SparkSession, tmp_path: Path) -> None:
    permissions = 'permissions: { publish: "allowed", subscribe: "_INBOX.>" }'
    configuration = f"authorization {{ users: [ {{ user: a, password: b, {permissions} }} ] }}"
    with server_with(tmp_path, configuration) as server:
        url = server.url.replace("nats://", "nats://a:b@")
        writer = spark.sql("select 'x' as value").write.format("natslog").mode("append").option("natsServers", url)
        writer.options(ack="flush", subject="allowed").save()
        for ack in ("flush", "stored"):
            with pytest.raises(Exception, match="the NATS server refused messages: .*Permissions Violation"):
                writer.options(ack=ack, subject="forbidden").save()
