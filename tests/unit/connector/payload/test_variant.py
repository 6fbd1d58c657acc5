"""Variants of JSON payloads: byte for byte those of PySpark's own code (`VariantVal.parseJson`)."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import VariantVal

from natslog.arrow.payloads import Payloads
from natslog.errors import ConfigError
from pyspark_natslog.options import Given
from pyspark_natslog.payload import PAYLOAD_OPTIONS, PayloadOptions
from pyspark_natslog.payload.rows import Decoded
from pyspark_natslog.payload.variant_rows import VariantDecoder


def decoded(*payloads: bytes) -> Decoded:
    found = VariantDecoder().decode(Payloads.of(pa.array(payloads, pa.binary())))
    found.arrays["value"].validate(full=True)
    return found


def variants(*payloads: bytes) -> list[Any]:
    return [
        None if one is None else (one["value"], one["metadata"])
        for one in decoded(*payloads).arrays["value"].to_pylist()
    ]


def expected(payload: bytes) -> tuple[bytes, bytes]:
    found = VariantVal.parseJson(payload.decode())
    return bytes(found.value), bytes(found.metadata)


MANY = json.dumps({f"k{at * 7919 % 1000}": at for at in range(1000)})
EXAMPLES = [
    "null", "true", "false", '"x"', "{}", "[]", "0", "-0", "127", "128", "-128", "-129", "32768", "2147483648",
    "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809", "1.5", "-0.0", "0.10",
    "123456789.5", "0.1234567890123456789", "12345678901234567890123456789012345678",
    "123456789012345678901234567890123456789", "1e3", "1.5E-7", "1.7976931348623157e308", "3.141592653589793238e0",
    '{"x":1.2345678901234567e-7,"y":[9.87654321098765432e30,1e23]}',
    "0.00000000000000000000000000000000000001", "0.000000000000000000000000000000000000001", "[1e400]",
    '{"b":1,"a":{"b":2,"c":[1,{"b":null}]}}', '"\\u00e9\\ud83d\\ude00\\n"', '{"\\u0062":1,"a":2}',
    json.dumps("x" * 63), json.dumps("x" * 64), json.dumps("\u00e9" * 40),
    json.dumps("\n" * 40), json.dumps(list(range(300))), MANY, json.dumps({"k": "x" * 70_000, "a": [[]] * 300}),
    "[" * 500 + "]" * 500, ' { "a" : [ 1 , 2 ] } ',
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text[:30])
def test_variants_are_those_of_pyspark(text: str) -> None:
    assert variants(b'{"first":1}', text.encode(), b"1")[1] == expected(text.encode())


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b'{"a":1,"a":2}', "an object has a member twice"),
        (b'{"a":{"b":1,"c":2,"\\u0062":3}}', "an object has a member twice"),
        (b'{"x":1.2345678901234567e-7,"a":1,"a":2}', "an object has a member twice"),
        (b'{"a":1} {"a":2}', "the value is followed by more bytes"),
        *((text, "it is not valid JSON") for text in (
            b"{'a':1}", b"NaN", b"-Infinity", b'{"a":NaN}', b'{"a":1,}', b"[1,]", b"[1 2]", b"tru", b"01", b"+1", b"1.",
            b"-",
            b'"\\\'"', b'{"\\\'":1}', b'"x', b'{"a"}', b'{"a":}', b"{1:2}", b"[", b"}", b'"\x01"', b'"\xff"',
            b"[1.2345678901234567e-7,NaN]", b"[1.2345678901234567e-7,-Infinity]",
            b'"\\ud83d"', b'"\\ude00\\ud83d"', b'{"\\ud83dx":1}', b"[" * 1001 + b"]" * 1001,
        )),
    ],
    ids=lambda one: str(one)[:30],
)  # fmt: skip
def test_what_is_no_json_is_malformed_and_the_others_are_read(payload: bytes, reason: str) -> None:
    found = decoded(b"1", payload, b"2")
    assert found.malformed.tolist() == [False, True, False]
    assert found.reason(1) == reason
    assert variants(b"1", payload, b"2") == [expected(b"1"), None, expected(b"2")]


def test_backslashes_before_quotes_are_characters() -> None:
    text = b'{"a\\\\":"\\\\\'"}'
    assert variants(text) == [expected(text)]


def test_blank_payloads_are_null_and_not_malformed() -> None:
    found = decoded(b"", b" \n")
    assert not found.malformed.any()
    assert found.arrays["value"].null_count == 2


KEYS = st.text(st.characters(max_codepoint=0xD7FF), max_size=3)  # Python sorts others than Java does
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False),
        st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str), st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=25), st.lists(st.integers(), min_size=260)
    ),
    max_leaves=30,
)  # fmt: skip


@pytest.mark.long
@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(VALUES, st.booleans()), max_size=6))
def test_random_documents(documents: list[tuple[Any, bool]]) -> None:
    payloads = []
    for document, is_ascii in documents:
        payloads.append(json.dumps(document, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass"))
    assert variants(*payloads) == [expected(payload) for payload in payloads]


def test_options() -> None:
    given_options = Given(
        {"payloadFormat": "variant", "columnNameOfCorruptRecord": "bad"}, ("payloadFormat", *PAYLOAD_OPTIONS)
    )
    options = PayloadOptions.parse(given_options, ["offset"])
    assert options.columns.simpleString() == "struct<value:variant,bad:string>"
    for name, value in (("payloadSchema", "a INT"), ("payloadColumn", "p"), ("rescuedColumn", "r")):
        with pytest.raises(ConfigError, match=f"option {name} requires payloadFormat json"):
            PayloadOptions.parse(Given({"payloadFormat": "variant", name: value}, PAYLOAD_OPTIONS), ["offset"])
    with pytest.raises(ConfigError, match="columnNameOfCorruptRecord"):
        PayloadOptions.parse(
            Given({"payloadFormat": "variant", "columnNameOfCorruptRecord": "value"}, PAYLOAD_OPTIONS), ["offset"]
        )
