"""The fast path of JSON against the kernel, which is the reference: equal columns and malformed rows, or it refuses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload.ddl import parse_ddl
from pyspark_natslog.payload.json_arrow import ArrowJson, pj, supports
from pyspark_natslog.payload.json_rows import JsonDecoder
from pyspark_natslog.payload.rows import Decoded
from tests.spark.test_payload import CASES

SCALARS: list[DataType] = [
    BooleanType(), ByteType(), ShortType(), IntegerType(), LongType(), FloatType(), DoubleType(), StringType(),
    DateType(), TimestampType(), TimestampNTZType(),
]  # fmt: skip
_BITS = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
EVERY = (
    "i int, l long, b tinyint, sh smallint, d double, f float, s string, bo boolean, dt date, ts timestamp, "
    "tn timestamp_ntz, a array<string>, st struct<x:int,y:string>, aa array<struct<x:int,y:string>>"
)


def decoded(schema: StructType, texts: list[bytes]) -> Decoded | None:
    """By the fast path; what it returns is checked against the kernel's."""
    payloads = Payloads.of(pa.array(texts, pa.binary()))
    kernel = JsonDecoder(schema)
    found = ArrowJson(schema, lambda given, row: kernel.decode(given.only(row)).reason(0)).decode(payloads)
    if found is not None:
        check_equal(found, kernel.decode(payloads), texts)
    return found


def check_equal(found: Decoded, expected: Decoded, texts: list[bytes]) -> None:
    assert list(found.arrays) == list(expected.arrays)
    for name, array in found.arrays.items():
        array.validate(full=True)
        other = expected.arrays[name]
        assert array.type.equals(other.type, check_metadata=True), name
        assert bits(array).equals(bits(other)), (texts, array, other)
    assert found.blank is not None
    assert expected.blank is not None
    assert found.blank.tolist() == expected.blank.tolist(), texts
    assert found.malformed.tolist() == expected.malformed.tolist(), texts
    for row in np.flatnonzero(found.malformed):
        assert found.reason(int(row)) == expected.reason(int(row)), texts


def bits(array: Any) -> Any:
    """Reals as integers of the same bits, so that signs of zero count; all kinds of NaN are one."""
    if pa.types.is_struct(array.type):
        parts = [bits(array.field(at)) for at in range(array.type.num_fields)]
        return pa.StructArray.from_arrays(parts, names=array.type.names, mask=array.is_null()) if parts else array
    if pa.types.is_list(array.type):
        return pa.ListArray.from_arrays(array.offsets, bits(array.values), mask=array.is_null())
    if not pa.types.is_floating(array.type):
        return array
    filled = pa.compute.if_else(pa.compute.is_nan(array), pa.scalar(float("nan"), array.type), array)
    return filled.view(pa.int32() if array.type == pa.float32() else pa.int64())


# ---- random schemas and payloads ----

