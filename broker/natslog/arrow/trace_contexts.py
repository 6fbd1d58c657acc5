"""Trace contexts (`traceparent`, W3C) in columns of headers: written to all rows of a batch, and found in some of them.

Source: W3C, "Trace Context", section 3.2.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.arrow.row_buffers import RowBuffers
from natslog.arrow.schema import HEADERS_TYPE, rows_of_items
from natslog.tracing import TRACEPARENT

Marks = npt.NDArray[np.bool_]

TRACEPARENT_BYTES = len(TRACEPARENT) + 55
"""What the header takes in a row."""
_VALUE_BYTES = 55
_WELL_FORMED = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_NAME = TRACEPARENT.encode()
_PAIRS = 16 * 1024  # that are looked at in a batch
_CANDIDATES = 64  # of these, whose names are read
_PLACES = (10, 11, 13, 14)  # offsets and data of the names, and of the values, among the buffers of `RowBuffers`


def with_traceparent(headers: pa.Array[Any] | None, rows: int, traceparent: str, where: Marks | None = None) -> Any:
    """The column with this header added to each row that has none.

    Args:
        headers: of `HEADERS_TYPE`; None: no row has any.
        where: only to these rows; None: to all.
    """
    added = np.ones(rows, np.bool_) if where is None else where.copy()
    if headers is None or headers.null_count == rows:
        return _of_one_each(rows, traceparent, added)
    headers = headers.cast(HEADERS_TYPE)
    pairs, row_of = headers.flatten(), rows_of_items(headers)
    added[row_of[_are_traceparents(pairs)]] = False
    counts = np.bincount(row_of, minlength=rows)
    ends = np.cumsum(counts + added)
    chosen = np.full(int(ends[-1]) if rows else 0, len(pairs), np.int64)  # the added pair, which is behind the others
    first = ends - counts - added
    within = np.arange(len(pairs)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen[first[row_of] + within] = np.arange(len(pairs))
    new = pa.array([{"key": TRACEPARENT, "value": traceparent}], HEADERS_TYPE.value_type)
    edges = pa.array(np.concatenate(([0], ends)).astype(np.int32))
    is_null = pa.array(~added & np.asarray(headers.is_null(), np.bool_))
    return pa.ListArray.from_arrays(
        edges, pa.concat_arrays([pairs, new]).take(pa.array(chosen)), type=HEADERS_TYPE, mask=is_null
    )


def _of_one_each(rows: int, traceparent: str, added: Marks) -> Any:
    """The column where no row has headers before."""
    edges = np.zeros(rows + 1, np.int32)
    np.cumsum(added, out=edges[1:])
    pairs = pa.StructArray.from_arrays(
        [pa.repeat(text, int(edges[-1])) for text in (TRACEPARENT, traceparent)], names=["key", "value"]
    )
    return pa.ListArray.from_arrays(pa.array(edges), pairs, type=HEADERS_TYPE, mask=pa.array(~added))


def _are_traceparents(pairs: pa.Array[Any]) -> Marks:
    """Names as publishers write them: the header of some client libraries is `Traceparent`."""
    import pyarrow.compute as pc  # takes long to import

    return np.asarray(pc.equal(pc.utf8_lower(pairs.field("key")), TRACEPARENT), np.bool_)


def is_traceparent(text: str) -> bool:
    """Whether this is a trace context."""
    return text.isascii() and _WELL_FORMED.fullmatch(text.encode()) is not None


def sampled_contexts(rows: RowBuffers, most: int) -> list[str]:
    """Different trace contexts of a batch whose traces are sampled, at most `most` of them.

    The work is bounded, whatever the size of the batch: of its first 16,384 headers, those with a name of the right
    length are candidates, and 64 of these, evenly distributed, are read.
    """
    if not rows.nodes[3][0]:  # there are no headers
        return []
    found_buffers = (rows.buffers[at] for at in _PLACES)  # Arrow has no buffer for texts that are all empty
    edges, names, value_edges, values = (b"" if one is None else one for one in found_buffers)
    offsets = np.frombuffer(edges, np.int32, min(rows.nodes[3][0], _PAIRS) + 1)
    candidates = np.flatnonzero(np.diff(offsets) == len(_NAME))
    if len(candidates) > _CANDIDATES:
        candidates = candidates[np.linspace(0, len(candidates) - 1, _CANDIDATES, dtype=np.int64)]
    value_offsets, names, values = np.frombuffer(value_edges, np.int32), memoryview(names), memoryview(values)
    found: dict[bytes, None] = {}
    for pair in candidates.tolist():
        at, start, end = int(offsets[pair]), int(value_offsets[pair]), int(value_offsets[pair + 1])
        if end - start != _VALUE_BYTES or bytes(names[at : at + len(_NAME)]).lower() != _NAME:
            continue
        value = bytes(values[start:end])
        if value not in found and _WELL_FORMED.fullmatch(value) and int(value[-2:], 16) & 1:
            found[value] = None
            if len(found) == most:
                break
    return [value.decode() for value in found]
