"""Kernels that read many small stored batches as one: they prove them, and gather their columns.

All batches have headers of one form: bytes that are equal in all of them, and numbers between them (see
`small_batches`). What is not like that, is damaged, or has other columns ends a run: it is read by Arrow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from natslog.wire.compiled import compiled, copy_bytes, crc_of, inlined, long_at, offset_at
from natslog.wire.kernels_text import ZERO, read_number
from natslog.wire.stored_layout import (
    ALL_ROWS,
    BASE,
    BODY_BYTES,
    BODY_LENGTH,
    BUFFERS,
    BUFFERS_OF_A_BATCH,
    CRCS,
    END,
    EPOCH,
    HEADER_BYTES,
    HEADER_NULLS,
    IDS_BYTES,
    KEY_BYTES,
    KEY_NULLS,
    KEYS_AT,
    LISTS_AT,
    NAME_BYTES,
    NAMES_AT,
    NODES,
    OFFSETS_AT,
    PAIRS,
    POSITION,
    ROW_COUNT,
    ROWS,
    SUBJECT_BYTES,
    SUBJECTS_AT,
    TEXT_BYTES,
    TEXT_NULLS,
    TEXTS_AT,
    TIMES_AT,
    VALUE_BYTES,
    VALUES_AT,
)

_MOST_DIGITS = 19
_CRC_LETTERS, _LAST_CRC = 8, 7 * 9
_ID_BYTES, _ALIGNMENT = 12, 8
_A, _F, _TEN = 97, 102, 10
_OFFSET, _TIME, _SUBJECT, _KEY, _HEADERS, _PAIRS, _NAME, _TEXT, _VALUE = range(9)
"""Fields, in Arrow's depth-first order."""


@inlined
def _decimal(buffer: Any, start: int, width: int) -> int:
    """Or -1: there are other bytes, or it may have more than 63 bits."""
    if width < _MOST_DIGITS:
        return read_number(buffer, start, start + width)
    return read_number(buffer, start + 1, start + width) if buffer[start] == ZERO else -1


@inlined
def _hexadecimal(buffer: Any, start: int) -> int:
    """A CRC; or -1."""
    value = np.int64(0)
    for at in range(start, start + _CRC_LETTERS):
        letter = np.int64(buffer[at])
        digit = letter - ZERO
        if letter >= _A and letter <= _F:
            digit = letter - _A + _TEN
        elif digit < 0 or digit > 9:
            return -1
        value = value * 16 + digit
    return int(value)


@compiled
def _has_form(buffer: Any, position: int, form: Any, fixed: Any) -> bool:
    for part in range(fixed.shape[0]):
        for at in range(fixed[part, 0], fixed[part, 1]):
            if buffer[position + at] != form[at]:
                return False
    return True


@compiled
def _is_proven(buffer: Any, position: int, blank: Any, places: Any, header_bytes: int, body_bytes: int) -> bool:
    crcs = position + places[CRCS]
    behind = crcs + _CRC_LETTERS
    crc = crc_of(buffer, position, crcs, 0)
    crc = crc_of(blank, 0, _CRC_LETTERS, crc)
    crc = crc_of(buffer, behind, position + header_bytes, crc)
    if crc != _hexadecimal(buffer, crcs):
        return False
    body = position + header_bytes
    return bool(crc_of(buffer, body, body + body_bytes, 0) == _hexadecimal(buffer, crcs + _LAST_CRC))


@inlined
def _node(buffer: Any, nodes: int, field: int) -> int:
    return long_at(buffer, nodes + 16 * field)


@inlined
def _nulls(buffer: Any, nodes: int, field: int) -> int:
    return long_at(buffer, nodes + 16 * field + 8)


@inlined
def _start(buffer: Any, buffers: int, at: int) -> int:
    return long_at(buffer, buffers + 16 * at)


@inlined
def _length(buffer: Any, buffers: int, at: int) -> int:
    return long_at(buffer, buffers + 16 * at + 8)


