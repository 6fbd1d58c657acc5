"""The kernel that makes variants of JSON payloads, byte for byte as Spark's `parse_json` makes them.

Theory of operation. One pass over a payload writes each value behind the one before it; the members and elements of
open containers wait on a stack with where they begin. When a container closes, its children are moved up, and its
header (number, ids of keys, offsets) is written in front of them. Keys get their ids in the order in which they are
first seen, by a table of hashes whose entries belong to a payload by its number, so that it is never cleared.

Source: Spark's `VariantBuilder` and `VariantUtil`; the Variant encoding of Parquet, version 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, move_bytes
from natslog.wire.kernels_scalars import DOT, HARD, MINUS, Word, is_digit, parse_integer, parse_real, tenfold
from pyspark_natslog.payload.kernels_tokens import (
    AFTER_COMMA,
    AFTER_VALUE,
    AT_FIRST,
    BACKSLASH,
    CLOSE_LIST,
    CLOSE_OBJECT,
    COLON,
    COMMA,
    MOST_NESTED,
    OPEN_LIST,
    OPEN_OBJECT,
    QUOTE,
    hex4,
    scalar_end,
    skip_blanks,
    string_end,
    unescape,
)

GOOD, BLANK, BROKEN, TWICE, TRAILING = range(5)
"""Results: a variant; nothing; no JSON; a key that an object has twice; more behind the value."""
HARD_COUNT, HARD_ARE_KNOWN = range(2)
"""Numbers that this kernel cannot round are noted in a first run, in their order, and are given to a second one."""
LEVEL_FIELDS = 4
_IS_OBJECT, _BEGIN, _FIRST, _STATE = range(LEVEL_FIELDS)
CHILD_FIELDS = 2
_ID, _AT = range(CHILD_FIELDS)
KEY_FIELDS = 2
_MOST_DIGITS = 38
_SHORT = 63
_NULL, _TRUE, _FALSE, _INT1, _DOUBLE, _DECIMAL4, _LONG_STRING = 0, 1, 2, 3, 7, 8, 16
_FNV, _FNV_PRIME, _32_BITS = 2166136261, 16777619, 0xFFFFFFFF
_FEW = 16


@compiled
def _width(number: Word) -> Word:
    """Bytes that an unsigned number takes."""
    return 1 if number <= 0xFF else (2 if number <= 0xFFFF else (3 if number <= 0xFFFFFF else 4))


@compiled
def _put_number(out: Any, at: Word, number: Word, width: Word) -> Word:
    """Little-endian; returns where it ends."""
    for byte in range(width):
        out[at + byte] = (number >> (8 * byte)) & 0xFF
    return at + width


# ---- scalars ----


@compiled
def _put_string(text: Any, start: Word, end: Word, out: Any, at: Word) -> Word:
    """The characters between the quotes."""
    if end - start <= _SHORT:
        after = unescape(text, start, end, out, at + 1)
        out[at] = ((after - at - 1) << 2) | 1
        return after
    after = unescape(text, start, end, out, at + 5)
    length = after - at - 5
    if length <= _SHORT:
        for place in range(length):
            out[at + 1 + place] = out[at + 5 + place]
        out[at] = (length << 2) | 1
        return at + 1 + length
    out[at] = _LONG_STRING << 2
    _put_number(out, at + 1, length, 4)
    return after


@compiled
def _put_integer(value: Word, out: Any, at: Word) -> Word:
    """With as few bytes as it takes: 1, 2, 4 or 8."""
    kind, width = _INT1 + 3, 8
    if -128 <= value <= 127:
        kind, width = _INT1, 1
    elif -32768 <= value <= 32767:
        kind, width = _INT1 + 1, 2
    elif -2147483648 <= value <= 2147483647:
        kind, width = _INT1 + 2, 4
    out[at] = kind << 2
    return _put_number(out, at + 1, value, width)


@compiled
def _put_decimal(text: Any, start: Word, end: Word, out: Any, at: Word) -> Word:
    """A number without exponent; -1 where it has too many digits for a decimal."""
    low, high, digits, scale, seen_point = np.int64(0), np.int64(0), 0, 0, False
    begin = start + 1 if text[start] == MINUS else start
    for place in range(begin, end):
        byte = int(text[place])
        if byte == DOT:
            seen_point = True
            continue
        if not is_digit(byte):
            return -1
        digits += int(digits > 0 or byte != 48)
        scale += int(seen_point)
        if digits > _MOST_DIGITS:
            return -1
        low, high = tenfold(low, high, np.int64(byte - 48))
    if scale > _MOST_DIGITS:
        return -1
    if text[start] == MINUS:
        low = -low
        high = ~high + (low == 0)
    kind, width = _DECIMAL4 + 2, 16
    if max(digits, scale) <= 9:
        kind, width = _DECIMAL4, 4
    elif max(digits, scale) <= 18:
        kind, width = _DECIMAL4 + 1, 8
    out[at] = kind << 2
    out[at + 1] = scale
    _put_number(out, at + 2, low, min(width, 8))
    if width == 16:
        _put_number(out, at + 10, high, 8)
    return at + 2 + width


@compiled
def _put_scalar(text: Any, start: Word, end: Word, out: Any, at: Word, bits: Any, hard: Any) -> Word:
    """The scalar between these bytes, which is well-formed; -1 where it is not JSON."""
    byte = int(text[start])
    if byte == QUOTE:
        if not _is_jsons(text, start + 1, end - 1):
            return -1
        return _put_string(text, start + 1, end - 1, out, at)
    if byte == 116 or byte == 102 or (byte == 110):
        out[at] = (_TRUE if byte == 116 else (_FALSE if byte == 102 else _NULL)) << 2
        return at + 1
    if not (is_digit(byte) or (byte == MINUS and is_digit(int(text[start + 1])))):
        return -1  # NaN and the like
    good, value = parse_integer(text, start, end, 64)
    if good:
        return _put_integer(value, out, at)
    after = _put_decimal(text, start, end, out, at)
    if after >= 0:
        return after
    result, real = parse_real(text, start, end, False)
    bits[1][0] = real
    if result == HARD:
        state, spans, exact = hard
        number = state[HARD_COUNT]
        state[HARD_COUNT] = number + 1
        if state[HARD_ARE_KNOWN]:
            bits[1][0] = exact[number]
        else:
            spans[2 * number], spans[2 * number + 1] = start, end
    out[at] = _DOUBLE << 2
    return _put_number(out, at + 1, bits[0][0], 8)


@compiled
def _is_jsons(text: Any, start: Word, end: Word) -> bool:
    r"""Whether the characters of a well-formed string have no `\'` (which is for single quotes), and no half of a
    surrogate pair.
    """
    at = start
    while at < end:
        if text[at] != BACKSLASH:
            at += 1
            continue
        escaped = int(text[at + 1])
        if escaped == 39:
            return False
        at += 2
        if escaped != 117:
            continue
        rune = hex4(text, at, end)
        at += 4
        if 0xD800 <= rune < 0xE000:
            low = -1
            if at + 6 <= end and text[at] == BACKSLASH and text[at + 1] == 117:
                low = hex4(text, at + 2, end)
            if rune >= 0xDC00 or not 0xDC00 <= low < 0xE000:
                return False
            at += 6
    return True


# ---- keys ----


@compiled
def _key_id(keys: Any, key_ends: Any, count: Word, start: Word, end: Word, table: Any, row: Word) -> tuple[Word, bool]:
    """The id of the key that stands at the end of `keys`, and whether it is new.

    Args:
        table: (size, 2): number of the payload from 1 on, and id; size is a power of two.
    """
    code = _FNV
    for place in range(start, end):
        code = ((code ^ int(keys[place])) * _FNV_PRIME) & _32_BITS
    mask = len(table) - 1
    slot = code & mask
    while table[slot, 0] == row + 1:
        known = table[slot, 1]
        first = key_ends[known]
        if key_ends[known + 1] - first == end - start:
            same = True
            for place in range(end - start):
                same &= keys[first + place] == keys[start + place]
            if same:
                return known, False
        slot = (slot + 1) & mask
    table[slot, 0], table[slot, 1] = row + 1, count
    return count, True


@compiled
def _weight(byte: Word) -> Word:
    """Java compares UTF-16: what takes four bytes in UTF-8 stands before U+E000 and what follows."""
    return byte - 16 if byte >= 0xF0 else byte


@compiled
def _is_before(keys: Any, key_ends: Any, one: Word, other: Word) -> bool:
    first, second = key_ends[one], key_ends[other]
    one_length, other_length = key_ends[one + 1] - first, key_ends[other + 1] - second
    for place in range(min(one_length, other_length)):
        a, b = int(keys[first + place]), int(keys[second + place])
        if a != b:
            if a >= 0xEE and b >= 0xEE:
                return bool(_weight(a) < _weight(b))
            return a < b
    return bool(one_length < other_length)


@compiled
def _swap(children: Any, one: Word, other: Word) -> None:
    for field in range(CHILD_FIELDS):
        children[one, field], children[other, field] = children[other, field], children[one, field]


@compiled
def _sift(children: Any, first: Word, root: Word, count: Word, keys: Any, key_ends: Any) -> None:
    while True:
        child = 2 * root + 1
        if child >= count:
            return
        if child + 1 < count and _is_before(
            keys, key_ends, children[first + child, _ID], children[first + child + 1, _ID]
        ):
            child += 1
        if not _is_before(keys, key_ends, children[first + root, _ID], children[first + child, _ID]):
            return
        _swap(children, first + root, first + child)
        root = child


@compiled
def _sort(children: Any, first: Word, end: Word, keys: Any, key_ends: Any) -> None:
    """The children of an object by key: a few by insertion, many by a heap."""
    count = end - first
    if count <= _FEW:
        for at in range(first + 1, end):
            place = at
            while place > first and _is_before(keys, key_ends, children[place, _ID], children[place - 1, _ID]):
                _swap(children, place, place - 1)
                place -= 1
        return
    for root in range(count // 2 - 1, -1, -1):
        _sift(children, first, root, count, keys, key_ends)
    for last in range(count - 1, 0, -1):
        _swap(children, first, first + last)
        _sift(children, first, 0, last, keys, key_ends)


# ---- containers ----


@compiled
def _close_list(children: Any, first: Word, end: Word, out: Any, begin: Word, at: Word) -> Word:
    """Writes the header of a list whose elements are written from `begin` to `at`; returns where it ends."""
    count, size = end - first, at - begin
    is_large, width = count > 0xFF, _width(size)
    header = 1 + (4 if is_large else 1) + (count + 1) * width
    move_bytes(out, begin, at - begin, header)
    out[begin] = (int(is_large) << 4) | ((width - 1) << 2) | 3
    place = _put_number(out, begin + 1, count, 4 if is_large else 1)
    for child in range(first, end):
        place = _put_number(out, place, children[child, _AT] - begin, width)
    _put_number(out, place, size, width)
    return at + header


@compiled
def _close_object(
    children: Any, first: Word, end: Word, out: Any, begin: Word, at: Word, keys: Any, key_ends: Any
) -> Word:
    """As `_close_list`; -1 where a key occurs twice."""
    _sort(children, first, end, keys, key_ends)
    count, size, most = end - first, at - begin, 0
    for child in range(first, end):
        most = max(most, children[child, _ID])
        if child > first and children[child, _ID] == children[child - 1, _ID]:
            return -1
    is_large, width, id_width = count > 0xFF, _width(size), _width(most)
    header = 1 + (4 if is_large else 1) + count * id_width + (count + 1) * width
    move_bytes(out, begin, at - begin, header)
    out[begin] = (int(is_large) << 6) | ((id_width - 1) << 4) | ((width - 1) << 2) | 2
    place = _put_number(out, begin + 1, count, 4 if is_large else 1)
    for child in range(first, end):
        place = _put_number(out, place, children[child, _ID], id_width)
    for child in range(first, end):
        place = _put_number(out, place, children[child, _AT] - begin, width)
    _put_number(out, place, size, width)
    return at + header


@compiled
def _put_metadata(keys: Any, key_ends: Any, count: Word, out: Any, at: Word) -> Word:
    width = _width(max(key_ends[count], count))
    out[at] = 1 | ((width - 1) << 6)
    at = _put_number(out, at + 1, count, width)
    for key in range(count + 1):
        at = _put_number(out, at, key_ends[key], width)
    for place in range(key_ends[count]):
        out[at + place] = keys[place]
    return at + key_ends[count]


# ---- payloads ----


@compiled
def _variant_row(
    text: Any, start: Word, end: Word, out: Any, at: Word, row: Word, levels: Any, children: Any, keys: Any,
    key_ends: Any, table: Any, bits: Any, hard: Any,
) -> tuple[Word, Word, Word]:  # fmt: skip
    """(result, where the value ends, number of keys)."""
    place = skip_blanks(text, start, end)
    if place >= end:
        return BLANK, at, 0
    depth, children_end, count = 0, 0, 0
    key_ends[0] = 0
    while True:
        place = skip_blanks(text, place, end)
        if place >= end:
            return BROKEN, at, 0
        byte = int(text[place])
        if depth > 0:
            level = depth - 1
            is_object, state = levels[level, _IS_OBJECT] == 1, levels[level, _STATE]
            if byte == (CLOSE_OBJECT if is_object else CLOSE_LIST):
                if state == AFTER_COMMA:
                    return BROKEN, at, 0
                begin, first = levels[level, _BEGIN], levels[level, _FIRST]
                if is_object:
                    at = _close_object(children, first, children_end, out, begin, at, keys, key_ends)
                    if at < 0:
                        return TWICE, 0, 0
                else:
                    at = _close_list(children, first, children_end, out, begin, at)
                children_end = first
                place += 1
                depth -= 1
                if depth == 0:
                    break
                levels[depth - 1, _STATE] = AFTER_VALUE
                continue
            if state == AFTER_VALUE:
                if byte != COMMA:
                    return BROKEN, at, 0
                place += 1
                levels[level, _STATE] = AFTER_COMMA
                continue
            children[children_end, _AT] = at
            if is_object:
                if byte != QUOTE:
                    return BROKEN, at, 0
                after = string_end(text, place, end)
                if after < 0 or not _is_jsons(text, place + 1, after - 1):
                    return BROKEN, at, 0
                key_start = key_ends[count]
                key_end = unescape(text, place + 1, after - 1, keys, key_start)
                key, is_new = _key_id(keys, key_ends, count, key_start, key_end, table, row)
                if is_new:
                    count += 1
                    key_ends[count] = key_end
                children[children_end, _ID] = key
                place = skip_blanks(text, after, end)
                if place >= end or text[place] != COLON:
                    return BROKEN, at, 0
                place = skip_blanks(text, place + 1, end)
                if place >= end:
                    return BROKEN, at, 0
                byte = int(text[place])
            children_end += 1
        if byte in (OPEN_OBJECT, OPEN_LIST):
            if depth == MOST_NESTED:
                return BROKEN, at, 0
            levels[depth, _IS_OBJECT] = byte == OPEN_OBJECT
            levels[depth, _BEGIN], levels[depth, _FIRST], levels[depth, _STATE] = at, children_end, AT_FIRST
            depth += 1
            place += 1
            continue
        after = scalar_end(text, place, end)
        if after < 0:
            return BROKEN, at, 0
        at = _put_scalar(text, place, after, out, at, bits, hard)
        if at < 0:
            return BROKEN, 0, 0
        place = after
        if depth == 0:
            break
        levels[depth - 1, _STATE] = AFTER_VALUE
    if skip_blanks(text, place, end) < end:
        return TRAILING, at, 0
    return GOOD, at, count


@compiled
def variants_of_json(
    text: Any, offsets: Any, usable: Any, results: Any, values: Any, value_ends: Any, metadata: Any, metadata_ends: Any,
    levels: Any, children: Any, keys: Any, key_ends: Any, table: Any, bits: Any, hard: Any,
) -> None:  # fmt: skip
    """A variant of each payload.

    Args:
        text, offsets: payload `r` is `text[offsets[r]:offsets[r + 1]]`. `usable`: 0 for a payload that is not UTF-8.
        results: gets GOOD, BLANK or what is wrong. values, metadata: get the bytes of all, one after the other;
            `value_ends`, `metadata_ends`: where each ends, from 1 on; 0 first.
        levels: (MOST_NESTED, LEVEL_FIELDS), `children`: (bytes of the longest payload, CHILD_FIELDS), `keys`: as many
            bytes, `key_ends`: one more, `table`: a power of two of entries, more than a payload can have keys, zeros;
            `bits`: an int64 and a float64 array on the same memory: work space.
        hard: (state, spans, exact): HARD_COUNT and HARD_ARE_KNOWN; where each such number begins and ends in the text,
            which is written where they are not known; their values, which are read where they are.
    """
    at = metadata_at = 0
    for row in range(len(offsets) - 1):
        if usable[row]:
            result, after, count = _variant_row(
                text,
                offsets[row],
                offsets[row + 1],
                values,
                at,
                row,
                levels,
                children,
                keys,
                key_ends,
                table,
                bits,
                hard,
            )
            results[row] = result
            if result == GOOD:
                at = after
                metadata_at = _put_metadata(keys, key_ends, count, metadata, metadata_at)
        else:
            results[row] = BROKEN
        value_ends[row + 1] = at
        metadata_ends[row + 1] = metadata_at
