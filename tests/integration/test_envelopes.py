"""Envelopes: many rows in one message, stored as rows, acked and deduplicated together."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from natslog.arrow.schema import HEADERS_TYPE
from natslog.client import NatslogClient
from natslog.client.publisher import Publisher, Rows
from natslog.wire.envelope import COOKIE, OPENING, enveloped
from natslog.wire.row_hashes import as_ids
from tests.harness import BrokerProcess, all_values, with_nats


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


def test_rows_are_stored_as_if_each_had_been_a_message(client: NatslogClient, nats_url: str, name: str) -> None:
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
        return [json.loads((await nats.request(name, data, headers=headers, timeout=5)).data) for data, headers in sent]

    first, again, without, plain = with_nats(nats_url, answers)
    assert (first["stream"], first["seq"], first["count"], "duplicate" in first) == (name, 3, 3, False)
    assert (again["seq"], again["count"], again["duplicate"]) == (3, 3, True)
    assert (without["seq"], without["count"]) == (6, 3)
    assert (plain["seq"], "count" in plain) == (7, False)
    assert all_values(client, name) == [b"a", b"b", b"c", b"a", b"b", b"c", b"plain"]


GOOD = enveloped(pa.RecordBatch.from_pydict({"value": pa.array([b"a"])}))


def compressed() -> bytes:
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"a" * 100_000])})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    return OPENING + sink.getvalue().to_pybytes()


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
    "compressed": compressed(),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_only_begins_as_an_envelope_is_a_plain_message_or_refused(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, kind: str
) -> None:
    client.create_stream(name, name)

    async def answers(nats: Any) -> list[dict[str, Any]]:
        return [
            json.loads((await nats.request(name, BAD[kind], headers=headers, timeout=5)).data)
            for headers in (None, {"Natslog-Envelope": "arrow"})
        ]

    if kind in ("only the cookie", "another kind"):  # not the beginning of this kind of envelope
        with_nats(nats_url, answers)
        assert all_values(client, name) == [BAD[kind]] * 2
        return
    plain, refused = with_nats(nats_url, answers)
    assert (plain["seq"], "count" in plain) == (1, False)
    assert refused["error"]["code"] == 400, refused
    assert all_values(client, name) == [BAD[kind]]
    metrics = broker.metrics()
    assert metrics[f'natslog_unread_envelopes_total{{stream="{name}"}}'] == 1


def test_id_of_another_form_is_refused(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)

    async def answer(nats: Any) -> dict[str, Any]:
        headers = {"Natslog-Envelope": "arrow", "Nats-Msg-Id": "17"}
        found: dict[str, Any] = json.loads((await nats.request(name, GOOD, headers=headers, timeout=5)).data)
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
        return [json.loads((await nats.request(name, data, timeout=10)).data) for data in sent]

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
