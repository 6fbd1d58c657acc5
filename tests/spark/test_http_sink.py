"""The sink's `path=http` in a real Spark: every row once, whatever is retried, restarted or run beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from natslog.client import NatslogClient
from tests.harness import BrokerProcess, all_values

pytestmark = pytest.mark.spark


def appended(frame: DataFrame, broker: BrokerProcess, stream: str, **options: str) -> None:
    frame.write.format("natslog").options(servers=broker.url, stream=stream, **options).mode("append").save("http")


def numbers(spark: SparkSession, count: int, tasks: int = 3) -> DataFrame:
    return spark.range(0, count, 1, tasks).selectExpr("cast(id as string) as value")


def rows_of(client: NatslogClient, stream: str) -> list[dict[str, Any]]:
    return [row for batch in client.read(stream) for row in batch.to_pylist()]


@pytest.mark.long
def test_batch_write_appends_every_row_once_as_one_run(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, f"{name}.>")
    frame = numbers(spark, 70_000).selectExpr(
        "value", f"concat('{name}.', cast(value as int) % 7) as subject", "value as key", "9 as other"
    )
    appended(frame, broker, name)
    rows = rows_of(client, name)
    assert [int(row["value"]) for row in rows] == list(range(70_000)), "in the order of the tasks"
    assert all(row["subject"] == f"{name}.{int(row['value']) % 7}" and row["key"] == row["value"] for row in rows)
    assert len({row["timestamp"] for row in rows}) == 1, "one run"
    appended(numbers(spark, 10), broker, name, subject=f"{name}.again")
    assert len(all_values(client, name)) == 70_010, "another write is another producer"
    pairs = "array(struct('A' as key, 'b c' as value))"
    one = spark.sql(f"select cast('v' as binary) as value, 'ignored' as subject, {pairs} as headers")
    appended(one, broker, name, subject=f"{name}.constant")
    last = rows_of(client, name)[-1]
    assert (last["subject"], last["headers"]) == (f"{name}.constant", [{"key": "A", "value": "b c"}])


def test_empty_frames_and_empty_tasks_append_nothing_more(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name)
    appended(numbers(spark, 100).where("false"), broker, name)
    assert all_values(client, name) == []
    appended(numbers(spark, 100).where("value = '70'"), broker, name)
    assert all_values(client, name) == [b"70"]


def run_query(
    spark: SparkSession,
    broker: BrokerProcess,
    source: str,
    target: str,
    checkpoint: Path,
    where: str = "true",
    onConflict: str = "fail",
    **options: str,
) -> str:
    """To the end of what there is. `options`: of the source."""
    frame = spark.readStream.format("natslog").options(servers=broker.url, stream=source, **options).load()
    rows = frame.selectExpr("cast(value as string) as value").where(where)
    writer = rows.writeStream.format("natslog").options(path="http", servers=broker.url, onConflict=onConflict)
    query = writer.option("stream", target).option("checkpointLocation", str(checkpoint))
    running = query.trigger(availableNow=True).start()
    running.awaitTermination()
    return str(running.id)


@pytest.mark.long
def test_streaming_batches_are_appended_once_however_often_they_run(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, name: str, folder: Path
) -> None:
    """The driver dies after the commit and before Spark noted it; and a second query has the same batch ids."""
    target = f"{name}-out"
    client.create_stream(name, name)
    client.create_stream(target, target)
    appended(numbers(spark, 50), broker, name)
    query = run_query(spark, broker, name, target, folder / "ck", maxOffsetsPerTrigger="20")
    assert sorted(map(int, all_values(client, target))) == list(range(50))
    assert client.last_append(target, query).batch == 2
    for batch in ("2", ".2.crc"):  # what the crash would have kept from being written
        (folder / "ck" / "commits" / batch).unlink()
    appended(numbers(spark, 5), broker, name)
    assert run_query(spark, broker, name, target, folder / "ck", maxOffsetsPerTrigger="20") == query
    values = sorted(map(int, all_values(client, target)))
    assert values == sorted([*range(50), *range(5)]), "batch 2 ran again and was there"
    run_query(spark, broker, name, target, folder / "other")
    assert len(all_values(client, target)) == 110
    assert broker.metrics()["natslog_staged_bytes"] == 0


@pytest.mark.long
def test_query_whose_checkpoint_was_set_back_ends_and_says_so_and_may_go_on(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, name: str, folder: Path
) -> None:
    """Its next batches have the numbers of stored ones, and other rows: as duplicates, they would be lost."""
    target, checkpoint = f"{name}-out", folder / "ck"
    client.create_stream(name, name)
    client.create_stream(target, target)
    for first in range(0, 30, 10):
        appended(numbers(spark, first + 10, 1).where(f"value >= {first}"), broker, name)
        query = run_query(spark, broker, name, target, checkpoint)
        if first == 0:
            shutil.copytree(checkpoint, folder / "saved")
    shutil.rmtree(checkpoint)
    shutil.copytree(folder / "saved", checkpoint)
    appended(numbers(spark, 40, 1).where("value >= 30"), broker, name)
    with pytest.raises(
        Exception, match=f"batch 1 of {query} was sent after its batch 2 was stored: the checkpoint was"
    ):
        run_query(spark, broker, name, target, checkpoint)
    assert sorted(map(int, all_values(client, target))) == list(range(30)), "nothing was appended"
    run_query(spark, broker, name, target, checkpoint, onConflict="append")
    assert set(map(int, all_values(client, target))) == set(range(40))
    assert client.last_append(target, query).batch == 1


@pytest.mark.long
def test_last_batch_of_a_changed_job_ends_the_query_and_may_be_left_out(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, name: str, folder: Path
) -> None:
    target, checkpoint = f"{name}-out", folder / "ck"
    client.create_stream(name, name)
    client.create_stream(target, target)
    appended(numbers(spark, 30, 1), broker, name)
    run_query(spark, broker, name, target, checkpoint)
    for commit in (checkpoint / "commits").iterdir():
        commit.unlink()
    with pytest.raises(Exception, match="is stored with 30 rows, but now has other rows .20."):
        run_query(spark, broker, name, target, checkpoint, where="value < 20")
    run_query(spark, broker, name, target, checkpoint, where="value < 20", onConflict="skip")
    assert sorted(map(int, all_values(client, target))) == list(range(30))


@pytest.mark.long
def test_failed_job_leaves_nothing_and_retried_task_leaves_one_copy(
    broker: BrokerProcess, client: NatslogClient, name: str, folder: Path
) -> None:
    client.create_stream(name, name)
    command = [sys.executable, "-c", RETRYING_DRIVER, broker.url, name, str(folder / "mark")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "mark").exists(), "the first attempt did fail after parts of it were staged"
    assert sorted(int(value) for value in all_values(client, name)) == list(range(60_000))


RETRYING_DRIVER = """
import sys
from pyspark.sql import SparkSession
url, stream, mark = sys.argv[1:]
builder = SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false")
spark = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "5000").getOrCreate()

