"""Kernels for sent data and answers: acks, published frames, and received acks."""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes, inlined
from natslog.wire.kernels_text import CR, LF, SPACE, digits_of, equals, is_blank, put_number, put_text, read_number

_H, _P, _U, _B = 72, 80, 85, 66
_VERSION_LINE = np.frombuffer(b"NATS/1.0\r\n", np.uint8)
_ID_NAME = np.frombuffer(b"Nats-Msg-Id: ", np.uint8)
_ACK_NAME = np.frombuffer(b"Natslog-Ack-To: ", np.uint8)
_COUNT_FIELD = np.frombuffer(b',"count":', np.uint8)
_CORRELATION_FIELD = np.frombuffer(b',"correlation_id":"', np.uint8)
_STREAM_FIELD = np.frombuffer(b'"stream":', np.uint8)
_MESSAGES_FIELD = np.frombuffer(b'"messages":', np.uint8)
_QUOTE, _COMMA, _DOT, _TILDE, _ZERO, _NINE = 34, 44, 46, 126, 48, 57
_SEQ_FIELD = np.frombuffer(b'"seq"', np.uint8)
_ERROR_FIELD = np.frombuffer(b'"error":', np.uint8)


@compiled
def _is_acked_with_next(
    data: Any, edges: Any, index: int, duplicate: Any, full: Any, counts: Any, correlation_offsets: Any
) -> bool:
    """Whether the reply subjects of a row and the next one are `<text>.~<n>` and `<text>.~<n + 1>`, and their acks have
    nothing else of their own.
    """
    if duplicate.shape[0] > 0 and duplicate[index] != duplicate[index + 1]:
        return False
    if full.shape[0] > 0 and full[index] != full[index + 1]:
        return False
    if counts.shape[0] > 0 and (counts[index] > 0 or counts[index + 1] > 0):
        return False
    if correlation_offsets.shape[0] > 0 and correlation_offsets[index] != correlation_offsets[index + 2]:
        return False
    return bool(is_numbered_next(data, edges[index], edges[index + 1], edges[index + 1], edges[index + 2]))


@compiled
def is_numbered_next(data: Any, start: int, end: int, next_start: int, next_end: int) -> bool:
    """Whether these two texts are `<text>.~<n>` and `<text>.~<n + 1>`."""
    tilde = end - 1
    while tilde > start and _ZERO <= data[tilde] <= _NINE:
        tilde -= 1
    if tilde <= start or data[tilde] != _TILDE or data[tilde - 1] != _DOT:
        return False
    next_digits = next_start + tilde + 1 - start
    if next_digits >= next_end:
        return False
    number = read_number(data, tilde + 1, end)
    if number < 0 or read_number(data, next_digits, next_end) != number + 1:
        return False
    for at in range(tilde, start - 1, -1):  # texts of different publishers differ near their ends
        if data[at] != data[next_start + at - start]:
            return False
    return True


@compiled
def stored_acks(
    reply_data: Any,
    reply_offsets: Any,
    correlation_data: Any,
    correlation_offsets: Any,
    offsets: Any,
    duplicate: Any,
    full: Any,
    counts: Any,
    head: Any,
    middle: Any,
    epoch: Any,
    first_tail: Any,
    duplicate_tail: Any,
    out: Any,
) -> int:
    """`PUB <reply> <size>`, then `<head><offset + 1><tail>`, for each row with a reply subject. Rows whose reply
    subjects are numbered one after another get one ack together, at the last of them, which states before its tail how
    many they are: `,"messages":<n>`.

    Args:
        full: marks the rows whose acks have `<middle><offset><epoch>` behind the sequence; empty where none has.
        duplicate: marks the rows that get `duplicate_tail` instead of `first_tail`; empty where none does.
        counts: of the rows that an envelope carried, at its last one: `,"count":<n>` before the tail; else 0. May be
            empty.
        correlation_data, correlation_offsets: `,"correlation_id":"<text>"` before the tail of each row that has one.
            The offsets may be empty.
        out: room for all of it.

    Returns:
        How many bytes were filled.
    """
    at = 0
    messages = 1
    for index in range(offsets.shape[0]):
        start, length = reply_offsets[index], reply_offsets[index + 1] - reply_offsets[index]
        if length == 0:
            continue
        if index + 1 < offsets.shape[0] and _is_acked_with_next(
            reply_data, reply_offsets, index, duplicate, full, counts, correlation_offsets
        ):
            messages += 1
            continue
        tail = duplicate_tail if duplicate.shape[0] > 0 and duplicate[index] else first_tail
        offset = offsets[index]
        digits, next_digits = digits_of(offset), digits_of(offset + 1)
        is_full = full.shape[0] > 0 and full[index]
        count = counts[index] if counts.shape[0] > 0 else 0
        size = head.shape[0] + next_digits + tail.shape[0]
        if is_full:
            size += middle.shape[0] + digits + epoch.shape[0]
        if count > 0:
            size += _COUNT_FIELD.shape[0] + digits_of(count)
        correlation_bytes = 0
        if correlation_offsets.shape[0] > 0:
            correlation_bytes = correlation_offsets[index + 1] - correlation_offsets[index]
        if messages > 1:
            size += 1 + _MESSAGES_FIELD.shape[0] + digits_of(messages)
        if correlation_bytes > 0:
            size += _CORRELATION_FIELD.shape[0] + correlation_bytes + 1
        out[at], out[at + 1], out[at + 2], out[at + 3] = _P, _U, _B, SPACE
        copy_bytes(reply_data, start, length, out, at + 4)
        at += 4 + length
        out[at] = SPACE
        at = put_number(out, at + 1, size, digits_of(size))
        out[at], out[at + 1] = CR, LF
        at = put_text(out, at + 2, head)
        at = put_number(out, at, offset + 1, next_digits)
        if is_full:
            at = put_text(out, at, middle)
            at = put_number(out, at, offset, digits)
            at = put_text(out, at, epoch)
        if count > 0:
            at = put_text(out, at, _COUNT_FIELD)
            at = put_number(out, at, count, digits_of(count))
        if messages > 1:
            out[at] = _COMMA
            at = put_text(out, at + 1, _MESSAGES_FIELD)
            at = put_number(out, at, messages, digits_of(messages))
            messages = 1
        if correlation_bytes > 0:
            at = put_text(out, at, _CORRELATION_FIELD)
            copy_bytes(correlation_data, correlation_offsets[index], correlation_bytes, out, at)
            at += correlation_bytes
            out[at] = _QUOTE
            at += 1
        at = put_text(out, at, tail)
        out[at], out[at + 1] = CR, LF
        at += 2
    return at


