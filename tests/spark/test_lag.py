"""What operators see of a query: lag in its progress, the listener's log and metrics, the cursor at the brokers."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from natslog.client import NatslogClient
from natslog.errors import ConfigError
from pyspark_natslog import LagListener
from tests.harness import BrokerProcess, eventually, publish_acked

pytestmark = pytest.mark.spark


@pytest.fixture
def stream(client: NatslogClient, nats_url: str, name: str) -> str:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"." * 100] * 100)
    return name


@pytest.fixture
def listener(spark: SparkSession) -> Iterator[LagListener]:
    listener = LagListener()
    spark.streams.addListener(listener)
    yield listener
    spark.streams.removeListener(listener)
    listener.close()


def start(spark: SparkSession, url: str, stream: str, folder: Path, **options: str) -> StreamingQuery:
    source = spark.readStream.format("natslog").options(servers=url, stream=stream, maxOffsetsPerTrigger="30")
    writer = source.options(**options).load().writeStream.format("noop").queryName(f"query of {stream}")
    return writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()


def latest_of(query: StreamingQuery, stream: str) -> list[dict]:
    """What each progress says of the stream."""
    return [json.loads(one.sources[0].latestOffset)[stream] for one in query.recentProgress if one.numInputRows]


@pytest.mark.long
def test_progress_tells_what_each_batch_leaves_unread_and_the_cursor_follows(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    stream: str,
    tmp_path: Path,
    listener: LagListener,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pyspark_natslog.lag")
    port = listener.start_http_server(0)
    query = start(spark, broker.url, stream, tmp_path, cursor="report")
    query.awaitTermination()
    latest = latest_of(query, stream)
    stream_id = client.stream(stream)["id"]
    assert [(one["id"], one["offset"], one["rows_behind"]) for one in latest] == [
        (stream_id, 100, behind) for behind in (70, 40, 10, 0)
    ]
    # Null where a busy broker did not answer within 100 ms; `rows_behind` is always known.
    known = {
        one["rows_behind"]: (one["bytes_behind"], one["seconds_behind"])
        for one in latest
        if one["bytes_behind"] is not None
    }
    assert [size for size, _ in known.values()] == sorted((size for size, _ in known.values()), reverse=True)
    assert known.get(10, (1001, 1))[0] > 10 * 100
    assert known.get(0, (0, 0)) == (0, 0)
    assert all(0 < age < 600 for behind, (_, age) in known.items() if behind)

    # none of it is in the checkpoint, and a restart goes on from there
    logged = (tmp_path / "checkpoint" / "offsets" / "3").read_text().splitlines()[-1]
    assert json.loads(logged) == {stream: {"id": stream_id, "offset": 100}}
    # the last position is written although Spark ends the source's process without a word
    eventually(lambda: client.cursor("report", stream)["offset"] == 100, 30, "the last position is written")
    publish_acked(nats_url, stream, [b"more"] * 20)
    again = start(spark, broker.url, stream, tmp_path, cursor="report")
    again.awaitTermination()
    assert [one["rows_behind"] for one in latest_of(again, stream)] == [0]
    eventually(lambda: client.cursor("report", stream)["offset"] == 120, 30)
    assert client.cursor("report", stream)["rewound"] is None

    # the listener has received everything
    eventually(lambda: any(record.stream == stream for record in caplog.records), 30, "it is logged")
    record = next(record for record in caplog.records if record.stream == stream)
    assert (record.query, record.rows_behind) == (f"query of {stream}", 70)
    size, age = known.get(70, ("unknown", "unknown"))
    assert f"rows_behind=70 bytes_behind={size} seconds_behind={age}" in record.getMessage()
    eventually(lambda: not listener.queries(), 30, "a query that ended is gone")
    assert scrape(port) == {}
    with pytest.raises(
        ConfigError, match=f"lag metrics on 127.0.0.1, port {port}: another program uses it: choose another"
    ):
        LagListener().start_http_server(port)


def scrape(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(sample.name, sample.labels.get("stream", "")): sample.value for one in families for sample in one.samples}


@pytest.mark.long
def test_metrics_follow_a_running_query_and_end_with_it(
    spark: SparkSession, broker: BrokerProcess, client: NatslogClient, stream: str, listener: LagListener
) -> None:
    port = listener.start_http_server(0)
    source = spark.readStream.format("natslog").options(servers=broker.url, stream=stream, maxOffsetsPerTrigger="1")
    source = source.option("cursor", "metered").load()
    query = source.writeStream.format("noop").trigger(processingTime="100 milliseconds").start()
    try:
        found = eventually(lambda: scrape(port), 60, "metrics of the query")
        assert 0 < found["natslog_query_rows_behind", stream] < 100
        assert found["natslog_query_bytes_behind", stream] > 100
        assert found["natslog_query_seconds_behind", stream] > 0
        assert found["natslog_query_batch_duration_seconds", ""] > 0
        assert {"natslog_query_input_rows_per_second", "natslog_query_processed_rows_per_second"} <= {
            name for name, _ in found
        }
        eventually(lambda: scrape(port)["natslog_query_rows_behind", stream] < 95, 60)
    finally:
        query.stop()
    done = json.loads(query.lastProgress.sources[0].endOffset)[stream]["offset"]
    eventually(lambda: client.cursor("metered", stream)["offset"] >= done - 1, 30, "the last position is written")
    eventually(lambda: scrape(port) == {}, 30, "its series end with it")


@pytest.mark.long
def test_progress_and_metrics_count_what_is_lost(
    spark: SparkSession,
    broker: BrokerProcess,
    client: NatslogClient,
    stream: str,
    tmp_path: Path,
    listener: LagListener,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a cursor: the columnar reader, where it is there, reports the same."""
    client.purge(stream, below=40)
    port = listener.start_http_server(0)
    options = {"failOnDataLoss": "false", "startingOffsets": json.dumps({stream: 0}), "maxOffsetsPerTrigger": "1"}
    source = spark.readStream.format("natslog").options(servers=broker.url, stream=stream, **options).load()
    query = source.writeStream.format("noop").queryName("loses").trigger(processingTime="100 milliseconds").start()
    try:
        found = eventually(lambda: scrape(port), 60, "metrics of the query")
        assert found["natslog_query_rows_lost_total", stream] == 40
        assert 0 < found["natslog_query_rows_behind", stream] < 60
        eventually(lambda: ("natslog_query_bytes_behind", stream) in scrape(port), 60, "a broker stated the bytes")
    finally:
        query.stop()
    latest = latest_of(query, stream)
    assert {one["rows_lost"] for one in latest} == {40}
    assert all(one["bytes_behind"] > 100 and one["seconds_behind"] > 0 for one in latest if one["bytes_behind"])
    assert "query loses has lost 40 rows of stream" in caplog.text


