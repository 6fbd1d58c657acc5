"""The JSON kernel against `json.loads` a row: random schemas, values of the right and the wrong kind, broken text."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from base64 import b64encode
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal, localcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from natslog.arrow.payloads import Payloads
from pyspark_natslog.payload.ddl import parse_ddl
from pyspark_natslog.payload.json_rows import JsonDecoder


def decode(schema: StructType, payloads: list[bytes]) -> tuple[list[dict[str, Any]], list[str | None]]:
    """(rows as Python objects, reasons of those that are malformed)."""
    decoded = JsonDecoder(schema).decode(Payloads.of(pa.array(payloads, pa.binary())))
    for array in decoded.arrays.values():
        array.validate(full=True)
    columns = {name: array.to_pylist() for name, array in decoded.arrays.items()}
    rows = [{name: columns[name][row] for name in columns} for row in range(len(payloads))]
    return rows, [decoded.reason(row) if decoded.malformed[row] else None for row in range(len(payloads))]


ROOT = Path(__file__).parents[4]


# ---- the dumb model ----


class Number(str):
    """A number as it is written."""


@dataclass(eq=False)
class Raw:
    """A value that isn't text in a column of text: equal to any way to write it."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and _plain(_loads(other)) == _plain(self.value)


class Pairs(list):
    """An object's members in order."""


class Wrong(Exception):
    """Not of the column's type."""


_INTEGERS = {ShortType: 16, IntegerType: 32, LongType: 64}


def _loads(text: str) -> Any:
    return json.loads(text, parse_int=Number, parse_float=Number, parse_constant=Number, object_pairs_hook=Pairs)


def _plain(value: Any) -> Any:
    if isinstance(value, Pairs):
        return [(key, _plain(item)) for key, item in value]
    return [_plain(item) for item in value] if isinstance(value, list) else value


def model(schema: StructType, payload: bytes) -> tuple[dict[str, Any], bool]:
    """(the row, whether it is malformed)."""
    nothing = dict.fromkeys(schema.names)
    try:
        text = payload.decode()
        if not text.strip(" \t\r\n"):
            return nothing, False
        found = _loads(text)
    except (ValueError, RecursionError):
        return nothing, True
    if not isinstance(found, Pairs):
        return nothing, True
    wrong: list[str] = []
    return _struct(schema, found, wrong), bool(wrong)


def _struct(schema: StructType, found: Pairs, wrong: list[str]) -> dict[str, Any]:
    row = dict.fromkeys(schema.names)
    for key, value in found:
        if key in row:
            try:
                row[key] = _value(schema[key].dataType, value, wrong)
            except Wrong:
                row[key] = None
                wrong.append(key)
    return row


def _value(kind: DataType, value: Any, wrong: list[str]) -> Any:
    if value is None:
        return None
    if isinstance(kind, StructType) and isinstance(value, Pairs):
        return _struct(kind, value, wrong)
    if isinstance(kind, MapType) and isinstance(value, Pairs):
        return [(_text(key), _value(kind.valueType, item, wrong)) for key, item in value]
    if isinstance(kind, ArrayType) and isinstance(value, list) and not isinstance(value, Pairs):
        return [_value(kind.elementType, item, wrong) for item in value]
    try:
        return _scalar(kind, value)
    except (ValueError, ArithmeticError, TypeError) as error:
        raise Wrong from error


def _text(value: str) -> str:
    return "".join("?" if "\ud800" <= letter <= "\udfff" else letter for letter in value)


def _scalar(kind: DataType, value: Any) -> Any:
    is_number = isinstance(value, Number)
    is_text = isinstance(value, str) and not is_number
    if isinstance(kind, StringType):
        return _text(value) if is_text else Raw(value)
    if type(kind) in _INTEGERS and is_number:
        whole = int(value)
        if not -(2 ** (_INTEGERS[type(kind)] - 1)) <= whole < 2 ** (_INTEGERS[type(kind)] - 1):
            raise Wrong
        return whole
    if isinstance(kind, DoubleType | FloatType) and (is_number or value in ("NaN", "Infinity", "-Infinity", "INF")):
        real = float(value.replace("INF", "Infinity"))
        if isinstance(kind, FloatType):
            return _single(real)
        return real
    if isinstance(kind, BooleanType) and isinstance(value, bool):
        return value
    if isinstance(kind, DecimalType) and isinstance(value, str):
        with localcontext(prec=2000):
            rounded = Decimal(value).quantize(Decimal(1).scaleb(-kind.scale), ROUND_HALF_UP)
        if not rounded.is_finite() or (len(rounded.as_tuple().digits) > kind.precision and rounded != 0):
            raise Wrong
        return rounded
    if isinstance(kind, DateType) and is_text:
        return date.fromisoformat(value)
    if isinstance(kind, TimestampType) and is_text:
        return datetime.fromisoformat(value).astimezone(UTC)
    if isinstance(kind, TimestampType) and is_number:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=int(value))
    raise Wrong


