"""Kernels on the reply subjects of received frames: which of them get an ack."""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, inlined
from natslog.wire.kernels_text import COLON, SPACE, equals, find_line_end, is_blank

_DOLLAR, _DELETE = 36, 127
_OF_DELIVERIES = np.frombuffer(b"$JS.ACK.", np.uint8)
_MOST_SUBJECT_BYTES = 1024
"""Of a header's subject. With a longer one the ack could be a line that the NATS server refuses, and the server would
close the connection.
"""


@inlined
def begins_with_one(buffer: Any, start: int, length: int, prefixes: Any, ends: Any) -> bool:
    """Whether the text begins with one of the prefixes, which stand one after another, and goes on."""
    first = 0
    for index in range(ends.shape[0]):
        size = ends[index] - first
        if length > size:
            same = True
            for at in range(size):
                if buffer[start + at] != prefixes[first + at]:
                    same = False
                    break
            if same:
                return True
        first = ends[index]
    return False


@compiled
def keep_replies(buffer: Any, frames: Any, prefixes: Any, ends: Any) -> None:
    """Takes the reply subject from every frame in which it does not begin with one of the prefixes."""
    for index in range(frames.shape[0]):
        length = frames[index, 6]
        if length > 0 and not begins_with_one(buffer, frames[index, 5], length, prefixes, ends):
            frames[index, 6] = 0


@compiled
def no_replies(frames: Any) -> None:
    """Takes the reply subject from every frame."""
    for index in range(frames.shape[0]):
        frames[index, 6] = 0


@compiled
def replies_from_header(buffer: Any, frames: Any, name: Any) -> None:
    """Makes the value of the first such header each frame's reply subject. Where there is none, or its value cannot be
    a subject (it has a blank or a control character in it, or is too long), the frame has no reply subject.
    """
    for index in range(frames.shape[0]):
        frames[index, 6] = 0
        end = frames[index, 8]
        at = end - frames[index, 7]
        while at < end:
            line_end = find_line_end(buffer, at, end)
            if line_end < 0:
                line_end = end
            colon = at
            while colon < line_end and buffer[colon] != COLON:
                colon += 1
            if equals(buffer, at, colon, name):
                low, high = min(colon + 1, line_end), line_end
                while low < high and is_blank(buffer[low]):
                    low += 1
                while high > low and is_blank(buffer[high - 1]):
                    high -= 1
                is_subject = high - low <= _MOST_SUBJECT_BYTES
                for place in range(low, high):
                    if buffer[place] <= SPACE or buffer[place] >= _DELETE:
                        is_subject = False
                        break
                if is_subject:
                    frames[index, 5], frames[index, 6] = low, high - low
                break
            at = line_end + 2


@compiled
def mark_internal(buffer: Any, frames: Any, prefixes: Any, ends: Any, marks: Any) -> None:
    """Marks the frames whose subject begins with `$` or with one of the prefixes."""
    for index in range(frames.shape[0]):
        start, length = frames[index, 3], frames[index, 4]
        is_internal = length > 0 and buffer[start] == _DOLLAR
        marks[index] = is_internal or begins_with_one(buffer, start, length, prefixes, ends)


@inlined
def is_of_delivery(buffer: Any, start: int, length: int) -> bool:
    """Whether a reply subject is that of a message that a JetStream consumer delivers."""
    size = _OF_DELIVERIES.shape[0]
    return length > size and equals(buffer, start, start + size, _OF_DELIVERIES)


@compiled
def mark_reply_ends(buffer: Any, frames: Any, suffix: Any, marks: Any) -> int:
    """Marks the frames whose reply subject ends with `suffix`; returns how many there are."""
    count = 0
    for index in range(frames.shape[0]):
        end = frames[index, 5] + frames[index, 6]
        start = end - suffix.shape[0]
        marks[index] = start >= frames[index, 5] and equals(buffer, start, end, suffix)
        count += marks[index]
    return count


@compiled
def mark_deliveries(buffer: Any, frames: Any, marks: Any) -> int:
    """Marks the frames that a JetStream consumer delivers: no client can publish with such a reply subject.

    Returns:
        How many there are.
    """
    count = 0
    for index in range(frames.shape[0]):
        marks[index] = is_of_delivery(buffer, frames[index, 5], frames[index, 6])
        count += marks[index]
    return count
