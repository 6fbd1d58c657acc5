"""The JSON kernel: whole batches of payloads, one object each, into columns, as Spark's `from_json` reads them.

Theory of operation. One pass over each payload with an explicit stack of open containers. A value that is not of its
column's type is a *wrong value*: it becomes null, or, inside a list or map, the whole list or map does; the rest of the
row is kept (Spark calls these partial results). Text that is not JSON is a *broken row*: nothing of it is kept. Keys
without a column are skipped, but their JSON must be valid.

As in Spark: keys come in any order, and the last of equal keys counts; strings have single or double quotes; NaN,
Infinity and INF are numbers; text columns accept any value, as it is written. Unlike Spark: bytes after the object make
the row broken.
"""

from __future__ import annotations

from typing import Any

from natslog.wire.compiled import compiled
from natslog.wire.kernels_scalars import (
    HARD,
    MINUS,
    Word,
    decode_base64,
    is_digit,
    parse_date,
    parse_decimal,
    parse_integer,
    parse_real,
    parse_timestamp,
)
from pyspark_natslog.payload.kernels import (
    close_repeated,
    close_struct,
    last_end,
    put,
    put_bytes,
    put_null,
    put_real,
    put_wide,
    take_back,
)
from pyspark_natslog.payload.kernels_tokens import (
    AFTER_COMMA,
    AFTER_VALUE,
    AT_FIRST,
    CLOSE_LIST,
    CLOSE_OBJECT,
    COMMA,
    OPEN_LIST,
    OPEN_OBJECT,
    QUOTE,
    SINGLE_QUOTE,
    has_escape,
    infinity_or_nan,
    read_key,
    scalar_end,
    skip_blanks,
    unescape,
    value_end,
)
from pyspark_natslog.payload.layout import (
    BITS,
    BOOL,
    BYTES,
    COUNT,
    DATE,
    DECIMAL,
    DOUBLE,
    END,
    FLOAT,
    HINT,
    INT,
    KIND,
    LIST,
    MAP,
    NAME,
    NAME_END,
    PRECISION,
    SCALE,
    STRING,
    STRUCT,
    TIMESTAMP,
    TIMESTAMP_NTZ,
)

GOOD, BLANK, BROKEN, NO_OBJECT, TRAILING, WRONG_VALUE, NO_TEXT = range(7)
"""The result of a row."""

_NODE, _POSITION, _START = 0, 1, 2
_US_PER_S = 1_000_000
_MOST_SECONDS = (2**63 - 1) // _US_PER_S


@compiled
def _put_string(c: Any, node: Word, position: Word, text: Any, start: Word, end: Word) -> None:
    """The string between the quotes."""
    if not has_escape(text, start, end):
        put_bytes(c, node, position, text, start, end)
        return
    base = c.table[node, BYTES]
    put(c, node, position, unescape(text, start, end, c.data, base + last_end(c, node, position)) - base)


@compiled
def _same(text: Any, start: Word, end: Word, c: Any, node: Word) -> bool:
    name, name_end = c.table[node, NAME], c.table[node, NAME_END]
    if end - start != name_end - name:
        return False
    same = True
    for at in range(end - start):
        if text[start + at] != c.names[name + at]:
            same = False
            break
    return same


@compiled
def child_named(c: Any, struct: Word, text: Any, start: Word, end: Word, scratch: Any) -> Word:
    """The struct's child of that name, or -1. Messages of one kind have their keys in one order, so the child after
    the last one found is tried first.
    """
    children_end = c.table[struct, END]
    hint = c.table[struct, HINT]
    if hint < children_end and _same(text, start, end, c, hint):
        c.table[struct, HINT] = c.table[hint, END]
        return hint
    if has_escape(text, start, end):
        if end - start > len(scratch):
            return -1  # longer than any name
        end = unescape(text, start, end, scratch, 0)
        return _search(c, struct, scratch, 0, end)
    return _search(c, struct, text, start, end)


@compiled
def _search(c: Any, struct: Word, text: Any, start: Word, end: Word) -> Word:
    child, children_end = struct + 1, c.table[struct, END]
    while child < children_end:
        if _same(text, start, end, c, child):
            c.table[struct, HINT] = c.table[child, END]
            return child
        child = c.table[child, END]
    return -1


