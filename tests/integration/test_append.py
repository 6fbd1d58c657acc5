"""Direct append over HTTP: staging, commits, duplicates, refusals, and what the client makes of it."""

from __future__ import annotations

import json
import secrets
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import urllib3

from natslog.arrow.schema import HEADERS_TYPE
from natslog.client import NatslogClient
from natslog.client.appending import Appended, PartUploader
from natslog.errors import BatchConflict, InvalidRequest, PartsMissing, PayloadTooLarge, StreamPaused
from tests.harness import BrokerProcess, all_values, eventually, publish_acked, running


def table(values: list[bytes], **columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())} | columns)


def staged(client: NatslogClient, stream: str, producer: str, batch: int, *rows: pa.RecordBatch, **options: Any) -> Any:
    uploader = PartUploader(client, stream, producer, batch, **options)
    for one in rows:
        uploader.add(one)
    return uploader.finish()


def appended(client: NatslogClient, stream: str, producer: str, batch: int, values: list[bytes]) -> Appended:
    return client.commit_append(stream, producer, batch, staged(client, stream, producer, batch, table(values)))


def test_rows_come_with_all_columns_as_one_run_at_one_time(client: NatslogClient, name: str, nats_url: str) -> None:
    client.create_stream(name, f"{name}.>")
    publish_acked(nats_url, f"{name}.before", [b"first"])
    headers = [[{"key": "A", "value": "b"}], None, []]
    rows = table(
        [b"x", b"", b"z" * 1000],
        subject=[f"{name}.a", f"{name}.b.c", f"{name}.\u00e4"],
        key=pa.array([b"k", None, b""], pa.binary()),
        headers=pa.array(headers, HEADERS_TYPE),
    )
    parts = staged(client, name, "load", 3, rows)
    assert client.stream(name)["high_watermark"] == 1, "nothing is there before the commit"
    assert client.commit_append(name, "load", 3, parts) == Appended(1, 4, False)
    first, *found = [row for batch in client.read(name) for row in batch.to_pylist()]
    assert first["value"] == b"first"
    assert [row["value"] for row in found] == [b"x", b"", b"z" * 1000]
    assert [row["subject"] for row in found] == rows.column("subject").to_pylist()
    assert [row["key"] for row in found] == [b"k", None, b""]
    assert [row["headers"] for row in found] == headers
    assert len({row["timestamp"] for row in found}) == 1
    assert client.last_append(name, "load").batch == 3
    assert client.last_append(name, "nobody").batch is None


def test_last_batch_again_is_a_duplicate(broker: BrokerProcess, client: NatslogClient, name: str) -> None:
    client.create_stream(name, name)
    before = broker.metrics().get("natslog_runs_duplicate_total", 0)
    assert appended(client, name, "q", 5, [b"a", b"b"]) == Appended(0, 2, False)
    assert appended(client, name, "q", 5, [b"a", b"b"]) == Appended(0, 2, True)
    assert appended(client, name, "q", 5, [b"b", b"a"]) == Appended(0, 2, True), "in another order, as after a shuffle"
    again = staged(client, name, "q", 5, table([b"b"])) + staged(client, name, "q", 5, table([b"a"]), label="1")
    assert client.commit_append(name, "q", 5, again) == Appended(0, 2, True), "by other tasks"
    assert client.commit_append(name, "q", 5, again) == Appended(0, 2, True), "although they are no longer staged"
    assert client.commit_append(name, "q", 5, []).duplicate is False, "a batch without rows is nothing to store"
    assert appended(client, name, "other", 5, [b"d"]) == Appended(2, 3, False)
    assert appended(client, name, "q", 6, [b"e"]) == Appended(3, 4, False)
    assert all_values(client, name) == [b"a", b"b", b"d", b"e"]
    metrics = broker.metrics()
    assert metrics[f'natslog_runs_duplicate_total{{stream="{name}"}}'] - before == 4
    assert metrics[f'natslog_runs_total{{stream="{name}"}}'] == 3
    assert metrics["natslog_staged_bytes"] == 0, "duplicates' parts are dropped too"


