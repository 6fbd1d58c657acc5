"""The blocks of docs/SPARK.md under "Recipes", run as they stand in the page; `test_parquet_jobs.py` has one more."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql import Row, SparkSession

from tests.clocks import WallClock
from tests.harness import all_values, running, with_nats
from tests.readme import Block
from tests.spark.page import (
    Reader,
    recorded_around,
    rows_of,
    runs,
    wait_for_rows,
)

pytestmark = pytest.mark.spark


@runs(block="Stream to Parquet, in files of a wished size (2)")
@pytest.mark.long
def test_parquet_recipe_writes_a_small_batch_as_one_file_a_day(reader: Reader, block: Block) -> None:
    reader.create("orders", "orders.>")
    reader.publish("orders.new", [b"%d" % number for number in range(200)])
    (query,) = reader.run(block).values
    wait_for_rows(query, 200)
    lake = reader.folder / "lake" / "orders"
    rows = reader.spark.read.parquet(str(lake)).selectExpr("offset", "day = to_date(timestamp) as is_its_day").collect()
    assert sorted(row.offset for row in rows) == list(range(200))
    assert all(row.is_its_day for row in rows)
    days = [day for day in lake.iterdir() if day.name.startswith("day=")]
    assert [len(list(day.glob("*.parquet"))) for day in days] == [1] * len(days)
    assert (reader.folder / "state" / "orders-lake" / "commits" / "0").exists()


@runs(spec="A declarative pipeline", flows="A declarative pipeline (2)")
@pytest.mark.long
def test_each_run_of_the_pipeline_goes_on_where_the_last_one_ended(reader: Reader, spec: Block, flows: Block) -> None:
    for block in (spec, flows):
        assert block.file_name is not None
        text = reader.code(block).replace("file:///state/", f"file://{reader.folder}/state/")
        (reader.folder / block.file_name).write_text(text)
    reader.create("orders", "orders.>")
    reader.client.create_stream("large", "large.>", dedupe_window="1h")
    reader.streams.append("large")
    for price, stored in ((200.5, 1), (300.0, 2)):
        reader.publish("orders.new", [b'{"id":1,"price":%f}' % price, b'{"id":2,"price":5}'])
        reader.shell("spark-pipelines run")
        values = [json.loads(value) for value in all_values(reader.client, "large")]
        assert [value["price"] for value in values] == [200.5, 300.0][:stored]


@runs(block="From a backfill to a stream, without a gap")
@pytest.mark.long
def test_stream_starts_where_the_backfill_ended_while_messages_arrive(reader: Reader, block: Block) -> None:
    reader.create("orders", "orders.>")
    reader.publish("orders.new", [b"before"] * 20)
    with publishing(reader) as published:
        ran = reader.run(block)
        (query,) = ran.values[1:]
        wait_for_rows(query, 20)
    query.processAllAvailable()
    past, live = (
        [row.offset for row in reader.spark.read.parquet(str(reader.folder / "lake" / name)).collect()]
        for name in ("orders-past", "orders-live")
    )
    assert sorted(past) == list(range(ran.names["end"]))
    assert sorted(past + live) == list(range(20 + len(published)))


@runs(block="Traces")
@pytest.mark.long
def test_rows_of_a_trace_are_found(reader: Reader, block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    async def publish(connection: Any) -> None:
        trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        for headers in (None, {"k": "v"}, {"k": "v", "Traceparent": trace}, {"traceparent": trace.replace("4", "5")}):
            await connection.request("orders.new", b"x", headers=headers, timeout=30)

    reader.create("orders", "orders.>")
    with_nats(reader.nats_url, publish)
    ran = reader.run(block)
    assert [row.trace_id and row.trace_id[:4] for row in ran.names["traced"].orderBy("offset").collect()] == [
        None,
        None,
        "4bf9",
        "5bf9",
    ]
    assert "|2     |4bf92f3577b34da6a3ce929d0e0e4736|" in capsys.readouterr().out


@contextmanager
def publishing(reader: Reader) -> Iterator[list[bytes]]:
    """One message after another on `orders.new` until the end; what has been stored."""
    published: list[bytes] = []
    is_done = threading.Event()

    def publish() -> None:
        while not is_done.wait(0.05):
            reader.publish("orders.new", [b"meanwhile"])
            published.append(b"meanwhile")

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield published
    finally:
        is_done.set()
        thread.join()


TIMES = ("2026-11-20T10:00:00+01:00", "2026-11-20T11:00:00+01:00")
"""Of the recipe; the second one is also its epoch milliseconds."""


@pytest.mark.long
@runs(block="Time travel")
def test_time_travel_reads_between_the_times_of_the_page_and_from_the_second_on(
    spark: SparkSession, folder: Path, block: Block
) -> None:
    """A broker whose clock passes the first of these times, and then, for another stream, the second."""
    clock = WallClock(folder / "clock")
    with running(folder / "past", environment=clock.environment) as (nats, broker):
        reader = Reader(spark, broker, nats.url, folder, broker.client())
        _, after = recorded_around(TIMES[0], reader, clock)
        assert travelled(reader, block) == [after, []]
        reader.client.delete_stream("orders")
        before, after = recorded_around(TIMES[1], reader, clock)
        assert travelled(reader, block) == [before, after]


def travelled(reader: Reader, block: Block) -> list[list[int]]:
    """Offsets that each of the recipe's frames has."""
    return [sorted(row.offset for row in rows_of(frame)) for frame in reader.run(block).values]


