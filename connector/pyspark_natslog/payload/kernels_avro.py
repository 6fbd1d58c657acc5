"""The Avro kernel: whole batches of datums of one schema into columns.

Theory of operation. The schema is a program: its types in pre-order, each with the column node it fills, or none where
it is only stepped over. One pass over each datum, with an explicit stack of open records, arrays and maps. A datum must
end where its payload ends; any error makes the whole row malformed, because bytes after a wrong byte have no meaning.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled
from natslog.wire.kernels_scalars import Word, fits_precision
from pyspark_natslog.payload.kernels import (
    close_repeated,
    close_struct,
    is_utf8,
    put,
    put_bytes,
    put_null,
    put_real,
    put_wide,
    take_back,
)
from pyspark_natslog.payload.layout import COUNT, PRECISION, VALID

NULL, BOOLEAN, INT, LONG, FLOAT, DOUBLE, BYTES, STRING, FIXED, ENUM, DECIMAL = range(11)
RECORD, ARRAY, MAP, UNION, UNION_STRUCT = range(20, 25)
OP, OUT, END, SIZE, FACTOR = range(5)
"""Columns of the program: what the type is, the column node it fills or -1, where its subtree ends; bytes of a fixed,
words of an enum, branches of a union; what a number is multiplied with.
"""
GOOD, CUT_SHORT, TRAILING, NO_DATUM, OTHER_HEADER = range(5)
_NODE, _POSITION, _NEXT = 0, 1, 2
_MAX_INT, _MAX_LONG = 2**31 - 1, 2**63 - 1
HEADER_BYTES, MAGIC_BYTES = 10, 2


@compiled
def _read_long(text: Any, at: Word, end: Word) -> tuple[Word, Word]:
    """(where the zigzag varint ends or -1, its value)."""
    value, shift = np.uint64(0), np.uint64(0)
    for position in range(at, min(end, at + 10)):
        byte = np.uint64(text[position])
        if position == at + 9 and byte > np.uint64(1):
            return -1, 0
        value |= (byte & np.uint64(127)) << shift
        if byte < np.uint64(128):
            return position + 1, np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1))
        shift += np.uint64(7)
    return -1, 0


@compiled
def _put_decimal(c: Any, out: Word, position: Word, text: Any, at: Word, end: Word) -> bool:
    """A big-endian two's complement number of any length that has no more digits than the column."""
    low = high = np.int64(-1 if at < end and text[at] >= 128 else 0)
    if at == end:
        return False
    while end - at > 16:  # what does not fit must be sign
        if np.int64(text[at]) != high & 255:
            return False
        at += 1
    if np.int64(text[at] >= 128) != (high & 1):
        return False
    for byte_at in range(at, end):
        high = (high << 8) | ((low >> 56) & 255)
        low = (low << 8) | np.int64(text[byte_at])
    if not fits_precision(low, high, c.table[out, PRECISION]):
        return False
    put_wide(c, out, position, low, high)
    return True


@compiled
def _real(text: Any, at: Word, size: Word, bits: Any, single_bits: Any, real: Any, single: Any) -> Word:
    """The little-endian float or double there; the arrays are one word of memory in four types."""
    if size == 4:
        word = np.uint32(0)
        for place in range(4):
            word |= np.uint32(text[at + place]) << np.uint32(8 * place)
        single_bits[0] = word
        return np.float64(single[0])
    whole = np.uint64(0)
    for place in range(8):
        whole |= np.uint64(text[at + place]) << np.uint64(8 * place)
    bits[0] = whole
    return real[0]


