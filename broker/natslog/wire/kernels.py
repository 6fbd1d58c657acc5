"""Compiled kernels (numba, `nogil`, cached): frame scanning, gathering of columns, header blocks, message-id hashes.

Each works on whole receive buffers and never on a message at a time from Python. `scan` has a plain twin in `plain.py`;
the others run uncompiled where numba is missing (`compiled` is then the identity), slower but the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from natslog.wire.layout import CONTROL_SID, MAX_LINE_BYTES

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    from numba import njit, types
except ImportError:  # the base install: everything works, `scan` by its plain twin
    HAVE_NUMBA = False

    def compiled(function: Function) -> Function:
        """The function itself; hashes wrap around in 64 bits, as they do compiled."""
        quiet: Function = np.errstate(over="ignore")(function)
        return quiet

    inlined = compiled

    def _copy(source: Any, start: Any, length: Any, target: Any, at: Any) -> None:
        target[at : at + length] = source[start : start + length]

else:
    HAVE_NUMBA = True

    def _njit(function: Any, **options: Any) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # nowhere to keep compiled code, as in a read-only container without a home
            return njit(nogil=True, **options)(function)

    def compiled(function: Function) -> Function:
        decorated: Function = _njit(function)
        return decorated

    def inlined(function: Function) -> Function:
        """For what is called per message: an array handed to a real call costs two atomic counts."""
        decorated: Function = _njit(function, inline="always")
        return decorated

    _memcpy = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))

    @inlined
    def _copy(source: Any, start: Any, length: Any, target: Any, at: Any) -> None:
        """Assigning a slice costs five times as much: 50 ns instead of 11 for 128 bytes."""
        target_address = np.uintp(target.ctypes.data) + np.uintp(at)
        _memcpy(target_address, np.uintp(source.ctypes.data) + np.uintp(start), np.uintp(length))


_CR, _LF, _SPACE, _TAB, _COLON, _ZERO = 13, 10, 32, 9, 58, 48
_M, _S, _G, _H, _P, _U, _B = 77, 83, 71, 72, 80, 85, 66
_MAX_DIGITS = 10
_VERSION_LINE = np.frombuffer(b"NATS/1.0\r\n", np.uint8)
_ID_NAME = np.frombuffer(b"Nats-Msg-Id: ", np.uint8)
_SEQ_FIELD = np.frombuffer(b'"seq"', np.uint8)
_ERROR_FIELD = np.frombuffer(b'"error":', np.uint8)


@inlined
def _number(buffer: Any, start: int, end: int) -> int:
    """The decimal number there, or -1."""
    if end <= start or end - start > _MAX_DIGITS:
        return -1
    value = np.int64(0)
    for at in range(start, end):
        digit = np.int64(buffer[at]) - _ZERO
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + digit
    return int(value)


@inlined
def _line_end(buffer: Any, position: int, length: int) -> int:
    """Where the next CRLF starts, or -1."""
    for at in range(position, length - 1):
        if buffer[at] == _CR and buffer[at + 1] == _LF:
            return at
    return -1


@inlined
def _is_blank(byte: int) -> bool:
    return byte in (_SPACE, _TAB)


@inlined
def _split_line(buffer: Any, position: int, length: int, tokens: Any) -> tuple[int, int]:
    """Finds the end of the line (where its CRLF starts, or -1) and the words in it, in one pass.

    Returns:
        The line's end and how many words it has; `tokens` holds (start, end) of as many as fit.
    """
    count, in_word, room = 0, False, tokens.shape[0]
    for at in range(position, length - 1):  # a range: compiled, an index that cannot be negative is quicker
        byte = buffer[at]
        is_end = byte == _CR and buffer[at + 1] == _LF
        if is_end or byte in (_SPACE, _TAB):
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
    sid = _number(buffer, tokens[1, 0], tokens[1, 1])
    total_bytes = _number(buffer, tokens[words - 1, 0], tokens[words - 1, 1])
    header_bytes = _number(buffer, tokens[words - 2, 0], tokens[words - 2, 1]) if has_headers else 0
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
def scan(buffer: Any, start: int, length: int, out: Any) -> tuple[int, int, int, bool]:
    """Finds whole frames in `buffer[start:length]`; the fields of `layout.ScanResult`."""
    tokens = np.zeros((6, 2), np.int64)
    position, count = start, 0
    while position < length and count < out.shape[0]:
        has_headers = 1 if buffer[position] == _H else 0
        word = position + has_headers
        is_message = (
            length - word > 4
            and buffer[word] == _M
            and buffer[word + 1] == _S
            and buffer[word + 2] == _G
            and _is_blank(buffer[word + 3])
        )
        if not is_message:
            line_end = _line_end(buffer, position, length)
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
        if buffer[end - 2] != _CR or buffer[end - 1] != _LF:
            return count, position, 0, True
        position, count = end, count + 1
    return count, position, 0, False


@compiled
def survey(buffer: Any, frames: Any) -> tuple[int, int, int, int, int, int, int]:
    """What there is to gather, in one pass: the sums that `layout.Survey` names."""
    subject_bytes, value_bytes, reply_bytes, frame_bytes, headed, header_lines, not_ascii = 0, 0, 0, 0, 0, 0, 0
    for index in range(frames.shape[0]):
        subject, payload = frames[index, 3], frames[index, 8]
        high = np.uint8(0)
        for at in range(subject, subject + frames[index, 4]):
            high |= buffer[at]
        for at in range(payload - frames[index, 7], payload):
            high |= buffer[at]
            header_lines += 1 if buffer[at] == _LF else 0
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
        _copy(buffer, frames[index, 3], frames[index, 4], subject_data, subject_at)
        _copy(buffer, frames[index, 8], frames[index, 9], value_data, value_at)
        _copy(buffer, frames[index, 5], frames[index, 6], reply_data, reply_at)
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
        _copy(buffer, starts[index], lengths[index], data, at)
        at += lengths[index]
        offsets[row + index + 1] = at


@compiled
def _equals(buffer: Any, start: int, end: int, word: Any) -> bool:
    if end - start != word.shape[0]:
        return False
    for at in range(word.shape[0]):
        if buffer[start + at] != word[at]:
            return False
    return True


@compiled
def split_headers(
    buffer: Any, frames: Any, key_word: Any, id_word: Any, pairs: Any, first_pair: Any, keys: Any, ids: Any
) -> int:
    """Finds the `Name: value` lines of each frame's header block, in order, repeats kept.

    Args:
        pairs: rows (name start, name length, value start, value length) are filled; blanks around a value are left out.
        first_pair: `first_pair[i]` is the first pair of frame i; one more entry than frames.
        keys: (start, length) of the value of header `key_word` in each frame, length -1 where there is none.
        ids: the same for `id_word`.

    Returns:
        How many pairs there are.
    """
    count = 0
    for index in range(frames.shape[0]):
        first_pair[index] = count
        keys[index, 1] = -1
        ids[index, 1] = -1
        end = frames[index, 8]
        at = end - frames[index, 7]
        line = 0
        while at < end:
            line_end = _line_end(buffer, at, end)
            if line_end < 0:
                line_end = end
            if line > 0 and line_end > at:
                colon = at
                while colon < line_end and buffer[colon] != _COLON:
                    colon += 1
                low, high = min(colon + 1, line_end), line_end
                while low < high and _is_blank(buffer[low]):
                    low += 1
                while high > low and _is_blank(buffer[high - 1]):
                    high -= 1
                pairs[count, 0] = at
                pairs[count, 1] = colon - at
                pairs[count, 2] = low
                pairs[count, 3] = high - low
                if keys[index, 1] < 0 and _equals(buffer, at, colon, key_word):
                    keys[index, 0] = low
                    keys[index, 1] = high - low
                if ids[index, 1] < 0 and high > low and _equals(buffer, at, colon, id_word):
                    ids[index, 0] = low
                    ids[index, 1] = high - low
                count += 1
            line += 1
            at = line_end + 2
    first_pair[frames.shape[0]] = count
    return count


@compiled
def hash_ids(buffer: Any, starts: Any, lengths: Any, out: Any) -> None:
    """128 bits of each text as two uint64 (FNV-1a from two bases, mixed): equal texts, equal rows; length -1: zeros.

    Source: Fowler, Noll, Vo, "FNV-1a"; the finaliser is MurmurHash3's fmix64.
    """
    prime = np.uint64(1099511628211)
    for index in range(starts.shape[0]):
        if lengths[index] < 0:
            out[index, 0] = np.uint64(0)
            out[index, 1] = np.uint64(0)
            continue
        for half in range(2):
            value = np.uint64(14695981039346656037) if half == 0 else np.uint64(0x9AE16A3B2F90404F)
            for at in range(starts[index], starts[index] + lengths[index]):
                value = (value ^ np.uint64(buffer[at])) * prime
            value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
            value = (value ^ (value >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
            value = value ^ (value >> np.uint64(33))
            out[index, half] = value if value != np.uint64(0) else np.uint64(1)


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
def find_ids(table: Any, offsets: Any, ids: Any, found: Any) -> None:
    """`found[i]` becomes the offset stored for `ids[i]`, or stays as it is. Open addressing, linear probing."""
    mask = np.uint64(table.shape[0] - 1)
    for index in range(ids.shape[0]):
        if ids[index, 0] == np.uint64(0):
            continue
        slot = ids[index, 0] & mask
        while table[slot, 0] != np.uint64(0):
            if table[slot, 0] == ids[index, 0] and table[slot, 1] == ids[index, 1]:
                found[index] = offsets[slot]
                break
            slot = (slot + np.uint64(1)) & mask


@compiled
def mark_repeated(ids: Any, found: Any, slots: Any, new: int, repeated: int) -> None:
    """Of the ids that are `new` in `found`, the second and later ones of each become `repeated`.

    Args:
        slots: an empty table (filled with -1) of a power of two, at least twice as many as there are ids.
    """
    mask = np.uint64(slots.shape[0] - 1)
    for index in range(ids.shape[0]):
        if ids[index, 0] == np.uint64(0) or found[index] != new:
            continue
        slot = ids[index, 0] & mask
        while slots[slot] >= 0:
            first = slots[slot]
            if ids[first, 0] == ids[index, 0] and ids[first, 1] == ids[index, 1]:
                found[index] = repeated
                break
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] < 0:
            slots[slot] = index


@compiled
def insert_ids(table: Any, offsets: Any, ids: Any, at_offsets: Any) -> int:
    """Stores `ids[i]` → `at_offsets[i]` where it is not there yet; the caller sees to room. Returns how many are
    new.
    """
    mask = np.uint64(table.shape[0] - 1)
    added = 0
    for index in range(ids.shape[0]):
        if ids[index, 0] == np.uint64(0):
            continue
        slot = ids[index, 0] & mask
        while table[slot, 0] != np.uint64(0):
            if table[slot, 0] == ids[index, 0] and table[slot, 1] == ids[index, 1]:
                break
            slot = (slot + np.uint64(1)) & mask
        if table[slot, 0] == np.uint64(0):
            table[slot, 0] = ids[index, 0]
            table[slot, 1] = ids[index, 1]
            offsets[slot] = at_offsets[index]
            added += 1
    return added


@compiled
def mark_header_prefix(buffer: Any, frames: Any, prefix: Any, marks: Any) -> None:
    """Marks the frames that have a header whose name begins with `prefix`."""
    for index in range(frames.shape[0]):
        end = frames[index, 8]
        for at in range(end - frames[index, 7], end - prefix.shape[0]):
            if buffer[at] == _LF and _equals(buffer, at + 1, at + 1 + prefix.shape[0], prefix):
                marks[index] = True


@inlined
def _put_text(out: Any, at: int, text: Any) -> int:
    _copy(text, 0, len(text), out, at)
    return at + len(text)


@inlined
def _digits(number: int) -> int:
    """How many decimal digits a number from 0 on has."""
    count, limit = 1, np.int64(10)
    while number >= limit and count < 19:
        count += 1
        limit *= 10
    return count


@inlined
def _put_number(out: Any, at: int, number: int, digits: int) -> int:
    for place in range(digits):
        out[at + digits - 1 - place] = _ZERO + number % 10
        number //= 10
    return at + digits


@compiled
def stored_acks(
    reply_data: Any, reply_offsets: Any, offsets: Any, duplicate: Any, head: Any, middle: Any, tails: Any, out: Any
) -> int:
    """`PUB <reply> <size>`, then `<head><offset + 1><middle><offset><tail>`, for each row with a reply subject.

    Args:
        duplicate: marks the rows that get the second of the two `tails`; empty where none does.
        out: room for all of it.

    Returns:
        How many bytes were filled.
    """
    at = 0
    for index in range(offsets.shape[0]):
        start, length = reply_offsets[index], reply_offsets[index + 1] - reply_offsets[index]
        if length == 0:
            continue
        tail = tails[1] if duplicate.shape[0] > 0 and duplicate[index] else tails[0]
        offset = offsets[index]
        digits, next_digits = _digits(offset), _digits(offset + 1)
        size = head.shape[0] + next_digits + middle.shape[0] + digits + tail.shape[0]
        out[at], out[at + 1], out[at + 2], out[at + 3] = _P, _U, _B, _SPACE
        _copy(reply_data, start, length, out, at + 4)
        at += 4 + length
        out[at] = _SPACE
        at = _put_number(out, at + 1, size, _digits(size))
        out[at], out[at + 1] = _CR, _LF
        at = _put_text(out, at + 2, head)
        at = _put_number(out, at, offset + 1, next_digits)
        at = _put_text(out, at, middle)
        at = _put_number(out, at, offset, digits)
        at = _put_text(out, at, tail)
        out[at], out[at + 1] = _CR, _LF
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
    out: Any,
) -> int:
    """`PUB` or `HPUB` frames; see `outgoing.publish_frames`. Empty offsets, marks or sequences: there are none.

    Returns:
        How many bytes of `out` were filled.
    """
    at = 0
    for index in range(body_offsets.shape[0] - 1):
        body_start = body_offsets[index]
        body_bytes = body_offsets[index + 1] - body_start
        line_bytes = line_offsets[index + 1] - line_offsets[index] if line_offsets.shape[0] > 0 else 0
        id_bytes = -1
        if has_id.shape[0] > 0 and has_id[index]:
            id_bytes = id_offsets[index + 1] - id_offsets[index]
        header_bytes = 0
        if line_bytes > 0 or id_bytes >= 0:
            header_bytes = 12 + line_bytes + (id_bytes + 15 if id_bytes >= 0 else 0)
            out[at] = _H
            at += 1
        out[at], out[at + 1], out[at + 2], out[at + 3] = _P, _U, _B, _SPACE
        subject_start = subject_offsets[index]
        subject_bytes = subject_offsets[index + 1] - subject_start
        _copy(subject_data, subject_start, subject_bytes, out, at + 4)
        at += 4 + subject_bytes
        out[at] = _SPACE
        at += 1
        if sequences.shape[0] > 0:
            at = _put_text(out, at, inbox)
            at = _put_number(out, at, sequences[index], _digits(sequences[index]))
            out[at] = _SPACE
            at += 1
        if header_bytes > 0:
            at = _put_number(out, at, header_bytes, _digits(header_bytes))
            out[at] = _SPACE
            at += 1
        total_bytes = header_bytes + body_bytes
        at = _put_number(out, at, total_bytes, _digits(total_bytes))
        out[at], out[at + 1] = _CR, _LF
        at += 2
        if header_bytes > 0:
            at = _put_text(out, at, _VERSION_LINE)
            if line_bytes > 0:
                _copy(line_data, line_offsets[index], line_bytes, out, at)
                at += line_bytes
            if id_bytes >= 0:
                at = _put_text(out, at, _ID_NAME)
                _copy(id_data, id_offsets[index], id_bytes, out, at)
                at += id_bytes
                out[at], out[at + 1] = _CR, _LF
                at += 2
            out[at], out[at + 1] = _CR, _LF
            at += 2
        _copy(body_data, body_start, body_bytes, out, at)
        at += body_bytes
        out[at], out[at + 1] = _CR, _LF
        at += 2
    return at


@compiled
def mark_unlike_a_line(offsets: Any, data: Any, marks: Any) -> None:
    """Marks texts that hold a line break or a byte above 127, or begin or end with a blank."""
    for index in range(offsets.shape[0] - 1):
        start, end = offsets[index], offsets[index + 1]
        if end > start:
            marks[index] = _is_blank(data[start]) or _is_blank(data[end - 1])
        for at in range(start, end):
            if data[at] > 127 or data[at] in (_CR, _LF):
                marks[index] = True


@compiled
def _contains(buffer: Any, start: int, end: int, word: Any) -> bool:
    for at in range(start, end - word.shape[0] + 1):
        if buffer[at] == word[0]:
            same = True
            for place in range(1, word.shape[0]):
                if buffer[at + place] != word[place]:
                    same = False
                    break
            if same:
                return True
    return False


@compiled
def read_acks(buffer: Any, frames: Any, prefix_bytes: int, sequences: Any) -> None:
    """`sequences[i]` becomes the number that ends the subject of frame i, or -1 where its payload is no PubAck."""
    for index in range(frames.shape[0]):
        subject, payload = frames[index, 3], frames[index, 8]
        end = payload + frames[index, 9]
        is_ack = _contains(buffer, payload, end, _SEQ_FIELD) and not _contains(buffer, payload, end, _ERROR_FIELD)
        sequences[index] = _number(buffer, subject + prefix_bytes, subject + frames[index, 4]) if is_ack else -1
