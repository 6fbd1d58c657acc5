"""Message ids of natslog's own form, which its Spark sink sends: `~` and 16 letters of an alphabet of 64, so 96 bits.

A stored batch has them packed into 12 bytes a row beside its columns, not in `headers`: few bytes on disk, none in an
answer to a reader. Ids of any other form, as other publishers choose them, stay where they are.
"""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.wire import native

PackedIds = npt.NDArray[np.uint8]
"""Shape (rows, 12); zeros where a row has no id of this form."""

ALPHABET = np.frombuffer((string.ascii_letters + string.digits + "-_").encode(), np.uint8)
ID_LETTERS = 17
PACKED_BYTES = 12

LETTER_VALUES = np.full(256, 255, np.uint8)
LETTER_VALUES[ALPHABET] = np.arange(64, dtype=np.uint8)


def packed_id(text: bytes) -> PackedIds:
    """The 12 bytes of an id of this form. Raises ValueError: it has another form."""
    values = LETTER_VALUES[np.frombuffer(text, np.uint8)].astype(np.uint32)
    if len(text) != ID_LETTERS or text[:1] != b"~" or (values[1:] > 63).any() or not values[1:].any():
        raise ValueError(f"{text[:40]!r} does not consist of ~ and 16 letters")
    groups = (values[1:].reshape(4, 4) << np.array([0, 6, 12, 18], np.uint32)).sum(axis=1, dtype=np.uint32)
    packed: PackedIds = groups.view(np.uint8).reshape(4, 4)[:, :3].reshape(PACKED_BYTES)
    return packed


def unpacked(ids: PackedIds) -> npt.NDArray[np.uint8]:
    """`ID_LETTERS` of each, one after another; `~aaaaaaaaaaaaaaaa` where there is none."""
    letters = np.empty(len(ids) * ID_LETTERS, np.uint8)
    native.unpack_ids(ids, ALPHABET, letters)
    return letters


def hashed(ids: PackedIds) -> npt.NDArray[np.uint64]:
    """As `kernels_ids.hash_ids` of their texts, shape (rows, 2); zeros where there is none."""
    starts = np.arange(0, len(ids) * ID_LETTERS, ID_LETTERS, dtype=np.int64)
    lengths = np.where(ids.any(axis=1), ID_LETTERS, -1)
    hashes = np.zeros((len(ids), 2), np.uint64)
    native.hash_ids(unpacked(ids), starts, lengths, hashes)
    return hashes


def texts_of_width(letters: npt.NDArray[np.uint8], width: int) -> Any:
    """String array of texts of one width that stand one after another."""
    offsets = np.arange(0, len(letters) + 1, width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(letters) // width, [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
    )