def _single(real: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", real))[0])
    except OverflowError:
        return math.copysign(math.inf, real)


# ---- random schemas and payloads ----

NAMES = ["a", "b", "id", "é", 'q"uote', "longer name", "A"]
PLAIN_TYPES = [ShortType(), IntegerType(), LongType(), DoubleType(), BooleanType(), StringType()]
ALL_TYPES = [*PLAIN_TYPES, FloatType(), DecimalType(9, 2), DecimalType(38, 10), DateType(), TimestampType()]


def schemas(scalars: list[DataType]) -> st.SearchStrategy[StructType]:
    def nested(inner: st.SearchStrategy[DataType]) -> st.SearchStrategy[DataType]:
        return st.one_of(inner.map(ArrayType), inner.map(lambda kind: MapType(StringType(), kind)), structs(inner))

    return structs(st.recursive(st.sampled_from(scalars), nested, max_leaves=6))


def structs(inner: st.SearchStrategy[DataType]) -> st.SearchStrategy[StructType]:
    fields = st.lists(st.tuples(st.sampled_from(NAMES), inner), min_size=1, max_size=5, unique_by=lambda pair: pair[0])
    return fields.map(lambda found: StructType([StructField(name, kind) for name, kind in found]))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def _values(kind: DataType) -> st.SearchStrategy[Any]:
    """Mostly of the type, now and then null or something else."""
    right: st.SearchStrategy[Any]
    match kind:
        case StructType():
            right = st.fixed_dictionaries({}, optional={name: _values(kind[name].dataType) for name in kind.names})
        case ArrayType():
            right = st.lists(_values(kind.elementType), max_size=4)
        case MapType():
            right = st.dictionaries(st.text(max_size=4), _values(kind.valueType), max_size=3)
        case BooleanType():
            right = st.booleans()
        case DoubleType() | FloatType():
            right = st.floats() | st.integers()
        case DecimalType():
            right = st.decimals(-(10**7), 10**7, places=4).map(lambda number: float(number)) | st.integers()
        case StringType():
            right = st.text(max_size=20) | anything
        case DateType():
            right = st.dates().map(date.isoformat)
        case TimestampType():
            right = st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1)).map(lambda at: at.isoformat() + "+02:00")
            right = right | st.integers(-(2**33), 2**33)
        case _:
            right = st.integers(-(2**15), 2**15 - 1) | st.integers(-(2**64), 2**64)
    return st.integers(0, 19).flatmap(lambda dice: anything if dice == 0 else (st.none() if dice == 1 else right))


@st.composite
def cases(draw: st.DrawFn, scalars: list[DataType] = ALL_TYPES) -> tuple[StructType, list[bytes]]:
    schema = draw(schemas(scalars))
    rows = draw(st.lists(_values(schema), min_size=1, max_size=6))
    style = draw(st.sampled_from([{}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}]))
    return schema, [json.dumps(row, **style).encode("utf-8", "replace") for row in rows]


