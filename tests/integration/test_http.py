"""The HTTP API as INTERFACE says it, and every way to ask wrongly."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from natslog.client import ClientOptions, NatslogClient
from natslog.errors import CorruptLog, InvalidRequest, OffsetOutOfRange, StreamConflict, StreamNotFound, StreamRecreated
from natslog.http.openapi import document
from natslog.nats_server import NatsServer
from tests.harness import BrokerProcess, all_values, eventually, publish_acked, running, stream_folder, write_secret
from tests.integration.asking import ask, error


def test_create_answers_201_then_200_then_409_naming_the_difference(broker: BrokerProcess, name: str) -> None:
    body = {"name": name, "subject": f"{name}.>", "max_age": "7d", "max_bytes": "1GiB"}
    first = ask(broker, "POST", "/v1/streams", body)
    assert first.status == 201
    assert first.json()["max_age"] == "7d"
    assert first.json()["max_bytes"] == 2**30
    assert (
        first.json().items() >= {"name": name, "leader": 1, "leader_epoch": 1, "isr": [1], "high_watermark": 0}.items()
    )
    again = ask(broker, "POST", "/v1/streams", body)
    assert (again.status, again.json()["id"]) == (200, first.json()["id"])
    other = ask(broker, "POST", "/v1/streams", body | {"max_age": "8d"})
    assert other.status == 409
    assert error(other)["settings"] == ["max_age"]


@pytest.mark.parametrize(
    "bad",
    ["", "a b", "x" * 256, "a\x00b", "..", "a..b", ".a", "a/b", "*", "a>", "naïve", None, 7],
)
def test_bad_stream_names_are_400(broker: BrokerProcess, bad: object) -> None:
    answer = ask(broker, "POST", "/v1/streams", {"name": bad, "subject": "x"})
    assert answer.status == 400, answer.data
    assert error(answer)["code"] == "invalid_request"


@pytest.mark.parametrize(
    "bad",
    ["", " ", "a b", "a..b", ".a", "a.", "a.>.b", ">a", "a*", "a\tb", "a\x01", "x" * 2000, "\ud800", None, 5],
)
def test_bad_subjects_are_400(broker: BrokerProcess, bad: object) -> None:
    answer = ask(broker, "POST", "/v1/streams", {"name": "fine", "subject": bad})
    assert answer.status == 400, answer.data
    assert ask(broker, "GET", "/v1/streams/fine").status == 404


@pytest.mark.parametrize(
    "settings",
    [
        {"max_age": "soon"},
        {"max_age": -1},
        {"max_bytes": "many"},
        {"max_bytes": 0},
        {"max_messages": 1.5},
        {"max_messages": True},
        {"compression": "rar"},
        {"replicas": 0},
        {"min_isr": 2},
        {"group": "a b"},
        {"colour": "red"},
    ],
)
def test_bad_settings_are_400_and_named(broker: BrokerProcess, settings: dict[str, Any]) -> None:
    answer = ask(broker, "POST", "/v1/streams", {"name": "fine", "subject": "x"} | settings)
    assert answer.status == 400, answer.data
    assert next(iter(settings)) in error(answer)["message"]


def test_more_replicas_than_brokers_is_503(broker: BrokerProcess) -> None:
    answer = ask(broker, "POST", "/v1/streams", {"name": "fine", "subject": "x", "replicas": 3})
    assert answer.status == 503
    assert error(answer)["brokers"] == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 5000])
def test_bodies_that_are_no_json_object_are_400(broker: BrokerProcess, body: bytes) -> None:
    assert ask(broker, "POST", "/v1/streams", body).status == 400


def test_body_too_large_is_413(broker: BrokerProcess) -> None:
    assert ask(broker, "POST", "/v1/streams", b" " * 70_000).status == 413


def test_unknown_paths_and_streams_are_404_as_json(broker: BrokerProcess) -> None:
    assert error(ask(broker, "GET", "/v2/nothing"))["code"] == "not_found"
    for method, path in [("GET", ""), ("DELETE", ""), ("PATCH", ""), ("GET", "/messages"), ("GET", "/splits")]:
        answer = ask(broker, method, f"/v1/streams/nosuch{path}", {} if method == "PATCH" else None)
        assert (answer.status, error(answer)["code"]) == (404, "stream_not_found")


# ---- messages ----


def test_messages_are_an_arrow_stream_any_reader_opens(broker: BrokerProcess, filled: str) -> None:
    answer = ask(broker, "GET", f"/v1/streams/{filled}/messages?start=0")
    assert answer.headers["Content-Type"] == "application/vnd.apache.arrow.stream"
    assert answer.headers["Natslog-Next-Offset"] == answer.headers["Natslog-High-Watermark"] == "100"
    assert answer.headers["Natslog-Log-Start-Offset"] == "0"
    assert answer.headers["Natslog-Leader-Epoch"] == "1"
    table = pa.ipc.open_stream(answer.data).read_all()
    assert table.column("offset").to_pylist() == list(range(100))
    assert table.column("value").to_pylist() == [b"%d" % at for at in range(100)]


@pytest.mark.long
def test_every_range_is_read_exactly(client: NatslogClient, filled: str) -> None:
    for start in range(0, 101, 7):
        for end in range(start, 101, 9):
            for max_bytes in (1, 3000, 1 << 20):
                read, position = [], start
                while position < end:
                    fetched = client.fetch(filled, position, end, max_bytes=max_bytes)
                    read += [value for batch in fetched.batches for value in batch.column("offset").to_pylist()]
                    assert fetched.next_offset > position
                    position = fetched.next_offset
                assert read == list(range(start, end))


def test_subject_and_columns_are_applied_at_the_broker(client: NatslogClient, filled: str) -> None:
    fetched = client.fetch(filled, 0, subject=f"{filled}.odd.*", columns=["subject", "offset"])
    (batch,) = fetched.batches
    assert batch.schema.names == ["subject", "offset"]
    assert batch.column("offset").to_pylist() == [at for at in range(100) if at // 5 % 2]
    assert fetched.next_offset == 100
    nothing = client.fetch(filled, 0, subject="other.>")
    assert (nothing.batches, nothing.next_offset) == ([], 100)


def test_ndjson_has_a_line_per_message(broker: BrokerProcess, filled: str) -> None:
    answer = ask(broker, "GET", f"/v1/streams/{filled}/messages?start=3&end=5", Accept="application/x-ndjson")
    assert answer.headers["Content-Type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.data.splitlines()]
    assert [(line["offset"], line["value"], line["key"], line["headers"]) for line in lines] == [
        (3, "3", None, None),
        (4, "4", None, None),
    ]
    assert lines[0]["timestamp"].endswith("Z")


def test_values_that_are_no_text_come_as_base64(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"\xff\x00"])
    answer = ask(broker, "GET", f"/v1/streams/{name}/messages", Accept="application/x-ndjson")
    assert json.loads(answer.data)["value_base64"] == "/wA="


def test_long_poll_waits_for_new_messages(client: NatslogClient, nats_url: str, filled: str) -> None:
    assert client.fetch(filled, 100, wait_ms=50).batches == []
    timer = threading.Timer(0.3, lambda: publish_acked(nats_url, f"{filled}.late", [b"late"]))
    timer.start()
    started = time.monotonic()
    fetched = client.fetch(filled, 100, wait_ms=20_000)
    timer.join()
    assert [batch.column("value").to_pylist() for batch in fetched.batches] == [[b"late"]]
    assert time.monotonic() - started < 10


@pytest.mark.long
@pytest.mark.parametrize(
    ("query", "status", "word"),
    [
        ("start=101", 416, "has offsets 0 to 99"),
        ("start=5&end=4", 400, "beyond"),
        ("start=-1", 400, "start"),
        ("start=x", 400, "start"),
        ("strat=1", 400, "did you mean 'start'"),
        ("start=1&start=2", 400, "twice"),
        ("max_bytes=0", 400, "max_bytes"),
        ("wait_ms=99999999", 400, "wait_ms"),
        ("subject=a..b", 400, "empty token"),
        ("columns=offset,nosuch", 400, "nosuch"),
        ("start=99999999999999999999", 400, "start"),
    ],
)
def test_wrong_questions_get_a_clear_answer(
    broker: BrokerProcess, filled: str, query: str, status: int, word: str
) -> None:
    answer = ask(broker, "GET", f"/v1/streams/{filled}/messages?{query}")
    assert answer.status == status, answer.data
    assert word in error(answer)["message"]


def test_out_of_range_names_both_bounds(client: NatslogClient, filled: str) -> None:
    with pytest.raises(OffsetOutOfRange) as raised:
        client.fetch(filled, 500)
    assert raised.value.facts["log_start_offset"] == 0
    assert raised.value.facts["high_watermark"] == 100


def test_accept_of_something_else_is_400(broker: BrokerProcess, filled: str) -> None:
    assert ask(broker, "GET", f"/v1/streams/{filled}/messages", Accept="text/html").status == 400


# ---- offsets and splits ----


def test_offsets_by_time(broker: BrokerProcess, client: NatslogClient, filled: str) -> None:
    rows = [row for batch in client.read(filled, columns=["offset", "timestamp"]) for row in batch.to_pylist()]
    moment = rows[50]["timestamp"]
    first = next(row["offset"] for row in rows if row["timestamp"] >= moment)
    assert client.offset_at(filled, moment.isoformat())[0] == first
    assert client.offset_at(filled, 0)[0] == 0
    assert client.offset_at(filled, "2999-01-01") == (100, None)
    assert ask(broker, "GET", f"/v1/streams/{filled}/offsets?timestamp=noon").status == 400
    assert ask(broker, "GET", f"/v1/streams/{filled}/offsets").status == 400


def test_splits_cover_the_range_and_name_urls(client: NatslogClient, broker: BrokerProcess, filled: str) -> None:
    splits = client.splits(filled, 10, 90, max_rows=7)
    assert (splits[0].start, splits[-1].end) == (10, 90)
    assert all(left.end == right.start for left, right in zip(splits, splits[1:], strict=False))
    assert max(split.rows for split in splits) <= 7
    assert {split.urls for split in splits} == {(broker.url,)}
    assert len(client.splits(filled, 0, 100, min_splits=4)) >= 4
    assert client.splits(filled, 5, 5) == []
    with pytest.raises(InvalidRequest):
        client.splits(filled, 9, 3)
    with pytest.raises(OffsetOutOfRange):
        client.splits(filled, 0, 101)


def test_splits_take_replicas_in_an_order_that_was_asked_for(client: NatslogClient, filled: str) -> None:
    assert client.splits(filled, 0, 100, read_from="leader", rack="r1")[0].rows == 100
    with pytest.raises(InvalidRequest, match="nearest, leader, any"):
        client.splits(filled, 0, 100, read_from="moon")


def test_extent_tells_how_far_so_many_bytes_reach(client: NatslogClient, filled: str) -> None:
    end, size_bytes = client.extent(filled, 0, 100)
    assert end == 100
    half, half_bytes = client.extent(filled, 0, 100, max_bytes=size_bytes // 2)
    assert 30 < half < 70
    assert size_bytes // 3 < half_bytes <= size_bytes // 2
    assert client.extent(filled, 7, 100, max_bytes=1)[0] == 8
    assert client.extent(filled, 100, 100) == (100, 0)
    with pytest.raises(OffsetOutOfRange):
        client.extent(filled, 0, 101)


def test_extent_states_how_many_messages_there_are(client: NatslogClient, broker: BrokerProcess, filled: str) -> None:
    def counted(query: str) -> int:
        return int(ask(broker, "GET", f"/v1/streams/{filled}/extent{query}").json()["rows"])

    assert (counted(""), counted("?start=10&end=30"), counted("?start=100")) == (100, 20, 0)
    for offset in (0, 12, 13, 99):
        client.delete_message(filled, offset)
    assert (counted(""), counted("?start=10&end=30"), counted("?start=12&end=14")) == (96, 18, 0)


def test_streams_are_listed_by_glob_and_group(client: NatslogClient, name: str) -> None:
    for suffix in ("a", "b"):
        client.create_stream(f"{name}-{suffix}", f"{name}.*", group=f"{name}-group")
    client.create_stream(f"{name}-alone", name)
    named = [stream["name"] for stream in client.streams(pattern=f"{name}-?")]
    assert named == [f"{name}-a", f"{name}-b"]
    assert [stream["name"] for stream in client.streams(group=f"{name}-group")] == named
    assert client.streams(pattern=f"{name}-a", group="other") == []


# ---- the rest ----


def test_deleted_and_recreated_stream_is_another_one(client: NatslogClient, nats_url: str, name: str) -> None:
    old = client.create_stream(name, name)
    publish_acked(nats_url, name, [b"old"])
    client.delete_stream(name)
    with pytest.raises(StreamNotFound):
        client.fetch(name, 0)
    new = client.create_stream(name, name)
    assert new["id"] != old["id"]
    publish_acked(nats_url, name, [b"new"])
    assert all_values(client, name) == [b"new"]
    with pytest.raises(StreamRecreated):
        client.fetch(name, 0, expected_id=old["id"])
    with pytest.raises(StreamConflict):
        client.create_stream(name, "elsewhere")


def test_health_cluster_and_metrics(broker: BrokerProcess, client: NatslogClient, filled: str) -> None:
    assert ask(broker, "GET", "/healthz").status == 200
    assert ask(broker, "GET", "/readyz").json()["status"] == "ready"
    body = client.cluster()
    (one,) = body["brokers"]
    assert (one["id"], one["url"], one["rack"], one["alive"], one["role"]) == (1, broker.url, "", True, "voter")
    assert body["metadata_leader"] == 1
    metrics = broker.metrics()
    assert metrics[f'natslog_messages_committed_total{{stream="{filled}"}}'] == 100
    assert metrics[f'natslog_stream_high_watermark{{stream="{filled}"}}'] == 100
    assert metrics["natslog_nats_connected"] == 1


def test_openapi_is_served(broker: BrokerProcess) -> None:
    answer = ask(broker, "GET", "/openapi.json")
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.json() == document()


def test_splits_of_nothing_and_beyond_the_log(broker: BrokerProcess, filled: str) -> None:
    for at in (0, 7, 42, 100):
        answer = ask(broker, "GET", f"/v1/streams/{filled}/splits?start={at}&end={at}")
        assert (answer.status, answer.json()) == (200, [])
    for call in ("splits", "extent"):
        answer = ask(broker, "GET", f"/v1/streams/{filled}/{call}?start=101")
        assert answer.status == 416
        assert (error(answer)["log_start_offset"], error(answer)["high_watermark"]) == (0, 100)
        assert ask(broker, "GET", f"/v1/streams/{filled}/{call}?start=9&end=3").status == 400


def test_settings_are_edited_together(broker: BrokerProcess, filled: str) -> None:
    edited = ask(broker, "PATCH", f"/v1/streams/{filled}", {"replicas": 1, "max_age": "7d", "group": "g"})
    assert (edited.status, edited.json()["max_age"], edited.json()["group"]) == (200, "7d", "g")
    refused = ask(broker, "PATCH", f"/v1/streams/{filled}", {"group": "a b"})
    assert (refused.status, "group" in error(refused)["message"]) == (400, True)


@pytest.mark.long
def test_broker_logs_in_to_nats_with_a_token(tmp_path: Path) -> None:
    secret = write_secret(tmp_path / "token", "s3cret\n")
    server = NatsServer(0, tmp_path / "nats.log", arguments=("--auth", "s3cret")).start()
    broker = BrokerProcess(tmp_path / "data", server.url, nats_token_file=secret)
    try:
        broker.start()
        assert broker.metrics()["natslog_nats_connected"] == 1
    finally:
        broker.kill()
        server.stop()


# ---- hostile numbers, damage, edits at once ----


@pytest.mark.parametrize("number", ["--5", "9" * 5000, "1e3", "٣", "0x10"])
def test_hostile_numbers_are_400(broker: BrokerProcess, filled: str, number: str) -> None:
    assert ask(broker, "GET", f"/v1/streams/{filled}/messages?start={number}").status == 400
    assert ask(broker, "POST", "/v1/streams", {"name": "n", "subject": "n", "max_bytes": number}).status == 400
    assert ask(broker, "POST", "/v1/streams", {"name": "n", "subject": "n", "max_age": number}).status == 400


def test_head_of_messages_is_refused(broker: BrokerProcess, filled: str) -> None:
    assert ask(broker, "HEAD", f"/v1/streams/{filled}/messages").status == 405


@pytest.mark.long
def test_compressed_stream_is_decoded_in_bounded_parts(own: Path) -> None:
    with running(own, segment_bytes="1MiB", retention_interval="200ms") as (server, broker):
        client = broker.client()
        client.create_stream("orders", "orders", compression="zstd")
        for _ in range(60):
            publish_acked(server.url, "orders", [b"x" * 900_000])
        eventually(lambda: client.stream("orders")["bytes"] < 10_000_000, what="sealed and compressed")
        answer = ask(broker, "GET", "/v1/streams/orders/messages?subject=%3E&columns=value&max_bytes=100000000")
        assert len(answer.data) < 20_000_000
        sizes = [
            len(value) for batch in client.read("orders", columns=["value"]) for value in batch.column(0).to_pylist()
        ]
        assert sizes == [900_000] * 60


@pytest.mark.parametrize("columns", [None, ["subject"], ["value"]])
@pytest.mark.long
def test_file_that_becomes_shorter_after_it_was_proven_is_named_at_once(own: Path, columns: list[str] | None) -> None:
    with running(own, segment_bytes="1MiB", retention_interval="200ms") as (server, broker):
        client = NatslogClient(broker.url, ClientOptions(timeout_s=30, retries=2, retry_interval_s=0.05))
        client.create_stream("orders", "orders")
        for _ in range(6):
            publish_acked(server.url, "orders", [b"x" * 300_000])
        sealed = eventually(lambda: sorted(broker.folder.glob("streams/[!_]*/*.arrow")), what="a sealed segment")[0]
        rows = [batch.num_rows for batch in client.read("orders", columns=columns)]
        assert sum(rows) == 6, "all is proven once"
        os.truncate(sealed, sealed.stat().st_size // 2)
        started = time.monotonic()
        with pytest.raises(CorruptLog, match=sealed.name):
            list(client.read("orders", columns=columns))
        assert time.monotonic() - started < 15, "not after the client's patience"
        assert b"natslog_stream_damaged" in ask(broker, "GET", "/metrics").data


def test_edits_at_once_all_hold(broker: BrokerProcess, filled: str) -> None:
    edits = [{"max_age": "30d"}, {"max_messages": 1_000_000}, {"compression": "zstd"}, {"max_bytes": "1GiB"}]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            statuses = pool.map(lambda edit: ask(broker, "PATCH", f"/v1/streams/{filled}", edit).status, edits)
            assert set(statuses) == {200}
            shown = ask(broker, "GET", f"/v1/streams/{filled}").json()
            found = (shown["max_age"], shown["max_messages"], shown["compression"], shown["max_bytes"])
            assert found == ("30d", 1_000_000, "zstd", 2**30)
            ask(broker, "PATCH", f"/v1/streams/{filled}", dict.fromkeys(("max_age", "max_messages", "max_bytes")))
            ask(broker, "PATCH", f"/v1/streams/{filled}", {"compression": "none"})


def test_file_that_cannot_be_opened_now_is_no_bug_and_may_be_asked_for_again(broker: BrokerProcess, name: str) -> None:
    """As with a disk that fails, or too many open files; another replica in sync is asked where there is one."""
    ask(broker, "POST", "/v1/streams", {"name": name, "subject": name})
    publish_acked(broker.nats_url, name, [b"1", b"2"])
    path = f"/v1/streams/{name}/messages?start=0&end=2"
    stream_id = ask(broker, "GET", f"/v1/streams/{name}").json()["id"]
    (file,) = stream_folder(broker.folder, stream_id).glob("*.active")
    away = file.rename(file.with_suffix(".away"))
    answer = ask(broker, "GET", path)
    away.rename(file)
    assert answer.status == 503, answer.data
    assert (error(answer)["code"], error(answer)["retriable"]) == ("storage_unavailable", True)
    assert ask(broker, "GET", path).status == 200


def test_roll_makes_all_that_is_stored_readable_as_arrow_files(
    broker: BrokerProcess, client: NatslogClient, filled: str
) -> None:
    body = client.roll(filled)
    assert body["sealed_end"] == 100
    files = sorted(Path(body["folder"]).glob("*.arrow"))
    rows = sum(pa.ipc.open_file(pa.OSFile(str(path))).read_all().num_rows for path in files)
    assert rows == 100
    assert client.roll(filled)["sealed_end"] == 100, "again changes nothing"
    with pytest.raises(StreamNotFound):
        client.roll("missing")


def test_names_that_are_natslogs_own_are_refused(client: NatslogClient) -> None:
    with pytest.raises(InvalidRequest, match="begin with '__'"):
        client.create_stream("__inner", "inner")


def test_request_id_of_another_change_is_no_retry(broker: BrokerProcess, client: NatslogClient, name: str) -> None:
    """A client that reuses an id would otherwise be told that a change was made which was not."""
    same = {"Natslog-Request-Id": "used-for-everything"}
    one, other = f"/v1/streams/{name}", f"/v1/streams/{name}-other"
    for path in (one, other):
        created = ask(broker, "POST", "/v1/streams", {"name": path.split("/")[-1], "subject": path[12:]}, **same)
        assert created.status == 201, created.data
    for max_age in ("1h", "2h"):
        assert ask(broker, "PATCH", one, {"max_age": max_age}, **same).json()["max_age"] == max_age
    assert ask(broker, "DELETE", one, **same).status == 204
    assert ask(broker, "GET", one).status == 404
    assert ask(broker, "DELETE", one, **same).status == 204, "this is a retry"
    assert ask(broker, "GET", other).status == 200
