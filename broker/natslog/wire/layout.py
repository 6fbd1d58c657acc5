"""The result of a scan of NATS frames: one int64 row a frame, positions into the receive buffer, nothing copied."""

from __future__ import annotations

from typing import NamedTuple

SID, START, END, SUBJECT, SUBJECT_LEN, REPLY, REPLY_LEN, HEADER_LEN, PAYLOAD, PAYLOAD_LEN = range(10)
FRAME_COLUMNS = 10
"""Columns of a frame row. START and END bound the frame with its last CRLF; headers lie right before PAYLOAD."""

CONTROL_SID = -1
"""In SID: the row is another protocol line (PING, INFO, -ERR, …), START and END only."""

MAX_LINE_BYTES = 1 << 20
"""A longer protocol line is not NATS."""


MAX_FRAME_BYTES = (64 + 1) << 20
"""nats-server allows no `max_payload` above 64 MiB."""


class ScanResult(NamedTuple):
    """`frames` rows were filled, `consumed` bytes are done with; `needed` (0: unknown) is the size of the frame that
    begins there and is not whole yet; `malformed` means the bytes at `consumed` are not NATS protocol.
    """

    frames: int
    consumed: int
    needed: int
    malformed: bool


class Survey(NamedTuple):
    """The totals of a chunk of frames: bytes, and rows that need another check."""

    subject_bytes: int
    value_bytes: int
    reply_bytes: int
    frame_bytes: int
    headed_rows: int
    header_lines: int
    not_ascii_rows: int