@compiled
def _put_real(c: Any, node: Word, position: Word, text: Any, start: Word, end: Word, hard: Any, single: bool) -> bool:
    """A float or double. A number with too many digits for the fast path is noted in `hard` (node, position, start,
    end), and its cell has the number of the note, which shows at the end whether the entry was taken back.
    """
    first = int(text[start])
    quoted = first in (QUOTE, SINGLE_QUOTE)
    if quoted or not (is_digit(first) or (first == MINUS and is_digit(int(text[start + 1])))):
        if end - start - 2 * quoted < 3:
            return False
        good, value = infinity_or_nan(text, start + quoted, end - quoted)
        if good:
            put_real(c, node, position, value)
        return good
    kind, value = parse_real(text, start, end, single)
    if kind != HARD:
        put_real(c, node, position, value)
        return True
    note = hard[0, 0] + 1
    hard[0, 0] = note
    hard[note, 0], hard[note, 1], hard[note, 2], hard[note, 3] = node, position, start, end
    put(c, node, position, note)
    return True


@compiled
def _put_time(c: Any, node: Word, position: Word, kind: Word, text: Any, start: Word, end: Word) -> bool:
    """A date or time; a whole number is a timestamp's seconds."""
    first = int(text[start])
    if first != QUOTE and first != SINGLE_QUOTE:
        if kind != TIMESTAMP or not (is_digit(first) or first == MINUS):
            return False
        good, seconds = parse_integer(text, start, end, 64)
        good = good and -_MOST_SECONDS <= seconds <= _MOST_SECONDS
        if good:
            put(c, node, position, seconds * _US_PER_S)
        return good
    if kind == DATE:
        good, value = parse_date(text, start + 1, end - 1)
    else:
        good, value = parse_timestamp(text, start + 1, end - 1, kind == TIMESTAMP)
    if good:
        put(c, node, position, value)
    return good


@compiled
def _put_scalar(c: Any, node: Word, position: Word, text: Any, start: Word, end: Word, scratch: Any, hard: Any) -> bool:
    """The value `text[start:end]` as an entry of the node; False, and nothing is written, if it has another type."""
    kind = c.table[node, KIND]
    first = int(text[start])
    quoted = first in (QUOTE, SINGLE_QUOTE)
    if kind == STRING:
        if quoted:
            _put_string(c, node, position, text, start + 1, end - 1)
        else:
            put_bytes(c, node, position, text, start, end)
        return True
    if first in (OPEN_OBJECT, OPEN_LIST) or kind in (STRUCT, LIST, MAP):
        return False
    if kind == INT:
        good, value = parse_integer(text, start, end, c.table[node, BITS])
        if good:
            put(c, node, position, value)
        return good
    if kind in (DOUBLE, FLOAT):
        return _put_real(c, node, position, text, start, end, hard, kind == FLOAT)
    if kind == BOOL:
        if first == 116 or first == 102:
            put(c, node, position, first == 116)
            return True
        return False
    if quoted and has_escape(text, start + 1, end - 1):
        scratch[0] = QUOTE
        after = unescape(text, start + 1, end - 1, scratch, 1)
        scratch[after] = QUOTE
        return _put_written(c, node, position, kind, scratch, 0, after + 1)
    return _put_written(c, node, position, kind, text, start, end)


@compiled
def _put_written(c: Any, node: Word, position: Word, kind: Word, text: Any, start: Word, end: Word) -> bool:
    """The same for values without a JSON type of their own: decimals, times, bytes. Escapes are already removed."""
    quoted = int(text[start]) in (QUOTE, SINGLE_QUOTE)
    if kind == DECIMAL:
        good, low, high = parse_decimal(
            text, start + quoted, end - quoted, c.table[node, PRECISION], c.table[node, SCALE]
        )
        if good:
            put_wide(c, node, position, low, high)
        return good
    if kind in (DATE, TIMESTAMP, TIMESTAMP_NTZ):
        return _put_time(c, node, position, kind, text, start, end)
    if not quoted:
        return False
    base = c.table[node, BYTES]
    after = decode_base64(text, start + 1, end - 1, c.data, base + last_end(c, node, position))
    if after >= 0:
        put(c, node, position, after - base)
    return bool(after >= 0)


