"""How kernels are compiled (numba, `nogil`, cached on disk), and the few lines of code they share.

Without numba they run uncompiled (`compiled` is then the identity), slower but with the same results. numba caches
compiled code by the file of a kernel: after a change here, touch `kernels*.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

CR, LF, SPACE, TAB, COLON, ZERO = 13, 10, 32, 9, 58, 48
_MAX_DIGITS = 18

try:
    from numba import njit, types
except ImportError:  # the base install: everything works, `scan` with its plain Python version
    HAVE_NUMBA = False

    def compiled(function: Function) -> Function:
        """The function itself; hashes wrap around in 64 bits, as they do compiled."""
        quiet: Function = np.errstate(over="ignore")(function)
        return quiet

    inlined = uncounted = compiled

    def copy_bytes(source: Any, start: Any, length: Any, target: Any, at: Any) -> None:
        target[at : at + length] = source[start : start + length]

    def move_bytes(buffer: Any, start: Any, length: Any, by: Any) -> None:
        buffer[start + by : start + by + length] = buffer[start : start + length].copy()

else:
    HAVE_NUMBA = True

    def _njit(function: Any, **options: Any) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no place to store compiled code, as in a read-only container without a home
            return njit(nogil=True, **options)(function)

    def compiled(function: Function) -> Function:
        decorated: Function = _njit(function)
        return decorated

    def uncounted(function: Function) -> Function:
        """For kernels that create no array, and call only such kernels: no counting of references, two atomics for each
        array and call.
        """
        decorated: Function = _njit(function, _nrt=False)
        return decorated

    def inlined(function: Function) -> Function:
        """For functions that are called per message: passing an array to a real call costs two atomic counts."""
        decorated: Function = _njit(function, inline="always")
        return decorated

    _memcpy = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))

    @inlined
    def copy_bytes(source: Any, start: Any, length: Any, target: Any, at: Any) -> None:
        """Assigning a slice costs five times as much: 50 ns instead of 11 for 128 bytes."""
        target_address = np.uintp(target.ctypes.data) + np.uintp(at)
        _memcpy(target_address, np.uintp(source.ctypes.data) + np.uintp(start), np.uintp(length))

    _memmove = types.ExternalFunction("memmove", types.uintp(types.uintp, types.uintp, types.uintp))

    @inlined
    def move_bytes(buffer: Any, start: Any, length: Any, by: Any) -> None:
        """Within a buffer, by some bytes towards its end; both places may overlap."""
        source_address = np.uintp(buffer.ctypes.data) + np.uintp(start)
        _memmove(source_address + np.uintp(by), source_address, np.uintp(length))


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
