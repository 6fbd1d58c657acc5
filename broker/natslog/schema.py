"""The one message schema, on disk, on the wire and (with `stream` in front) in Spark."""

from __future__ import annotations

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
