"""Kernels for JetStream consumers: frames of deliveries on a leafnode connection, and received acks."""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes, inlined
from natslog.wire.kernels_text import COLON, CR, LF, SPACE, digits_of, equals, put_number, put_text, read_number

_LEAF_MESSAGE = np.frombuffer(b"LMSG ", np.uint8)
_LEAF_HEADED = np.frombuffer(b"HMSG ", np.uint8)
_VERSION_LINE = np.frombuffer(b"NATS/1.0\r\n", np.uint8)
_SIZE_NAME = np.frombuffer(b"Nats-Msg-Size: ", np.uint8)
_ACK = np.frombuffer(b"+ACK", np.uint8)
_OK = np.frombuffer(b"+OK", np.uint8)
_NAK = np.frombuffer(b"-NAK", np.uint8)
_TERM = np.frombuffer(b"+TERM", np.uint8)
_PROGRESS = np.frombuffer(b"+WPI", np.uint8)
_NEXT = np.frombuffer(b"+NXT", np.uint8)
_DOT, _AT = 46, 64
_NUMBERS, _TIME = 5, 3
_PAIRS = np.frombuffer(b"".join(b"%02d" % number for number in range(100)), np.uint8)


@inlined
def _put_pairs(out: Any, at: int, number: int, digits: int) -> int:
    """`put_number`, two digits at a time."""
    end = at + digits
    place = end
    while place - at >= 2:
        pair = 2 * (number % 100)
        number //= 100
        out[place - 1] = _PAIRS[pair + 1]
        out[place - 2] = _PAIRS[pair]
        place -= 2
    if place > at:
        out[at] = 48 + number
    return end


@inlined
def _put_one_line(data: Any, start: int, end: int, out: Any, at: int) -> int:
    """The text with blanks in place of line ends, which would begin another header."""
    for place in range(start, end):
        byte = data[place]
        out[at + place - start] = SPACE if byte in (CR, LF) else byte
    return at + end - start


@compiled
def lines_of_pairs(
    list_offsets: Any, is_valid: Any, name_offsets: Any, names: Any, text_offsets: Any, texts: Any, ends: Any, out: Any
) -> int:
    """The header lines of each valid list of pairs, as a column of texts. Returns how many bytes they are."""
    at = 0
    ends[0] = 0
    for row in range(is_valid.shape[0]):
        if is_valid[row]:
            for pair in range(list_offsets[row], list_offsets[row + 1]):
                at = _put_one_line(names, name_offsets[pair], name_offsets[pair + 1], out, at)
                out[at], out[at + 1] = COLON, SPACE
                at = _put_one_line(texts, text_offsets[pair], text_offsets[pair + 1], out, at + 2)
                out[at], out[at + 1] = CR, LF
                at += 2
        ends[row + 1] = at
    return at


@compiled
def delivery_frames(
    subject_offsets: Any,
    subject_data: Any,
    value_offsets: Any,
    value_data: Any,
    line_offsets: Any,
    line_data: Any,
    has_headers: Any,
    reply_offsets: Any,
    reply_data: Any,
    reply_of: Any,
    prefix: Any,
    groups: Any,
    numbers: Any,
    headers_only: int,
    out: Any,
) -> int:
    """`LMSG <reply> <ack reply>@<subject> <size>` or `HMSG` frames; see `deliveries.Messages`.

    Args:
        groups: queue groups, each with a blank before it. The text of a reply then ends with ` +`.
        numbers: of shape (5, rows): what follows `prefix` in the ack reply.
        headers_only: 1: the value is left out, and its size is in a header.

    Returns:
        How many bytes of `out` were filled.
    """
    at = 0
    time_at, time_digits = 0, 0
    for index in range(value_offsets.shape[0] - 1):
        value_start = value_offsets[index]
        value_bytes = value_offsets[index + 1] - value_start
        subject_start = subject_offsets[index]
        subject_bytes = subject_offsets[index + 1] - subject_start
        line_bytes = line_offsets[index + 1] - line_offsets[index]
        header_bytes = 0
        if has_headers[index] or headers_only == 1:
            header_bytes = 12 + line_bytes
        if headers_only == 1:
            header_bytes += _SIZE_NAME.shape[0] + digits_of(value_bytes) + 2
        at = put_text(out, at, _LEAF_HEADED if header_bytes > 0 else _LEAF_MESSAGE)
        reply = reply_of[index]
        reply_bytes = reply_offsets[reply + 1] - reply_offsets[reply]
        copy_bytes(reply_data, reply_offsets[reply], reply_bytes, out, at)
        at += reply_bytes
        out[at] = SPACE
        at = put_text(out, at + 1, prefix)
        for which in range(_NUMBERS):
            number = numbers[which, index]
            if which == _TIME and index > 0 and number == numbers[_TIME, index - 1]:
                copy_bytes(out, time_at, time_digits, out, at)  # of the same batch, as most are
                time_at = at
                at += time_digits
            else:
                digits = digits_of(number)
                if which == _TIME:
                    time_at, time_digits = at, digits
                at = _put_pairs(out, at, number, digits)
            out[at] = _DOT
            at += 1
        out[at - 1] = _AT
        copy_bytes(subject_data, subject_start, subject_bytes, out, at)
        at = put_text(out, at + subject_bytes, groups)
        out[at] = SPACE
        at += 1
        if header_bytes > 0:
            at = put_number(out, at, header_bytes, digits_of(header_bytes))
            out[at] = SPACE
            at += 1
        total = header_bytes + (0 if headers_only == 1 else value_bytes)
        at = put_number(out, at, total, digits_of(total))
        out[at], out[at + 1] = CR, LF
        at += 2
        if header_bytes > 0:
            at = put_text(out, at, _VERSION_LINE)
            copy_bytes(line_data, line_offsets[index], line_bytes, out, at)
            at += line_bytes
            if headers_only == 1:
                at = put_text(out, at, _SIZE_NAME)
                at = put_number(out, at, value_bytes, digits_of(value_bytes))
                out[at], out[at + 1] = CR, LF
                at += 2
            out[at], out[at + 1] = CR, LF
            at += 2
        if headers_only == 0:
            copy_bytes(value_data, value_start, value_bytes, out, at)
            at += value_bytes
        out[at], out[at + 1] = CR, LF
        at += 2
    return at


