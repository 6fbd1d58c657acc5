"""Edits of valid files, as a fuzzer writes them: the input is a short script.

    script = number of a file (1 byte) | edits of 8 bytes each: what (1), position (3, big-endian), argument (4)

Every script is valid: numbers and positions are taken modulo what there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_MOST_EDITS = 12
_EDIT_BYTES = 8
_WORDS = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\1\0\0\0", b"\0\x10\0\0")
KINDS = 11
SET, FLIP, WORD, CUT, REMOVE, INSERT, COPY, ZERO, APPEND, MOVE, DIGIT = range(KINDS)


def edit(kind: int, position: int, argument: int = 0) -> bytes:
    """One edit in a script."""
    return bytes([kind]) + position.to_bytes(3, "big") + argument.to_bytes(4, "big")


def chosen(script: bytes, count: int) -> int:
    """Which file the script is for."""
    return script[0] % count if script else 0


def edited(script: bytes, originals: Sequence[bytes]) -> bytes:
    """The file of the script after its edits."""
    data = bytearray(originals[chosen(script, len(originals))])
    for at in range(1, min(len(script) - _EDIT_BYTES + 1, _MOST_EDITS * _EDIT_BYTES), _EDIT_BYTES):
        one = script[at : at + _EDIT_BYTES]
        _apply(data, one[0] % KINDS, int.from_bytes(one[1:4], "big"), one[4:], originals)
    return bytes(data)


def _apply(data: bytearray, kind: int, position: int, argument: bytes, originals: Sequence[bytes]) -> None:
    size = len(data)
    at, number = position % (size + 1), int.from_bytes(argument, "big")
    count = number % 65536
    if kind == SET and at < size:
        data[at] = argument[-1]
    elif kind == FLIP and at < size:
        data[at] ^= 1 << number % 8
    elif kind == WORD:
        word = argument if argument[0] % 2 else _WORDS[number % len(_WORDS)]
        data[at : at + 4] = word[: size - at]
    elif kind == CUT:
        del data[at:]
    elif kind == REMOVE:
        del data[at : at + count]
    elif kind == INSERT:
        data[at:at] = argument[:1] * count
    elif kind == COPY:
        start, length = int.from_bytes(argument[:2], "big") % (size + 1), int.from_bytes(argument[2:], "big")
        data[at : at + length] = data[start : start + length]
    elif kind == ZERO:
        at -= at % 4096 if argument[0] % 2 else 0
        stop = min(size, at + (4096 if argument[0] % 2 else count))
        data[at:stop] = bytes(max(0, stop - at))
    elif kind == APPEND:
        other = originals[argument[0] % len(originals)]
        data += other[int.from_bytes(argument[1:], "big") % (len(other) + 1) :]
    elif kind == MOVE:
        piece = bytes(data[at : at + count])
        del data[at : at + count]
        place = argument[0] * len(data) // 256
        data[place:place] = piece
    elif kind == DIGIT and (digits := [place for place, byte in enumerate(data) if 48 <= byte <= 57]):
        data[digits[position % len(digits)]] = 48 + number % 10
    del data[1 << 20 :]


def seeds(originals: Sequence[bytes]) -> Iterator[bytes]:
    """Scripts without an edit, and with one of each kind, for each file."""
    for number, original in enumerate(originals):
        yield bytes([number])
        middle = len(original) // 2
        for kind in range(KINDS):
            yield bytes([number]) + edit(kind, middle, 0x01000010)
        yield bytes([number]) + edit(CUT, max(0, len(original) - 9))
