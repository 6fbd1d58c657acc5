"""Checks of JSON text that is about to be read by `pyarrow.json`: where it accepts, or does, more than the kernel.

All of them look at whole columns. They may find too much, as text within a string can look like what they search for:
the payloads are then decoded by the kernel, with the same result. They must never find too little.

Source: Arrow's `json/parser.cc` (RapidJSON with `kParseNanAndInfFlag`, `kParseIterativeFlag`), as of Arrow 18 to 26.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

MOST_NESTED = 1000
"""The maximum depth of containers in a payload, as in the kernel."""

_LONGEST_BLANK = 64
_IS_BLANK, _ENDS_NUMBER = np.zeros(256, bool), np.zeros(256, bool)
_IS_BLANK[list(b" \t\r\n")] = _ENDS_NUMBER[list(b" \t\r\n,]}")] = True


def is_utf8(text: Any) -> bool:
    """Whether an Arrow buffer holds well-formed UTF-8. `pyarrow.json` does not check it."""
    edges = pa.py_buffer(np.array([0, text.size], np.int32))
    try:
        pa.Array.from_buffers(pa.binary(), 1, [None, edges, text]).cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def may_hold_top_level_null(text: Any) -> bool:
    """Whether a brace is followed by `nu`. `null` after an object crashes Arrow's parser, or is a row of its own.

    Args:
        text: uint8; payloads that begin and end with a brace, each followed by a newline.
    """
    at = np.flatnonzero(text == ord("}")) + 1
    for _ in range(_LONGEST_BLANK):
        at = at[at < len(text)]
        if not len(at):
            return False
        byte = text[at]
        if (text.take(at[byte == ord("n")] + 1, mode="clip") == ord("u")).any():
            return True
        at = at[_IS_BLANK[byte]] + 1
    return True  # or many blanks, which are not worth more steps


def has_other_words(text: Any) -> bool:
    """Whether there may be numbers that only Arrow accepts: `Inf`, `-Inf` and `-NaN`."""
    at = np.flatnonzero(text[:-3] == ord("I"))
    at = at[(text[at + 1] == ord("n")) & (text[at + 2] == ord("f"))]
    if _ENDS_NUMBER[text[at + 3]].any():
        return True
    at = np.flatnonzero(text[:-3] == ord("N"))
    return bool(((text[at - 1] == ord("-")) & (text[at + 1] == ord("a"))).any())


def nests_too_deeply(text: Any, offsets: Any) -> bool:
    """Whether one of the payloads has more containers within each other than `MOST_NESTED`.

    Args:
        text: uint8; valid JSON, payload `r` being `text[offsets[r]:offsets[r + 1]]`.
    """
    if np.diff(offsets).max(initial=0) <= 2 * MOST_NESTED:
        return False
    containers = np.diff(np.searchsorted(np.flatnonzero(_opens(text)), offsets))
    return bool(containers.max() > MOST_NESTED and _depth(text) > MOST_NESTED)


def _opens(text: Any) -> Any:
    return (text == ord("{")) | (text == ord("["))


def _depth(text: Any) -> int:
    """The depth of valid JSON: brackets within strings do not count."""
    plain = text.tobytes().replace(rb"\\", b"  ").replace(rb"\"", b"  ")
    seen = np.frombuffer(plain, np.uint8)
    is_outside = np.cumsum(seen == ord('"'), dtype=np.uint8) % 2 == 0
    opens = _opens(seen)
    at = np.flatnonzero((opens | (seen == ord("}")) | (seen == ord("]"))) & is_outside)
    return int(np.cumsum(np.where(opens[at], 1, -1)).max(initial=0))
