"""Streams that are purged or sealed, through HTTP, the client and the command line; their folders' names."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
import urllib3

from natslog.client import NatslogClient
from natslog.client.appending import PartUploader
from natslog.errors import InvalidRequest, OffsetOutOfRange, StreamNotFound, StreamSealed
from tests.harness import (
    BrokerProcess,
    all_values,
    eventually,
    natslog,
    on_terminal,
    publish_acked,
    running,
    stream_folder,
)
from tests.integration.asking import ask, error


def values_of(answer: bytes) -> list[int]:
    """Of an answer with messages as an Arrow IPC stream."""
    table = pa.ipc.open_stream(answer).read_all()
    return [int(value) for value in table.column("value").to_pylist()]


def numbers(client: NatslogClient, stream: str) -> list[int]:
    return [int(value) for value in all_values(client, stream)]


# ---- purge ----


@pytest.mark.long
def test_purge_of_all_leaves_an_empty_stream_whose_offsets_go_on(
    broker: BrokerProcess, client: NatslogClient, filled: str
) -> None:
    done = client.purge(filled)
    assert (done["purged"], done["log_start_offset"], done["high_watermark"]) == (100, 100, 100)
    assert all_values(client, filled) == []
    assert publish_acked(broker.nats_url, f"{filled}.odd.x", [b"100"])[0]["offset"] == 100
    assert numbers(client, filled) == [100]
    stream_id = str(client.stream(filled)["id"])
    eventually(lambda: _is_gone(stream_folder(broker.folder, stream_id), 0), what="the files are removed")


def _is_gone(folder: Path, offset: int) -> bool:
    return not list(folder.glob(f"{offset:020d}.*"))


def test_purge_below_removes_exactly_what_lies_below(broker: BrokerProcess, client: NatslogClient, filled: str) -> None:
    """Offset 42 is in the middle of a batch: the rows before it are not even in answers of whole batches."""
    done = client.purge(filled, 42)
    assert (done["purged"], done["log_start_offset"]) == (42, 42)
    assert numbers(client, filled) == list(range(42, 100))
    path = f"/v1/streams/{filled}/messages"
    answer = ask(broker, "GET", path + "?start=41")
    assert (answer.status, error(answer)["log_start_offset"]) == (416, 42)
    for how in ("exact=true", "exact=false", "exact=false&max_bytes=1000000"):
        whole = ask(broker, "GET", f"{path}?start=42&{how}")
        assert values_of(whole.data) == list(range(42, 100)), how
    lag = ask(broker, "GET", f"/v1/streams/{filled}/lag?offset=0").json()
    assert (lag["rows"], lag["lost_rows"]) == (58, 42)
    first = ask(broker, "GET", f"/v1/streams/{filled}/offsets?timestamp=0").json()
    assert first["offset"] == 42
    assert client.stream(filled)["log_start_offset"] == 42


def test_purge_of_less_than_was_purged_already_removes_nothing(client: NatslogClient, filled: str) -> None:
    client.purge(filled, 42)
    assert client.purge(filled, 10) | {"high_watermark": 100} == {
        "name": filled,
        "log_start_offset": 42,
        "purged": 0,
        "high_watermark": 100,
    }
    assert numbers(client, filled) == list(range(42, 100))


def test_purge_that_cannot_be_is_refused_and_removes_nothing(
    broker: BrokerProcess, client: NatslogClient, filled: str
) -> None:
    with pytest.raises(OffsetOutOfRange, match="has offsets 0 to 99"):
        client.purge(filled, 101)
    with pytest.raises(StreamNotFound):
        client.purge("missing")
    for body in (
        {"below": -1},
        {"below": "7"},
        {"below": True},
        {"below": 1.5},
        {"bellow": 7},
        {"below": None},
        {"below": 10**30},
    ):
        answer = ask(broker, "POST", f"/v1/streams/{filled}/purge", body)
        assert answer.status in (400, 416), (body, answer.data)
    assert len(all_values(client, filled)) == 100


@pytest.mark.long
def test_purged_messages_stay_so_after_a_restart(own: Path) -> None:
    with running(own) as (nats, broker):
        client = NatslogClient(broker.url)
        client.create_stream("orders", "orders")
        publish_acked(nats.url, "orders", [b"%d" % at for at in range(50)])
        client.purge("orders", 30)
        broker.kill()
        broker.start()
        assert numbers(client, "orders") == list(range(30, 50))


@pytest.mark.long
def test_purge_asks_and_tells_what_it_removed(broker: BrokerProcess, client: NatslogClient, filled: str) -> None:
    refused = natslog("stream", "purge", filled, "--below", "10", url=broker.url, input="", check=False)
    assert refused.returncode == 1
    assert "10 of 100 messages of stream" in refused.stderr
    assert "--yes" in refused.stderr
    code, shown = on_terminal("stream", "purge", filled, "--below", "10", url=broker.url, types="n\n")
    assert (code, len(all_values(client, filled))) == (1, 100), shown
    done = natslog("stream", "purge", filled, "--below", "10", "--yes", url=broker.url)
    assert f"10 messages were deleted: stream {filled} now starts at offset 10" in done.stdout
    body = json.loads(natslog("stream", "purge", filled, "--yes", "--json", url=broker.url).stdout)
    assert (body["purged"], body["log_start_offset"]) == (90, 100)


def test_purge_that_is_sent_again_states_what_was_removed(
    broker: BrokerProcess, client: NatslogClient, filled: str
) -> None:
    url, headers = f"{broker.url}/v1/streams/{filled}/purge", {"Natslog-Request-Id": "purge-it-once"}
    with urllib3.PoolManager() as pool:
        pool.request("POST", url, headers=headers, body=b"{}")
        publish_acked(broker.nats_url, f"{filled}.odd.x", [b"100"])
        again = json.loads(pool.request("POST", url, headers=headers, body=b"{}").data)
    assert (again["log_start_offset"], again["purged"], again["high_watermark"]) == (100, 0, 101)
    assert numbers(client, filled) == [100]


# ---- seal ----


def append(client: NatslogClient, stream: str, rows: pa.RecordBatch) -> None:
    uploader = PartUploader(client, stream, "producer", 1)
    uploader.add(rows)
    client.commit_append(stream, "producer", 1, uploader.finish())


def test_sealed_stream_is_read_and_never_written_again(
    broker: BrokerProcess, client: NatslogClient, filled: str
) -> None:
    assert client.seal(filled)["sealed"]
    rows = pa.RecordBatch.from_pydict({"subject": [f"{filled}.a"], "value": pa.array([b"x"], pa.binary())})
    with pytest.raises(StreamSealed):
        append(client, filled, rows)
    answer = ask(broker, "PATCH", f"/v1/streams/{filled}", {"max_messages": 1})
    assert (answer.status, error(answer)["code"]) == (409, "stream_sealed")
    for call in ("purge", "seal"):
        answer = ask(broker, "POST", f"/v1/streams/{filled}/{call}", {})
        assert answer.status == (409 if call == "purge" else 200), answer.data
    client.edit_stream(filled, paused=False)
    assert numbers(client, filled) == list(range(100))
    folder = stream_folder(broker.folder, str(client.stream(filled)["id"]))
    eventually(lambda: _rows_in_arrow_files(folder) == 100, what="all messages are in sealed segments")


def _rows_in_arrow_files(folder: Path) -> int:
    return sum(pa.ipc.open_file(pa.OSFile(str(path))).read_all().num_rows for path in sorted(folder.glob("*.arrow")))


def test_subject_of_a_sealed_stream_may_be_recorded_by_another(
    broker: BrokerProcess, client: NatslogClient, filled: str
) -> None:
    client.seal(filled)
    client.create_stream(f"{filled}-next", f"{filled}.>")
    (ack,) = publish_acked(broker.nats_url, f"{filled}.even.x", [b"next"])
    assert (ack["stream"], ack["offset"]) == (f"{filled}-next", 0)
    assert len(all_values(client, filled)) == 100


@pytest.mark.long
def test_sealed_stream_stays_so_after_a_restart_and_keeps_what_is_past_its_age(own: Path) -> None:
    with running(own, retention_interval="200ms") as (nats, broker):
        client = NatslogClient(broker.url)
        client.create_stream("orders", "orders", max_messages=10)
        publish_acked(nats.url, "orders", [b"%d" % at for at in range(9)])
        client.seal("orders")
        broker.terminate()
        broker.start()
        assert client.stream("orders")["sealed"]
        assert numbers(client, "orders") == list(range(9))


@pytest.mark.long
def test_seal_asks_first(broker: BrokerProcess, filled: str) -> None:
    refused = natslog("stream", "seal", filled, url=broker.url, input="", check=False)
    assert refused.returncode == 1
    assert f"stream {filled} was not sealed" in refused.stderr
    assert "read-only" in natslog("stream", "seal", filled, "--yes", url=broker.url).stdout
    assert "sealed" in natslog("stream", "ls", url=broker.url).stdout
    natslog("stream", "rm", filled, "--yes", url=broker.url)


# ---- folders ----


def test_folder_of_a_stream_carries_its_name(broker: BrokerProcess, client: NatslogClient, name: str) -> None:
    long_name = name + "-" + "n" * (127 - len(name))
    for stream in (name, long_name):
        stream_id = client.create_stream(stream, stream)["id"]
        assert stream_folder(broker.folder, stream_id).name == f"{stream[:64]}.{stream_id}"


def test_stream_that_cannot_be_resized_here_says_why(client: NatslogClient, filled: str) -> None:
    with pytest.raises(Exception, match="3 replicas require 3 brokers, but only 1 are available"):
        client.edit_stream(filled, replicas=3)
    with pytest.raises(InvalidRequest, match="min_isr 2 is more than the number of replicas, 1"):
        client.edit_stream(filled, min_isr=2)
    for body in ({"replicas": 0}, {"replicas": "3"}, {"replicas": None}, {"replicas": True}, {"min_isr": 0}):
        with pytest.raises(InvalidRequest):
            client.edit_stream(filled, **body)
    assert client.edit_stream(filled, min_isr=None)["min_isr"] == 1
