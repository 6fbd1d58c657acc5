"""Durations and sizes as people write them: `7d`, `1h30m`, `250ms`, `10GiB`, `64 MB`; ranges as they read them."""

from __future__ import annotations

import re

from natslog.errors import InvalidRequest

_DURATION_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SIZE_BYTES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}
_PART = re.compile(r"([0-9]{1,13}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d|w)")
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*((?:[kmgt](?:i?b)?|b)?)", re.IGNORECASE)


def parse_duration_s(text: str | int | float, name: str = "duration") -> float:
    """Seconds in `7d`, `1h30m`, `250ms`; a bare number is seconds.

    Raises:
        InvalidRequest: not a duration, or not above zero.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        seconds = float(min(max(text, -1), 2**63))
    else:
        compact = str(text).strip().lower()
        parts = list(_PART.finditer(compact))
        if "".join(part.group(0) for part in parts) == compact and parts:
            seconds = sum(float(part.group(1)) * _DURATION_S[part.group(2)] for part in parts)
        elif re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", compact):
            seconds = float(compact)
        else:
            raise InvalidRequest(f"{name} {text!r} is not a duration: write 90s, 15m, 12h or 7d")
    if not 0 < seconds < 1e10:
        raise InvalidRequest(f"{name} {text!r} must be above zero and below 300 years")
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest exact form: 604800 → `7d`, 5400 → `90m`."""
    for unit in ("d", "h", "m", "s"):
        size = _DURATION_S[unit]
        if seconds >= size and seconds % size == 0:
            return f"{int(seconds // size)}{unit}"
    return f"{round(seconds * 1000)}ms"


def parse_size_bytes(text: str | int, name: str = "size") -> int:
    """Bytes in `10GiB`, `64MB`, `1g` (binary), `4096`.

    Raises:
        InvalidRequest: not a size, or not above zero.
    """
    match = _SIZE.fullmatch(str(text).strip())
    size_bytes = int(float(match.group(1)) * _SIZE_BYTES[match.group(2).lower()]) if match else 0
    if match is None or isinstance(text, bool) or not 0 < size_bytes < 2**63:
        raise InvalidRequest(f"{name} {text!r} is not a size above zero: write 500MB, 10GiB or a number of bytes")
    return size_bytes


def format_exact_size(size_bytes: int) -> str:
    """The shortest exact form, as `parse_size_bytes` reads it: 10737418240 → `10GiB`, 1500 → `1500B`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = _SIZE_BYTES[unit.lower()]
        if size_bytes >= size and size_bytes % size == 0:
            return f"{size_bytes // size}{unit}"
    return f"{size_bytes}B"


def format_size(size_bytes: int) -> str:
    """For people: `1.5 GiB`."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def offsets_between(start: int, end: int) -> str:
    """The range `[start, end)` in a sentence, with its last offset: `offsets 10 to 14`; `no offsets` if it is empty."""
    return f"offsets {start} to {end - 1}" if start < end else "no offsets"


def gap_between(expected: int, found: int) -> str:
    """What is wrong where offsets do not continue at `expected`, but at `found`."""
    if found < expected:
        return f"{offsets_between(found, expected)} are there twice"
    return f"{offsets_between(expected, found)} are missing"