NAMES = ["a", "b", "id", "é", 'q"uote', "longer name", "A", "}"]
_NUMBERS = """
0 -0 1 -1 127 128 -128 -129 32767 32768 -32769 2147483647 2147483648 -2147483649
9223372036854775807 9223372036854775808 -9223372036854775808 -9223372036854775809
1.0 1.5 -0.0 1e2 1E+2 1e-2 1e308 1e309 -1e309 2e308 4.9e-324 2e-324 1e-400
-1e-400 1e39 -3.5e38 16777217 16777217.0000001 0.1234567890123456789 123456789012345678901234567890 1.17549435e-38 1e-45
7e-46 1.7976931348623159e308 3.4028235677973366e+38 3.40282357e38 01 1. +1 .5 - 1e 0x1F 1_0 NaN -NaN +NaN Infinity
-Infinity +Infinity Inf -Inf INF nan inf true false null True nul 0e-99999999 1e-9999999
"""
HOSTILE_NUMBERS = _NUMBERS.split()
HOSTILE_STRINGS = [
    "", "a", "é", "😀", "NaN", "Infinity", "INF", "1", "true", "null", "{}", "}", "{", "[", "]", "} null", "}null",
    "Inf,", "-NaN]", "Infer", r"a\nb", r"\u00e9", r"\ud83d", r"\ude00", r"\ud83d\ude00", r"\ud83d\ud83d", r"\u0000",
    r"\/", r"\'", r"\x", "'", r"\"", r"\\", "\x7f", "\x01", "\n", "\u2028", "\ufeff",
]  # fmt: skip
_TIMES = """
2024-01-02 2024-02-30 2024-1-2 2024 0000-01-01 9999-12-31 10000-01-01 -001-01-01 +2024-01-01 2024-13-01 2024-00-10
2024-01-02T03:04:05Z 2024-01-02_03:04:05 2024-01-02T03:04:05 2024-01-02T03:04:05.1 2024-01-02T03:04:05.123456Z
2024-01-02T03:04:05.1234567Z 2024-01-02T03:04:05.Z 2024-01-02T03:04:05+02:00 2024-01-02T03:04:05-17:59
2024-01-02T03:04:05+18:00 2024-01-02T03:04:05+18:01 2024-01-02T03:04:05+23:59 2024-01-02T03:04:05+0200
2024-01-02T03:04:05+02 2024-01-02T03 2024-01-02T03Z 2024-01-02T0304 2024-01-02T030405Z 2024-01-02T24:00:00
2024-01-02T23:59:60Z 2024-01-02T03:04Z 2024-01-02t03:04:05Z 2024-01-02T03:04:05z 2024-01-02T03:04:05_Z _2024-01-02
1969-12-31T23:59:59.999999Z 0000-01-01T00:00:00Z 9999-12-31T23:59:59.999999-17:00 2024-01-02T03:04:05+02:60
2024-01-02T03+02:00 2024-01-02T03:04:05+1900
2024-01-02T03:04:05.1+2:30 20240102T03:04:05.1 2024-01-02T03:04:05.123456 2024-01-02T03:04:05UTC 2024-01-02T0a:04:05Z
"""
HOSTILE_TIMES = [text.replace("_", " ") for text in _TIMES.split()]
JUNK = [
    b"", b" ", b"\n", b"\0", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"null", b" null ", b"{}", b"{}null{}",
    b"{}\nnull\n{}", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"1", b"-NaN", b"Inf", b"'", b"\x01", b"/**/",
]  # fmt: skip


def schemas() -> st.SearchStrategy[StructType]:
    def structs(inner: st.SearchStrategy[DataType]) -> st.SearchStrategy[StructType]:
        fields = st.tuples(st.sampled_from(NAMES), inner)
        pairs = st.lists(fields, min_size=1, max_size=5, unique_by=lambda pair: pair[0])
        return pairs.map(lambda found: StructType([StructField(name, kind) for name, kind in found]))

    def nested(inner: st.SearchStrategy[DataType]) -> st.SearchStrategy[DataType]:
        return st.one_of(inner.map(ArrayType).filter(supports), structs(inner))

    return structs(st.recursive(st.sampled_from(SCALARS), nested, max_leaves=6))


def right(kind: DataType, zone: str) -> st.SearchStrategy[Any]:
    """A value of the type, or null, as `json.dumps` takes it."""
    found: st.SearchStrategy[Any]
    match kind:
        case StructType():
            found = st.fixed_dictionaries({}, optional={name: right(kind[name].dataType, zone) for name in kind.names})
        case ArrayType():
            found = st.lists(right(kind.elementType, zone), max_size=4)
        case BooleanType():
            found = st.booleans()
        case DoubleType():
            found = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70)
        case FloatType():
            found = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-(2**30), 2**30)
        case StringType():
            found = st.text(st.characters(codec="utf-8"), max_size=20)
        case DateType():
            found = st.dates().map(lambda at: at.isoformat())
        case TimestampType():
            found = st.datetimes().map(lambda at: at.isoformat() + zone)
        case TimestampNTZType():
            found = st.datetimes().map(lambda at: at.isoformat())
        case _:
            most = 2 ** (_BITS[type(kind)] - 1)
            found = st.integers(-most, most - 1)
    return st.none() | found


@st.composite
def written(draw: st.DrawFn) -> tuple[StructType, list[bytes]]:
    """A schema, and valid payloads of it, some with other members too."""
    schema = draw(schemas())
    zone = draw(st.sampled_from(["Z", "", "+00:00", "-05:30"]))
    rows = draw(st.lists(right(schema, zone).map(lambda row: row or {}), min_size=1, max_size=6))
    other = draw(st.sampled_from([{}, {"zz": [{"a": None}, "}, x"]}, {"zz": {"a": {}, "zz": "null"}}]))
    style: Any = draw(st.sampled_from([{}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}]))
    return schema, [json.dumps({**other, **row}, **style).encode() for row in rows]


