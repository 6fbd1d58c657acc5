"""`spark.read.format("natslog")` in a real Spark: columns, ranges, options, and wrong ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from natslog.client import NatslogClient
from tests.harness import BrokerProcess, eventually, flushed, publish_acked, with_nats

pytestmark = pytest.mark.spark


@pytest.fixture
def filled(client: NatslogClient, nats_url: str, name: str) -> str:
    """100 messages in 20 commits on two subjects, the odd ones with key and headers."""
    client.create_stream(name, f"{name}.>")
    for at in range(20):
        headers = {"Natslog-Key": f"key{at}", "Trace": "t"} if at % 2 else None
        subject = f"{name}.{'odd' if at % 2 else 'even'}"
        publish_acked(nats_url, subject, [b"%d" % (5 * at + row) for row in range(5)], headers)
    return name


def read(spark: SparkSession, broker: BrokerProcess, stream: str, **options: Any) -> DataFrame:
    return spark.read.format("natslog").options(**{"servers": broker.url, "stream": stream} | options).load()


def offsets(frame: DataFrame) -> list[int]:
    return sorted(row["offset"] for row in frame.select("offset").collect())


def test_source_is_found_without_registration_and_has_the_promised_columns(
    spark: SparkSession, broker: BrokerProcess, filled: str
) -> None:
    frame = read(spark, broker, filled)
    assert frame.dtypes == [
        ("stream", "string"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("subject", "string"),
        ("key", "binary"),
        ("value", "binary"),
    ]
    rows = frame.orderBy("offset").collect()
    assert [bytes(row["value"]) for row in rows] == [b"%d" % at for at in range(100)]
    assert {row["stream"] for row in rows} == {filled}
    assert (rows[0]["key"], bytes(rows[5]["key"])) == (None, b"key1")
    assert rows[5]["subject"] == f"{filled}.odd"


def test_headers_are_added_on_request(spark: SparkSession, broker: BrokerProcess, filled: str) -> None:
    frame = read(spark, broker, filled, includeHeaders="true")
    assert frame.dtypes[-1] == ("headers", "array<struct<key:string,value:string>>")
    rows = frame.orderBy("offset").collect()
    assert rows[0]["headers"] is None
    assert [(pair["key"], pair["value"]) for pair in rows[5]["headers"]] == [("Natslog-Key", "key1"), ("Trace", "t")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0, 100)),
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, (0, 100)),
        ({"startingOffsets": "NAME:42"}, (42, 100)),
        ({"startingOffsets": "NAME:13", "endingOffsets": "NAME:14"}, (13, 14)),
        ({"endingOffsets": "NAME:7"}, (0, 7)),
        ({"startingOffsets": "NAME:5", "endingOffsets": "NAME:5"}, (5, 5)),
        ({"startingOffsets": "NAME:3", "endingOffsets": "NAME:98", "minPartitions": "7"}, (3, 98)),
        ({"maxRecordsPerPartition": "9"}, (0, 100)),
    ],
)
def test_ranges(
    spark: SparkSession, broker: BrokerProcess, filled: str, options: dict[str, str], expected: tuple[int, int]
) -> None:
    given = {
        name: json.dumps({filled: int(value[5:])}) if value.startswith("NAME:") else value
        for name, value in options.items()
    }
    frame = read(spark, broker, filled, **given)
    assert offsets(frame) == list(range(*expected))
    if "minPartitions" in options:
        assert frame.rdd.getNumPartitions() >= 7
    if "maxRecordsPerPartition" in options:
        assert frame.rdd.getNumPartitions() >= 12


def test_ranges_by_time(spark: SparkSession, broker: BrokerProcess, client: NatslogClient, filled: str) -> None:
    rows = [row for batch in client.read(filled, columns=["offset", "timestamp"]) for row in batch.to_pylist()]
    low, high = rows[30]["timestamp"], rows[70]["timestamp"]
    expected = [row["offset"] for row in rows if low <= row["timestamp"] < high]
    frame = read(spark, broker, filled, startingTimestamp=low.isoformat(), endingTimestamp=high.isoformat())
    assert offsets(frame) == expected
    both = read(spark, broker, filled, startingTimestamp=high.isoformat(), startingOffsets="earliest")
    assert offsets(both) == [row["offset"] for row in rows if row["timestamp"] >= high], "the time wins"


@pytest.mark.long
def test_projection_by_option_and_by_schema(spark: SparkSession, broker: BrokerProcess, filled: str) -> None:
    frame = read(spark, broker, filled, columns="subject,offset")
    assert frame.columns == ["subject", "offset"]
    assert frame.count() == 100
    schema = "value binary, stream string"
    other = spark.read.format("natslog").schema(schema).options(servers=broker.url, stream=filled).load()
    assert other.columns == ["value", "stream"]
    assert sorted(int(bytes(row["value"])) for row in other.collect()) == list(range(100))


def test_subject_filter_is_applied(spark: SparkSession, broker: BrokerProcess, filled: str) -> None:
    frame = read(spark, broker, filled, subjectFilter="*.odd")
    assert offsets(frame) == [at for at in range(100) if at // 5 % 2]


def test_several_streams_in_one_read(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, filled: str
) -> None:
    client.create_stream(f"{filled}-more", f"more.{filled}")
    publish_acked(nats_url, f"more.{filled}", [b"x", b"y"])
    counts = read(spark, broker, f"{filled},{filled}-more").groupBy("stream").count().collect()
    assert {row["stream"]: row["count"] for row in counts} == {filled: 100, f"{filled}-more": 2}


def test_filter_then_count_then_plain_count(spark: SparkSession, broker: BrokerProcess, filled: str) -> None:
    """Scans of one DataFrame share a plan: what one filters must not be missing in the next."""
    frame = read(spark, broker, filled)
    assert frame.filter(F.col("offset") < 10).count() == 10
    assert frame.count() == 100


def test_empty_stream_is_an_empty_frame(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name)
    assert read(spark, broker, name).count() == 0


def test_large_binary_values_survive(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name)
    values = [bytes([at]) * 900_000 for at in range(5)]
    publish_acked(nats_url, name, values)
    assert [bytes(row["value"]) for row in read(spark, broker, name).orderBy("offset").collect()] == values


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingOfsets": "earliest"}, "unknown option.*did you mean 'startingOffsets'"),
        ({"startingOffsets": "soon"}, "startingOffsets.*must be earliest, latest, cursor:NAME or JSON"),
        ({"startingOffsets": '{"other": 1}'}, "names 'other', which is not read"),
        ({"startingOffsets": "NAME:500"}, "above the high watermark 100"),
        ({"startingOffsets": "NAME:9", "endingOffsets": "NAME:3"}, "start, offset 9, is above the end, offset 3"),
        ({"columns": "offset,valeu"}, "unknown column 'valeu'; did you mean 'value'"),
        ({"columns": "offset", "includeHeaders": "true"}, "clash"),
        ({"failOnDataLoss": "maybe"}, "must be true or false"),
        ({"minPartitions": "0"}, "whole number of at least 1"),
        ({"minPartitions": "9" * 5000}, "whole number of at least 1"),
        ({"subjectFilter": "a..b"}, "empty token"),
        ({"startingTimestamp": "noon"}, "not a time"),
        ({"fetchTimeout": "soon"}, "not a duration"),
        ({"servers": "ftp://x"}, "not a URL"),
    ],
)
@pytest.mark.long
def test_wrong_options_are_named(
    spark: SparkSession, broker: BrokerProcess, filled: str, options: dict[str, str], words: str
) -> None:
    given = {
        name: json.dumps({filled: int(value[5:])}) if value.startswith("NAME:") else value
        for name, value in options.items()
    }
    with pytest.raises(Exception, match=words):
        read(spark, broker, filled, **given).count()


def test_missing_stream_option_and_unknown_stream(spark: SparkSession, broker: BrokerProcess) -> None:
    with pytest.raises(Exception, match="option stream is missing") as missing:
        spark.read.format("natslog").option("servers", broker.url).load().count()
    with pytest.raises(Exception, match="there is no stream 'nosuch'") as unknown:
        read(spark, broker, "nosuch").count()
    frames = [str(one.value).count('File "') for one in (missing, unknown)]
    assert frames == [0, 0], "the errors are sentences, without frames of the worker"


@pytest.mark.long
def test_broker_that_is_not_there_is_named(spark: SparkSession) -> None:
    options = {"servers": "http://127.0.0.1:1", "stream": "x", "fetchTimeout": "1s", "fetchRetries": "0"}
    with pytest.raises(Exception, match="no broker answered.*127.0.0.1:1"):
        spark.read.format("natslog").options(**options).load().count()


def test_wrong_schema_is_named(spark: SparkSession, broker: BrokerProcess, filled: str) -> None:
    reader = spark.read.format("natslog").options(servers=broker.url, stream=filled)
    with pytest.raises(Exception, match="column 'offset' is bigint, not string"):
        reader.schema("offset string").load().count()


def test_columns_and_another_schema_clash(spark: SparkSession, broker: BrokerProcess, filled: str) -> None:
    reader = spark.read.format("natslog").options(servers=broker.url, stream=filled, columns="offset,subject")
    with pytest.raises(Exception, match=r"option columns and \.schema.* clash: offset, subject and offset"):
        reader.schema("offset long").load().count()
    assert reader.schema("offset long, subject string").load().columns == ["offset", "subject"]


@pytest.mark.long
def test_start_below_the_log_start_is_loss_or_accepted(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name, max_messages=80)

    async def work(connection: Any) -> None:
        for _ in range(10):
            for _ in range(30):
                await connection.publish(name, b"x" * 3000)
            await flushed(connection)
            await flushed(connection)
            await connection.request(name, b"y" * 3000, timeout=30)

    with_nats(nats_url, work)
    log_start = eventually(lambda: client.stream(name)["log_start_offset"])
    start = json.dumps({name: 0})
    with pytest.raises(Exception, match="offsets 0 to [0-9]+ are lost.*failOnDataLoss"):
        read(spark, broker, name, startingOffsets=start).count()
    kept = offsets(read(spark, broker, name, startingOffsets=start, failOnDataLoss="false"))
    assert kept[0] >= log_start > 0
    assert kept[-1] == 309
