"""The commands in docs/SPARK.md, each run in a terminal as the page prints it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from natslog.nats_server import end_with_parent
from tests.clocks import WallClock
from tests.harness import all_values, eventually, running
from tests.readme import ROOT, Block
from tests.spark.page import RUN_WITHIN_S, Reader, recorded_around, runs

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]


@contextmanager
def left_running(command: str, reader: Reader) -> Iterator[None]:
    """A job in the reader's folder, beside `spark_jobs`; it must end cleanly on SIGTERM."""
    log = reader.folder / "job.log"
    with open(log, "wb") as output:
        job = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=reader.folder,
            env=reader.terminal,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    try:
        yield
        assert job.poll() is None, log.read_text()
        job.terminate()
        assert job.wait(60) == 0, log.read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


@pytest.fixture(autouse=True)
def checkout(folder: Path) -> None:
    (folder / "spark_jobs").symlink_to(ROOT / "spark_jobs")


@runs(block="Stream to stream, exactly once")
def test_stream_to_stream_stores_each_message_once_with_its_reference_row(reader: Reader, block: Block) -> None:
    create, enrich = block.shell_lines
    reader.create("orders", "orders.>")
    reader.publish("orders.eu", [b'{"sku": "a1", "quantity": 3}', b'{"sku": "b2", "quantity": 1}', b"no order"])
    (reader.folder / "items.csv").write_text("sku,name,price\na1,apple,0.35\n")
    reader.shell(create)
    reader.streams.append("enriched")
    with left_running(enrich, reader):
        eventually(lambda: reader.client.position("enriched")["high_watermark"] == 3, RUN_WITHIN_S)
    joined, alone, passed_on = all_values(reader.client, "enriched")
    expected = {"sku": "a1", "quantity": 3, "name": "apple", "price": 0.35, "total": 1.05}
    assert json.loads(joined) == expected
    assert {name: value for name, value in json.loads(alone).items() if value is not None} == {
        "sku": "b2",
        "quantity": 1,
    }
    assert passed_on == b"no order"


@runs(block="Stream to Parquet, in files of a wished size")
def test_stream_to_parquet_writes_every_message(reader: Reader, block: Block) -> None:
    (command,) = block.shell_lines
    reader.create("orders", "orders.>")
    reader.publish("orders.new", [b"%d" % number for number in range(50)])
    lake, commits = reader.folder / "lake" / "orders", reader.folder / "state" / "orders-lake" / "commits"
    with left_running(command, reader):
        eventually((commits / "0").exists, RUN_WITHIN_S)
    assert sorted(row.offset for row in reader.spark.read.parquet(str(lake)).collect()) == list(range(50))


@runs(block="Replay")
def test_replay_publishes_the_messages_of_the_hour_again(spark: SparkSession, folder: Path, block: Block) -> None:
    """A broker whose clock passes the end of that hour."""
    try_out, replay = block.shell_lines
    clock = WallClock(folder / "clock")
    with running(folder / "past", environment=clock.environment) as (nats, broker):
        reader = Reader(spark, broker, nats.url, folder, broker.client())
        before, _ = recorded_around("2026-11-20T11:00:00+00:00", reader, clock)
        reader.client.create_stream("replay", "replay.>")
        assert f"would publish {len(before)} messages to 1 subjects" in reader.shell(try_out)
        assert all_values(reader.client, "replay") == []
        reader.shell(replay)
        stored = [row for batch in reader.client.read("replay") for row in batch.to_pylist()]
        assert [row["value"] for row in stored] == all_values(reader.client, "orders")[: len(before)]
        assert {row["subject"] for row in stored} == {"replay.new"}
