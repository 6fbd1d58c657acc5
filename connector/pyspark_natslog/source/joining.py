"""Small stored batches, joined before Spark gets them: each batch costs PySpark, Spark and decoders a fixed time, which
is that of copying some hundred kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

_JOINED_BYTES = 4 * 1024 * 1024
_SMALL_BYTES = 1024 * 1024


def joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order. Large batches are passed on as they are, without a copy."""
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        size_bytes = batch.get_total_buffer_size()  # `nbytes` takes 30 times as long
        is_small = size_bytes <= _SMALL_BYTES
        if waiting and (not is_small or waiting_bytes + size_bytes > _JOINED_BYTES):
            yield _one(waiting)
            waiting, waiting_bytes = [], 0
        if is_small:
            waiting.append(batch)
            waiting_bytes += size_bytes
        else:
            yield batch
    if waiting:
        yield _one(waiting)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
