"""The rescued column: what a JSON payload has beside the schema, compared with a plain reading of the document."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from natslog.arrow.payloads import Payloads
from natslog.errors import ConfigError
from pyspark_natslog.options import Given
from pyspark_natslog.payload import PAYLOAD_OPTIONS, PayloadOptions
from pyspark_natslog.payload.ddl import parse_ddl
from pyspark_natslog.payload.rescued import Rescuer

SCHEMA = parse_ddl("id BIGINT, a STRUCT<x: BIGINT, b: STRUCT<y: STRING>>, l ARRAY<STRUCT<z: INT>>, é INT")


def rescued(*payloads: bytes) -> list[str | None]:
    found = Rescuer(SCHEMA).rescued(Payloads.of(pa.array(payloads, pa.binary())))
    found.validate(full=True)
    return list(found.to_pylist())


def beside(document: dict[str, Any], schema: StructType) -> dict[str, Any]:
    """The members that the schema does not name, in objects that it names."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        if name not in schema.names:
            found[name] = value
        elif isinstance(value, dict) and isinstance(inner := schema[name].dataType, StructType):
            found |= {name: some} if (some := beside(value, inner)) else {}
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{"id":1}', None),
        (b'{"id":1,"u":2}', '{"u":2}'),
        (b'{ "u" : [1, {"q":2}] , "id":1,"a":{"k":"v","b":{"w":null}},"v":true}', None),
        (b'{"a":{"b":{"n":1}}}', '{"a":{"b":{"n":1}}}'),
        (b'{"l":[{"z":1,"u":2}]}', None),
        (b'{"a":5,"z":{"a":1}}', '{"z":{"a":1}}'),
        (b'{"\\u0069d":1,"\\u00e9":2,"\\u00ea":3}', '{"\\u00ea":3}'),
        (b"{'u':'it'}", "{'u':'it'}"),
        (b"", None),
        (b"  ", None),
        (b"[1]", None),
        (b'{"id":1,"u":2', None),
        (b'{"u":2} x', None),
        (b'{"u":2,}', None),
        (b'{"u":tru}', None),
        (b'{"u":"\xff"}', None),
    ],
)
def test_members_beside_the_schema(payload: bytes, expected: str | None) -> None:
    if payload.startswith(b'{ "u"'):
        expected = '{"u":[1, {"q":2}],"a":{"k":"v","b":{"w":null}},"v":true}'
    assert rescued(b'{"w":0}', payload, b'{"w":1}') == ['{"w":0}', expected, '{"w":1}'], "a row does not change others"


names = st.sampled_from(["id", "a", "b", "l", "x", "y", "é", "u", "v", 'q"t', "\\"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.lists(st.dictionaries(names, values, max_size=5), max_size=8), st.booleans())
def test_equal_to_a_plain_reading(documents: list[dict[str, Any]], is_ascii: bool) -> None:
    texts = [json.dumps(one, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass") for one in documents]
    usable = [(text, one) for text, one in zip(texts, documents, strict=True) if _is_utf8(text)]
    found = rescued(*[text for text, _ in usable])
    assert [{} if one is None else json.loads(one) for one in found] == [beside(one, SCHEMA) for _, one in usable]


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40) | st.text('{}[]":,\\u0ab1 t', max_size=40).map(str.encode), max_size=6))
def test_any_bytes_give_null_or_a_part_of_the_payload(payloads: list[bytes]) -> None:
    for payload, found in zip(payloads, rescued(*payloads), strict=True):
        assert found is None or len(found.encode()) <= len(payload)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"payloadFormat": "avro"}, "option rescuedColumn requires payloadFormat json, and payloadFormat is avro"),
        ({"rescuedColumn": ""}, "option rescuedColumn: it is empty"),
        ({"rescuedColumn": "ID"}, "there is a column 'ID' already"),
        ({"rescuedColumn": "subject"}, "there is a column 'subject' already"),
        ({"payloadColumn": "p", "rescuedColumn": "p"}, "there is a column 'p' already"),
    ],
)
def test_wrong_options(options: dict[str, str], words: str) -> None:
    base = {"payloadFormat": "json", "payloadSchema": "id BIGINT", "rescuedColumn": "_rescued"}
    with pytest.raises(ConfigError, match=words):
        PayloadOptions.parse(Given(base | options, PAYLOAD_OPTIONS), ["subject"])
