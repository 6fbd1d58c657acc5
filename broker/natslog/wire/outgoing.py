"""NATS protocol for many messages at once, built by Arrow's string kernels: no Python per message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_BINARY = pa.binary()
HEADER_LINE = b"NATS/1.0\r\n"


def publish_frames(subjects: Any, bodies: Any, *, headers: Any | None = None, replies: Any | None = None) -> bytes:
    """`PUB` frames (`HPUB` where `headers` is given), one after another.

    Args:
        subjects: binary array. `bodies`: binary array of the same length.
        headers: binary array of whole header blocks (see `header_blocks`), or None.
        replies: binary array of reply subjects, or None.
    """
    parts: list[Any] = [b"PUB " if headers is None else b"HPUB ", subjects, b" "]
    if replies is not None:
        parts += [replies, b" "]
    if headers is None:
        parts += [_length(bodies), b"\r\n", bodies, b"\r\n"]
    else:
        total = number_text(pc.add(pc.binary_length(headers), pc.binary_length(bodies)))
        parts += [_length(headers), b" ", total, b"\r\n", headers, bodies, b"\r\n"]
    return _joined_bytes(pc.binary_join_element_wise(*parts, b""))


def header_blocks(pairs: Any | None, extra: dict[str, Any], rows: int) -> Any:
    """Header blocks, each with its `NATS/1.0` line and closing blank line.

    Args:
        pairs: list<struct<key, value>> array, nulls and empty lists allowed, or None.
        extra: header name → binary array of values; a null leaves the header out.
    """
    parts: list[Any] = [pa.array([HEADER_LINE] * rows, _BINARY)]
    for name, values in extra.items():
        line = pc.binary_join_element_wise(f"{name}: ".encode(), values.cast(_BINARY), b"\r\n", b"")
        parts.append(pc.fill_null(line, b""))
    if pairs is not None:
        parts.append(_pair_lines(pairs))
    return pc.binary_join_element_wise(*parts, b"\r\n", b"")


def _pair_lines(pairs: Any) -> Any:
    """The lines of each row's pairs as one text."""
    flat = pairs.flatten()
    keys, values = flat.field("key").cast(_BINARY), flat.field("value").cast(_BINARY)
    lines = pc.binary_join_element_wise(keys, b": ", values, b"\r\n", b"")
    counts = pc.fill_null(pc.list_value_length(pairs), 0).to_numpy(zero_copy_only=False)
    edges = np.zeros(len(pairs) + 1, np.int32)
    np.cumsum(counts, out=edges[1:])
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(edges), lines), b"")


def _length(column: Any) -> Any:
    return number_text(pc.binary_length(column))


def number_text(numbers: Any) -> Any:
    """Whole numbers as decimal digits, a binary array."""
    return numbers.cast(pa.string()).cast(_BINARY)


def _joined_bytes(column: Any) -> bytes:
    """All values of a binary column one after another."""
    if not len(column):
        return b""
    offsets, data = column.buffers()[1:]
    edges = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return bytes(data.slice(int(edges[0]), int(edges[-1] - edges[0])).to_pybytes())
