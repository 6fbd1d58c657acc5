"""Loss is reported where it persists by the word of the newest leader, and nowhere else.

The brokers here answer as a leader that was replaced, and knows less, and as its successor: the former is asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Timer
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from natslog.client import asking, confirming, leader_epochs
from natslog.errors import ConfigError, DataLoss, InvalidRequest
from pyspark_natslog.source import stream_reader
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.reader import BatchReader
from pyspark_natslog.source.schema import spark_schema
from pyspark_natslog.source.splits import OffsetRange, Task
from pyspark_natslog.source.stream_reader import StreamReader
from tests.unit.client.answering import ID, Answers, leader, serving

STALE, TRUE = 640, 1200


@pytest.fixture(autouse=True)
def _unknown_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    leader_epochs._seen.clear()
    monkeypatch.setattr(asking, "LEADER_WITHIN_S", 0.5)  # there is no election here


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], str]]:
    with serving() as start:
        yield start


def successor(first: int, end: int = TRUE) -> Answers:
    new = leader(2, end)
    headers = {"Natslog-Leader-Epoch": "2", "Natslog-Stream-Id": ID}
    split = {"start": first, "end": end, "rows": end - first, "bytes": 1000, "urls": []}
    new.calls["splits"] = (200, [split], headers)
    return new


def options(*urls: str, streaming: bool = True, **given: Any) -> SourceOptions:
    quick = {"fetchTimeout": "1s", "fetchRetries": "0"}
    return SourceOptions.parse({"servers": ",".join(urls), "stream": "orders"} | quick | given, streaming=streaming)


def reader_of(*urls: str, **given: Any) -> StreamReader:
    parsed = options(*urls, **given)
    return StreamReader(parsed, spark_schema(parsed.selected_columns()))


def at(offset: int) -> dict[str, Any]:
    return {"orders": {"id": ID, "offset": offset}}


@pytest.mark.parametrize("lenient", ["true", "false"])
def test_position_ahead_of_a_replaced_leader_is_no_loss(serve: Callable[[Answers], str], lenient: str) -> None:
    urls = serve(leader(1, STALE)), serve(successor(1100))
    reader = reader_of(*urls, failOnDataLoss=lenient)
    assert reader.latestOffset(at(1100), ReadAllAvailable())["orders"]["offset"] == TRUE
    (task,) = reader.partitions(at(1100), at(TRUE))
    assert isinstance(task, Task)
    assert [(one.start, one.end, one.leader_epoch) for one in task.ranges] == [(1100, TRUE, 2)], "which a task is told"


def test_batch_read_from_an_offset_ahead_of_a_replaced_leader_is_planned(serve: Callable[[Answers], str]) -> None:
    urls = serve(leader(1, STALE)), serve(successor(1100))
    parsed = options(*urls, streaming=False, startingOffsets='{"orders": 1100}', endingOffsets='{"orders": 1200}')
    (task,) = BatchReader(parsed, spark_schema(parsed.selected_columns())).partitions()
    assert isinstance(task, Task)
    assert [(one.start, one.end) for one in task.ranges] == [(1100, TRUE)]


def test_restarted_query_ignores_a_leader_that_is_older_than_its_checkpoint(
    serve: Callable[[Answers], str],
) -> None:
    """Its process has received no epoch yet, and reaches only the leader that was replaced."""
    broker = leader(1, STALE)
    reader = reader_of(serve(broker), failOnDataLoss="false")
    position = {"orders": {"id": ID, "offset": 1100, "epoch": 2}}
    assert reader.latestOffset(position, ReadAllAvailable()) == position
    broker.calls = successor(1100).calls
    moved = reader.latestOffset(position, ReadAllAvailable())
    assert moved == {"orders": {"id": ID, "offset": TRUE, "epoch": 2}}
    assert reader.latestOffset(moved, ReadAllAvailable()) == moved


@pytest.mark.long
def test_repeated_batch_that_ends_in_a_newer_epoch_ignores_the_older_leader(serve: Callable[[Answers], str]) -> None:
    """The first call after a restart is for a batch whose positions have different epochs."""
    broker = leader(1, STALE)
    reader = reader_of(serve(broker))
    successors = Timer(1.5 * confirming.PERSISTS_S, lambda: broker.calls.update(successor(600, 1100).calls))
    successors.start()
    start = {"orders": {"id": ID, "offset": 600}}
    (task,) = reader.partitions(start, {"orders": {"id": ID, "offset": 1100, "epoch": 2}})
    successors.join()
    assert isinstance(task, Task)
    assert [(one.start, one.end) for one in task.ranges] == [(600, 1100)]


@pytest.mark.long
def test_older_leader_that_remains_the_only_one_is_accepted_in_the_end(
    serve: Callable[[Answers], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restore of the whole cluster from a backup."""
    reader = reader_of(serve(leader(1, STALE)))
    position = {"orders": {"id": ID, "offset": 1100, "epoch": 2}}
    assert reader.latestOffset(position, ReadAllAvailable()) == position
    monkeypatch.setattr(stream_reader, "_OUTAGE_TIMEOUTS", 0)
    assert reader.latestOffset(position, ReadAllAvailable()) == position
    with pytest.raises(DataLoss, match="the log ends at 640 and is shorter than before"):
        reader.latestOffset(position, ReadAllAvailable())


@pytest.mark.long
def test_log_that_stays_shorter_is_loss(serve: Callable[[Answers], str]) -> None:
    old, new = leader(1, STALE), successor(0)
    reader = reader_of(serve(old), serve(new))
    with pytest.raises(DataLoss, match="offsets 1200 to 1299 are lost"):
        reader.latestOffset(at(1300), ReadAllAvailable())
    assert new.asked > 3, "it was asked again"
    with pytest.raises((ConfigError, InvalidRequest), match="above the high watermark 1200"):
        reader_of(serve(new), startingOffsets='{"orders": 1300}').initialOffset()


def test_range_that_the_newest_leader_has_is_asked_for_until_it_comes(
    serve: Callable[[Answers], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no for ever: a task that is refused again and again fails with what it was refused with."""
    monkeypatch.setattr(confirming, "_AGAIN_AFTER_S", 0.001)
    new = leader(2, TRUE)
    new.calls["messages"] = (416, new.calls["splits"][1], {})
    task = Task([OffsetRange("orders", ID, 1100, TRUE, (), 0, 2)])
    with pytest.raises(Exception, match="not in the log") as failed:
        list(reader_of(serve(leader(1, STALE)), serve(new), failOnDataLoss="false").read(task))
    assert not isinstance(failed.value, DataLoss)
    assert new.asked > 20