@pytest.mark.parametrize("values", [[b"a"], [b"a", b"c"], [b"a", b"b", b"b"]], ids=["fewer", "others", "more"])
def test_last_batch_with_other_rows_is_a_conflict(client: NatslogClient, name: str, values: list[bytes]) -> None:
    client.create_stream(name, name)
    appended(client, name, "q", 5, [b"a", b"b"])
    parts = staged(client, name, "q", 5, table(values))
    with pytest.raises(BatchConflict, match="batch 5 of q is stored with 2 rows, but now has other rows") as failed:
        client.commit_append(name, "q", 5, parts)
    assert "new checkpoint" in failed.value.message
    facts = {name: failed.value.facts[name] for name in ("batch", "rows", "last_batch", "last_rows")}
    assert facts == {"batch": 5, "rows": len(values), "last_batch": 5, "last_rows": 2}
    unproven = [msgspec.structs.replace(part, content=None) for part in parts]
    with pytest.raises(BatchConflict):
        client.commit_append(name, "q", 5, unproven)
    assert client.commit_append(name, "q", 5, parts, on_conflict="skip") == Appended(0, 2, True)
    assert all_values(client, name) == [b"a", b"b"]
    parts = staged(client, name, "q", 5, table(values))
    assert client.commit_append(name, "q", 5, parts, on_conflict="append") == Appended(2, 2 + len(values), False)
    assert client.commit_append(name, "q", 5, parts, on_conflict="append").duplicate, "asked for again"
    assert all_values(client, name) == [b"a", b"b", *values]


