"""Rows that cannot be sent, as messages to the dead letter subject.

A dead letter has the row's value (cut to what the server accepts) and, in headers, the reason, the row's subject and
its origin: `Natslog-Error`, `Natslog-Subject`, `Natslog-Stream` and `Natslog-Offset` (where the rows have these
columns, as those of the source do), `Natslog-Truncated` with the whole value's size. The row's own key and headers are
kept if they are allowed. Its message id is the one that the sink gives the row: a repeated batch stores it once.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from natslog.arrow.schema import HEADERS_TYPE
from natslog.wire.outgoing_rows import Rows, unsendable_rows

_HEADER_ROOM_BYTES = 512
_SHOWN_CHARS = 1000


def split_dead(
    rows: Rows, batch: pa.RecordBatch, *, subject: str, max_payload_bytes: int, own_ids: Any
) -> tuple[Rows, Rows | None]:
    """The rows that can be sent, and letters for the others, if there are any.

    Args:
        batch: the batch that the rows were made from; its columns `stream` and `offset` are used if it has them.
        own_ids: string array, the ids that the sink gives the rows.
    """
    reasons = unsendable_rows(rows, max_payload_bytes)
    if not reasons:
        return rows, None
    dead = np.fromiter(reasons, np.int64)
    kept = np.setdiff1d(np.arange(len(rows)), dead)
    origin = batch.select([name for name in ("stream", "offset") if name in batch.schema.names])
    letters = [_letter(rows, origin, row, reason, max_payload_bytes) for row, reason in reasons.items()]
    return rows.take(kept), Rows(
        subjects=pa.repeat(pa.scalar(subject), len(letters)),
        values=pa.array([value for value, _ in letters], pa.binary()),
        headers=pa.array([headers for _, headers in letters], HEADERS_TYPE),
        ids=own_ids.take(pa.array(dead)),
    )


def _letter(
    rows: Rows, origin: pa.RecordBatch, row: int, reason: str, max_payload_bytes: int
) -> tuple[bytes, list[dict[str, str]]]:
    headers = {"Natslog-Error": reason}
    subject = rows.subjects[row].as_py()
    if subject is not None:
        headers["Natslog-Subject"] = _in_a_line(subject[:_SHOWN_CHARS])
    for name in origin.schema.names:
        headers[f"Natslog-{name.capitalize()}"] = _in_a_line(str(origin.column(name)[row].as_py()))
    own = _own_headers(rows, row)
    value = rows.values[row].as_py() or b""
    room_bytes = max_payload_bytes - _HEADER_ROOM_BYTES - _size_bytes(headers.items())
    if len(value) + _size_bytes((pair["key"], pair["value"]) for pair in own) > room_bytes:
        own = []
    if len(value) > room_bytes:
        headers["Natslog-Truncated"] = str(len(value))
        value = value[:room_bytes]
    return value, [{"key": key, "value": text} for key, text in headers.items()] + own


def _own_headers(rows: Rows, row: int) -> list[dict[str, str]]:
    """The row's key and headers, without those that a message cannot contain."""
    alone = rows.take(np.array([row]))
    key = alone.keys[0].as_py() if alone.keys is not None else None
    pairs = alone.headers[0].as_py() if alone.headers is not None else None
    if key is not None:
        key_text = key.decode(errors="replace") if isinstance(key, bytes) else key
        pairs = [{"key": "Natslog-Key", "value": key_text}, *(pairs or [])]
    return [pair for pair in pairs or [] if _is_sendable_header(pair)]


def _is_sendable_header(pair: dict[str, str]) -> bool:
    headers = pa.array([[pair]], HEADERS_TYPE)
    only = Rows(subjects=pa.array(["a"]), values=pa.array([b""], pa.binary()), headers=headers)
    return not unsendable_rows(only, _SHOWN_CHARS * 1000)


def _in_a_line(text: str) -> str:
    """The text itself if a header line can contain it, else as JSON."""
    return text if text.isprintable() and text == text.strip() else json.dumps(text)


def _size_bytes(pairs: Any) -> int:
    return sum(len(key.encode()) + len(value.encode()) + 4 for key, value in pairs)
