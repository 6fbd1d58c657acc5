"""The sink in a real Spark: what arrives, message ids, acks, and rows that cannot be sent."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from natslog.client import NatslogClient
from tests.harness import BrokerProcess, all_values, eventually, publish_acked, running, with_nats
from tests.nats_login import nkey, server_with, tls

pytestmark = pytest.mark.spark


def rows_of(client: NatslogClient, stream: str) -> list[dict[str, Any]]:
    return [row for batch in client.read(stream) for row in batch.to_pylist()]


def header(row: dict[str, Any], name: str) -> str | None:
    return next((pair["value"] for pair in row["headers"] or [] if pair["key"] == name), None)


@pytest.mark.long
@pytest.mark.parametrize("ack", ["none", "flush", "stored"])
def test_batch_write_publishes_every_row(
    spark: SparkSession, client: NatslogClient, nats_url: str, name: str, ack: str
) -> None:
    client.create_stream(name, f"{name}.>")
    subject = f"concat('{name}.', id % 7) as subject"
    frame = spark.range(0, 5000, 1, 3).selectExpr("cast(id as string) as value", subject)
    frame.write.format("natslog").options(natsServers=nats_url, ack=ack).mode("append").save()
    eventually(lambda: client.stream(name)["high_watermark"] == 5000)
    rows = rows_of(client, name)
    assert sorted(int(row["value"]) for row in rows) == list(range(5000))
    assert all(row["subject"] == f"{name}.{int(row['value']) % 7}" for row in rows)


def test_constant_subject_key_and_headers(spark: SparkSession, client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    pairs = "array(struct('A' as key, 'b c' as value))"
    frame = spark.sql(f"select cast('v' as binary) as value, 'k1' as key, {pairs} as headers, 9 as other")
    frame.write.format("natslog").options(natsServers=nats_url, subject=name, ack="stored").mode("append").save()
    (row,) = rows_of(client, name)
    assert (row["value"], row["key"], header(row, "A")) == (b"v", b"k1", "b c")


@pytest.mark.long
def test_a_stream_is_copied_byte_for_byte(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, f"{name}.>")
    client.create_stream(f"{name}-copy", f"copy.{name}")
    payloads = spark.range(300).selectExpr("sha2(cast(id as string), 256) as value", f"'{name}.a' as subject")
    payloads.write.format("natslog").options(natsServers=nats_url, ack="stored").mode("append").save()
    source = spark.read.format("natslog").options(servers=broker.url, stream=name).load().drop("key")
    sink = source.write.format("natslog").options(natsServers=nats_url, subject=f"copy.{name}", ack="stored")
    sink.mode("append").save()
    assert sorted(all_values(client, f"{name}-copy")) == sorted(all_values(client, name))


def test_message_ids_are_short_and_differ_also_between_equal_rows(
    spark: SparkSession, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name)
    equal = spark.range(0, 40, 1, 2).selectExpr("'same' as value")
    listens = threading.Event()

    async def sent(nats: Any) -> list[str]:
        subscription = await nats.subscribe(name)
        await nats.flush()
        listens.set()
        return [(await subscription.next_msg(timeout=60)).headers["Nats-Msg-Id"] for _ in range(40)]

    with ThreadPoolExecutor() as threads:
        receiving = threads.submit(with_nats, nats_url, sent)
        assert listens.wait(10)
        equal.write.format("natslog").options(natsServers=nats_url, subject=name, ack="stored").mode("append").save()
        ids = receiving.result(60)
    assert len(set(ids)) == 40
    assert all(re.fullmatch("~[A-Za-z0-9_-]{16}", one) for one in ids)
    assert [header(row, "Nats-Msg-Id") for row in rows_of(client, name)] == [None] * 40, "they are stored elsewhere"


@pytest.mark.long
def test_two_queries_with_the_same_batch_ids_do_not_collide(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    client.create_stream(name, name)
    client.create_stream(f"{name}-out", f"out.{name}")
    spark.range(20).selectExpr("cast(id as string) as value").write.format("natslog").options(
        natsServers=nats_url, subject=name, ack="stored"
    ).mode("append").save()
    for at in range(2):
        source = spark.readStream.format("natslog").options(servers=broker.url, stream=name).load()
        options = {"natsServers": nats_url, "subject": f"out.{name}", "ack": "stored"}
        writer = source.select("value").writeStream.format("natslog").options(**options)
        writer.option("checkpointLocation", str(folder / f"ck{at}")).trigger(
            availableNow=True
        ).start().awaitTermination()
    assert len(all_values(client, f"{name}-out")) == 40


@pytest.fixture
def numbers(client: NatslogClient, nats_url: str, name: str) -> str:
    """A stream of the numbers 0 to 49, and `NAME-out` beside it on the subject `out.NAME`."""
    client.create_stream(name, name)
    client.create_stream(f"{name}-out", f"out.{name}")
    publish_acked(nats_url, name, [b"%d" % at for at in range(50)])
    return name


@pytest.mark.parametrize(
    ("tasks", "later"), [(4, 2), pytest.param(1, 1, marks=pytest.mark.long), pytest.param(2, 5, marks=pytest.mark.long)]
)
def test_batch_repeated_after_a_crash_is_stored_once(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    numbers: str,
    folder: Path,
    tasks: int,
    later: int,
) -> None:
    """The driver is killed after the sink published and before Spark noted the batch as done: it runs again, with
    options that would make other tasks of it.
    """

    def run(tasks: int) -> None:
        source = (
            spark.readStream.format("natslog").options(servers=broker.url, stream=numbers, minPartitions=tasks).load()
        )
        options = {"natsServers": nats_url, "subject": f"out.{numbers}", "ack": "stored"}
        writer = source.select("value").writeStream.format("natslog").options(**options)
        writer.option("checkpointLocation", str(folder / "ck")).trigger(availableNow=True).start().awaitTermination()

    run(tasks)
    for commit in (folder / "ck" / "commits").iterdir():  # what the crash would have kept from being written
        commit.unlink()
    run(later)
    assert sorted(int(value) for value in all_values(client, f"{numbers}-out")) == list(range(50))


@pytest.mark.long
def test_rows_in_envelopes_are_stored_once_when_the_batch_is_repeated(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, numbers: str, folder: Path
) -> None:
    """Written as messages of many rows each: the stream has the rows, and a retry of the batch adds none."""
    out = f"{numbers}-out"
    publish_acked(nats_url, numbers, [b"%d" % at for at in range(50, 20_000)])

    def run() -> None:
        source = spark.readStream.format("natslog").options(servers=broker.url, stream=numbers).load()
        options = {"natsServers": nats_url, "servers": broker.url, "subject": f"out.{numbers}", "envelope": "true"}
        writer = source.select("value").writeStream.format("natslog").options(**options)
        writer.option("checkpointLocation", str(folder / "ck")).trigger(availableNow=True).start().awaitTermination()

    before = received(broker, out)
    run()
    assert received(broker, out) - before < 100, "far fewer messages than rows"
    for commit in (folder / "ck" / "commits").iterdir():
        commit.unlink()
    run()
    assert sorted(int(value) for value in all_values(client, out)) == list(range(20_000))


def received(broker: BrokerProcess, name: str) -> float:
    return broker.metrics()[f'natslog_messages_received_total{{stream="{name}"}}']


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("value % 3 = 0", "value"), ("value < 35", "value")),
        (("value < 35", "concat(value, if(value < 5, '', ' EUR'))"), ("value > 2", "concat(value, ' USD')")),
    ],
    ids=["another filter", "another reference table"],
)
@pytest.mark.long
def test_batch_repeated_by_a_changed_job_loses_no_row(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    numbers: str,
    folder: Path,
    first: tuple[str, str],
    second: tuple[str, str],
) -> None:
    """The first run is killed before Spark noted its batch as done, and the job is redeployed: other rows come at
    the same positions.
    """

    def run(where: str, value: str) -> list[str]:
        source = spark.readStream.format("natslog").options(servers=broker.url, stream=numbers).load()
        rows = source.selectExpr("cast(value as string) as value").where(where).selectExpr(f"{value} as value")
        options = {"natsServers": nats_url, "subject": f"out.{numbers}", "ack": "stored"}
        writer = rows.writeStream.format("natslog").options(**options).option("checkpointLocation", str(folder / "ck"))
        writer.trigger(availableNow=True).start().awaitTermination()
        every = spark.range(50).selectExpr("cast(id as string) as value").where(where).selectExpr(f"{value} as value")
        return [row["value"] for row in every.collect()]

    run(*first)
    for commit in (folder / "ck" / "commits").iterdir():
        commit.unlink()
    expected = run(*second)
    assert set(expected) <= {value.decode() for value in all_values(client, f"{numbers}-out")}


@pytest.mark.long
def test_query_of_a_restored_checkpoint_loses_no_row(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, numbers: str, folder: Path
) -> None:
    """Its next batches have the numbers of batches that were sent before, and other rows."""

    def run() -> None:
        source = spark.readStream.format("natslog").options(servers=broker.url, stream=numbers).load()
        options = {"natsServers": nats_url, "subject": f"out.{numbers}", "ack": "stored"}
        writer = source.select("value").writeStream.format("natslog").options(**options)
        writer.option("checkpointLocation", str(folder / "ck")).trigger(availableNow=True).start().awaitTermination()

    def run_after(first: int) -> None:
        publish_acked(nats_url, numbers, [b"%d" % at for at in range(first, first + 10)])
        run()

    run()
    shutil.copytree(folder / "ck", folder / "saved")
    run_after(50)  # batch 1
    run_after(60)  # batch 2
    shutil.rmtree(folder / "ck")
    shutil.copytree(folder / "saved", folder / "ck")
    run()  # batch 1, with the rows of both
    run_after(70)  # batch 2, with others
    stored = sorted(int(value) for value in all_values(client, f"{numbers}-out"))
    assert set(stored) == set(range(80))
    assert len(stored) == 90, "rows 60 to 69 came at other positions, and are stored again"


@pytest.mark.parametrize("path", ["nats", "http"])
@pytest.mark.long
def test_two_writes_of_one_foreach_batch_are_both_stored(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    numbers: str,
    folder: Path,
    path: str,
) -> None:
    """Both see the query's id and the batch's; a second one taken for the first would be dropped as stored before."""
    options = {"natsServers": nats_url, "subject": f"out.{numbers}", "ack": "stored"}
    if path == "http":
        options = {"path": "http", "servers": broker.url, "stream": f"{numbers}-out"}

    def write(batch: DataFrame, number: int) -> None:
        for part in ("value < 25", "value >= 25"):
            batch.where(part).select("value").write.format("natslog").options(**options).mode("append").save()

    source = spark.readStream.format("natslog").options(servers=broker.url, stream=numbers).load()
    writer = source.selectExpr("cast(value as string) as value").writeStream.foreachBatch(write)
    writer.option("checkpointLocation", str(folder / "ck")).trigger(availableNow=True).start().awaitTermination()
    assert sorted(int(value) for value in all_values(client, f"{numbers}-out")) == list(range(50))


def retried_write(client: NatslogClient, broker: BrokerProcess, nats_url: str, stream: str, mark: Path) -> None:
    """A write whose first task attempt fails after rows of it are stored; needs a Spark of its own, that retries."""
    command = [sys.executable, "-c", RETRYING_DRIVER, nats_url, broker.url, stream, str(mark)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert mark.exists(), "the first attempt did fail after its rows were stored"


@pytest.mark.long
def test_retried_task_is_stored_once_and_twice_where_nothing_deduplicates(
    client: NatslogClient, broker: BrokerProcess, nats_url: str, name: str, folder: Path
) -> None:
    client.create_stream(name, name)
    retried_write(client, broker, nats_url, name, folder / "with")
    assert sorted(int(value) for value in all_values(client, name)) == list(range(3000))
    client.create_stream(f"{name}-all", f"{name}.all", dedupe_window=None)
    retried_write(client, broker, nats_url, f"{name}.all", folder / "without")
    stored = [int(value) for value in all_values(client, f"{name}-all")]
    assert set(stored) == set(range(3000))
    assert len(stored) > 3000, "the injected failure does send rows twice"


RETRYING_DRIVER = """
import sys
from pyspark.sql import SparkSession
nats_url, broker_url, subject, mark = sys.argv[1:]
builder = SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false")
spark = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "500").getOrCreate()