@pytest.mark.long
def test_without_lag_the_progress_is_as_it_was(
    spark: SparkSession, broker: BrokerProcess, stream: str, tmp_path: Path
) -> None:
    query = start(spark, broker.url, stream, tmp_path, lag="false")
    query.awaitTermination()
    assert {tuple(one) for one in latest_of(query, stream)} == {("id", "offset")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cursor": "re port"}, "option cursor: consumer name 're port' is not allowed"),
        ({"cursor": ""}, "option cursor: a consumer name must not be empty"),
        ({"lag": "maybe"}, "option lag 'maybe' must be true or false"),
        ({"curser": "x"}, "unknown option 'curser'; did you mean 'cursor'"),
    ],
)
def test_wrong_option_is_an_error_before_the_query_starts(
    spark: SparkSession, broker: BrokerProcess, stream: str, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        spark.readStream.format("natslog").options(servers=broker.url, stream=stream, **options).load()


@pytest.mark.long
def test_cursor_and_lag_are_for_streams(spark: SparkSession, broker: BrokerProcess, stream: str) -> None:
    for name, value in (("cursor", "report"), ("lag", "true")):
        with pytest.raises(Exception, match=f"option {name} is for streaming reads"):
            spark.read.format("natslog").options(servers=broker.url, stream=stream, **{name: value}).load().count()


def test_package_stays_light_until_the_listener_is_named() -> None:
    look = (
        "import sys, pyspark_natslog; before = set(sys.modules); pyspark_natslog.LagListener; "
        "print([name for name in ('prometheus_client', 'pyspark_natslog.lag_listener', 'natslog.client', 'pyarrow')"
        " if name in before], 'pyspark_natslog.lag_listener' in sys.modules, 'prometheus_client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True False"
