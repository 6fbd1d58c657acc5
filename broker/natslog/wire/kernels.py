"""Kernels for received data: scanning frames, gathering columns, splitting header blocks.

Each works on whole receive buffers and never on a message at a time from Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes, inlined
from natslog.wire.kernels_ids import pack_id
from natslog.wire.kernels_text import (
    COLON,
    CR,
    LF,
    SPACE,
    TAB,
    equals,
    find_line_end,
    is_blank,
    is_plain_subject,
    read_number,
)
from natslog.wire.layout import CONTROL_SID, MAX_LINE_BYTES

_M, _S, _G, _H = 77, 83, 71, 72
_QUOTE, _BACKSLASH, _DELETE = 34, 92, 127
_MOST_CORRELATION_BYTES = 256
_FULL = np.frombuffer(b"full", np.uint8)


@inlined
def _split_line(buffer: Any, position: int, length: int, tokens: Any) -> tuple[int, int]:
    """Finds the end of the line (where its CRLF starts, or -1) and the words in it, in one pass.

    Returns:
        The line's end and how many words it has; `tokens` holds (start, end) of as many as fit.
    """
    count, in_word, room = 0, False, tokens.shape[0]
    for at in range(position, length - 1):  # a range: compiled, an index that cannot be negative is quicker
        byte = buffer[at]
        is_end = byte == CR and buffer[at + 1] == LF
        if is_end or byte in (SPACE, TAB):
            if in_word and count <= room:
                tokens[count - 1, 1] = at
            in_word = False
            if is_end:
                return at, count
        elif not in_word:
            in_word = True
            if count < room:
                tokens[count, 0] = at
            count += 1
    return -1, count


@compiled
def _message_row(
    buffer: Any, position: int, line_end: int, has_headers: int, words: int, tokens: Any, out: Any, count: int
) -> bool:
    """Fills row `count` of `out` from a MSG or HMSG line from its words after the verb; False where it is malformed."""
    counts = 1 + has_headers
    if words != 2 + counts and words != 3 + counts:
        return False
    sid = read_number(buffer, tokens[1, 0], tokens[1, 1])
    total_bytes = read_number(buffer, tokens[words - 1, 0], tokens[words - 1, 1])
    header_bytes = read_number(buffer, tokens[words - 2, 0], tokens[words - 2, 1]) if has_headers else 0
    if sid < 0 or total_bytes < 0 or header_bytes < 0 or header_bytes > total_bytes:
        return False
    start = line_end + 2
    out[count, 0] = sid
    out[count, 1] = position
    out[count, 2] = start + total_bytes + 2
    out[count, 3] = tokens[0, 0]
    out[count, 4] = tokens[0, 1] - tokens[0, 0]
    out[count, 5] = tokens[2, 0] if words == 3 + counts else 0
    out[count, 6] = tokens[2, 1] - tokens[2, 0] if words == 3 + counts else 0
    out[count, 7] = header_bytes
    out[count, 8] = start + header_bytes
    out[count, 9] = total_bytes - header_bytes
    return True


@compiled
def scan_with(buffer: Any, start: int, length: int, out: Any, tokens: Any) -> tuple[int, int, int, bool]:
    """`scan` with room for six words of a line, of shape (6, 2)."""
    position, count = start, 0
    while position < length and count < out.shape[0]:
        has_headers = 1 if buffer[position] == _H else 0
        word = position + has_headers
        is_message = (
            length - word > 4
            and buffer[word] == _M
            and buffer[word + 1] == _S
            and buffer[word + 2] == _G
            and is_blank(buffer[word + 3])
        )
        if not is_message:
            line_end = find_line_end(buffer, position, length)
            if line_end < 0:
                return count, position, 0, length - position > MAX_LINE_BYTES
            out[count, :] = 0
            out[count, 0] = CONTROL_SID
            out[count, 1] = position
            out[count, 2] = line_end + 2
            position, count = line_end + 2, count + 1
            continue
        line_end, words = _split_line(buffer, word + 4, length, tokens)
        if line_end < 0:
            return count, position, 0, length - position > MAX_LINE_BYTES
        if not _message_row(buffer, position, line_end, has_headers, words, tokens, out, count):
            return count, position, 0, True
        end = out[count, 2]
        if end > length:
            return count, position, end - position, False
        if buffer[end - 2] != CR or buffer[end - 1] != LF:
            return count, position, 0, True
        position, count = end, count + 1
    return count, position, 0, False


@compiled
def survey(buffer: Any, frames: Any) -> tuple[int, int, int, int, int, int, int]:
    """Sizes to gather, in one pass: the sums that `layout.Survey` names."""
    subject_bytes, value_bytes, reply_bytes, frame_bytes, headed, header_lines, not_ascii = 0, 0, 0, 0, 0, 0, 0
    for index in range(frames.shape[0]):
        subject, payload = frames[index, 3], frames[index, 8]
        high = np.uint8(0)
        for at in range(subject, subject + frames[index, 4]):
            high |= buffer[at]
        for at in range(payload - frames[index, 7], payload):
            high |= buffer[at]
            header_lines += 1 if buffer[at] == LF else 0
        subject_bytes += frames[index, 4]
        value_bytes += frames[index, 9]
        reply_bytes += frames[index, 6]
        frame_bytes += frames[index, 2] - frames[index, 1]
        headed += 1 if frames[index, 7] > 0 else 0
        not_ascii += 1 if high > 127 else 0
    return subject_bytes, value_bytes, reply_bytes, frame_bytes, headed, header_lines, not_ascii


@compiled
def gather_messages(
    buffer: Any,
    frames: Any,
    subject_data: Any,
    subject_offsets: Any,
    value_data: Any,
    value_offsets: Any,
    reply_data: Any,
    reply_offsets: Any,
    row: int,
) -> None:
    """`gather` for subjects, payloads and reply subjects at once."""
    subject_at, value_at, reply_at = (
        np.int64(subject_offsets[row]),
        np.int64(value_offsets[row]),
        np.int64(reply_offsets[row]),
    )
    for index in range(frames.shape[0]):
        copy_bytes(buffer, frames[index, 3], frames[index, 4], subject_data, subject_at)
        copy_bytes(buffer, frames[index, 8], frames[index, 9], value_data, value_at)
        copy_bytes(buffer, frames[index, 5], frames[index, 6], reply_data, reply_at)
        subject_at += frames[index, 4]
        value_at += frames[index, 9]
        reply_at += frames[index, 6]
        subject_offsets[row + index + 1] = subject_at
        value_offsets[row + index + 1] = value_at
        reply_offsets[row + index + 1] = reply_at


@compiled
def gather(buffer: Any, starts: Any, lengths: Any, data: Any, offsets: Any, row: int) -> None:
    """Copies `buffer[starts[i]:starts[i]+lengths[i]]` one after another into an Arrow variable-length column.

    `offsets[row]` is where the column's data ends now; `offsets[row+1…]` are filled.
    """
    at = np.int64(offsets[row])
    for index in range(starts.shape[0]):
        copy_bytes(buffer, starts[index], lengths[index], data, at)
        at += lengths[index]
        offsets[row + index + 1] = at


@compiled
def _is_plain_json(buffer: Any, start: int, end: int) -> bool:
    """Whether the text is short, and can stand between the quotes of JSON as it is."""
    if end <= start or end - start > _MOST_CORRELATION_BYTES:
        return False
    for at in range(start, end):
        if buffer[at] <= SPACE or buffer[at] >= _DELETE or buffer[at] == _QUOTE or buffer[at] == _BACKSLASH:
            return False
    return True


@compiled
def split_headers(
    buffer: Any,
    frames: Any,
    key_word: Any,
    id_word: Any,
    pairs: Any,
    first_pair: Any,
    keys: Any,
    ids: Any,
    letters: Any,
    packed: Any,
    correlation_word: Any,
    correlations: Any,
    omitted_word: Any,
    omitted: Any,
    ack_word: Any,
    wants_full_ack: Any,
) -> int:
    """Finds the `Name: value` lines of each frame's header block, in order, repeats kept.

    Args:
        pairs: columns (name start, name length, value start, value length), each of them one after another in memory,
            are filled; blanks around a value are left out.
        first_pair: `first_pair[i]` is the first pair of frame i; one more entry than frames.
        keys: starts, then lengths, of the value of header `key_word` in each frame; length -1 where there is none.
        ids: the same for `id_word`.
        letters: of `pack_id`. packed: the packed id of each frame whose id can be packed, which is then no pair; else
            zeros. Without rows, no id is packed.
        correlations: as `keys`, of the first value of `correlation_word` that can stand between the quotes of JSON.
        omitted: marks the frames that have a header which is no pair: a packed id, or `omitted_word` (may be empty).
        wants_full_ack: marks the frames that have the header `ack_word` with the value `full`.

    Returns:
        How many pairs there are.
    """
    count = 0
    for index in range(frames.shape[0]):
        first_pair[index] = count
        keys[1, index] = -1
        ids[1, index] = -1
        correlations[1, index] = -1
        end = frames[index, 8]
        at = end - frames[index, 7]
        line = 0
        while at < end:
            line_end = find_line_end(buffer, at, end)
            if line_end < 0:
                line_end = end
            if line > 0 and line_end > at:
                colon = at
                while colon < line_end and buffer[colon] != COLON:
                    colon += 1
                low, high = min(colon + 1, line_end), line_end
                while low < high and is_blank(buffer[low]):
                    low += 1
                while high > low and is_blank(buffer[high - 1]):
                    high -= 1
                pairs[0, count] = at
                pairs[1, count] = colon - at
                pairs[2, count] = low
                pairs[3, count] = high - low
                is_pair = True
                if keys[1, index] < 0 and equals(buffer, at, colon, key_word):
                    keys[0, index] = low
                    keys[1, index] = high - low
                if (
                    correlations[1, index] < 0
                    and equals(buffer, at, colon, correlation_word)
                    and _is_plain_json(buffer, low, high)
                ):
                    correlations[0, index] = low
                    correlations[1, index] = high - low
                if ids[1, index] < 0 and high > low and equals(buffer, at, colon, id_word):
                    ids[0, index] = low
                    ids[1, index] = high - low
                    if packed.shape[0] > 0 and pack_id(buffer, low, high, letters, packed, index):
                        is_pair = False
                elif omitted_word.shape[0] > 0 and equals(buffer, at, colon, omitted_word):
                    is_pair = False
                elif equals(buffer, at, colon, ack_word) and equals(buffer, low, high, _FULL):
                    wants_full_ack[index] = True
                if is_pair:
                    count += 1
                else:
                    omitted[index] = True
            line += 1
            at = line_end + 2
    first_pair[frames.shape[0]] = count
    return count


@compiled
def mark_high_bytes(buffer: Any, frames: Any, marks: Any) -> None:
    """Marks the frames that have a byte above 127 in their subject or headers."""
    for index in range(frames.shape[0]):
        subject = frames[index, 3]
        for at in range(subject, subject + frames[index, 4]):
            if buffer[at] > 127:
                marks[index] = True
        payload = frames[index, 8]
        for at in range(payload - frames[index, 7], payload):
            if buffer[at] > 127:
                marks[index] = True


@compiled
def mark_not_plain(buffer: Any, frames: Any, most_bytes: int, marks: Any) -> int:
    """Marks the frames whose subject is longer, or has an empty token, a wildcard as a token or a control character.

    Returns how many these are.
    """
    count = 0
    for index in range(frames.shape[0]):
        if not is_plain_subject(buffer, frames[index, 3], frames[index, 4], most_bytes):
            marks[index] = True
            count += 1
    return count


@compiled
def mark_header_prefixes(buffer: Any, frames: Any, first: Any, second: Any, third: Any, marks: Any) -> None:
    """Marks the frames that have a header whose name begins with one of three prefixes, in one pass."""
    for index in range(frames.shape[0]):
        end = frames[index, 8]
        for at in range(end - frames[index, 7], end):
            if buffer[at] == LF and (
                (at + first.shape[0] < end and equals(buffer, at + 1, at + 1 + first.shape[0], first))
                or (at + second.shape[0] < end and equals(buffer, at + 1, at + 1 + second.shape[0], second))
                or (at + third.shape[0] < end and equals(buffer, at + 1, at + 1 + third.shape[0], third))
            ):
                marks[index] = True


@compiled
def mark_header_prefix(buffer: Any, frames: Any, prefix: Any, marks: Any) -> None:
    """Marks the frames that have a header whose name begins with `prefix`."""
    for index in range(frames.shape[0]):
        end = frames[index, 8]
        for at in range(end - frames[index, 7], end - prefix.shape[0]):
            if buffer[at] == LF and equals(buffer, at + 1, at + 1 + prefix.shape[0], prefix):
                marks[index] = True


@compiled
def group_rows(frames: Any, groups: Any) -> int:
    """In place of the number of each subscription, that of its group: `groups[number]`, if there is one.

    Returns:
        1 if all frames are of one group.
    """
    is_single = 1
    for index in range(frames.shape[0]):
        sid = frames[index, 0]
        if 0 <= sid < groups.shape[0]:
            sid = groups[sid]
            frames[index, 0] = sid
        if sid != frames[0, 0]:
            is_single = 0
    return is_single
