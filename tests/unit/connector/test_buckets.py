"""Rows of a key-value bucket, from stored batches."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from natslog.arrow.schema import HEADERS_TYPE, MESSAGE_SCHEMA
from natslog.errors import ConfigError
from pyspark_natslog.source.buckets import Bucket, operations_of


def headers(*rows: dict[str, str] | None) -> pa.Array:
    shown = [None if row is None else [{"key": key, "value": value} for key, value in row.items()] for row in rows]
    return pa.array(shown, HEADERS_TYPE)


def test_operations_are_those_of_the_header() -> None:
    some = headers(
        None, {}, {"A": "DEL"}, {"KV-Operation": "DEL"}, {"A": "b", "KV-Operation": "PURGE"}, {"KV-Operation": "x"}
    )
    assert operations_of(some).to_pylist() == ["PUT", "PUT", "PUT", "DEL", "PURGE", "PUT"]
    assert operations_of(some[3:5]).to_pylist() == ["DEL", "PURGE"]
    assert operations_of(headers(None, None)).to_pylist() == ["PUT", "PUT"]
    assert operations_of(headers()).to_pylist() == []


@pytest.mark.parametrize("with_deleted", [False, True])
def test_rows_are_keys_and_revisions(with_deleted: bool) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        {"offset": 4, "timestamp": at, "subject": "$KV.b.ä.x", "value": b"1"},
        {
            "offset": 7,
            "timestamp": at,
            "subject": "$KV.b.y",
            "value": b"",
            "headers": [{"key": "KV-Operation", "value": "DEL"}],
        },
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=MESSAGE_SCHEMA)
    found = Bucket("b", with_deleted).rows(batch).select(["key", "revision", "operation", "value"]).to_pylist()
    expected = [
        {"key": "ä.x", "revision": 5, "operation": "PUT", "value": b"1"},
        {"key": "y", "revision": 8, "operation": "DEL", "value": b""},
    ]
    assert found == expected[: 1 + with_deleted]


def test_name_and_filter_are_checked() -> None:
    with pytest.raises(ConfigError, match="is not the name of a bucket"):
        Bucket("a.b", with_deleted=False)
    Bucket("b", with_deleted=False).check_filter("$KV.b.eu.*")
    with pytest.raises(ConfigError, match="has to begin with"):
        Bucket("b", with_deleted=False).check_filter("$KV.*.eu")