def test_batch_below_the_last_one_is_a_conflict_and_may_be_appended(
    broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    """A checkpoint that was set back: whether the rows are stored, only the operator can know."""
    client.create_stream(name, name)
    for batch in range(4):
        appended(client, name, "q", batch, [b"%d" % batch])
    parts = staged(client, name, "q", 1, table([b"1"]))
    for skipping in ("fail", "skip"):
        with pytest.raises(BatchConflict, match="batch 1 of q was sent after its batch 3 was stored: the checkpoint"):
            client.commit_append(name, "q", 1, parts, on_conflict=skipping)  # type: ignore[arg-type]
    assert client.commit_append(name, "q", 1, parts, on_conflict="append") == Appended(4, 5, False)
    assert client.commit_append(name, "q", 1, parts, on_conflict="append").duplicate, "asked for again"
    assert "batch 1 of q (1 rows) was appended on request; its last stored batch was 3" in broker.output()
    assert appended(client, name, "q", 2, [b"new"]) == Appended(5, 6, False), "the producer continues from there"
    assert client.last_append(name, "q").batch == 2


def test_batch_of_a_broker_without_digests_is_compared_by_its_rows(client: NatslogClient, name: str) -> None:
    client.create_stream(name, name)
    appended(client, name, "q", 5, [b"a", b"b"])
    parts = staged(client, name, "q", 5, table([b"a", b"b"]))
    client.abort_append(name, "q", 5)
    unproven = [msgspec.structs.replace(part, content=None) for part in parts]
    assert client.commit_append(name, "q", 5, unproven).duplicate
    with pytest.raises(BatchConflict):
        client.commit_append(name, "q", 5, [msgspec.structs.replace(part, rows=3) for part in unproven])


def test_same_commit_from_many_at_once_is_appended_once(client: NatslogClient, name: str) -> None:
    client.create_stream(name, name)
    parts = staged(client, name, "q", 0, table([b"%d" % at for at in range(100_000)]))
    answers: list[Appended] = []
    threads = [
        threading.Thread(target=lambda: answers.append(client.commit_append(name, "q", 0, parts))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(one.start, one.end) for one in answers] == [(0, 100_000)] * 6
    assert sum(not one.duplicate for one in answers) == 1
    assert client.stream(name)["high_watermark"] == 100_000


def test_commit_takes_the_attempts_it_names_and_drops_the_others(
    broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name)
    first = staged(client, name, "q", 0, table([b"first"]), attempt=1)
    staged(client, name, "q", 0, table([b"speculative"]), attempt=2)
    other = staged(client, name, "q", 0, table([b"other"]), label="1", attempt=3)
    assert broker.metrics()["natslog_staged_bytes"] > 0
    client.commit_append(name, "q", 0, other + first)
    assert all_values(client, name) == [b"other", b"first"], "in the order named"
    assert broker.metrics()["natslog_staged_bytes"] == 0
    assert not list((broker.folder / "staged").iterdir())


def test_parts_that_are_not_as_named_are_missing(client: NatslogClient, name: str) -> None:
    client.create_stream(name, name)
    (part,) = staged(client, name, "q", 0, table([b"x"]))
    for wrong in ({"rows": 2}, {"digest": "00000000"}, {"content": "0" * 32}, {"attempt": 1}, {"part": "1-0"}):
        named = type(part)(**({field: getattr(part, field) for field in part.__struct_fields__} | wrong))
        with pytest.raises(PartsMissing, match="Stage the batch again"):
            client.commit_append(name, "q", 0, [named])
    client.abort_append(name, "q", 0)
    with pytest.raises(PartsMissing):
        client.commit_append(name, "q", 0, [part])
    assert client.stream(name)["high_watermark"] == 0


def test_paused_stream_takes_no_run_and_still_knows_duplicates(client: NatslogClient, name: str) -> None:
    client.create_stream(name, name)
    appended(client, name, "q", 0, [b"a"])
    client.edit_stream(name, paused=True)
    patient = NatslogClient(client.servers[0])
    assert appended(patient, name, "q", 0, [b"a"]).duplicate
    impatient = NatslogClient(client.servers[0], type(client.options)(retries=0))
    with pytest.raises(Exception, match="is paused"):
        appended(impatient, name, "q", 1, [b"b"])
    client.edit_stream(name, paused=False)
    assert appended(client, name, "q", 1, [b"b"]).start == 1
    assert StreamPaused.retriable


def test_published_repeat_of_an_appended_message_id_is_a_duplicate(
    client: NatslogClient, name: str, nats_url: str
) -> None:
    client.create_stream(name, name)
    ids = pa.array([None, [{"key": "Nats-Msg-Id", "value": "id-7"}]], HEADERS_TYPE)
    client.commit_append(name, "q", 0, staged(client, name, "q", 0, table([b"a", b"b"], headers=ids)))
    (ack,) = publish_acked(nats_url, name, [b"again"], headers={"Nats-Msg-Id": "id-7"})
    assert (ack["duplicate"], ack["offset"]) == (True, 1)


def test_ids_under_null_lists_stop_no_broker(broker: BrokerProcess, client: NatslogClient, name: str) -> None:
    client.create_stream(name, name)
    pairs = pa.array([{"key": "Nats-Msg-Id", "value": "hidden"}, {"key": "Nats-Msg-Id", "value": "b"}])
    headers = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pairs, mask=pa.array([True, False]))
    client.commit_append(name, "q", 0, staged(client, name, "q", 0, table([b"a", b"b"], headers=headers)))
    assert broker.ready()
    assert next(row["headers"] for batch in client.read(name) for row in batch.to_pylist()) is None


@pytest.mark.long
def test_compressed_upload_is_taken_as_far_as_it_fits_uncompressed(
    broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name)
    url = f"{broker.url}/v1/streams/{name}/appends/q/0/parts"
    answers = []
    for at, size in enumerate((1000, 512 * 1024 * 1024)):
        sink, rows = pa.BufferOutputStream(), table([bytes(size)])
        with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_batch(rows)
        answers.append(urllib3.PoolManager().request("PUT", f"{url}/{at}", body=bytes(sink.getvalue())))
    client.abort_append(name, "q", 0)
    assert [answer.status for answer in answers] == [200, 400]
    assert "uncompressed" in answers[1].json()["error"]["message"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (table([b"x", None, b"y"], subject=["t.a"] * 3), "value is null: row 1"),
        (table([b"x", b"y"], subject=["t.a", None]), "subject is null: row 1"),
        (table([b"x", b"y"], subject=["t.a", "t..b"]), "not one plain NATS subject: row 1 .'t..b'."),
        (table([b"x"], subject=["t.*"]), "not one plain NATS subject: row 0 .'t.\\*'."),
        (table([b"x"], subject=["t.a b"]), "not one plain NATS subject"),
        (table([b"x"], subject=["t." + "a" * 1023]), "not one plain NATS subject"),
        (table([b"x"], subject=["other.a"]), "records 't.>', not the subject: row 0 .'other.a'."),
        (table([b"x"]), "give one subject"),
        (table([b"x"], subject=["t.a"], offset=[1]), "column 'offset'; the columns are value"),
        (table([b"x"], subject=[7]), "column subject has type int64, but must have type string"),
        (table([b"x"], subject=["t.a"], headers=["A: b"]), "column headers has type string"),
        (
            table([b"x"], subject=["t.a"], headers=pa.array([[{"key": None, "value": "v"}]], HEADERS_TYPE)),
            "header's key or value is null",
        ),
        (pa.RecordBatch.from_pydict({"payload": [b"x"]}), "column 'payload'"),
    ],
)
def test_rows_that_the_stream_does_not_take_are_named(client: NatslogClient, rows: pa.RecordBatch, words: str) -> None:
    client.create_stream("typed", "t.>")
    with pytest.raises(InvalidRequest, match=words):
        staged(client, "typed", "q", 0, rows)


