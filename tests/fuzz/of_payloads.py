"""Payloads of messages as typed columns: JSON, Avro, Arrow."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Iterator
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
from fastavro import _read_py as plain_avro
from hypothesis.errors import UnsatisfiedAssumption
from pyspark.sql.types import StructType

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload import json_flat
from pyspark_natslog.payload.arrow_rows import ArrowDecoder
from pyspark_natslog.payload.avro_rows import MAGIC, AvroDecoder
from pyspark_natslog.payload.avro_schema import fingerprint, parse_avro
from pyspark_natslog.payload.ddl import parse_ddl
from pyspark_natslog.payload.json_flat import FlatJson
from pyspark_natslog.payload.json_rows import JsonDecoder
from pyspark_natslog.payload.tree import as_nullable
from tests.fuzz.target import target
from tests.unit.connector.payload import test_json
from tests.unit.connector.payload.json_cases import check_equal
from tests.unit.connector.payload.test_arrow import stream
from tests.unit.connector.payload.test_avro import encode, record, same

_MOST_PAYLOADS = 8


def payloads_of(data: bytes) -> tuple[list[bytes], Payloads]:
    texts = data.split(b"\n\n")[:_MOST_PAYLOADS]
    return texts, Payloads.of(pa.array(texts, pa.binary()))


# ---- JSON ----

_JSON = (
    "id bigint, s string",
    "i int, d double, f float, b boolean, a array<string>",
    "x struct<id: bigint, m: map<string, int>>, l array<struct<y: smallint>>",
    "t timestamp, d date, n timestamp_ntz, s string",
    "p decimal(9, 2), q decimal(38, 10), b binary, by tinyint",
)
_LIKE_PYTHON = 2
"""So many of these have only types whose texts Python's `json` reads as Spark does."""


@functools.cache
def _schema(ddl: str) -> StructType:
    schema = as_nullable(parse_ddl(ddl))
    assert isinstance(schema, StructType)
    return schema


@functools.cache
def _decoders(ddl: str) -> tuple[JsonDecoder, FlatJson | None]:
    schema = _schema(ddl)
    return JsonDecoder(schema), FlatJson(schema) if json_flat.supports(schema) else None


def _json_texts() -> Iterator[bytes]:
    rows: tuple[tuple[dict[str, Any], ...], ...] = (
        ({"id": 1, "s": "a"}, {"s": {"x": [1, None]}, "id": 2**63}),
        ({"i": -1, "d": 1.5e300, "f": 1e39, "b": True, "a": ["x", "é", None]}, {"d": "NaN", "a": []}),
        ({"x": {"id": 7, "m": {"k": 1}}, "l": [{"y": 3}, None]},),
        ({"t": "2024-02-29T10:00:00+02:00", "d": "2024-02-29", "n": "2024-01-01 00:00:00"}, {"t": 1500}),
        ({"p": "1.005", "q": 12345678901234567890, "b": "AQI=", "by": 127},),
    )
    for number, some in enumerate(rows):
        yield bytes([number]) + b"\n\n".join(json.dumps(row).encode() for row in some)
        yield (
            bytes([number])
            + b'{}\n\n \n\n{"id":\n\nnull\n\n\xff\n\n'
            + json.dumps(some[0], ensure_ascii=False).encode()
        )


_JSON_WORDS = [
    b'"id":', b'"s":', b'"d":', b'"a":[', b'"x":{', b'"t":', b"null", b"NaN", b"-Infinity", b"1e308", b"0.1",
    b"\\u00e9",
    b"\\ud83d", b"\n\n", b"} null", b"[" * 1001, b"1E-9999", b"9223372036854775808", b'"2024-02-29"', b"-0", b"\\\"",
    b"//",
]  # fmt: skip


@target("json", _json_texts, _JSON_WORDS)
def check_json(data: bytes) -> None:
    """Both decoders of JSON make the same columns of payloads that both accept, and the columns are valid
    Arrow; for plain types they are what Python's `json` reads, and a malformed payload is malformed for both.
    """
    number = (data[0] if data else 0) % len(_JSON)
    texts, payloads = payloads_of(data[1:])
    kernel, flat = _decoders(_JSON[number])
    expected = kernel.decode(payloads)
    for array in expected.arrays.values():
        array.validate(full=True)
    found = None if flat is None else flat.decode(payloads)
    if found is not None:
        check_equal(found, expected, texts)
    for row in np.flatnonzero(expected.malformed):
        assert expected.reason(int(row))
    if number < _LIKE_PYTHON and max(map(len, texts)) < 4000 and not any(b"'" in text for text in texts):
        with contextlib.suppress(UnsatisfiedAssumption, ValueError):  # ValueError: digits that Python does not read
            test_json.check(_schema(_JSON[number]), texts)


# ---- Avro ----

_AVRO = (
    record(("id", "long"), ("s", ["null", "string"]), ("d", "double"), ("b", "boolean")),
    record(("a", {"type": "array", "items": "long"}), ("m", {"type": "map", "values": "bytes"}), ("i", "int")),
    record(
        ("e", {"type": "enum", "name": "E", "symbols": ["A", "B"]}),
        ("f", {"type": "fixed", "name": "F", "size": 3}),
        ("r", {"type": "array", "items": record(("x", "float"), ("y", ["int", "null"])) | {"name": "I"}}),
        ("z", "string"),
    ),
)


