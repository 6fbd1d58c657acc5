"""A range of any length is read over HTTP in bounded memory of the broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import urllib3

from tests.faults.test_hostile_clients import watched
from tests.harness import BrokerProcess, publish_acked, running

pytestmark = pytest.mark.long

ROWS, VALUE = 300_000, b"v" * 1000
MOST_BYTES = 150 * 2**20


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """With a stream of 300 MB; started after it was written, so that it has not used memory for writing."""
    folder: Path = tmp_path_factory.mktemp("long")
    with running(folder) as (nats, broker):
        broker.client().create_stream("orders", "orders")
        for _ in range(ROWS // 2000):
            publish_acked(nats.url, "orders", [VALUE] * 2000)
        broker.terminate()
        yield broker.start()


@pytest.mark.parametrize(
    ("query", "accept"),
    [
        ("start=3", "*/*"),
        ("start=3&columns=offset,value", "*/*"),
        ("start=3&subject=%3E&columns=offset,value", "*/*"),
        ("start=3", "application/x-ndjson"),
    ],
    ids=["stored", "columns", "rewritten", "ndjson"],
)
def test_reading_a_long_range_raises_the_memory_by_a_bounded_amount(
    broker: BrokerProcess, query: str, accept: str
) -> None:
    path = f"{broker.url}/v1/streams/orders/messages?{query}"
    with watched(broker) as memory:
        answer = urllib3.request("GET", path, headers={"Accept": accept}, preload_content=False)
        if accept == "*/*":
            with pa.ipc.open_stream(answer) as batches:
                rows = sum(batch.num_rows for batch in batches)
        else:
            rows = 0
            for line in answer:
                rows += 1
                last = line
            assert json.loads(last)["offset"] == ROWS - 1
    assert rows == ROWS - 3
    assert memory[-1] < memory[1] + MOST_BYTES, (memory[1] / 2**20, memory[-1] / 2**20)