@compiled
def _bytes_of(buffer: Any, buffers: int, body: int, at: int, rows: int) -> int:
    """How many bytes the texts have whose offsets are this buffer; -1: the offsets are not those of these texts."""
    if _length(buffer, buffers, at) < 4 * (rows + 1):  # Arrow may make it longer
        return -1
    start = body + _start(buffer, buffers, at)
    last = np.int64(offset_at(buffer, start))
    if last != 0:
        return -1
    for row in range(1, rows + 1):
        here = np.int64(offset_at(buffer, start + 4 * row))
        if here < last:
            return -1
        last = here
    return int(last)


@compiled
def _texts_fit(buffer: Any, buffers: int, body: int, at: int, rows: int) -> int:
    """As `_bytes_of`, if these bytes are there."""
    found = _bytes_of(buffer, buffers, body, at, rows)
    return found if found <= _length(buffer, buffers, at + 1) else -1


@compiled
def _validity_fits(buffer: Any, nodes: int, buffers: int, field: int, at: int, rows: int) -> bool:
    """Args: at: the buffer of offsets; that of validity is before it."""
    nulls = _nulls(buffer, nodes, field)
    return 0 <= nulls <= rows and (nulls == 0 or _length(buffer, buffers, at - 1) >= (rows + 7) // 8)


@compiled
def _add_sizes(
    buffer: Any, position: int, places: Any, rows: int, header_bytes: int, columns_bytes: int, sums: Any
) -> bool:
    """Adds the sizes of a proven batch. False, and nothing is added: its columns are not as expected."""
    nodes, buffers, body = position + places[NODES], position + places[BUFFERS], position + header_bytes
    for at in range(BUFFERS_OF_A_BATCH):
        start, length = _start(buffer, buffers, at), _length(buffer, buffers, at)
        if start < 0 or length < 0 or start > columns_bytes or length > columns_bytes - start:
            return False
    pairs = _node(buffer, nodes, _PAIRS)
    for field in range(_VALUE + 1):
        wanted = pairs if field in (_PAIRS, _NAME, _TEXT) else rows
        if _node(buffer, nodes, field) != wanted:
            return False
        may_be_null = field in (_KEY, _HEADERS, _TEXT)
        if not may_be_null and _nulls(buffer, nodes, field) != 0:
            return False
    if pairs < 0 or pairs > columns_bytes:
        return False
    if _length(buffer, buffers, OFFSETS_AT) != 8 * rows or _length(buffer, buffers, TIMES_AT) != 8 * rows:
        return False
    if not (
        _validity_fits(buffer, nodes, buffers, _KEY, KEYS_AT, rows)
        and _validity_fits(buffer, nodes, buffers, _HEADERS, LISTS_AT, rows)
        and _validity_fits(buffer, nodes, buffers, _TEXT, TEXTS_AT, pairs)
    ):
        return False
    subjects = _texts_fit(buffer, buffers, body, SUBJECTS_AT, rows)
    keys = _texts_fit(buffer, buffers, body, KEYS_AT, rows)
    lists = _bytes_of(buffer, buffers, body, LISTS_AT, rows)
    names = _texts_fit(buffer, buffers, body, NAMES_AT, pairs)
    texts = _texts_fit(buffer, buffers, body, TEXTS_AT, pairs)
    values = _texts_fit(buffer, buffers, body, VALUES_AT, rows)
    if subjects < 0 or keys < 0 or lists != pairs or names < 0 or texts < 0 or values < 0:
        return False
    sums[ALL_ROWS] += rows
    sums[SUBJECT_BYTES] += subjects
    sums[KEY_BYTES] += keys
    sums[PAIRS] += pairs
    sums[NAME_BYTES] += names
    sums[TEXT_BYTES] += texts
    sums[VALUE_BYTES] += values
    sums[KEY_NULLS] += _nulls(buffer, nodes, _KEY)
    sums[HEADER_NULLS] += _nulls(buffer, nodes, _HEADERS)
    sums[TEXT_NULLS] += _nulls(buffer, nodes, _TEXT)
    return True


@compiled
def _read_line(buffer: Any, position: int, numbers: Any, batches: Any, count: int) -> bool:
    """Fills a row with the numbers of a batch line. False: one of them cannot be read."""
    batches[count, POSITION] = position
    for at in range(numbers.shape[0]):
        batches[count, at] = _decimal(buffer, position + numbers[at, 0], numbers[at, 1])
        if batches[count, at] < 0:
            return False
    return True


@inlined
def _is_plausible(buffer: Any, position: int, places: Any, batches: Any, count: int) -> bool:
    """Whether the numbers of a batch agree with each other, and with those of Arrow's metadata."""
    rows, ids_bytes, body_bytes = batches[count, ROWS], batches[count, IDS_BYTES], batches[count, BODY_BYTES]
    return bool(
        1 <= rows <= body_bytes
        and batches[count, END] - batches[count, BASE] >= rows
        and (ids_bytes == 0 or ids_bytes == _ID_BYTES * rows)
        and long_at(buffer, position + places[BODY_LENGTH]) == body_bytes
        and long_at(buffer, position + places[ROW_COUNT]) == rows
    )


@inlined
def _continues(batches: Any, count: int) -> bool:
    """Whether a batch begins where the one before ends, in the same epoch."""
    begins = batches[count, BASE] == batches[count - 1, END]
    return bool(begins and batches[count, EPOCH] == batches[count - 1, EPOCH])


@compiled
def survey_batches(
    buffer: Any,
    position: int,
    end: int,
    form: Any,
    fixed: Any,
    numbers: Any,
    places: Any,
    blank: Any,
    most_body_bytes: int,
    most_bytes: int,
    batches: Any,
    sums: Any,
) -> tuple[int, int]:
    """Proves stored batches that follow one another, as far as they have headers of this form and small bodies, are of
    one epoch, leave out no offset between them, and are not too many.

    Args:
        position, end: where they begin in `buffer`, and where it ends for them.
        form, fixed: a header, and the parts of it, (parts, 2), that are equal in all headers. numbers: (8, 2): where
            the numbers of the batch line begin, and how many digits they have. places: see `stored_layout`.
            blank: what the CRC of a header is taken with instead of itself.
        most_bytes: of all of them.
        batches: becomes what their lines state: (most, BATCH_COLUMNS). `sums`: becomes their sizes.

    Returns:
        How many these are, and where the next one begins.
    """
    count, begin, header_bytes = 0, position, form.shape[0]
    sums[:] = 0
    while count < batches.shape[0] and end - position >= header_bytes:
        if not (_has_form(buffer, position, form, fixed) and _read_line(buffer, position, numbers, batches, count)):
            break
        rows, ids_bytes, body_bytes = batches[count, ROWS], batches[count, IDS_BYTES], batches[count, BODY_BYTES]
        total_bytes = header_bytes + body_bytes
        if (
            batches[count, HEADER_BYTES] != header_bytes
            or body_bytes > most_body_bytes
            or total_bytes > end - position
            or (count > 0 and position + total_bytes - begin > most_bytes)
            or not _is_plausible(buffer, position, places, batches, count)
            or not (count == 0 or _continues(batches, count))
            or not _is_proven(buffer, position, blank, places, header_bytes, body_bytes)
        ):
            break
        columns_bytes = body_bytes - (ids_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        if not _add_sizes(buffer, position, places, rows, header_bytes, columns_bytes, sums):
            break
        position += total_bytes
        count += 1
    return count, position


@inlined
def _copy_texts(buffer: Any, buffers: int, body: int, at: int, rows: int, offsets: Any, data: Any, row: int) -> None:
    """Texts of a batch behind those that `offsets` has before `row`."""
    start, begin = body + _start(buffer, buffers, at), np.int64(offsets[row])
    for index in range(1, rows + 1):
        offsets[row + index] = begin + offset_at(buffer, start + 4 * index)
    copy_bytes(buffer, body + _start(buffer, buffers, at + 1), offsets[row + rows] - begin, data, begin)


@inlined
def _copy_validity(
    buffer: Any, nodes: int, buffers: int, body: int, field: int, at: int, rows: int, bits: Any, row: int
) -> None:
    """Of a field, whose buffer of offsets is `at`."""
    start, has_nulls = body + _start(buffer, buffers, at - 1), _nulls(buffer, nodes, field) != 0
    for index in range(rows):
        if not has_nulls or (buffer[start + (index >> 3)] >> (index & 7)) & 1:
            place = row + index
            bits[place >> 3] |= 1 << (place & 7)


@compiled
def gather_batches(
    buffer: Any,
    batches: Any,
    places: Any,
    offsets: Any,
    times: Any,
    subject_offsets: Any,
    subject_data: Any,
    key_bits: Any,
    key_offsets: Any,
    key_data: Any,
    list_bits: Any,
    list_offsets: Any,
    name_offsets: Any,
    name_data: Any,
    text_bits: Any,
    text_offsets: Any,
    text_data: Any,
    value_offsets: Any,
    value_data: Any,
) -> None:
    """Gathers the columns of batches that `survey_batches` has found, one after another.

    Args:
        offsets, times: (rows,). `*_offsets`: one more than rows, or pairs of name and text; begin with 0. `*_bits`:
            validity, zeros; empty where there is no null. `*_data`: bytes.
    """
    row, pair = 0, 0
    for which in range(batches.shape[0]):
        position, rows, header_bytes = batches[which, POSITION], batches[which, ROWS], batches[which, HEADER_BYTES]
        nodes, buffers, body = position + places[NODES], position + places[BUFFERS], position + header_bytes
        pairs = _node(buffer, nodes, _PAIRS)
        offsets_at, times_at = body + _start(buffer, buffers, OFFSETS_AT), body + _start(buffer, buffers, TIMES_AT)
        for index in range(rows):
            offsets[row + index] = long_at(buffer, offsets_at + 8 * index)
            times[row + index] = long_at(buffer, times_at + 8 * index)
        _copy_texts(buffer, buffers, body, SUBJECTS_AT, rows, subject_offsets, subject_data, row)
        _copy_texts(buffer, buffers, body, KEYS_AT, rows, key_offsets, key_data, row)
        _copy_texts(buffer, buffers, body, VALUES_AT, rows, value_offsets, value_data, row)
        if key_bits.shape[0] > 0:
            _copy_validity(buffer, nodes, buffers, body, _KEY, KEYS_AT, rows, key_bits, row)
        if list_bits.shape[0] > 0:
            _copy_validity(buffer, nodes, buffers, body, _HEADERS, LISTS_AT, rows, list_bits, row)
        start, begin = body + _start(buffer, buffers, LISTS_AT), np.int64(list_offsets[row])
        for index in range(1, rows + 1):
            list_offsets[row + index] = begin + offset_at(buffer, start + 4 * index)
        if pairs > 0:
            _copy_texts(buffer, buffers, body, NAMES_AT, pairs, name_offsets, name_data, pair)
            _copy_texts(buffer, buffers, body, TEXTS_AT, pairs, text_offsets, text_data, pair)
            if text_bits.shape[0] > 0:
                _copy_validity(buffer, nodes, buffers, body, _TEXT, TEXTS_AT, pairs, text_bits, pair)
        row, pair = row + rows, pair + pairs


@compiled
def gather_ids(buffer: Any, batches: Any, ids: Any) -> None:
    """Gathers packed message ids of batches that `survey_batches` has found. `ids`: (rows, 12), zeros."""
    row = 0
    for which in range(batches.shape[0]):
        rows, size = batches[which, ROWS], batches[which, IDS_BYTES]
        padded = (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        start = batches[which, POSITION] + batches[which, HEADER_BYTES] + batches[which, BODY_BYTES] - padded
        for at in range(size):
            ids[row + at // _ID_BYTES, at % _ID_BYTES] = buffer[start + at]
        row += rows
