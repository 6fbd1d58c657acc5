"""Every block of code in docs/SPARK.md is run as it stands in the page, and does what the page says."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import Row
from pyspark.sql.streaming import StreamingQuery

from natslog.nats_server import free_port
from tests.harness import eventually, flushed, natslog, with_nats
from tests.pages import page_blocks
from tests.readme import Block
from tests.spark.page import Reader, rows_of, runs, table

pytestmark = pytest.mark.spark


def columns_that_the_comment_names(block: Block) -> list[str]:
    """`# stream, offset, …` in the block."""
    found = re.search(r"# (stream, offset, [\w, ]*\w)", block.text)
    assert found is not None, "the block names its columns"
    return found[1].split(", ")


def utc(text: str) -> datetime.datetime:
    """As Spark returns a time to Python: without a zone, in the zone of the machine."""
    return datetime.datetime.fromisoformat(text).astimezone().replace(tzinfo=None)


# ---- reading ----


@runs(block="Spark: the source and the sink `natslog` (2)")
@pytest.mark.long
def test_introduction_reads_a_stream_with_the_columns_that_it_names(reader: Reader, block: Block) -> None:
    reader.create("orders", "orders.>")
    reader.publish("orders.new", [b"first", b"second"])
    orders = reader.run(block).names["orders"]
    assert orders.isStreaming
    assert orders.columns == columns_that_the_comment_names(block)
    found = [(*row[:2], row.subject, row.key, bytes(row.value)) for row in rows_of(orders)]
    assert sorted(found) == [
        ("orders", 0, "orders.new", None, b"first"),
        ("orders", 1, "orders.new", None, b"second"),
    ]


@runs(block="Typed payloads")
@pytest.mark.long
def test_json_payloads_become_the_columns_of_the_schema(reader: Reader, block: Block) -> None:
    reader.create("orders", "orders.>")
    order = b'{"id": 7, "user": "ann", "price": 12.50, "tags": ["a", "b"], "other": 1}'
    reader.publish("orders.new", [order, b"no order"])
    orders = reader.run(block).names["orders"]
    assert orders.columns == columns_that_the_comment_names(block)
    assert orders.schema["price"].dataType.simpleString() == "decimal(10,2)", "which equals a double in Python"
    good, malformed = sorted(rows_of(orders), key=lambda row: row.offset)
    assert good[5:] == (7, "ann", Decimal("12.50"), ["a", "b"], None)
    assert malformed[5:] == (None, None, None, None, "no order")


@runs(block="Payloads as one struct column")
@pytest.mark.long
def test_struct_column_has_fields_that_are_named_as_columns_of_natslog(reader: Reader, block: Block) -> None:
    reader.create("sensors", "sensors.>")
    measured = "2026-11-20T10:00:00+00:00"
    reader.publish(
        "sensors.a", [b'{"timestamp": "%s", "key": "k", "celsius": 21.5}' % measured.encode(), b"no reading"]
    )
    ran = reader.run(block)
    (selected,) = ran.values
    assert ran.names["readings"].columns == columns_that_the_comment_names(block)
    good, malformed = sorted(rows_of(ran.names["readings"]), key=lambda row: row.offset)
    assert good.payload == Row(timestamp=utc(measured), key="k", celsius=21.5)
    assert (malformed.payload, malformed._corrupt_record) == (Row(None, None, None), "no reading")
    assert selected.columns == ["offset", "timestamp", "timestamp", "celsius"]
    rows = sorted(tuple(row) for row in rows_of(selected))
    assert rows == [(0, good.timestamp, utc(measured), 21.5), (1, malformed.timestamp, None, None)]


# ---- writing ----


@runs(block="Writing")
@pytest.mark.long
def test_streaming_sink_stores_every_row_and_keeps_its_position(reader: Reader, block: Block) -> None:
    reader.create("readings", "readings.>")
    reader.create("alerts", "alerts.>")
    reader.publish("readings.a", [b"low", b"high"])
    readings = reader.spark.readStream.format("natslog").option("servers", reader.broker.url).load("readings")
    (query,) = reader.run(block, alerts=readings.selectExpr("offset", "cast(value as string) as level")).values
    query.processAllAvailable()
    stored = [row for batch in reader.client.read("alerts") for row in batch.to_pylist()]
    assert sorted(row["value"] for row in stored) == [b'{"offset":0,"level":"low"}', b'{"offset":1,"level":"high"}']
    assert {row["subject"] for row in stored} == {"alerts.quakes"}
    logged = (reader.folder / "checkpoints" / "alerts" / "offsets" / "0").read_text().splitlines()[-1]
    assert json.loads(logged)["readings"]["offset"] == 2


@runs(block="Direct append (`path=http`)")
def test_direct_append_stores_every_row_without_a_message_to_subscribers(reader: Reader, block: Block) -> None:
    reader.create("orders", "orders.>")
    orders = reader.spark.createDataFrame([("DE", 3), ("FR", 5)], "country string, quantity int")

    with subscribed(reader.nats_url, "orders.>") as received:
        reader.run(block, orders=orders)
    assert received() == 0
    stored = [row for batch in reader.client.read("orders") for row in batch.to_pylist()]
    assert sorted((row["subject"], row["value"]) for row in stored) == [
        ("orders.DE", b'{"country":"DE","quantity":3}'),
        ("orders.FR", b'{"country":"FR","quantity":5}'),
    ]
    assert len({row["timestamp"] for row in stored}) == 1, "one batch, with one timestamp"


@contextmanager
def subscribed(url: str, subject: str) -> Iterator[Callable[[], int]]:
    """Within this, another program subscribes to the subject; the number of messages that it got, for afterwards."""
    listens, is_done = threading.Event(), threading.Event()

    async def listen(nats: Any) -> int:
        subscription = await nats.subscribe(subject)
        await nats.flush()
        listens.set()
        await asyncio.to_thread(is_done.wait)
        await flushed(nats)
        return int(subscription.pending_msgs)

    with ThreadPoolExecutor() as threads:
        listening = threads.submit(with_nats, url, listen)
        try:
            assert listens.wait(10)
            yield listening.result
        finally:
            is_done.set()


# ---- lag and cursors ----


@runs(block="In the log and in Prometheus: `LagListener`")
@pytest.mark.long
def test_lag_listener_logs_the_line_and_serves_the_gauges_of_the_page(
    reader: Reader, block: Block, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pyspark_natslog.lag")
    reader.create("orders", "orders")
    reader.publish("orders", [b"x" * 100] * 300)
    port = free_port()
    listener = reader.run(block, {"9400": str(port)}).names["listener"]
    try:
        query = slow_query(reader)
        gauges = {(name, *labels) for name, labels in table_of_gauges()}
        eventually(lambda: {(name, *labels) for name, labels, _ in scraped(port)} == gauges, 60, "every gauge is there")
        (behind,) = [value for name, _, value in scraped(port) if name == "natslog_query_rows_behind"]
        assert 0 < behind < 300
        progress = page_blocks("SPARK.md")["In the query's own progress"].text
        assert query.lastProgress is not None
        assert fields_of(query.lastProgress.sources[0].latestOffset) == fields_of(progress)
        query.stop()
        eventually(lambda: not scraped(port), 30, "the series end with the query")
    finally:
        reader.spark.streams.removeListener(listener)
        listener.close()
    printed = re.findall(r"(\w+)=", page_blocks("SPARK.md")[f"{block.heading} (2)"].text)
    line = next(record.getMessage() for record in caplog.records if record.name == "pyspark_natslog.lag")
    assert re.findall(r"(\w+)=", line) == printed
    assert line.startswith("query=enrich stream=orders rows_behind=299 ")


def fields_of(latest_offset: str) -> list[str]:
    return list(json.loads(latest_offset)["orders"])


def slow_query(reader: Reader) -> StreamingQuery:
    """It takes a row of the stream `orders` every second."""
    source = reader.spark.readStream.format("natslog").option("servers", reader.broker.url)
    rows = source.option("maxOffsetsPerTrigger", 1).load("orders")
    return rows.writeStream.format("noop").queryName("enrich").trigger(processingTime="1 second").start()


def table_of_gauges() -> list[tuple[str, tuple[str, ...]]]:
    rows = table("In the log and in Prometheus: `LagListener`")
    return [(name.strip("`"), tuple(sorted(re.findall(r"\w+", labels)))) for name, labels in rows]


def scraped(port: int) -> list[tuple[str, tuple[str, ...], float]]:
    """Name, names of labels and value of each sample."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return [(one.name, tuple(sorted(one.labels)), one.value) for family in families for one in family.samples]


@runs(block="At the brokers: `cursor`", shown="At the brokers: `cursor` (2)")
@pytest.mark.long
def test_cursor_of_a_query_is_listed_as_the_page_shows(reader: Reader, block: Block, shown: Block) -> None:
    reader.create("orders", "orders")
    reader.publish("orders", [b"x"] * 38)
    (frame,) = reader.run(block).values
    assert len(rows_of(frame)) == 38
    eventually(lambda: reader.client.cursor("enrich", "orders")["offset"] == 38, what="the last position is written")
    reader.publish("orders", [b"x"] * 12)
    (command,) = shown.commands
    header, listed = command.output
    found = natslog(*command.text.split()[1:], url=reader.broker.url).stdout.splitlines()
    assert found[0].split() == header.split()
    (line,) = [line for line in found if line.startswith("enrich ")]
    assert cells(line)[:3] == ["enrich", "orders", "38"]
    assert cells(line)[4] == "12"
    assert len(cells(line)) == len(cells(listed))
    assert cells(line)[-1] == cells(listed)[-1] == "behind"


def cells(line: str) -> list[str]:
    return re.split(r"  +", line.strip())