@st.composite
def hostile(draw: st.DrawFn) -> tuple[StructType, list[bytes]]:
    """A schema, and payloads with values, spellings and members that the two parsers may read differently."""
    schema = draw(schemas())
    strings = st.sampled_from(HOSTILE_STRINGS + HOSTILE_TIMES).map(lambda text: f'"{text}"')
    tokens = st.sampled_from([*HOSTILE_NUMBERS, "{}", "[]", "[1]", '["a"]', "[null]", '{"a":{"a":null}}']) | strings
    names = st.sampled_from([*schema.names, *NAMES, r"\u0061"])
    blanks = st.sampled_from(["", "", "", " ", "\n", "\r\n\t"])

    def text_of(row: list[tuple[str, str, str]]) -> bytes:
        return ("{" + ",".join(f'"{name}":{blank}{value}{blank}' for name, value, blank in row) + "}").encode()

    rows = st.lists(st.tuples(names, tokens, blanks), max_size=3).map(text_of)
    return schema, draw(st.lists(rows, min_size=1, max_size=3))


@settings(max_examples=100, deadline=None)
@given(written())
def test_valid_payloads_are_accepted_and_equal_the_kernels(case: tuple[StructType, list[bytes]]) -> None:
    schema, texts = case
    assert decoded(schema, texts) is not None, (schema.simpleString(), texts)


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(hostile())
def test_hostile_payloads_equal_the_kernels_or_are_refused(case: tuple[StructType, list[bytes]]) -> None:
    decoded(*case)


def break_one(texts: list[bytes], data: st.DataObject) -> None:
    """Bytes cut out or inserted, a payload split in two, two in one."""
    at = data.draw(st.integers(0, len(texts) - 1))
    low = data.draw(st.integers(0, len(texts[at])))
    high = data.draw(st.integers(low, len(texts[at])) | st.just(low))
    match data.draw(st.sampled_from(["change", "split", "join"])):
        case "change":
            texts[at] = texts[at][:low] + data.draw(st.sampled_from(JUNK)) + texts[at][high:]
        case "split":
            texts[at : at + 1] = [texts[at][:low], texts[at][low:]]
        case "join":
            texts[at] += data.draw(st.sampled_from([b"", b" ", b"\n", b"null", b" null "])) + texts[-1]


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(written(), st.data())
def test_broken_payloads_equal_the_kernels_or_are_refused(
    case: tuple[StructType, list[bytes]], data: st.DataObject
) -> None:
    schema, texts = case
    break_one(texts, data)
    decoded(schema, texts)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats() | st.floats(width=32) | st.decimals(allow_nan=False, allow_infinity=False), min_size=1))
def test_every_real_equals_the_kernels(numbers: list[Any]) -> None:
    texts = [str(number).replace("inf", "Infinity").replace("nan", "NaN") for number in numbers]
    decoded(parse_ddl("x double, y float"), [f'{{"x":{text},"y":{text}}}'.encode() for text in texts])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["double", "float", "int", "long", "string", "boolean", "date", "timestamp"])
def test_every_hostile_value_alone_equals_the_kernels_or_is_refused(kind: str) -> None:
    strings = [f'"{text}"' for text in HOSTILE_STRINGS + HOSTILE_TIMES]
    schema = parse_ddl(f"x {kind}, s struct<y:{kind}>")
    for token in HOSTILE_NUMBERS + strings:
        decoded(schema, [f'{{"x":{token}}}'.encode(), f'{{"s":{{"y":{token}}}}}'.encode()])
        decoded(schema, [f'{{"other":{token}}}'.encode()])


def test_cases_of_the_comparison_with_spark_equal_the_kernels_or_are_refused() -> None:
    accepted = [case for case in CASES if decoded(parse_ddl(EVERY), [case.encode()]) is not None]
    assert len(accepted) > len(CASES) / 3
    assert decoded(parse_ddl(EVERY), [case.encode() for case in accepted]) is not None


# ---- single cases ----


