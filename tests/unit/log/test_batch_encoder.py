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


@settings(deadline=None, max_examples=80)
@given(
    st.lists(messages, min_size=1, max_size=30), st.integers(0, 2**62), st.integers(0, 2**52), st.integers(1, 2**40),
    st.sampled_from(["format 1", "format 2", "with ids"]),
)  # fmt: skip
def test_an_encoded_commit_reads_back_and_proves_itself(
    content: list[dict[str, Any]], base_offset: int, timestamp_us: int, epoch: int, kind: str
) -> None:
    batch, batch_format = payload_batch(content), 1 if kind == "format 1" else 2
    ids = ids_for(len(content)) if kind == "with ids" else None
    encoded = encode_rows(
        RowBuffers.of(batch, ids),
        base_offset=base_offset,
        timestamp_us=timestamp_us,
        epoch=epoch,
        batch_format=batch_format,
    )
    message = b"".join(encoded.pieces)
    assert ipc.proven_header(message) == encoded.header
    assert ipc.body_holds(encoded.header, message)
    assert len(message) == encoded.header.total_bytes
    assert (encoded.header.base_offset, encoded.header.rows, encoded.header.epoch) == (base_offset, len(content), epoch)
    decoded = ipc.decode_batch(message)
    decoded.validate(full=True)
    assert decoded.equals(sequenced(batch, base_offset, timestamp_us))
    assert encoded.header.batch_format == batch_format
    found = ipc.packed_ids_of(encoded.header, message)
    assert (found is None) if ids is None else found.tolist() == ids.tolist()
    assert stores_headers(message) == any(row["headers"] is not None for row in content)


def ids_for(rows: int) -> ipc.PackedIds:
    """The first row has none."""
    return np.arange(12 * rows, dtype=np.uint16).astype(np.uint8).reshape(rows, 12) * np.array(
        [[at > 0] for at in range(rows)], np.uint8
    )


@pytest.mark.parametrize("kind", ["format 1", "format 2", "with ids"])
def test_bytes_are_those_of_pyarrow(kind: str) -> None:
    """Where no column is empty; for an empty one pyarrow leaves out offsets that the format asks for."""
    row = {"subject": "a.b", "key": b"k", "headers": [{"key": "A", "value": "1"}], "value": b"x" * 300}
    batch, more = payload_batch([row] * 1001), {"base_offset": 7, "epoch": 3, "batch_format": 2 - (kind == "format 1")}
    ids = ids_for(1001) if kind == "with ids" else None
    encoded = encode_rows(RowBuffers.of(batch, ids), timestamp_us=5, **more)
    by_pyarrow = ipc.encode_batch(sequenced(batch, 7, 5), max_timestamp_us=5, packed_ids=ids, **more)
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


def test_clipped_batch_keeps_its_format_and_the_ids_of_its_rows() -> None:
    ids = ids_for(10)
    for batch_format, given_ids in ((1, None), (2, None), (2, ids)):
        content = [{"subject": "s", "key": None, "headers": None, "value": b"%d" % at} for at in range(10)]
        encoded = encode_rows(
            RowBuffers.of(payload_batch(content), given_ids), base_offset=100, timestamp_us=5, epoch=3,
            batch_format=batch_format,
        )  # fmt: skip
        clipped = ipc.clip_batch(b"".join(encoded.pieces), 103, 107)
        header = ipc.proven_header(clipped)
        assert header is not None
        assert (header.base_offset, header.end_offset, header.rows, header.batch_format) == (103, 107, 4, batch_format)
        assert ipc.decode_batch(clipped).column("value").to_pylist() == [b"3", b"4", b"5", b"6"]
        found = ipc.packed_ids_of(header, clipped)
        assert (found is None) if given_ids is None else found.tolist() == ids[3:7].tolist()


@pytest.mark.parametrize("with_ids", [False, True])
def test_a_flip_of_any_bit_is_found(with_ids: bool) -> None:
    content = [{"subject": "s", "key": b"k", "headers": [{"key": "A", "value": "1"}], "value": b"v"}] * 2
    ids = ids_for(2) if with_ids else None
    encoded = encode_rows(RowBuffers.of(payload_batch(content), ids), base_offset=1, timestamp_us=5, epoch=3)
    whole = b"".join(encoded.pieces)
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            header = ipc.proven_header(bytes(damaged))
            assert header is None or not ipc.body_holds(header, damaged), f"byte {position} bit {bit}"
