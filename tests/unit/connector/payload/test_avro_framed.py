"""Avro payloads of several schemas in one stream: resolved as fastavro resolves them, one row at a time."""

from __future__ import annotations

import copy
import datetime
import io
import json
import pickle
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.payloads import Payloads
from natslog.errors import ConfigError, InvalidRequest
from pyspark_natslog.payload.avro_framed import FramedAvroDecoder
from pyspark_natslog.payload.avro_registry import RegistryUnavailable, SchemaRegistry, _avro_text
from pyspark_natslog.payload.avro_resolution import Resolution
from pyspark_natslog.payload.avro_rows import MAGIC
from pyspark_natslog.payload.avro_schema import fingerprint, parse_avro
from pyspark_natslog.payload.schema_text import parse_payload_schema

READER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "price", "type": ["null", "double"], "default": None},
        {"name": "currency", "type": "string", "default": "EUR"},
        {"name": "customer", "aliases": ["user"], "type": ["null", "string"], "default": None},
        {
            "name": "place",
            "type": ["null", {"type": "record", "name": "Place", "fields": [
                {"name": "lat", "type": "double"},
                {"name": "lon", "type": "double", "default": 7.5},
            ]}],
            "default": None,
        },
        {"name": "tags", "type": {"type": "array", "items": "string"}, "default": ["none"]},
        {"name": "counts", "type": {"type": "map", "values": "long"}, "default": {"a": 1}},
        {"name": "paid", "type": {"type": "int", "logicalType": "date"}, "default": 3},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}, "default": 1500},
        {"name": "total", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
         "default": "\u0001\u0000"},
        {"name": "flag", "type": "boolean", "default": True},
    ],
}  # fmt: skip


LOGICAL_DEFAULTS = {
    "paid": datetime.date(1970, 1, 4),
    "at": datetime.datetime(1970, 1, 1, 0, 0, 1, 500_000, datetime.UTC),
    "total": Decimal("2.56"),
}
"""fastavro returns these defaults as they stand in the schema."""