@pytest.mark.parametrize(
    "texts",
    [
        [b'{"i":1,"s":"x"}', b"", b" \r\n\t", b'{"i":2}'],
        [b' {"i":1}\n', b'\n{"i":2}\r\n'],
        [b'{"i":\n1,\r\n"s"\n:"x"\n}', b'{"i":2}'],
        [b"oops", b'{"i":1', b"[1]", b"5", b"null", b'"x"', b"\xff", b'\xef\xbb\xbf{"i":1}', b"}", b"{", b"}{"],
        [b'{"i":1', b',"s":"x"}', b'{"i":2}'],
        [b'{"s":"{x} not } n {}"}', b'{"s":"Inf"}', b'{"s":"Infinity, NaN"}', b'{"s":"}"}'],
        [b'{"s":null,"i":null,"aa":null,"st":null}', b"{}", b'{"I":1,"S":"x"}', b'{"z":1,"z":{"i":[]},"i":1}'],
        [b'{"aa":[null,{},{"x":1},{"y":"b","zz":[{"x":9}]}],"a":[null,"","x"]}', b'{"aa":[],"st":{}}'],
        [rb'{"s":"\u00e9\ud83d\ude00\u0000\"\\\/\b\f\n\r\t","\u0069":1}', '{"s":"é😀\u2028\x7f"}'.encode()],
        [b'{"d":-0.0,"f":-0,"i":-0}', b'{"d":1e-400,"f":1e-60}', b'{"d":NaN,"f":-Infinity}'],
        [b'{"dt":"2024-02-29","ts":"2024-01-02T03:04:05.123Z","tn":"2024-01-02 03:04:05"}', b'{"ts":null}', b"{}"],
        [b'{"ts":"2024-01-02T03:04:05+17:59"}', b'{"ts":"2024-01-02T03:04:05Z"}'],
        [b'{"ts":"2024-01-02T03:04:05Z"}', b'{"ts":"2024-01-02T03:04:05-00:30"}'],
        [b'{"ts":"2024-01-02 03:04:05"}', b'{"ts":"2024-01-02T03:04:05.1"}'],
        [b'{"dt":"2024"}', b'{"dt":"2024-1-2"}'], [b'{"ts":"2024-01-02"}', b'{"ts":" 2024-01-02 03:04:05"}'],
        [b'{"ts":"2024-01-02T03:04:05+18:00"}', b'{"ts":"2024-01-02T03:04:05+0200"}'],
        [b'{"ts":"2024-01-02T03:04:05"}', b'{"ts":"2024-01-02T03:04:05Z"}'],
        [b'{"ts":"2024-01-02T03:04:05.123456789Z"}', b'{"ts":"20240102T030405.1234Z"}', b'{"ts":"20240102T0304+02"}'],
        [b'{"z":%b%b}' % (b'[{"i":' * 499 + b"[", b"]" + b"}]" * 499)],
        [b'{"z":[%b],"s":"%b"}' % (b",".join([b'{"a":"[[[[{\\"\\\\"}'] * 900), b"[{" * 2000)],
        [],
    ],
)  # fmt: skip
def test_these_payloads_are_accepted(texts: list[bytes]) -> None:
    assert decoded(parse_ddl(EVERY), texts) is not None