def whole_upload() -> bytes:
    sink = pa.BufferOutputStream()
    rows = table([b"x" * 100] * 50)
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
        writer.write_batch(rows)
    return bytes(sink.getvalue())


def test_upload_that_is_cut_or_garbled_is_refused_and_leaves_nothing(
    broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name)
    pool, whole = urllib3.PoolManager(), whole_upload()
    url = f"{broker.url}/v1/streams/{name}/appends/q/0/parts/0"
    garbled = [whole[:size] for size in range(0, len(whole), 501)]
    garbled += [whole + b"x", whole[:-8] + whole, b"\xff" * 5000, whole.replace(b"value", b"valve")]
    garbled += [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in range(0, 700, 5)]
    statuses = [pool.request("PUT", url, body=body).status for body in garbled]
    assert set(statuses) <= {200, 400, 413}, "413 where a garbled message claims a large batch; never a 500"
    assert statuses[: len(range(0, len(whole), 501)) + 4] == [400] * (len(range(0, len(whole), 501)) + 4)
    pool.request("DELETE", url.removesuffix("/parts/0"))
    assert not list((broker.folder / "staged").iterdir())
    assert "Traceback" not in broker.output()


def test_chunked_upload_of_several_megabytes_goes_through_a_file(
    broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name)
    rows = table([b"%07d" % at * 10 for at in range(20_000)])

    def chunks() -> Iterator[bytes]:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            for _ in range(10):
                writer.write_batch(rows)
        whole = bytes(sink.getvalue())
        yield from (whole[at : at + 100_000] for at in range(0, len(whole), 100_000))

    url = f"{broker.url}/v1/streams/{name}/appends/q/0"
    answer = urllib3.PoolManager().request("PUT", f"{url}/parts/0", body=chunks(), chunked=True)
    part = json.loads(answer.data)
    assert part["rows"] == 200_000
    parts = [{field: part[field] for field in ("part", "attempt", "rows", "digest")}]
    request = urllib.request.Request(url, json.dumps({"parts": parts}).encode(), method="POST")
    with urllib.request.urlopen(request) as done:
        assert json.loads(done.read()) == {"start": 0, "end": 200_000, "duplicate": False}
    assert all_values(client, name) == rows.column("value").to_pylist() * 10


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/appends/q/0", b"{", 400, "the body must be"),
        ("POST", "/appends/q/0", b'{"parts": [], "more": 1}', 400, "the body must be"),
        ("POST", "/appends/q/0", b'{"parts": [], "on_conflict": "maybe"}', 400, "the body must be"),
        (
            "POST",
            "/appends/q/0",
            b'{"parts": [{"part": "0", "attempt": 0, "rows": 1, "digest": "0", "content": "0x1"}]}',
            400,
            "content must be 32 hexadecimal digits",
        ),
        ("POST", "/appends/q/-1", b'{"parts": []}', 400, "batch '-1' must be a whole number"),
        ("POST", "/appends/a%20b/0", b'{"parts": []}', 400, "producer 'a b' is not allowed"),
        ("PUT", "/appends/q/0/parts/0?attempt=x", b"", 400, "attempt 'x' must be a whole number"),
        ("PUT", "/appends/q/0/parts/0?subjekt=x", b"", 400, "did you mean 'subject'"),
        ("PUT", "/appends/q/0/parts/0?subject=a.*", b"", 400, "wildcard"),
        ("PUT", "/appends/q/0/parts/0?subject=else.where", b"", 400, "not the subject 'else.where'"),
    ],
)
def test_wrong_requests_are_named(
    broker: BrokerProcess, client: NatslogClient, method: str, path: str, body: bytes, status: int, words: str
) -> None:
    client.create_stream("wrong", "wrong.>")
    answer = urllib3.PoolManager().request(method, f"{broker.url}/v1/streams/wrong{path}", body=body)
    assert answer.status == status
    assert words in json.loads(answer.data)["error"]["message"]


