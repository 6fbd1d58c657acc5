"""The deduplication window after a start or a change of its length: filled from what the log itself holds."""

from __future__ import annotations

import logging

from natslog import ipc
from natslog.errors import CorruptLog
from natslog.ingest.dedupe import MAX_IDS, DedupeWindow, ids_of_headers
from natslog.log import StreamLog
from natslog.node.clock import monotonic_us, now_us

logger = logging.getLogger("natslog.node")

_PLAN_BYTES = 256 * 1024 * 1024  # not read at once: a batch at a time, and only those with headers


def rebuilt_dedupe(window_s: float, log: StreamLog) -> DedupeWindow:
    """A window with the ids of the messages stored within it, read from the log (at most the newest `MAX_IDS`).

    What is stored and not known to be committed counts too: it will be, where this replica leads.
    """
    window = DedupeWindow(window_s)
    if not window.window_us:
        return window
    try:
        start, _ = log.reader.offset_at(now_us() - window.window_us)
        end = log.log_end_offset
        start = max(start, end - MAX_IDS, log.log_start_offset)
        while start < end:
            with log.reader.plan_read(start, max_bytes=_PLAN_BYTES, prove=False, uncommitted=True) as plan:
                for message in plan.headed_messages():
                    batch = ipc.decode_batch(message)
                    ids = ids_of_headers(batch.column("headers"))
                    if ids is not None:
                        window.remember(ids, batch.column("offset").to_numpy(), monotonic_us())
                start = plan.next_offset
    except CorruptLog as error:
        logger.error("deduplication starts with what could be read: %s", error.message)
    return window