@pytest.mark.parametrize(
    "texts",
    [
        [b'{"i":1}{"i":2}'],
        [b'{"i":1} {"i":2}', b'{"i":3}'],
        [b'{"i":1}\n{"i":2}', b""],
        [b'{"s":"x}', b'{y"}{}'],
        [b'{"i":1}null{"i":2}'], [b'{"s":"{} null"}'],
        [b'{"z":Inf}'], [b'{"z":-Inf}'], [b'{"z":-NaN}'], [b'{"d":Inf }'], [b'{"z":[-NaN]}'], [b'{"z":INF}'],
        [b'{"s":"\xff"}'], [b'{"s":"\xed\xa0\x80"}'], [b'{"z":"\xc0\x80"}'], [b'{"s":"\xc3"}', b'{"s":"\xa9"}'],
        [b'{"s":"a\nb"}'], [b'{"s":"a\0b"}'], [b'{"i":1\0}'], [b'{"i":1}\0{}'],
        [b'{"i":1,"i":2}'], [b'{"s":null,"s":"x"}'], [b'{"st":{"x":1,"x":null}}'],
        [b'{"s":5}'], [b'{"s":true}'], [b'{"s":{}}'], [b'{"s":[]}'], [b'{"i":"5"}'], [b'{"d":"NaN"}'],
        [b'{"bo":"true"}'],
        [b'{"i":2147483648}'], [b'{"b":128}'], [b'{"sh":-32769}'], [b'{"l":9223372036854775808}'], [b'{"i":1.0}'],
        [b'{"i":1e2}'], [b'{"d":1e400}'], [b'{"i":01}'], [b'{"d":1.}'], [b'{"a":[1]}'], [b'{"a":{}}'], [b'{"st":[]}'],
        [rb'{"s":"\ud83d"}'], [rb'{"s":"\ude00"}'], [rb'{"s":"\x"}'], [b"{'i':1}"], [b'{"i":1,}'], [b'{"i":}'],
        [b'{"dt":"2024-02-30"}'], [b'{"dt":19000}'], [b'{"dt":"2024-13-01"}'],
        [b'{"ts":5}'], [b'{"ts":"2024-01-02T03Z"}'], [b'{"ts":"2024-01-02T030405.1234Z"}'], [b'{"ts":""}'],
        [b'{"ts":"2024-01-02T03+02:00"}'], [b'{"ts":"2024-01-02T03:04:05+1900"}'], [b'{"tn":"2024-01-02T03:04:05Z"}'],
        [b'{"ts":"20240102T03Z"}'], [b'{"ts":"20240102T03040Z"}'], [b'{"ts":"20240230T030405Z"}'],
        [b'{"ts":"400000-01-01T00:00:00Z"}'],
        [b'{"ts":"20240102T240000Z"}'], [b'{"ts":"20240102T0304.5Z"}'], [b'{"ts":"2024-01-02T03:04.5Z"}'],
        [b'{"z":%b%b}' % (b"[" * 1001, b"]" * 1001)],
        [b'{"z":"[","y":%b"\\\\]","]"%b}' % (b"[" * 1001, b"]" * 1001)],
    ],
)  # fmt: skip
def test_these_payloads_are_refused(texts: list[bytes]) -> None:
    assert decoded(parse_ddl(EVERY), texts) is None
    assert decoded(parse_ddl(EVERY), [b"{}", *texts, b"{}"]) is None


@pytest.mark.parametrize("blanks", [b"", b" ", b"\n", b"\r\n\t ", b" " * 1000])
def test_null_after_an_object_never_reaches_the_parser_which_it_crashes(
    monkeypatch: pytest.MonkeyPatch, blanks: bytes
) -> None:
    monkeypatch.delattr(pj, "read_json")
    assert decoded(parse_ddl("a int"), [b"{}", b'{"a":1}%bnull%b{"a":2}' % (blanks, blanks)]) is None


@pytest.mark.parametrize(
    ("ddl", "is_supported"),
    [
        (EVERY, True),
        ("m map<string,int>", False),
        ("s struct<x: map<string,string>>", False),
        ("d decimal(9,2)", False),
        ("b binary", False),
        ("a array<struct<b: binary>>", False),
        ("a array<array<date>>", True),
        ("a array<int>", False),
        ("s struct<a: array<double>>", False),
    ],
)
def test_types_that_arrow_reads_otherwise_or_slowly_are_not_supported(ddl: str, is_supported: bool) -> None:
    assert supports(parse_ddl(ddl)) == is_supported


def test_payload_larger_than_any_default_block_is_one_row() -> None:
    large = json.dumps({"s": "x" * 5_000_000, "aa": [{"x": at, "y": "\n"} for at in range(100_000)]}, indent=1)
    found = decoded(parse_ddl(EVERY), [b'{"i":1}', large.encode(), b'{"i":2}'])
    assert found is not None
    assert found.arrays["i"].to_pylist() == [1, None, 2]


def test_slice_of_a_column_is_decoded_as_such() -> None:
    texts = [b'{"i":%d}' % at for at in range(10)]
    payloads = Payloads.of(pa.array(texts, pa.binary()).slice(3, 4))
    found = ArrowJson(parse_ddl("i int"), lambda given, row: "").decode(payloads)
    assert found is not None
    assert found.arrays["i"].to_pylist() == [3, 4, 5, 6]
