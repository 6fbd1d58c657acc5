"""The Avro kernel against fastavro a row, over random schemas and data; and what is not that schema's."""

from __future__ import annotations

import io
import json
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.payloads import Payloads
from natslog.errors import InvalidRequest
from pyspark_natslog.payload.avro_rows import MAGIC, AvroDecoder
from pyspark_natslog.payload.avro_schema import canonical_form, fingerprint, parse_avro


def record(*fields: tuple[str, Any]) -> dict[str, Any]:
    listed = [{"name": name, "type": kind} for name, kind in fields]
    return {"type": "record", "name": "R", "namespace": "n.s", "fields": listed}


def encode(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def decode(
    schema: Any, payloads: list[bytes], columns: list[str] | None = None
) -> tuple[list[dict[str, Any]], list[str | None]]:
    text = json.dumps(schema)
    parsed = parse_avro(text)
    decoder = AvroDecoder(parsed, fingerprint(text), columns or parsed.names)
    decoded = decoder.decode(Payloads.of(pa.array(payloads, pa.binary())))
    for array in decoded.arrays.values():
        array.validate(full=True)
    lists = {name: array.to_pylist() for name, array in decoded.arrays.items()}
    rows = [{name: lists[name][row] for name in lists} for row in range(len(payloads))]
    return rows, [decoded.reason(row) if decoded.malformed[row] else None for row in range(len(payloads))]


def begins_like_another_header(payload: bytes, schema: Any) -> bool:
    """Whether the first ten bytes are the marker C3 01 and a fingerprint that is not the schema's."""
    own = MAGIC + fingerprint(json.dumps(schema)).to_bytes(8, "little")
    return len(payload) >= len(own) and payload.startswith(MAGIC) and not payload.startswith(own)


# ---- random schemas with values of them ----

INT, LONG = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TIMES = st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1))
SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("int", INT),
    ("long", LONG),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("boolean", st.booleans()),
    ("string", st.text(max_size=12)),
    ("bytes", st.binary(max_size=12)),
    ({"type": "int", "logicalType": "date"}, st.dates()),
    ({"type": "long", "logicalType": "timestamp-micros"}, TIMES.map(lambda at: at.replace(tzinfo=UTC))),
    ({"type": "long", "logicalType": "local-timestamp-micros"}, TIMES),
    (
        {"type": "long", "logicalType": "timestamp-millis"},
        TIMES.map(lambda at: at.replace(tzinfo=UTC, microsecond=at.microsecond // 1000 * 1000)),
    ),
    (
        {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 3},
        st.integers(-(10**30) + 1, 10**30 - 1).map(
            lambda number: Decimal(f"{number}e-3")
        ),  # exact, whatever the context
    ),
]


@st.composite
def typed(draw: st.DrawFn, depth: int = 0) -> tuple[Any, st.SearchStrategy[Any]]:
    """(a type, values of it)."""
    if depth > 2 or (pick := draw(st.integers(0, 8))) < 4:
        return draw(st.sampled_from(SCALARS))
    if pick == 4:
        words = draw(st.lists(st.sampled_from("ABCDEFG"), min_size=1, unique=True))
        name = f"E{draw(st.uuids()).hex}"
        return {"type": "enum", "name": name, "symbols": words}, st.sampled_from(words)
    if pick == 5:
        size = draw(st.integers(1, 20))
        name = f"F{draw(st.uuids()).hex}"
        return {"type": "fixed", "name": name, "size": size}, st.binary(min_size=size, max_size=size)
    inner, values = draw(typed(depth + 1))
    if pick == 6:
        return {"type": "array", "items": inner}, st.lists(values, max_size=4)
    if pick == 7:
        return {"type": "map", "values": inner}, st.dictionaries(st.text(max_size=3), values, max_size=3)
    if draw(st.booleans()):
        name = f"R{draw(st.uuids()).hex}"
        kind = {"type": "record", "name": name, "fields": [{"name": "x", "type": inner}, {"name": "y", "type": "int"}]}
        return kind, st.fixed_dictionaries({"x": values, "y": INT})
    null_first = draw(st.booleans())
    return (["null", inner] if null_first else [inner, "null"]), st.none() | values


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    fields = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        found = draw(typed())
        while isinstance(found[0], list) and isinstance(found[0][-1], list):
            found = draw(typed())
        fields[name] = found
    schema = record(*((name, kind) for name, (kind, _) in fields.items()))
    rows = draw(st.lists(st.fixed_dictionaries({name: values for name, (_, values) in fields.items()}), max_size=5))
    return schema, rows


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, list):  # a map
        return same(list(one.items()), other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _is_nested_union(kind: Any) -> bool:
    if isinstance(kind, list):
        return any(isinstance(branch, list) or _is_nested_union(branch) for branch in kind)
    if isinstance(kind, dict):
        return any(_is_nested_union(inner) for inner in [kind.get("items"), kind.get("values")] if inner) or any(
            _is_nested_union(field["type"]) for field in kind.get("fields", [])
        )
    return False


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_decode_random_data_equals_fastavro(case: Any, data: st.DataObject) -> None:
    schema, rows = case
    if _is_nested_union(schema):
        return
    payloads = [encode(schema, row) for row in rows]
    header = MAGIC + fingerprint(json.dumps(schema)).to_bytes(8, "little")
    wrapped = [header + payload if at % 2 else payload for at, payload in enumerate(payloads)]
    found, reasons = decode(schema, wrapped)
    refused = [begins_like_another_header(payload, schema) for payload in wrapped]
    assert [reason is not None for reason in reasons] == refused
    rows = [dict.fromkeys(row) if is_refused else row for row, is_refused in zip(rows, refused, strict=True)]
    assert same(rows, found), (schema, rows, found)
    kept = data.draw(st.sampled_from(list(parse_avro(json.dumps(schema)).names)))
    assert same([{kept: row[kept]} for row in rows], decode(schema, wrapped, [kept])[0]), "a column alone"


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(cases(), st.data())
def test_cut_or_longer_datum_is_malformed_and_its_neighbours_are_not(case: Any, data: st.DataObject) -> None:
    schema, rows = case
    if not rows or _is_nested_union(schema):
        return
    payloads = [encode(schema, row) for row in rows]
    at = data.draw(st.integers(0, len(rows) - 1))
    cut = data.draw(st.integers(0, max(0, len(payloads[at]) - 1)))
    payloads[at] = payloads[at][:cut] if data.draw(st.booleans()) else payloads[at] + b"\0"
    found, reasons = decode(schema, payloads)
    malformed = [row == at or begins_like_another_header(payload, schema) for row, payload in enumerate(payloads)]
    assert [reason is not None for reason in reasons] == malformed
    expected = [dict.fromkeys(row) if bad else row for row, bad in zip(rows, malformed, strict=True)]
    assert same(expected, found)


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_as_fastavro_does_or_refused(payload: bytes) -> None:
    listed, mapped = {"type": "array", "items": "long"}, {"type": "map", "values": "bytes"}
    schema = record(("i", "int"), ("s", ["null", "string"]), ("a", listed), ("m", mapped))
    found, reasons = decode(schema, [payload])
    if reasons == [None]:
        stream = io.BytesIO(payload)
        assert same(fastavro.schemaless_reader(stream, fastavro.parse_schema(schema)), found[0])
        assert stream.tell() == len(payload)
    else:
        assert found == [dict.fromkeys("isam")]


def test_blocks_with_their_size_are_read() -> None:
    schema = record(("a", {"type": "array", "items": "long"}))
    payload = bytes([3, 4, 2, 4, 2, 6, 0])  # -2 items in 2 bytes: 1, 2; then 1 item: 3
    assert decode(schema, [payload]) == ([{"a": [1, 2, 3]}], [None])


@pytest.mark.parametrize("most", [9223372036854775, -9223372036854775])
def test_milliseconds_that_are_no_microseconds_of_64_bits_are_malformed(most: int) -> None:
    schema = record(("at", {"type": "long", "logicalType": "local-timestamp-millis"}))
    beyond = most + (1 if most > 0 else -1)
    as_long = record(("at", "long"))
    payloads = [encode(as_long, {"at": at}) for at in (most, beyond)]
    decoded = AvroDecoder(parse_avro(json.dumps(schema)), None, ["at"]).decode(Payloads.of(pa.array(payloads)))
    assert decoded.malformed.tolist() == [False, True]
    assert decoded.arrays["at"].cast(pa.int64()).to_pylist() == [1000 * most, None]


def test_unions_of_several_types_become_what_spark_makes_of_them() -> None:
    several = ["int", "null", "string", {"type": "array", "items": "int"}]
    schema = record(("n", ["int", "long"]), ("r", ["null", "float", "double"]), ("u", several))
    assert parse_avro(json.dumps(schema)).type.simpleString() == (
        "struct<n:bigint,r:double,u:struct<member0:int,member1:string,member2:array<int>>>"
    )
    union = [None, 5, "x", [1, 2]]
    payloads = [encode(schema, {"n": 2**40 * at, "r": [None, 0.5][at % 2], "u": union[at]}) for at in range(4)]
    found, reasons = decode(schema, payloads)
    none = {"member0": None, "member1": None, "member2": None}
    assert [row["u"] for row in found] == [
        None,
        none | {"member0": 5},
        none | {"member1": "x"},
        none | {"member2": [1, 2]},
    ]
    assert [(row["n"], row["r"]) for row in found] == [(2**40 * at, [None, 0.5][at % 2]) for at in range(4)]
    assert reasons == [None] * 4


def test_other_headers_are_named() -> None:
    schema = record(("s", "string"), ("d", {"type": "int", "logicalType": "date"}))
    datum = encode(schema, {"s": "hello", "d": date(2024, 1, 1)})
    _, reasons = decode(schema, [MAGIC + b"12345678" + datum, b"\0\0\0\0\x07" + datum, b""])
    assert "the header of another schema: the fingerprint is 3837363534333231, payloadSchema's" in str(reasons[0])
    assert "Confluent header" in str(reasons[1])
    assert reasons[2] == "it ends within s"


def test_other_header_is_malformed_where_it_could_be_read_as_a_datum() -> None:
    """A producer that still writes the first version; a header's first two bytes are the number -98."""
    old = record(("note", "string"))
    header = fingerprint(json.dumps(old)).to_bytes(8, "little")
    payload = MAGIC + header + encode(old, {"note": "hello"})
    new = record(("seq", "long"), ("value", "double"), ("note", "string"))
    found, reasons = decode(new, [payload, encode(new, {"seq": 1, "value": 0.5, "note": "x"})])
    assert "begins with the header of another schema: the fingerprint is" in str(reasons[0])
    assert found == [{"seq": None, "value": None, "note": None}, {"seq": 1, "value": 0.5, "note": "x"}]
    assert reasons[1] is None


_PAIR = {"type": "fixed", "name": "Pair", "size": 2}


@pytest.mark.parametrize(
    ("first", "value"),
    [("long", -98), (_PAIR, MAGIC), ("double", struct.unpack("<d", MAGIC + b"abcdef")[0])],
    ids=["number", "fixed", "double"],
)
def test_plain_datum_that_begins_like_a_header_is_malformed(first: Any, value: Any) -> None:
    """Nothing tells it from a datum of another schema, which would be read as other values than were written."""
    schema = record(("a", first), ("note", "string"))
    plain = encode(schema, {"a": value, "note": "eight or more"})
    assert plain.startswith(MAGIC)
    header = MAGIC + fingerprint(json.dumps(schema)).to_bytes(8, "little")
    found, reasons = decode(schema, [plain, header + plain])
    assert "if its data begin with C3 01" in str(reasons[0])
    assert reasons[1] is None
    assert found == [{"a": None, "note": None}, {"a": value, "note": "eight or more"}]


def test_plain_block_of_98_items_is_malformed_and_a_short_datum_is_not() -> None:
    items = record(("a", {"type": "array", "items": "int"}))
    block = MAGIC + b"\xc4\x01" + b"\x02" * 98 + b"\0"  # -98 items in 98 bytes
    assert fastavro.schemaless_reader(io.BytesIO(block), fastavro.parse_schema(items)) == {"a": [1] * 98}
    found, reasons = decode(items, [block])
    assert (found, "begins with the header of another schema" in str(reasons[0])) == ([{"a": None}], True)
    short = record(("a", "int"), ("note", "string"))
    datum = encode(short, {"a": -98, "note": "sixsix"})
    assert len(datum) == 9, "a header has ten bytes"
    assert decode(short, [datum]) == ([{"a": -98, "note": "sixsix"}], [None])


@settings(max_examples=100, deadline=None)
@given(cases())
def test_fingerprint_equals_fastavros(case: Any) -> None:
    schema = case[0]
    canonical = fastavro.schema.to_parsing_canonical_form(schema)
    assert canonical_form(schema) == canonical
    expected = fastavro.schema.fingerprint(canonical, "CRC-64-AVRO")
    assert fingerprint(json.dumps(schema)).to_bytes(8, "little").hex() == expected


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "items": "int"}, "has the type array; it must be a record"),
        (record(("a", "strin")), "'strin' is not an Avro type; did you mean 'string'"),
        (record(("a", "null")), "is always null"),
        (record(("a", {"type": "array", "items": {"type": "record", "name": "E", "fields": []}})), "take no bytes"),
        (record(("a", ["null", "R"])), "contains itself"),
        (record(("a", {"type": "array"})), "lacks 'items'"),
        (record(("a", {"type": "bytes", "logicalType": "decimal", "precision": 50})), "exceeds Spark's 38 digits"),
        (record(("a", [["int"], "null"])), "none of them may be a union"),
        ({"fields": []}, "is not an Avro type"),
    ],
)
def test_schema_that_spark_has_no_type_for_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_avro(json.dumps(schema))
