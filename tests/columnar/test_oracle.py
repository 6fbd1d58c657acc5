"""Rows of the columnar reader, compared with those of the Python source, which is in the same session under another
name; and what the plan says about what is read.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from natslog.nats_server import NatsServer
from pyspark_natslog import DefaultSource
from tests.harness import BrokerProcess, publish_acked

ROWS = 600
STREAM = "oracle"
REMOVED = (0, 7, 8, 250, ROWS - 1)


class PythonSource(DefaultSource):
    @classmethod
    def name(cls) -> str:
        return "natslog_in_python"


@pytest.fixture(scope="module")
def sources(spark: SparkSession, shared: tuple[NatsServer, BrokerProcess]) -> tuple[SparkSession, str]:
    """A stream in many small batches, with headers, several subjects, empty values and removed messages."""
    spark.dataSource.register(PythonSource)
    nats, broker = shared
    client = broker.client()
    client.create_stream(STREAM, f"{STREAM}.>")
    for start in range(0, ROWS, 30):
        values = [b"v" * (at % 50) + bytes([at % 256]) for at in range(start, start + 30)]
        headers = {"number": str(start), "letter": "ü"} if start % 60 else None
        publish_acked(nats.url, f"{STREAM}.{start % 4}.x", values, headers=headers)
    for offset in REMOVED:
        client.delete_message(STREAM, offset)
    return spark, broker.url


def read(source: tuple[SparkSession, str], name: str, options: dict[str, str]) -> DataFrame:
    spark, url = source
    return spark.read.format(name).options(servers=url, stream=STREAM, **options).load()


def rows_of(frame: DataFrame) -> list[Any]:
    return sorted((tuple(row) for row in frame.collect()), key=repr)


positions = st.one_of(st.just("earliest"), st.just("latest"), st.integers(0, ROWS).map(str))


@st.composite
def options(draw: st.DrawFn) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("startingOffsets", "endingOffsets"):
        if draw(st.booleans()):
            at = draw(positions)
            found[name] = json.dumps({STREAM: int(at)}) if at.isdecimal() else at
    if draw(st.booleans()):
        found["subjectFilter"] = draw(st.sampled_from([f"{STREAM}.*.x", f"{STREAM}.2.>", "nothing.>"]))
    columns = draw(st.sets(st.sampled_from(["stream", "offset", "timestamp", "subject", "key", "value", "headers"])))
    if columns:
        found["columns"] = ",".join(sorted(columns))
    if draw(st.booleans()):
        found["minPartitions"] = str(draw(st.integers(1, 5)))
    if draw(st.booleans()):
        found["maxRecordsPerPartition"] = str(draw(st.integers(20, 300)))
    return found


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=options())
def test_both_sources_give_the_same_rows_or_the_same_error(
    sources: tuple[SparkSession, str], chosen: dict[str, str]
) -> None:
    found = [rows_or_error(partial(read, sources, name, chosen)) for name in ("natslog", "natslog_in_python")]
    assert found[0] == found[1]


def rows_or_error(load: Callable[[], DataFrame]) -> list[Any] | str:
    """The error is that of a start that is above the end, or of a position that makes the read empty."""
    try:
        return rows_of(load())
    except Exception as error:
        crossed = r"the start, offset \d+, is above the end, offset \d+"
        stated = re.search(rf"{crossed}|option \w+Offsets: a batch read with \w+ would be empty", str(error))
        if stated is None:
            raise
        return stated[0]


def times(source: tuple[SparkSession, str]) -> tuple[datetime, datetime]:
    found = read(source, "natslog_in_python", {}).selectExpr("min(timestamp)", "max(timestamp)").collect()[0]
    return found[0], found[1]


offsets = st.integers(-3, ROWS + 3)
comparisons = st.sampled_from(["<", "<=", "=", ">=", ">"])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_filters_leave_out_nothing_that_is_wanted(sources: tuple[SparkSession, str], data: st.DataObject) -> None:
    first, last = times(sources)
    span_ms = int((last - first) / timedelta(milliseconds=1))
    conditions = [f"offset {data.draw(comparisons)} {data.draw(offsets)}"]
    if data.draw(st.booleans()):
        moment = first + timedelta(milliseconds=data.draw(st.integers(-5, span_ms + 5)))
        conditions.append(f"timestamp {data.draw(comparisons)} timestamp '{moment.isoformat(sep=' ')}'")
    if data.draw(st.booleans()):
        conditions.append(data.draw(st.sampled_from([f"subject = '{STREAM}.2.x'", "subject = 'a.*'", "subject > 'a'"])))
    condition = data.draw(st.sampled_from([" and ", " or "])).join(conditions)
    frames = [read(sources, name, {}).where(condition) for name in ("natslog", "natslog_in_python")]
    assert rows_of(frames[0].select("offset", "value")) == rows_of(frames[1].select("offset", "value")), condition
    assert frames[0].count() == frames[1].count(), condition


def plan(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())  # type: ignore[operator]


def test_plan_names_what_is_read(sources: tuple[SparkSession, str]) -> None:
    whole = read(sources, "natslog", {})
    assert "natslog stream oracle [offset, value]" in plan(whole.select("value", "offset"))
    assert "[stream, offset, timestamp, subject, key, value]" in plan(whole)


def sent_bytes(url: str) -> float:
    """Of messages of the stream, by the broker so far."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith(f'natslog_sent_bytes_total{{stream="{STREAM}"')
    )


