"""Compressed answers are decoded part by part, within a bound of decoded bytes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow import ipc
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.client.answers import Fetched, RequestedRows, rows_of
from natslog.client.reading_ahead import _next_part
from natslog.errors import CorruptAnswer

VALUE = b"x" * 1000


def stored(base: int, count: int) -> memoryview:
    """A compressed batch of rows of some 1,000 bytes."""
    columns: dict[str, Any] = {
        "offset": range(base, base + count),
        "timestamp": [0] * count,
        "subject": ["orders"] * count,
        "value": [VALUE] * count,
    }
    arrays = [pa.array(columns.get(field.name, [None] * count), field.type) for field in MESSAGE_SCHEMA]
    batch = pa.record_batch(arrays, schema=MESSAGE_SCHEMA)
    return ipc.encode_batch(batch, base_offset=base, epoch=1, max_timestamp_us=0, compression="zstd", stats=None)


def answer(counts: list[int], next_offset: int) -> Any:
    bases = [sum(counts[:at]) for at in range(len(counts))]
    data = ipc.schema_message() + b"".join(map(stored, bases, counts)) + ipc.END_OF_STREAM
    headers = {
        "Natslog-Next-Offset": str(next_offset),
        "Natslog-High-Watermark": str(sum(counts)),
        "Natslog-Log-Start-Offset": "0",
        "Natslog-Batches": "whole",
        "Natslog-Stream-Id": "a",
    }
    return SimpleNamespace(data=data, headers=headers)


def refuse() -> Fetched:
    raise AssertionError("the rest of the answer is here")


@settings(deadline=None, max_examples=60)
@given(data=st.data(), counts=st.lists(st.integers(1, 30), min_size=1, max_size=8), max_bytes=st.integers(1, 100_000))
def test_parts_of_an_answer_are_the_answer(data: st.DataObject, counts: list[int], max_bytes: int) -> None:
    start = data.draw(st.integers(0, counts[0] - 1))
    end = sum(counts) - data.draw(st.integers(0, counts[-1] - 1))
    if start >= end:
        return
    response, asked = answer(counts, end), RequestedRows("orders", start, end, None, is_filtered=False)
    whole = rows_of(response, asked)
    assert (whole.next_offset, whole.rest) == (end, None)
    part, batches, at = rows_of(response, asked, max_bytes), [], start
    while True:
        assert sum(batch.num_rows for batch in part.batches) == part.next_offset - at > 0
        assert sum(batch.nbytes for batch in part.batches[:-1]) < max_bytes
        batches, at = [*batches, *part.batches], part.next_offset
        if part.rest is None:
            break
        part = part.rest.decoded(max_bytes)
    assert at == end
    assert pa.Table.from_batches(batches) == pa.Table.from_batches(whole.batches)


def test_decoded_rows_of_a_long_answer_are_bounded() -> None:
    """A hundred batches of a megabyte: no more than the bound and one batch are decoded at a time."""
    response, asked = answer([1000] * 100, 100_000), RequestedRows("orders", 0, 100_000, None, is_filtered=False)
    assert len(response.data) < 1_000_000
    before, most = pa.total_allocated_bytes(), 0
    part = rows_of(response, asked, 8_000_000)
    assert part.rest is not None
    while part.rest is not None:
        most = max(most, pa.total_allocated_bytes() - before)
        part = _next_part(part.rest, refuse, 8_000_000)
    assert part.next_offset == 100_000
    assert most < 2 * 8_000_000 + 3_000_000, "the part in use, and the next one"


def test_rest_that_cannot_be_decoded_is_fetched_again() -> None:
    response, asked = answer([10, 10], 20), RequestedRows("orders", 0, 20, None, is_filtered=False)
    part = rows_of(response, asked, 1)
    assert part.rest is not None
    header, message = part.rest.messages[0]
    damaged = bytearray(message)
    damaged[header.header_bytes + 8 :] = b"\xff" * (len(damaged) - header.header_bytes - 8)
    rest = replace(part.rest, messages=[(header, memoryview(damaged))])
    with pytest.raises(CorruptAnswer):
        rest.decoded(1)
    again = rows_of(response, asked)
    assert _next_part(rest, lambda: again, 1) is again
