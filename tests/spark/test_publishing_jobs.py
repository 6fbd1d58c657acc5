"""`enrich_stream.py` and `replay_range.py`: what they publish, that it is published once, and what they refuse."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.errors import NatslogError
from natslog.times import format_timestamp_us
from tests.harness import BrokerProcess, all_values, eventually
from tests.spark.job_processes import RUN_WITHIN_S, run, running_job
from tests.spark.jobs_as_modules import enrich_stream, job_support, replay_range, subject_mapping

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

FIELDS = "sku string, value int"


def rows_of(client: NatslogClient, stream: str) -> list[dict[str, Any]]:
    return [row for batch in client.read(stream) for row in batch.to_pylist()]


def header(row: dict[str, Any], name: str) -> str | None:
    return next((pair["value"] for pair in row["headers"] or [] if pair["key"] == name), None)


def publish(
    broker: BrokerProcess, subjects: list[str], values: list[bytes], ids: list[str] | None = None, **columns: Any
) -> None:
    given = None if ids is None else pa.array(ids)
    with Publisher(broker.nats_url) as publisher:
        publisher.publish(Rows(pa.array(subjects), pa.array(values, pa.binary()), ids=given, **columns), "stored")


# ---- subjects ----


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target", "subject", "expected"),
    [
        ("orders.>", "replay.>", "orders.eu.new", "replay.eu.new"),
        ("orders.*.>", "x.{1}.y.>", "orders.eu.new.7", "x.eu.y.new.7"),
        ("*.b.*", "{2}.{1}", "a.b.c", "c.a"),
        ("orders.>", "audit.{subject}", "orders.eu", "audit.orders.eu"),
        ("a+b.$1.>", "one", "a+b.$1.x", "one"),
        ("orders", "copy.of.it", "orders", "copy.of.it"),
    ],
)
def test_subject_mapping(spark: SparkSession, source: str, target: str, subject: str, expected: str) -> None:
    mapping = subject_mapping.SubjectMapping.parse(source, target)
    frame = spark.createDataFrame([(subject,)], "subject string").select(mapping.column(f.col("subject")))
    assert frame.first()[0] == expected
    assert subject_mapping.covers(mapping.target_wildcard, expected)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("x.{2}", "'orders.*' has no * that {2} could stand for"),
        ("x.*", "write {1} for what the first *"),
        ("x.>", "'orders.*' has no >"),
        ("x..y", "empty token"),
    ],
)
def test_subject_mapping_that_cannot_be_is_refused(target: str, reason: str) -> None:
    with pytest.raises(NatslogError, match=re.escape(reason)):
        subject_mapping.SubjectMapping.parse("orders.*", target)


def test_wildcards_cover_and_overlap() -> None:
    covers, overlap = subject_mapping.covers, subject_mapping.overlap
    assert all(covers(*pair) for pair in [("a.>", "a.b.c"), ("a.>", "a.*"), ("*.b", "a.b"), (">", "a.>")])
    assert not any(covers(*pair) for pair in [("a.>", "a"), ("a.*", "a.>"), ("a.b", "a.*"), ("a.*", "a.b.c")])
    assert all(overlap(*pair) for pair in [("a.>", "*.b"), ("a.*.c", "a.b.*"), (">", "a"), ("a.>", "a.b.c")])
    assert not any(overlap(*pair) for pair in [("a.>", "b.>"), ("a.*", "a"), ("a.*", "a.b.c"), ("a.>", "a")])


# ---- enrich_stream ----


def enrich_arguments(stream: str, folder: Path, *more: str) -> list[str]:
    return [
        "--stream", stream, "--fields", FIELDS, "--reference", str(folder / "items.csv"), "--on", "sku",
        "--reference-schema", "sku string, name string, price double", "--derive", "total=round(price * value, 2)",
        "--to-subject", f"{stream}-out.>", "--checkpoint", str(folder / "checkpoint"), "--available-now", *more,
    ]  # fmt: skip


def enrich(spark: SparkSession, arguments: argparse.Namespace) -> StreamingQuery:
    """What the job does, in this session; returns when all is enriched."""
    target = enrich_stream.checked_target(arguments)
    enrich_stream.check_unfinished(spark, arguments, target.window_s)
    reference = enrich_stream.reference_rows(spark, arguments)
    options = job_support.source_options(arguments, enrich_stream.COLUMNS)
    messages = spark.readStream.format("natslog").options(**options).load()
    query = enrich_stream.started(messages, reference, target, arguments)
    job_support.follow(query, job_support.StopRequest(), enrich_stream.report)
    return query


@pytest.mark.long
def test_enrich_publishes_each_message_once_with_its_reference_row_also_when_batches_are_repeated(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    name: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client.create_stream(name, f"{name}.>")
    client.create_stream(f"{name}-out", f"{name}-out.>", dedupe_window="1h")
    (folder / "items.csv").write_text("sku,name,price\n007,Nut,0.25\nb,Bolt,1.5\n,nobody,1\n")
    values = [b'{"sku": "007", "value": 3, "other": 1}', b'{"sku": "b", "value": 2}', b'{"sku": "x", "value": 1}',
              b"\xff no JSON", b'{"sku": "b", "value": "many"}', b'{"value": 4}']  # fmt: skip
    pairs = pa.array(
        [[("Shop", "eu"), ("Shop", "us"), ("Nats-Msg-Id", f"in-{at}")] for at in range(len(values))],
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])),
    )
    keys = pa.array([b"k%d" % at for at in range(len(values))])
    publish(broker, [f"{name}.a.b"] * len(values), values, headers=pairs, keys=keys)

    given = enrich_arguments(name, folder, "--servers", broker.url, "--nats", nats_url)
    enrich(spark, enrich_stream.parser().parse_args(given))
    assert "6 messages, 2 without a reference row, 2 passed on unchanged" in capsys.readouterr().out
    rows = sorted(rows_of(client, f"{name}-out"), key=lambda row: row["key"])
    assert [json.loads(rows[at]["value"]) for at in (0, 1, 2, 5)] == [
        {"sku": "007", "value": 3, "name": "Nut", "price": 0.25, "total": 0.75},
        {"sku": "b", "value": 2, "name": "Bolt", "price": 1.5, "total": 3.0},
        {"sku": "x", "value": 1, "name": None, "price": None, "total": None},
        {"sku": None, "value": 4, "name": None, "price": None, "total": None},
    ]
    assert [rows[at]["value"] for at in (3, 4)] == [values[3], values[4]]
    assert [header(row, "Enrich-Error") is not None for row in rows] == [False, False, False, True, True, False]
    assert {row["subject"] for row in rows} == {f"{name}-out.a.b"}
    stream_id = client.stream(name)["id"]
    for at, row in enumerate(rows):
        assert row["key"] == b"k%d" % at
        assert [pair["value"] for pair in row["headers"] if pair["key"] == "Shop"] == ["eu", "us"]
        assert [pair["value"] for pair in row["headers"] if pair["key"] == "Nats-Msg-Id"] == [f"{stream_id}:{at}"]

    # From the beginning, with other batches: the worst that a crash could repeat.
    shutil.rmtree(folder / "checkpoint")
    arguments = enrich_stream.parser().parse_args([*given, "--max-offsets-per-trigger", "4"])
    query = enrich(spark, arguments)
    batches = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    assert batches == [4, 2], "everything was published again"
    assert len(all_values(client, f"{name}-out")) == len(values)

    # A batch that was left unfinished before the window of the output stream is not repeated unasked.
    window_s = enrich_stream.checked_target(arguments).window_s
    last = max((folder / "checkpoint" / "offsets").glob("[0-9]"), key=lambda path: int(path.name))
    (folder / "checkpoint" / "commits" / last.name).unlink()
    enrich_stream.check_unfinished(spark, arguments, window_s)
    os.utime(last, (time.time() - 7200, time.time() - 7200))
    with pytest.raises(NatslogError, match=r"left a batch unfinished 72\d\d s ago, .* deduplicates for 1h only"):
        enrich_stream.check_unfinished(spark, arguments, window_s)


@pytest.mark.long
def test_enrich_refuses_what_would_not_be_once(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, folder: Path
) -> None:
    client.create_stream(name, f"{name}.>")
    (folder / "items.csv").write_text("sku,name,price\na,Nut,1\na,Bolt,2\n")

    def refused(*more: str) -> str:
        given = enrich_arguments(name, folder, *more, "--servers", broker.url, "--nats", nats_url)
        arguments = enrich_stream.parser().parse_args(given)
        try:
            enrich_stream.checked_target(arguments)
            enrich_stream.reference_rows(spark, arguments)
        except NatslogError as error:
            return error.message
        return "not refused"

    said = run(broker, "enrich_stream.py", *enrich_arguments(name, folder), code=1).stderr
    assert said.startswith(f"error: no stream records {name}-out.>: run natslog stream create")
    client.create_stream(f"{name}-out", f"{name}-out.>", dedupe_window=None)
    assert f"stream {name}-out, which records --to-subject, does not deduplicate" in refused()
    assert "published messages would be read again" in refused("--to-subject", f"{name}.again.>")
    client.edit_stream(f"{name}-out", dedupe_window="1h")
    assert "several rows have the same sku, which must be unique: a (2 rows)" in refused()
    assert "has no column 'key'; it has sku, name, price" in refused("--on", "key")


@pytest.mark.long
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (["--fields", "sku int, value int"], "--on sku: it is int in --fields and string in --reference"),
        (["--fields", "sku string, name string"], "--fields and --reference both have name"),
        (["--fields", "value int"], "--on 'sku' is not one of --fields: value"),
        (["--fields", "sku string, __x int"], "'__x' must occur once, and must not begin with __"),
        (["--fields", "int"], "--fields 'int' is not names and types"),
        (["--derive", "price=1"], "the field price exists already"),
        (["--derive", "price"], "is not NAME=SQL"),
    ],
)
def test_enrich_refuses_names_that_clash(spark: SparkSession, folder: Path, changed: list[str], reason: str) -> None:
    (folder / "items.csv").write_text("sku,name,price\na,Nut,1\n")
    arguments = enrich_stream.parser().parse_args(enrich_arguments("any", folder, *changed))
    messages = spark.createDataFrame([], "offset long, subject string, key binary, value binary")
    reference = enrich_stream.reference_rows(spark, arguments)
    with pytest.raises(NatslogError, match=re.escape(reason)):
        enrich_stream.enriched(messages, enrich_stream.message_fields(arguments), reference, arguments)


# ---- replay_range ----


def recorded_us(client: NatslogClient, stream: str) -> list[int]:
    return [at for batch in client.read(stream) for at in batch.column("timestamp").cast(pa.int64()).to_pylist()]


@pytest.mark.long
def test_replay_of_a_time_range_keeps_order_keys_and_headers_and_may_be_repeated(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client.create_stream(name, f"{name}.>")
    client.create_stream(f"{name}-again", f"again.{name}.>", dedupe_window="1h")
    pair = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
    for part in range(3):
        subjects = [f"{name}.{row % 3}.x" for row in range(30)]
        publish(
            broker, subjects, [b"%d:%d \x00\xff" % (part, row) for row in range(30)],
            ids=[f"{part}-{row}" for row in range(30)], keys=pa.array([b"%d" % row for row in range(30)]),
            headers=pa.array([[("A", "b c")]] * 30, pair),
        )  # fmt: skip
    times = recorded_us(client, name)
    span = ["--stream", name, "--from", format_timestamp_us(times[30]), "--to", format_timestamp_us(times[60])]
    target = ["--to-subject", f"again.{name}.>"]

    def planned(*more: str) -> Any:
        given = [*span, *target, "--servers", broker.url, "--nats", nats_url, *more]
        return replay_range.planned(replay_range.parser().parse_args(given))

    replay_range.show(spark, planned())
    said = capsys.readouterr().out
    assert "would publish 30 messages to 3 subjects" in said
    assert re.search(rf"10 +again\.{name}\.2\.x", said)
    assert client.stream(f"{name}-again")["high_watermark"] == 0

    started = time.monotonic()
    replay_range.publish(spark, planned(), 5, job_support.StopRequest())  # 3 portions of 10
    said = capsys.readouterr().out
    assert "30 of 30 (100%)" in said
    assert time.monotonic() - started > 4.0, "the third portion is due after four seconds"
    original, again = rows_of(client, name)[30:60], rows_of(client, f"{name}-again")
    assert [(row["value"], row["key"]) for row in again] == [(row["value"], row["key"]) for row in original]
    assert [row["subject"] for row in again] == [f"again.{row['subject']}" for row in original]
    stream_id = client.stream(name)["id"]
    for at, row in enumerate(again, 30):
        pairs = [(pair["key"], pair["value"]) for pair in row["headers"] if pair["key"] != "Natslog-Key"]
        assert sorted(pairs) == [("A", "b c"), ("Nats-Msg-Id", f"replay:{stream_id}:{at}")]

    repeated = replace(planned(), first=55)
    replay_range.publish(spark, repeated, None, job_support.StopRequest())
    assert "5 of 5 (100%)" in capsys.readouterr().out
    assert len(all_values(client, f"{name}-again")) == 30, "what was replayed before is not stored again"
    replay_range.publish(spark, planned("--again", "x"), None, job_support.StopRequest())
    assert len(all_values(client, f"{name}-again")) == 60, "another replay is another one"


@pytest.mark.long
def test_replay_that_is_stopped_says_where_to_go_on(
    broker: BrokerProcess, client: NatslogClient, name: str, folder: Path
) -> None:
    client.create_stream(name, f"{name}.>")
    client.create_stream(f"{name}-again", f"again.{name}.>", dedupe_window="1h")
    publish(broker, [f"{name}.x"] * 1000, [b"%d" % row for row in range(1000)])
    log = folder / "replay.log"
    arguments = ["--stream", name, "--to-subject", f"again.{name}.>"]
    with running_job(broker, log, "replay_range.py", *arguments, "--rate", "10") as job:
        eventually(lambda: client.stream(f"{name}-again")["high_watermark"] >= 20, RUN_WITHIN_S, "a portion")
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 128 + signal.SIGTERM
    found = re.search(r"continue with --from-offset (\d+)$", log.read_text().strip())
    assert found is not None, log.read_text()
    stored = client.stream(f"{name}-again")["high_watermark"]
    assert int(found.group(1)) <= stored < 1000
    run(broker, "replay_range.py", *arguments, "--from-offset", found.group(1))
    assert all_values(client, f"{name}-again") == [b"%d" % row for row in range(1000)]


def test_replay_refuses_what_cannot_work(broker: BrokerProcess, client: NatslogClient, name: str) -> None:
    client.create_stream(name, f"{name}.>")
    for more, reason in [
        (["--to-subject", f"{name}.x"], "would be read again"),
        (["--to-subject", "x.{1}"], "has no * that {1} could stand for"),
        (["--to-subject", "x.>", "--from-offset", "5"], f"stream {name} has no offsets"),
        (["--to-subject", "x.>", "--ack", "stored"], "no stream records x.>"),
        (["--to-subject", "x.>", "--from", "2026-02-01", "--to", "2026-01-01"], "the range is empty"),
    ]:
        given = ["--stream", name, *more, "--servers", broker.url, "--nats", broker.nats_url]
        with pytest.raises(NatslogError, match=re.escape(reason)):
            replay_range.planned(replay_range.parser().parse_args(given))