def test_count_is_exact_and_reads_no_rows(sources: tuple[SparkSession, str]) -> None:
    whole, before = read(sources, "natslog", {}), sent_bytes(sources[1])
    assert "LocalTableScan" in plan(whole.groupBy().count())
    assert "natslog stream oracle []" in plan(whole.limit(9).groupBy().count())
    assert whole.count() == ROWS - len(REMOVED)
    assert sent_bytes(sources[1]) == before
    assert read(sources, "natslog", {"subjectFilter": f"{STREAM}.2.x"}).count() == ROWS // 2 - sum(
        at // 30 % 2 for at in REMOVED
    )
    assert sent_bytes(sources[1]) > before


@pytest.mark.parametrize(
    ("start", "end"), [(0, ROWS), (0, 1), (7, 9), (5, 9), (7, 251), (ROWS - 1, ROWS), (ROWS - 40, ROWS), (30, 30)]
)
def test_first_and_last_offset_and_time_are_exact_and_read_few_rows(
    sources: tuple[SparkSession, str], start: int, end: int
) -> None:
    wanted = ("max(timestamp)", "min(offset)", "count(*)", "max(offset)", "min(timestamp)", "max(offset) - min(offset)")
    ranges = {"startingOffsets": json.dumps({STREAM: start}), "endingOffsets": json.dumps({STREAM: end})}
    frames = [read(sources, name, ranges).selectExpr(*wanted) for name in ("natslog_in_python", "natslog")]
    assert "LocalTableScan" in plan(frames[1])
    assert frames[0].collect() == frames[1].collect()
    before = sent_bytes(sources[1])
    read(sources, "natslog", ranges).selectExpr(*wanted).collect()
    assert sent_bytes(sources[1]) - before < 200_000
    grouped = read(sources, "natslog", ranges).groupBy("subject").agg({"offset": "max"})
    assert "LocalTableScan" not in plan(grouped)


def test_columns_that_are_not_used_are_not_sent(sources: tuple[SparkSession, str]) -> None:
    sent = []
    for column in ("offset", "value"):
        before = sent_bytes(sources[1])
        read(sources, "natslog", {}).select(column).collect()
        sent.append(sent_bytes(sources[1]) - before)
    assert 8 * (ROWS - 100) < sent[0] < sent[1]


def test_limit_ends_each_task_early(sources: tuple[SparkSession, str]) -> None:
    whole = read(sources, "natslog", {"minPartitions": "4"})
    assert len(whole.limit(5).collect()) == 5
    assert whole.limit(ROWS * 2).count() == ROWS - len(REMOVED)


def test_size_is_known_to_the_optimizer(sources: tuple[SparkSession, str]) -> None:
    whole = read(sources, "natslog", {})
    size = whole._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()  # type: ignore[operator]
    assert ROWS < int(str(size)) < 1000 * ROWS
