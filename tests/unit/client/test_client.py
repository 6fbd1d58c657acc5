"""Reading ahead: the order of rows and errors is as if nothing were fetched before it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from natslog.client import Fetched, NatslogClient
from natslog.errors import CorruptLog, OffsetOutOfRange


def answer(start: int, count: int) -> Fetched:
    batch = pa.RecordBatch.from_pydict({"offset": list(range(start, start + count))})
    return Fetched([batch] if count else [], start + count, 100, 0, "id")


def client_that(fetch: Callable[[int], Fetched]) -> NatslogClient:
    client = NatslogClient("http://127.0.0.1:1")
    client.fetch = lambda name, start, **options: fetch(start)  # type: ignore[method-assign, assignment]
    return client


def offsets(batch: Any) -> list[int]:
    return list(batch.column("offset").to_pylist())


def test_rows_come_in_order_and_the_next_answer_is_fetched_meanwhile() -> None:
    asked: list[int] = []
    second_asked = threading.Event()

    def fetch(start: int) -> Fetched:
        asked.append(start)
        if start == 10:
            second_asked.set()
        return answer(start, 10)

    batches = client_that(fetch).read("s", 0, 40)
    first = next(batches)
    assert second_asked.wait(10), "while the caller has the first answer, the second is fetched"
    assert asked == [0, 10], "and no more than that"
    rest = [offset for batch in batches for offset in offsets(batch)]
    assert offsets(first) + rest == list(range(40))
    assert asked == [0, 10, 20, 30]


def test_rows_before_an_error_are_handed_on_first() -> None:
    def fetch(start: int) -> Fetched:
        if start == 10:
            raise CorruptLog("damaged")
        return answer(start, 10)

    batches = client_that(fetch).read("s", 0, 30)
    assert offsets(next(batches)) == list(range(10))
    with pytest.raises(CorruptLog):
        next(batches)


def test_a_log_that_ends_early_is_an_error() -> None:
    batches = client_that(lambda start: answer(start, 10 if start == 0 else 0)).read("s", 0, 30)
    assert offsets(next(batches)) == list(range(10))
    with pytest.raises(OffsetOutOfRange, match="ends at offset 10, before 30"):
        next(batches)


def test_nobody_waits_for_what_is_fetched_ahead_when_the_reader_leaves() -> None:
    may_go = threading.Event()

    def fetch(start: int) -> Fetched:
        if start:
            may_go.wait(20)
        return answer(start, 10)

    batches = client_that(fetch).read("s", 0, 30)
    next(batches)
    batches.close()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "natslog-read-ahead")
    may_go.set()
