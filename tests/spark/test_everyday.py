"""Everyday work: starts at a cursor or where another query ended, tables in the catalog, errors that say what to do."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.streaming import StreamingQuery

from natslog.client import NatslogClient
from tests.harness import BrokerProcess, natslog, publish_acked
from tests.integration.test_age_limits import publishing

pytestmark = pytest.mark.spark

RUN_WITHIN_S = 120.0
FIRST_ANSWER_WITHIN_S = 15.0


@pytest.fixture
def filled(client: NatslogClient, nats_url: str, name: str) -> str:
    """A stream with the values 0 to 19."""
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"%d" % at for at in range(20)])
    return name


def begin(spark: SparkSession, folder: Path, **options: str) -> StreamingQuery:
    source = spark.readStream.format("natslog").options(**options).load()
    writer = source.select("stream", "offset").writeStream.format("parquet").option("path", str(folder / "rows"))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(availableNow=True).start()


def drain(spark: SparkSession, folder: Path, **options: str) -> None:
    query = begin(spark, folder, **options)
    assert query.awaitTermination(int(RUN_WITHIN_S)), "the query does not end"


def rows(spark: SparkSession, folder: Path) -> list[tuple[str, int]]:
    frame = spark.read.schema("stream string, offset long").parquet(str(folder / "rows"))
    return sorted((row["stream"], row["offset"]) for row in frame.collect())


def read_offsets(spark: SparkSession, **options: str) -> list[int]:
    return sorted(row["offset"] for row in spark.read.format("natslog").options(**options).load().collect())


# ---- where to start ----


@pytest.mark.long
def test_messages_that_expire_before_they_are_read_are_not_missing_in_a_read_from_the_start(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    client.create_stream(name, name, max_age="8s", dedupe_window="1s")
    with publishing(nats_url, name, {}):
        time.sleep(10)
        for at in range(4):
            assert read_offsets(spark, servers=broker.url, stream=name), "a batch read"
            drain(spark, folder / str(at), servers=broker.url, stream=name, maxBytesPerTrigger="1MiB")
            assert rows(spark, folder / str(at)), "a query without an end, and one up to now"
            assert sum(len(batch) for batch in client.read(name))
    with pytest.raises(Exception, match="retention or a purge removed|the log starts at"):
        read_offsets(spark, servers=broker.url, stream=name, startingOffsets=json.dumps({name: 0}))


@pytest.mark.long
def test_new_checkpoint_continues_where_the_old_one_ended(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, filled: str, folder: Path
) -> None:
    drain(spark, folder / "old", servers=broker.url, stream=filled)
    (folder / "old" / "checkpoint").rename(folder / "kept")
    publish_acked(nats_url, filled, [b"new"] * 5)
    position = natslog("checkpoint", "show", str(folder / "kept")).stdout.strip()
    assert json.loads(position) == {filled: 20}
    drain(spark, folder / "new", servers=broker.url, stream=filled, startingOffsets=position)
    assert rows(spark, folder / "new") == [(filled, at) for at in range(20, 25)]
    shown = json.loads(natslog("checkpoint", "show", str(folder / "kept"), "--json").stdout)
    assert shown["sources"][0]["streams"][filled]["offset"] == 20
    assert json.loads(shown["sources"][0]["startingOffsets"]) == {filled: 20}


@pytest.mark.long
def test_read_starts_at_a_cursor(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, filled: str, name: str, folder: Path
) -> None:
    client.set_cursor("reports", filled, 15)
    options = {"servers": broker.url, "startingOffsets": "cursor:reports"}
    assert read_offsets(spark, stream=filled, **options) == list(range(15, 20))
    by_stream = json.dumps({filled: "cursor:reports"})
    assert read_offsets(spark, **options | {"stream": filled, "startingOffsets": by_stream}) == list(range(15, 20))
    drain(spark, folder, stream=filled, **options)
    assert rows(spark, folder) == [(filled, at) for at in range(15, 20)]
    with pytest.raises(Exception, match="there is no cursor 'reprots' on stream .*natslog cursor ls"):
        read_offsets(spark, **options | {"stream": filled, "startingOffsets": "cursor:reprots"})
    with pytest.raises(Exception, match="there is no cursor 'reprots' on stream"):
        read_offsets(spark, **options | {"streamPattern": f"{name}*", "startingOffsets": "cursor:reprots"})
    client.create_stream(f"{name}-younger", f"{name}-younger", group=f"{name}-group")
    with pytest.raises(Exception, match="there is no cursor 'reports' on stream"):
        read_offsets(spark, group=f"{name}-group", **options)
    assert read_offsets(spark, streamPattern=f"{name}*", **options) == list(range(15, 20))


@pytest.mark.long
def test_stream_that_leaves_the_options_and_comes_back_continues(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    one, other = f"{name}-one", f"{name}-other"
    for stream in (one, other):
        client.create_stream(stream, stream, group=f"{name}-group" if stream == one else None)
        publish_acked(nats_url, stream, [b"1"] * 3)
    drain(spark, folder, servers=broker.url, stream=f"{one},{other}")
    publish_acked(nats_url, other, [b"2"] * 2)
    drain(spark, folder, servers=broker.url, stream=one)
    drain(spark, folder, servers=broker.url, group=f"{name}-group")  # `other` is not in it, and was not deleted
    publish_acked(nats_url, one, [b"2"])
    drain(spark, folder, servers=broker.url, streamPattern=f"{name}-*")
    assert rows(spark, folder) == [*((one, at) for at in range(4)), *((other, at) for at in range(5))]
    client.delete_stream(other)
    query = begin(spark, folder, servers=broker.url, group=f"{name}-group")
    with pytest.raises(Exception, match="the stream was deleted"):
        query.awaitTermination(int(RUN_WITHIN_S))


# ---- errors ----


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "orders"}, "unknown option 'subscribe', which is Kafka's: use stream"),
        ({"kafka.bootstrap.servers": "x:9092"}, r"Kafka's: use servers \(HTTP\) to read"),
        ({"kafka.security.protocol": "SSL"}, "Kafka's: remove it; for TLS and credentials see tlsCaFile"),
        ({"startingOffsets": "latest"}, "startingOffsets: a batch read with latest .* empty"),
        ({"endingOffsets": "earliest"}, "endingOffsets: a batch read with earliest .* empty"),
        ({"endingOffsets": "cursor:x"}, "endingOffsets.*must be latest or JSON"),
        ({"startingOffsets": "cursor:a b"}, "option startingOffsets: consumer name 'a b' is not allowed"),
        ({"startingOffsets": "soon"}, "startingOffsets.*must be earliest, latest, cursor:NAME or JSON"),
    ],
)
def test_options_that_cannot_be_meant_are_named(
    spark: SparkSession, broker: BrokerProcess, filled: str, options: dict[str, str], words: str
) -> None:
    with pytest.raises(Exception, match=words):
        read_offsets(spark, servers=broker.url, stream=filled, **options)


@pytest.mark.long
def test_filter_pushdown_is_accepted_everywhere(
    spark: SparkSession, broker: BrokerProcess, filled: str, folder: Path
) -> None:
    drain(spark, folder, servers=broker.url, stream=filled, filterPushdown="true")
    assert len(rows(spark, folder)) == 20


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["refuses", "is silent"])
def test_server_that_never_answers_fails_soon_and_by_name(
    spark: SparkSession, silent: str, folder: Path, kind: str
) -> None:
    server = silent if kind == "is silent" else "http://127.0.0.1:1"
    started = time.monotonic()
    with pytest.raises(Exception, match=f"{server} did not answer within 10 s"):
        read_offsets(spark, servers=server, stream="x")
    query = begin(spark, folder, servers=server, stream="x")
    with pytest.raises(Exception, match=f"{server} did not answer within 10 s"):
        query.awaitTermination(int(RUN_WITHIN_S))
    assert time.monotonic() - started < 2 * (FIRST_ANSWER_WITHIN_S + 30), "as long as an outage of a running query"


@pytest.mark.long
def test_wrong_option_of_a_query_is_the_last_error_of_its_traceback(
    spark: SparkSession, broker: BrokerProcess, filled: str, folder: Path
) -> None:
    query = begin(spark, folder, servers=broker.url, stream=filled, endingOffsets="latest")
    with pytest.raises(Exception, match="option endingOffsets is for batch reads") as caught:
        query.awaitTermination(int(RUN_WITHIN_S))
    assert "UnboundLocalError" not in str(caught.value)


# ---- tables ----


@pytest.fixture
def table(spark: SparkSession, name: str) -> Iterator[str]:
    """The name of a table, which is dropped in the end."""
    table = f"t_{name.replace('-', '_')}"
    yield table
    spark.sql(f"DROP TABLE IF EXISTS {table}")


@pytest.mark.long
def test_table_is_read_and_written_by_sql(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, filled: str, table: str, folder: Path
) -> None:
    spark.sql(
        f"CREATE TABLE {table} USING natslog "
        f"OPTIONS (servers '{broker.url}', stream '{filled}', natsServers '{nats_url}', subject '{filled}') "
        "COMMENT 'the orders' TBLPROPERTIES ('team' = 'sales')"
    )
    count = f"SELECT count(*) AS n, max(offset) AS last FROM {table}"
    assert tuple(spark.sql(count).first() or ()) == (20, 19)
    assert spark.sql(f"SELECT cast(value AS string) AS v FROM {table} WHERE offset >= 18").collect() == [
        ("18",),
        ("19",),
    ]
    assert spark.sql(f"""SELECT * FROM {table} WITH ('startingOffsets' = '{{"{filled}": 12}}')""").count() == 8
    spark.sql(f"INSERT INTO {table} (value) VALUES (X'41'), (X'42')")
    spark.sql(f"INSERT INTO {table} WITH ('ack' = 'stored') (key, value) SELECT X'01', X'43'")
    assert tuple(spark.sql(count).first() or ()) == (23, 22)
    assert spark.table(table).filter("offset = 22").select("key", "value").collect() == [(b"\x01", b"C")]
    source = spark.readStream.option("startingOffsets", f'{{"{filled}": 20}}').table(table)
    writer = source.select("stream", "offset").writeStream.format("parquet").option("path", str(folder / "rows"))
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    assert query.awaitTermination(int(RUN_WITHIN_S))
    assert rows(spark, folder) == [(filled, at) for at in (20, 21, 22)]
    with pytest.raises(Exception, match="the sink can only append"):
        spark.sql(f"INSERT OVERWRITE {table} SELECT * FROM {table}")


@pytest.mark.long
def test_table_that_is_only_written(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    name: str,
    table: str,
    folder: Path,
) -> None:
    client.create_stream(name, f"{name}.>")
    spark.sql(f"CREATE TABLE {table} USING natslog OPTIONS (natsServers '{nats_url}', servers '{broker.url}')")
    assert spark.table(table).columns == ["subject", "key", "value"]
    spark.sql(f"INSERT INTO {table} (subject, value) VALUES ('{name}.a', X'41')")
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3).load()
    rows = rate.selectExpr(f"'{name}.b' AS subject", "X'01' AS key", "cast(cast(value AS string) AS binary) AS value")
    options = {
        "servers": broker.url,
        "natsServers": nats_url,
        "checkpointLocation": str(folder / "checkpoint"),
    }  # Spark passes no others here
    writer = rows.writeStream.options(**options).trigger(once=True)
    assert writer.toTable(table).awaitTermination(int(RUN_WITHIN_S))
    assert client.stream(name)["high_watermark"] == 4
    with pytest.raises(Exception, match="option stream is missing"):
        spark.table(table).count()


@pytest.mark.long
def test_options_of_a_table_do_not_follow_its_rows_elsewhere(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, filled: str, table: str
) -> None:
    client.create_stream(f"{filled}-copy", f"{filled}-copy")
    spark.sql(
        f"CREATE TABLE {table} USING natslog OPTIONS (servers '{broker.url}', natsServers '{nats_url}', "
        f"subject '{filled}') LOCATION '{filled}'"
    )
    frame = spark.table(table)
    assert frame.count() == 20
    there = frame.withColumn("subject", lit(f"{filled}-copy")).write.format("natslog").mode("append")
    there.options(servers=broker.url, natsServers=nats_url).save()
    assert [client.stream(name)["high_watermark"] for name in (filled, f"{filled}-copy")] == [20, 20]
    with pytest.raises(Exception, match="a destination of its own: set natsServers too"):
        frame.write.format("natslog").option("subject", f"{filled}-copy").mode("append").save()
    options = {"servers": broker.url, "stream": f"{filled}-copy"}
    again = spark.read.format("natslog").schema(frame.schema).options(**options).load()
    assert {row["subject"] for row in again.collect()} == {f"{filled}-copy"}
    with pytest.raises(Exception, match="unknown option 'ack'"):
        spark.sql(f"SELECT count(*) FROM {table} WITH ('ack' = 'none')").collect()


def test_table_with_listed_columns_names_what_is_wrong(
    spark: SparkSession, broker: BrokerProcess, filled: str, table: str
) -> None:
    """The jar gets its options and checks them; Spark passes none to the Python source."""
    options = f"servers '{broker.url}', stream '{filled}', startingOfsets 'latest'"
    spark.sql(f"CREATE TABLE {table} (offset BIGINT, value BINARY) USING natslog OPTIONS ({options})")
    with pytest.raises(Exception, match="unknown option 'starting[oO]fsets'|has lost its OPTIONS"):
        spark.table(table).collect()


@pytest.mark.long
def test_temporary_view(spark: SparkSession, broker: BrokerProcess, filled: str, table: str) -> None:
    spark.sql(f"CREATE TEMPORARY VIEW {table}_view USING natslog OPTIONS (servers '{broker.url}', stream '{filled}')")
    assert spark.table(f"{table}_view").count() == 20


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("stream 'orders', token 'secret'", "option token: the catalog would store it"),
        ("stream 'orders', startingOfsets '1'", "unknown option 'startingofsets'"),
        ("stream 'orders', failOnDataLoss 'maybe'", "must be true or false"),
        ("ack 'soon'", "option ack 'soon' must be"),
        ("stream 'orders', ack 'soon'", "option ack 'soon' must be"),
        ("natsServers 'nats://me:secret@host:4222'", "option natsServers: the catalog would store the password"),
        ("stream 'orders', servers 'http://a:9292,http://u:p@b'", "option servers: the catalog would store"),
    ],
)
def test_wrong_options_of_tables_are_errors_when_they_are_created(
    spark: SparkSession, table: str, options: str, words: str
) -> None:
    with pytest.raises(Exception, match=words):
        spark.sql(f"CREATE TABLE {table} USING natslog OPTIONS ({options})")


# ---- writes ----


@pytest.mark.long
@pytest.mark.parametrize("path", ["nats", "http"])
def test_transaction_of_a_batch_write_is_stored_once(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, path: str
) -> None:
    client.create_stream(name, name)
    frame = spark.range(50).selectExpr("cast(cast(id AS string) AS binary) AS value")
    options = {"servers": broker.url, "path": path, "txnAppId": f"reports-{path}"}
    options |= {"stream": name} if path == "http" else {"natsServers": nats_url, "subject": name}

    def write(version: int) -> int:
        frame.write.format("natslog").options(**options, txnVersion=str(version)).mode("append").save()
        return int(client.stream(name)["high_watermark"])

    assert [write(0), write(0), write(1), write(1)] == [50, 50, 100, 100]
    with pytest.raises(Exception, match="txnAppId and txnVersion belong together: set txnVersion too"):
        frame.write.format("natslog").options(**options).mode("append").save()
    with pytest.raises(Exception, match="txnAppId must not begin with 'write-'"):
        frame.write.format("natslog").options(**options | {"txnAppId": "write-1"}, txnVersion="1").mode("append").save()


@pytest.mark.long
@pytest.mark.parametrize("path", ["nats", "http"])
def test_output_mode_complete_writes_the_whole_result_of_each_batch(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    filled: str,
    folder: Path,
    path: str,
) -> None:
    out = f"{filled}-counts-{path}"
    client.create_stream(out, out)
    source = (
        spark.readStream.format("natslog").options(servers=broker.url, stream=filled, maxOffsetsPerTrigger="10").load()
    )
    counts = (
        source.groupBy("stream").count().selectExpr("cast(stream AS binary) AS key", "cast(count AS string) AS value")
    )
    options = {"servers": broker.url, "path": path, "checkpointLocation": str(folder / "checkpoint")}
    options |= {"stream": out} if path == "http" else {"natsServers": nats_url, "subject": out}
    writer = counts.writeStream.format("natslog").options(**options).outputMode("complete")
    assert writer.trigger(availableNow=True).start().awaitTermination(int(RUN_WITHIN_S))
    stored = spark.read.format("natslog").options(servers=broker.url, stream=out).load().orderBy("offset")
    assert [bytes(row["value"]) for row in stored.collect()] == [b"10", b"20"]
