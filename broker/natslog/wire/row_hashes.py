"""What a row consists of, as 128 bits: to recognise rows that are sent again, and to tell them from changed ones.

A row's hash covers its subject, key, headers and value; a missing value and an empty one differ. It is not a
cryptographic hash (see `kernels_hash`).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.wire import native
from natslog.wire.outgoing import texts_of
from natslog.wire.own_ids import ALPHABET, ID_LETTERS, texts_of_width

Hashes = npt.NDArray[np.uint64]
"""Shape (rows, 2)."""

_WORD_BYTES = 8


def row_hashes(
    subjects: Any, values: Any, keys: Any | None, headers: Any | None, start: Hashes | None = None
) -> Hashes:
    """Of each row.

    Args:
        subjects: string array. `values`, `keys`: binary arrays. `headers`: list<struct<key, value>> array. A column
            that is None counts as one of nulls.
        start: what the hashes begin with, shape (rows, 2); None: zeros. It is overwritten with the result.
    """
    rows = len(values)
    hashes = np.zeros((rows, 2), np.uint64) if start is None else start
    word = np.zeros(1, np.uint64)
    for column in (subjects, keys, values):
        _mix(pa.nulls(rows, pa.binary()) if column is None else column, word, hashes)
    if headers is not None:
        _mix_headers(headers, word, hashes)
    else:
        native.mix_items(np.zeros(rows + 1, np.int64), np.zeros(rows, np.bool_), np.zeros((0, 2), np.uint64), hashes)
    native.finish_hashes(hashes)
    return hashes


def text_shares(texts: Any, shares: int) -> npt.NDArray[np.uint64]:
    """For each text of a string or binary array a number below `shares`: for equal texts the same one, for ever."""
    hashes = np.zeros((len(texts), 2), np.uint64)
    _mix(texts, np.zeros(1, np.uint64), hashes)
    native.finish_hashes(hashes)
    return hashes[:, 0] % np.uint64(shares)


def _mix(texts: Any, word: npt.NDArray[np.uint64], hashes: Hashes) -> None:
    offsets, data = texts_of(texts)
    present = np.ones(0, np.bool_)
    if texts.null_count:
        present = np.array(pc.is_valid(texts), np.bool_)
    native.mix_texts(offsets, data, present, word, word.view(np.uint8), hashes)


def _mix_headers(headers: Any, word: npt.NDArray[np.uint64], hashes: Hashes) -> None:
    pairs = headers.flatten()
    items = np.zeros((len(pairs), 2), np.uint64)
    if len(pairs):
        _mix(pairs.field("key"), word, items)
        _mix(pairs.field("value"), word, items)
    counts = pc.fill_null(pc.list_value_length(headers), 0).to_numpy(zero_copy_only=False)
    edges = np.zeros(len(headers) + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    native.mix_items(edges, np.array(pc.is_valid(headers), np.bool_), items, hashes)


def content_digest(hashes: Hashes) -> int:
    """One number of 128 bits for all rows: the same in any order, and for any partition, of the same rows.

    The digests of parts are added up with `sum_digests`.
    """
    first, second = (int(word) for word in hashes.sum(axis=0, dtype=np.uint64))
    return first << 64 | second


def sum_digests(digests: Any) -> int:
    """Of the rows of all parts."""
    mask, first, second = 2**64 - 1, 0, 0
    for digest in digests:
        first, second = (first + (digest >> 64)) & mask, (second + digest) & mask
    return first << 64 | second


def position_starts(context: str, first: int, rows: int) -> Hashes:
    """What the hashes of rows begin with that are number `first`, `first + 1`, … of `context`."""
    key = np.frombuffer(hashlib.blake2b(context.encode(), digest_size=2 * _WORD_BYTES).digest(), np.uint64)
    numbers = np.arange(first, first + rows, dtype=np.uint64)
    return np.ascontiguousarray(np.stack((key[0] + numbers, key[1] ^ numbers), axis=1))


def as_ids(hashes: Hashes) -> Any:
    """96 bits of each hash as a message id of natslog's own form (see `own_ids`); string array."""
    letters = np.empty(len(hashes) * ID_LETTERS, np.uint8)
    native.hashes_as_texts(hashes, ALPHABET, letters)
    return texts_of_width(letters, ID_LETTERS)
