"""Envelopes that hold one message with its headers, from publishers that cannot send headers."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from natslog.client import NatslogClient
from natslog.wire.envelope import COOKIE, MESSAGE_OPENING, enveloped
from natslog.wire.row_hashes import as_ids
from tests.harness import BrokerProcess, all_values, publish_acked, with_nats
from tests.pages import runs
from tests.readme import Block

KEY, ID, ACK_TO, CORRELATION = "Natslog-Key", "Nats-Msg-Id", "Natslog-Ack-To", "Natslog-Correlation-Id"


def block_of(headers: dict[str, str]) -> bytes:
    return b"NATS/1.0\r\n" + b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items()) + b"\r\n"


def envelope(value: bytes, headers: dict[str, str], block: bytes | None = None) -> bytes:
    block = block_of(headers) if block is None else block
    return MESSAGE_OPENING + len(block).to_bytes(4, "little") + block + value


def stored(client: NatslogClient, name: str) -> list[tuple[Any, ...]]:
    columns = ("subject", "key", "headers", "value")
    return [tuple(row[column] for column in columns) for batch in client.read(name) for row in batch.to_pylist()]


def answers(nats_url: str, subject: str, payloads: list[bytes], **options: Any) -> list[dict[str, Any]]:
    async def ask(nats: Any) -> list[dict[str, Any]]:
        return [json.loads((await nats.request(subject, payload, timeout=30, **options)).data) for payload in payloads]

    return with_nats(nats_url, ask)


def test_stored_as_the_same_message_with_headers(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    headers = {KEY: "k", "Ort": "Köln", "Empty": ""}
    publish_acked(nats_url, name, [b"value", b""], headers)
    publish_acked(nats_url, name, [envelope(b"value", headers), envelope(b"", headers), envelope(b"x", {})])
    rows = stored(client, name)
    assert rows[:2] == rows[2:4]
    pairs = [{"key": key, "value": value} for key, value in headers.items()]
    assert rows[2] == (name, b"k", pairs, b"value")
    assert rows[4] == (name, None, [], b"x")


def test_message_ids_count(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    own = as_ids(np.array([[5, 6]], np.uint64))[0].as_py()
    for message_id in ("17", own):
        first, again = answers(nats_url, name, [envelope(value, {ID: message_id}) for value in (b"a", b"b")])
        assert (first["seq"], "duplicate" in first) == (again["seq"], False)
        assert again["duplicate"] is True
    assert all_values(client, name) == [b"a", b"a"]


def test_correlation_id_is_returned_where_json_holds_it_as_it_is(
    client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name)
    given = ["a", "order/17:1#{}", "x" * 256, "x" * 257, 'a"b', "a\\b", "ä", "a b", ""]
    found = answers(nats_url, name, [envelope(b"1", {CORRELATION: text, ID: text[:200]}) for text in given])
    assert [ack.get("correlation_id") for ack in found] == [*given[:3], None, None, None, None, None, None]
    [again] = answers(nats_url, name, [envelope(b"1", {CORRELATION: "second", ID: "a"})])
    assert (again["correlation_id"], again["duplicate"], again["seq"]) == ("second", True, 1)
    [by_header] = answers(nats_url, name, [b"1"], headers={CORRELATION: "third"})
    assert by_header["correlation_id"] == "third"


def test_refusals_return_it_too(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    headers = {CORRELATION: "c1", "Nats-Expected-Last-Sequence": "7"}
    [refused] = answers(nats_url, name, [envelope(b"1", headers)])
    assert (refused["correlation_id"], refused["error"]["code"]) == ("c1", 400)
    assert all_values(client, name) == []


@pytest.mark.parametrize("acks", ["reply", "header", "never"])
@pytest.mark.long
def test_ack_goes_to_the_subject_in_the_envelope(client: NatslogClient, nats_url: str, name: str, acks: str) -> None:
    """As the reply subject of a message would: a stream that never acks does not, and no subject outside inboxes gets
    an ack.
    """
    client.create_stream(name, name, acks=acks)

    async def received(nats: Any) -> list[tuple[str, str]]:
        inbox, found = nats.new_inbox(), []

        async def note(message: Any) -> None:
            found.append((message.subject.removeprefix(inbox), json.loads(message.data).get("correlation_id", "")))

        await nats.subscribe(f"{inbox}.>", cb=note)
        await nats.subscribe(f"{name}-elsewhere", cb=note)
        sent = [
            ({ACK_TO: f"{inbox}.to", CORRELATION: "1"}, ""),
            ({ACK_TO: f"{inbox}.to", CORRELATION: "2"}, f"{inbox}.reply"),
            ({CORRELATION: "3"}, f"{inbox}.reply"),
            ({ACK_TO: f"{name}-elsewhere", CORRELATION: "4"}, ""),
            ({ACK_TO: f"{inbox}.a b", CORRELATION: "5"}, f"{inbox}.reply"),
            ({CORRELATION: "6"}, ""),
        ]
        for headers, reply in sent:
            await nats.publish(name, envelope(b"x", headers), reply)
        await nats.publish(name, b"last", f"{inbox}.last", headers={ACK_TO: f"{inbox}.last"})
        for _ in range(100):
            if acks != "never" and any(subject == ".last" for subject, _ in found):
                break
            await asyncio.sleep(0.02)
        return found

    found = with_nats(nats_url, received)
    expected = {
        "reply": [(".to", "1"), (".to", "2"), (".reply", "3"), (".reply", "5"), (".last", "")],
        "header": [(".to", "1"), (".to", "2"), (".last", "")],
        "never": [],
    }
    assert found == expected[acks]
    assert len(all_values(client, name)) == 7


@pytest.mark.parametrize("acks", ["reply", "header"])
def test_long_subject_for_the_ack_does_not_end_the_connection(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, acks: str
) -> None:
    """The NATS server closes connections on which a line of more than 4 KiB comes."""
    client.create_stream(name, name, acks=acks)
    lost = "natslog_nats_connections_lost_total"
    before = broker.metrics().get(lost, 0)

    async def publish(nats: Any) -> None:
        for size in (1100, 4000, 5000, 60_000):
            await nats.publish(name, envelope(b"x", {ACK_TO: "_INBOX." + "a" * size}))
        to = nats.new_inbox()
        acked = await nats.subscribe(to)
        await nats.publish(name, envelope(b"last", {ACK_TO: to}))
        await acked.next_msg(30)

    with_nats(nats_url, publish)
    assert all_values(client, name) == [b"x"] * 4 + [b"last"]
    assert broker.metrics().get(lost, 0) == before


GOOD = envelope(b"value", {KEY: "k"})
BAD = {
    "only the cookie": COOKIE,
    "only the opening": MESSAGE_OPENING,
    "a size and no block": MESSAGE_OPENING + b"\x0c\0\0\0",
    "a part of a size": MESSAGE_OPENING + b"\x0c\0\0",
    "a block that is cut short": GOOD[:-7],
    "a size beyond the end": GOOD[:12] + b"\xff\xff\xff\xff" + GOOD[16:],
    "a size of nothing": GOOD[:12] + bytes(4) + GOOD[16:],
    "a size that ends in the middle of a line": GOOD[:12] + b"\x10\0\0\0" + GOOD[16:],
    "not zero": GOOD[:9] + b"\1" + GOOD[10:],
    "another version": GOOD.replace(b"NATS/1.0", b"NATS/2.0"),
    "lines without an end": envelope(b"v", {}, b"NATS/1.0\r\nA: b\r\n"),
    "not UTF-8": envelope(b"v", {}, b"NATS/1.0\r\nA: \xff\r\n\r\n"),
}
UNCOUNTED = ("only the cookie", "not zero")


@pytest.mark.parametrize("kind", BAD)
def test_what_only_begins_as_an_envelope_is_a_plain_message(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str, kind: str
) -> None:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [b"before", BAD[kind], GOOD])
    assert all_values(client, name) == [b"before", BAD[kind], b"value"]
    unread = broker.metrics()[f'natslog_unread_envelopes_total{{stream="{name}"}}']
    assert unread == (kind not in UNCOUNTED)


def test_message_that_has_headers_is_stored_as_it_is(client: NatslogClient, nats_url: str, name: str) -> None:
    client.create_stream(name, name)
    publish_acked(nats_url, name, [GOOD], {"A": "b"})
    assert stored(client, name) == [(name, None, [{"key": "A", "value": "b"}], GOOD)]


def test_rows_in_a_message_in_an_envelope(client: NatslogClient, nats_url: str, name: str) -> None:
    """So that a publisher without headers can give an envelope of rows a message id."""
    client.create_stream(name, name)
    rows = enveloped(pa.RecordBatch.from_pydict({"value": pa.array([b"a", b"b"])}))
    headers = {ID: as_ids(np.array([[5, 6]], np.uint64))[0].as_py(), "Natslog-Envelope": "arrow", CORRELATION: "c"}
    first, again = answers(nats_url, name, [envelope(rows, headers)] * 2)
    assert (first["seq"], first["count"], again["duplicate"]) == (2, 2, True)
    assert first["correlation_id"] == "c"
    assert all_values(client, name) == [b"a", b"b"]


@runs("FORMATS.md", block="Envelope")
def test_example_of_the_documentation(client: NatslogClient, nats_url: str, name: str, block: Block) -> None:
    (line,) = block.shell_lines
    command, _, _ = line.partition(" | nats pub")
    payload = subprocess.run(["sh", "-c", command], check=True, capture_output=True, timeout=10).stdout
    client.create_stream(name, name)
    publish_acked(nats_url, name, [payload])
    assert stored(client, name) == [(name, b"k-17", [{"key": KEY, "value": "k-17"}], b'{"a": 1}')]


@pytest.mark.long
def test_damaged_envelopes_are_plain_messages_or_have_their_own_value(
    broker: BrokerProcess, client: NatslogClient, nats_url: str, name: str
) -> None:
    client.create_stream(name, name)
    chance = random.Random(7)
    good = envelope(b"value" * 4, {KEY: "k", CORRELATION: "c", "A": "b"})
    sent: list[bytes] = []
    for _ in range(4000):
        data = bytearray(good)
        for _ in range(chance.choice((1, 1, 3))):
            at = chance.randrange(9, len(data))
            match chance.randrange(3):
                case 0:
                    data[at] = chance.choice((0, 10, 13, 32, 58, 255, chance.randrange(256)))
                case 1:
                    del data[at : at + chance.choice((1, 4))]
                case 2:
                    data[at:at] = chance.choice((b"\r\n", b"\r\n\r\n", b":", chance.randbytes(3)))
        sent.append(bytes(data))
    publish_acked(nats_url, name, sent)
    values = all_values(client, name)
    assert len(values) == len(sent)
    assert all(data.endswith(value) for data, value in zip(sent, values, strict=True))
    assert 0.1 < sum(len(value) < 30 for value in values) / len(sent) < 0.9, "some are read, and some are not"
    assert broker.ready()
