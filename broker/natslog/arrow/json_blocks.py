"""Many JSON payloads as one block of lines, which `pyarrow.json` parses at once.

Invariant: each payload is one row. Each begins with `{` and ends with `}`, apart from blanks, and a newline follows it.
A string cannot contain that newline; so if a payload left an object or list open, its last brace would be followed by
the first brace of the next one, which is no valid JSON within a container. Hence every payload has at least one row,
and there are as many rows as payloads.

Payloads that are blank, or that do not begin and end so, are nulls in every column: they are replaced by `{}` before
the join, and cost no more than others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.payloads import Payloads

MOST_BYTES = 2**30
"""Of a block: its size is a 32-bit number."""

_BLANKS = " \t\r\n"
_EMPTY = pa.scalar(b"{}", pa.binary())


def without_object(payloads: Payloads) -> tuple[Any, Any]:
    """(a bool per payload: it is blank, a bool per payload: it does not begin and end as an object does)."""
    suspect = ~_in_braces(payloads)
    blank, malformed = np.zeros(len(payloads), bool), np.zeros(len(payloads), bool)
    if suspect.any():
        some = _binary(payloads.text, payloads.offsets).filter(pa.array(suspect)).view(pa.string())
        trimmed = Payloads.of(pc.ascii_trim(some, _BLANKS).view(pa.binary()))
        blank[suspect] = trimmed.are_empty
        malformed[suspect] = ~(trimmed.are_empty | _in_braces(trimmed))
    return blank, malformed


def _in_braces(payloads: Payloads) -> Any:
    """A bool per payload: its first byte opens an object, and its last one closes one."""
    text, starts, ends = payloads.text, payloads.offsets[:-1], payloads.offsets[1:]
    if not len(text):
        return np.zeros(len(payloads), bool)
    first, last = text.take(starts, mode="clip"), text.take(ends - 1, mode="clip")
    return (ends - starts > 1) & (first == ord("{")) & (last == ord("}"))


def joined(payloads: Payloads, replaced: Any) -> tuple[Any, Any]:
    """(a buffer of all payloads, a newline after each; offsets of them there). `{}` is in the place of the replaced."""
    values = _binary(payloads.text, np.append(payloads.offsets, payloads.offsets[-1:]))  # the last is empty
    if replaced.any():
        values = pc.if_else(pa.array(np.append(replaced, False)), _EMPTY, values)
    as_one = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    edges = np.frombuffer(values.buffers()[1], np.int32)[: len(values)]
    return pc.binary_join(as_one, b"\n")[0].as_buffer(), edges + np.arange(len(edges), dtype=np.int32)


def _binary(text: Any, offsets: Any) -> Any:
    """An Arrow array on these bytes."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
