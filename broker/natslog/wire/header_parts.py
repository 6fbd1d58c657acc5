"""What the header blocks of received frames consist of: positions in the receive buffer, before anything is copied."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from natslog.wire import native
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN
from natslog.wire.own_ids import LETTER_VALUES, PACKED_BYTES, PackedIds

Longs = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]

_KEY = np.frombuffer(b"Natslog-Key", np.uint8)
_CORRELATION = np.frombuffer(b"Natslog-Correlation-Id", np.uint8)
_ACK_TO = np.frombuffer(b"Natslog-Ack-To", np.uint8)
_ACK = np.frombuffer(b"Natslog-Ack", np.uint8)
_ID = np.frombuffer(b"Nats-Msg-Id", np.uint8)


class HeaderParts(NamedTuple):
    """See `kernels.split_headers`. `pairs`: with room for more of them.

    Attributes:
        has_headers: marks the frames of which a header is stored, or an empty block. hashes: of ids, zeros where there
            is none.
    """

    pairs: Longs
    first_pair: Longs
    keys: Longs
    packed: PackedIds
    has_headers: Marks
    hashes: npt.NDArray[np.uint64]
    correlations: Longs
    wants_full_ack: Marks


def split_headers(frames: Frames, most_lines: int, *, packs_ids: bool = True) -> HeaderParts:
    """Args:
    most_lines: at least as many as there are. packs_ids: message ids of natslog's own form, and the subject of the ack,
        are left out of the headers.
    """
    buffer, rows, count = frames.buffer, frames.rows, len(frames.rows)
    packed, (omitted, wants_full_ack) = np.zeros((count, PACKED_BYTES), np.uint8), np.zeros((2, count), np.bool_)
    pairs = np.empty((4, most_lines), np.int64)
    first_pair = np.zeros(count + 1, np.int64)
    keys, ids, correlations = np.zeros((3, 2, count), np.int64)
    native.split_headers(
        buffer, rows, _KEY, _ID, pairs, first_pair, keys, ids, LETTER_VALUES, packed if packs_ids else packed[:0],
        _CORRELATION, correlations, _ACK_TO if packs_ids else _ACK_TO[:0], omitted, _ACK, wants_full_ack,
    )  # fmt: skip
    hashes = np.zeros((count, 2), np.uint64)
    native.hash_ids(buffer, ids[0], ids[1], hashes)
    has_headers = (rows[:, HEADER_LEN] > 0) & ~(omitted & (first_pair[1:] == first_pair[:-1]))
    return HeaderParts(pairs, first_pair, keys, packed, has_headers, hashes, correlations, wants_full_ack)
