r"""PubAcks for a whole commit, as one run of NATS protocol built by a kernel: no Python per message.

    PUB _INBOX.x 50\r\n{"stream":"orders","seq":42,"offset":41,"epoch":3}\r\n

`seq` is `offset + 1`, as JetStream counts, so that the publish calls of JetStream clients can read it.
"""

from __future__ import annotations

import functools
import json

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.errors import NatslogError
from natslog.ingest.columns import Texts
from natslog.wire import native
from natslog.wire.outgoing import publish_frames

_MIDDLE = np.frombuffer(b',"offset":', np.uint8)
_NONE = np.zeros(0, np.bool_)
_NO_COUNTS = np.zeros(0, np.int64)
_FRAME_AND_NUMBERS_BYTES = 96
"""An upper bound of what an ack holds besides reply subject and fixed texts: verb, length, line ends, numbers."""


def stored(
    replies: Texts,
    offsets: npt.NDArray[np.int64],
    *,
    stream: str,
    epoch: int,
    duplicate: npt.NDArray[np.bool_] | None = None,
    counts: npt.NDArray[np.int64] | None = None,
) -> memoryview:
    """Acks of committed rows.

    Args:
        replies: reply subjects, empty where none was requested.
        offsets: where each row is stored (for a duplicate: where the first one is).
        duplicate: marks rows that were stored before; None where none was.
        counts: the number of rows of an envelope, at its last one; 0 for other rows. None where there was no envelope.
    """
    head, tails = _texts(stream, epoch)
    fixed_bytes = len(head) + len(_MIDDLE) + len(tails[1]) + _FRAME_AND_NUMBERS_BYTES
    out = np.empty(replies.size_bytes + len(offsets) * fixed_bytes, np.uint8)
    marks = _NONE if duplicate is None else duplicate
    rows_of = _NO_COUNTS if counts is None else counts
    filled = native.stored_acks(replies.data, replies.offsets, offsets, marks, rows_of, head, _MIDDLE, *tails, out)
    return out.data[:filled]


@functools.lru_cache(1024)
def _texts(stream: str, epoch: int) -> tuple[npt.NDArray[np.uint8], tuple[npt.NDArray[np.uint8], ...]]:
    """What every ack of a stream begins with, and the two ways it ends."""
    head = f'{{"stream":{json.dumps(stream)},"seq":'
    endings = (f',"epoch":{epoch}}}', f',"epoch":{epoch},"duplicate":true}}')
    return np.frombuffer(head.encode(), np.uint8), tuple(np.frombuffer(text.encode(), np.uint8) for text in endings)


def refused(replies: Texts, error: NatslogError, *, stream: str) -> memoryview:
    """The same answer to every row that has a reply subject.

    `code` is the HTTP status, as in JetStream; `err_code` a JetStream number where one means the same, else 10500 up.
    """
    body = {
        "error": {"code": error.status, "err_code": _ERR_CODES.get(error.code, 10500), "description": error.message},
        "stream": stream,
    }
    subjects = replies.to_arrow(pa.binary())
    subjects = subjects.filter(pc.greater(pc.binary_length(subjects), 0))
    return publish_frames(subjects, pa.array([json.dumps(body).encode()] * len(subjects), pa.binary()))


_ERR_CODES = {"storage_full": 10047, "storage_failed": 10077, "overloaded": 10167, "corrupt_log": 10501}
"""JetStream: 10047 insufficient resources (storage), 10077 stream store failed, 10167 too many requests."""
