"""Rows with a null value as tombstones: messages that delete their key in a compacted stream (`tombstones=true`).

A tombstone is a message with a key, the header `Natslog-Tombstone` and an empty value. Rows that have neither a value
nor a key stay as they are, and are refused by the checks of all rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.schema import HEADERS_TYPE, rows_of_items
from natslog.errors import ConfigError
from natslog.model import TOMBSTONE_HEADER

_MARK = pa.array([{"key": TOMBSTONE_HEADER, "value": "true"}], HEADERS_TYPE.value_type)


def check_key_column(names: tuple[str, ...]) -> None:
    """On the driver, before the job starts. Raises ConfigError: no row could be a tombstone."""
    if "key" not in names:
        raise ConfigError(
            "option tombstones requires a column key (string or binary): a tombstone deletes a key", option="tombstones"
        )


def as_tombstones(values: Any, keys: Any, headers: Any | None) -> tuple[Any, Any]:
    """The columns `values` and `headers` (None: there is none) where rows with a key and a null value are tombstones.
    `headers` is a column in the result.
    """
    if headers is None:
        headers = pa.nulls(len(values), HEADERS_TYPE)
    if not values.null_count:
        return values, headers
    are_tombstones = np.asarray(pc.and_(pc.is_null(values), pc.is_valid(keys)))
    empty = pa.scalar(b"" if pa.types.is_binary(values.type) else "", values.type)
    filled = pc.if_else(pa.array(are_tombstones), empty, values)
    return filled, _marked(headers, are_tombstones & ~_are_marked(headers))


def _are_marked(headers: Any) -> Any:
    """Rows that have the header already."""
    marks = np.zeros(len(headers), np.bool_)
    are_named = pc.fill_null(pc.equal(headers.flatten().field("key"), TOMBSTONE_HEADER), False)
    marks[rows_of_items(headers)[np.asarray(are_named)]] = True
    return marks


def _marked(headers: Any, wanted: Any) -> Any:
    """With one pair more at the end of each wanted row."""
    pairs = headers.flatten()
    lengths = np.asarray(pc.fill_null(pc.list_value_length(headers), 0)).astype(np.int64)
    items = np.insert(np.arange(len(pairs)), np.cumsum(lengths)[wanted], len(pairs))
    ends = np.concatenate([[0], np.cumsum(lengths + wanted)]).astype(np.int32)
    are_null = np.asarray(pc.is_null(headers)) & ~wanted
    found = pa.concat_arrays([pairs.cast(_MARK.type), _MARK]).take(pa.array(items))
    return pa.ListArray.from_arrays(pa.array(ends), found, mask=pa.array(are_null)).cast(HEADERS_TYPE)
