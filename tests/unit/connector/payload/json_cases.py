"""What tests of the decoders of JSON share: values and payloads that two of them may read differently, and what makes
their results equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
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
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pyspark_natslog.payload.rows import Decoded

SCALARS: list[DataType] = [
    BooleanType(), ByteType(), ShortType(), IntegerType(), LongType(), FloatType(), DoubleType(), StringType(),
    DateType(), TimestampType(), TimestampNTZType(),
]  # fmt: skip
_BITS = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}


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