@functools.cache
def _avro_decoder(number: int) -> tuple[AvroDecoder, Any, list[str], bytes]:
    text = json.dumps(_AVRO[number])
    node, own = parse_avro(text), fingerprint(text)
    header = MAGIC + own.to_bytes(8, "little")
    return AvroDecoder(node, own, node.names), fastavro.parse_schema(json.loads(text)), list(node.names), header


def _datums() -> Iterator[bytes]:
    for number, row in enumerate(
        (
            {"id": 7, "s": "é", "d": 0.5, "b": True},
            {"a": [1, -2, 2**40], "m": {"k": b"v"}, "i": -5},
            {"e": "B", "f": b"abc", "r": [{"x": 0.5, "y": 1}, {"x": 1.0, "y": None}], "z": ""},
        )
    ):
        datum = encode(_AVRO[number], row)
        yield bytes([number]) + datum
        yield bytes([number]) + _avro_decoder(number)[3] + datum
    yield bytes([1, 3, 4, 2, 4, 2, 6, 0, 0, 8])


@target(
    "avro",
    _datums,
    [MAGIC, b"\xff" * 9 + b"\1", b"\xfe\xff\xff\xff\x0f", b"\1", b"\0\0\0\0\7", b"\x80\x80\x80\x80\x10"],
)
def check_avro(data: bytes) -> None:
    """A payload that is not malformed is the datum that fastavro reads, all of it; the columns are valid Arrow, and
    a payload does not change the rows beside it.
    """
    number, payload = (data[0] if data else 0) % len(_AVRO), data[1:]
    decoder, schema, names, header = _avro_decoder(number)
    decoded = decoder.decode(Payloads.of(pa.array([payload, payload[:7], payload], pa.binary())))
    for array in decoded.arrays.values():
        array.validate(full=True)
    columns = {name: decoded.arrays[name].to_pylist() for name in names}
    rows = [{name: columns[name][row] for name in names} for row in range(3)]
    assert decoded.malformed[0] == decoded.malformed[2]
    assert repr(rows[0]) == repr(rows[2]), "the same payload is read in two ways"
    if decoded.malformed[0]:
        assert decoded.reason(0)
        assert rows[0] == dict.fromkeys(names)
        return
    source = io.BytesIO(payload.removeprefix(header))
    expected = plain_avro.schemaless_reader(source, schema, None)
    assert source.tell() == len(source.getvalue()), "bytes behind the datum were ignored"
    assert same(json.loads(repr_of(expected)), json.loads(repr_of(rows[0]))), (
        f"fastavro reads {expected}, not {rows[0]}"
    )


def repr_of(row: Any) -> str:
    """One text for the same row: NaN, and maps as Arrow has them."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner) for inner in value]
        return repr(value)

    return json.dumps(plain({name: dict(each) if name == "m" else each for name, each in row.items()}))


# ---- Arrow ----

_ARROW = "id bigint, s string, l array<string>, st struct<x: int>, m map<string, int>"


@functools.cache
def _arrow_decoder() -> ArrowDecoder:
    return ArrowDecoder(_schema(_ARROW))


def _arrow_streams() -> Iterator[bytes]:
    full = pa.RecordBatch.from_pydict(
        {
            "id": pa.array([1, None, 3], pa.int64()),
            "s": pa.array(["a", None, "é"]),
            "l": pa.array([["x"], [], None], pa.list_(pa.string())),
            "st": pa.array([{"x": 1}, None, {"x": None}], pa.struct([("x", pa.int32())])),
            "m": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32())),
        }
    )
    yield stream(full, full)
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), pa.array([7, 8], pa.int64()))
    yield stream(
        pa.RecordBatch.from_arrays([runs, pa.array(["a", "b", "a", "b", "a"]).dictionary_encode()], ["id", "s"])
    )
    yield stream(pa.RecordBatch.from_pydict({"id": pa.array([1.0, 2.5]), "s": pa.array([b"x", b"y"])}))
    yield stream(pa.RecordBatch.from_pydict({"s": pa.array(["x", "long enough for a view"], pa.string_view())}))
    yield stream(pa.RecordBatch.from_pydict({"s": pa.nulls(3), "id": pa.array([1, 2, 3], pa.int8())}))


@target("arrow", _arrow_streams, [b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\1\0\0\0"], 1 << 30)
def check_arrow(payload: bytes) -> None:
    """A payload is malformed, with one row of nulls, or its rows are valid Arrow of the requested types; the payload
    beside it is read as if it was alone.
    """
    plain = stream(pa.RecordBatch.from_pydict({"id": pa.array([42], pa.int64())}))
    decoded = _arrow_decoder().decode(Payloads.of(pa.array([payload, plain], pa.binary())))
    assert decoded.parents is not None
    for array in decoded.arrays.values():
        array.validate(full=True)
        assert len(array) == len(decoded.parents)
    assert not decoded.malformed[1], "a good payload is malformed beside this one"
    assert decoded.arrays["id"][-1].as_py() == 42
    if decoded.malformed[0]:
        assert decoded.reason(0)
        assert decoded.parents.tolist() == [0, 1]
        assert [array[0].as_py() for array in decoded.arrays.values()] == [None] * len(decoded.arrays)