@compiled
def _decode_row(
    c: Any, row: Word, text: Any, start: Word, end: Word, stack: Any, levels: Any, scratch: Any, hard: Any, found: Any
) -> Word:
    """One payload into the entries of `row`; `found` gets (node, byte) of the first thing that is wrong."""
    at = skip_blanks(text, start, end)
    if at == end:
        return BLANK
    found[1] = at
    if text[at] != OPEN_OBJECT:
        return NO_OBJECT
    depth, state, result = 0, AT_FIRST, GOOD
    stack[0, _NODE], stack[0, _POSITION], stack[0, _START] = 0, row, at
    at += 1
    while depth >= 0:
        node, position = stack[depth, _NODE], stack[depth, _POSITION]
        kind = c.table[node, KIND]
        at = skip_blanks(text, at, end)
        if at >= end:
            found[1] = at
            return BROKEN
        byte = int(text[at])
        if byte == (CLOSE_LIST if kind == LIST else CLOSE_OBJECT) and state != AFTER_COMMA:
            if kind == STRUCT:
                close_struct(c, node, position)
            else:
                close_repeated(c, node, position)
            at += 1
            depth -= 1
            state = AFTER_VALUE
            continue
        if state == AFTER_VALUE:
            if byte != COMMA:
                found[1] = at
                return BROKEN
            at += 1
            state = AFTER_COMMA
            continue
        child = node + 1
        if kind != LIST:
            key_start, key_end, value = read_key(text, at, end)
            if value < 0:
                found[1] = at
                return BROKEN
            at = value
            if kind == STRUCT:
                child = child_named(c, node, text, key_start, key_end, scratch)
            else:
                _put_string(c, child, c.table[child, COUNT], text, key_start, key_end)
                child += 1
        if at >= end:
            found[1] = at
            return BROKEN
        state = AFTER_VALUE
        if child < 0:
            begin = at
            at = value_end(text, at, end, levels)
            if at < 0:
                found[1] = begin
                return BROKEN
            continue
        if kind == STRUCT and c.table[child, COUNT] > position:
            take_back(c, child, position)  # the last of equal keys counts
        entry = position if kind == STRUCT else c.table[child, COUNT]
        byte, child_kind = int(text[at]), c.table[child, KIND]
        is_open = byte == OPEN_OBJECT if child_kind in (STRUCT, MAP) else (child_kind == LIST and byte == OPEN_LIST)
        if is_open:
            depth += 1
            stack[depth, _NODE], stack[depth, _POSITION], stack[depth, _START] = child, entry, at
            c.table[child, HINT] = child + 1
            state = AT_FIRST
            at += 1
            continue
        begin = at
        at = value_end(text, at, end, levels) if byte in (OPEN_OBJECT, OPEN_LIST) else scalar_end(text, at, end)
        if at < 0:
            found[1] = begin
            return BROKEN
        if byte == 110:  # null; NaN begins otherwise
            put_null(c, child, entry)
            continue
        if _put_scalar(c, child, entry, text, begin, at, scratch, hard):
            continue
        if result == GOOD:
            found[0], found[1], result = child, begin, WRONG_VALUE
        if kind != STRUCT:  # the outermost list or map below a struct becomes null
            while c.table[stack[depth, _NODE], KIND] != STRUCT:
                child, entry, begin = stack[depth, _NODE], stack[depth, _POSITION], stack[depth, _START]
                depth -= 1
            take_back(c, child, entry)
            at = value_end(text, begin, end, levels)
            if at < 0:
                found[1] = begin
                return BROKEN
        put_null(c, child, entry)
    at = skip_blanks(text, at, end)
    if at < end:
        found[1] = at
        return TRAILING
    return result


@compiled
def decode_json(
    c: Any,
    text: Any,
    offsets: Any,
    usable: Any,
    results: Any,
    where: Any,
    stack: Any,
    levels: Any,
    scratch: Any,
    hard: Any,
) -> None:
    """Decodes all payloads.

    Args:
        c: the `Columns` to fill. `text`, `offsets`: payload `r` is `text[offsets[r]:offsets[r + 1]]`.
        usable: 0 for a payload that is not to be read (NO_TEXT).
        results: gets what became of each. `where`: (rows, 2) gets node and byte of what was wrong.
        stack: (depth, 3), `levels`: (MOST_NESTED,), `scratch`: as long as the longest name and payload: work space.
        hard: gets (node, position, start, end) of reals that are left to the caller, from row 1; `[0, 0]` counts them.
    """
    for row in range(len(offsets) - 1):
        result = NO_TEXT
        c.table[0, HINT] = 1
        if usable[row]:
            result = _decode_row(c, row, text, offsets[row], offsets[row + 1], stack, levels, scratch, hard, where[row])
        if result not in (GOOD, WRONG_VALUE):
            take_back(c, 0, row)
            put_null(c, 0, row)
        results[row] = result