def record(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": "Order", "fields": list(fields)}


OLD = record({"name": "id", "type": "int"}, {"name": "user", "type": "string"})
MIDDLE = record(
    {"name": "extra", "type": {"type": "array", "items": "int"}},
    {"name": "price", "type": "float"},
    {"name": "id", "type": "long"},
    {"name": "place", "type": {"type": "record", "name": "Place", "fields": [{"name": "lat", "type": "float"}]}},
    {"name": "tags", "type": {"type": "array", "items": "string"}},
    {"name": "counts", "type": {"type": "map", "values": "int"}},
)
VALUES = {
    7: (OLD, st.fixed_dictionaries({"id": st.integers(-(2**31), 2**31 - 1), "user": st.text(max_size=5)})),
    8: (
        MIDDLE,
        st.fixed_dictionaries(
            {
                "extra": st.lists(st.integers(-5, 5), max_size=3),
                "price": st.floats(width=32, allow_nan=False),
                "id": st.integers(-(2**63), 2**63 - 1),
                "place": st.fixed_dictionaries({"lat": st.floats(width=32, allow_nan=False)}),
                "tags": st.lists(st.text(max_size=4), max_size=3),
                "counts": st.dictionaries(st.text(max_size=3), st.integers(-9, 9), max_size=3),
            }
        ),
    ),
}


def encode(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(copy.deepcopy(schema)), value)
    return out.getvalue()


def as_read(writer: Any, datum: bytes, reader: Any = READER) -> dict[str, Any]:
    parsed = [fastavro.parse_schema(copy.deepcopy(one)) for one in (writer, reader)]
    found = fastavro.schemaless_reader(io.BytesIO(datum), *parsed)
    assert isinstance(found, dict)
    return found | (LOGICAL_DEFAULTS if reader is READER and found["paid"] == 3 else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schemas")
    for number, (schema, _) in VALUES.items():
        (folder / f"{number}.avsc").write_text(json.dumps(schema))
    (folder / "9.avsc").write_text(json.dumps(record({"name": "id", "type": "string"})))
    (folder / "10.avsc").write_text("no schema")
    (folder / "other.avsc").write_text(json.dumps(record({"name": "id", "type": "int"})))
    return folder


def decoder_of(folder: Path, columns: list[str] | None = None) -> FramedAvroDecoder:
    schema = pickle.loads(pickle.dumps(parse_payload_schema(json.dumps(READER))))
    return FramedAvroDecoder(schema, columns or schema.columns.names, SchemaRegistry(str(folder)))


def decoded(decoder: FramedAvroDecoder, payloads: list[bytes]) -> tuple[list[dict[str, Any]], list[str | None]]:
    found = decoder.decode(Payloads.of(pa.array(payloads, pa.binary())))
    for array in found.arrays.values():
        array.validate(full=True)
    lists = {name: array.to_pylist() for name, array in found.arrays.items()}
    rows = [{name: lists[name][row] for name in lists} for row in range(len(payloads))]
    return rows, [found.reason(row) if found.malformed[row] else None for row in range(len(payloads))]


def by_id(number: int, datum: bytes) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + datum


def single(schema: Any, datum: bytes) -> bytes:
    return MAGIC + fingerprint(json.dumps(schema)).to_bytes(8, "little") + datum


data = st.lists(
    st.sampled_from(sorted(VALUES)).flatmap(
        lambda number: st.tuples(st.just(number), st.booleans(), VALUES[number][1])
    ),
    max_size=12,
)


@settings(deadline=None)
@given(data)
def test_equal_to_fastavro_a_row(folder: Path, data: list[tuple[int, bool, dict[str, Any]]]) -> None:
    payloads, expected = [], []
    for number, is_single, value in data:
        schema = VALUES[number][0]
        datum = encode(schema, value)
        payloads.append(single(schema, datum) if is_single else by_id(number, datum))
        expected.append(as_read(schema, datum))
    rows, problems = decoded(decoder_of(folder), payloads)
    assert problems == [None] * len(payloads)
    for row in rows:
        row["counts"] = dict(row["counts"])
    assert rows == expected


def test_plain_payloads_are_of_the_readers_schema_and_all_defaults_are_filled_in(folder: Path) -> None:
    datum = encode(OLD, {"id": 1, "user": "u"})
    whole = as_read(OLD, datum)
    rows, problems = decoded(
        decoder_of(folder), [encode(READER, whole), by_id(7, datum), single(READER, encode(READER, whole))]
    )
    assert problems == [None] * 3
    assert rows[0] == rows[1] == rows[2]
    assert (rows[1]["currency"], rows[1]["total"], rows[1]["place"]) == ("EUR", Decimal("2.56"), None)
    assert (str(rows[1]["paid"]), rows[1]["at"].timestamp()) == ("1970-01-04", 1.5)


def test_only_what_is_wanted_is_resolved(folder: Path) -> None:
    rows, _ = decoded(decoder_of(folder, ["flag"]), [by_id(7, encode(OLD, {"id": 1, "user": "u"}))])
    assert rows == [{"flag": True}]


def test_what_cannot_be_read_is_malformed_and_leaves_its_neighbours_alone(folder: Path) -> None:
    good = by_id(7, encode(OLD, {"id": 1, "user": "u"}))
    bad = [
        by_id(9, b"\x02a"),
        by_id(10, b""),
        by_id(99, b"\x02"),
        MAGIC + b"12345678\x02",
        by_id(7, b"\x02"),
        b"\0\0",
        b"",
    ]
    rows, problems = decoded(decoder_of(folder), [good, *(one for payload in bad for one in (payload, good))])
    assert problems[0::2] == [None] * (len(bad) + 1)
    assert [row["id"] for row in rows[0::2]] == [1] * (len(bad) + 1)
    assert all(value is None for row in rows[1::2] for value in row.values())
    expected = [
        "it was written with another schema: id was written as string, and payloadSchema has long",
        "10.avsc is no Avro schema",
        f"schema id 99 is not known to {folder}",
        "fingerprint 3837363534333231 is not known to",
        "it ends within customer",
        "the header (00 and a schema id of 4 bytes) is cut short",
        "it ends within",
    ]
    for problem, words in zip(problems[1::2], expected, strict=True):
        assert problem is not None
        assert words.replace("customer", "user") in problem


def test_body_that_begins_like_a_header_is_read_where_confluents_header_is_before_it(
    folder: Path, tmp_path: Path
) -> None:
    schema = record({"name": "id", "type": "long"}, {"name": "user", "type": {"type": "fixed", "name": "F", "size": 9}})
    (tmp_path / "1.avsc").write_text(json.dumps(schema))
    reader = parse_payload_schema(json.dumps(record({"name": "id", "type": "long"})))
    datum = encode(schema, {"id": -98, "user": b"123456789"})
    assert datum.startswith(MAGIC)
    decoder = FramedAvroDecoder(reader, ["id"], SchemaRegistry(str(tmp_path)))
    assert decoded(decoder, [by_id(1, datum)]) == ([{"id": -98}], [None])


@settings(deadline=None)
@given(st.lists(st.binary(max_size=30) | st.builds(by_id, st.integers(7, 12), st.binary(max_size=20)), max_size=8))
def test_any_bytes(folder: Path, payloads: list[bytes]) -> None:
    rows, _ = decoded(decoder_of(folder), payloads)
    assert len(rows) == len(payloads)


@pytest.mark.parametrize(
    ("writer", "reader", "problem"),
    [
        ("int", "long", None),
        ("int", "float", None),
        ("long", "double", None),
        ("float", "double", None),
        ("string", "bytes", None),
        ("bytes", "string", None),
        (["null", "int"], "long", None),
        (["int", "long"], "double", None),
        ("double", "float", "f was written as double, and payloadSchema has float"),
        ("long", "int", "f was written as long, and payloadSchema has int"),
        ({"type": "int", "logicalType": "date"}, "long", r"f was written as int \(date\), and payloadSchema has long"),
        ({"type": "array", "items": "long"}, {"type": "array", "items": "int"}, "f.element was written as long"),
        ({"type": "map", "values": "string"}, {"type": "map", "values": "int"}, "f.value was written as string"),
    ],
)
def test_which_types_can_be_read_as_which(writer: Any, reader: Any, problem: str | None) -> None:
    schemas = [parse_avro(json.dumps(record({"name": "f", "type": kind}))) for kind in (writer, reader)]
    if problem is None:
        Resolution(*schemas, ("f",))
    else:
        with pytest.raises(InvalidRequest, match=problem):
            Resolution(*schemas, ("f",))


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ("int", "x"),
        ("long", None),
        ("string", 5),
        ({"type": "array", "items": "int"}, 5),
        ({"type": "map", "values": "int"}, []),
        ({"type": "record", "name": "N", "fields": [{"name": "a", "type": "int", "default": "x"}]}, {}),
        ({"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 0}, "\uffff"),
        ("int", "12"),
        ("int", 1.9),
        ("int", True),
        (["null", "int"], "junk"),
        ({"type": "enum", "name": "N", "symbols": ["A"]}, "B"),
        ({"type": "fixed", "name": "N", "size": 2}, "abc"),
        ({"type": "record", "name": "N", "fields": [{"name": "x", "type": "bytes"}]}, {}),
    ],
)
def test_default_of_another_type_is_an_error_of_the_schema(kind: Any, default: Any) -> None:
    own = {"name": "id", "type": "int"}
    writer = parse_avro(json.dumps(record(own)))
    reader = parse_avro(json.dumps(record(own, {"name": "f", "type": kind, "default": default})))
    with pytest.raises(InvalidRequest, match="f: the default in payloadSchema is not of the field's type"):
        Resolution(writer, reader, ("f",))


DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}


@pytest.mark.parametrize(
    ("kind", "default", "value"),
    [
        (["null", "string"], "x", "x"),
        (["null", "int", "string"], "x", {"member0": None, "member1": "x"}),
        (["int", "string"], 5, {"member0": 5, "member1": None}),
        (["int", "null"], None, None),
        (["int", "long"], 5, 5),
        (
            DECIMAL,
            bytes.fromhex("0b13ce813456789abcdef1234567").decode("latin-1"),
            Decimal("2246757508385514920146751929234.95"),
        ),
        (DECIMAL, "\xff", Decimal("-0.01")),
    ],
)
def test_defaults_of_unions_and_of_many_digits(kind: Any, default: Any, value: Any) -> None:
    own = {"name": "id", "type": "int"}
    writer = parse_avro(json.dumps(record(own)))
    reader = parse_avro(json.dumps(record(own, {"name": "f", "type": kind, "default": default})))
    assert Resolution(writer, reader, ("f",)).resolved({}, 1)["f"].to_pylist() == [value]


def test_symbols_that_the_reader_does_not_have(tmp_path: Path) -> None:
    def schema(**more: Any) -> dict[str, Any]:
        return record({"name": "f", "type": {"type": "enum", "name": "E"} | more})

    writer = schema(symbols=["X", "Y", "Z"])
    (tmp_path / "1.avsc").write_text(json.dumps(writer))
    payloads = [by_id(1, encode(writer, {"f": word})) for word in "XZ"]
    for default, expected in (({"default": "X"}, "X"), ({}, "Z")):
        reader = parse_payload_schema(json.dumps(schema(symbols=["X", "Y"], **default)))
        decoder = FramedAvroDecoder(reader, ["f"], SchemaRegistry(str(tmp_path)))
        assert decoded(decoder, payloads)[0] == [{"f": "X"}, {"f": expected}]


def test_schema_that_grows_at_each_use_is_refused() -> None:
    def nested(depth: int) -> Any:
        inner = nested(depth - 1) if depth else "int"
        again = f"A{depth - 1}" if depth else "int"
        return record({"name": "a", "type": inner}, {"name": "b", "type": again}) | {"name": f"A{depth}"}

    assert parse_avro(json.dumps(nested(8))).kind == "record"
    with pytest.raises(InvalidRequest, match="more than 10000 parts"):
        parse_avro(json.dumps(nested(40)))


def test_numbers_of_a_union_have_no_logical_type() -> None:
    """As in Spark; before, one branch was in other units than the other."""
    found = parse_avro(
        json.dumps(record({"name": "f", "type": ["int", {"type": "long", "logicalType": "timestamp-millis"}]}))
    )
    assert [child.factor for child in found.children[0].children] == [1, 1]


class Scripted(BaseHTTPRequestHandler):
    """A server that answers with what the test has set."""

    status, body, asked = 200, b"{}", 0
    connections: ClassVar[set[Any]] = set()
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        type(self).asked += 1
        self.connections.add(self.client_address)
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def scripted() -> Iterator[tuple[type[Scripted], SchemaRegistry]]:
    handler = type("Handler", (Scripted,), {"connections": set(), "asked": 0})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield handler, SchemaRegistry(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_only_a_registry_states_that_a_schema_is_unknown(scripted: tuple[type[Scripted], SchemaRegistry]) -> None:
    handler, registry = scripted
    handler.status, handler.body = 404, b'{"error_code":40403,"message":"Schema not found"}'
    assert registry.by_id(1) is None
    handler.body = b"<html>no such page</html>"
    with pytest.raises(RegistryUnavailable, match="it answered HTTP 404: check that the URL"):
        registry.by_id(2)
    with pytest.raises(RegistryUnavailable, match="it answered HTTP 404: check that the URL"):
        registry.answers()
    handler.status, handler.body = 422, b'{"error_code":42201}'
    assert registry.by_id(3) is None
    before = handler.asked
    assert registry.by_id(2**31) is None, "no registry has such an id"
    assert handler.asked == before


def test_unreadable_schemas_are_asked_for_once_over_one_connection(
    scripted: tuple[type[Scripted], SchemaRegistry],
) -> None:
    handler, registry = scripted
    handler.body = json.dumps({"schema": "{}", "schemaType": "JSON"}).encode()
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="is JSON, not AVRO"):
            registry.by_id(1)
    assert handler.asked == 1
    handler.body = json.dumps({"schema": " \n" + json.dumps(record({"name": "f", "type": "int"}))}).encode()
    for number in range(2, 20):
        found = registry.by_id(number)
        assert found is not None
        assert found.columns.names == ["f"]
    assert len(handler.connections) == 1


@pytest.mark.parametrize("text", ["/etc/hostname", "id INT", "schema.avsc", ""])
def test_registry_names_no_file_of_this_machine(text: str) -> None:
    with pytest.raises(InvalidRequest, match="schema 7 of the schema registry is not JSON"):
        _avro_text({"schema": text}, "schema 7")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    writer = record({"name": "f", "type": "bytes"})
    (tmp_path / "1.avsc").write_text(json.dumps(writer))
    reader = parse_payload_schema(json.dumps(record({"name": "f", "type": "string"})))
    decoder = FramedAvroDecoder(reader, ["f"], SchemaRegistry(str(tmp_path)))
    payloads = [by_id(1, encode(writer, {"f": value})) for value in (b"ok", b"\xff")]
    assert decoded(decoder, payloads)[0] == [{"f": "ok"}, {"f": "�"}]


@pytest.mark.parametrize(
    ("place", "words"),
    [("/nowhere", "is not a folder"), ("ftp://x", "must be an http"), ("http://a:b@x", "without user and password")],
)
def test_wrong_places(place: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SchemaRegistry(place).check()


def test_wrong_files_of_a_registry(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file /nope/ca.pem"):
        SchemaRegistry("http://x", ca_file="/nope/ca.pem").check()
    (tmp_path / "auth").write_text("tök€n")
    with pytest.raises(ConfigError, match="not ASCII"):
        SchemaRegistry("http://x", auth_file=str(tmp_path / "auth")).check()
