"""Kernels for sent data and answers: acks, published frames, and received acks."""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import (
    CR,
    LF,
    SPACE,
    compiled,
    copy_bytes,
    digits_of,
    equals,
    inlined,
    is_blank,
    put_number,
    put_text,
    read_number,
)

_H, _P, _U, _B = 72, 80, 85, 66
_VERSION_LINE = np.frombuffer(b"NATS/1.0\r\n", np.uint8)
_ID_NAME = np.frombuffer(b"Nats-Msg-Id: ", np.uint8)
_ACK_NAME = np.frombuffer(b"Natslog-Ack-To: ", np.uint8)
_COUNT_FIELD = np.frombuffer(b',"count":', np.uint8)
_STREAM_FIELD = np.frombuffer(b'"stream":', np.uint8)
_QUOTE = 34
_SEQ_FIELD = np.frombuffer(b'"seq"', np.uint8)
_ERROR_FIELD = np.frombuffer(b'"error":', np.uint8)


@compiled
def stored_acks(
    reply_data: Any,
    reply_offsets: Any,
    offsets: Any,
    duplicate: Any,
    counts: Any,
    head: Any,
    middle: Any,
    first_tail: Any,
    duplicate_tail: Any,
    out: Any,
) -> int:
    """`PUB <reply> <size>`, then `<head><offset + 1><middle><offset><tail>`, for each row with a reply subject.

    Args:
        duplicate: marks the rows that get `duplicate_tail` instead of `first_tail`; empty where none does.
        counts: of the rows that an envelope carried, at its last one: `,"count":<n>` before the tail; else 0. May be
            empty.
        out: room for all of it.

    Returns:
        How many bytes were filled.
    """
    at = 0
    for index in range(offsets.shape[0]):
        start, length = reply_offsets[index], reply_offsets[index + 1] - reply_offsets[index]
        if length == 0:
            continue
        tail = duplicate_tail if duplicate.shape[0] > 0 and duplicate[index] else first_tail
        offset = offsets[index]
        digits, next_digits = digits_of(offset), digits_of(offset + 1)
        count = counts[index] if counts.shape[0] > 0 else 0
        size = head.shape[0] + next_digits + middle.shape[0] + digits + tail.shape[0]
        if count > 0:
            size += _COUNT_FIELD.shape[0] + digits_of(count)
        out[at], out[at + 1], out[at + 2], out[at + 3] = _P, _U, _B, SPACE
        copy_bytes(reply_data, start, length, out, at + 4)
        at += 4 + length
        out[at] = SPACE
        at = put_number(out, at + 1, size, digits_of(size))
        out[at], out[at + 1] = CR, LF
        at = put_text(out, at + 2, head)
        at = put_number(out, at, offset + 1, next_digits)
        at = put_text(out, at, middle)
        at = put_number(out, at, offset, digits)
        if count > 0:
            at = put_text(out, at, _COUNT_FIELD)
            at = put_number(out, at, count, digits_of(count))
        at = put_text(out, at, tail)
        out[at], out[at + 1] = CR, LF
        at += 2
    return at


@compiled
def publish_frames(
    subject_offsets: Any,
    subject_data: Any,
    body_offsets: Any,
    body_data: Any,
    line_offsets: Any,
    line_data: Any,
    id_offsets: Any,
    id_data: Any,
    has_id: Any,
    inbox: Any,
    sequences: Any,
    ack_to: int,
    out: Any,
) -> int:
    """`PUB` or `HPUB` frames; see `outgoing.publish_frames`. Empty offsets, marks or sequences: there are none.

    Args:
        ack_to: where an ack is requested, if there are sequences: bits of `outgoing.BY_REPLY` and `BY_HEADER`.

    Returns:
        How many bytes of `out` were filled.
    """
    at = 0
    has_reply = sequences.shape[0] > 0 and (ack_to & 1) != 0
    has_ack_header = sequences.shape[0] > 0 and (ack_to & 2) != 0
    for index in range(body_offsets.shape[0] - 1):
        body_start = body_offsets[index]
        body_bytes = body_offsets[index + 1] - body_start
        line_bytes = line_offsets[index + 1] - line_offsets[index] if line_offsets.shape[0] > 0 else 0
        id_bytes = -1
        if has_id.shape[0] > 0 and has_id[index]:
            id_bytes = id_offsets[index + 1] - id_offsets[index]
        header_bytes = 0
        if line_bytes > 0 or id_bytes >= 0 or has_ack_header:
            header_bytes = 12 + line_bytes + (id_bytes + 15 if id_bytes >= 0 else 0)
            if has_ack_header:
                header_bytes += _ACK_NAME.shape[0] + inbox.shape[0] + digits_of(sequences[index]) + 2
            out[at] = _H
            at += 1
        out[at], out[at + 1], out[at + 2], out[at + 3] = _P, _U, _B, SPACE
        subject_start = subject_offsets[index]
        subject_bytes = subject_offsets[index + 1] - subject_start
        copy_bytes(subject_data, subject_start, subject_bytes, out, at + 4)
        at += 4 + subject_bytes
        out[at] = SPACE
        at += 1
        if has_reply:
            at = put_text(out, at, inbox)
            at = put_number(out, at, sequences[index], digits_of(sequences[index]))
            out[at] = SPACE
            at += 1
        if header_bytes > 0:
            at = put_number(out, at, header_bytes, digits_of(header_bytes))
            out[at] = SPACE
            at += 1
        total_bytes = header_bytes + body_bytes
        at = put_number(out, at, total_bytes, digits_of(total_bytes))
        out[at], out[at + 1] = CR, LF
        at += 2
        if header_bytes > 0:
            at = put_text(out, at, _VERSION_LINE)
            if line_bytes > 0:
                copy_bytes(line_data, line_offsets[index], line_bytes, out, at)
                at += line_bytes
            if id_bytes >= 0:
                at = put_text(out, at, _ID_NAME)
                copy_bytes(id_data, id_offsets[index], id_bytes, out, at)
                at += id_bytes
                out[at], out[at + 1] = CR, LF
                at += 2
            if has_ack_header:
                at = put_text(out, at, _ACK_NAME)
                at = put_text(out, at, inbox)
                at = put_number(out, at, sequences[index], digits_of(sequences[index]))
                out[at], out[at + 1] = CR, LF
                at += 2
            out[at], out[at + 1] = CR, LF
            at += 2
        copy_bytes(body_data, body_start, body_bytes, out, at)
        at += body_bytes
        out[at], out[at + 1] = CR, LF
        at += 2
    return at