def test_part_named_twice_is_refused(client: NatslogClient, name: str) -> None:
    client.create_stream(name, name)
    (part,) = staged(client, name, "q", 0, table([b"x"]))
    with pytest.raises(InvalidRequest, match="named twice"):
        client.commit_append(name, "q", 0, [part, part])


@pytest.mark.long
# ---- rows in one request ----


def in_one(broker: BrokerProcess, stream: str, producer: str, batch: int, after: int, values: list[bytes]) -> Any:
    """The status and the body of the answer."""
    sink = pa.BufferOutputStream()
    rows = table(values)
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    url = f"{broker.url}/v1/streams/{stream}/appends/{producer}/{batch}/rows?after={after}"
    answer = urllib3.request("POST", url, body=sink.getvalue().to_pybytes())
    return answer.status, answer.json()


def last_batches(broker: BrokerProcess, stream: str, prefix: str) -> dict[str, int]:
    found: dict[str, int] = urllib3.request("GET", f"{broker.url}/v1/streams/{stream}/appends?prefix={prefix}").json()
    return found["batches"]


def test_rows_of_one_request_follow_the_last_batch_of_their_producer(
    broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name)
    staged_before = broker.metrics()["natslog_staged_bytes"]
    assert in_one(broker, name, "q.a", 7, 0, [b"a", b"b"]) == (200, {"start": 0, "end": 2, "duplicate": False})
    assert in_one(broker, name, "q.a", 7, 0, [b"a", b"b"]) == (200, {"start": 0, "end": 2, "duplicate": True})
    assert in_one(broker, name, "q.a", 9, 7, [b"c"]) == (200, {"start": 2, "end": 3, "duplicate": False})
    status, body = in_one(broker, name, "q.a", 12, 7, [b"d", b"e"])
    assert (status, body["error"]["code"], body["error"]["last_batch"]) == (409, "batch_conflict", 9)
    assert "batch 12 of q.a follows batch 7, but its last batch is 9: another writer" in body["error"]["message"]
    for batch, after, values in ((9, 7, [b"other"]), (8, 7, [b"c"])):
        assert in_one(broker, name, "q.a", batch, after, values)[0] == 409
    status, body = in_one(broker, name, "q.a", 9, 9, [b"c"])
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert all_values(client, name) == [b"a", b"b", b"c"]
    assert broker.metrics()["natslog_staged_bytes"] == staged_before, "nothing is left of requests that were refused"


