"""The kernel that collects what a JSON payload has beside the members of the schema.

Theory of operation. One pass over each payload, as `kernels_json` makes it, which only follows structs of the schema.
An unknown member is copied as it is written; the objects that it stands in are opened when the first one is found. So
what is written is a part of the payload, and never longer.
"""

from __future__ import annotations

from typing import Any

from natslog.wire.compiled import compiled
from natslog.wire.kernels_scalars import Word
from pyspark_natslog.payload.kernels_json import child_named
from pyspark_natslog.payload.kernels_tokens import (
    AFTER_COMMA,
    AFTER_VALUE,
    AT_FIRST,
    CLOSE_OBJECT,
    COLON,
    COMMA,
    OPEN_OBJECT,
    read_key,
    skip_blanks,
    value_end,
)
from pyspark_natslog.payload.layout import HINT, KIND, STRUCT

LEVEL_FIELDS = 4
_NODE, _KEY, _KEY_END, _WRITTEN = range(LEVEL_FIELDS)
_NOTHING, _BRACE, _MEMBERS = 0, 1, 2


@compiled
def _copy(text: Any, start: Word, end: Word, out: Any, at: Word) -> Word:
    for position in range(start, end):
        out[at] = text[position]
        at += 1
    return at


@compiled
def _begin_member(text: Any, key: Word, key_end: Word, out: Any, at: Word, open_levels: Any, level: Word) -> Word:
    """Writes a key with its quotes into the object of this level, which is open."""
    if open_levels[level, _WRITTEN] == _MEMBERS:
        out[at] = COMMA
        at += 1
    open_levels[level, _WRITTEN] = _MEMBERS
    at = _copy(text, key, key_end, out, at)
    out[at] = COLON
    return at + 1


@compiled
def _open(text: Any, out: Any, at: Word, open_levels: Any, depth: Word) -> Word:
    """Writes the beginning of each object up to this depth that is not written yet."""
    for level in range(depth + 1):
        if open_levels[level, _WRITTEN] == _NOTHING:
            if level > 0:
                key, key_end = open_levels[level, _KEY], open_levels[level, _KEY_END]
                at = _begin_member(text, key, key_end, out, at, open_levels, level - 1)
            out[at] = OPEN_OBJECT
            at += 1
            open_levels[level, _WRITTEN] = _BRACE
    return at


@compiled
def _rescue_row(
    c: Any, text: Any, start: Word, end: Word, out: Any, at: Word, open_levels: Any, levels: Any, scratch: Any
) -> Word:
    """Writes what one payload has beside the schema from `at` on; returns where it ends. Nothing is written where it
    has nothing, or is not valid.
    """
    first = at
    place = skip_blanks(text, start, end)
    if place >= end or text[place] != OPEN_OBJECT:
        return first
    depth, state = 0, AT_FIRST
    open_levels[0, _NODE], open_levels[0, _WRITTEN] = 0, _NOTHING
    place += 1
    while depth >= 0:
        place = skip_blanks(text, place, end)
        if place >= end:
            return first
        byte = int(text[place])
        if byte == CLOSE_OBJECT and state != AFTER_COMMA:
            if open_levels[depth, _WRITTEN] != _NOTHING:
                out[at] = CLOSE_OBJECT
                at += 1
            place += 1
            depth -= 1
            state = AFTER_VALUE
            continue
        if state == AFTER_VALUE:
            if byte != COMMA:
                return first
            place += 1
            state = AFTER_COMMA
            continue
        key_start, key_end, value = read_key(text, place, end)
        if value < 0 or value >= end:
            return first
        child = child_named(c, open_levels[depth, _NODE], text, key_start, key_end, scratch)
        if child >= 0 and c.table[child, KIND] == STRUCT and text[value] == OPEN_OBJECT:
            depth += 1
            open_levels[depth, _NODE], open_levels[depth, _WRITTEN] = child, _NOTHING
            open_levels[depth, _KEY], open_levels[depth, _KEY_END] = place, key_end + 1
            c.table[child, HINT] = child + 1
            place = value + 1
            state = AT_FIRST
            continue
        after = value_end(text, value, end, levels)
        if after < 0:
            return first
        if child < 0:
            at = _open(text, out, at, open_levels, depth)
            at = _begin_member(text, place, key_end + 1, out, at, open_levels, depth)
            at = _copy(text, value, after, out, at)
        place = after
        state = AFTER_VALUE
    return at if skip_blanks(text, place, end) >= end else first


@compiled
def rescue_json(
    c: Any, text: Any, offsets: Any, usable: Any, out: Any, ends: Any, open_levels: Any, levels: Any, scratch: Any
) -> None:
    """What each payload has beside the schema.

    Args:
        c: the `Columns` of the schema, of which only names and nodes are used. `text`, `offsets`: payload `r` is
            `text[offsets[r]:offsets[r + 1]]`. `usable`: 0 for a payload that is not to be read.
        out: gets the texts, one after the other; as long as `text`. `ends`: gets the end of each, from 1 on; 0 first.
        open_levels: (depth, LEVEL_FIELDS), `levels`: (MOST_NESTED,), `scratch`: as long as the longest payload: work
            space.
    """
    at = 0
    for row in range(len(offsets) - 1):
        c.table[0, HINT] = 1
        if usable[row]:
            at = _rescue_row(c, text, offsets[row], offsets[row + 1], out, at, open_levels, levels, scratch)
        ends[row + 1] = at