def fail_once(batches):
    import time
    from pathlib import Path
    from natslog.client import NatslogClient
    stream = subject.replace(".all", "-all")
    with NatslogClient(broker_url) as client:
        for at, batch in enumerate(batches):
            if at == 4 and not Path(mark).exists():
                deadline = time.monotonic() + 60
                while client.stream(stream)["high_watermark"] == 0:
                    assert time.monotonic() < deadline, "nothing was stored before the failure"
                    time.sleep(0.05)
                Path(mark).touch()
                raise RuntimeError("injected: the task fails after rows of it are stored")
            yield batch

rows = spark.range(0, 3000, 1, 1).selectExpr("lpad(id, 400, '0') as value").mapInArrow(fail_once, "value string")
rows.write.format("natslog").options(natsServers=nats_url, subject=subject, ack="stored").mode("append").save()
spark.stop()
"""


@pytest.mark.parametrize(
    ("sql", "options", "words"),
    [
        ("select 'x' as payload", {"subject": "a"}, "requires a column value"),
        ("select 'x' as value", {}, "requires a subject"),
        ("select 1 as value", {"subject": "a"}, "'value' is int; the sink accepts string or binary"),
        ("select 'x' as value", {"subject": "a.*"}, "wildcard"),
        ("select 'x' as value", {"subject": "a", "ack": "maybe"}, "must be none, flush or stored"),
        ("select 'x' as value", {"subject": "a", "akc": "none"}, "did you mean 'ack'"),
        ("select 'x' as value", {"subject": "a", "msgIdColumn": "id"}, "no column 'id'"),
        ("select 'x' as value", {"subject": "a", "ack": "flush", "ackStreams": "s"}, "requires ack .stored."),
        (
            "select 'x' as value",
            {"subject": "a", "ackStreams": "nobodys"},
            "stream .nobodys. does not record the subject .a.",
        ),
        ("select 'x' as value", {"subject": "a", "stream": "s"}, "add .option..path., .http.."),
        ("select cast(null as string) as value", {"subject": "a"}, "value is null: row 0"),
        ("select 'x' as value, 'a..b' as subject", {}, "not one plain NATS subject: row 0 .subject 'a..b'."),
        ("select repeat('x', 1100000) as value", {"subject": "big"}, "larger than the server's limit of 1048576 bytes"),
        (
            "select 'x' as value",
            {"subject": "nobody.listens", "ack": "stored", "ackTimeout": "1s"},
            "no stream receives messages",
        ),
    ],
)
@pytest.mark.long
def test_rows_and_options_that_cannot_be_are_named(
    spark: SparkSession, broker: BrokerProcess, nats_url: str, sql: str, options: dict[str, str], words: str
) -> None:
    writer = spark.sql(sql).write.format("natslog").mode("append")
    writer = writer.options(natsServers=nats_url, servers=broker.url, **options)
    with pytest.raises(Exception, match=words):
        writer.save()


@pytest.mark.long
def test_rows_that_cannot_be_sent_become_dead_letters_once_and_the_others_arrive(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    """The batch runs twice, as after a crash: both streams hold each row once."""
    for suffix in ("", "-out", "-dead"):
        client.create_stream(f"{name}{suffix}", f"{name}{suffix}.>")
    source_rows = spark.range(0, 40, 1, 1).selectExpr("cast(id as string) as value", f"'{name}.a' as subject")
    source_rows.write.format("natslog").options(natsServers=nats_url, ack="stored").mode("append").save()
    options = {"natsServers": nats_url, "ack": "stored", "onError": "deadletter", "deadLetterSubject": f"{name}-dead.x"}

    def run() -> None:
        source = spark.readStream.format("natslog").options(servers=broker.url, stream=name).load()
        rows = source.selectExpr(
            "stream",
            "offset",
            "case when offset = 3 then null when offset = 5 then repeat('x', 1100000) else cast(value as string) end "
            "as value",
            f"if(offset = 7, 'not a subject', '{name}-out.a') as subject",
        )
        writer = rows.writeStream.format("natslog").options(**options).option("checkpointLocation", str(folder / "ck"))
        writer.trigger(availableNow=True).start().awaitTermination()

    run()
    for commit in (folder / "ck" / "commits").iterdir():
        commit.unlink()
    run()
    stored = sorted(int(value) for value in all_values(client, f"{name}-out"))
    assert stored == [at for at in range(40) if at not in (3, 5, 7)]
    letters = sorted(rows_of(client, f"{name}-dead"), key=lambda row: int(header(row, "Natslog-Offset") or -1))
    assert [header(row, "Natslog-Offset") for row in letters] == ["3", "5", "7"]
    assert {header(row, "Natslog-Stream") for row in letters} == {name}
    assert [header(row, "Natslog-Subject") for row in letters] == [f"{name}-out.a", f"{name}-out.a", "not a subject"]
    assert header(letters[1], "Natslog-Truncated") == "1100000"
    assert letters[2]["value"] == b"7"


@pytest.mark.long
def test_tasks_log_in_with_the_files_of_the_options(spark: SparkSession, tmp_path: Path) -> None:
    login, encrypted = nkey(tmp_path), tls(tmp_path)
    with server_with(tmp_path, encrypted.configuration + login.configuration) as server:
        writer = spark.sql("select 'x' as value").write.format("natslog").option("natsServers", server.url)
        writer = writer.option("ack", "flush").option("subject", "a").mode("append")
        writer = writer.option("natsTlsCaFile", encrypted.right["tls_ca_file"])
        writer.option("natsNkeyFile", login.right["nkey_file"]).save()
        with pytest.raises(Exception, match=re.escape(login.said)) as refused:
            writer.option("natsNkeyFile", login.wrong["nkey_file"]).save()
        assert not [secret for secret in login.secret if secret in str(refused.value)]
        with pytest.raises(Exception, match="only one login"):
            writer.option("natsTokenFile", "t").option("natsUser", "u").option("natsPasswordFile", "p").save()


@pytest.mark.long
def test_nats_that_is_not_there_is_named(spark: SparkSession) -> None:
    writer = spark.sql("select 'x' as value").write.format("natslog").option("natsServers", "nats://127.0.0.1:1")
    with pytest.raises(Exception, match="no NATS server responds at nats://127.0.0.1:1"):
        writer.option("subject", "a").mode("append").save()


def test_overwrite_is_refused(spark: SparkSession, nats_url: str) -> None:
    writer = spark.sql("select 'x' as value").write.format("natslog").options(natsServers=nats_url, subject="a")
    with pytest.raises(Exception, match="only append"):
        writer.mode("overwrite").save()


@pytest.mark.long
def test_empty_frame_publishes_nothing(spark: SparkSession, client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    writer = (
        spark.sql("select 'x' as value where false").write.format("natslog").options(natsServers=nats_url, subject=name)
    )
    writer.mode("append").save()
    assert all_values(client, name) == []


# ---- who acks ----


@pytest.mark.long
def test_rows_are_stored_by_default_where_a_stream_acks_and_lost_nowhere(spark: SparkSession, folder: Path) -> None:
    """The broker is away and NATS is up: a sink that is content with the server's word would lose the batch."""
    with running(folder / "own") as (server, own):
        own.client().create_stream("orders", "orders.>")
        # One task: another one of the job that fails could still write when the broker is back.
        rows = spark.range(0, 1000, 1, 1).selectExpr("cast(id as string) as value", "'orders.a' as subject")

        def write(**options: str) -> None:
            writer = rows.write.format("natslog").options(natsServers=server.url, servers=own.url, **options)
            writer.mode("append").save()

        own.kill()
        with pytest.raises(Exception, match="no broker stated which streams record the subjects of the rows"):
            write(fetchTimeout="1s", fetchRetries="0")
        own.start()
        assert all_values(own.client(), "orders") == []
        write()
        assert len(all_values(own.client(), "orders")) == 1000
        own.client().edit_stream("orders", paused=True)
        with pytest.raises(Exception, match="rows were not acked"):
            write(ackTimeout="1s")


