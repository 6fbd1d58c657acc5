"""Kernels on JSON's text: where a value ends and whether it is valid, and the characters of a string.

As Jackson reads it for Spark: single quotes are quotes too, NaN, Infinity and INF are numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled
from natslog.wire.kernels_scalars import DOT, LOWER_E, MINUS, PLUS, UPPER_E, Word, is_digit

MOST_NESTED = 1000
"""The maximum depth of containers in a payload, as in Jackson."""

QUOTE, SINGLE_QUOTE, BACKSLASH, COMMA, COLON = 34, 39, 92, 44, 58
OPEN_OBJECT, CLOSE_OBJECT, OPEN_LIST, CLOSE_LIST = 123, 125, 91, 93
AT_FIRST, AFTER_VALUE, AFTER_COMMA = 0, 1, 2
_TRUE, _FALSE, _NULL, _NAN, _INFINITY, _INF = range(6)
_SPELT = (b"true", b"false", b"null", b"NaN", b"Infinity", b"INF")
_WORDS = np.array([list(word.ljust(8)) for word in _SPELT], np.uint8)
_WORD_LENGTHS = np.array([len(word) for word in _SPELT])


@compiled
def skip_blanks(text: Any, at: Word, end: Word) -> Word:
    while at < end and (text[at] == 32 or text[at] == 10 or text[at] == 13 or text[at] == 9):
        at += 1
    return at


@compiled
def _hex(byte: Word) -> Word:
    if is_digit(byte):
        return byte - 48
    lower = byte | 32
    return lower - 87 if 97 <= lower <= 102 else -1


@compiled
def hex4(text: Any, at: Word, end: Word) -> Word:
    """The number that four hexadecimal digits make, or -1."""
    if at + 4 > end:
        return -1
    value = 0
    for position in range(at, at + 4):
        digit = _hex(int(text[position]))
        if digit < 0:
            return -1
        value = value << 4 | digit
    return value


@compiled
def string_end(text: Any, start: Word, end: Word) -> Word:
    """The position after the closing quote of the string that starts here; -1 if the string is not valid."""
    quote = text[start]
    at = start + 1
    while at < end:
        byte = text[at]
        if byte == quote:
            return at + 1
        if byte < 32:
            return -1
        at += 1
        if byte == BACKSLASH:
            if at >= end:
                return -1
            escaped = text[at]
            at += 1
            if escaped == 117:
                if hex4(text, at, end) < 0:
                    return -1
                at += 4
            elif escaped not in (34, 39, 92, 47, 98, 102, 110, 114, 116):
                return -1
    return -1


@compiled
def _word_end(text: Any, at: Word, end: Word, word: Word) -> Word:
    """The position after that word of `_WORDS`, or -1 if it is not here."""
    length = _WORD_LENGTHS[word]
    if at + length > end:
        return -1
    for position in range(length):
        if text[at + position] != _WORDS[word, position]:
            return -1
    return at + length


@compiled
def literal_end(text: Any, at: Word, end: Word) -> Word:
    byte = text[at]
    if byte == 116:
        return _word_end(text, at, end, _TRUE)
    if byte == 102:
        return _word_end(text, at, end, _FALSE)
    if byte == 110:
        return _word_end(text, at, end, _NULL)
    if byte == 78:
        return _word_end(text, at, end, _NAN)
    if byte in (MINUS, PLUS):
        at += 1
    after = _word_end(text, at, end, _INFINITY)
    return after if after >= 0 else _word_end(text, at, end, _INF)


@compiled
def _number_end(text: Any, start: Word, end: Word) -> Word:
    r"""The position after the number, or -1: `-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?`."""
    at = start + 1 if text[start] == MINUS else start
    begin = at
    while at < end and is_digit(int(text[at])):
        at += 1
    if at == begin or (text[begin] == 48 and at > begin + 1):
        return -1
    if at < end and text[at] == DOT:
        begin = at + 1
        at = begin
        while at < end and is_digit(int(text[at])):
            at += 1
        if at == begin:
            return -1
    if at < end and (text[at] == LOWER_E or text[at] == UPPER_E):
        at += 1
        if at < end and (text[at] == PLUS or text[at] == MINUS):
            at += 1
        begin = at
        while at < end and is_digit(int(text[at])):
            at += 1
        if at == begin:
            return -1
    return at


@compiled
def scalar_end(text: Any, at: Word, end: Word) -> Word:
    """The position after the string, number or literal that starts here, or -1."""
    if at >= end:
        return -1
    byte = int(text[at])
    if byte in (QUOTE, SINGLE_QUOTE):
        return string_end(text, at, end)
    if is_digit(byte) or (byte == MINUS and at + 1 < end and is_digit(int(text[at + 1]))):
        after = _number_end(text, at, end)
    else:
        after = literal_end(text, at, end)
    if 0 <= after < end and text[after] not in (32, 9, 10, 13, COMMA, CLOSE_OBJECT, CLOSE_LIST):
        return -1
    return after


@compiled
def value_end(text: Any, at: Word, end: Word, levels: Any) -> Word:
    """The position after the value that starts here, or -1 if it is not valid JSON."""
    depth, state = 0, AT_FIRST
    while True:
        at = skip_blanks(text, at, end)
        if at >= end:
            return -1
        byte = int(text[at])
        if depth > 0:
            is_object = levels[depth - 1] == 1
            if byte == (CLOSE_OBJECT if is_object else CLOSE_LIST):
                if state == AFTER_COMMA:
                    return -1
                at += 1
                depth -= 1
                state = AFTER_VALUE
                if depth == 0:
                    return at
                continue
            if state == AFTER_VALUE:
                if byte != COMMA:
                    return -1
                at += 1
                state = AFTER_COMMA
                continue
            if is_object:
                _, _, at = read_key(text, at, end)
                if at < 0 or at >= end:
                    return -1
                byte = int(text[at])
        if byte in (OPEN_OBJECT, OPEN_LIST):
            if depth == MOST_NESTED:
                return -1
            levels[depth] = byte == OPEN_OBJECT
            depth += 1
            at += 1
            state = AT_FIRST
            continue
        at = scalar_end(text, at, end)
        if at < 0 or depth == 0:
            return at
        state = AFTER_VALUE


@compiled
def read_key(text: Any, at: Word, end: Word) -> tuple[Word, Word, Word]:
    """The key that starts here: (its first byte, the byte after it, where its value starts or -1 if it is invalid)."""
    if text[at] != QUOTE and text[at] != SINGLE_QUOTE:
        return 0, 0, -1
    after = string_end(text, at, end)
    if after < 0:
        return 0, 0, -1
    value = skip_blanks(text, after, end)
    if value >= end or text[value] != COLON:
        return 0, 0, -1
    return at + 1, after - 1, skip_blanks(text, value + 1, end)


@compiled
def _write_rune(rune: Word, out: Any, at: Word) -> Word:
    """A code point in UTF-8; returns where it ends."""
    if rune < 0x80:
        out[at] = rune
        return at + 1
    if rune < 0x800:
        out[at] = 0xC0 | rune >> 6
        out[at + 1] = 0x80 | rune & 63
        return at + 2
    if rune < 0x10000:
        out[at] = 0xE0 | rune >> 12
        out[at + 1] = 0x80 | rune >> 6 & 63
        out[at + 2] = 0x80 | rune & 63
        return at + 3
    out[at] = 0xF0 | rune >> 18
    out[at + 1] = 0x80 | rune >> 12 & 63
    out[at + 2] = 0x80 | rune >> 6 & 63
    out[at + 3] = 0x80 | rune & 63
    return at + 4


@compiled
def unescape(text: Any, start: Word, end: Word, out: Any, at: Word) -> Word:
    """Writes a sound string's characters to `out` from `at` on; returns where they end. Half a surrogate pair is `?`,
    as it is in Java.
    """
    while start < end:
        byte = int(text[start])
        start += 1
        if byte != BACKSLASH:
            out[at] = byte
            at += 1
            continue
        escaped = int(text[start])
        start += 1
        if escaped != 117:
            is_letter = escaped in (98, 102, 110, 114, 116)
            if is_letter:
                escaped = (
                    8
                    if escaped == 98
                    else (12 if escaped == 102 else (10 if escaped == 110 else (13 if escaped == 114 else 9)))
                )
            out[at] = escaped
            at += 1
            continue
        rune = hex4(text, start, end)
        start += 4
        if 0xD800 <= rune < 0xE000:
            low = -1
            if rune < 0xDC00 and start + 6 <= end and text[start] == BACKSLASH and text[start + 1] == 117:
                low = hex4(text, start + 2, end)
            if 0xDC00 <= low < 0xE000:
                rune = 0x10000 + ((rune - 0xD800) << 10) + (low - 0xDC00)
                start += 6
            else:
                rune = 63
        at = _write_rune(rune, out, at)
    return at


@compiled
def has_escape(text: Any, start: Word, end: Word) -> bool:
    found = False
    for at in range(start, end):
        found |= text[at] == BACKSLASH
    return found


@compiled
def infinity_or_nan(text: Any, start: Word, end: Word) -> tuple[bool, Word]:
    if _word_end(text, start, end, _NAN) == end:
        return True, np.nan
    negative = text[start] == MINUS
    at = start + 1 if negative or text[start] == PLUS else start
    good = _word_end(text, at, end, _INFINITY) == end or _word_end(text, at, end, _INF) == end
    return good, -np.inf if negative else np.inf
