r"""PubAcks for a whole commit, as one run of NATS protocol built by Arrow's string kernels: no Python per message.

    PUB _INBOX.x 58\r\n{"stream": "orders", "seq": 42, "offset": 41, "epoch": 3}\r\n

`seq` is `offset + 1`, as JetStream counts, so that JetStream clients' publish calls understand it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.errors import NatslogError
from natslog.wire.outgoing import number_text, publish_frames


def _framed(replies: Any, bodies: Any) -> bytes:
    """Frames to those rows that have a reply subject."""
    asked = pc.greater(pc.binary_length(replies), 0)
    return publish_frames(replies.filter(asked), bodies.filter(asked))


def stored(
    replies: pa.Array[Any],
    offsets: npt.NDArray[np.int64],
    *,
    stream: str,
    epoch: int,
    duplicate: npt.NDArray[np.bool_] | None = None,
) -> bytes:
    """Acks of committed rows.

    Args:
        replies: reply subjects, binary, empty where nobody asked.
        offsets: where each row is stored (for a duplicate: where the first one is).
        duplicate: marks rows that were stored before; None where none was.
    """
    rows = pa.array(offsets)
    if duplicate is None:
        tail: Any = f', "epoch": {epoch}}}'.encode()
    else:
        endings = pa.array([f', "epoch": {epoch}}}'.encode(), f', "epoch": {epoch}, "duplicate": true}}'.encode()])
        tail = endings.take(pa.array(duplicate.astype(np.int32)))
    head = f'{{"stream": {json.dumps(stream)}, "seq": '.encode()
    bodies = pc.binary_join_element_wise(
        head, number_text(pc.add(rows, 1)), b', "offset": ', number_text(rows), tail, b""
    )
    return _framed(replies, bodies)


def refused(replies: pa.Array[Any], error: NatslogError, *, stream: str) -> bytes:
    """The same answer to every row that has a reply subject.

    `code` is the HTTP status, as in JetStream; `err_code` a JetStream number where one means the same, else 10500 up.
    """
    body = {
        "error": {"code": error.status, "err_code": _ERR_CODES.get(error.code, 10500), "description": error.message},
        "stream": stream,
    }
    return _framed(replies, pa.array([json.dumps(body).encode()] * len(replies), pa.binary()))


_ERR_CODES = {"storage_full": 10047, "storage_failed": 10077, "overloaded": 10167, "corrupt_log": 10501}
"""JetStream: 10047 insufficient resources (storage), 10077 stream store failed, 10167 too many requests."""
