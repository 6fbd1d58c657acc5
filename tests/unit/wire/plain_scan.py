"""Frame scanning by other means: what tests compare the kernel with.

Source: NATS client protocol, https://docs.nats.io/reference/reference-protocols/nats-protocol
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from natslog.wire.layout import CONTROL_SID, FRAME_COLUMNS, MAX_LINE_BYTES, ScanResult

_SPACES = re.compile(rb"[^ \t]+")


def scan(buffer: npt.NDArray[np.uint8], start: int, length: int, out: npt.NDArray[np.int64]) -> ScanResult:
    """Finds whole frames in `buffer[start:length]`. See `layout.ScanResult` and `layout.FRAME_COLUMNS`."""
    data = buffer[:length].tobytes()
    position, count, needed = start, 0, 0
    while position < length and count < len(out):
        line_end = data.find(b"\r\n", position)
        if line_end < 0:
            return ScanResult(count, position, 0, length - position > MAX_LINE_BYTES)
        is_message = data.startswith((b"MSG ", b"MSG\t"), position)
        has_headers = data.startswith((b"HMSG ", b"HMSG\t"), position)
        if not (is_message or has_headers):
            out[count] = _row(CONTROL_SID, position, line_end + 2)
            position, count = line_end + 2, count + 1
            continue
        row = _message_row(data, position, line_end, has_headers)
        if row is None:
            return ScanResult(count, position, 0, True)
        if row[2] > length:
            needed = row[2] - position
            break
        if data[row[2] - 2 : row[2]] != b"\r\n":
            return ScanResult(count, position, 0, True)
        out[count] = row
        position, count = row[2], count + 1
    return ScanResult(count, position, needed, False)


def _message_row(data: bytes, position: int, line_end: int, has_headers: bool) -> list[int] | None:
    """The frame's row, or None where the line is malformed."""
    tokens = [match.span() for match in _SPACES.finditer(data, position + 4 + has_headers, line_end)]
    counts = 2 if has_headers else 1
    if len(tokens) not in (2 + counts, 3 + counts):
        return None
    numbers = [data[start:end] for start, end in (tokens[1], *tokens[-counts:])]
    if not all(number.isdigit() and len(number) <= 18 for number in numbers):
        return None
    sid, total_bytes = int(numbers[0]), int(numbers[-1])
    header_bytes = int(numbers[1]) if has_headers else 0
    if header_bytes > total_bytes:
        return None
    subject, reply = tokens[0], tokens[2] if len(tokens) == 3 + counts else (0, 0)
    start = line_end + 2
    return [
        sid,
        position,
        start + total_bytes + 2,
        subject[0],
        subject[1] - subject[0],
        reply[0],
        reply[1] - reply[0],
        header_bytes,
        start + header_bytes,
        total_bytes - header_bytes,
    ]


def _row(sid: int, start: int, end: int) -> list[int]:
    return [sid, start, end] + [0] * (FRAME_COLUMNS - 3)