def same(one: Any, other: Any) -> bool:
    """Equal, NaN and signs of zero included."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    return bool(one == other)


def check(schema: StructType, payloads: list[bytes]) -> None:
    try:
        rows, reasons = decode(schema, payloads)
    except OverflowError:  # a number was read as a time that Arrow holds and Python cannot
        reject()
    for payload, row, reason in zip(payloads, rows, reasons, strict=True):
        expected, malformed = model(schema, payload)
        assert same(expected, row), (schema.simpleString(), payload, row, expected)
        assert (reason is not None) == malformed, (schema.simpleString(), payload, reason)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(cases())
def test_decode_random_rows_equals_json_loads(case: tuple[StructType, list[bytes]]) -> None:
    check(*case)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(cases(PLAIN_TYPES), st.data())
def test_decode_broken_text_equals_json_loads(case: tuple[StructType, list[bytes]], data: st.DataObject) -> None:
    """Bytes cut out, doubled or changed; the rows around the broken one are as they were."""
    schema, payloads = case
    at = data.draw(st.integers(0, len(payloads) - 1))
    payload = payloads[at]
    low = data.draw(st.integers(0, len(payload)))
    high = data.draw(st.integers(low, len(payload)))
    junk = data.draw(
        st.sampled_from([b"", b"}", b"]", b'"', b",", b":", b"\\", b"1", b"-", b"\xff", b"\n", b"\x01", b"{"])
    )
    payloads[at] = payload[:low] + junk + payload[high:]
    check(schema, payloads)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats() | st.floats(width=32) | st.decimals(allow_nan=False, allow_infinity=False), min_size=1))
def test_every_real_is_rounded_as_python_rounds_it(numbers: list[Any]) -> None:
    texts = [str(number).lower().replace("inf", "Infinity").replace("nan", "NaN") for number in numbers]
    check(parse_ddl("x double, y float"), [f'{{"x":{text},"y":{text}}}'.encode() for text in texts])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**40), max_value=10**40), min_size=1))
@pytest.mark.long
def test_every_decimal_is_rounded_half_up_or_refused(numbers: list[Decimal]) -> None:
    rows, reasons = decode(parse_ddl("x decimal(38, 6)"), [f'{{"x":"{number}"}}'.encode() for number in numbers])
    for number, row, reason in zip(numbers, rows, reasons, strict=True):
        with localcontext(prec=2000):
            rounded = number.quantize(Decimal("0.000001"), ROUND_HALF_UP)
        fits = abs(rounded) < 10**32
        assert (row["x"], reason is None) == ((rounded, True) if fits else (None, False))


# ---- single cases ----


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("1970-01-01", 0), ("2024-02-29", 19782), ("2024", 19723), ("2024-3", 19783), ("2024-3-1", 19783),
        ("-0001-01-01", -719893), ("2024-01-02T99", 19724), ("2024-01-02 x", 19724), (" 2024-01-02 ", 19724),
        ("2023-02-29", None), ("2024-13-01", None), ("2024-00-01", None), ("2024-01-32", None), ("2024-01-02x", None),
        ("24-01-02", None), ("2024-", None), ("", None), ("x", None), ("2024-001-02", None),
    ],
)  # fmt: skip
def test_dates_are_read_as_spark_casts_them(text: str, days: int | None) -> None:
    decoded = JsonDecoder(parse_ddl("d date")).decode(Payloads.of(pa.array([json.dumps({"d": text}).encode()])))
    assert decoded.arrays["d"].cast(pa.int32()).to_pylist() == [days]
    assert bool(decoded.malformed[0]) == (days is None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2024-01-02T03:04:05Z", "2024-01-02T03:04:05"),
        ("2024-01-02 03:04:05", "2024-01-02T03:04:05"),
        ("2024-1-2 3:4:5.1", "2024-01-02T03:04:05.100000"),
        ("2024-01-02T03:04:05.123456789+02:00", "2024-01-02T01:04:05.123456"),
        ("2024-01-02T03:04:05-0130", "2024-01-02T04:34:05"),
        ("2024-01-02T03:04:05+2", "2024-01-02T01:04:05"),
        ("2024-01-02T03:04:05 UTC", "2024-01-02T03:04:05"),
        ("2024-01-02T03:04:05GMT+2", "2024-01-02T01:04:05"),
        ("2024-01-02T03:04", "2024-01-02T03:04:00"),
        ("2024", "2024-01-01T00:00:00"),
        (1700000000, "2023-11-14T22:13:20"),
        (-1, "1969-12-31T23:59:59"),
        ("2024-01-02T24:00:00", None),
        ("2024-01-02T03", None),
        ("2024-01-02T03:04:05 Mars/Phobos", None),
        ("2024-01-02T03:04:05+19:00", None),
        ("2024-02-30", None),
        (1.5, None),
        (True, None),
        (10**18, None),
    ],
)
def test_timestamps_are_read_as_spark_casts_them(value: Any, expected: str | None) -> None:
    rows, reasons = decode(parse_ddl("t timestamp"), [json.dumps({"t": value}).encode()])
    wanted = None if expected is None else datetime.fromisoformat(expected).replace(tzinfo=UTC)
    assert rows == [{"t": wanted}]
    assert (reasons == [None]) == (expected is not None)


def test_local_timestamp_takes_no_zone() -> None:
    schema = StructType([StructField("t", TimestampNTZType())])
    rows, reasons = decode(schema, [b'{"t":"2024-01-02T03:04:05"}', b'{"t":"2024-01-02T03:04:05Z"}', b'{"t":5}'])
    assert [row["t"] for row in rows] == [datetime(2024, 1, 2, 3, 4, 5), None, None]
    assert [reason is None for reason in reasons] == [True, False, False]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=20), min_size=1))
def test_binary_is_base64(values: list[bytes]) -> None:
    schema = StructType([StructField("b", BinaryType())])
    payloads = [b'{"b":"%b"}' % b64encode(value) for value in values]
    rows, _ = decode(schema, payloads)
    assert [row["b"] for row in rows] == values
    cut = [payload.replace(b'"}', b'*"}') for payload in payloads]
    assert all(decode(schema, cut)[1])


def test_escapes_are_read_in_values_of_every_type_that_is_written_in_quotes() -> None:
    r"""PHP writes `/` as `\/`, Gson `=` as `\u003d`."""
    payload = (
        rb'{"b": "YQ\u003d\u003d", "c": "\/\/8=", "d": "1\u002e50", "e": "2024\u002d01-02", '
        rb'"f": "2024-01-02T03\u003a04:05Z", "g": ["\/w=="]}'
    )
    schema = parse_ddl("b binary, c binary, d decimal(9,2), e date, f timestamp, g array<binary>")
    (row,), reasons = decode(schema, [payload])
    assert reasons == [None]
    assert row == {
        "b": b"a",
        "c": b"\xff\xff",
        "d": Decimal("1.50"),
        "e": date(2024, 1, 2),
        "f": datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC),
        "g": [b"\xff"],
    }


def test_reasons_name_the_place() -> None:
    payloads = [
        b'{"u":{"tags":[1]}}',
        b'{"u":{"tags":[1, nul]}}',
        b"[1]",
        b'{"u":{}} {}',
        b"\xff",
        b'{"u":{"tags":7}}',
    ]
    _, reasons = decode(parse_ddl("u struct<tags: array<int>>, n int"), payloads)
    assert reasons == [
        None,
        "it is not valid JSON at byte 17",
        "it is not a JSON object",
        "the JSON object is followed by more bytes, from byte 9 on",
        "it is not valid UTF-8",
        "field u.tags is array<int>, and the value at byte 13 is not",
    ]


def test_nesting_beyond_the_limit_is_malformed_and_harms_nobody() -> None:
    deep = [b'{"x":%b%b}' % (b"[" * levels, b"]" * levels) for levels in (900, 1001, 100_000)]
    _, reasons = decode(parse_ddl("a int"), [*deep, b'{"a":1}'])
    assert [reason is None for reason in reasons] == [True, False, False, True]


def test_single_quotes_and_escaped_keys_are_read_as_spark_reads_them() -> None:
    rows, reasons = decode(parse_ddl("`é` int, s string"), [b"{'\\u00e9': 1, 's': 'it\\'s \"so\"'}", b'{"\\u00E9":2}'])
    assert rows == [{"é": 1, "s": 'it\'s "so"'}, {"é": 2, "s": None}]
    assert reasons == [None, None]


@pytest.mark.long
def test_without_the_library_the_same_comes_out() -> None:
    payload = b'{"a":[1.5,"x"],"b":"\\u00e9","c":12345.678901234567890}'
    schema = "a array<double>, b string, c double"
    program = f"""
from tests.unit.connector.payload.test_json import decode, parse_ddl
print(decode(parse_ddl({schema!r}), [{payload!r}]))
"""
    environment = os.environ | {"NATSLOG_KERNELS_FILE": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    assert done.stdout.strip() == repr(decode(parse_ddl(schema), [payload]))
