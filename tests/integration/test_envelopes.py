"""Envelopes: many rows in one message, stored as rows, acked and deduplicated together."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from natslog.arrow.schema import HEADERS_TYPE
from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.nats_server import NatsServer
from natslog.wire.envelope import COOKIE, OPENING, enveloped
from natslog.wire.row_hashes import as_ids
from tests.harness import BrokerProcess, all_values, eventually, running, with_nats


def ids_for(count: int, seed: int = 1) -> pa.Array:
    return as_ids(np.random.default_rng(seed).integers(1, 2**63, (count, 2)).astype(np.uint64))


def rows_on(subjects: list[str], count: int, *, ids: pa.Array | None = None) -> Rows:
    """Some with keys and headers, of many sizes."""
    return Rows(
        pa.array([subjects[at * 7 % len(subjects)] for at in range(count)]),
        pa.array([b"%d" % at + b"x" * (at % 13 * 30) for at in range(count)]),
        keys=pa.array([b"k%d" % at if at % 3 else None for at in range(count)], pa.binary()),
        headers=pa.array([[{"key": "H", "value": str(at)}] if at % 4 else None for at in range(count)], HEADERS_TYPE),
        ids=ids,
    )


def stored(client: NatslogClient, name: str) -> list[dict[str, Any]]:
    return [row for batch in client.read(name) for row in batch.to_pylist()]


@pytest.mark.long
def test_rows_are_stored_in_the_order_of_each_subject(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, f"{name}.>")
    subjects = [f"{name}.{letter}" for letter in "abc"]
    given = rows_on(subjects, 30_000, ids=ids_for(30_000))
    with Publisher(nats_url, envelope=True) as publisher:
        for first in range(0, 30_000, 10_000):
            publisher.publish(given.slice(first, 10_000), "stored")
        assert publisher.acked == 30_000
    rows = stored(client, name)
    assert [row["offset"] for row in rows] == list(range(30_000))
    assert client.stream(name)["high_watermark"] == 30_000
    for subject in subjects:
        found = [(row["key"], row["headers"], row["value"]) for row in rows if row["subject"] == subject]
        expected = [
            (key, headers, value)
            for one, key, headers, value in zip(
                given.subjects.to_pylist(), given.keys.to_pylist(), given.headers.to_pylist(),
                given.values.to_pylist(), strict=True,
            )
            if one == subject
        ]  # fmt: skip
        assert found == expected, "in the order in which they were sent"


def test_rows_that_are_sent_again_are_stored_once(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    given = rows_on([name], 20_000, ids=ids_for(20_000))
    for _ in range(2):
        with Publisher(nats_url, envelope=True) as publisher:
            publisher.publish(given, "stored")
            assert publisher.acked == 20_000
    assert [row["value"] for row in stored(client, name)] == given.values.to_pylist()


def test_ack_states_the_last_row_and_the_number_of_rows(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    payload = enveloped(pa.RecordBatch.from_pydict({"value": pa.array([b"a", b"b", b"c"])}))
    message_id = as_ids(np.array([[5, 6]], np.uint64))[0].as_py()

    async def answers(nats: Any) -> list[dict[str, Any]]:
        ways = ({"Nats-Msg-Id": message_id}, {"Nats-Msg-Id": message_id, "Natslog-Envelope": "arrow"}, None)
        sent = [*((payload, headers) for headers in ways), (b"plain", None)]
        return [
            json.loads((await nats.request(name, data, headers=headers, timeout=30)).data) for data, headers in sent
        ]

    first, again, without, plain = with_nats(nats_url, answers)
    assert (first["stream"], first["seq"], first["count"], "duplicate" in first) == (name, 3, 3, False)
    assert (again["seq"], again["count"], again["duplicate"]) == (3, 3, True)
    assert (without["seq"], without["count"]) == (6, 3)
    assert (plain["seq"], "count" in plain) == (7, False)
    assert all_values(client, name) == [b"a", b"b", b"c", b"a", b"b", b"c", b"plain"]


GOOD = enveloped(pa.RecordBatch.from_pydict({"value": pa.array([b"a"])}))


def stream_of(batches: list[pa.RecordBatch], compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


BAD = {
    "only the cookie": COOKIE,
    "only the opening": OPENING,
    "another kind": GOOD[:8] + b"\3" + GOOD[9:],
    "cut short": GOOD[:-9],
    "without its end": GOOD[:-8],
    "with more behind it": GOOD + b"x",
    "no rows": enveloped(pa.RecordBatch.from_pydict({"value": pa.array([], pa.binary())})),
    "too many rows": enveloped(pa.RecordBatch.from_pydict({"value": pa.array([b""] * 65_537)})),
    "no column value": enveloped(pa.RecordBatch.from_pydict({"key": pa.array([b"a"])})),
    "null value": enveloped(pa.RecordBatch.from_pydict({"value": pa.array([b"a", None])})),
    "unknown column": enveloped(pa.RecordBatch.from_pydict({"value": pa.array([b"a"]), "more": pa.array([1])})),
    "another subject": enveloped(
        pa.RecordBatch.from_pydict({"value": pa.array([b"a"]), "subject": pa.array(["other"])})
    ),
    "compressed": OPENING + stream_of([pa.RecordBatch.from_pydict({"value": pa.array([b"a" * 100_000])})], "zstd"),
    "many batches": OPENING + stream_of([pa.RecordBatch.from_pydict({"value": pa.array([b"a"])})] * 65),
    "many schemas": OPENING + pa.schema([("value", pa.binary())]).serialize().to_pybytes() * 70 + GOOD[16:],
    "a batch without rows": OPENING
    + stream_of([pa.RecordBatch.from_pydict({"value": pa.array([b"a"] * count, pa.binary())}) for count in (1, 0)]),
    "ids in headers of rows": enveloped(
        pa.RecordBatch.from_pydict(
            {
                "value": pa.array([b"a"]),
                "headers": pa.array([[{"key": "Nats-Msg-Id", "value": "x"}]], HEADERS_TYPE),
            }
        )
    ),
    "empty": b"",
    "text": b"hello",
}
NO_OPENING = ("only the cookie", "another kind", "empty", "text")


@pytest.mark.long
@pytest.mark.parametrize("kind", BAD)
def test_what_only_begins_as_an_envelope_is_a_plain_message_or_refused(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, kind: str
) -> None:
    client.create_stream(name, name)

    async def answers(nats: Any) -> list[dict[str, Any]]:
        return [
            json.loads((await nats.request(name, BAD[kind], headers=headers, timeout=30)).data)
            for headers in (None, {"Natslog-Envelope": "arrow"})
        ]

    plain, refused = with_nats(nats_url, answers)
    assert (plain["seq"], "count" in plain) == (1, False)
    assert refused["error"]["code"] == 400, refused
    assert all_values(client, name) == [BAD[kind]]
    unread = broker.metrics()[f'natslog_unread_envelopes_total{{stream="{name}"}}']
    assert unread == (kind not in NO_OPENING)


def test_id_of_another_form_is_refused(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)

    async def answer(nats: Any) -> dict[str, Any]:
        headers = {"Natslog-Envelope": "arrow", "Nats-Msg-Id": "17"}
        found: dict[str, Any] = json.loads((await nats.request(name, GOOD, headers=headers, timeout=30)).data)
        return found

    error = with_nats(nats_url, answer)["error"]
    assert error["code"] == 400
    assert "must be of natslog's own form" in error["description"]


@pytest.mark.long
def test_damaged_envelopes_are_plain_messages_or_the_right_rows(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    """Whatever the bytes are, the broker goes on, and each message is stored: as it is, or as valid rows."""
    client.create_stream(name, name)
    chance = random.Random(11)
    headers = pa.array([[{"key": "a", "value": "b"}], None, []], HEADERS_TYPE)
    good = enveloped(
        pa.RecordBatch.from_pydict(
            {"value": pa.array([b"a", b"", b"c" * 40]), "key": pa.array([b"k", None, b""]), "headers": headers}
        )
    )
    sent: list[bytes] = []
    for _ in range(4000):
        data = bytearray(good)
        for _ in range(chance.choice((1, 1, 2, 6))):
            at = chance.randrange(16, len(data))
            match chance.randrange(4):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    data[at : at + 4] = chance.choice(
                        (b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff\xff\xff\xff", b"\0\0\0\0")
                    )
                case 2:
                    del data[at : at + chance.choice((1, 8))]
                case 3:
                    data[at:at] = chance.randbytes(chance.choice((1, 8)))
        sent.append(bytes(data))

    async def publish(nats: Any) -> list[dict[str, Any]]:
        return [json.loads((await nats.request(name, data, timeout=30)).data) for data in sent]

    acks = with_nats(nats_url, publish)
    values, at = all_values(client, name), 0
    for data, ack in zip(sent, acks, strict=True):
        count = ack.get("count", 0)
        assert ack["seq"] == at + max(1, count), ack
        if not count:
            assert values[at] == data
        at = ack["seq"]
    assert at == len(values)
    assert sum("count" in ack for ack in acks) < len(acks) / 2, "most of the damage is found"
    assert broker.ready()


def test_publisher_cuts_the_same_rows_the_same_way(client: NatslogClient, nats_url: str, name: str) -> None:
    """Also rows that are as large as the server allows, and subjects with few rows."""
    client.create_stream(name, f"{name}.>")
    large = Rows(
        pa.array([f"{name}.a"] * 50 + [f"{name}.b"]),
        pa.array([b"x" * (900_000 if at % 10 == 5 else 100) for at in range(51)]),
        ids=ids_for(51, seed=2),
    )
    for _ in range(2):
        with Publisher(nats_url, envelope=True) as publisher:
            publisher.publish(large, "stored")
            assert publisher.acked == 51
    rows = stored(client, name)
    assert [row["value"] for row in rows if row["subject"] == f"{name}.a"] == large.values.to_pylist()[:50]
    assert len(rows) == 51


def test_long_subject_does_not_make_a_small_message_large(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    """Each row has the subject: a kibibyte for each of 60,000 rows would be 60 MB of a message of 300 kB."""
    subject = f"{name}." + "s" * (1000 - len(name))
    client.create_stream(name, f"{name}.*")
    payload = enveloped(pa.RecordBatch.from_pydict({"value": pa.array([b""] * 60_000)}))

    async def answers(nats: Any) -> list[dict[str, Any]]:
        headers = {"Natslog-Envelope": "arrow"}
        return [
            json.loads((await nats.request(to, payload, headers=headers, timeout=30)).data)
            for to in (subject, f"{name}.short")
        ]

    long, short = with_nats(nats_url, answers)
    assert "too many for one envelope" in long["error"]["description"]
    assert short["count"] == 60_000
    assert client.stream(name)["high_watermark"] == 60_000


@pytest.mark.long
def test_large_message_has_a_commit_of_its_own(tmp_path: Path) -> None:
    """What is committed at once is copied to other brokers in one frame, whose size is limited."""
    config = tmp_path / "nats.conf"
    config.write_text("max_payload: 32MB\n")
    server = NatsServer(0, tmp_path / "nats.log", arguments=("--config", str(config))).start()
    broker = BrokerProcess(tmp_path / "broker", server.url).start()
    try:
        client = broker.client()
        client.create_stream("s", "s")
        values = [bytes([at]) * 1_000_000 for at in range(24)]
        payload = enveloped(pa.RecordBatch.from_pydict({"value": pa.array(values)}))

        async def publish(nats: Any) -> None:
            bodies = [b"x" * 900_000] * 6 + [payload] + [b"y"] * 3
            await asyncio.gather(*(nats.request("s", body, timeout=30) for body in bodies))

        with_nats(server.url, publish)
        sizes = [batch.column("value").buffers()[2].size for batch in client.read("s")]
        assert max(sizes) <= 24_000_010
        assert client.stream("s")["high_watermark"] == 6 + 24 + 3
    finally:
        broker.kill()
        server.stop()


def test_rows_without_an_id_do_not_take_the_ids_of_the_others(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    ids = pa.array([None if at == 500 else one for at, one in enumerate(ids_for(1000, seed=3).to_pylist())])
    given = rows_on([name], 1000, ids=ids)
    for _ in range(2):
        with Publisher(nats_url, envelope=True) as publisher:
            publisher.publish(given, "stored")
    assert client.stream(name)["high_watermark"] == 1001


def test_no_rows_and_rows_with_ids_in_their_headers(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    headers = pa.array([[{"key": "Nats-Msg-Id", "value": f"{at}"}] for at in range(10)], HEADERS_TYPE)
    with_ids = Rows(pa.array([name] * 10), pa.array([b"v"] * 10), headers=headers)
    for _ in range(2):
        with Publisher(nats_url, envelope=True) as publisher:
            publisher.publish(with_ids.slice(0, 0), "stored")
            publisher.publish(with_ids, "stored")
    assert client.stream(name)["high_watermark"] == 10


@pytest.mark.long
def test_envelopes_are_stored_once_also_after_restarts_and_seals(tmp_path: Path) -> None:
    with running(tmp_path, segment_bytes="256KiB", retention_interval="200ms") as (nats, broker):
        broker.client().create_stream("s", "s")
        given = rows_on(["s"], 20_000, ids=ids_for(20_000, seed=4))

        def publish() -> None:
            with Publisher(nats.url, envelope=True) as publisher:
                publisher.publish(given, "stored")

        publish()
        eventually(lambda: len(list(broker.folder.glob("streams/[!_]*/*.arrow"))) >= 2, 30, "segments are sealed")
        for _ in range(2):
            broker.kill()
            broker.start()
            publish()
        assert broker.client().stream("s")["high_watermark"] == 20_000
