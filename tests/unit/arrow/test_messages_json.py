"""Lines of JSON by whole columns say the same as one message after another would."""

from __future__ import annotations

import base64
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow.messages_json import json_lines
from natslog.arrow.schema import HEADERS_TYPE, MESSAGE_SCHEMA
from natslog.times import format_timestamp_us

TEXT = st.text(st.characters(codec="utf-8"), max_size=8) | st.text('"\\\n\r\t\x00\x1f\x7f\u2028aé', max_size=8)
BYTES = TEXT.map(str.encode) | st.binary(max_size=8)
HEADERS = st.none() | st.lists(st.builds(lambda key, value: {"key": key, "value": value}, TEXT, TEXT), max_size=3)
TIMES_US = st.integers(-2_208_988_800_000_000, 4_102_444_800_000_000)
ROWS = st.lists(
    st.tuples(st.integers(0, 2**62), TIMES_US, TEXT, st.none() | BYTES, HEADERS, BYTES), min_size=0, max_size=6
)


def expected(row: dict[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for name, value in row.items():
        if not isinstance(value, bytes):
            line[name] = value
            continue
        try:
            line[name] = value.decode()
        except UnicodeDecodeError:
            line[f"{name}_base64"] = base64.b64encode(value).decode()
    return line


def batch_of(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(MESSAGE_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, MESSAGE_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=MESSAGE_SCHEMA)


@pytest.mark.long
@settings(deadline=None, max_examples=120)
@given(ROWS, st.integers(0, 3))
def test_lines_are_those_of_single_messages(rows: list[tuple[Any, ...]], skipped: int) -> None:
    lines = json_lines(batch_of(rows).slice(skipped)).decode().split("\n")
    assert lines.pop() == ""
    wanted = [
        expected(dict(zip(MESSAGE_SCHEMA.names, row, strict=True)) | {"timestamp": format_timestamp_us(row[1])})
        for row in rows[skipped:]
    ]
    assert [json.dumps(one, ensure_ascii=False) for one in wanted] == lines


def test_only_the_columns_of_the_batch_are_written() -> None:
    row = (7, 1_700_000_000_000_000, "a.b", None, None, b"x")
    assert json_lines(batch_of([row]).select(["value", "offset"])) == b'{"value": "x", "offset": 7}\n'
    assert datetime.fromtimestamp(1_700_000_000, UTC).year == 2023
    assert json_lines(batch_of([row]).select(["timestamp"])) == b'{"timestamp": "2023-11-14T22:13:20.000000Z"}\n'


def test_null_headers_and_empty_headers_differ() -> None:
    headers = pa.array([None, [], [{"key": "a", "value": None}]], HEADERS_TYPE)
    batch = pa.RecordBatch.from_arrays([headers], names=["headers"])
    assert json_lines(batch).splitlines() == [
        b'{"headers": null}',
        b'{"headers": []}',
        b'{"headers": [{"key": "a", "value": null}]}',
    ]


def test_types_that_only_queries_return_are_valid_json() -> None:
    row = {
        "whole": 1,
        "price": Decimal("1.20"),
        "share": 0.5,
        "none": float("nan"),
        "day": date(2026, 1, 2),
        "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "is_new": True,
        "tags": ["a", None],
        "place": {"lat": 1.5, "name": 'x"y'},
        "digest": b"\xff",
    }
    batch = pa.RecordBatch.from_pylist([row, dict.fromkeys(row)], schema=pa.RecordBatch.from_pylist([row]).schema)
    first, second = map(json.loads, json_lines(batch).splitlines())
    del row["digest"]
    times = {"day": "2026-01-02", "at": "2026-01-02T03:04:05.000000Z"}
    assert first == row | times | {"price": 1.2, "none": None, "digest_base64": "/w=="}
    assert set(second.values()) == {None}
