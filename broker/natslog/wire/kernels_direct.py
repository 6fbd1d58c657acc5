"""Kernels for direct requests of the JetStream API: what is requested, where messages are kept, and answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes, inlined
from natslog.wire.kernels_text import CR, LF, SPACE, ZERO, digits_of, equals, put_number, put_text, read_number

_SEQUENCE = np.frombuffer(b'{"seq":', np.uint8)
_LAST = np.frombuffer(b'{"last_by_subj":', np.uint8)
_PUBLISH = np.frombuffer(b"HPUB ", np.uint8)
_VERSION_LINE = np.frombuffer(b"NATS/1.0\r\n", np.uint8)
_SEQUENCE_LINE = np.frombuffer(b"\r\nNats-Sequence: ", np.uint8)
_TIME_LINE = np.frombuffer(b"\r\nNats-Time-Stamp: ", np.uint8)
_DOT, _STAR, _GREATER, _DOLLAR, _QUOTE, _BACKSLASH, _CLOSE, _DELETE = 46, 42, 62, 36, 34, 92, 125, 127
_DASH, _COLON, _T, _Z, _API = 45, 58, 84, 90, 65
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


@inlined
def _subject_of(buffer: Any, start: int, end: int) -> int:
    """Where the text begins in `{"last_by_subj":"text"}`, where it ends two bytes before `end`; -1 if it is not that,
    or the text has wildcards, or other characters than a kernel reads.
    """
    at, last = _behind(buffer, start, end, _LAST), end - 2
    if at < 0 or last <= at + 1 or buffer[at] != _QUOTE or buffer[last] != _QUOTE:
        return -1
    for place in range(at + 1, last):
        byte = buffer[place]
        if byte <= SPACE or byte >= _DELETE or byte in (_QUOTE, _BACKSLASH):
            return -1
    return -1 if _has_wildcard(buffer, at + 1, last) else at + 1


@compiled
def take_requests(
    buffer: Any,
    frames: Any,
    api_bytes: int,
    domain_bytes: int,
    others: Any,
    subject_offsets: Any,
    subject_data: Any,
    reply_offsets: Any,
    reply_data: Any,
    sequences: Any,
) -> tuple[int, int]:
    """Copies those direct requests that are for the last message on a subject without wildcards, or for that of a
    sequence, as far as a kernel can read them. Requests without a reply subject, or with one that begins with `$`, are
    passed over.

    Args:
        api_bytes, domain_bytes: how long the subject up to the name of the stream is in the API, and in the domain.
        others: becomes the numbers of the other requests.
        subject_offsets, …, sequences: see `direct_frames.Requests`; with room for all frames.

    Returns:
        How many were copied, and how many are others.
    """
    count, left, subject_at, reply_at = 0, 0, 0, 0
    subject_offsets[0], reply_offsets[0] = 0, 0
    for index in range(frames.shape[0]):
        reply_bytes = frames[index, 6]
        if reply_bytes == 0 or buffer[frames[index, 5]] == _DOLLAR:
            continue
        subject, payload = frames[index, 3], frames[index, 8]
        subject_end, end = subject + frames[index, 4], payload + frames[index, 9]
        named = subject + (api_bytes if buffer[subject + _NAME_AT] == _API else domain_bytes)
        start, length, sequence = -1, 0, 0
        if frames[index, 7] == 0 and end == payload:
            if subject_end > named + 1 and not _has_wildcard(buffer, named + 1, subject_end):
                start, length = named + 1, subject_end - named - 1
        elif frames[index, 7] == 0 and subject_end == named and buffer[end - 1] == _CLOSE:
            at = _behind(buffer, payload, end, _SEQUENCE)
            if at > 0:
                if buffer[at] != ZERO:
                    sequence = max(0, read_number(buffer, at, end - 1))
            else:
                start = _subject_of(buffer, payload, end)
                length = end - 2 - start if start >= 0 else 0
        if start < 0 and sequence == 0:
            others[left] = index
            left += 1
            continue
        if length > 0:
            copy_bytes(buffer, start, length, subject_data, subject_at)
        copy_bytes(buffer, frames[index, 5], reply_bytes, reply_data, reply_at)
        subject_at += length
        reply_at += reply_bytes
        sequences[count] = sequence
        count += 1
        subject_offsets[count], reply_offsets[count] = subject_at, reply_at
    return count, left


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
def kept_places(offsets: Any, slots: Any, places: Any) -> tuple[int, int]:
    """Where the answers of these offsets are kept.

    Args:
        slots: a hash table with linear probing: offset plus one (0: free), and what `places` has.
        places: of shape (offsets, 3): becomes where the answer begins (-1: the offset is negative, -2: it is not kept),
            the length of its header block, and its length.

    Returns:
        How many are not kept, and the length of the others.
    """
    missing, size_bytes = 0, 0
    for index in range(offsets.shape[0]):
        offset = offsets[index]
        places[index, 0], places[index, 1], places[index, 2] = -1, 0, 0
        if offset < 0:
            continue
        slot = _slot_of(offset, slots.shape[0])
        while slots[slot, 0] != 0 and slots[slot, 0] != offset + 1:
            slot = (slot + 1) & (slots.shape[0] - 1)
        if slots[slot, 0] == 0:
            places[index, 0] = -2
            missing += 1
            continue
        places[index, 0], places[index, 1], places[index, 2] = slots[slot, 1], slots[slot, 2], slots[slot, 3]
        size_bytes += slots[slot, 3]
    return missing, size_bytes


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


@inlined
def _put_answer(out: Any, at: int, data: Any, start: int, header_bytes: int, total_bytes: int) -> int:
    """The frame behind its reply subject."""
    out[at] = SPACE
    at = put_number(out, at + 1, header_bytes, digits_of(header_bytes))
    out[at] = SPACE
    at = put_number(out, at + 1, total_bytes, digits_of(total_bytes))
    out[at], out[at + 1] = CR, LF
    copy_bytes(data, start, total_bytes, out, at + 2)
    at += 2 + total_bytes
    out[at], out[at + 1] = CR, LF
    return at + 2


@compiled
def answer_frames(
    reply_offsets: Any,
    reply_data: Any,
    rows: Any,
    places: Any,
    data: Any,
    most_bytes: int,
    not_found: Any,
    too_large: Any,
    out: Any,
) -> int:
    """`HPUB` frames of answers, one after another.

    Args:
        rows: of each answer, the number of its reply subject. `places`: where it is in `data`, as of `kept_places`; -1:
            the answer is `not_found`. most_bytes: of an answer; instead of a larger one, `too_large` is the answer.

    Returns:
        How many bytes of `out` were filled.
    """
    at = 0
    for index in range(rows.shape[0]):
        reply = reply_offsets[rows[index]]
        reply_bytes = reply_offsets[rows[index] + 1] - reply
        at = put_text(out, at, _PUBLISH)
        copy_bytes(reply_data, reply, reply_bytes, out, at)
        at += reply_bytes
        if places[index, 0] < 0:
            at = _put_answer(out, at, not_found, 0, not_found.shape[0], not_found.shape[0])
        elif places[index, 2] > most_bytes:
            at = _put_answer(out, at, too_large, 0, too_large.shape[0], too_large.shape[0])
        else:
            at = _put_answer(out, at, data, places[index, 0], places[index, 1], places[index, 2])
    return at
