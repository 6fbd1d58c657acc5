"""Kernels for small commits of plain messages, which have no headers: from frames to a stored batch, and to acks, in
one pass each. What is not plain takes the way over columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes, crc_of, inlined
from natslog.wire.kernels_acks import begins_with_one, is_of_delivery
from natslog.wire.kernels_out import put_ack
from natslog.wire.kernels_text import is_plain_subject, put_number
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

_TILDE, _DOLLAR, _ZERO, _A, _TEN = 126, 36, 48, 97, 10
_FAST_BATCH_END = 3  # bytes of `$FI`
_ENVELOPE = 0xF5
"""The first byte of `envelope.COOKIE`."""
_CRC_LETTERS, _ALIGNMENT = 8, 8
_FIRST_BUFFERS = np.array([0, 2, 4, 7, 10, 19], np.int64)
"""Of each column: see `batch_metadata`."""


@compiled
def survey_plain(
    buffer: Any, frames: Any, most_bytes: int, most_subject_bytes: int, omits_internal: int, prefixes: Any, ends: Any
) -> int:
    """Whether all frames are plain: no headers; a payload that has at most `most_bytes` and does not begin as an
    envelope; an ASCII subject that can be stored as it is; no reply subject, or one that begins with one of the
    prefixes, is neither that of a delivery nor of a fast batch (`.$FI` at its end), and gets an ack of its own (see
    `stored_acks`). With `omits_internal`, no subject begins with `$` or one of the prefixes.

    Returns:
        How many bytes the frames have; 0 where one is not plain.
    """
    size_bytes = 0
    for index in range(frames.shape[0]):
        payload_bytes = frames[index, 9]
        if frames[index, 7] > 0 or payload_bytes > most_bytes:
            return 0
        if payload_bytes > 0 and buffer[frames[index, 8]] == _ENVELOPE:
            return 0
        start, length = frames[index, 3], frames[index, 4]
        if not is_plain_subject(buffer, start, length, most_subject_bytes):
            return 0
        for at in range(start, start + length):
            if buffer[at] > 127:
                return 0
        if omits_internal > 0 and (buffer[start] == _DOLLAR or begins_with_one(buffer, start, length, prefixes, ends)):
            return 0
        reply, reply_bytes = frames[index, 5], frames[index, 6]
        if reply_bytes > 0:
            if reply_bytes > _FAST_BATCH_END and buffer[reply + reply_bytes - _FAST_BATCH_END] == _DOLLAR:
                return 0
            if is_of_delivery(buffer, reply, reply_bytes) or not begins_with_one(
                buffer, reply, reply_bytes, prefixes, ends
            ):
                return 0
            if frames.shape[0] > 1:
                for at in range(reply, reply + reply_bytes):
                    if buffer[at] == _TILDE:
                        return 0
        size_bytes += frames[index, 2] - frames[index, 1]
    return int(size_bytes)


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
def _put_texts(buffer: Any, frames: Any, first: int, out: Any, at: int) -> int:
    """Offsets and bytes of a column: `first` is where a frame states its start. Returns how many bytes they are."""
    rows = frames.shape[0]
    data = at + _padded(4 * (rows + 1))
    size_bytes = 0
    _put_offset(out, at, 0)
    for index in range(rows):
        copy_bytes(buffer, frames[index, first], frames[index, first + 1], out, data + size_bytes)
        size_bytes += frames[index, first + 1]
        _put_offset(out, at + 4 * (index + 1), size_bytes)
    _put_zeros(out, at + 4 * (rows + 1), data)
    _put_zeros(out, data + size_bytes, data + _padded(size_bytes))
    return int(size_bytes)


@inlined
def _put_hexadecimal(out: Any, at: int, crc: int) -> None:
    for place in range(_CRC_LETTERS):
        digit = (crc >> (4 * (_CRC_LETTERS - 1 - place))) & 15
        out[at + place] = _ZERO + digit if digit < _TEN else _A + digit - _TEN


@compiled
def _lay_out(lengths: Any, rows: int, subject_bytes: int, value_bytes: int) -> None:
    """How many bytes each buffer of the columns has: no key, no headers."""
    for at in range(lengths.shape[0]):
        lengths[at] = 0
    lengths[OFFSETS_AT] = lengths[TIMES_AT] = 8 * rows
    lengths[SUBJECTS_AT] = lengths[KEYS_AT] = lengths[LISTS_AT] = lengths[VALUES_AT] = 4 * (rows + 1)
    lengths[KEYS_AT - 1] = lengths[LISTS_AT - 1] = (rows + 7) // 8
    lengths[SUBJECTS_AT + 1], lengths[VALUES_AT + 1] = subject_bytes, value_bytes
    lengths[NAMES_AT] = lengths[TEXTS_AT] = 4  # no header has a name or a text: one offset


@compiled
def encode_plain(
    buffer: Any, frames: Any, template: Any, places: Any, base: int, epoch: int, time_us: int, lengths: Any, crcs: Any,
    out: Any,
) -> int:  # fmt: skip
    """The batch of these frames, with offsets from `base` on.

    Args:
        template: a header that fits, with any numbers. places: in it, as `stored_layout` names them.
        lengths: room for as many numbers as there are buffers. crcs: filled with what the header states.
        out: room for all of it.

    Returns:
        How many bytes were filled.
    """
    rows, header_bytes = frames.shape[0], template.shape[0]
    subject_bytes, value_bytes = 0, 0
    for index in range(rows):
        subject_bytes += frames[index, 4]
        value_bytes += frames[index, 9]
    _lay_out(lengths, rows, subject_bytes, value_bytes)
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
            _put_texts(buffer, frames, 3, out, start)
        elif at == VALUES_AT:
            _put_texts(buffer, frames, 8, out, start)
        elif at not in (SUBJECTS_AT + 1, VALUES_AT + 1):  # those were written with their offsets
            _put_zeros(out, start, end)
        position += _padded(lengths[at])
    _put_header(out, places, rows, base, epoch, time_us, header_bytes, position)
    _prove(out, places, lengths, header_bytes, crcs)
    return int(header_bytes + position)


@inlined
def _put_stated(out: Any, places: Any, number: int, value: int) -> None:
    """A number of the batch line."""
    put_number(out, places[NUMBERS + 2 * number], value, places[NUMBERS + 2 * number + 1])


@compiled
def _put_header(
    out: Any, places: Any, rows: int, base: int, epoch: int, time_us: int, header_bytes: int, body_bytes: int
) -> None:
    """All numbers, but for the places of buffers and the CRCs."""
    _put_long(out, places[BODY_LENGTH], body_bytes)
    _put_long(out, places[ROW_COUNT], rows)
    for field in range(9):  # offset, timestamp, subject, key, headers, pair, name, text, value
        count = 0 if 5 <= field <= 7 else rows
        _put_long(out, places[NODES] + 16 * field, count)
        _put_long(out, places[NODES] + 16 * field + 8, rows if field in (3, 4) else 0)
    _put_stated(out, places, BASE, base)
    _put_stated(out, places, END, base + rows)
    _put_stated(out, places, ROWS, rows)
    _put_stated(out, places, EPOCH, epoch)
    _put_stated(out, places, NEWEST, time_us)
    _put_stated(out, places, IDS_BYTES, 0)
    _put_stated(out, places, HEADER_BYTES, header_bytes)
    _put_stated(out, places, BODY_BYTES, body_bytes)


@compiled
def _prove(out: Any, places: Any, lengths: Any, header_bytes: int, crcs: Any) -> None:
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
    crcs[7] = crc
    for number in range(1, 8):
        _put_hexadecimal(out, places[CRCS] + 9 * number, crcs[number])
    _put_hexadecimal(out, places[CRCS], 0)
    crcs[0] = crc_of(out, 0, header_bytes, 0)
    _put_hexadecimal(out, places[CRCS], crcs[0])


@compiled
def plain_acks(buffer: Any, frames: Any, base: int, head: Any, tail: Any, out: Any) -> int:
    """As `stored_acks`, of plain frames that were stored from offset `base` on."""
    at = 0
    for index in range(frames.shape[0]):
        if frames[index, 6] > 0:
            at = put_ack(buffer, frames[index, 5], frames[index, 6], head, base + index + 1, tail, out, at)
    return at
