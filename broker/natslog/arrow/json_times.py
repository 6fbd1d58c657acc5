"""Dates and timestamps that `pyarrow.json` has read as strings: Arrow's casts, for texts that they read as Spark does.

Only the usual forms are converted: `yyyy-mm-dd`, and `yyyy-mm-ddThh:mm[:ss[.digits]]` (or with a blank) with `Z`, with
an offset `+hh:mm` or without a zone. Arrow's casts also accept what Spark's do not (hours without minutes, offsets of
18 hours and more), and Spark's accept far more than Arrow's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

_LENGTH_TO_MINUTE = 16
_SIGNS = (ord("+"), ord("-"))
_FIRST_HOUR_OFF = 18
_NAIVE = pa.timestamp("us")


def parsed_type(kind: Any) -> Any:
    """The Arrow type with strings in the place of dates and timestamps."""
    if pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([_parsed_field(kind.field(at)) for at in range(kind.num_fields)])
    if pa.types.is_list(kind):
        return pa.list_(_parsed_field(kind.value_field))
    return kind


def _parsed_field(inner: Any) -> Any:
    return inner.with_type(parsed_type(inner.type))


def with_times(array: Any, kind: Any) -> Any | None:
    """An array of `parsed_type(kind)` as one of `kind`; None if a text has a form that is left to the kernel."""
    if array.type == kind:
        return array
    if not len(array):
        return pa.nulls(0, kind)
    if pa.types.is_string(array.type):
        return _cast(array, kind) if pa.types.is_date32(kind) else _timestamps(array, kind)
    buffers = array.buffers()
    if pa.types.is_struct(kind):
        fields = [kind.field(at).type for at in range(kind.num_fields)]
        children = [with_times(array.field(at), inner) for at, inner in enumerate(fields)]
        buffers = buffers[:1]
    else:
        children = [with_times(array.values, kind.value_type)]
        buffers = buffers[:2]
    if any(child is None for child in children):
        return None
    assert array.offset == 0, "a parsed array is not a slice"
    return pa.Array.from_buffers(kind, len(array), buffers, array.null_count, children=children)


def _timestamps(texts: Any, kind: Any) -> Any | None:
    """Without a zone they are UTC, as in the kernel."""
    starts, ends, held = _spans(texts)
    if (ends - starts < _LENGTH_TO_MINUTE).any() or (held[starts + 13] != ord(":")).any():
        return None
    is_zulu, has_sign = held[ends - 1] == ord("Z"), np.isin(held[ends - 6], _SIGNS)
    if kind.tz is None or not (is_zulu.any() or has_sign.any()):
        naive = _cast(texts, _NAIVE)
        return naive if naive is None else naive.view(kind)
    hours = (held[ends - 5].astype(np.int64) - 48) * 10 + held[ends - 4] - 48
    is_near = has_sign & (hours < _FIRST_HOUR_OFF)
    return _cast(texts, kind) if (is_zulu | is_near).all() else None


def _spans(texts: Any) -> tuple[Any, Any, Any]:
    """(first bytes, ends, bytes) of the texts that are not empty; nulls are empty, and casts refuse empty texts."""
    _, offsets, held = texts.buffers()
    edges = np.frombuffer(offsets, np.int32)[: len(texts) + 1]
    held = np.empty(0, np.uint8) if held is None else np.frombuffer(held, np.uint8)
    kept = np.flatnonzero(np.diff(edges))
    return edges[kept], edges[kept + 1], held


def _cast(texts: Any, kind: Any) -> Any | None:
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        return None
