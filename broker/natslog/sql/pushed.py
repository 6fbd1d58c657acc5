"""What the condition of a scan states about offsets, times and subjects, so that the broker leaves out the rest.

Theory of operation. DuckDB passes the condition as an Arrow expression, which has no public form that could be taken
apart. Arrow answers one question about it: whether it can hold for a row of which something is known. (This is how a
dataset skips files, by what is known about the rows of each.) So bounds are searched by halving: the greatest x for
which the condition cannot hold where `offset < x` is where the scan begins. "Cannot hold" is proven by Arrow, and "can
hold" may also mean that Arrow does not understand the condition: what is found leaves out no row that satisfies it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import fs

from natslog.errors import InvalidRequest
from natslog.subjects import MAX_SUBJECT_BYTES, check_subject

_FORMAT = ds.ParquetFileFormat()  # of a file that is never opened
_FILES = fs.LocalFileSystem()
_LAST_CHARACTER = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


def can_hold(condition: Any, known: Any, schema: pa.Schema) -> bool:
    """Whether there may be a row for which both expressions hold. False is certain."""
    file = _FORMAT.make_fragment("", _FILES, partition_expression=known)
    return any(ds.FileSystemDataset([file], schema, _FORMAT, _FILES).get_fragments(filter=condition))


def columns_of(condition: Any, schema: pa.Schema) -> set[str]:
    """The columns that an expression refers to: without one of these it cannot be bound."""
    found = set()
    for name in schema.names:
        others = pa.schema([field for field in schema if field.name != name])
        try:
            ds.Scanner.from_batches(iter(()), schema=others, columns=[], filter=condition)
        except pa.ArrowInvalid:
            found.add(name)
    return found


def number_bounds(condition: Any, schema: pa.Schema, name: str, low: int, high: int) -> tuple[int, int]:
    """`[start, end)` within `[low, high)`: the condition holds for no other value of this column.

    Args:
        name: a column of integers, or of times (bounds in its unit, since 1970).
    """
    column, kind = pc.field(name), schema.field(name).type

    def cannot_hold_below(at: int) -> bool:
        return not can_hold(condition, column < pa.scalar(at, kind), schema)

    def can_hold_from(at: int) -> bool:
        return can_hold(condition, column >= pa.scalar(at, kind), schema)

    start = _last(cannot_hold_below, low, high)
    if not can_hold_from(start):
        return start, start
    return start, _last(can_hold_from, start, high - 1) + 1 if start < high else start


def subject_pattern(condition: Any, schema: pa.Schema, name: str = "subject") -> str | None:
    """A plain subject, or a wildcard that ends in `>`, which covers all subjects for which the condition holds; None
    if there is none.
    """
    column = pc.field(name)

    def can_hold_where(known: Any) -> bool:
        return can_hold(condition, known, schema)

    first = _first_text(lambda text: not can_hold_where(column < text))
    if first and not can_hold_where(column > first):
        return _if_valid(first)
    tokens = first.split(".")
    for count in range(len(tokens) - 1, 0, -1):
        beginning = ".".join(tokens[:count])
        if not can_hold_where(column < f"{beginning}.") and not can_hold_where(column >= f"{beginning}/"):
            return _if_valid(f"{beginning}.>")
    return None


def _if_valid(pattern: str) -> str | None:
    """No message has a subject that is not valid in NATS; a broker would refuse the pattern."""
    is_wildcard = pattern.endswith(".>")
    plain = pattern.removesuffix(".>") if is_wildcard else pattern
    try:
        check_subject(plain, wildcards=False)
    except InvalidRequest:
        return None
    return pattern


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last number of `[low, high]` for which it holds, where it holds up to one; `low` if for none."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _first_text(cannot_hold_below: Callable[[str], bool]) -> str:
    """The longest text below which the condition cannot hold, a character at a time. (Arrow compares the bytes of
    UTF-8, which have the order of the characters.)
    """
    text = ""
    while len(text.encode()) < MAX_SUBJECT_BYTES and cannot_hold_below(f"{text} "):
        before = text
        highest = _last(
            lambda code, before=before: code not in _SURROGATES and cannot_hold_below(before + chr(code)),  # type: ignore[misc]
            ord(" "),
            0x7E if not cannot_hold_below(f"{text}\x7f") else _LAST_CHARACTER,
        )
        text += chr(highest)
    return text