CUSTOMERS, ORDERS = [f"customer-{number}" for number in range(12)], 20


@pytest.mark.long
@runs(
    mapping="Order per key over many streams",
    commands="Order per key over many streams (2)",
    program="Order per key over many streams (3)",
)
def test_order_per_key_recipe_keeps_each_customers_messages_in_order(
    spark: SparkSession, folder: Path, mapping: Block, commands: Block, program: Block
) -> None:
    """With the server's configuration, the commands and the program of the page. Twice: the second time into a query
    that runs.
    """
    (folder / "nats.conf").write_text(mapping.text)
    lines = [json.dumps({"customer": customer, "number": at}) for at in range(ORDERS) for customer in CUSTOMERS]
    (folder / "orders.ndjson").write_text("\n".join(lines) + "\n")
    create, publish = commands.shell_lines
    with running(folder / "mapped", nats_arguments=("-c", str(folder / "nats.conf"))) as (nats, broker):
        reader = Reader(spark, broker, nats.url, folder, broker.client())
        reader.shell(create)
        reader.shell(publish)
        (query,) = reader.run(program, store=storing_in(folder / "stored")).values
        try:
            wait_for_rows(query, len(lines))
            reader.shell(publish)
            wait_for_rows(query, 2 * len(lines))
        finally:
            query.stop()
    check_order(folder / "stored")


def storing_in(folder: Path) -> Callable[[Iterable[Row]], None]:
    """For `foreachPartition`: a file for each partition that has rows."""
    folder.mkdir()

    def store(rows: Iterable[Row]) -> None:
        found = [(row.customer, row.stream, row.offset, json.loads(row.value)["number"]) for row in rows]
        if found:
            (folder / f"{uuid4().hex}.json").write_text(json.dumps(found))

    return store


def check_order(folder: Path) -> None:
    """Each customer's messages of a batch are in one file and in order, and all of them in one stream."""
    partitions = [json.loads(path.read_text()) for path in folder.iterdir()]
    streams, runs_of = defaultdict(set), defaultdict(list)
    for rows in partitions:
        of_each = defaultdict(list)
        for customer, stream, offset, number in rows:
            streams[customer].add(stream)
            of_each[customer].append((offset, number))
        for customer, found in of_each.items():
            assert found == sorted(found), "in the order of the stream"
            runs_of[customer].append(found)
    for customer in CUSTOMERS:
        numbers = [number for found in sorted(runs_of[customer]) for _, number in found]
        assert numbers == 2 * list(range(ORDERS)), "each message once, and a batch after the other"
        assert len(streams[customer]) == 1
    assert len(set.union(*streams.values())) > 1, "several streams share the customers"
