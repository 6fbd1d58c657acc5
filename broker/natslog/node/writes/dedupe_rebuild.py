"""Message ids of a log: the deduplication window after a start or a change of its length is filled from the log
itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.arrow import ipc
from natslog.errors import CorruptLog, OffsetOutOfRange
from natslog.ingest.dedupe import MAX_IDS, DedupeWindow, Ids, ids_of_headers
from natslog.log import StreamLog
from natslog.log.expiry import header_values
from natslog.wire import own_ids

_PLAN_BYTES = 256 * 1024 * 1024  # not read at once: a batch at a time, and only those with headers


def rebuilt_dedupe(window_s: float, log: StreamLog) -> tuple[DedupeWindow, CorruptLog | None]:
    """A window with the ids of the messages stored within it, read from the log (at most the newest `MAX_IDS`).

    Messages that are stored and not confirmed as committed count too: they will be committed if this replica leads. The
    window is that of the newest message: no clock is used, and every replica of the log gets the same window.

    Returns:
        The window, and the first damage that hid ids from it: ids after the damage are still in the window.
    """
    window, damage = DedupeWindow(window_s), None
    if not window.window_us:
        return window, None
    end = log.log_end_offset
    start = max(end - MAX_IDS, log.log_start_offset)
    try:
        start = max(start, log.reader.offset_at(window.oldest_us(log.newest_timestamp_us))[0])
    except (CorruptLog, OSError) as error:
        damage = _as_damage(error)
    while start < end:
        try:
            start = _remember_from(start, window, log)
        except OffsetOutOfRange:  # retention was faster
            start = max(start, log.log_start_offset)
        except (CorruptLog, OSError) as error:
            damage = damage or _as_damage(error)
            start = _behind(start, _as_damage(error), log)
    return window, damage


def _as_damage(error: CorruptLog | OSError) -> CorruptLog:
    return error if isinstance(error, CorruptLog) else CorruptLog(f"the log cannot be read: {error}")


def _remember_from(start: int, window: DedupeWindow, log: StreamLog) -> int:
    """Reads from an offset; returns the offset to continue from."""
    with log.reader.plan_read(start, max_bytes=_PLAN_BYTES, prove=False, uncommitted=True) as plan:
        for message in plan.headed_messages():
            batch = ipc.decode_batch(message)
            ids = _ids_of(batch, message)
            if ids is not None:
                stamps = batch.column("timestamp").cast(pa.int64()).to_numpy()
                window.remember_stored(ids, batch.column("offset").to_numpy(), stamps)
        return plan.next_offset


def _ids_of(batch: pa.RecordBatch, message: bytes) -> Ids | None:
    """Hashes of the message ids of its rows, wherever they are stored; None where no row has one."""
    header = ipc.proven_header(message)
    assert header is not None, "a plan returns proven messages"
    ids, packed = ids_of_headers(batch.column("headers")), ipc.packed_ids_of(header, message)
    if packed is None:
        return ids
    hashes = own_ids.hashed(packed)
    return hashes if ids is None else np.where(packed.any(axis=1, keepdims=True), hashes, ids)


def _behind(start: int, error: CorruptLog, log: StreamLog) -> int:
    """The next offset that may be readable: behind what is known to be damaged, else in the next segment."""
    damaged_to = error.facts.get("end")
    if isinstance(damaged_to, int) and damaged_to > start:
        return damaged_to
    bases = (segment.base_offset for segment in list(log.chain.segments))
    return next((base for base in bases if base > start), log.log_end_offset)


def last_message_id(log: StreamLog) -> str:
    """The message id of the last row that was appended, committed or not; empty if it has none, or was removed.

    Raises:
        CorruptLog, OSError: it cannot be read.
    """
    end = log.log_end_offset
    if end <= log.first_readable_offset:
        return ""
    with log.reader.plan_read(end - 1, end, max_bytes=_PLAN_BYTES, prove=False, uncommitted=True) as plan:
        for message in plan.headed_messages():
            header, batch = ipc.proven_header(message), ipc.decode_batch(message)
            assert header is not None, "a plan returns proven messages"
            rows = ipc.rows_within(header, batch, end - 1, end)
            if rows.start < rows.stop:
                return message_id_of(batch.column("headers"), ipc.packed_ids_of(header, message), rows.start)
    return ""


def message_id_of(headers: pa.Array[Any], packed_ids: npt.NDArray[np.uint8] | None, row: int) -> str:
    """Of one row; empty if it has none."""
    if packed_ids is not None and packed_ids[row].any():
        return own_ids.unpacked(packed_ids[row : row + 1]).tobytes().decode()
    _, values = header_values(headers.slice(row, 1), "Nats-Msg-Id")
    return values[0].as_py() if len(values) else ""
