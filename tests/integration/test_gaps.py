"""A stream from which messages were removed: every interface returns the others, and reports no loss."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pyarrow as pa
import pytest

from natslog.arrow.schema import COLUMNS
from natslog.client.publisher import Publisher, Rows
from tests.gaps import remove_offsets
from tests.harness import BrokerProcess, eventually, natslog, running
from tests.integration.asking import ask

BATCHES = (1, 3000, 40, 1, 700, 1, 1, 1, 2000, 5)
ROWS = sum(BATCHES)
REMOVED = {0, *range(5, 2900, 7), *range(3001, 3041), 3300, *range(4000, 4100), 5743, 5749}


@pytest.fixture(scope="module", params=["unsealed", pytest.param("none", marks=pytest.mark.long), "zstd"])
def broker(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[BrokerProcess]:
    """A stream `s` in unsealed, sealed or compressed files, without the messages of `REMOVED`."""
    compression = "none" if request.param == "unsealed" else request.param
    with running(tmp_path_factory.mktemp("gaps"), retention_interval="200ms") as (nats, broker):
        with broker.client() as client:
            client.create_stream("s", "a.*", compression=compression)
        with Publisher(nats.url) as publisher:
            at = 0
            for count in BATCHES:
                values = pa.array([b"%d" % offset for offset in range(at, at + count)])
                publisher.publish(
                    Rows(pa.array([f"a.{offset % 7}" for offset in range(at, at + count)]), values), "stored"
                )
                at += count
        broker.terminate()
        (active,) = broker.folder.glob("streams/[!_]*/*.active")
        remove_offsets(active, REMOVED)
        broker.start()
        if request.param != "unsealed":
            natslog("stream", "roll", "s", "--server", broker.url)
            eventually(lambda: list(broker.folder.glob("streams/[!_]*/*.arrow")), 30, "the segment is sealed")
        yield broker


def expected(start: int, end: int, subject: str = "") -> list[int]:
    return [at for at in range(start, end) if at not in REMOVED and (not subject or subject == f"a.{at % 7}")]


def ranges(count: int) -> list[tuple[int, int]]:
    chance = random.Random(7)
    edges = [tuple(sorted(chance.sample(range(ROWS + 1), 2))) for _ in range(count)]
    return [(0, ROWS), (0, 1), (3001, 3041), (3000, 3002), (4050, 4060), *edges]  # type: ignore[list-item]


@pytest.mark.long
def test_the_client_reads_the_other_messages_and_checks_that_none_is_lost(broker: BrokerProcess) -> None:
    with broker.client() as client:
        for start, end in ranges(25):
            for columns in (None, ("offset", "value"), ("value",)):
                table = pa.Table.from_batches(
                    list(client.read("s", start, end, columns=columns)),
                    schema=None if expected(start, end) else pa.schema([("value", pa.binary())]),
                )
                values = [int(value) for value in table.column("value").to_pylist()]
                assert values == expected(start, end), (start, end, columns)
            filtered = [
                int(value)
                for batch in client.read("s", start, end, subject="a.3")
                for value in batch.column("value").to_pylist()
            ]
            assert filtered == expected(start, end, "a.3")


@pytest.mark.long
def test_exact_answers_state_how_many_messages_were_removed(broker: BrokerProcess) -> None:
    for start, end in ranges(12):
        for columns in ("", f"&columns={','.join(COLUMNS[::-1])}", "&columns=value"):
            for limit in ("&max_bytes=100000000", "&max_bytes=20000", ""):
                path = f"/v1/streams/s/messages?start={start}&end={end}{limit}{columns}"
                response = ask(broker, "GET", path)
                table = pa.ipc.open_stream(response.data).read_all()
                following = int(response.headers["Natslog-Next-Offset"])
                found = [int(value) for value in table.column("value").to_pylist()]
                assert found == expected(start, following), path
                if response.headers["Natslog-Batches"] == "exact" and limit:
                    removed = int(response.headers.get("Natslog-Removed", 0))
                    assert len(found) + removed == following - start, path
        lines = ask(broker, "GET", f"/v1/streams/s/messages?start={start}&end={end}", Accept="application/x-ndjson")
        assert [json.loads(line)["offset"] for line in lines.data.splitlines()] == expected(start, end)


@pytest.mark.long
def test_times_splits_and_commands_pass_over_removed_messages(broker: BrokerProcess) -> None:
    assert ask(broker, "GET", "/v1/streams/s/offsets?timestamp=0").json()["offset"] == 1
    splits = ask(broker, "GET", f"/v1/streams/s/splits?start=0&end={ROWS}&min_splits=5").json()
    assert [splits[0]["start"], splits[-1]["end"]] == [0, ROWS]
    shown = natslog("cat", "s", "--from", "0", "--count", "20", "--json", "--server", broker.url)
    assert [json.loads(line)["offset"] for line in shown.stdout.splitlines()] == expected(0, 25)[:20]
    (folder,) = broker.folder.glob("streams/[!_]*")
    report = json.loads(natslog("verify", str(folder), "--json").stdout)
    assert "problems" in json.dumps(report)
    assert f'"messages": {ROWS - len(REMOVED)}' in json.dumps(report)
