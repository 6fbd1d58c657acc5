"""Stored batches as rows: many small ones, as single publishes leave them, are read as one.

Theory of operation. The headers of batches that were written one after another have one form: all bytes are equal but
for numbers at known places (`message_template`). So a kernel proves thousands of them in one pass, and another gathers
their columns. The form is that of the batches that are read, not what this version writes: where one differs, its
header becomes the form if it is an uncompressed batch of format 2 that belongs to no run. What is not like that, is
large, or is damaged is read by itself.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.arrow import ipc
from natslog.arrow.batch_line import BLANK_CRC, BatchHeader, Bytes, line_spans
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.message_template import MessageTemplate
from natslog.arrow.schema import HEADERS_TYPE, MESSAGE_SCHEMA
from natslog.wire import library, native
from natslog.wire.stored_layout import (
    ALL_ROWS,
    BASE,
    BATCH_COLUMNS,
    END,
    EPOCH,
    HEADER_NULLS,
    IDS_BYTES,
    KEY_BYTES,
    KEY_NULLS,
    NAME_BYTES,
    NEWEST,
    PAIRS,
    SUBJECT_BYTES,
    SUMS,
    TEXT_BYTES,
    TEXT_NULLS,
    VALUE_BYTES,
)

SMALL_BYTES = 16 * 1024
"""Of the body of a batch: a larger one is read by itself, without a copy."""
_FIRST_BATCHES, _MOST_BATCHES = 256, 8192
_MOST_BYTES = 8 * 1024 * 1024
_LEAST_BATCHES = 2
_FORMS_KEPT = 4
_NODES, _BUFFERS = 9, 22

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """What batches that were read as one state together: see `BatchHeader`."""

    base_offset: int
    end_offset: int
    rows: int
    epoch: int
    max_timestamp_us: int
    run: None = None
    batch_format: int = ipc.LATEST_FORMAT

    @property
    def has_gaps(self) -> bool:
        return self.rows < self.end_offset - self.base_offset


StoredHeader: TypeAlias = BatchHeader | StoredRows


@dataclass(frozen=True, slots=True)
class _Form:
    """A header, the parts of it that are equal in all others of this form, and where numbers are in it: see
    `kernels_stored.survey_batches`.
    """

    header: npt.NDArray[np.uint8]
    fixed: Longs
    numbers: Longs
    places: Longs

    def fits(self, header: bytes) -> bool:
        """Whether this header has the form."""
        other = np.frombuffer(header, np.uint8)
        return len(other) == len(self.header) and all(
            np.array_equal(other[start:end], self.header[start:end]) for start, end in self.fixed.tolist()
        )

    @classmethod
    def of(cls, header: bytes) -> _Form:
        """Of the header of an uncompressed batch of format 2. Raises struct.error, ValueError, TypeError, IndexError:
        its metadata is not that of such a batch.
        """
        metadata = BatchMetadata(header[8:])
        if metadata.codec is not None or (len(metadata.nodes), len(metadata.buffers)) != (_NODES, _BUFFERS):
            raise ValueError("not an uncompressed batch of the message schema")
        numbers, crcs = line_spans(header)
        template = MessageTemplate.of(header, numbers[0][0])
        changing = [
            *numbers,
            *crcs,
            (template.body_length, template.body_length + 8),
            (template.row_count, template.row_count + 8),
            (template.nodes, template.nodes + 16 * _NODES),
            (template.buffers, template.buffers + 16 * _BUFFERS),
        ]
        edges = [0, *(edge for span in sorted(changing) for edge in span), len(header)]
        if sorted(edges) != edges:
            raise ValueError("numbers of the header overlap, or lie beyond it")
        places = (template.body_length, template.row_count, template.nodes, template.buffers, crcs[0][0])
        return cls(
            np.frombuffer(header, np.uint8),
            np.array(edges, np.int64).reshape(-1, 2),
            np.array([(start, end - start) for start, end in numbers], np.int64),
            np.array(places, np.int64),
        )


_forms: tuple[_Form, ...] = ()
"""The last ones that were met, the newest first."""
_BLANK = np.frombuffer(BLANK_CRC, np.uint8)


@dataclass(frozen=True, slots=True)
class SmallRun:
    """Small batches that follow one another, proven.

    Attributes:
        batches: (batches, `stored_layout.BATCH_COLUMNS`): what they state, and where they begin in `data`.
    """

    data: npt.NDArray[np.uint8]
    batches: Longs
    sums: list[int]
    form: _Form
    end: int

    @property
    def stated(self) -> StoredRows:
        first, last = self.batches[0].tolist(), self.batches[-1].tolist()
        return StoredRows(first[BASE], last[END], self.sums[ALL_ROWS], first[EPOCH], last[NEWEST])

    @property
    def has_headers(self) -> bool:
        return self.sums[HEADER_NULLS] < self.sums[ALL_ROWS]

    @property
    def has_ids(self) -> bool:
        return bool(self.batches[:, IDS_BYTES].any())

    def rows(self) -> pa.RecordBatch:
        return _gathered(self.data, self.batches, self.sums, self.form)

    def packed_ids(self) -> ipc.PackedIds | None:
        """Of all rows; None where no row has one."""
        if not self.has_ids:
            return None
        ids = np.zeros((self.sums[ALL_ROWS], ipc.ID_BYTES), np.uint8)
        native.gather_ids(self.data, self.batches, ids)
        return ids


class _WorkSpace(threading.local):
    """Of a thread: what the kernels state of batches."""

    def __init__(self) -> None:
        self.batches = np.empty((_MOST_BATCHES, BATCH_COLUMNS), np.int64)
        self.sums = np.zeros(SUMS, np.int64)


_work_space = _WorkSpace()


def rows_of(stream: Bytes, *, source: str) -> Iterator[tuple[StoredHeader, pa.RecordBatch]]:
    """The rows of a file range or response, in order: small batches that follow one another as one. The schema and
    end-of-stream are passed over.

    Args:
        stream, source: as `ipc.split_messages`; large batches are not copied.

    Raises:
        CorruptLog: a message is cut short, or its CRC does not hold.
    """
    for header, rows in batches_of(stream, source=source):
        yield header, rows if isinstance(rows, pa.RecordBatch) else ipc.decode_batch(rows)


def batches_of(stream: Bytes, *, source: str) -> Iterator[tuple[StoredHeader, memoryview | pa.RecordBatch]]:
    """As `rows_of`; a batch that is read by itself is not decoded."""
    view, position, most = memoryview(stream), 0, _FIRST_BATCHES
    buffer = np.frombuffer(view, np.uint8)
    while True:
        is_known = False
        for form in _forms:
            count, end = _survey(buffer, position, form, most)
            if count >= _LEAST_BATCHES:
                run = SmallRun(buffer, _work_space.batches[:count], _work_space.sums.tolist(), form, end)
                yield run.stated, run.rows()
                position, most = end, min(2 * most, _MOST_BATCHES)  # many readers stop early
                break
            is_known |= count > 0
        else:
            if (found := ipc.message_at(view, position, source=source)) is None:
                return
            header, message, position = found
            if not is_known:
                learn(header, message)
            yield header, message


def run_in(data: bytes) -> SmallRun | None:
    """The small batches that these bytes begin with; None: there are none, or their form is not known yet (`learn`)."""
    buffer = np.frombuffer(data, np.uint8)
    for form in _forms:
        count, end = _survey(buffer, 0, form, _MOST_BATCHES)
        if count:
            return SmallRun(buffer, _work_space.batches[:count].copy(), _work_space.sums.tolist(), form, end)
    return None


def learn(header: BatchHeader, begin: Bytes) -> bool:
    """Notes the form of a proven batch, if others may have the same one; whether that is so. Without compiled kernels
    none has: Arrow is faster than they are in Python.

    Args:
        begin: bytes that begin with its header.
    """
    global _forms
    if not (header.rows and header.body_bytes <= SMALL_BYTES and header.run is None) or library.library() is None:
        return False
    stated = bytes(begin[: header.header_bytes])
    if header.batch_format == ipc.FIRST_FORMAT or ipc.has_stats(stated):
        return False
    if any(form.fits(stated) for form in _forms):
        return True
    try:
        form = _Form.of(stated)
    except (struct.error, ValueError, TypeError, IndexError):
        return False  # the CRC holds, and Arrow's metadata is wrong: whoever reads the batch finds out
    _forms = (form, *_forms)[:_FORMS_KEPT]
    return True


def _survey(buffer: npt.NDArray[np.uint8], position: int, form: _Form, most: int) -> tuple[int, int]:
    """How many batches of this form begin there, at most so many, and where they end."""
    count, end = native.survey_batches(
        buffer, position, len(buffer), form.header, form.fixed, form.numbers, form.places, _BLANK,
        SMALL_BYTES, _MOST_BYTES, _work_space.batches[:most], _work_space.sums,
    )  # fmt: skip
    return count, end


def _gathered(buffer: npt.NDArray[np.uint8], batches: Longs, sums: list[int], form: _Form) -> pa.RecordBatch:
    """The rows of batches that were surveyed."""
    rows, pairs = sums[ALL_ROWS], sums[PAIRS]
    offsets, times = np.empty(rows, np.int64), np.empty(rows, np.int64)
    subject, key = _Texts(rows, sums[SUBJECT_BYTES]), _Texts(rows, sums[KEY_BYTES], sums[KEY_NULLS])
    lists = _Texts(rows, 0, sums[HEADER_NULLS])
    name, text = _Texts(pairs, sums[NAME_BYTES]), _Texts(pairs, sums[TEXT_BYTES], sums[TEXT_NULLS])
    value = _Texts(rows, sums[VALUE_BYTES])
    native.gather_batches(
        buffer, batches, form.places, offsets, times, subject.offsets, subject.data, key.bits, key.offsets,
        key.data, lists.bits, lists.offsets, name.offsets, name.data, text.bits, text.offsets, text.data, value.offsets,
        value.data,
    )  # fmt: skip
    pair_type = HEADERS_TYPE.value_type
    entries = pa.StructArray.from_arrays(
        [name.as_array(pa.string()), text.as_array(pa.string())], fields=[pair_type.field(0), pair_type.field(1)]
    )
    headers = pa.Array.from_buffers(
        HEADERS_TYPE, rows, [lists.validity, pa.py_buffer(lists.offsets)], lists.nulls, children=[entries]
    )
    columns = [
        pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(offsets)], 0),
        pa.Array.from_buffers(MESSAGE_SCHEMA.field("timestamp").type, rows, [None, pa.py_buffer(times)], 0),
        subject.as_array(pa.string()),
        key.as_array(pa.binary()),
        headers,
        value.as_array(pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)


class _Texts:
    """A column of texts that a kernel fills."""

    def __init__(self, rows: int, size_bytes: int, nulls: int = 0) -> None:
        self.rows, self.nulls = rows, nulls
        self.offsets = np.zeros(rows + 1, np.int32)
        self.data = np.empty(size_bytes, np.uint8)
        self.bits = np.zeros((rows + 7) // 8 if nulls else 0, np.uint8)

    @property
    def validity(self) -> pa.Buffer | None:
        return pa.py_buffer(self.bits) if self.nulls else None

    def as_array(self, kind: pa.DataType) -> pa.Array[Any]:
        buffers = [self.validity, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(kind, self.rows, buffers, self.nulls)
