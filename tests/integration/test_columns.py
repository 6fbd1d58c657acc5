"""Reading some of the columns: the broker sends the stored bytes of these columns, and each row once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from natslog.arrow.schema import COLUMNS, HEADERS_TYPE
from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.wire.row_hashes import as_ids
from tests.harness import BrokerProcess, eventually, running
from tests.integration.asking import ask

ROWS, BATCH = 24_000, 3_000


def filled_rows(first: int) -> Rows:
    """Some have keys, some headers, some the ids of the sink; some values are long."""
    numbers = range(first, first + BATCH)
    hashes = np.stack((np.arange(first + 1, first + BATCH + 1), np.arange(BATCH) + 7), axis=1).astype(np.uint64)
    ids = as_ids(np.ascontiguousarray(hashes)).to_pylist()
    return Rows(
        pa.array([f"a.{number % 7}" for number in numbers]),
        pa.array([b"%d" % number + b"x" * (number % 11 * 20) for number in numbers]),
        keys=pa.array([b"k%d" % number if number % 3 == 0 else None for number in numbers], pa.binary()),
        headers=pa.array(
            [[{"key": "H", "value": str(number)}] if number % 5 == 0 else None for number in numbers], HEADERS_TYPE
        ),
        ids=pa.array([None if number % 4 == 0 else id_ for number, id_ in zip(numbers, ids, strict=True)]),
    )


@pytest.fixture(scope="module", params=["none", "zstd"])
def broker(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[BrokerProcess]:
    """A stream `s` with sealed segments and an active one."""
    folder = tmp_path_factory.mktemp("columns")
    with running(folder, segment_bytes="1MiB", retention_interval="200ms") as (nats, broker), broker.client() as client:
        client.create_stream("s", "a.*", compression=request.param)
        with Publisher(nats.url) as publisher:
            for first in range(0, ROWS, BATCH):
                publisher.publish(filled_rows(first), "stored")
        eventually(lambda: len(list(broker.folder.glob("streams/[!_]*/*.arrow"))) >= 2, 30, "segments are sealed")
        eventually(lambda: len(list(broker.folder.glob("streams/[!_]*/*.active"))) == 1, 30, "all full ones are")
        yield broker


def table(client: NatslogClient, start: int, end: int, columns: tuple[str, ...] | None = None) -> pa.Table:
    batches = list(client.read("s", start, end, columns=columns))
    return pa.Table.from_batches(batches).combine_chunks()


@pytest.mark.long
def test_columns_of_any_range_are_those_of_its_rows(broker: BrokerProcess) -> None:
    chance = random.Random(5)
    with broker.client() as client:
        every = table(client, 0, ROWS)
        for _ in range(25):
            start, end = sorted(chance.sample(range(ROWS + 1), 2))
            columns = tuple(chance.sample(COLUMNS, chance.randint(1, 6)))
            expected = every.slice(start, end - start).select(list(columns)).combine_chunks()
            assert table(client, start, end, columns).equals(expected), (start, end, columns)
            path = f"/v1/streams/s/messages?start={start}&end={end}&columns={','.join(columns)}"
            for limit in ("", "&max_bytes=300000"):
                response = ask(broker, "GET", path + limit)
                assert response.headers["Natslog-Batches"] == "exact"
                sent = pa.ipc.open_stream(response.data).read_all().combine_chunks()
                following = int(response.headers["Natslog-Next-Offset"])
                assert sent.equals(expected.slice(0, following - start).combine_chunks()), (start, end, columns, limit)
                assert following == end or limit


@pytest.mark.long
def test_columns_are_not_decoded(broker: BrokerProcess) -> None:
    query: dict[str, Any] = {"start": 10, "end": ROWS, "columns": "offset", "max_bytes": 1 << 30}
    path = "/v1/streams/s/messages?" + "&".join(f"{name}={value}" for name, value in query.items())
    headers = {"Natslog-Batches": "whole", "Natslog-Columns": "whole"}
    response = ask(broker, "GET", path, **headers)
    assert response.headers["Natslog-Batches"] == "columns"
    batches = pa.ipc.open_stream(response.data).read_all()
    assert batches.column("offset")[0].as_py() == 0, "the first batch comes whole"
    assert len(response.data) < 12 * ROWS
    filtered = ask(broker, "GET", path + "&subject=a.1", **headers)
    assert filtered.headers["Natslog-Batches"] == "exact", "rows are left out"


def test_ids_of_the_sink_are_no_headers(broker: BrokerProcess) -> None:
    with broker.client() as client:
        headers = table(client, 0, ROWS, ("headers",)).column("headers").to_pylist()
    for number, found in enumerate(headers):
        expected = [{"key": "H", "value": str(number)}] if number % 5 == 0 else []
        if number % 3 == 0:
            expected.append({"key": "Natslog-Key", "value": f"k{number}"})
        assert sorted(found or [], key=str) == sorted(expected, key=str), number


@pytest.mark.long
def test_rows_with_ids_are_stored_once_also_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as (nats, broker):
        with broker.client() as client:
            client.create_stream("s", "a.*")

        def publish() -> None:
            with Publisher(nats.url) as publisher:
                publisher.publish(filled_rows(0), "stored")

        with_ids = sum(1 for number in range(BATCH) if number % 4)
        for restarts in (False, True):
            publish()
            if restarts:
                broker.kill()
                broker.start()
            publish()
        with broker.client() as client:
            assert client.stream("s")["high_watermark"] == 4 * (BATCH - with_ids) + with_ids
