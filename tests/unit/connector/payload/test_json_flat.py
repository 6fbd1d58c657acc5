"""The kernel for usual JSON against the reference: equal columns, or it refuses; what it must not refuse."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, DataType, FloatType, StringType, StructField, StructType

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload.ddl import parse_ddl
from pyspark_natslog.payload.json_flat import FlatJson, supports
from pyspark_natslog.payload.json_rows import JsonDecoder
from pyspark_natslog.payload.rows import Decoded
from tests.bench.json_decoding import FLAT, flat_order
from tests.spark.test_payload import CASES
from tests.unit.connector.payload.json_cases import (
    HOSTILE_NUMBERS,
    HOSTILE_STRINGS,
    HOSTILE_TIMES,
    NAMES,
    SCALARS,
    break_one,
    check_equal,
    right,
)

TYPES: list[DataType] = [kind for kind in SCALARS if not isinstance(kind, FloatType)] + [ArrayType(StringType())]
EVERY = (
    "i int, l long, b tinyint, sh smallint, d double, s string, bo boolean, dt date, ts timestamp, tn timestamp_ntz, "
    "a array<string>, s2 string, a2 array<string>"
)


def decoded(schema: StructType, texts: list[bytes]) -> Decoded | None:
    """By this kernel; what it returns is checked against the reference."""
    payloads = Payloads.of(pa.array(texts, pa.binary()))
    found = FlatJson(schema).decode(payloads)
    if found is not None:
        check_equal(found, JsonDecoder(schema).decode(payloads), texts)
    return found


@st.composite
def schemas(draw: st.DrawFn) -> StructType:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))
    return StructType([StructField(name, draw(st.sampled_from(TYPES))) for name in names])


@st.composite
def written(draw: st.DrawFn) -> tuple[StructType, list[bytes]]:
    """A schema, and valid payloads of it, some with other members too, in any order."""
    schema = draw(schemas())
    zone = draw(st.sampled_from(["Z", "", "+00:00", "-05:30"]))
    other = draw(st.sampled_from([{}, {"zz": [{"a": None}, "}, x"]}, {"zz": {"a": {}, "zz": "null"}, "y": -1.5e3}]))
    rows = draw(st.lists(right(schema, zone).map(lambda row: row or {}), min_size=1, max_size=6))
    style: Any = draw(st.sampled_from([{}, {"ensure_ascii": False}, {"separators": (",", ":")}, {"indent": 1}]))

    def text_of(row: dict[str, Any]) -> bytes:
        members = draw(st.permutations(list({**other, **row}.items())))
        return json.dumps(dict(members), **style).encode()

    return schema, [text_of(row) for row in rows]


@st.composite
def hostile(draw: st.DrawFn) -> tuple[StructType, list[bytes]]:
    schema = draw(schemas())
    strings = st.sampled_from(HOSTILE_STRINGS + HOSTILE_TIMES).map(lambda text: f'"{text}"')
    scalars = st.sampled_from(HOSTILE_NUMBERS) | strings
    lists = st.lists(scalars, max_size=3).map(lambda items: f"[{','.join(items)}]")
    tokens = scalars | lists | st.sampled_from(["{}", "[", "[,]", '["a",]', '{"a":{"a":null}}', "]", "null", "nulls"])
    names = st.sampled_from([*schema.names, *NAMES, r"\u0061"])
    blanks = st.sampled_from(["", "", "", " ", "\n", "\r\n\t", "\0"])

    def text_of(row: list[tuple[str, str, str]]) -> bytes:
        return ("{" + ",".join(f'"{name}":{blank}{value}{blank}' for name, value, blank in row) + "}").encode()

    rows = st.lists(st.tuples(names, tokens, blanks), max_size=3).map(text_of)
    return schema, draw(st.lists(rows, min_size=1, max_size=3))


@pytest.mark.long
@settings(max_examples=120, deadline=None)
@given(written())
def test_valid_payloads_equal_the_references_or_are_refused(case: tuple[StructType, list[bytes]]) -> None:
    decoded(*case)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(hostile())
def test_hostile_payloads_equal_the_references_or_are_refused(case: tuple[StructType, list[bytes]]) -> None:
    decoded(*case)


@settings(max_examples=120, deadline=None)
@given(written(), st.data())
def test_broken_payloads_equal_the_references_or_are_refused(
    case: tuple[StructType, list[bytes]], data: st.DataObject
) -> None:
    schema, texts = case
    break_one(texts, data)
    decoded(schema, texts)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.decimals(allow_nan=False, allow_infinity=False)))
def test_every_real_equals_the_references_or_is_refused(numbers: list[Any]) -> None:
    for number in numbers:
        decoded(parse_ddl("x double"), [f'{{"x":{number}}}'.encode()])


@settings(max_examples=120, deadline=None)
@given(st.integers(-(10**15) + 1, 10**15 - 1), st.integers(0, 15))
def test_reals_of_fifteen_digits_are_accepted(digits: int, point: int) -> None:
    text = f"{'-' if digits < 0 else ''}{abs(digits):0{point + 1}d}"
    text = f"{text[: len(text) - point]}.{text[len(text) - point :]}" if point else text
    if len(text.replace("-", "").replace(".", "")) <= 15 and digits:
        assert decoded(parse_ddl("x double"), [f'{{"x":{text}}}'.encode()]) is not None, text


@pytest.mark.parametrize("kind", ["double", "int", "long", "tinyint", "string", "boolean", "date", "timestamp"])
def test_every_hostile_value_alone_equals_the_references_or_is_refused(kind: str) -> None:
    strings = [f'"{text}"' for text in HOSTILE_STRINGS + HOSTILE_TIMES]
    for token in HOSTILE_NUMBERS + strings:
        decoded(parse_ddl(f"x {kind}"), [f'{{"x":{token}}}'.encode()])
        decoded(parse_ddl(f"x {kind}"), [f'{{"other":{token}, "x" : {token} }}'.encode()])
        decoded(parse_ddl("a array<string>"), [f'{{"a":["",{token}]}}'.encode()])


def test_cases_of_the_comparison_with_spark_equal_the_references_or_are_refused() -> None:
    assert sum(decoded(parse_ddl(EVERY), [case.encode()]) is not None for case in CASES) > 10


def test_messages_of_one_kind_are_accepted() -> None:
    random = Random(3)
    orders = [flat_order(random, number) for number in range(2000)]
    for ddl in (FLAT, "price DOUBLE, quantity INT, city STRING", "none STRING, quantity SHORT"):
        assert decoded(parse_ddl(ddl), orders) is not None


@pytest.mark.parametrize(
    "texts",
    [
        [b"{}", b"{ }", b'{"i":1}', b'{"l":-5,"i":2}', b'{"z":1}', b"{}"],
        [b'{"s":"a","s2":"b"}', b'{"s2":"c"}', b'{"s":null}', b'{"s":"d"}', b'{"s2":"","s":""}'],
        [b'{"a":["x","y"],"a2":[]}', b'{"a2":["z"]}', b'{"a":null}', b'{"a":[ "" , "w" ]}', b"{}", b'{"a":[]}'],
        [b'{"bo":true}', b'{"bo":false}', b'{"bo":null}', b"{}"],
        [b'{"i":1,"i2":2,"i":3}'.replace(b'"i":3', b'"z":3'), b'{"z":3,"z":4,"i":1}'],
        [b'{"i":2147483647,"b":-128,"sh":32767,"l":999999999999999999}', b'{"i":-2147483648}'],
        [b'{"d":0.1}', b'{"d":-12345.678901}', b'{"d":7}', b'{"d":0}', b'{"d":0.00000000000001}'],
        ['{"s":"é😀","z":"\\u00e9"}'.encode(), b'{"z":{"a":[1,{"b":"\\""}]},"s":"x"}'],
        [b'{"dt":"2024-02-29","ts":"2024-01-02T03:04:05.123Z","tn":"2024-01-02 03:04:05"}', b"{}"],
        [b'{"i":\n1 ,\r\n"s"\t:"x"\n}'],
        [b'{"i":1,"s":"x"}', b'{"i": 2, "s": "y"}', b'{"i":  3,"s":"z"}'],
        [b'{"%b":1,"i":%d}' % (b"x" * 5000, at) for at in range(3)],
    ],
)  # fmt: skip
def test_these_payloads_are_accepted(texts: list[bytes]) -> None:
    found = decoded(parse_ddl(EVERY), texts)
    assert found is not None
    assert not found.malformed.any()


@pytest.mark.parametrize(
    "text",
    [
        b"", b" ", b"{", b"}", b"[]", b"null", b' {"i":1}', b'{"i":1} ', b'{"i":1}{"i":2}', b'{"i":1,"i":2}',
        b'{"i":null,"i":2}', b'{"s":null,"s":null}', b'{"i":1,}', b"{,}", b'{"i"}', b'{"i":}', b'{"i":1 2}',
        b'{"i":01}',
        b'{"i":-0}', b'{"i":1.0}', b'{"i":1e2}', b'{"i":"1"}', b'{"i":2147483648}', b'{"b":128}', b'{"b":-129}',
        b'{"l":1234567890123456789}', b'{"d":1e2}', b'{"d":-0.0}', b'{"d":.5}', b'{"d":1.}', b'{"d":NaN}',
        b'{"d":0.1234567890123456}', b'{"d":00.5}', b'{"s":5}', b'{"s":"a\\n"}', b'{"s":"a\x01"}', b'{"s":"x}',
        b'{"s":"\xff"}', b'{"bo":"true"}', b'{"bo":True}', b'{"bo":tru}', b'{"a":["x",null]}', b'{"a":[1]}',
        b'{"a":["x"}', b'{"a":["x",]}', b'{"a":{}}', b"{'i':1}", b'{"\\u0069":1}', b'{"z":nul}', b'{"z":01}',
        b'{"ts":"2024-02-30"}', b'{"z":%b%b}' % (b"[" * 1001, b"]" * 1001),
        b"{%b}" % b",".join(b'"%d":1' % at for at in range(257)),
    ],
)  # fmt: skip
def test_these_payloads_are_refused(text: bytes) -> None:
    assert decoded(parse_ddl(EVERY), [text]) is None
    assert decoded(parse_ddl(EVERY), [b'{"i":1,"s":"x"}', text, b"{}"]) is None


def test_payload_that_is_too_large_for_its_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b'{"s":"%b"}' % (b"x" * 100)
    assert decoded(parse_ddl(EVERY), [text]) is not None
    monkeypatch.setattr("pyspark_natslog.payload.json_flat._MOST_BYTES", 500)
    assert decoded(parse_ddl(EVERY), [text]) is None


@pytest.mark.parametrize(
    ("ddl", "is_supported"),
    [
        (EVERY, True),
        (FLAT, True),
        ("f float", False),
        ("d decimal(9,2)", False),
        ("b binary", False),
        ("a array<int>", False),
        ("s struct<x:int>", False),
        ("m map<string,string>", False),
        (", ".join(f"c{at} string" for at in range(65)), False),
    ],
)
def test_supported_types(ddl: str, is_supported: bool) -> None:
    assert supports(parse_ddl(ddl)) == is_supported


def test_slice_of_a_column_is_decoded_as_such() -> None:
    texts = [b'{"i":%d}' % at for at in range(10)]
    payloads = Payloads.of(pa.array(texts, pa.binary()).slice(3, 4))
    for decoder in (FlatJson(parse_ddl("i int")), JsonDecoder(parse_ddl("i int"))):
        found = decoder.decode(payloads)
        assert found is not None
        assert found.arrays["i"].to_pylist() == [3, 4, 5, 6]


def test_large_payload_is_one_row() -> None:
    large = json.dumps({"s": "x" * 5_000_000, "z": [{"x": at, "y": "n"} for at in range(100_000)]}, indent=1)
    found = decoded(parse_ddl("i int, s string"), [b'{"i":1}', large.encode(), b'{"i":2}'])
    assert found is not None
    assert found.arrays["i"].to_pylist() == [1, None, 2]
