"""The kernel for the usual kind of JSON: objects whose columns are numbers, booleans, strings and lists of strings, as
programs write them.

Theory of operation. It reads a strict form of JSON only, and stops at the first payload that is anything else: an
escape or a control character in a string that is read, an exponent, more digits than a double holds exactly, a value of
another type, equal keys, blanks around the object. Whatever it accepts has the same result in `kernels_json`, which
decodes the whole chunk then. Messages of one kind have their keys in one order, so the text of each key is first
compared with the key at the same place of the payload before, up to the value: no key is searched or scanned twice.

Values without a column are skipped by the functions of `kernels_tokens`, in any form that is valid.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes, inlined
from natslog.wire.kernels_scalars import DOT, MINUS, Word, is_digit
from pyspark_natslog.payload.kernels_tokens import (
    BACKSLASH,
    CLOSE_LIST,
    CLOSE_OBJECT,
    COLON,
    COMMA,
    OPEN_LIST,
    OPEN_OBJECT,
    QUOTE,
    skip_blanks,
    value_end,
)

WHOLE, REAL, BOOLEAN, TEXT, TEXTS = range(5)
"""What a column holds."""
KIND, BITS, NAME, NAME_END, SLOT, LIST_SLOT = range(6)
"""Of a column in `columns`: kind, bits of whole numbers, the place of its name in `names`, and its number among the
columns of strings and of lists of strings, and among the latter.
"""
MOST_MEMBERS = 256

_MOST_WHOLE_DIGITS, _MOST_REAL_DIGITS = 18, 15
_POWERS = np.array([10.0**power for power in range(_MOST_REAL_DIGITS + 1)])
_FALSE, _TRUE, _NULL = 102, 116, 110
_START, _LENGTH, _COLUMN = range(3)  # of a member of the payload before: from its key up to its value


@compiled
def _is_here(text: Any, at: Word, start: Word, length: Word) -> bool:
    same = True
    for offset in range(length):
        if text[at + offset] != text[start + offset]:
            same = False
            break
    return same


@compiled
def _plain_string_end(text: Any, at: Word, end: Word) -> Word:
    """Where the string ends whose first character is at `at`: at its closing quote. -1: it has an escape or a control
    character, or no end.
    """
    while at < end:
        byte = text[at]
        if byte == QUOTE:
            return at
        if byte == BACKSLASH or byte < 32:
            return -1
        at += 1
    return -1


@compiled
def _column_named(text: Any, start: Word, end: Word, columns: Any, names: Any) -> Word:
    for column in range(len(columns)):
        name, name_end = columns[column, NAME], columns[column, NAME_END]
        if name_end - name == end - start:
            same = True
            for offset in range(end - start):
                if text[start + offset] != names[name + offset]:
                    same = False
                    break
            if same:
                return column
    return -1


@compiled
def _literal_end(text: Any, at: Word, end: Word) -> Word:
    """Behind `true`, `false` or `null`; -1 for anything else."""
    first = text[at]
    if first == _FALSE:
        whole = at + 5 <= end and text[at + 1] == 97 and text[at + 2] == 108 and text[at + 3] == 115
        return at + 5 if whole and text[at + 4] == 101 else -1
    if at + 4 > end:
        return -1
    second, third, fourth = text[at + 1], text[at + 2], text[at + 3]
    is_true = first == _TRUE and second == 114 and third == 117 and fourth == 101
    is_null = first == _NULL and second == 117 and third == 108 and fourth == 108
    return at + 4 if is_true or is_null else -1


@compiled
def _digits_end(text: Any, at: Word, end: Word) -> Word:
    while at < end and is_digit(int(text[at])):
        at += 1
    return at


@compiled
def _number_of(text: Any, start: Word, end: Word) -> Word:
    value = np.int64(0)
    for at in range(start, end):
        value = value * 10 + (np.int64(text[at]) - 48)
    return value


@compiled
def _put_whole(text: Any, at: Word, end: Word, bits: Word, cells: Any, cell: Word) -> Word:
    """Behind the number; -1: it is not a whole number of so many bits, as programs write it."""
    negative = text[at] == MINUS
    start = at + negative
    after = _digits_end(text, start, end)
    digits = after - start
    if digits < 1 or digits > _MOST_WHOLE_DIGITS or (text[start] == 48 and (digits > 1 or negative)):
        return -1
    value = _number_of(text, start, after)
    if negative:
        value = -value
    if bits < 64:
        limit = np.int64(1) << (bits - 1)
        if value < -limit or value >= limit:
            return -1
    cells[cell] = value
    return after


@compiled
def _put_real(text: Any, at: Word, end: Word, reals: Any, cell: Word) -> Word:
    """Behind the number; -1: it is written in another way, or cannot be converted by one exact division."""
    negative = text[at] == MINUS
    start = at + negative
    point = _digits_end(text, start, end)
    if point == start or (text[start] == 48 and point - start > 1):
        return -1
    after, whole = point, _number_of(text, start, min(point, start + _MOST_WHOLE_DIGITS))
    if point < end and text[point] == DOT:
        after = _digits_end(text, point + 1, end)
        if after == point + 1 or after - start - 1 > _MOST_REAL_DIGITS:
            return -1
        for place in range(point + 1, after):
            whole = whole * 10 + (np.int64(text[place]) - 48)
    if point - start > _MOST_REAL_DIGITS or (negative and whole == 0):
        return -1
    value = float(whole) / _POWERS[max(after - point - 1, 0)]
    reals[cell] = -value if negative else value
    return after


@compiled
def _put_string(text: Any, at: Word, end: Word, data: Any, to: Word) -> Word:
    """Copies the string between these quotes to `to`. Returns where its closing quote is; -1: it is no plain string."""
    if at >= end or text[at] != QUOTE:
        return -1
    close = _plain_string_end(text, at + 1, end)
    if close >= 0:
        copy_bytes(text, at + 1, close - at - 1, data, to)
    return close


@compiled
def _put_strings(
    text: Any, at: Word, end: Word, data: Any, base: Word, item_ends: Any, first: Word, count: Word
) -> tuple[Word, Word]:
    """A list of plain strings, behind `count` others. Returns the position behind it, -1 if it is none, and how many
    there are then.
    """
    if text[at] != OPEN_LIST:
        return -1, count
    at = skip_blanks(text, at + 1, end)
    if at < end and text[at] == CLOSE_LIST:
        return at + 1, count
    while True:
        begin = item_ends[first + count]
        close = _put_string(text, at, end, data, base + begin)
        if close < 0:
            return -1, count
        count += 1
        item_ends[first + count] = begin + close - at - 1
        at = skip_blanks(text, close + 1, end)
        if at >= end:
            return -1, count
        if text[at] == CLOSE_LIST:
            return at + 1, count
        if text[at] != COMMA:
            return -1, count
        at = skip_blanks(text, at + 1, end)


@inlined
def _value_start(text: Any, at: Word, end: Word, seen: Any, columns: Any, names: Any) -> Word:
    """Where the value of the key at `at` starts; -1: the key is not plain.

    Args:
        seen: the member at this place of the payload before; gets this one.
    """
    length = seen[_LENGTH]
    if length and at + length < end and _is_here(text, at, seen[_START], length):
        begin = skip_blanks(text, at + length, end)
    else:
        begin, close = -1, _plain_string_end(text, at + 1, end)
        if close >= 0:
            colon = skip_blanks(text, close + 1, end)
            if colon < end and text[colon] == COLON:
                begin = skip_blanks(text, colon + 1, end)
                seen[_START], seen[_LENGTH] = at, begin - at
                seen[_COLUMN] = _column_named(text, at + 1, close, columns, names)
    return begin if begin < end else -1


@inlined
def _put_value(
    text: Any, at: Word, end: Word, described: Any, cell: Word, before: Word, size: Word,
    cells: Any, reals: Any, data: Any, item_ends: Any, room: Word,
) -> Word:  # fmt: skip
    """Behind the value, which is not null; -1: it is left to the other kernel.

    Args:
        described: the row of `columns`. `cell`: of this column and payload. `before`: what `cells` holds of the payload
            before.
        size: of the text, and so of `data` for each column of strings. `room`: of `item_ends`.
    """
    kind = described[KIND]
    if kind == WHOLE:
        return _put_whole(text, at, end, described[BITS], cells, cell)
    if kind == REAL:
        return _put_real(text, at, end, reals, cell)
    if kind == BOOLEAN:
        cells[cell] = text[at] == _TRUE
        return _literal_end(text, at, end) if text[at] == _TRUE or text[at] == _FALSE else -1
    base = described[SLOT] * size
    if kind == TEXT:
        close = _put_string(text, at, end, data, base + before)
        cells[cell] = before + close - at - 1
        return close + 1 if close >= 0 else -1
    at, count = _put_strings(text, at, end, data, base, item_ends, described[LIST_SLOT] * room, before)
    cells[cell] = count
    return at


@compiled
def decode_flat(
    text: Any, offsets: Any, columns: Any, names: Any, valid: Any, cells: Any, reals: Any, data: Any, item_ends: Any,
    room: Word, members: Any, levels: Any,
) -> Word:  # fmt: skip
    """Decodes payloads up to the first one that is left to the other kernel; returns how many.

    Args:
        text, offsets: payload `r` is `text[offsets[r]:offsets[r + 1]]`; UTF-8.
        columns: (columns, 6), see `KIND`. `names`: their names, one after another.
        valid: gets 1 for each value that is not null, column by column; zeros.
        cells: gets, column by column, whole numbers and booleans, where each string ends, and how many strings of lists
            there are so far. `reals`: gets the others.
        data: gets strings; as long as the text for each column of strings or lists of strings.
        item_ends: gets where each string of a list ends, behind a zero; `room` numbers for each such column; zeros.
        members: (MOST_MEMBERS, 3), `levels`: (MOST_NESTED,): work space.
    """
    rows, size = len(offsets) - 1, len(text)
    members[:, _LENGTH] = 0  # none is known yet
    for row in range(rows):
        at, end = offsets[row], offsets[row + 1] - 1
        if end <= at or text[at] != OPEN_OBJECT or text[end] != CLOSE_OBJECT:
            return row
        for column in range(len(columns)):
            cells[column * rows + row] = -1
        at = skip_blanks(text, at + 1, end)
        member = 0
        while at < end:
            if member == MOST_MEMBERS or text[at] != QUOTE:
                return row
            begin = _value_start(text, at, end, members[member], columns, names)
            if begin < 0:
                return row
            column = members[member, _COLUMN]
            if column < 0:
                at = value_end(text, begin, end, levels)
            else:
                cell = column * rows + row
                if cells[cell] >= 0 or valid[cell]:
                    return row  # equal keys
                before = cells[cell - 1] if row else 0
                if text[begin] == _NULL:
                    at = _literal_end(text, begin, end)
                    cells[cell] = before if columns[column, KIND] >= TEXT else 0
                else:
                    at = _put_value(
                        text, begin, end, columns[column], cell, before, size, cells, reals, data, item_ends, room
                    )
                    valid[cell] = 1
            if at < 0:
                return row
            at = skip_blanks(text, at, end)
            if at == end:
                break
            if text[at] != COMMA:
                return row
            at = skip_blanks(text, at + 1, end)
            if at >= end:
                return row
            member += 1
        for column in range(len(columns)):
            cell = column * rows + row
            if not valid[cell]:
                cells[cell] = cells[cell - 1] if columns[column, KIND] >= TEXT and row else 0
    return rows