@compiled
def put_ack(
    data: Any, start: int, length: int, head: Any, sequence: int, messages: int, tail: Any, out: Any, at: int
) -> int:
    """The ack of `messages` messages together, without any of what only some have: `PUB <reply> <size>`, then
    `<head><sequence><tail>`. Returns where it ends.
    """
    digits = digits_of(sequence)
    size = head.shape[0] + digits + tail.shape[0]
    if messages > 1:
        size += 1 + _MESSAGES_FIELD.shape[0] + digits_of(messages)
    out[at], out[at + 1], out[at + 2], out[at + 3] = _P, _U, _B, SPACE
    copy_bytes(data, start, length, out, at + 4)
    at += 4 + length
    out[at] = SPACE
    at = put_number(out, at + 1, size, digits_of(size))
    out[at], out[at + 1] = CR, LF
    at = put_text(out, at + 2, head)
    at = put_number(out, at, sequence, digits)
    if messages > 1:
        out[at] = _COMMA
        at = put_text(out, at + 1, _MESSAGES_FIELD)
        at = put_number(out, at, messages, digits_of(messages))
    at = put_text(out, at, tail)
    out[at], out[at + 1] = CR, LF
    return at + 2


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
def _number_after(buffer: Any, start: int, end: int) -> int:
    """The digits that stand there, at least 1."""
    last = start
    while last < end and _ZERO <= buffer[last] <= _NINE:
        last += 1
    return max(1, read_number(buffer, start, last))


@compiled
def _read_ack(buffer: Any, start: int, end: int) -> tuple[int, int]:
    """How many messages the payload is an ack for: 0 if it has no field `seq`, or one that is called `error`. And how
    many rows the last of them carried.
    """
    is_ack, messages, rows = False, 1, 1
    for at in range(start, end - 4):
        if buffer[at] != _QUOTE:
            continue
        first = buffer[at + 1]
        if first == _SEQ_FIELD[1] and equals(buffer, at, at + 5, _SEQ_FIELD):
            is_ack = True
        elif first == _ERROR_FIELD[1] and equals(buffer, at, min(end, at + 8), _ERROR_FIELD):
            return 0, 0
        elif first == _MESSAGES_FIELD[1] and equals(buffer, at, min(end, at + 11), _MESSAGES_FIELD):
            messages = _number_after(buffer, at + 11, end)
        elif first == _COUNT_FIELD[2] and equals(buffer, at - 1, min(end, at + 8), _COUNT_FIELD):
            rows = _number_after(buffer, at + 8, end)
    return (messages, rows) if is_ack else (0, 0)


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
) -> tuple[int, int, int, int, int, int]:
    """Marks which of the messages `[first, end)` received acks are for: the one whose number the frame's subject ends
    with, and, as the ack states (see `stored_acks`), those before it.

    Args:
        names, edges: the names of the streams whose acks count, one after another, and where they begin and end; any
            stream counts where no names are given.
        missing: shape (streams, capacity): `missing[s, n % capacity]`: stream s has not acked message n. The capacity
            is a power of two. `left[n % capacity]`: how many streams have not. `carried`: how many rows message n has.
        acked: becomes the numbers of the messages of which no ack is missing any more; room for all that wait.

    Returns:
        How many messages these are, and how many rows; how many acks came for the first time; the first message that
        still waits, or `end`; the first frame that is no ack of a stream, or -1; the first frame that acks another
        number of rows than its envelope has, or -1: the stream took the envelope for a plain message.
    """
    mask = left.shape[0] - 1
    count, rows, new, refused, mismatched = 0, 0, 0, -1, -1
    for index in range(frames.shape[0]):
        subject, payload = frames[index, 3], frames[index, 8]
        payload_end = payload + frames[index, 9]
        last = -1
        messages, carried_rows = _read_ack(buffer, payload, payload_end)
        if messages > 0:
            last = read_number(buffer, subject + prefix_bytes, subject + frames[index, 4])
        if last < 0 and refused < 0:
            refused = index
        if last < first or last >= end:
            continue
        stream = _stream_of(buffer, payload, payload_end, names, edges) if edges.shape[0] > 1 else 0
        if stream < 0:
            continue
        while first < end and left[first & mask] == 0:
            first += 1
        for sequence in range(max(first, last - messages + 1), last + 1):
            place = sequence & mask
            if carried[place] > 1 and (sequence < last or carried[place] != carried_rows):
                mismatched = index if mismatched < 0 else mismatched
            elif missing[stream, place]:
                missing[stream, place] = False
                left[place] -= 1
                new += 1
                if left[place] == 0:
                    acked[count] = sequence
                    count += 1
                    rows += carried[place]
    while first < end and left[first & mask] == 0:
        first += 1
    return count, rows, new, first, refused, mismatched


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
