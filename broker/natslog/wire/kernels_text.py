"""Functions that kernels share: numbers, lines and words in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes, inlined

CR, LF, SPACE, TAB, COLON, ZERO = 13, 10, 32, 9, 58, 48
_DOT, _STAR, _GREATER, _DELETE = 46, 42, 62, 127
_MAX_DIGITS = 18


@inlined
def read_number(buffer: Any, start: int, end: int) -> int:
    """The decimal number there, or -1."""
    if end <= start or end - start > _MAX_DIGITS:
        return -1
    value = np.int64(0)
    for at in range(start, end):
        digit = np.int64(buffer[at]) - ZERO
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + digit
    return int(value)


@inlined
def find_line_end(buffer: Any, position: int, length: int) -> int:
    """Where the next CRLF starts, or -1."""
    for at in range(position, length - 1):
        if buffer[at] == CR and buffer[at + 1] == LF:
            return at
    return -1


@inlined
def is_blank(byte: int) -> bool:
    return byte in (SPACE, TAB)


@compiled
def equals(buffer: Any, start: int, end: int, word: Any) -> bool:
    if end - start != word.shape[0]:
        return False
    for at in range(word.shape[0]):
        if buffer[start + at] != word[at]:
            return False
    return True


@compiled
def is_plain_subject(buffer: Any, start: int, length: int, most_bytes: int) -> bool:
    """Whether a message can have this subject: it is not longer, and has no empty token, no wildcard as a token and no
    control character.
    """
    if not 0 < length <= most_bytes:
        return False
    end, token = start + length, start
    for at in range(start, end + 1):
        byte = buffer[at] if at < end else _DOT
        if byte == _DOT:
            size = at - token
            if size == 0 or (size == 1 and (buffer[token] == _STAR or buffer[token] == _GREATER)):
                return False
            token = at + 1
        elif byte <= SPACE or byte == _DELETE:
            return False
    return True


@inlined
def put_text(out: Any, at: int, text: Any) -> int:
    copy_bytes(text, 0, len(text), out, at)
    return at + len(text)


@inlined
def digits_of(number: int) -> int:
    """How many decimal digits a number from 0 on has."""
    count, limit = 1, np.int64(10)
    while number >= limit and count < 19:
        count += 1
        limit *= 10
    return count


@inlined
def put_number(out: Any, at: int, number: int, digits: int) -> int:
    for place in range(digits):
        out[at + digits - 1 - place] = ZERO + number % 10
        number //= 10
    return at + digits
