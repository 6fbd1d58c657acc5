"""Message ids (`Nats-Msg-Id`) of stored rows as 128-bit hashes: what the deduplication window compares."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow.row_buffers import offsets_of
from natslog.arrow.schema import rows_of_items
from natslog.wire import native

Ids: TypeAlias = npt.NDArray[np.uint64]
"""Shape (rows, 2); zeros: the row has no id."""

MAX_IDS = 512 * 1024
"""The newest ids of a stream that are known in any case; where more come within its window, the window is shorter."""


def ids_of_headers(headers: pa.Array[Any]) -> Ids | None:
    """Hashes of the `Nats-Msg-Id` of stored rows, shape (rows, 2); None where no row has one."""
    pairs = headers.flatten()
    is_id = pc.and_(pc.equal(pairs.field("key"), "Nats-Msg-Id"), pc.greater(pc.binary_length(pairs.field("value")), 0))
    is_id = pc.fill_null(is_id, False)
    if not pc.any(is_id).as_py():
        return None
    rows = rows_of_items(headers)[is_id.to_numpy(zero_copy_only=False)]
    texts = pairs.field("value").filter(is_id)
    first_rows, first = np.unique(rows, return_index=True)
    texts = texts.take(pa.array(first))
    offsets = offsets_of(texts).astype(np.int64)
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    hashes = np.zeros((len(texts), 2), np.uint64)
    native.hash_ids(data, offsets[:-1], np.diff(offsets), hashes)
    ids = np.zeros((len(headers), 2), np.uint64)
    ids[first_rows] = hashes
    return ids
