"""Option `payloadColumn`: the same values as in top-level columns, as one struct; and what is wrong with a name."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_type

from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.errors import ConfigError, MalformedPayload
from pyspark_natslog.payload.decoding import Shaper
from pyspark_natslog.source.options import SourceOptions
from pyspark_natslog.source.schema import spark_schema

DDL = "id INT, name STRING, tags ARRAY<STRING>, m MAP<STRING, INT>, s STRUCT<x: INT, y: STRUCT<z: DOUBLE>>"
AVRO = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "kind", "type": {"type": "enum", "name": "K", "symbols": ["A", "B"]}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
    ],
}
ARROW = pa.schema([("id", pa.int32()), ("name", pa.string()), ("tags", pa.list_(pa.string()))])
METADATA = "stream STRING, offset INT, timestamp TIMESTAMP, subject STRING, key STRING, headers STRING"


def parse(**options: str) -> SourceOptions:
    return SourceOptions.parse({"stream": "orders", **options})


def stored(payloads: list[bytes]) -> pa.RecordBatch:
    """A batch as brokers keep it."""
    count = len(payloads)
    columns = {
        "offset": pa.array(range(100, 100 + count), pa.int64()),
        "timestamp": pa.array(range(count), pa.timestamp("us", tz="UTC")),
        "subject": pa.array(["orders.new"] * count),
        "key": pa.array([b"k"] * count, pa.binary()),
        "headers": pa.nulls(count, MESSAGE_SCHEMA.field("headers").type),
        "value": pa.array(payloads, pa.binary()),
    }
    return pa.RecordBatch.from_pydict(columns, schema=MESSAGE_SCHEMA)


def read(options: SourceOptions, payloads: list[bytes]) -> list[dict[str, Any]]:
    """The rows that Spark is handed, which have exactly the types that it was told of."""
    columns = options.selected_columns()
    promised = to_arrow_type(spark_schema(columns, options.payload.types), timezone="UTC")
    rows = []
    for batch in Shaper(options.payload, columns).shape(stored(payloads), "orders"):
        batch.validate(full=True)
        assert [batch.schema.field(at) for at in range(batch.num_columns)] == [
            promised.field(at) for at in range(promised.num_fields)
        ]
        rows += batch.to_pylist()
    return rows


def outcome(options: SourceOptions, payloads: list[bytes]) -> tuple[list[dict[str, Any]], str | None]:
    """(rows, what failed the query instead)."""
    try:
        return read(options, payloads), None
    except MalformedPayload as error:
        return [], f"{error.message} {error.facts}"


def avro(value: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(AVRO), value)
    return out.getvalue()


def arrow(values: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, ARROW) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist(values, schema=ARROW))
    return out.getvalue()


IDS, NAMES = st.integers(-(2**31), 2**31 - 1), st.none() | st.text(max_size=8)
TAGS = st.lists(st.text(max_size=5), max_size=3)
NUMBERS = st.none() | st.integers(-9, 9)
STRUCTS = st.none() | st.fixed_dictionaries({"x": NUMBERS, "y": st.none() | st.just({"z": 0.5})})
JSON_VALUES = st.fixed_dictionaries(
    {"id": IDS},
    optional={
        "name": NAMES,
        "tags": st.none() | TAGS,
        "m": st.dictionaries(st.text(max_size=3), NUMBERS),
        "s": STRUCTS,
    },
)
AVRO_VALUES = st.fixed_dictionaries(
    {"id": IDS, "name": NAMES, "tags": TAGS, "kind": st.sampled_from("AB"), "price": st.decimals(-9, 9, places=2)}
)
ARROW_VALUES = st.fixed_dictionaries({"id": st.none() | IDS, "name": NAMES, "tags": st.none() | TAGS})
BAD = st.sampled_from([b"", b" ", b"\xff", b"oops", b'{"id": "x", "name": "kept"}', b"5", b"null", b"[]", b"{}"])
PAYLOADS = {
    "json": (f"{DDL}, bad STRING", JSON_VALUES.map(lambda value: json.dumps(value).encode())),
    "avro": (json.dumps(AVRO), AVRO_VALUES.map(avro)),
    "arrow": ("id INT, name STRING, tags ARRAY<STRING>", st.lists(ARROW_VALUES, max_size=3).map(arrow)),
}


@pytest.mark.long
@pytest.mark.parametrize("format", PAYLOADS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_struct_has_the_values_of_top_level_columns(format: str, data: st.DataObject) -> None:
    schema, good = PAYLOADS[format]
    payloads = data.draw(st.lists(good | BAD, max_size=8))
    mode = data.draw(st.sampled_from(["PERMISSIVE", "DROPMALFORMED", "FAILFAST"]))
    common = {"payloadFormat": format, "payloadSchema": schema, "mode": mode, "columnNameOfCorruptRecord": "bad"}
    top_level, nested = parse(**common), parse(**common, payloadColumn="p")
    (expected, failure), (found, same_failure) = outcome(top_level, payloads), outcome(nested, payloads)
    assert same_failure == failure
    names = top_level.payload.fields.names
    assert [*nested.selected_columns()] == ["stream", "offset", "timestamp", "subject", "key", "p", "bad"]
    blank = {100 + at for at, payload in enumerate(payloads) if not (payload.strip() if format == "json" else payload)}
    for row, wanted in zip(found, expected, strict=True):
        fields = {name: wanted.pop(name) for name in names}
        assert row.pop("p") == (None if row["offset"] in blank else fields)
        assert row == wanted


def test_fields_of_any_name_are_read() -> None:
    """Also names of natslog's columns, of the struct itself, and of the corrupt-record column of Avro and Arrow."""
    fields = [{"name": name, "type": "string"} for name in ("timestamp", "key", "value", "p", "bad")]
    schema = {"type": "record", "name": "R", "fields": fields}
    value = {name["name"]: name["name"].upper() for name in fields}
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    options = {"payloadColumn": "p", "columnNameOfCorruptRecord": "bad"}
    rows = read(parse(payloadFormat="avro", payloadSchema=json.dumps(schema), **options), [out.getvalue(), b"x"])
    assert [(row["key"], row["p"], row["bad"]) for row in rows] == [
        (b"k", value, None), (b"k", dict.fromkeys(value), "eA=="),
    ]  # fmt: skip
    only = {"payloadFormat": "json", "payloadSchema": f"{METADATA}, p INT, bad STRING", **options}
    some = {"offset": 7, "key": "other", "p": 5}
    assert read(parse(**only, columns="p"), [json.dumps(some).encode()]) == [
        {"p": dict.fromkeys(["stream", "offset", "timestamp", "subject", "key", "headers", "p"]) | some}
    ]
    assert read(parse(**only, columns="bad,offset"), [b"{}", b"x"]) == [
        {"bad": None, "offset": 100}, {"bad": "x", "offset": 101},
    ]  # fmt: skip


