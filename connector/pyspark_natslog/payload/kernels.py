"""Kernels on the columns being built: add an entry or a null, take entries back; and on bytes: check UTF-8.

Invariant: a node's entries are written in order of position, so the bytes or items of position `p` begin where those of
`p - 1` end; taking an entry back means reducing the count.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes
from natslog.wire.kernels_scalars import Word
from pyspark_natslog.payload.layout import (
    BINARY,
    BYTES,
    CELL,
    COUNT,
    DECIMAL,
    END,
    KIND,
    LIST,
    MAP,
    STRING,
    STRUCT,
    VALID,
)


@compiled
def last_end(c: Any, node: Word, position: Word) -> Word:
    """Where the bytes or items of this position begin."""
    return c.cells[c.table[node, CELL] + position - 1] if position > 0 else 0


@compiled
def put(c: Any, node: Word, position: Word, value: Word) -> None:
    """An entry whose cell is `value`."""
    c.cells[c.table[node, CELL] + position] = value
    c.data[c.table[node, VALID] + position] = 1
    c.table[node, COUNT] = position + 1


@compiled
def put_real(c: Any, node: Word, position: Word, value: Word) -> None:
    c.reals[c.table[node, CELL] + position] = value
    c.data[c.table[node, VALID] + position] = 1
    c.table[node, COUNT] = position + 1


@compiled
def put_wide(c: Any, node: Word, position: Word, low: Word, high: Word) -> None:
    """A decimal: its low and high 64 bits."""
    cell = c.table[node, CELL] + 2 * position
    c.cells[cell] = low
    c.cells[cell + 1] = high
    c.data[c.table[node, VALID] + position] = 1
    c.table[node, COUNT] = position + 1


@compiled
def put_bytes(c: Any, node: Word, position: Word, text: Any, start: Word, end: Word) -> None:
    """A string or binary with these bytes."""
    at = last_end(c, node, position)
    copy_bytes(text, start, end - start, c.data, c.table[node, BYTES] + at)
    put(c, node, position, at + end - start)


@compiled
def put_null(c: Any, node: Word, position: Word) -> None:
    """A null at this position of the node, and of all nodes below that have an entry for it."""
    at, end = node, c.table[node, END]
    while at < end:
        kind = c.table[at, KIND]
        cell = c.table[at, CELL] + position
        if kind == DECIMAL:
            cell += position
            c.cells[cell + 1] = 0
        variable = kind in (LIST, MAP, STRING, BINARY)
        if kind != STRUCT:
            c.cells[cell] = c.cells[cell - 1] if variable and position > 0 else 0
        c.data[c.table[at, VALID] + position] = 0
        c.table[at, COUNT] = position + 1
        at = c.table[at, END] if kind in (LIST, MAP) else at + 1


@compiled
def take_back(c: Any, node: Word, position: Word) -> None:
    """Removes all entries of the subtree from this position on."""
    c.table[node, COUNT] = position
    at, end = node, c.table[node, END]
    while at < end:  # parents come first: each sets how many entries its children keep
        kind, count = c.table[at, KIND], c.table[at, COUNT]
        if kind in (STRUCT, LIST, MAP):
            kept = count if kind == STRUCT else (c.cells[c.table[at, CELL] + count - 1] if count > 0 else 0)
            child, children_end = at + 1, c.table[at, END]
            while child < children_end:
                c.table[child, COUNT] = kept
                child = c.table[child, END]
        at += 1


@compiled
def close_struct(c: Any, node: Word, position: Word) -> None:
    """Ends a struct that is not null; children without a value are null."""
    child, end = node + 1, c.table[node, END]
    while child < end:
        if c.table[child, COUNT] <= position:
            put_null(c, child, position)
        child = c.table[child, END]
    c.data[c.table[node, VALID] + position] = 1
    c.table[node, COUNT] = position + 1


@compiled
def close_repeated(c: Any, node: Word, position: Word) -> None:
    """Ends a list or map with the items that have been added."""
    put(c, node, position, c.table[node + 1, COUNT])


@compiled
def is_utf8(text: Any, start: Word, end: Word) -> bool:
    """Whether the bytes are well-formed UTF-8 (shortest forms, no surrogates, up to U+10FFFF)."""
    mixed = np.uint8(0)
    for at in range(start, end):
        mixed |= text[at]
    if mixed < 0x80:
        return True
    at = start
    while at < end:
        lead = int(text[at])
        at += 1
        if lead < 0x80:
            continue
        more = 1 if 0xC2 <= lead <= 0xDF else (2 if 0xE0 <= lead <= 0xEF else (3 if 0xF0 <= lead <= 0xF4 else 0))
        if more == 0 or at + more > end:
            return False
        low, high = 0x80, 0xBF
        if lead == 0xE0:
            low = 0xA0
        elif lead == 0xED:
            high = 0x9F
        elif lead == 0xF0:
            low = 0x90
        elif lead == 0xF4:
            high = 0x8F
        if int(text[at]) < low or int(text[at]) > high:
            return False
        for follow in range(at + 1, at + more):
            if int(text[follow]) & 0xC0 != 0x80:
                return False
        at += more
    return True


@compiled
def rows_are_utf8(text: Any, offsets: Any, out: Any) -> Word:
    """Fills `out` with 1 for each row that is UTF-8, 0 for the others; returns how many are not."""
    bad = 0
    for row in range(len(offsets) - 1):
        good = is_utf8(text, offsets[row], offsets[row + 1])
        out[row] = good
        bad += not good
    return bad
