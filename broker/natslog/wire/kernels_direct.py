"""Kernels for direct requests of the JetStream API: what is requested, where messages are kept, and answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import (
    CR,
    LF,
    SPACE,
    ZERO,
    compiled,
    copy_bytes,
    digits_of,
    equals,
    inlined,
    put_number,
    put_text,
    read_number,
)

_SEQUENCE = np.frombuffer(b'{"seq":', np.uint8)
_LAST = np.frombuffer(b'{"last_by_subj":', np.uint8)
_PUBLISH = np.frombuffer(b"HPUB ", np.uint8)
_VERSION_LINE = np.frombuffer(b"NATS/1.0\r\n", np.uint8)
_SEQUENCE_LINE = np.frombuffer(b"\r\nNats-Sequence: ", np.uint8)
_TIME_LINE = np.frombuffer(b"\r\nNats-Time-Stamp: ", np.uint8)
_DOT, _STAR, _GREATER, _DOLLAR, _QUOTE, _BACKSLASH, _CLOSE, _DELETE = 46, 42, 62, 36, 34, 92, 125, 127
_DASH, _COLON, _T, _Z, _API = 45, 58, 84, 90, 65
_OTHER, _BY_SUBJECT, _BY_SEQUENCE, _IGNORED = 0, 1, 2, 3
_NAME_AT = 4  # in `$JS.API…` and `$JS.natslog.API…`: the first letter that differs
_DAY_US = 86_400_000_000


@compiled
def _has_wildcard(buffer: Any, start: int, end: int) -> bool:
    """Whether a token of the subject is one."""
    token = start
    for at in range(start, end + 1):
        if at == end or buffer[at] == _DOT:
            if at - token == 1 and (buffer[token] == _STAR or buffer[token] == _GREATER):
                return True
            token = at + 1
    return False


@inlined
def _behind(buffer: Any, start: int, end: int, word: Any) -> int:
    """Where the value behind this field begins; -1 if the text does not begin with it."""
    at = start + len(word)
    if at + 2 > end or not equals(buffer, start, at, word):
        return -1
    return at + 1 if buffer[at] == SPACE else at


@compiled
def sort_requests(buffer: Any, frames: Any, api_bytes: int, domain_bytes: int, found: Any) -> int:
    """Which direct requests are for one message that a kernel can tell: the last one on a subject without wildcards, or
    that of a sequence.

    Args:
        api_bytes, domain_bytes: how long the subject up to the name of the stream is in the API, and in the domain.
        found: of shape (frames, 4): the kind (see `direct_frames`), start and length of the subject in the buffer, and
            the sequence.

    Returns:
        How many these are.
    """
    count = 0
    for index in range(frames.shape[0]):
        found[index, 0], found[index, 1], found[index, 2], found[index, 3] = _OTHER, 0, 0, 0
        if frames[index, 6] == 0 or buffer[frames[index, 5]] == _DOLLAR:
            found[index, 0] = _IGNORED
            continue
        if frames[index, 7] > 0:
            continue
        subject, payload = frames[index, 3], frames[index, 8]
        subject_end, end = subject + frames[index, 4], payload + frames[index, 9]
        named = subject + (api_bytes if buffer[subject + _NAME_AT] == _API else domain_bytes)
        if end == payload:
            if subject_end > named + 1 and not _has_wildcard(buffer, named + 1, subject_end):
                found[index, 0], found[index, 1], found[index, 2] = _BY_SUBJECT, named + 1, subject_end - named - 1
                count += 1
            continue
        if subject_end > named or buffer[end - 1] != _CLOSE:
            continue
        at = _behind(buffer, payload, end, _SEQUENCE)
        if at > 0:
            sequence = read_number(buffer, at, end - 1)
            if sequence > 0 and (buffer[at] != ZERO):
                found[index, 0], found[index, 3] = _BY_SEQUENCE, sequence
                count += 1
            continue
        at = _behind(buffer, payload, end, _LAST)
        last = end - 2
        if at < 0 or last <= at + 1 or buffer[at] != _QUOTE or buffer[last] != _QUOTE:
            continue
        is_plain = True
        for place in range(at + 1, last):
            byte = buffer[place]
            if byte <= SPACE or byte >= _DELETE or byte in (_QUOTE, _BACKSLASH):
                is_plain = False
                break
        if is_plain and not _has_wildcard(buffer, at + 1, last):
            found[index, 0], found[index, 1], found[index, 2] = _BY_SUBJECT, at + 1, last - at - 1
            count += 1
    return count


@compiled
def find_sorted(offsets: Any, data: Any, sorted_offsets: Any, sorted_data: Any, found: Any) -> None:
    """`found[i]` becomes the number of text i among ascending texts, or -1."""
    for index in range(found.shape[0]):
        start = np.int64(offsets[index])
        length = np.int64(offsets[index + 1]) - start
        low, high = 0, sorted_offsets.shape[0] - 1
        found[index] = -1
        while low < high:
            middle = (low + high) // 2
            other = np.int64(sorted_offsets[middle])
            other_length = np.int64(sorted_offsets[middle + 1]) - other
            order = 0
            for at in range(min(length, other_length)):
                one, two = data[start + at], sorted_data[other + at]
                if one != two:
                    order = 1 if one > two else -1
                    break
            if order == 0 and length != other_length:
                order = 1 if length > other_length else -1
            if order == 0:
                found[index] = middle
                break
            if order > 0:
                low = middle + 1
            else:
                high = middle


@inlined
def _slot_of(offset: int, slots: int) -> Any:
    mixed = np.uint64(offset) * np.uint64(0x9E3779B185EBCA87)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(slots - 1))


@compiled
def kept_places(offsets: Any, slots: Any, places: Any) -> int:
    """Where the answers of these offsets are kept.

    Args:
        slots: a hash table with linear probing: offset plus one (0: free), and what `places` has.
        places: of shape (offsets, 3): becomes where the answer begins (-1: it is not kept, or the offset is negative),
            the length of its header block, and its length.

    Returns:
        How many offsets from 0 on are not kept.
    """
    missing = 0
    for index in range(offsets.shape[0]):
        offset = offsets[index]
        places[index, 0], places[index, 1], places[index, 2] = -1, 0, 0
        if offset < 0:
            continue
        slot = _slot_of(offset, slots.shape[0])
        while slots[slot, 0] != 0 and slots[slot, 0] != offset + 1:
            slot = (slot + 1) & (slots.shape[0] - 1)
        if slots[slot, 0] == 0:
            missing += 1
            continue
        places[index, 0], places[index, 1], places[index, 2] = slots[slot, 1], slots[slot, 2], slots[slot, 3]
    return missing


@compiled
def keep_places(offsets: Any, places: Any, slots: Any) -> int:
    """Adds distinct offsets, for which there is room. Returns how many were not there before."""
    added = 0
    for index in range(offsets.shape[0]):
        slot = _slot_of(offsets[index], slots.shape[0])
        while slots[slot, 0] != 0 and slots[slot, 0] != offsets[index] + 1:
            slot = (slot + 1) & (slots.shape[0] - 1)
        added += 1 if slots[slot, 0] == 0 else 0
        slots[slot, 0] = offsets[index] + 1
        slots[slot, 1], slots[slot, 2], slots[slot, 3] = places[index, 0], places[index, 1], places[index, 2]
    return added


@inlined
def _put_two(out: Any, at: int, number: int, behind: int) -> int:
    out[at] = ZERO + number // 10
    out[at + 1] = ZERO + number % 10
    out[at + 2] = behind
    return at + 3


@compiled
def _put_time(out: Any, at: int, time_us: int) -> int:
    """RFC 3339 without zeros at the end of the fraction. Source: H. Hinnant, `civil_from_days`."""
    days, rest_us = time_us // _DAY_US, time_us % _DAY_US
    shifted = days + 719468
    era, day_of_era = shifted // 146097, shifted % 146097
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36524 - day_of_era // 146096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month_of_year = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month_of_year + 2) // 5 + 1
    month = month_of_year + 3 if month_of_year < 10 else month_of_year - 9
    year = year_of_era + era * 400 + (1 if month <= 2 else 0)
    at = put_number(out, at, year, 4)
    out[at] = _DASH
    at = _put_two(out, at + 1, month, _DASH)
    at = _put_two(out, at, day, _T)
    seconds, fraction = rest_us // 1_000_000, rest_us % 1_000_000
    at = _put_two(out, at, seconds // 3600, _COLON)
    at = _put_two(out, at, seconds // 60 % 60, _COLON)
    at = _put_two(out, at, seconds % 60, _DOT)
    if fraction == 0:
        at -= 1
    else:
        digits = 6
        while fraction % 10 == 0:
            fraction //= 10
            digits -= 1
        at = put_number(out, at, fraction, digits)
    out[at] = _Z
    return at + 1


@compiled
def direct_answers(
    subject_offsets: Any,
    subject_data: Any,
    value_offsets: Any,
    value_data: Any,
    line_offsets: Any,
    line_data: Any,
    offsets: Any,
    times_us: Any,
    prefix: Any,
    out: Any,
    places: Any,
) -> int:
    """The answers with these messages, one after another.

    Args:
        prefix: what stands between the headers of a message and its subject.
        places: of shape (messages, 3), as of `kept_places`.

    Returns:
        How many bytes of `out` were filled.
    """
    at = 0
    for index in range(offsets.shape[0]):
        start = at
        at = put_text(out, at, _VERSION_LINE)
        line_bytes = line_offsets[index + 1] - line_offsets[index]
        copy_bytes(line_data, line_offsets[index], line_bytes, out, at)
        at = put_text(out, at + line_bytes, prefix)
        subject_bytes = subject_offsets[index + 1] - subject_offsets[index]
        copy_bytes(subject_data, subject_offsets[index], subject_bytes, out, at)
        at = put_text(out, at + subject_bytes, _SEQUENCE_LINE)
        sequence = offsets[index] + 1
        at = put_number(out, at, sequence, digits_of(sequence))
        at = put_text(out, at, _TIME_LINE)
        at = _put_time(out, at, times_us[index])
        out[at], out[at + 1], out[at + 2], out[at + 3] = CR, LF, CR, LF
        at += 4
        value_bytes = value_offsets[index + 1] - value_offsets[index]
        copy_bytes(value_data, value_offsets[index], value_bytes, out, at)
        places[index, 0], places[index, 1], places[index, 2] = start, at - start, at - start + value_bytes
        at += value_bytes
    return at


@compiled
def answer_frames(reply_offsets: Any, reply_data: Any, rows: Any, places: Any, data: Any, out: Any) -> int:
    """`HPUB` frames of answers, one after another.

    Args:
        rows: of each answer, the number of its reply subject. `places`: where it is in `data`, as of `kept_places`.

    Returns:
        How many bytes of `out` were filled.
    """
    at = 0
    for index in range(rows.shape[0]):
        reply = reply_offsets[rows[index]]
        reply_bytes = reply_offsets[rows[index] + 1] - reply
        header_bytes, total_bytes = places[index, 1], places[index, 2]
        at = put_text(out, at, _PUBLISH)
        copy_bytes(reply_data, reply, reply_bytes, out, at)
        at += reply_bytes
        out[at] = SPACE
        at = put_number(out, at + 1, header_bytes, digits_of(header_bytes))
        out[at] = SPACE
        at = put_number(out, at + 1, total_bytes, digits_of(total_bytes))
        out[at], out[at + 1] = CR, LF
        copy_bytes(data, places[index, 0], total_bytes, out, at + 2)
        at += 2 + total_bytes
        out[at], out[at + 1] = CR, LF
        at += 2
    return at