@pytest.mark.long
def test_rows_that_no_stream_records_are_flushed(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    """And those beside them on a subject that a stream records are stored."""
    client.create_stream(name, f"{name}.a")
    client.create_stream(f"{name}-b", f"{name}.b", acks="header")
    client.create_stream(f"{name}-c", f"{name}.c", acks="never")
    subject = f"concat('{name}.', element_at(array('a', 'b', 'c', 'd'), cast(id % 4 as int) + 1)) as subject"
    rows = spark.range(0, 4000, 1, 1).selectExpr("cast(id as string) as value", subject)
    rows.write.format("natslog").options(natsServers=nats_url, servers=broker.url).mode("append").save()
    for stream, number in ((name, 0), (f"{name}-b", 1)):
        values = [int(value) for value in all_values(client, stream)]
        assert values == list(range(number, 4000, 4)), "all of them, in order"
    eventually(lambda: client.stream(f"{name}-c")["high_watermark"] == 1000)


@pytest.mark.long
def test_named_streams_must_ack_every_row(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, f"{name}.>")
    client.create_stream(f"{name}-audit", f"{name}.*")
    rows = spark.range(0, 100, 1, 1).selectExpr("cast(id as string) as value", f"'{name}.a' as subject")

    def write(**options: str) -> None:
        writer = rows.write.format("natslog").options(natsServers=nats_url, servers=broker.url, **options)
        writer.mode("append").save()

    client.edit_stream(f"{name}-audit", paused=True)
    with pytest.raises(Exception, match=f"the ack of stream .{name}-audit. is missing"):
        write(ackStreams=f"{name}, {name}-audit", ackTimeout="1s")
    client.edit_stream(f"{name}-audit", paused=False)
    write(ackStreams=f"{name},{name}-audit")
    assert len(all_values(client, f"{name}-audit")) >= 100
    with pytest.raises(Exception, match=f"stream .{name}-other. does not record the subject .{name}.a.; streams"):
        write(ackStreams=f"{name}-other")
