"""Messages, and the rows of queries, as lines of JSON, the same from the HTTP API and the command line.

Theory of operation. Whole columns become text by Arrow's kernels, which hold no lock meanwhile; only a column that has
bytes that are no UTF-8, or a type that no message has (of a query), is written row by row.
"""

from __future__ import annotations

import base64
import json
import math
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_ESCAPED = r'["\\\x00-\x1f]'
_CONTROL = r"[\x00-\x1f]"
_ESCAPES = [(char, json.dumps(char)[1:-1]) for char in ("\\", '"', "\n", "\r", "\t")]
_RARE_ESCAPES = [(char, json.dumps(char)[1:-1]) for char in map(chr, range(0x20)) if char not in "\n\r\t"]


def json_lines(messages: pa.RecordBatch) -> bytes:
    """One line of each message, with the batch's columns as members. Bytes that are UTF-8 stand as text under their
    name, others in base64 under `…_base64`.
    """
    if not messages.num_rows:
        return b""
    columns = zip(messages.schema.names, messages.columns, strict=True)
    members = [_members(name, column) for name, column in columns]
    lines = _joined("{", _joined(*members, separator=", "), "}\n")
    _, offsets, data = lines.buffers()
    ends = memoryview(offsets).cast("i")
    return bytes(memoryview(data)[ends[lines.offset] : ends[lines.offset + len(lines)]])


def _members(name: str, column: pa.Array[Any]) -> pa.Array[Any]:
    """`"name": value` for each row."""
    if pa.types.is_binary(column.type):
        try:
            column = pc.cast(column, pa.string())
        except pa.ArrowInvalid:  # some are no UTF-8
            return pa.array([_member_of_bytes(name, value) for value in column.to_pylist()], pa.string())
    return pc.binary_join_element_wise(
        f"{json.dumps(name)}: ", _as_json(column), "", null_handling="replace", null_replacement="null"
    )


def _member_of_bytes(name: str, value: bytes | None) -> str:
    try:
        text = None if value is None else value.decode()
    except UnicodeDecodeError:
        name, text = f"{name}_base64", base64.b64encode(value or b"").decode()
    return f"{json.dumps(name)}: {json.dumps(text, ensure_ascii=False)}"


def _as_json(column: pa.Array[Any]) -> pa.Array[Any]:
    """Null where the column is."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return _quoted(pc.replace_substring(pc.cast(column, pa.string()), " ", "T", max_replacements=1))
    if pa.types.is_string(kind):
        return _quoted(_escaped(column))
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        items = pc.binary_join_element_wise(
            _of_struct(column.flatten()), "", null_handling="replace", null_replacement="null"
        )
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cast(pc.cumulative_sum(lengths), pa.int32())])
        texts = _joined("[", pc.binary_join(pa.ListArray.from_arrays(offsets, items), ", "), "]")
        return pc.if_else(pc.is_null(column), pa.scalar(None, pa.string()), texts)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return pc.cast(column, pa.string())
    return pa.array([None if value is None else value_json(value) for value in column.to_pylist()], pa.string())


def value_json(value: Any) -> str:
    """Of any type that a query may return. A number that JSON cannot express is null."""
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, float):
        return json.dumps(value) if math.isfinite(value) else "null"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(str(name))}: {value_json(one)}' for name, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_json, value))}]"
    if isinstance(value, bytes):
        try:
            return json.dumps(value.decode(), ensure_ascii=False)
        except UnicodeDecodeError:
            return json.dumps(base64.b64encode(value).decode())
    if isinstance(value, datetime):
        return json.dumps(value.isoformat().replace("+00:00", "Z"))
    return json.dumps(value, ensure_ascii=False, default=str)


def _of_struct(items: pa.StructArray) -> pa.Array[Any]:
    members = [_members(field.name, column) for field, column in zip(items.type, items.flatten(), strict=True)]
    texts = _joined("{", _joined(*members, separator=", "), "}")
    return pc.if_else(pc.is_null(items), pa.scalar(None, pa.string()), texts)


def _escaped(texts: pa.Array[Any]) -> pa.Array[Any]:
    for pattern, escapes in ((_ESCAPED, _ESCAPES), (_CONTROL, _RARE_ESCAPES)):
        if not pc.any(pc.match_substring_regex(texts, pattern)).as_py():
            return texts
        for char, escape in escapes:
            texts = pc.replace_substring(texts, char, escape)
    return texts


def _quoted(texts: pa.Array[Any]) -> pa.Array[Any]:
    return _joined('"', texts, '"')


def _joined(*parts: Any, separator: str = "") -> pa.Array[Any]:
    return pc.binary_join_element_wise(*parts, separator)
