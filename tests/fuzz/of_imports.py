"""Batches of an export, as a broker receives them: whoever wrote them knows how CRCs are computed."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa

from natslog.arrow import ipc
from natslog.arrow.batch_line import FIRST_FORMAT, blank_crcs, fill_line, find_batch_line, line_start
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.restamping import checked_batches, restamped
from natslog.arrow.run_marks import RunMark
from natslog.errors import InvalidRequest
from tests.fuzz import edits
from tests.fuzz.target import target
from tests.unit.client.test_answers import stored


@functools.cache
def _batches() -> list[bytes]:
    batch = ipc.decode_batch(stored(0, 3))
    stated = {"base_offset": 0, "epoch": 3, "max_timestamp_us": 1 << 60}
    marked = ipc.encode_batch(batch, **stated, run=RunMark("query-1", 7, 0, 3, 5))
    packed = ipc.encode_batch(batch, **stated, compression="zstd", stats=b"{}")
    return [bytes(one) for one in (marked, packed, ipc.encode_batch(batch, **stated, batch_format=FIRST_FORMAT))]


def signed(data: bytes) -> bytes:
    """The same bytes with CRCs and lengths that hold, as far as they have a batch line."""
    size = 8 + int.from_bytes(data[4:8], "little")
    header = find_batch_line(data[:size])
    if header is None or not 8 < size <= min(len(data), ipc.MAX_HEADER_BYTES):
        return data
    begun, body = bytearray(data[:size]), data[size:]
    described = replace(header, header_bytes=size, body_bytes=len(body), crcs=blank_crcs(header.batch_format), run=None)
    edges = [0, len(body)]
    try:
        if header.batch_format != FIRST_FORMAT:
            edges = [*ipc.column_edges(BatchMetadata(bytes(begun[8:])), described), len(body)]
    except (struct.error, ValueError, TypeError, IndexError):
        edges = [0] * 7 + [len(body)]
    fill_line(begun, line_start(begun), described, [[body[start:end]] for start, end in pairwise(edges)])
    return bytes(begun[:size]) + body


def _seeds() -> Iterator[bytes]:
    yield from edits.seeds(_batches())


@target("imports", _seeds)
def check_imports(script: bytes) -> None:
    """A batch with valid CRCs is refused (InvalidRequest), or its rows are valid, lie within its offsets, and stay so
    with another epoch.
    """
    data = signed(edits.edited(script, _batches()))
    try:
        found = checked_batches(data, (">",))
    except InvalidRequest:
        return
    for header, message in found:
        stated, pieces = restamped(header, message, 77)
        again = b"".join(map(bytes, pieces))
        ((proven, _),) = ipc.split_messages(again, source="a test")
        assert proven == stated
        batch = ipc.decode_batch(again)
        batch.validate(full=True)
        offsets = batch.column("offset").to_pylist()
        assert offsets == sorted(set(offsets))
        assert all(header.base_offset <= offset < header.end_offset for offset in offsets)
        assert batch.column("timestamp").cast(pa.int64()).null_count == 0
