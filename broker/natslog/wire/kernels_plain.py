"""Kernels for small commits of plain messages, whose headers make no demand: from frames to a stored batch, and to
acks, in one pass each. What is not plain takes the way over columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes, crc_of, inlined
from natslog.wire.kernels_acks import begins_with_one, is_of_delivery
from natslog.wire.kernels_out import is_numbered_next, put_ack
from natslog.wire.kernels_text import LF, equals, is_plain_subject, put_number
from natslog.wire.stored_layout import (
    BASE,
    BODY_BYTES,
    BODY_LENGTH,
    BUFFERS,
    CRCS,
    END,
    EPOCH,
    HEADER_BYTES,
    IDS_BYTES,
    KEYS_AT,
    LISTS_AT,
    NAMES_AT,
    NEWEST,
    NODES,
    NUMBERS,
    OFFSETS_AT,
    ROW_COUNT,
    ROWS,
    SUBJECTS_AT,
    TEXTS_AT,
    TIMES_AT,
    VALUES_AT,
)

_DOLLAR, _ZERO, _A, _TEN = 36, 48, 97, 10
_FAST_BATCH_END = 3  # bytes of `$FI`
_ENVELOPE = 0xF5
"""The first byte of `envelope.COOKIE`."""
_CRC_LETTERS, _ALIGNMENT = 8, 8
_ID_BYTES = 12
_RESERVED = np.frombuffer(b"Nats", np.uint8)
"""Headers whose names begin like this may make a demand, but for these two."""
_KEY, _ID = np.frombuffer(b"Natslog-Key:", np.uint8), np.frombuffer(b"Nats-Msg-Id:", np.uint8)
_FIRST_BUFFERS = np.array([0, 2, 4, 7, 10, 19], np.int64)
"""Of each column: see `batch_metadata`."""


@inlined
def _begins_with(buffer: Any, at: int, end: int, word: Any) -> bool:
    return at + word.shape[0] <= end and equals(buffer, at, at + word.shape[0], word)


@compiled
def _plain_header_lines(buffer: Any, start: int, end: int) -> int:
    """At least how many headers there are; -1 where one is not ASCII, or is of NATS or natslog, and neither a key nor a
    message id.
    """
    lines = 1
    for at in range(start, end):
        if buffer[at] > 127:
            return -1
        if buffer[at] == LF:
            lines += 1
            if _begins_with(buffer, at + 1, end, _RESERVED) and not (
                _begins_with(buffer, at + 1, end, _KEY) or _begins_with(buffer, at + 1, end, _ID)
            ):
                return -1
    return lines


@compiled
def survey_plain(
    buffer: Any, frames: Any, most_bytes: int, most_subject_bytes: int, omits_internal: int, prefixes: Any, ends: Any
) -> tuple[int, int]:
    """Whether all frames are plain: headers that make no demand; at most `most_bytes` of headers and payload, which
    does not begin as an envelope; an ASCII subject that can be stored as it is; no reply subject, or one that begins
    with one of the prefixes, and is neither that of a delivery nor of a fast batch (`.$FI` at its end). With
    `omits_internal`, no subject begins with `$` or one of the prefixes.

    Returns:
        How many bytes the frames have; 0 where one is not plain. At least how many headers they have.
    """
    size_bytes, header_lines = 0, 0
    for index in range(frames.shape[0]):
        payload, payload_bytes, header_bytes = frames[index, 8], frames[index, 9], frames[index, 7]
        if header_bytes + payload_bytes > most_bytes:
            return 0, 0
        if payload_bytes > 0 and buffer[payload] == _ENVELOPE:
            return 0, 0
        if header_bytes > 0:
            lines = _plain_header_lines(buffer, payload - header_bytes, payload)
            if lines < 0:
                return 0, 0
            header_lines += lines
        start, length = frames[index, 3], frames[index, 4]
        if not is_plain_subject(buffer, start, length, most_subject_bytes):
            return 0, 0
        for at in range(start, start + length):
            if buffer[at] > 127:
                return 0, 0
        if omits_internal > 0 and (buffer[start] == _DOLLAR or begins_with_one(buffer, start, length, prefixes, ends)):
            return 0, 0
        reply, reply_bytes = frames[index, 5], frames[index, 6]
        if reply_bytes > 0:
            if reply_bytes > _FAST_BATCH_END and buffer[reply + reply_bytes - _FAST_BATCH_END] == _DOLLAR:
                return 0, 0
            if is_of_delivery(buffer, reply, reply_bytes) or not begins_with_one(
                buffer, reply, reply_bytes, prefixes, ends
            ):
                return 0, 0
        size_bytes += frames[index, 2] - frames[index, 1]
    return int(size_bytes), int(header_lines)


@inlined
def _put_long(out: Any, at: int, value: int) -> None:
    for place in range(8):
        out[at + place] = (value >> (8 * place)) & 255


@inlined
def _put_offset(out: Any, at: int, value: int) -> None:
    for place in range(4):
        out[at + place] = (value >> (8 * place)) & 255


@inlined
def _put_zeros(out: Any, start: int, end: int) -> None:
    for at in range(start, end):
        out[at] = 0


@inlined
def _padded(length: int) -> int:
    return (length + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


@compiled
def _put_texts(buffer: Any, starts: Any, lengths: Any, out: Any, at: int) -> int:
    """Offsets and bytes of a column of texts; a negative length: null. Returns how many bytes they are."""
    count = starts.shape[0]
    data = at + _padded(4 * (count + 1))
    size_bytes = 0
    _put_offset(out, at, 0)
    for index in range(count):
        length = max(lengths[index], 0)
        copy_bytes(buffer, starts[index], length, out, data + size_bytes)
        size_bytes += length
        _put_offset(out, at + 4 * (index + 1), size_bytes)
    _put_zeros(out, at + 4 * (count + 1), data)
    _put_zeros(out, data + size_bytes, data + _padded(size_bytes))
    return int(size_bytes)


@inlined
def _put_hexadecimal(out: Any, at: int, crc: int) -> None:
    for place in range(_CRC_LETTERS):
        digit = (crc >> (4 * (_CRC_LETTERS - 1 - place))) & 15
        out[at + place] = _ZERO + digit if digit < _TEN else _A + digit - _TEN


@inlined
def _bytes_of(lengths: Any) -> int:
    size_bytes = 0
    for index in range(lengths.shape[0]):
        size_bytes += max(lengths[index], 0)
    return size_bytes


@compiled
def _lay_out(lengths: Any, frames: Any, pairs: Any, count: int, keys: Any, key_nulls: int, header_nulls: int) -> None:
    """How many bytes each buffer of the columns has. A column without nulls has no validity."""
    rows = frames.shape[0]
    for at in range(lengths.shape[0]):
        lengths[at] = 0
    lengths[OFFSETS_AT] = lengths[TIMES_AT] = 8 * rows
    lengths[SUBJECTS_AT] = lengths[KEYS_AT] = lengths[LISTS_AT] = lengths[VALUES_AT] = 4 * (rows + 1)
    lengths[KEYS_AT - 1] = (rows + 7) // 8 if key_nulls > 0 else 0
    lengths[LISTS_AT - 1] = (rows + 7) // 8 if header_nulls > 0 else 0
    lengths[SUBJECTS_AT + 1], lengths[VALUES_AT + 1] = frames[:, 4].sum(), frames[:, 9].sum()
    lengths[NAMES_AT] = lengths[TEXTS_AT] = 4 * (count + 1)
    if keys.shape[1] > 0:
        lengths[KEYS_AT + 1] = _bytes_of(keys[1])
        lengths[NAMES_AT + 1], lengths[TEXTS_AT + 1] = _bytes_of(pairs[1, :count]), _bytes_of(pairs[3, :count])


@compiled
def encode_plain(
    buffer: Any, frames: Any, pairs: Any, first_pair: Any, keys: Any, has_headers: Any, packed: Any, template: Any,
    places: Any, base: int, epoch: int, time_us: int, lengths: Any, crcs: Any, out: Any,
) -> int:  # fmt: skip
    """The batch of these frames, with offsets from `base` on.

    Args:
        pairs, first_pair, keys, has_headers: of `HeaderParts`; empty where no frame has headers. packed: the same,
            empty where no frame has an id of natslog's own form.
        template: a header that fits, with any numbers. places: in it, as `stored_layout` names them.
        lengths: room for as many numbers as there are buffers. crcs: filled with what the header states.
        out: room for all of it.

    Returns:
        How many bytes were filled.
    """
    rows, header_bytes = frames.shape[0], template.shape[0]
    is_headed = has_headers.shape[0] > 0
    count, key_nulls, header_nulls = 0, rows, rows
    if is_headed:
        count = first_pair[rows]
        for index in range(rows):
            key_nulls -= 1 if keys[1, index] >= 0 else 0
            header_nulls -= 1 if has_headers[index] else 0
    _lay_out(lengths, frames, pairs, count, keys, key_nulls, header_nulls)
    copy_bytes(template, 0, header_bytes, out, 0)
    position = 0
    for at in range(lengths.shape[0]):
        _put_long(out, places[BUFFERS] + 16 * at, position)
        _put_long(out, places[BUFFERS] + 16 * at + 8, lengths[at])
        start, end = header_bytes + position, header_bytes + position + _padded(lengths[at])
        if at == OFFSETS_AT:
            for index in range(rows):
                _put_long(out, start + 8 * index, base + index)
        elif at == TIMES_AT:
            for index in range(rows):
                _put_long(out, start + 8 * index, time_us)
        elif at == SUBJECTS_AT:
            _put_texts(buffer, frames[:, 3], frames[:, 4], out, start)
        elif at == VALUES_AT:
            _put_texts(buffer, frames[:, 8], frames[:, 9], out, start)
        elif at == KEYS_AT and is_headed:
            _put_texts(buffer, keys[0], keys[1], out, start)
        elif at == NAMES_AT and is_headed:
            _put_texts(buffer, pairs[0, :count], pairs[1, :count], out, start)
        elif at == TEXTS_AT and is_headed:
            _put_texts(buffer, pairs[2, :count], pairs[3, :count], out, start)
        elif at not in (SUBJECTS_AT + 1, VALUES_AT + 1, KEYS_AT + 1, NAMES_AT + 1, TEXTS_AT + 1):  # with their offsets
            _put_zeros(out, start, end)
            if at == LISTS_AT and is_headed:
                for index in range(rows + 1):
                    _put_offset(out, start + 4 * index, first_pair[index])
            elif at == KEYS_AT - 1 and is_headed and key_nulls > 0:
                for index in range(rows):
                    out[start + index // 8] |= (1 if keys[1, index] >= 0 else 0) << (index % 8)
            elif at == LISTS_AT - 1 and is_headed and header_nulls > 0:
                for index in range(rows):
                    out[start + index // 8] |= (1 if has_headers[index] else 0) << (index % 8)
        position += _padded(lengths[at])
    ids_bytes = _ID_BYTES * packed.shape[0]
    for index in range(packed.shape[0]):
        for place in range(_ID_BYTES):
            out[header_bytes + position + _ID_BYTES * index + place] = packed[index, place]
    _put_zeros(out, header_bytes + position + ids_bytes, header_bytes + position + _padded(ids_bytes))
    position += _padded(ids_bytes)
    _put_header(out, places, rows, base, epoch, time_us, header_bytes, position)
    _put_stated(out, places, IDS_BYTES, ids_bytes)
    for field in range(3, 8):
        _put_long(out, places[NODES] + 16 * field, count if field >= 5 else rows)
        _put_long(out, places[NODES] + 16 * field + 8, key_nulls if field == 3 else header_nulls if field == 4 else 0)
    _prove(out, places, lengths, header_bytes, _padded(ids_bytes), crcs)
    return int(header_bytes + position)


@inlined
def _put_stated(out: Any, places: Any, number: int, value: int) -> None:
    """A number of the batch line."""
    put_number(out, places[NUMBERS + 2 * number], value, places[NUMBERS + 2 * number + 1])


@compiled
def _put_header(
    out: Any, places: Any, rows: int, base: int, epoch: int, time_us: int, header_bytes: int, body_bytes: int
) -> None:
    """All numbers, but for the places of buffers, the CRCs, and those of keys, headers and ids."""
    _put_long(out, places[BODY_LENGTH], body_bytes)
    _put_long(out, places[ROW_COUNT], rows)
    for field in range(9):  # offset, timestamp, subject, key, headers, pair, name, text, value
        _put_long(out, places[NODES] + 16 * field, rows)
        _put_long(out, places[NODES] + 16 * field + 8, 0)
    _put_stated(out, places, BASE, base)
    _put_stated(out, places, END, base + rows)
    _put_stated(out, places, ROWS, rows)
    _put_stated(out, places, EPOCH, epoch)
    _put_stated(out, places, NEWEST, time_us)
    _put_stated(out, places, HEADER_BYTES, header_bytes)
    _put_stated(out, places, BODY_BYTES, body_bytes)


@compiled
def _prove(out: Any, places: Any, lengths: Any, header_bytes: int, ids_bytes: int, crcs: Any) -> None:
    """The CRCs: of the header, up to the end of each column, and of all."""
    position, start, crc = header_bytes, header_bytes, 0
    column = 0
    for at in range(lengths.shape[0]):
        position += _padded(lengths[at])
        is_last = at + 1 == lengths.shape[0]
        if is_last or (column + 1 < 6 and at + 1 == _FIRST_BUFFERS[column + 1]):
            crc = crc_of(out, start, position, crc)
            column, start = column + 1, position
            crcs[column] = crc
    crcs[7] = crc_of(out, position, position + ids_bytes, crc)
    for number in range(1, 8):
        _put_hexadecimal(out, places[CRCS] + 9 * number, crcs[number])
    _put_hexadecimal(out, places[CRCS], 0)
    crcs[0] = crc_of(out, 0, header_bytes, 0)
    _put_hexadecimal(out, places[CRCS], crcs[0])


@compiled
def plain_acks(buffer: Any, frames: Any, base: int, head: Any, tail: Any, out: Any) -> int:
    """As `stored_acks`, of plain frames that were stored from offset `base` on."""
    at, messages = 0, 1
    for index in range(frames.shape[0]):
        reply, end = frames[index, 5], frames[index, 5] + frames[index, 6]
        if reply == end:
            continue
        if index + 1 < frames.shape[0] and is_numbered_next(
            buffer, reply, end, frames[index + 1, 5], frames[index + 1, 5] + frames[index + 1, 6]
        ):
            messages += 1
            continue
        at = put_ack(buffer, reply, end - reply, head, base + index + 1, messages, tail, out, at)
        messages = 1
    return at
