"""Columns of a stored batch as a message of their own: the same values, proven, from the stored bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow import ipc
from natslog.arrow.projection import project, schema_of, split_projected
from natslog.arrow.schema import COLUMNS, MESSAGE_SCHEMA
from natslog.errors import CorruptLog

pairs = st.fixed_dictionaries({"key": st.text(max_size=5), "value": st.text(max_size=9)})
messages = st.fixed_dictionaries(
    {
        "offset": st.integers(0, 2**62),
        "timestamp": st.integers(0, 2**50),
        "subject": st.text(min_size=1, max_size=12),
        "key": st.none() | st.binary(max_size=9),
        "headers": st.none() | st.lists(pairs, max_size=3),
        "value": st.binary(max_size=200),
    }
)
some_columns = st.permutations(COLUMNS).flatmap(lambda all_: st.integers(1, 6).map(lambda count: tuple(all_[:count])))


def stored(content: list[dict[str, Any]], compression: str | None = None, *, ids: bool = False) -> bytes:
    batch = pa.RecordBatch.from_pylist(content, schema=MESSAGE_SCHEMA)
    packed = np.full((len(content), ipc.ID_BYTES), 7, np.uint8) if ids else None
    message = ipc.encode_batch(
        batch, base_offset=5, epoch=1, max_timestamp_us=0, compression=compression, packed_ids=packed
    )
    return message.tobytes()


def answer(message: bytes, columns: tuple[str, ...]) -> bytes:
    """A whole response."""
    header = ipc.proven_header(message)
    assert header is not None
    made = project(header, message[: ipc.MAX_HEADER_BYTES], columns)
    body = message[header.header_bytes :]
    pieces = [bytes(made.header), *(body[start:end] for start, end in made.body)]
    return b"".join([ipc.schema_message(schema_of(columns)), *pieces, ipc.END_OF_STREAM])


@pytest.mark.long
@settings(deadline=None)
@given(st.lists(messages, min_size=1, max_size=20), some_columns, st.sampled_from([None, "zstd", "lz4"]), st.booleans())
def test_columns_are_those_of_the_batch(
    content: list[dict[str, Any]], columns: tuple[str, ...], compression: str | None, ids: bool
) -> None:
    message = stored(content, compression, ids=ids)
    response = answer(message, columns)
    expected = ipc.decode_batch(message).select(list(columns))
    with pa.ipc.open_stream(response) as reader:  # as any client reads it
        assert reader.schema.equals(schema_of(columns))
        (batch,) = reader
        batch.validate(full=True)
        assert batch.equals(expected)
    ((header, projected),) = split_projected(response, columns, source="test")
    assert (header.base_offset, header.end_offset, header.rows) == (5, 5 + len(content), len(content))
    assert ipc.decode_batch(projected, schema_of(columns)).equals(expected)


ROW = {"offset": 5, "timestamp": 1, "subject": "s", "key": b"k", "headers": [{"key": "a", "value": "b"}], "value": b"v"}


@pytest.mark.parametrize("columns", [("value",), ("offset", "headers"), ("key", "subject"), COLUMNS])
def test_a_flip_of_any_bit_is_found(columns: tuple[str, ...]) -> None:
    response = answer(stored([ROW, ROW | {"offset": 6}]), columns)
    schema_bytes = len(ipc.schema_message(schema_of(columns)))
    for position in range(schema_bytes, len(response)):
        for bit in range(8):
            damaged = bytearray(response)
            damaged[position] ^= 1 << bit
            if position >= len(response) - 4:  # of end-of-stream, which has no CRC
                continue
            try:
                found = list(split_projected(damaged, columns, source="test"))
            except CorruptLog:
                continue
            assert position >= len(response) - 8, f"byte {position} bit {bit}"
            assert len(found) == 1


def test_answer_that_is_cut_short_is_an_error() -> None:
    response = answer(stored([ROW]), ("timestamp",))
    assert len(list(split_projected(response, ("timestamp",), source="test"))) == 1
    for size in range(len(ipc.schema_message(schema_of(("timestamp",)))), len(response) - 7):
        with pytest.raises(CorruptLog):
            list(split_projected(response[:size], ("timestamp",), source="test"))