def failing(always):
    def work(batches):
        import time, urllib.request
        from pathlib import Path
        for at, batch in enumerate(batches):
            if at == 11 and (always or not Path(mark).exists()):
                deadline = time.monotonic() + 60
                while b"natslog_staged_bytes 0.0" in urllib.request.urlopen(url + "/metrics").read():
                    assert time.monotonic() < deadline, "nothing was staged before the failure"
                    time.sleep(0.05)
                Path(mark).touch()
                raise RuntimeError("injected: the task fails after parts of it are staged")
            yield batch
    return work

rows = spark.range(0, 60000, 1, 1).selectExpr("lpad(id, 400, '0') as value")

def write(always):
    frame = rows.mapInArrow(failing(always), "value string")
    frame.write.format("natslog").options(path="http", servers=url, stream=stream).mode("append").save()

write(False)
try:
    write(True)
except Exception as error:
    assert "injected" in str(error), error
else:
    raise AssertionError("a job whose task always fails does fail")
spark.stop()
"""


@pytest.mark.parametrize(
    ("sql", "options", "words"),
    [
        ("select 'x' as value", {}, "option stream is missing: path=http requires the stream"),
        ("select 'x' as value", {"stream": "a b"}, "option stream: .*not allowed"),
        ("select 'x' as value", {"stream": "no-such-stream"}, "no stream 'no-such-stream'"),
        ("select 'x' as value", {"stream": "wide"}, "has the subjects 'wide.>': choose one"),
        ("select 'x' as value", {"stream": "wide", "subject": "other"}, "not the subject 'other'"),
        ("select 'x' as value", {"stream": "wide", "subject": "a.*"}, "option subject: .*wildcard"),
        (
            "select 'x' as value",
            {"stream": "wide", "ack": "stored"},
            "option ack is for rows that are published to NATS",
        ),
        (
            "select 'x' as value",
            {"stream": "wide", "natsservers": "x"},
            "option natsServers is for rows that are published",
        ),
        ("select 'x' as value", {"stream": "wide", "strem": "x"}, "did you mean 'stream'"),
        ("select 'x' as value", {"stream": "wide", "servers": "localhost"}, "not a URL"),
        ("select 'x' as value", {"path": "ftp"}, "option path 'ftp' must be nats or http"),
        ("select 'x' as value", {"path": "nats", "stream": "wide"}, "option stream is for rows that are appended"),
        ("select 'x' as payload", {"stream": "wide"}, "requires a column value"),
        ("select 1 as value", {"stream": "wide"}, "'value' is int; the sink accepts string or binary"),
        ("select cast(null as string) as value", {"stream": "wide", "subject": "wide.a"}, "value is null: row 0"),
        ("select 'x' as value, 'wide..b' as subject", {"stream": "wide"}, "not one plain NATS subject: row 0"),
    ],
)
@pytest.mark.long
def test_options_and_rows_that_cannot_be_are_named(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, sql: str, options: dict[str, str], words: str
) -> None:
    client.create_stream("wide", "wide.>")
    writer = spark.sql(sql).write.format("natslog").options(**({"path": "http", "servers": broker.url} | options))
    if options.get("path") == "nats":
        writer = spark.sql(sql).write.format("natslog").options(**options)
    with pytest.raises(Exception, match=words):
        writer.mode("append").save()


def test_overwrite_is_refused(spark: SparkSession, broker: BrokerProcess) -> None:
    writer = numbers(spark, 1).write.format("natslog").options(path="http", servers=broker.url, stream="wide")
    with pytest.raises(Exception, match="only append"):
        writer.mode("overwrite").save()
