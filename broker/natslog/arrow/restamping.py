"""Batches of another log, with the epoch of this one: they are checked completely, because the bytes come from a file
that anyone may have written, and their CRCs prove only that it was written so.

Invariant. Everything but the epoch stays as it is, byte for byte: offsets, gaps, times, message ids and run marks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from natslog.arrow import ipc
from natslog.arrow.batch_line import FIRST_FORMAT, BatchHeader, Bytes, blank_crcs, fill_line, line_start
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.bounds import MOST_ROWS_BYTES
from natslog.arrow.covered import covered
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.errors import CorruptLog, InvalidRequest
from natslog.units import gap_between, offsets_between

_ERRORS = (
    struct.error,
    pa.ArrowException,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    OverflowError,
    MemoryError,
    OSError,
    AssertionError,
)


def checked_batches(data: Bytes, subjects: Sequence[str]) -> list[tuple[BatchHeader, memoryview]]:
    """The batches in these bytes, which follow one another.

    Args:
        subjects: wildcards, one of which covers each message's subject.

    Raises:
        InvalidRequest: one is damaged, is not what natslog writes, or does not follow the one before it.
    """
    found: list[tuple[BatchHeader, memoryview]] = []
    try:
        for header, message in ipc.split_messages(data, source="the request"):
            if found and header.base_offset != found[-1][0].end_offset:
                raise InvalidRequest(gap_between(found[-1][0].end_offset, header.base_offset))
            _check(header, message, subjects)
            found.append((header, message))
    except CorruptLog as error:
        raise InvalidRequest(f"the batches are damaged: {error.message}") from error
    except _ERRORS as error:
        raise InvalidRequest(f"the batches cannot be read: {error}") from error
    if not found:
        raise InvalidRequest("the request has no batches")
    return found


def _check(header: BatchHeader, message: memoryview, subjects: Sequence[str]) -> None:
    """Raises InvalidRequest, or what Arrow raises."""
    where = f"the batch at offset {header.base_offset}"
    unpacked = BatchMetadata(bytes(message[8 : header.header_bytes])).unpacked_bytes(
        lambda at: bytes(message[header.header_bytes + at : header.header_bytes + at + 8])
    )
    if unpacked > MOST_ROWS_BYTES:
        raise InvalidRequest(f"{where} has {unpacked} bytes uncompressed; at most {MOST_ROWS_BYTES} are allowed")
    batch = ipc.decode_batch(message)
    batch.validate(full=True)
    if batch.num_rows != header.rows or header.end_offset <= header.base_offset:
        raise InvalidRequest(f"{where} does not have the rows that its header states")
    for field, column in zip(MESSAGE_SCHEMA, batch.columns, strict=True):
        if not field.nullable and column.null_count:
            raise InvalidRequest(f"{where} has rows without {field.name}")
    stated, pieces = restamped(header, message, header.epoch)
    if len(pieces) > 1 and stated != header:
        raise InvalidRequest(f"{where} has CRCs that do not belong to its columns")
    if not header.rows:
        return
    offsets, times = batch.column("offset").to_numpy(), batch.column("timestamp").cast(pa.int64()).to_numpy()
    if offsets[0] < header.base_offset or offsets[-1] >= header.end_offset or np.any(offsets[1:] <= offsets[:-1]):
        raise InvalidRequest(
            f"{where}: its offsets do not ascend within {offsets_between(header.base_offset, header.end_offset)}"
        )
    if times[0] < 0 or times[-1] > header.max_timestamp_us or np.any(times[1:] < times[:-1]):
        raise InvalidRequest(f"{where} has timestamps that do not ascend up to {header.max_timestamp_us}")
    if not pc.all(covered(pc.unique(batch.column("subject")), tuple(subjects))).as_py():
        raise InvalidRequest(f"{where} has a subject that is none of {', '.join(subjects)}")


def restamped(header: BatchHeader, message: Bytes, epoch: int) -> tuple[BatchHeader, list[Bytes]]:
    """The header and the pieces of a proven batch as one of this epoch. The body is not copied."""
    view = memoryview(message)
    begun, body = bytearray(view[: header.header_bytes]), view[header.header_bytes : header.total_bytes]
    described = replace(header, epoch=epoch, crcs=blank_crcs(header.batch_format))
    start = line_start(begun)
    if not _has_fixed_width(begun, start, described):
        return _encoded_again(header, message, epoch)
    edges = [0, len(body)]
    if header.batch_format != FIRST_FORMAT:
        edges = [*ipc.column_edges(BatchMetadata(bytes(begun[8:])), header), len(body)]
    parts = [[body[begin:end]] for begin, end in pairwise(edges)]
    return fill_line(begun, start, described, parts), [begun, body]


def _has_fixed_width(begun: bytearray, start: int, described: BatchHeader) -> bool:
    """Whether the batch line has room for any epoch. Those from before version 0.1.0 may be shorter."""
    return begun.index(b"\0", start) - start == len(described.line())


def _encoded_again(header: BatchHeader, message: Bytes, epoch: int) -> tuple[BatchHeader, list[Bytes]]:
    """The same rows in another batch."""
    again = ipc.encode_batch(
        ipc.decode_batch(message),
        base_offset=header.base_offset,
        end_offset=header.end_offset,
        epoch=epoch,
        max_timestamp_us=header.max_timestamp_us,
        run=header.run,
        batch_format=header.batch_format,
    )
    stated = ipc.proven_header(again[: ipc.MAX_HEADER_BYTES])
    assert stated is not None, "it was just written"
    return stated, [again]
