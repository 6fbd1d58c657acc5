"""Detects in a sample which field of JSON messages is a measurement, and which one is its source.

CSV rows published by `natslog pub --format csv --strings` are JSON objects of texts, so text that parses as a number
counts as one. A field is numeric if every value of it is. A meaningful name (`magnitude`, `value`, …) takes precedence
over the order.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

_MEASUREMENTS = ("magnitude", "value", "reading", "level", "percent", "amount", "price", "temperature", "speed")
_SOURCES = ("source", "sensor", "device", "host", "station", "region", "site", "category", "kind", "type")
_TOKEN = re.compile(r"[^\s.*>\x00-\x1f\x7f]+")
_MOST_SOURCES = 1000


def json_rows(values: Iterable[bytes]) -> list[dict[str, Any]]:
    """The values that are JSON objects."""
    rows = []
    for value in values:
        try:
            row = json.loads(value)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def as_number(value: Any) -> float | None:
    """A finite number, or None; text that parses as a number is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def measurement_field(rows: Sequence[Row]) -> str | None:
    """The field to aggregate: the first numeric one with a meaningful name, else the first that is no identifier."""
    numeric = [name for name in _names(rows) if _is_numeric(rows, name)]
    speaking = [name for name in numeric if any(word in name.lower() for word in _MEASUREMENTS)]
    plain = [name for name in numeric if not name.lower().endswith(("id", "time", "timestamp"))]
    return next(iter([*speaking, *plain]), None)


def source_field(rows: Sequence[Row]) -> str | None:
    """The field to group by: few values, each valid as one token of a subject; None if there is none."""
    fit = [name for name in _names(rows) if not _is_numeric(rows, name) and _is_source(rows, name)]
    speaking = [name for word in _SOURCES for name in fit if word == name.lower()]
    return next(iter([*speaking, *fit]), None)


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _is_numeric(rows: Sequence[Row], name: str) -> bool:
    given = [row[name] for row in rows if row.get(name) not in (None, "")]
    return bool(given) and all(as_number(value) is not None for value in given)


def _is_source(rows: Sequence[Row], name: str) -> bool:
    values = {row.get(name) for row in rows if isinstance(row.get(name), (str, type(None)))}
    few = len(values) <= min(_MOST_SOURCES, max(2, len(rows) // 2))
    return few and all(value is not None and _TOKEN.fullmatch(value) for value in values)
