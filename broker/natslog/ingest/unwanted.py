"""Received frames that cannot be stored, apart from the others."""

from __future__ import annotations

import numpy as np

from natslog.ingest.columns import Array
from natslog.subjects import MAX_SUBJECT_BYTES
from natslog.wire import native
from natslog.wire.frames import Frames
from natslog.wire.layout import HEADER_LEN, PAYLOAD, SUBJECT, SUBJECT_LEN


def split_by_text(frames: Frames) -> tuple[Frames, Frames]:
    """Frames whose subject and headers are UTF-8, and those that are not (Arrow strings cannot hold these)."""
    buffer, rows = frames.buffer, frames.rows
    suspects = np.flatnonzero(_has_high_bytes(buffer, rows))
    bad = np.zeros(len(rows), np.bool_)
    for at in suspects.tolist():  # only messages with non-ASCII subjects or headers come here
        row = rows[at]
        subject = buffer[row[SUBJECT] : row[SUBJECT] + row[SUBJECT_LEN]].tobytes()
        headers = buffer[row[PAYLOAD] - row[HEADER_LEN] : row[PAYLOAD]].tobytes()
        bad[at] = not (is_utf8(subject) and is_utf8(headers))
    return (frames, frames.select(bad)) if not bad.any() else (frames.select(~bad), frames.select(bad))


def split_by_subject(frames: Frames) -> tuple[Frames, Frames]:
    """Frames with one plain subject, as a direct append takes it too, and those with another one."""
    marks = np.zeros(len(frames.rows), np.bool_)
    if not native.mark_not_plain(frames.buffer, frames.rows, MAX_SUBJECT_BYTES, marks):
        return frames, frames.select(marks)
    return frames.select(~marks), frames.select(marks)


def _has_high_bytes(buffer: Array, rows: Array) -> Array:
    marks = np.zeros(len(rows), np.bool_)
    native.mark_high_bytes(buffer, rows, marks)
    return marks


def is_utf8(text: bytes) -> bool:
    """Whether Arrow's string type can hold it."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