@compiled
def mark_unlike_a_line(offsets: Any, data: Any, marks: Any) -> None:
    """Marks texts that hold a line break or a byte above 127, or begin or end with a blank."""
    for index in range(offsets.shape[0] - 1):
        start, end = offsets[index], offsets[index + 1]
        if end > start:
            marks[index] = is_blank(data[start]) or is_blank(data[end - 1])
        for at in range(start, end):
            if data[at] > 127 or data[at] in (CR, LF):
                marks[index] = True


@inlined
def _is_ack(buffer: Any, start: int, end: int) -> bool:
    """Whether the payload has a field `seq` and none that is called `error`."""
    is_ack = False
    for at in range(start, end - 4):
        if buffer[at] == _QUOTE and (buffer[at + 1] == _SEQ_FIELD[1] or buffer[at + 1] == _ERROR_FIELD[1]):
            if equals(buffer, at, at + 5, _SEQ_FIELD):
                is_ack = True
            elif equals(buffer, at, min(end, at + 8), _ERROR_FIELD):
                return False
    return is_ack


@compiled
def mark_acks(
    buffer: Any,
    frames: Any,
    prefix_bytes: int,
    names: Any,
    edges: Any,
    first: int,
    end: int,
    missing: Any,
    left: Any,
    carried: Any,
    acked: Any,
) -> tuple[int, int, int, int, int]:
    """Marks which of the messages `[first, end)` received acks are for; a frame's subject ends with the number.

    Args:
        names, edges: the names of the streams whose acks count, one after another, and where they begin and end; any
            stream counts where no names are given.
        missing: shape (streams, capacity): `missing[s, n % capacity]`: stream s has not acked message n. The capacity
            is a power of two. `left[n % capacity]`: how many streams have not. `carried`: how many rows message n has.
        acked: becomes the numbers of the messages of which no ack is missing any more.

    Returns:
        How many messages these are, and how many rows; how many acks came for the first time; the first message that
        still waits, or `end`; the first frame that is no ack of a stream, or -1.
    """
    mask = left.shape[0] - 1
    count, rows, new, refused = 0, 0, 0, -1
    for index in range(frames.shape[0]):
        subject, payload = frames[index, 3], frames[index, 8]
        payload_end = payload + frames[index, 9]
        sequence = -1
        if _is_ack(buffer, payload, payload_end):
            sequence = read_number(buffer, subject + prefix_bytes, subject + frames[index, 4])
        if sequence < 0 and refused < 0:
            refused = index
        if sequence < first or sequence >= end:
            continue
        stream = _stream_of(buffer, payload, payload_end, names, edges) if edges.shape[0] > 1 else 0
        place = sequence & mask
        if stream >= 0 and missing[stream, place]:
            missing[stream, place] = False
            left[place] -= 1
            new += 1
            if left[place] == 0:
                acked[count] = sequence
                count += 1
                rows += carried[place]
    while first < end and left[first & mask] == 0:
        first += 1
    return count, rows, new, first, refused


@compiled
def _stream_of(buffer: Any, start: int, end: int, names: Any, edges: Any) -> int:
    """Which of the names stands in the field `stream`; -1 where none does."""
    at = start
    while at < end and not equals(buffer, at, min(end, at + _STREAM_FIELD.shape[0]), _STREAM_FIELD):
        at += 1
    at += _STREAM_FIELD.shape[0]
    while at < end and is_blank(buffer[at]):
        at += 1
    at += 1  # the opening quote
    for number in range(edges.shape[0] - 1):
        length = edges[number + 1] - edges[number]
        if at + length >= end or buffer[at + length] != _QUOTE:
            continue
        same = True
        for place in range(length):
            if buffer[at + place] != names[edges[number] + place]:
                same = False
                break
        if same:
            return number
    return -1
