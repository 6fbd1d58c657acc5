"""Kernels that find envelopes among received frames."""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled
from natslog.wire.kernels_text import CR, LF, equals


@compiled
def mark_openings(buffer: Any, frames: Any, opening: Any, marks: Any) -> int:
    """Marks the frames whose payload begins with `opening`. Returns how many these are."""
    count = 0
    for index in range(frames.shape[0]):
        payload = frames[index, 8]
        if (
            frames[index, 9] >= opening.shape[0]
            and buffer[payload] == opening[0]
            and equals(buffer, payload, payload + opening.shape[0], opening)
        ):
            marks[index] = True
            count += 1
    return count


@compiled
def open_messages(buffer: Any, frames: Any, opening: Any, version: Any, opened: Any) -> int:
    """Makes header block and payload of each envelope of one message those of its frame, and marks these frames.

    Args:
        opening: what such an envelope begins with; the size of its header block follows, 4 bytes, little-endian.
        version: the first line of a header block.

    Returns:
        How many payloads begin with `opening` and are no such envelope, or come in a message that has headers.
    """
    unread = 0
    for index in range(frames.shape[0]):
        start, length = frames[index, 8], frames[index, 9]
        at = start + opening.shape[0]
        block = at + 4
        if length < 1 or buffer[start] != opening[0] or not equals(buffer, start, min(start + length, at), opening):
            continue
        size: Any = np.int64(-1)
        if block <= start + length:
            size = np.int64(buffer[at]) | np.int64(buffer[at + 1]) << 8
            size |= np.int64(buffer[at + 2]) << 16 | np.int64(buffer[at + 3]) << 24
        end = block + size
        if (
            frames[index, 7] == 0
            and size >= version.shape[0] + 2
            and end <= start + length
            and equals(buffer, block, block + version.shape[0], version)
            and buffer[end - 4] == CR
            and buffer[end - 3] == LF
            and buffer[end - 2] == CR
            and buffer[end - 1] == LF
        ):
            frames[index, 7], frames[index, 8], frames[index, 9] = size, end, start + length - end
            opened[index] = True
        else:
            unread += 1
    return unread
