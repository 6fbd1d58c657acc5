"""Rows with a key and a null value become tombstones; all other rows stay as they are."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.arrow.schema import HEADERS_TYPE
from natslog.errors import ConfigError
from pyspark_natslog.sink.http_options import HttpSinkOptions
from pyspark_natslog.sink.options import SinkOptions
from pyspark_natslog.sink.tombstones import as_tombstones, check_key_column

MARK = {"key": "Natslog-Tombstone", "value": "true"}

Pairs = list[dict[str, str]] | None

PAIRS = st.one_of(
    st.none(),
    st.lists(st.sampled_from([{"key": "a", "value": "1"}, {"key": "Natslog-Tombstone", "value": ""}]), max_size=3),
)
ROWS = st.lists(
    st.tuples(st.sampled_from([None, b"", b"x"]), st.sampled_from([None, b"k"]), PAIRS), min_size=1, max_size=9
)


def expected(value: bytes | None, key: bytes | None, pairs: Pairs) -> tuple[bytes | None, Pairs]:
    if value is not None or key is None:
        return value, pairs
    has_mark = any(pair["key"] == MARK["key"] for pair in pairs or [])
    return b"", pairs if has_mark else [*(pairs or []), MARK]


@given(rows=ROWS, start=st.integers(0, 3))
def test_null_values_with_a_key_are_tombstones(rows: list[tuple[Any, Any, Any]], start: int) -> None:
    values, keys, headers = (list(column) for column in zip(*rows, strict=True))
    columns = [pa.array(values, pa.binary()), pa.array(keys, pa.binary()), pa.array(headers, HEADERS_TYPE)]
    found = as_tombstones(*(column.slice(start) for column in columns))
    assert found[1].type == HEADERS_TYPE
    wanted = [expected(*row) for row in rows[start:]]
    assert found[0].to_pylist() == [value for value, _ in wanted]
    assert found[1].to_pylist() == [pairs for _, pairs in wanted]


def test_columns_of_strings_and_without_headers() -> None:
    values, headers = as_tombstones(pa.array(["a", None]), pa.array([None, "k"]), None)
    assert values.to_pylist() == ["a", ""]
    assert headers.to_pylist() == [None, [MARK]]


def test_option_is_checked() -> None:
    assert not SinkOptions.parse({"subject": "a"}).tombstones
    assert SinkOptions.parse({"subject": "a", "tombstones": "true"}).tombstones
    assert HttpSinkOptions.parse({"path": "http", "stream": "s", "tombstones": "true"}).tombstones
    for parse, options in ((SinkOptions.parse, {}), (HttpSinkOptions.parse, {"path": "http", "stream": "s"})):
        with pytest.raises(ConfigError, match="tombstones"):
            parse(options | {"tombstones": "maybe"})
    with pytest.raises(ConfigError, match="column key"):
        check_key_column(("value", "subject"))
