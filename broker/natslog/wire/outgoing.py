"""NATS protocol for many messages at once, built by a kernel: one pass over the columns, no Python per message."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.row_buffers import offsets_of
from natslog.wire import native

Sequences = npt.NDArray[np.int64]
TextBuffers = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
"""Offsets and bytes of a variable-length column."""

_BINARY = pa.binary()
_FRAME_BYTES = 80
"""An upper bound of what a frame holds besides the columns: verb, blanks, lengths, line ends, a sequence number."""
_HEADER_BYTES = len(b"NATS/1.0\r\n" + b"Nats-Msg-Id: \r\n" + b"\r\n")
_ACK_HEADER_BYTES = len(b"Natslog-Ack-To: .~9223372036854775807\r\n")

BY_REPLY, BY_HEADER = 1, 2
"""Where an ack is requested: in the message's reply subject, in the header `Natslog-Ack-To`, or in both."""


def _constant(values: Any, kind: Any) -> npt.NDArray[Any]:
    array = np.array(values, kind)
    array.flags.writeable = False  # as columns are: a kernel is compiled for each combination it meets
    return array


_NO_TEXTS: TextBuffers = (_constant([], np.int32), _constant([], np.uint8))
_NO_MARKS = _constant([], np.bool_)
_NO_SEQUENCES = _constant([], np.int64)


def texts_of(column: Any) -> TextBuffers:
    """Offsets and bytes of a string or binary column; nothing is copied."""
    offsets, data = offsets_of(column), column.buffers()[2]
    values = np.frombuffer(data, np.uint8) if data is not None and data.size else _NO_TEXTS[1]
    offsets.flags.writeable = values.flags.writeable = False
    return offsets, values


def gathered(buffer: npt.NDArray[np.uint8], starts: Sequences, lengths: Sequences) -> TextBuffers:
    """Copies of these parts of a buffer."""
    offsets, data = np.zeros(len(starts) + 1, np.int32), np.empty(int(lengths.sum()), np.uint8)
    native.gather(buffer, np.ascontiguousarray(starts), np.ascontiguousarray(lengths), data, offsets, 0)
    return offsets, data


def taken(texts: TextBuffers, rows: Sequences) -> TextBuffers:
    """Copies of some of the texts."""
    offsets, data = texts
    starts = offsets[rows].astype(np.int64)
    return gathered(data, starts, offsets[rows + 1] - starts)


def publish_frames(
    subjects: Any,
    bodies: Any,
    *,
    lines: Any | None = None,
    ids: Any | None = None,
    inbox: str = "",
    sequences: Sequences | None = None,
    ack_to: int = BY_REPLY,
) -> memoryview:
    """`PUB` frames, one after another; `HPUB` for the rows that have headers.

    Args:
        subjects, bodies: string or binary columns of the same length, without nulls.
        lines: header lines of each row (see `header_lines`), or None.
        ids: sent as `Nats-Msg-Id` where there is one; string column, or None.
        inbox, sequences: row i asks for an answer to `<inbox>.~<sequences[i]>`; None: no answers. `ack_to`: how.
    """
    if not len(bodies):
        return memoryview(b"")
    subject_texts, body_texts = texts_of(subjects), texts_of(bodies)
    line_texts = _NO_TEXTS if lines is None else texts_of(lines)
    id_texts = _NO_TEXTS if ids is None else texts_of(ids)
    has_id = _NO_MARKS if ids is None else _constant(pc.is_valid(ids), np.bool_)
    prefix = _constant(np.frombuffer(reply_prefix(inbox), np.uint8), np.uint8)
    given = _NO_SEQUENCES if sequences is None else _constant(sequences, np.int64)
    size = sum(int(offsets[-1] - offsets[0]) for offsets, _ in (subject_texts, body_texts))
    size += sum(int(offsets[-1] - offsets[0]) for offsets, _ in (line_texts, id_texts) if len(offsets))
    frame_bytes = _FRAME_BYTES + _HEADER_BYTES + _ACK_HEADER_BYTES + 2 * len(prefix)
    out = np.empty(size + len(bodies) * frame_bytes, np.uint8)
    texts = (*subject_texts, *body_texts, *line_texts, *id_texts)
    filled = native.publish_frames(*texts, has_id, prefix, given, ack_to, out)
    return out.data[:filled]


def reply_prefix(inbox: str) -> bytes:
    """What a number follows in the reply subjects of a publisher. With `~`, consecutive numbers may get one ack."""
    return f"{inbox}.~".encode()


def header_lines(pairs: Any | None, keys: Any | None) -> Any | None:
    """The `Name: value` lines of each row's own headers and of its key; None where no row can have any.

    Args:
        pairs: list<struct<key, value>> array, nulls and empty lists allowed, or None.
        keys: string or binary array, sent as `Natslog-Key` where there is one, or None.
    """
    parts: list[Any] = []
    if keys is not None:
        line = pc.binary_join_element_wise(b"Natslog-Key: ", keys.cast(_BINARY), b"\r\n", b"")
        parts.append(pc.fill_null(line, b""))
    if pairs is not None:
        parts.append(_pair_lines(pairs))
    return pc.binary_join_element_wise(*parts, b"") if parts else None


def _pair_lines(pairs: Any) -> Any:
    """The lines of each row's pairs as one text."""
    flat = pairs.flatten()
    keys, values = (_without_nulls(flat.field(name).cast(_BINARY)) for name in ("key", "value"))
    lines = pc.binary_join_element_wise(keys, b": ", values, b"\r\n", b"")
    counts = pc.fill_null(pc.list_value_length(pairs), 0).to_numpy(zero_copy_only=False)
    edges = np.zeros(len(pairs) + 1, np.int32)
    np.cumsum(counts, out=edges[1:])
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(edges), lines), b"")


def _without_nulls(texts: Any) -> Any:
    """Direct appends may have headers without a value: the others of the message are sent with it."""
    return pc.fill_null(texts, b"") if texts.null_count else texts


def ack_header_bytes(inbox: str) -> int:
    """The most that the header takes in which an ack to this inbox is requested."""
    return _ACK_HEADER_BYTES + len(inbox)


def sent_bytes(bodies: Any, lines: Any | None, ids: Any | None, more_bytes: int = 0) -> Any:
    """What the server counts against its `max_payload`: header block and body of each row.

    Args:
        more_bytes: of further headers.
    """
    size = pc.binary_length(bodies)
    if lines is None and ids is None and not more_bytes:
        return size
    for column in (lines, ids):
        if column is not None:
            size = pc.add(size, pc.fill_null(pc.binary_length(column), 0))
    return pc.add(size, _HEADER_BYTES + more_bytes)
