"""Commits are encoded by filling a template: the result must be what pyarrow itself would have written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from natslog.arrow import ipc
from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.schema import HEADERS_TYPE, MESSAGE_SCHEMA
from natslog.log.batch_encoder import encode_rows, stores_headers
from tests.conftest import rows

pairs = st.fixed_dictionaries({"key": st.text(max_size=5), "value": st.text(max_size=9)})
messages = st.fixed_dictionaries(
    {
        "subject": st.text(min_size=1, max_size=12),
        "key": st.none() | st.binary(max_size=9),
        "headers": st.none() | st.lists(pairs, max_size=3),
        "value": st.binary(max_size=400),
    }
)


def payload_batch(content: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(content, schema=PAYLOAD_SCHEMA)


def sequenced(batch: pa.RecordBatch, base_offset: int, timestamp_us: int) -> pa.RecordBatch:
    """The whole message schema, by pyarrow."""
    offsets = pa.array(np.arange(base_offset, base_offset + batch.num_rows))
    times = pa.array(np.full(batch.num_rows, timestamp_us)).view(MESSAGE_SCHEMA.field("timestamp").type)
    return pa.RecordBatch.from_arrays([offsets, times, *batch.columns], schema=MESSAGE_SCHEMA)


@settings(deadline=None, max_examples=200)
@given(st.lists(messages, min_size=1, max_size=30), st.integers(0, 2**62), st.integers(0, 2**52), st.integers(1, 2**40))
def test_an_encoded_commit_reads_back_and_proves_itself(
    content: list[dict[str, Any]], base_offset: int, timestamp_us: int, epoch: int
) -> None:
    batch = payload_batch(content)
    encoded = encode_rows(RowBuffers.of(batch), base_offset=base_offset, timestamp_us=timestamp_us, epoch=epoch)
    message = b"".join(encoded.pieces)
    assert ipc.proven_header(message) == encoded.header
    assert ipc.body_holds(encoded.header, message)
    assert len(message) == encoded.header.total_bytes
    assert (encoded.header.base_offset, encoded.header.rows, encoded.header.epoch) == (base_offset, len(content), epoch)
    decoded = ipc.decode_batch(message)
    decoded.validate(full=True)
    assert decoded.equals(sequenced(batch, base_offset, timestamp_us))
    assert stores_headers(message) == any(row["headers"] is not None for row in content)


def test_bytes_are_those_of_pyarrow() -> None:
    """Where no column is empty; for an empty one pyarrow leaves out offsets that the format asks for."""
    row = {"subject": "a.b", "key": b"k", "headers": [{"key": "A", "value": "1"}], "value": b"x" * 300}
    batch = payload_batch([row] * 1000)
    encoded = encode_rows(RowBuffers.of(batch), base_offset=7, timestamp_us=5, epoch=3)
    by_pyarrow = ipc.encode_batch(sequenced(batch, 7, 5), base_offset=7, epoch=3, max_timestamp_us=5)
    assert len(encoded.pieces) > 2, "a large body is not put together first"
    assert b"".join(encoded.pieces) == bytes(by_pyarrow)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("headers", [None, [{"key": "Nats-Msg-Id", "value": "1"}]])
def test_headers_are_seen_in_batches_of_pyarrow_as_well(compression: str | None, headers: list | None) -> None:
    batch = sequenced(payload_batch([{"subject": "s", "key": None, "headers": headers, "value": b"v"}]), 0, 0)
    message = ipc.encode_batch(batch, base_offset=0, epoch=1, max_timestamp_us=0, compression=compression)
    assert stores_headers(bytes(message)) == (headers is not None)


def test_rows_of_an_arrow_batch_are_its_buffers() -> None:
    given_rows = rows([b"a", b"", b"ccc"])
    assert given_rows.to_arrow().column("value").to_pylist() == [b"a", b"", b"ccc"]
    assert given_rows.to_arrow().column("headers").equals(pa.nulls(3, HEADERS_TYPE))
    with pytest.raises(AssertionError, match="slice"):
        RowBuffers.of(given_rows.to_arrow().slice(1))
