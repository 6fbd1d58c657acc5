"""A message as one line of JSON, the same from the HTTP API and the command line."""

from __future__ import annotations

import base64
import json
from typing import Any

import pyarrow as pa

from natslog.times import format_timestamp_us


def json_line(row: dict[str, Any]) -> bytes:
    """Bytes that are UTF-8 stand as text under their name, others in base64 under `…_base64`."""
    line: dict[str, Any] = {}
    for name, value in row.items():
        if name == "timestamp":
            line[name] = format_timestamp_us(_microseconds(value))
        elif isinstance(value, bytes):
            try:
                line[name] = value.decode()
            except UnicodeDecodeError:
                line[f"{name}_base64"] = base64.b64encode(value).decode()
        else:
            line[name] = value
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _microseconds(moment: Any) -> int:
    return int(pa.scalar(moment, pa.timestamp("us", tz="UTC")).value)
