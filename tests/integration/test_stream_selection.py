"""Streams by glob and group, admission and tasks, called as Spark calls them, against a real broker."""

from __future__ import annotations

import json
import time
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows

from natslog.arrow.schema import HEADERS_TYPE
from natslog.client import NatslogClient, answers
from natslog.client.publisher import Publisher, Rows
from natslog.errors import DataLoss
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.reader import BatchReader
from pyspark_natslog.source.schema import spark_schema
from pyspark_natslog.source.splits import Task
from pyspark_natslog.source.stream_reader import StreamReader
from tests.harness import BrokerProcess, publish_acked

CONFIRMING_S = 2.0
"""How long a stream is looked for before it is reported as lost."""


def reader_of(broker: BrokerProcess, **options: Any) -> StreamReader:
    parsed = SourceOptions.parse({"servers": broker.url} | options, streaming=True)
    return StreamReader(parsed, spark_schema(parsed.selected_columns()))


def take(reader: StreamReader, start: dict[str, Any]) -> dict[str, Any]:
    return reader.latestOffset(start, reader.getDefaultReadLimit())


def rows_of(reader: Any, tasks: Any) -> list[tuple[str, int]]:
    rows = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
    return sorted((row["stream"], row["offset"]) for row in rows)


def rows_in_order(reader: Any, task: Any) -> list[tuple[str, int]]:
    return [(row["stream"], row["offset"]) for batch in reader.read(task) for row in batch.to_pylist()]


def moved(start: dict[str, Any], end: dict[str, Any]) -> dict[str, int]:
    return {name: at["offset"] - start.get(name, {"offset": at.get("start", 0)})["offset"] for name, at in end.items()}


@pytest.fixture
def family(client: NatslogClient, nats_url: str, name: str) -> str:
    """Two streams `NAME-a` and `NAME-b` with 60 and 20 messages of 100 bytes in several commits."""
    for suffix, commits in (("a", 6), ("b", 2)):
        client.create_stream(f"{name}-{suffix}", f"{name}.{suffix}")
        for _ in range(commits):
            publish_acked(nats_url, f"{name}.{suffix}", [b"." * 100] * 10)
    return name


def expected(name: str, **counts: int) -> list[tuple[str, int]]:
    return [(f"{name}-{suffix}", at) for suffix, count in sorted(counts.items()) for at in range(count)]


@pytest.mark.long
def test_pattern_takes_in_streams_that_come_later_from_their_start(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, family: str
) -> None:
    reader = reader_of(broker, streamPattern=f"{family}-*")
    start = reader.initialOffset()
    assert sorted(start) == [f"{family}-a", f"{family}-b"]
    first = take(reader, start)
    assert rows_of(reader, reader.partitions(start, first)) == expected(family, a=60, b=20)
    client.create_stream(f"{family}-c", f"{family}.c")
    client.create_stream(f"other-{family}-d", f"{family}.d")
    publish_acked(nats_url, f"{family}.c", [b"x"] * 5)
    second = take(reader, first)
    assert second[f"{family}-c"]["start"] == 0
    assert rows_of(reader, reader.partitions(first, second)) == [(f"{family}-c", at) for at in range(5)]
    assert take(reader, second) == second, "nothing moved: the same text, and no batch"
    publish_acked(nats_url, f"{family}.c", [b"x"])
    assert "start" not in take(reader, second)[f"{family}-c"]


