"""Dates, timestamps and decimals that `pyarrow.json` has read as texts or numbers: as columns of their types.

These are the rules of Spark's `from_json`, as `kernels_scalars` has them. Texts in the usual forms of dates and
timestamps are converted by Arrow's casts, which are faster: `yyyy-mm-dd`, and `yyyy-mm-ddThh:mm[:ss[.digits]]` (or with
a blank) with `Z`, with an offset `+hh:mm` or without a zone, with at most six digits. Arrow's casts also accept what
Spark's do not (hours without minutes, offsets of 18 hours and more); all such texts are left to the kernel.

A number is the seconds of a timestamp. As a decimal it is rounded half up from the shortest text that is the same
double.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.wire import native
from natslog.wire.kernels_scalars import DATE_TEXT, DECIMAL_TEXT, NAIVE_TEXT, TIMESTAMP_TEXT

_LENGTH_TO_MINUTE = 16
_SIGNS = (ord("+"), ord("-"))
_FIRST_HOUR_OFF = 18
_NAIVE = pa.timestamp("us")
_US_PER_S = 1_000_000
_MOST_SECONDS = (2**63 - 1) // _US_PER_S
_MOST_US_IN_NS = (2**63 - 1) // 1000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31


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


def with_values(array: Any, kind: Any, *, in_calendar: bool = False) -> tuple[Any, Any]:
    """What was parsed, as an array of `kind`, and a bool per row: whether it has no other values than such.

    Args:
        array: not a slice; of `kind` with other types in the place of scalars. Converted are strings to dates,
            timestamps and decimals, numbers to decimals, and int64 to timestamps with a zone.
        in_calendar: dates and timestamps beyond the years 1 to 9999, which Python and tables do not have, are none.
    """
    types = pa.types
    if array.type == kind or array.null_count == len(array):
        return array if array.type == kind else pa.nulls(len(array), kind), np.ones(len(array), bool)
    assert array.offset == 0, "a parsed array is not a slice"
    if types.is_struct(kind):
        children = [with_values(array.field(at), one.type, in_calendar=in_calendar) for at, one in enumerate(kind)]
        made = pa.StructArray.from_arrays([made for made, _ in children], fields=list(kind), mask=array.is_null())
        return made, np.all([good for _, good in children], axis=0)
    if types.is_list(kind):
        values, good_values = with_values(array.values, kind.value_type, in_calendar=in_calendar)
        good, starts = np.ones(len(array), bool), np.frombuffer(array.buffers()[1], np.int32)[: len(array) + 1]
        good[np.searchsorted(starts, np.flatnonzero(~good_values), side="right") - 1] = False
        return pa.Array.from_buffers(kind, len(array), array.buffers()[:2], array.null_count, children=[values]), good
    made, good = _scalars(array, kind)
    if in_calendar and (types.is_date32(kind) or types.is_timestamp(kind)):
        cells = made.cast(pa.date32()).view(pa.int32()).fill_null(0).to_numpy()
        good = good & (cells >= _FIRST_DAY) & (cells <= _LAST_DAY)
    return made, good


def _scalars(array: Any, kind: Any) -> tuple[Any, Any]:
    types, is_text = pa.types, pa.types.is_string(array.type)
    if types.is_timestamp(kind) and kind.tz is not None and types.is_int64(array.type):
        seconds = array.fill_null(0).to_numpy()
        good = (seconds >= -_MOST_SECONDS) & (seconds <= _MOST_SECONDS)
        return _array(np.where(good, seconds, 0) * _US_PER_S, good, _valid(array), kind)
    if types.is_decimal128(kind) and (is_text or types.is_floating(array.type)):
        return _parsed(array.cast(pa.string()), kind)
    if is_text and (types.is_date32(kind) or types.is_timestamp(kind)):
        fast = _cast(array, kind) if types.is_date32(kind) else _timestamps(array, kind)
        return _parsed(array, kind) if fast is None else (fast, np.ones(len(array), bool))
    return pa.nulls(len(array), kind), ~_valid(array)


def _valid(array: Any) -> Any:
    return pc.is_valid(array).to_numpy(zero_copy_only=False)


def _parsed(texts: Any, kind: Any) -> tuple[Any, Any]:
    """By the kernel."""
    _, edges, held = texts.buffers()
    edges = np.frombuffer(edges, np.int32)[: len(texts) + 1]
    text = np.empty(0, np.uint8) if held is None else np.frombuffer(held, np.uint8)
    precision = scale = 0
    if pa.types.is_decimal(kind):
        what, precision, scale = DECIMAL_TEXT, kind.precision, kind.scale
    elif pa.types.is_date32(kind):
        what = DATE_TEXT
    else:
        what = NAIVE_TEXT if kind.tz is None else TIMESTAMP_TEXT
    words, good = np.empty(len(texts) * (1 + (what == DECIMAL_TEXT)), np.int64), np.empty(len(texts), bool)
    native.parse_texts(text, edges, what, precision, scale, words, good)
    return _array(words.astype(np.int32) if what == DATE_TEXT else words, good, _valid(texts), kind)


def _array(cells: Any, good: Any, valid: Any, kind: Any) -> tuple[Any, Any]:
    """Args: cells: of dates, decimals, or timestamps in microseconds, whatever their unit is. valid: not null."""
    stored = kind
    if pa.types.is_timestamp(kind):
        stored = pa.timestamp("us", kind.tz)
        if kind.unit == "ns":
            good = good & (cells >= -_MOST_US_IN_NS) & (cells <= _MOST_US_IN_NS)
    bitmap = pa.py_buffer(np.packbits(good & valid, bitorder="little"))
    made = pa.Array.from_buffers(stored, len(valid), [bitmap, pa.py_buffer(cells)])
    return made.cast(kind, safe=False), good | ~valid


def _timestamps(texts: Any, kind: Any) -> Any | None:
    """Without a zone they are UTC, as in the kernel. None: some text is left to it."""
    starts, ends, held = _spans(texts)
    if (ends - starts < _LENGTH_TO_MINUTE).any() or (held[starts + 13] != ord(":")).any():
        return None
    is_zulu, has_sign = held[ends - 1] == ord("Z"), np.isin(held[ends - 6], _SIGNS)
    if kind.tz is None or not (is_zulu.any() or has_sign.any()):
        naive = _cast(texts, _NAIVE)
        return naive if naive is None else _cast(naive.view(pa.timestamp("us", kind.tz)), kind)
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
