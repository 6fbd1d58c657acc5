"""The parts of the page of a stream: browsing, payloads, publishing, replicas and files, settings."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import nats
import pyarrow as pa
import pytest
from playwright.sync_api import expect

from tests.cluster_harness import Cluster
from tests.console.conftest import Tab, from_the_first, publish
from tests.harness import with_nats

AVRO = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": ["null", "string"]},
        {"name": "lines", "type": {"type": "array", "items": {"type": "map", "values": "double"}}},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {"name": "next", "type": ["null", "shop.Order"]},
    ],
}


@pytest.fixture
def orders(cluster: Cluster) -> Iterator[str]:
    client = cluster.client()
    client.create_stream("parts", "parts.>", replicas=3)
    yield "parts"
    client.delete_stream("parts")


def avro(value: Any) -> bytes:
    import fastavro

    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(dict(AVRO)), value)
    return out.getvalue()


def opened(tab: Tab, place: str) -> None:
    tab.open(place)
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("parts")
    expect(tab.page.get_by_text("Loading…")).to_have_count(0)


@pytest.mark.long
def test_messages_are_shown_from_a_time_and_as_they_come(tab: Tab, cluster: Cluster, orders: str) -> None:
    publish(cluster, "parts.a", [b"early %d" % at for at in range(5)])
    found = cluster.client().search_page(orders, start=3, limit=1)
    opened(tab, "streams/parts")
    tab.page.get_by_label("From offset or time").fill(found.messages[0].timestamp)
    tab.page.get_by_role("button", name="Show", exact=True).click()
    expect(tab.page.locator(".message").last).to_contain_text("early 4")
    tab.page.get_by_label("From offset or time").fill("yesterday")
    tab.page.get_by_role("button", name="Show", exact=True).click()
    expect(tab.page.get_by_role("alert")).to_contain_text("yesterday")
    tab.problems.clear()  # the refused request
    live = tab.page.get_by_role("button", name="Live")
    live.click()
    expect(tab.page.get_by_text("Waiting for new messages…")).to_be_visible()
    tab.page.wait_for_timeout(300)
    publish(cluster, "parts.b", [b"new 1"])
    expect(tab.page.locator(".message")).to_have_count(1)
    publish(cluster, "parts.b", [b"new 2"])
    expect(tab.page.locator(".message").first).to_contain_text("new 2")
    publish(cluster, "parts.b", [b"many %d" % at for at in range(1000)])
    expect(tab.page.locator(".message").first).to_contain_text("many", timeout=20_000)
    assert tab.page.locator(".message").count() <= 200
    live.click()
    expect(tab.page.locator(".message").first).not_to_contain_text("many 999")


@pytest.mark.long
def test_newest_messages_as_a_table(tab: Tab, cluster: Cluster, orders: str) -> None:
    for subject, values in {"parts.a": [b"a1", b"a2"], "parts.b": [b"b1"], "parts.c": [b"\xff"]}.items():
        publish(cluster, subject, values)
    opened(tab, "streams/parts")
    tab.page.get_by_role("button", name="Latest of each key").click()
    expect(tab.page.locator("tbody tr")).to_have_count(3)
    expect(tab.page.get_by_role("row", name="parts.a")).to_contain_text("a2")
    expect(tab.page.get_by_role("row", name="parts.c")).to_contain_text("base64 /w==")


@pytest.mark.long
def test_arrow_and_avro_payloads(tab: Tab, cluster: Cluster, orders: str) -> None:
    order = {"id": 2**60 + 1, "note": "grün", "lines": [{"x": 1.5}], "state": "PAID", "next": None}
    sink = pa.BufferOutputStream()
    table = pa.table({"id": pa.array([1, 2**60 + 1]), "name": ["a", "b"]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    whole = avro(order)
    publish(cluster, "parts.a", [sink.getvalue().to_pybytes(), whole, b"\x00\x00\x00\x00\x07" + whole, whole[:4]])
    publish(cluster, "parts.a", [b"\xff\xff\xff\xff" + b"\x10\x00\x00\x00" * 40, b"\x0e"])
    opened(tab, "streams/parts")
    messages = from_the_first(tab)
    messages.nth(0).locator("summary").click()
    messages.nth(0).get_by_role("button", name="Arrow").click()
    expect(messages.nth(0).locator("pre")).to_contain_text("2 rows: id, name")
    expect(messages.nth(0).locator("pre")).to_contain_text('"id": 1152921504606846977')
    for at in (1, 2):
        messages.nth(at).locator("summary").click()
        messages.nth(at).get_by_role("button", name="Avro").click()
        messages.nth(at).get_by_label("Avro schema").fill(json.dumps(AVRO))
        expect(messages.nth(at).locator("pre")).to_contain_text("grün")
        shown = messages.nth(at).locator("pre").inner_text()
        assert "1152921504606846977" in shown, "no digit is lost"
        assert json.loads(shown)["state"] == "PAID"
    messages.nth(3).locator("summary").click()
    messages.nth(3).get_by_role("button", name="Avro").click()
    expect(messages.nth(3).get_by_role("alert")).to_contain_text("does not fit this schema")
    messages.nth(3).get_by_label("Avro schema").fill("{")
    expect(messages.nth(3).get_by_role("alert")).to_be_visible()
    messages.nth(4).locator("summary").click()
    messages.nth(4).get_by_role("button", name="Arrow").click()
    expect(messages.nth(4).locator("pre")).not_to_contain_text("Loading…")
    messages.nth(5).locator("summary").click()
    messages.nth(5).get_by_role("button", name="Avro").click()
    messages.nth(5).get_by_label("Avro schema").fill(json.dumps(STATE))
    expect(messages.nth(5).get_by_role("alert")).to_contain_text("the enum State has no number 7")


STATE = {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}
LONGS = {"type": "array", "items": "long"}


def nested(depth: int) -> Any:
    """Lists in lists, the innermost of nulls: 150,000 of them need no bytes, and megabytes of spaces if indented."""
    schema: Any = {"type": "array", "items": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


DAMAGED = [
    (STATE, b"\x04", "the enum State has no number 2: its last one is 1"),
    (STATE, b"\x01", "the enum State has no number -1"),
    (STATE, b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", "an int has more than 32 bits"),
    (["null", "long"], b"\x04", "a union has no number 2: its last one is 1"),
    (["null", "long"], b"\x01", "a union has no number -1"),
    ("boolean", b"\x02", "a boolean has the byte 2"),
    ("int", b"\x80\x80\x80\x80\x10", "an int has more than 32 bits"),
    ("long", b"\xff" * 9 + b"\x02", "a number has more than 64 bits"),
    ("long", b"\x80" * 11, "a number has more than 64 bits"),
    ("bytes", b"\x01", "a length is negative"),
    ("string", b"\x03ab", "a length is negative"),
    ("string", b"\x04\xc3\x28", "a string is not UTF-8"),
    ({"type": "map", "values": "long"}, b"\x02\x02\xff\x02\x00", "a string is not UTF-8"),
    (LONGS, b"\x01\x04\x02\x00", "a block does not have the size that it states"),
    (LONGS, b"\x01\x01\x02\x00", "a block does not have the size that it states"),
    ({"type": "fixed", "name": "F", "size": 4}, b"abc", "the value ends too early"),
    ("double", b"\x00" * 7, "the value ends too early"),
    ("null", b"\x00", "1 bytes are left over"),
    ({"type": "fixed", "name": "F", "size": -1}, b"", "The schema is incomplete: see its fixed F."),
    ({"type": "enum", "name": "E"}, b"", "The schema is incomplete: see its enum E."),
    ({"type": "record", "fields": []}, b"", "The schema has the type record without a name."),
    ("enum", b"\x00", "the schema does not define the type enum"),
    ({"type": "array"}, b"\x02\x00", "the schema lacks a type"),
    (nested(60), b"\x02" * 60 + b"\xe0\xa7\x12" + b"\0" * 61, "its text is too long to be shown"),
]
WHOLE = [
    (STATE, b"\x02", '"PAID"'),
    (["null", "long"], b"\x02\x53", "-42"),
    ("boolean", b"\x01", "true"),
    ("boolean", b"\x00", "false"),
    ("int", b"\xff\xff\xff\xff\x0f", "-2147483648"),
    ("long", b"\xff" * 9 + b"\x01", "-9223372036854775808"),
    ("long", b"\xfe" + b"\xff" * 8 + b"\x01", "9223372036854775807"),
    ("string", b"\x0a\xef\xbb\xbfab", '"\ufeffab"'),
    ("string", b"\x0a\x001\x00x\x00", '"\\u00001\\u0000x\\u0000"'),
    ("string", b"\x06\x007\x00", '"\\u00007\\u0000"'),
    ("double", struct.pack("<d", math.nan), "NaN"),
    ("double", struct.pack("<d", -math.inf), "-Infinity"),
    ("float", struct.pack("<f", -0.0), "-0"),
    ({"type": "fixed", "name": "F", "size": 0}, b"", '""'),
    (LONGS, b"\x01\x02\x02\x02\x04\x00", "[\n  1,\n  2\n]"),
    ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}, b"\x04\x04\xd2", '"04d2"'),
    ({"type": "int", "logicalType": "date"}, b"\x02", "1"),
]
DECODE = """async (cases) => {
  const { avroAsJson } = await import("/console/avro.js");
  return cases.map(([schema, bytes]) => {
    try {
      return avroAsJson(new Uint8Array(bytes), schema);
    } catch (error) {
      return error.constructor.name + ": " + error.message;
    }
  });
}"""


def decoded(tab: Tab, cases: Sequence[tuple[Any, bytes, str]]) -> list[str]:
    """By the module that the page uses: JSON, or an error."""
    return list(tab.page.evaluate(DECODE, [[json.dumps(schema), list(data)] for schema, data, _ in cases]))


@pytest.mark.long
def test_damaged_avro_is_an_error_that_states_what_is_wrong(tab: Tab, orders: str) -> None:
    opened(tab, "streams/parts")
    for (schema, data, message), found in zip(DAMAGED, decoded(tab, DAMAGED), strict=True):
        assert found.startswith("Error: "), (schema, data, found)
        assert message in found, (schema, data, found)
    assert decoded(tab, WHOLE) == [text for _, _, text in WHOLE]


@pytest.mark.long
def test_hostile_avro_does_not_hang(tab: Tab, cluster: Cluster, orders: str) -> None:
    """Billions of items without a byte, and a list that is nested by each byte."""
    publish(cluster, "parts.a", [b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f\x00", b"\x02" * 50_000])
    opened(tab, "streams/parts")
    messages = from_the_first(tab)
    schemas = [
        {"type": "array", "items": "null"},
        {"type": "record", "name": "L", "fields": [{"name": "next", "type": ["null", "L"]}]},
    ]
    for at, schema in enumerate(schemas):
        messages.nth(at).locator("summary").click()
        messages.nth(at).get_by_role("button", name="Avro").click()
        messages.nth(at).get_by_label("Avro schema").fill(json.dumps(schema))
        expect(messages.nth(at).get_by_role("alert")).to_contain_text("more than")


@pytest.mark.long
def test_hostile_arrow_and_deep_json_do_not_hang(tab: Tab, cluster: Cluster, orders: str) -> None:
    """Billions of values in 300 bytes, and JSON that becomes megabytes if it is indented."""
    large = pa.schema([("a", pa.list_(pa.null(), 2**31 - 2))])
    many = pa.schema([("a", pa.list_(pa.null()))])
    sink = pa.BufferOutputStream()
    lists = pa.ListArray.from_arrays(pa.array([0, 30_000_000], pa.int32()), pa.nulls(30_000_000))
    with pa.ipc.new_stream(sink, many) as writer:
        writer.write_batch(pa.record_batch([lists], schema=many))
    fixed = pa.BufferOutputStream()
    with pa.ipc.new_stream(fixed, large) as writer:
        writer.write_batch(pa.record_batch([pa.array([None], large.field(0).type)], schema=large))
    publish(
        cluster, "parts.a", [sink.getvalue().to_pybytes(), fixed.getvalue().to_pybytes(), b"[" * 2048 + b"]" * 2048]
    )
    opened(tab, "streams/parts")
    messages = from_the_first(tab)
    for at in (0, 1):
        messages.nth(at).locator("summary").click()
        messages.nth(at).get_by_role("button", name="Arrow").click()
        expect(messages.nth(at).locator("pre")).to_contain_text("Arrow IPC")
        expect(messages.nth(at).locator("pre")).not_to_contain_text("rows:")
    messages.nth(2).locator("summary").click()
    expect(messages.nth(2).locator("pre")).to_contain_text("[[[[")
    assert len(messages.nth(2).locator("pre").inner_text()) < 5000


@pytest.mark.long
def test_the_rest_of_a_long_value_is_loaded(tab: Tab, cluster: Cluster, orders: str) -> None:
    publish(cluster, "parts.a", [json.dumps({"long": "x" * 20_000, "end": "here"}).encode()])
    opened(tab, "streams/parts")
    message = tab.page.locator(".message")
    message.locator("summary").click()
    expect(message).to_contain_text("The first bytes of")
    message.get_by_role("button", name="Load up to 1 MiB of the value").click()
    expect(message.locator("pre")).to_contain_text('"end": "here"')


@pytest.mark.long
def test_a_message_is_published(tab: Tab, cluster: Cluster, orders: str) -> None:
    received: list[bytes] = []

    async def listening(connection: nats.NATS) -> None:
        received.append((await (await connection.subscribe("parts.>")).next_msg(20)).data)

    with ThreadPoolExecutor(1) as threads:
        listener = threads.submit(with_nats, cluster.nats_url, listening)
        opened(tab, "streams/parts?part=publish")
        tab.page.get_by_label("Subject").fill("parts.test")
        tab.page.get_by_label("Key").fill("k1")
        tab.page.get_by_label("Headers").fill("a: b\nno header")
        tab.page.get_by_label("Value").fill("it's a test")
        expect(tab.page.locator("main code")).to_have_text("natslog pub parts.test 'it'\\''s a test' --ack")
        button = tab.page.get_by_role("button", name="Publish", exact=True)
        button.click()
        expect(tab.page.get_by_role("alert")).to_contain_text('"no header" has no name')
        tab.page.get_by_label("Headers").fill("a: b")
        button.click()
        expect(tab.page.get_by_role("status")).to_contain_text("Stored at offset 0")
        listener.result()
    assert received == [b"it's a test"]
    tab.page.get_by_label("Subject").fill("elsewhere")
    button.click()
    expect(tab.page.get_by_role("alert")).to_contain_text("not the subject")
    tab.problems.clear()  # the refused request


@pytest.mark.long
def test_replicas_and_files(tab: Tab, cluster: Cluster, orders: str) -> None:
    publish(cluster, "parts.a", [b"x" * 1000] * 100)
    cluster.client().roll(orders)
    publish(cluster, "parts.a", [b"y"])
    opened(tab, "streams/parts?part=files")
    replicas, files = (tab.page.get_by_role("region", name=name) for name in ("Replicas", "Files"))
    expect(replicas.locator("tbody tr")).to_have_count(3)
    expect(replicas.get_by_role("row", name="(leader)")).to_contain_text("101")
    expect(files.locator("tbody tr")).to_have_count(2)
    expect(files.locator("tbody tr").last).to_contain_text("sealed")
    expect(tab.page.get_by_role("region", name="Scrubbing")).to_contain_text("Broker 1")


@pytest.mark.long
def test_settings_are_changed_and_nothing_is_overwritten(tab: Tab, cluster: Cluster, orders: str) -> None:
    client = cluster.client()
    opened(tab, "streams/parts?part=settings")
    save = tab.page.get_by_role("button", name="Save")
    expect(save).to_be_disabled()
    tab.page.get_by_label("Max age").fill("7d")
    tab.page.get_by_label("Max bytes").fill("10GiB")
    tab.page.get_by_label("Subjects").fill("parts.> more.parts")
    expect(tab.page.locator("main code").first).to_have_text(
        "natslog stream edit parts --subject 'parts.>' --subject more.parts --max-age 7d --max-bytes 10GiB"
    )
    save.click()
    expect(tab.page.get_by_text("The settings were changed.")).to_be_visible()
    info = client.stream(orders)
    assert (info["max_age"], info["max_bytes"], info["subjects"]) == ("7d", 10 * 2**30, ["parts.>", "more.parts"])
    expect(save).to_be_disabled()
    client.edit_stream(orders, max_messages=5)
    tab.page.get_by_label("Max age").fill("8d")
    save.click()
    expect(tab.page.get_by_role("alert")).to_contain_text("they were edited meanwhile")
    tab.problems.clear()  # the refused request
    assert client.stream(orders)["max_age"] == "7d"
    save.click()
    expect(tab.page.get_by_text("The settings were changed.")).to_be_visible()
    info = client.stream(orders)
    assert (info["max_age"], info["max_messages"]) == ("8d", 5), "the change of the other one stays"
    tab.page.get_by_label("Prevent delete").select_option("yes")
    expect(tab.page.locator("main code").first).to_have_text("natslog stream edit parts --prevent-delete")
    save.click()
    expect(tab.page.get_by_text("The settings were changed.")).to_be_visible()
    assert client.stream(orders)["prevent_delete"] is True
    client.edit_stream(orders, prevent_delete=False)
    tab.page.get_by_role("button", name="Pause").click()
    expect(tab.page.get_by_role("button", name="Resume")).to_be_visible()
    assert client.stream(orders)["paused"] is True


@pytest.mark.long
def test_what_cannot_be_undone_needs_the_name(tab: Tab, cluster: Cluster, orders: str) -> None:
    client = cluster.client()
    publish(cluster, "parts.a", [b"x"] * 10)
    opened(tab, "streams/parts?part=settings")
    purge = tab.page.get_by_role("button", name="Purge")
    expect(purge).to_be_disabled()
    tab.page.get_by_label("Purge: type parts").fill("part")
    expect(purge).to_be_disabled()
    tab.page.get_by_label("Purge: type parts").fill("parts")
    purge.click()
    expect(tab.page.get_by_text("All messages were removed.")).to_be_visible()
    assert client.stream(orders)["messages"] == 0
    client.create_stream("gone", "gone")
    tab.open("streams/gone?part=settings")
    tab.page.get_by_label("Delete: type gone").fill("gone")
    tab.page.get_by_role("button", name="Delete").click()
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("Streams")
    assert "gone" not in [one["name"] for one in client.streams()]