def test_a_batch_that_a_stream_joined_with_is_the_same_when_it_is_repeated(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    """Retention takes the stream's first messages between the crash and the repetition: that is loss, and is named."""
    client.create_stream(f"{name}-a", f"{name}.a")
    reader = reader_of(broker, streamPattern=f"{name}-*")
    start = reader.initialOffset()
    client.create_stream(f"{name}-b", f"{name}.b")
    publish_acked(nats_url, f"{name}.b", [b"x"] * 5)
    end = take(reader, start)
    assert rows_of(reader, reader.partitions(start, end)) == [(f"{name}-b", at) for at in range(5)]
    later = end | {f"{name}-b": end[f"{name}-b"] | {"start": 3}}
    assert rows_of(reader, reader.partitions(start, later)) == [(f"{name}-b", at) for at in (3, 4)]


@pytest.mark.long
def test_stream_deleted_under_a_pattern_is_loss_once_or_dropped(
    broker: BrokerProcess, client: NatslogClient, family: str
) -> None:
    strict = reader_of(broker, streamPattern=f"{family}-*")
    lenient = reader_of(broker, streamPattern=f"{family}-*", failOnDataLoss="false")
    start = strict.initialOffset()
    client.delete_stream(f"{family}-b")
    with pytest.raises(DataLoss, match=f"'{family}-b': offsets 0 and later are lost: the stream was deleted"):
        take(strict, start)
    end = take(lenient, start)
    assert sorted(end) == [f"{family}-a"]
    assert rows_of(lenient, lenient.partitions(start, end)) == expected(family, a=60)


def test_stream_taken_out_of_the_options_is_no_loss(broker: BrokerProcess, family: str) -> None:
    both = reader_of(broker, stream=f"{family}-a,{family}-b", maxOffsetsPerTrigger="8")
    start = both.initialOffset()
    first = take(both, start)
    alone = reader_of(broker, stream=f"{family}-a")
    second = take(alone, first)
    assert second[f"{family}-b"] == first[f"{family}-b"], "its position is kept, as the same text"
    assert {stream for stream, _ in rows_of(alone, alone.partitions(first, second))} == {f"{family}-a"}
    assert take(alone, second) == second
    third = take(both, second)
    assert 0 < moved(second, third)[f"{family}-b"] <= 8, "it continues where it was"


def test_stream_that_leaves_during_a_batch_is_read_to_the_end_of_the_batch(broker: BrokerProcess, family: str) -> None:
    both = reader_of(broker, stream=f"{family}-a,{family}-b")
    start = both.initialOffset()
    end = take(both, start)
    alone = reader_of(broker, stream=f"{family}-a")  # Spark runs the batch again, and asks for no other end before
    assert rows_of(alone, alone.partitions(start, end)) == expected(family, a=60, b=20)


def test_cursor_that_moves_while_a_batch_read_is_planned(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = NatslogClient.cursor

    def moved_meanwhile(self: NatslogClient, consumer: str, stream: str) -> dict[str, Any]:
        publish_acked(nats_url, f"{family}.b", [b"new"])
        client.set_cursor(consumer, stream, client.stream(stream)["high_watermark"])
        return original(self, consumer, stream)

    monkeypatch.setattr(NatslogClient, "cursor", moved_meanwhile)
    options = {"servers": broker.url, "stream": f"{family}-b", "startingOffsets": "cursor:job"}
    parsed = SourceOptions.parse(options, streaming=False)
    assert BatchReader(parsed, spark_schema(parsed.selected_columns())).partitions() == []


@pytest.mark.long
def test_stream_that_a_group_does_not_select_was_not_deleted(
    broker: BrokerProcess, client: NatslogClient, family: str
) -> None:
    client.create_stream(f"{family}-c", f"{family}.c", group=f"{family}-g")
    start = reader_of(broker, streamPattern=f"{family}-*").initialOffset()
    grouped = reader_of(broker, group=f"{family}-g")
    assert take(grouped, start) == start
    started = time.monotonic()
    assert take(grouped, start) == start
    assert time.monotonic() - started < CONFIRMING_S, "what has left is not looked for at each trigger"
    client.delete_stream(f"{family}-b")
    with pytest.raises(DataLoss, match=f"stream '{family}-b': offsets 0 and later are lost: the stream was deleted"):
        take(reader_of(broker, group=f"{family}-g"), start)


def test_group_names_its_streams_and_those_that_join_it(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(f"{name}-1", name, group=f"{name}-g")
    reader = reader_of(broker, group=f"{name}-g")
    start = reader.initialOffset()
    client.create_stream(f"{name}-2", name, group=f"{name}-g")
    publish_acked(nats_url, name, [b"x"] * 50)
    end = take(reader, start)
    assert sum(moved(start, end).values()) == 50
    assert len(rows_of(reader, reader.partitions(start, end))) == 50


def test_pattern_that_matches_nothing_yet_starts_empty(broker: BrokerProcess, name: str) -> None:
    reader = reader_of(broker, streamPattern=f"{name}-*")
    assert reader.initialOffset() == take(reader, {}) == {}
    parsed = SourceOptions.parse({"servers": broker.url, "streamPattern": f"{name}-*"}, streaming=False)
    assert BatchReader(parsed, spark_schema(parsed.selected_columns())).partitions() == []


def test_rows_are_shared_in_proportion(broker: BrokerProcess, family: str) -> None:
    reader = reader_of(broker, streamPattern=f"{family}-*", maxOffsetsPerTrigger="40")
    start = reader.initialOffset()
    assert moved(start, take(reader, start)) == {f"{family}-a": 30, f"{family}-b": 10}
    assert isinstance(reader.getDefaultReadLimit(), ReadMaxRows)
    assert moved(start, reader.latestOffset(start, ReadAllAvailable())) == {f"{family}-a": 60, f"{family}-b": 20}


def test_bytes_are_shared_in_proportion_and_all_is_read_in_the_end(
    broker: BrokerProcess, client: NatslogClient, family: str
) -> None:
    total_bytes = sum(client.extent(f"{family}-{suffix}", 0, rows)[1] for suffix, rows in (("a", 60), ("b", 20)))
    reader = reader_of(broker, streamPattern=f"{family}-*", maxBytesPerTrigger=str(total_bytes // 2))
    assert isinstance(reader.getDefaultReadLimit(), ReadMaxBytes)
    start = reader.initialOffset()
    rows = moved(start, take(reader, start))
    assert 20 <= rows[f"{family}-a"] <= 35
    assert 6 <= rows[f"{family}-b"] <= 13
    tiny = reader_of(broker, streamPattern=f"{family}-*", maxBytesPerTrigger="1")
    assert moved(start, take(tiny, start)) == {f"{family}-a": 1, f"{family}-b": 1}, "never a standstill"
    batches, at = 0, start
    while (end := take(reader, at)) != at:
        at, batches = end, batches + 1
        assert batches < 10
    assert moved(start, at) == {f"{family}-a": 60, f"{family}-b": 20}


def test_rows_and_bytes_combine_the_tighter_one_counts(broker: BrokerProcess, family: str) -> None:
    few_rows = reader_of(broker, stream=f"{family}-a", maxOffsetsPerTrigger="7", maxBytesPerTrigger="1g")
    few_bytes = reader_of(broker, stream=f"{family}-a", maxOffsetsPerTrigger="50", maxBytesPerTrigger="1")
    start = few_rows.initialOffset()
    assert moved(start, take(few_rows, start)) == {f"{family}-a": 7}
    assert moved(start, take(few_bytes, start)) == {f"{family}-a": 1}


def test_too_few_rows_wait_until_the_delay_is_over(
    broker: BrokerProcess, nats_url: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("pyspark_natslog.source.admission.time.monotonic", lambda: now_s)
    options = {"stream": f"{family}-a", "minOffsetsPerTrigger": "10", "maxTriggerDelay": "30s"}
    reader = reader_of(broker, **options)
    assert isinstance(reader.getDefaultReadLimit(), ReadMinRows)
    first = take(reader, reader.initialOffset())
    assert first[f"{family}-a"]["offset"] == 60
    publish_acked(nats_url, f"{family}.a", [b"x"] * 9)
    now_s += 29
    assert take(reader, first) == first, "too few, and not long enough"
    publish_acked(nats_url, f"{family}.a", [b"x"])
    second = take(reader, first)
    assert second[f"{family}-a"]["offset"] == 70, "enough rows"
    publish_acked(nats_url, f"{family}.a", [b"x"])
    assert take(reader, second) == second
    now_s += 31
    assert take(reader, second)[f"{family}-a"]["offset"] == 71, "long enough"


def test_available_now_waits_for_no_minimum_and_ends_at_its_target(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, family: str
) -> None:
    reader = reader_of(
        broker, streamPattern=f"{family}-*", minOffsetsPerTrigger="50", maxOffsetsPerTrigger="60", maxTriggerDelay="1h"
    )
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    publish_acked(nats_url, f"{family}.a", [b"late"] * 30)
    client.create_stream(f"{family}-late", f"{family}.late")
    publish_acked(nats_url, f"{family}.late", [b"late"])
    first = take(reader, start)
    assert moved(start, first) == {f"{family}-a": 45, f"{family}-b": 15}
    second = take(reader, first)
    assert moved(start, second) == {f"{family}-a": 60, f"{family}-b": 20}, "20 rows are fewer than the minimum"
    assert take(reader, second) == second
    after_restart = reader_of(broker, streamPattern=f"{family}-*", maxOffsetsPerTrigger="60")
    after_restart.prepareForTriggerAvailableNow()
    at = first
    while (end := take(after_restart, at)) != at:
        at = end
    assert {name: one["offset"] for name, one in at.items()} == {
        f"{family}-a": 90,
        f"{family}-b": 20,
        f"{family}-late": 1,
    }


@pytest.mark.long
def test_available_now_ends_though_a_stream_was_created_again(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, family: str
) -> None:
    reader = reader_of(broker, stream=f"{family}-a", failOnDataLoss="false")
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    client.delete_stream(f"{family}-a")
    client.create_stream(f"{family}-a", f"{family}.a")
    publish_acked(nats_url, f"{family}.a", [b"x"] * 5)
    end = take(reader, start)
    assert end[f"{family}-a"]["offset"] == 5
    assert rows_of(reader, reader.partitions(start, end)) == expected(family, a=5)
    publish_acked(nats_url, f"{family}.a", [b"x"] * 5)
    assert take(reader, end) == end, "the new stream's target is what it held when it was first seen"


def tasks_of(broker: BrokerProcess, cores: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Task]:
    monkeypatch.setattr("pyspark_natslog.source.reader.default_parallelism", lambda: cores)
    parsed = SourceOptions.parse({"servers": broker.url} | options, streaming=False)
    reader = BatchReader(parsed, spark_schema(parsed.selected_columns()))
    tasks = list(reader.partitions())
    assert all(isinstance(task, Task) for task in tasks)
    rows = rows_of(reader, tasks)
    assert len(rows) == len(set(rows)), "no row twice"
    return tasks  # type: ignore[return-value]


@pytest.mark.long
@pytest.mark.parametrize("first", [{"minPartitions": "5"}, {"maxRecordsPerPartition": "7"}, {}])
def test_a_batch_that_is_repeated_has_the_same_tasks_whatever_has_changed(
    broker: BrokerProcess, family: str, monkeypatch: pytest.MonkeyPatch, first: dict[str, str]
) -> None:
    """The sink's message ids name a task and a row of it."""
    reader = reader_of(broker, streamPattern=f"{family}-*", **first)
    start = reader.initialOffset()
    end = json.loads(json.dumps(take(reader, start)))
    planned = reader.partitions(start, end)
    assert (len(planned) > 1) == bool(first)
    monkeypatch.setattr("pyspark_natslog.source.stream_reader.default_parallelism", lambda: 9)
    for later in ({"minPartitions": "3"}, {"minPartitions": "40"}, {"maxBytesPerPartition": "1000"}):
        again = reader_of(broker, streamPattern=f"{family}-*", **later)
        repeated = again.partitions(start, end)
        assert [rows_in_order(again, task) for task in repeated] == [rows_in_order(reader, task) for task in planned]
        assert take(again, end) == end, "what does not move stays the same text"


def test_small_streams_share_a_task(broker: BrokerProcess, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = tasks_of(broker, 4, monkeypatch, streamPattern=f"{family}-*")
    assert [(one.stream, one.start, one.end) for one in task.ranges] == [
        (f"{family}-a", 0, 60),
        (f"{family}-b", 0, 20),
    ]


def test_partitions_are_at_least_as_many_as_asked_for_and_even(
    broker: BrokerProcess, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = tasks_of(broker, 2, monkeypatch, streamPattern=f"{family}-*", minPartitions="8")
    sizes = [sum(one.rows for one in task.ranges) for task in tasks]
    assert len(tasks) >= 8
    assert sum(sizes) == 80
    assert max(sizes) <= 20, "the larger stream is cut into more parts"
    for limit in ("9", "1"):
        tasks = tasks_of(broker, 2, monkeypatch, streamPattern=f"{family}-*", maxRecordsPerPartition=limit)
        assert max(sum(one.rows for one in task.ranges) for task in tasks) <= int(limit)
    tasks = tasks_of(broker, 2, monkeypatch, stream=f"{family}-a", maxBytesPerPartition="2000")
    assert len(tasks) >= 5


def test_one_huge_stream_among_small_ones_uses_all_cores(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(5):
        client.create_stream(f"{name}-{at}", f"{name}.{at}")
        publish_acked(nats_url, f"{name}.{at}", [b"x"] * 3)
    client.create_stream(f"{name}-huge", f"{name}.huge")
    for _ in range(20):
        publish_acked(nats_url, f"{name}.huge", [b"." * 500_000] * 2)
    tasks = tasks_of(broker, 4, monkeypatch, streamPattern=f"{name}-*", columns="stream,offset")
    sizes = [sum(one.bytes for one in task.ranges) for task in tasks]
    assert len(tasks) == 4
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize(
    "payload", [{}, pytest.param({"payloadFormat": "json", "payloadSchema": "n INT"}, marks=pytest.mark.long)]
)
def test_long_columns_that_nobody_wants_are_not_sent(
    broker: BrokerProcess,
    client: NatslogClient,
    nats_url: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    payload: dict[str, str],
) -> None:
    client.create_stream(name, name)
    count, each = 24_000, 1000
    header = pa.array([[{"key": "trace", "value": "." * 1200}]] * each, HEADERS_TYPE)
    with Publisher(nats_url) as publisher:
        for start in range(0, count, each):
            values = pa.array([b'{"n":%d}' % at for at in range(start, start + each)])
            publisher.publish(Rows(pa.array([name] * each), values, headers=header), "stored")
    received: list[int] = []
    fetched = answers.rows_of

    def counted(response: Any, *arguments: Any) -> Any:
        received.append(len(response.data))
        return fetched(response, *arguments)

    monkeypatch.setattr(answers, "rows_of", counted)
    wanted = "offset,n" if payload else "offset,value"
    parsed = SourceOptions.parse(
        {"servers": broker.url, "stream": name, "columns": wanted, "minPartitions": "1"} | payload, streaming=False
    )
    reader = BatchReader(parsed, spark_schema(parsed.selected_columns(), parsed.payload.types))
    tasks = reader.partitions()
    rows = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
    assert [row["offset"] for row in rows] == list(range(count))
    assert [row.get("n", row.get("value")) for row in rows] == [
        at if payload else b'{"n":%d}' % at for at in range(count)
    ]
    stored = client.position(name)["bytes"]
    assert stored > 3 * 8 * 1024 * 1024
    assert sum(received) < 0.7 * stored, "two answers, of which one was under way, and then what is wanted"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "option stream is missing"),
        ({"stream": "a", "streamPattern": "b*"}, "options stream and streamPattern clash"),
        ({"path": "a", "group": "g"}, "options group and stream clash"),
        ({"streamPattern": ""}, "streamPattern is empty"),
        ({"group": "a b"}, "option group"),
        ({"stream": "a,a"}, "each once"),
        ({"stream": "a", "maxBytesPerTrigger": "many"}, "maxBytesPerTrigger.*not a size"),
        ({"stream": "a", "maxBytesPerTrigger": "0"}, "maxBytesPerTrigger.*not a size above zero"),
        ({"stream": "a", "minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "minOffsetsPerTrigger 5 and max"),
        ({"stream": "a", "maxTriggerDelay": "5s"}, "maxTriggerDelay limits the wait for minOffsetsPerTrigger: set"),
        ({"stream": "a", "minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, "maxTriggerDelay.*not a duration"),
        ({"stream": "a", "readFrom": "follower"}, "option readFrom 'follower' must be nearest, leader or any"),
        ({"stream": "a", "maxBytesPerPartition": "-1"}, "maxBytesPerPartition"),
        ({"streamPattern": "a*", "startingOffsets": '{"b": 3}'}, "startingOffsets names 'b', which is not read"),
        ({"stream": "a", "startingTimestamp": '{"a": "noon"}'}, "startingTimestamp 'noon' is not a time"),
        ({"stream": "a", "startingTimestamp": '{"b": 0}'}, "startingTimestamp names 'b'"),
        ({"stream": "a", "startingTimestamp": "{"}, "startingTimestamp.*must be a time or JSON"),
        ({"stream": "a", "endingTimestamp": "0"}, "endingTimestamp is for batch reads"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], words: str) -> None:
    with pytest.raises(Exception, match=words):
        SourceOptions.parse(options, streaming=True)


def test_options_of_streams_are_refused_for_batch_reads() -> None:
    for name, value in (("maxBytesPerTrigger", "1m"), ("minOffsetsPerTrigger", "1"), ("maxTriggerDelay", "1s")):
        with pytest.raises(Exception, match=f"{name} is for streaming reads"):
            SourceOptions.parse({"stream": "a", name: value}, streaming=False)


def test_each_stream_starts_at_its_own_time(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, family: str
) -> None:
    rows = [row for batch in client.read(f"{family}-a") for row in batch.to_pylist()]
    moment = rows[30]["timestamp"].isoformat()
    first = next(row["offset"] for row in rows if row["timestamp"] >= rows[30]["timestamp"])
    reader = reader_of(
        broker,
        streamPattern=f"{family}-*",
        startingTimestamp=json.dumps({f"{family}-a": moment}),
        startingOffsets="latest",
    )
    assert {name: at["offset"] for name, at in reader.initialOffset().items()} == {
        f"{family}-a": first,
        f"{family}-b": 20,
    }
    beyond = reader_of(broker, stream=f"{family}-a", startingTimestamp="2999-01-01")
    assert beyond.initialOffset()[f"{family}-a"]["offset"] == 60, "beyond the end is the end"