@inlined
def _read_numbers(buffer: Any, at: int, end: int, out: Any, index: int) -> None:
    """The first three of the numbers there, between dots, if there are as many as in the subject of an ack."""
    token, which = at, 0
    while at <= end:
        if at == end or buffer[at] == _DOT:
            if which < 3:
                number = read_number(buffer, token, at)
                out[index, 1 + which] = number if number > 0 else 0
            which += 1
            token = at + 1
        at += 1
    if which != _NUMBERS:
        out[index, 1], out[index, 2], out[index, 3] = 0, 0, 0


@inlined
def _kind_of(buffer: Any, payload: int, size: int) -> int:
    """What the payload of an ack states: see `deliveries`."""
    kind = 6
    if (
        size == 0
        or (size == 4 and equals(buffer, payload, payload + 4, _ACK))
        or (size == 3 and equals(buffer, payload, payload + 3, _OK))
    ):
        kind = 1
    elif size >= 4 and equals(buffer, payload, payload + 4, _NAK):
        kind = 2
    elif size >= 5 and equals(buffer, payload, payload + 5, _TERM):
        kind = 3
    elif size == 4 and equals(buffer, payload, payload + 4, _PROGRESS):
        kind = 4
    elif size >= 4 and equals(buffer, payload, payload + 4, _NEXT):
        kind = 5
    return kind


@compiled
def parse_acks(buffer: Any, frames: Any, prefix: Any, out: Any, runs: Any) -> int:
    """Which frames are acks of a consumer, of which kind, and of what.

    Args:
        prefix: of the subjects of its acks; five numbers follow.
        out: of shape (frames, 4): kind (see `deliveries`), how often it was delivered, stream sequence, consumer
            sequence. Numbers that cannot be read are 0.
        runs: of shape (frames, 3), filled with: where a run of frames of one kind ends, the kind, and how many of them
            have a reply subject.

    Returns:
        How many runs there are.
    """
    count = 0
    for index in range(frames.shape[0]):
        start, length = frames[index, 3], frames[index, 4]
        out[index, 1], out[index, 2], out[index, 3] = 0, 0, 0
        kind = 0
        if length > prefix.shape[0] and equals(buffer, start, start + prefix.shape[0], prefix):
            _read_numbers(buffer, start + prefix.shape[0], start + length, out, index)
            kind = _kind_of(buffer, frames[index, 8], frames[index, 9])
        out[index, 0] = kind
        if count == 0 or runs[count - 1, 1] != kind:
            runs[count, 1], runs[count, 2] = kind, 0
            count += 1
        runs[count - 1, 0] = index + 1
        runs[count - 1, 2] += frames[index, 6] > 0
    return count


@compiled
def find_rows(wanted: Any, columns: Any, alive: Any, start: int, end: int, found: Any) -> tuple[int, int]:
    """Where sequences stand in `columns[0, start:end]`, which ascends; those that are not there, or not alive, are left
    out. Fast where they ascend as well, without gaps.

    Args:
        found: filled with positions, in the order of `wanted`.

    Returns:
        How many were found, and 1 if their positions ascend.
    """
    count, guess, ascends = 0, start, 1
    for index in range(wanted.shape[0]):
        seq = wanted[index]
        if guess >= end or columns[0, guess] != seq:
            low, high = start, end
            while low < high:
                middle = (low + high) // 2
                if columns[0, middle] < seq:
                    low = middle + 1
                else:
                    high = middle
            guess = low
        if guess < end and columns[0, guess] == seq and alive[guess]:
            if count > 0 and guess <= found[count - 1]:
                ascends = 0
            found[count] = guess
            count += 1
        guess += 1
    return count, ascends


@compiled
def take_rows(
    positions: Any, columns: Any, alive: Any, queued: Any, start: int, end: int, follows: int, seqs: Any
) -> tuple[int, int]:
    """Rows are marked as gone, and not queued.

    Args:
        follows: a consumer sequence. seqs: filled with the sequences of these rows.

    Returns:
        The position of the first row that is left, or `end`; and 1 if one of those that are gone has this consumer
        sequence.
    """
    is_among = 0
    for index in range(positions.shape[0]):
        at = positions[index]
        seqs[index] = columns[0, at]
        alive[at] = queued[at] = False
        if columns[1, at] == follows:
            is_among = 1
    while start < end and not alive[start]:
        start += 1
    return start, is_among
