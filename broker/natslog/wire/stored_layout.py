"""Where the kernels of `kernels_stored` have what in their arrays."""

from __future__ import annotations

BASE, END, ROWS, EPOCH, NEWEST, IDS_BYTES, HEADER_BYTES, BODY_BYTES = range(8)
"""Numbers of a batch line, in the order in which they stand there."""
POSITION = 8
BATCH_COLUMNS = 9

BODY_LENGTH, ROW_COUNT, NODES, BUFFERS, CRCS = range(5)
"""Places in a header of a batch, in bytes: numbers of Arrow's metadata, and the CRCs of the batch line."""
NUMBERS = 5
"""From here on, of one that is to be written: the place and the width of each number of the batch line."""

ALL_ROWS, SUBJECT_BYTES, KEY_BYTES, PAIRS, NAME_BYTES, TEXT_BYTES, VALUE_BYTES = range(7)
KEY_NULLS, HEADER_NULLS, TEXT_NULLS = 7, 8, 9
"""Sums over several batches."""
SUMS = 10

OFFSETS_AT, TIMES_AT, SUBJECTS_AT, KEYS_AT, LISTS_AT, NAMES_AT, TEXTS_AT, VALUES_AT = 1, 3, 5, 8, 11, 14, 17, 20
"""The buffer of each: numbers, or where texts begin; those have their validity before, and their bytes behind."""
BUFFERS_OF_A_BATCH = 22