def test_struct_may_have_the_name_that_it_replaces() -> None:
    options = parse(payloadFormat="json", payloadSchema="id INT", payloadColumn="value")
    assert options.selected_columns() == ("stream", "offset", "timestamp", "subject", "key", "value")
    assert [row["value"] for row in read(options, [b'{"id": 1}', b""])] == [{"id": 1}, None]


def test_struct_is_made_of_the_decoded_buffers() -> None:
    """Reading costs no more a row than top-level columns: nothing is copied."""
    options = parse(payloadFormat="json", payloadSchema="id LONG, name STRING", payloadColumn="p")
    shaper = Shaper(options.payload, ("p",))
    decoded: list[Any] = []
    decoder = shaper._decoder
    assert decoder is not None

    class Noting:
        def decode(self, payloads: Any) -> Any:
            decoded.append(decoder.decode(payloads))
            return decoded[-1]

    shaper._decoder = Noting()
    (batch,) = shaper.shape(stored([b'{"id": 1, "name": "a"}', b"", b'{"id": 2, "name": "b"}']), "orders")
    column = batch.column("p")
    for name in ("id", "name"):
        expected = [buffer and buffer.address for buffer in decoded[0].arrays[name].buffers()]
        assert [buffer and buffer.address for buffer in column.field(name).buffers()] == expected


TYPED = {"payloadFormat": "json", "payloadSchema": "id INT"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"payloadFormat": "json", "payloadSchema": "id INT, Timestamp STRING, key STRING"},
            r"payloadSchema: fields 'Timestamp', 'key' have the names of natslog's own columns\. Add "
            r'\.option\("payloadColumn", "payload"\): .* this one is payload\.Timestamp',
        ),
        (
            {"payloadFormat": "arrow", "payloadSchema": "headers STRING"},
            r"field 'headers' has the name of natslog's own .*\.option\(\"payloadColumn\", \"payload\"\)",
        ),
        (
            {"payloadColumn": "payload"},
            "option payloadColumn requires payloadFormat json, avro, arrow or protobuf, and payloadFormat is binary by "
            "default: set payloadFormat, or remove payloadColumn",
        ),
        (
            {"payloadFormat": "string", "payloadColumn": "payload"},
            "requires payloadFormat json, avro, arrow or protobuf, and payloadFormat is string: set",
        ),
        ({**TYPED, "payloadColumn": ""}, "payloadColumn is empty: give the column a name"),
        ({**TYPED, "payloadColumn": "Offset"}, "payloadColumn: natslog has a column 'offset' of its own"),
        ({**TYPED, "payloadColumn": "headers"}, "payloadColumn: natslog has a column 'headers' of its own"),
        ({**TYPED, "payloadColumn": "_Corrupt_Record"}, "'_Corrupt_Record' is the name of the corrupt-record column"),
        (
            {**TYPED, "payloadColumn": "bad", "columnNameOfCorruptRecord": "bad"},
            "payloadColumn: 'bad' is the name of the corrupt-record column: choose another name",
        ),
        (
            {"payloadFormat": "json", "payloadSchema": "_corrupt_record STRING", "payloadColumn": "p"},
            "payloadSchema has only the corrupt-record column '_corrupt_record': payloadColumn requires at least one",
        ),
        (
            {"payloadFormat": "arrow", "payloadSchema": "id INT", "columnNameOfCorruptRecord": "Key"},
            "columnNameOfCorruptRecord: natslog has a column 'key' of its own",
        ),
        (
            {"payloadFormat": "arrow", "payloadSchema": "id INT", "columnNameOfCorruptRecord": "ID"},
            "columnNameOfCorruptRecord: payloadSchema has a field 'ID' too",
        ),
        (
            {"payloadFormat": "json", "payloadSchema": "key STRING", "columnNameOfCorruptRecord": "key"},
            "columnNameOfCorruptRecord: natslog has a column 'key' of its own",
        ),
        ({**TYPED, "payloadColumn": "p", "columns": "id"}, "unknown column 'id'; it is a field of p: name that"),
        ({**TYPED, "payloadColumn": "p", "columns": "q"}, "unknown column 'q'; known are"),
    ],
)
def test_wrong_name_is_an_error_that_says_what_to_write(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(**options)