@compiled
def _put_scalar(
    c: Any, op: Word, out: Word, position: Word, size: Word, factor: Word, text: Any, at: Word, end: Word, words: Any
) -> Word:
    """Reads a scalar and puts it where `out` is a column; returns where it ends, or -1."""
    if op == NULL:
        if out >= 0:
            put_null(c, out, position)
        return at
    if op == BOOLEAN:
        if at >= end or text[at] > 1:
            return -1
        if out >= 0:
            put(c, out, position, np.int64(text[at]))
        return at + 1
    if op in (FLOAT, DOUBLE):
        width = 4 if op == FLOAT else 8
        if at + width > end:
            return -1
        if out >= 0:
            put_real(c, out, position, _real(text, at, width, words.bits, words.single_bits, words.real, words.single))
        return at + width
    value = np.int64(size)
    if op != FIXED and not (op == DECIMAL and size > 0):
        at, value = _read_long(text, at, end)
        if at < 0:
            return -1
    if op in (INT, LONG, ENUM):
        if op == INT and (value > _MAX_INT or value < -_MAX_INT - 1):
            return -1
        if op == ENUM and (value < 0 or value >= size):
            return -1
        if factor != 1 and not -(_MAX_LONG // factor) <= value <= _MAX_LONG // factor:
            return -1
        if out >= 0:
            put(c, out, position, value * factor)
        return at
    if value < 0 or value > end - at:
        return -1
    if out >= 0:
        if op == DECIMAL:
            if not _put_decimal(c, out, position, text, at, at + value):
                return -1
        elif op == STRING and not is_utf8(text, at, at + value):
            return -1
        else:
            put_bytes(c, out, position, text, at, at + value)
    return at + value


@compiled
def _choose(c: Any, program: Any, node: Word, position: Word, branch: Word) -> Word:
    """The node of a union's branch; in a union that is a struct, its other members are null."""
    chosen = node + 1
    for _ in range(branch):
        chosen = program[chosen, END]
    if program[node, OP] == UNION_STRUCT and program[node, OUT] >= 0 and program[chosen, OP] != NULL:
        put_null(c, program[node, OUT], position)
        take_back(c, program[chosen, OUT], position)
        c.data[c.table[program[node, OUT], VALID] + position] = 1
    return chosen


@compiled
def _next_in_block(stack: Any, depth: Word, text: Any, at: Word, end: Word) -> Word:
    """Where the next item of the array or map on top begins, -1 where the data are wrong; with no items left 0 is on
    the stack for how many there are.
    """
    if stack[depth, _NEXT] == 0:
        at, count = _read_long(text, at, end)
        if at >= 0 and count < 0:
            count = -count
            at, _ = _read_long(text, at, end)  # the block's bytes: for readers that skip
        if at < 0 or count < 0 or count > end - at:
            return -1
        stack[depth, _NEXT] = count
    return at


@compiled
def _decode_row(
    c: Any, program: Any, row: Word, text: Any, at: Word, end: Word, stack: Any, found: Any, words: Any
) -> Word:
    """One datum into the entries of `row`; `found` gets (program node, byte) of what is wrong."""
    depth = 0
    stack[0, _NODE], stack[0, _POSITION], stack[0, _NEXT] = 0, row, 1
    while depth >= 0:
        holder, position = stack[depth, _NODE], stack[depth, _POSITION]
        out = program[holder, OUT]
        if program[holder, OP] == RECORD:
            node = stack[depth, _NEXT]
            if node == program[holder, END]:
                if out >= 0:
                    close_struct(c, out, position)
                depth -= 1
                continue
            stack[depth, _NEXT] = program[node, END]
        else:
            found[0], found[1] = holder, at
            at = _next_in_block(stack, depth, text, at, end)
            if at < 0:
                return NO_DATUM
            if stack[depth, _NEXT] == 0:
                if out >= 0:
                    close_repeated(c, out, position)
                depth -= 1
                continue
            stack[depth, _NEXT] -= 1
            node = holder + 1
            if program[holder, OP] == MAP:
                key = out + 1 if out >= 0 else -1
                entry = c.table[key, COUNT] if key >= 0 else 0
                at = _put_scalar(c, STRING, key, entry, 0, 1, text, at, end, words)
                if at < 0:
                    return NO_DATUM
            if program[node, OUT] >= 0:
                position = c.table[program[node, OUT], COUNT]
        found[0], found[1] = node, at
        while program[node, OP] in (UNION, UNION_STRUCT):
            union = node
            at, branch = _read_long(text, at, end)
            if at < 0 or branch < 0 or branch >= program[node, SIZE]:
                return NO_DATUM
            node = _choose(c, program, node, position, branch)
            if program[node, OP] == NULL and program[union, OUT] >= 0:
                put_null(c, program[union, OUT], position)
        op = program[node, OP]
        if op >= RECORD:
            depth += 1
            stack[depth, _NODE], stack[depth, _POSITION] = node, position
            stack[depth, _NEXT] = node + 1 if op == RECORD else 0
            continue
        out = program[node, OUT]
        at = _put_scalar(c, op, out, position, program[node, SIZE], program[node, FACTOR], text, at, end, words)
        if at < 0:
            return CUT_SHORT if found[1] >= end else NO_DATUM
    found[1] = at
    return GOOD if at == end else TRAILING


@compiled
def decode_avro(
    c: Any, program: Any, header: Any, text: Any, offsets: Any, results: Any, where: Any, stack: Any, words: Any
) -> None:
    """Decodes all payloads.

    Args:
        c: the `Columns` to fill. `program`: (nodes, 5).
        text, offsets: payload `r` is `text[offsets[r]:offsets[r + 1]]`.
        header: single-object encoding's, with this schema's fingerprint; a payload may begin with it. Empty: none does.
        results: gets what became of each. `where`: (rows, 2) gets program node and byte of what was wrong.
        stack: (depth, 3) and `words` (`Words`): work space.
    """
    for row in range(len(offsets) - 1):
        at, end = offsets[row], offsets[row + 1]
        alike = 0  # bytes as in the header
        while alike < len(header) and at + alike < end and text[at + alike] == header[alike]:
            alike += 1
        if MAGIC_BYTES <= alike < HEADER_BYTES <= end - at:
            result = OTHER_HEADER
        else:
            start = at + HEADER_BYTES if alike == HEADER_BYTES else at
            result = _decode_row(c, program, row, text, start, end, stack, where[row], words)
        if result != GOOD:
            take_back(c, 0, row)
            put_null(c, 0, row)
        results[row] = result
