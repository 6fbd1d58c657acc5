"""Message ids of a log: the deduplication window after a start or a change of its length is filled from the log
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.arrow import ipc
from natslog.errors import CorruptLog
from natslog.ingest.dedupe import DedupeWindow
from natslog.log import StreamLog
from natslog.log.expiry import header_values
from natslog.wire import own_ids


@dataclass(frozen=True, slots=True)
class PreparedDedupe:
    """The window of a replica that is about to lead, with the ids of committed messages: below this offset."""

    window: DedupeWindow
    end: int


def prepared_dedupe(window_s: float, log: StreamLog, known: PreparedDedupe | None = None) -> PreparedDedupe | None:
    """Read before the leadership is transferred. None: the log is damaged; it is read again when it is led.

    Args:
        known: was prepared a moment ago; only what was committed since is read, into the same window.
    """
    end = log.high_watermark
    window, damage = _completed(window_s, log, known, end)
    return None if damage is not None else PreparedDedupe(window, end)


def rebuilt_dedupe(
    window_s: float, log: StreamLog, prepared: PreparedDedupe | None = None
) -> tuple[DedupeWindow, CorruptLog | None]:
    """A window with the ids of the messages stored within it, read from the log (at least the newest `MAX_IDS`).

    Messages that are stored and not confirmed as committed count too: they will be committed if this replica leads. The
    window is that of the newest message: no clock is used, and every replica of the log gets the same window.

    Args:
        prepared: only what is stored from its end on is read.

    Returns:
        The window, and the first damage that hid ids from it: ids after the damage are still in the window.
    """
    return _completed(window_s, log, prepared, log.log_end_offset)


def _completed(
    window_s: float, log: StreamLog, known: PreparedDedupe | None, end: int
) -> tuple[DedupeWindow, CorruptLog | None]:
    if known is None or known.window.window_us != int(window_s * 1_000_000):
        return _read_window(window_s, log, end)
    found, damage = log.ids.from_offset(known.end)
    known.window.remember_stored(*found.below(end))
    return known.window, damage


def _read_window(window_s: float, log: StreamLog, end: int) -> tuple[DedupeWindow, CorruptLog | None]:
    window = DedupeWindow(window_s)
    if not window.window_us:
        return window, None
    found, known_from_us, damage = log.ids.newest(window_s)
    window.remember_stored(*found.below(end))
    window.known_from_us = max(window.known_from_us, known_from_us)
    return window, damage


def last_message_id(log: StreamLog) -> str:
    """The message id of the last row that was appended, committed or not; empty if it has none, or was removed.

    Raises:
        CorruptLog, OSError: it cannot be read.
    """
    end = log.log_end_offset
    if end <= log.first_readable_offset:
        return ""
    with log.reader.plan_read(end - 1, end, max_bytes=1, prove=False, uncommitted=True) as plan:
        for header, batch, packed_ids in plan.headed_rows():
            rows = ipc.rows_within(header, batch, end - 1, end)
            if rows.start < rows.stop:
                return message_id_of(batch.column("headers"), packed_ids, rows.start)
    return ""


def message_id_of(headers: pa.Array[Any], packed_ids: npt.NDArray[np.uint8] | None, row: int) -> str:
    """Of one row; empty if it has none."""
    if packed_ids is not None and packed_ids[row].any():
        return own_ids.unpacked(packed_ids[row : row + 1]).tobytes().decode()
    _, values = header_values(headers.slice(row, 1), "Nats-Msg-Id")
    return values[0].as_py() if len(values) else ""
