"""The one message schema, on disk, on the wire and (with `stream` in front) in Spark."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))

MESSAGE_SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("subject", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("headers", HEADERS_TYPE),
        pa.field("value", pa.binary(), nullable=False),
    ]
)
"""Columns of a stream: `offset` int64, `timestamp` µs UTC, `subject`, `key`, `headers`, `value`."""

COLUMNS = tuple(MESSAGE_SCHEMA.names)


def rows_of_items(lists: pa.Array[Any]) -> npt.NDArray[np.int64]:
    """The row of each item of `lists.flatten()`. (`pc.list_parent_indices` counts what lies under null lists too.)"""
    import pyarrow.compute as pc  # takes long to import, and most readers do not need it

    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return np.repeat(np.arange(len(lists)), lengths)