def test_last_batches_are_listed_by_the_names_of_their_producers(
    broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name)
    for producer, batch, after in (("q.a", 7, 0), ("q.b", 1, 0), ("r", 5, 0), ("q.a", 8, 7)):
        assert in_one(broker, name, producer, batch, after, [b"x"])[0] == 200
    assert in_one(broker, name, "unknown", 9, 8, [b"x"])[0] == 409, "what the stream has lost is not passed over"
    assert last_batches(broker, name, "q.") == {"q.a": 8, "q.b": 1}
    assert last_batches(broker, name, "nobody") == {}


def test_rows_of_one_request_that_are_many_when_stored_are_refused(
    broker: BrokerProcess, client: NatslogClient
) -> None:
    """Some bytes of a request would be a long subject for each of a million rows."""
    subject = "long." + "x" * 200
    client.create_stream("long", subject)
    rows = pa.RecordBatch.from_pydict({"value": pa.array([b""] * 1_000_000, pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    url = f"{broker.url}/v1/streams/long/appends/q/1/rows?after=0"
    answer = urllib3.request("POST", url, body=sink.getvalue().to_pybytes())
    assert (answer.status, answer.json()["error"]["code"]) == (413, "payload_too_large")


def test_same_rows_of_one_request_from_many_at_once_are_appended_once(
    broker: BrokerProcess, client: NatslogClient, name: str
) -> None:
    client.create_stream(name, name)
    answers: list[Any] = []
    rows = [b"%d" % at for at in range(50_000)]
    threads = [threading.Thread(target=lambda: answers.append(in_one(broker, name, "q", 5, 0, rows))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for status, _ in answers} == {200}, answers
    assert sum(not body["duplicate"] for _, body in answers) == 1
    assert client.stream(name)["high_watermark"] == 50_000


def test_limits_restart_and_table_of_producers(own: Path) -> None:
    """What takes a broker of its own: the limit of a run, what a restart drops, and what it still knows."""
    with running(own, append_max_bytes="1MiB", segment_bytes="64KiB", retention_interval="500ms") as (_, broker):
        client = broker.client()
        client.create_stream("orders", "orders")
        large = table([secrets.token_bytes(1000)] * 700)
        parts = staged(client, "orders", "q", 0, large)
        parts += staged(client, "orders", "q", 0, large, label="1")
        with pytest.raises(PayloadTooLarge, match="append_max_bytes"):
            client.commit_append("orders", "q", 0, parts)
        with pytest.raises(PayloadTooLarge, match="maxBytesPerTrigger"):
            staged(client, "orders", "q", 0, large, label="2")
        client.commit_append("orders", "q", 0, parts[:1])
        for batch in range(1, 30):
            appended(client, "orders", "q", batch, [b"%d" % batch] * 100)
        eventually(lambda: client.stream("orders")["segments"] > 1)
        left = staged(client, "orders", "q", 30, table([b"left"]))
        gone = staged(client, "orders", "other", 0, table([b"gone"]))
        broker.kill()
        names = sorted(path.name for path in (broker.folder / "staged").iterdir())
        (broker.folder / "staged" / names[-1]).write_bytes(b"{ a torn description")
        (broker.folder / "staged" / "99999999999999999999.json").touch()
        broker.start()
        assert sorted(path.name for path in (broker.folder / "staged").iterdir()) == names[:2], "what can be committed"
        with pytest.raises(PartsMissing):
            client.commit_append("orders", "other", 0, gone)
        assert appended(client, "orders", "q", 29, [b"29"] * 100) == Appended(700 + 2800, 700 + 2900, True)
        broker.terminate()
        broker.start()
        (table_file,) = broker.folder.glob("streams/[!_]*/producers")
        broker.kill()
        table_file.write_bytes(b"rubbish")
        broker.start()
        assert appended(client, "orders", "q", 29, [b"29"] * 100).duplicate
        assert client.commit_append("orders", "q", 30, left) == Appended(3600, 3601, False), "staged before two kills"
        assert not list((broker.folder / "staged").iterdir())
