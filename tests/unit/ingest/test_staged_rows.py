"""Uploads of direct appends, read back: rows that the stream takes, or a refusal; never a crash of the broker."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from natslog.arrow.row_buffers import PAYLOAD_SCHEMA
from natslog.arrow.schema import HEADERS_TYPE
from natslog.errors import InvalidRequest
from natslog.ingest.staged_rows import GROUPED_BYTES, GROUPED_ROWS, RowRules, claimed_bytes, read_rows, regrouped

RULES = RowRules(("orders.>",), "orders.new")


def stream_of(*batches: pa.RecordBatch, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def values(count: int, size_bytes: int = 100) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array([b"x" * size_bytes] * count, pa.binary())})


def read(path: Path, upload: bytes) -> Iterator[pa.RecordBatch]:
    path.write_bytes(upload)
    return read_rows(path, crc32c(upload), RULES, "part 0")


@pytest.mark.parametrize("kind", [0, 2, 3, 4, 5, 127])
@pytest.mark.parametrize("table", [b"", bytes(9) + b"\x7f"], ids=["whole", "garbled"])
def test_message_of_another_kind_in_the_place_of_the_schema_is_refused(tmp_path: Path, kind: int, table: bytes) -> None:
    """pyarrow takes any message for a schema, and does not prove those of unknown kinds: reading one may crash."""
    upload = bytearray(stream_of(values(2)))
    assert upload[29] == 1, "the message's kind: a schema"
    upload[29] = kind
    upload[38 : 38 + len(table)] = table
    with pytest.raises(InvalidRequest):
        list(read(tmp_path / "part", bytes(upload)))


@pytest.mark.parametrize("header", ["Nats-Expected-Last-Sequence", "Nats-Expected-Anything"])
def test_condition_of_a_publish_is_refused_since_it_would_be_stored_unchecked(tmp_path: Path, header: str) -> None:
    headers = pa.array([None, [("A", "b")], [("A", "b"), (header, "99")]], HEADERS_TYPE)
    rows = pa.RecordBatch.from_pydict({"value": pa.array([b"x"] * 3, pa.binary()), "headers": headers})
    with pytest.raises(InvalidRequest, match=f"row 4 has the header {header}") as error:
        list(read(tmp_path / "part", stream_of(rows[:2], rows)))
    assert error.value.facts["row"] == 4
    assert len(list(read(tmp_path / "part", stream_of(rows[:2], rows[:2])))) == 2


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_what_an_upload_claims_is_what_its_rows_take(tmp_path: Path, compression: str | None) -> None:
    batches = [values(1000), values(3), values(0), values(50, 5000)]
    path = tmp_path / "part"
    path.write_bytes(stream_of(*batches, compression=compression))
    taken = sum(batch.nbytes + 16 * batch.num_rows for batch in batches)
    assert taken <= claimed_bytes(path, "part 0") <= taken + 64 * 3 * len(batches), "buffers are padded"


def test_kilobytes_that_claim_gigabytes_are_known_without_unpacking_them(tmp_path: Path) -> None:
    rows = 15_000_000
    batch = pa.RecordBatch.from_arrays(
        [pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(bytes(4 * rows + 4)), pa.py_buffer(b"")])],
        ["value"],
    )
    path = tmp_path / "part"
    path.write_bytes(stream_of(*[batch] * 40, compression="zstd"))
    assert path.stat().st_size < 1_000_000
    started = time.process_time()
    assert claimed_bytes(path, "part 0") > 40 * 20 * rows
    assert time.process_time() - started < 1


@pytest.mark.long
def test_garbled_streams_are_read_or_refused(tmp_path: Path) -> None:
    chance, taken, refused = random.Random(7), 0, 0
    wholes = [stream_of(values(20), values(3)), stream_of(values(50), compression="zstd")]
    for _ in range(1500):
        upload = bytearray(chance.choice(wholes))
        for _ in range(chance.choice((1, 1, 4))):
            at = chance.randrange(min(len(upload), 600))
            upload[at] = chance.choice((0, 127, 255, upload[at] ^ 1 << chance.randrange(8)))
        try:
            (tmp_path / "part").write_bytes(upload)
            assert claimed_bytes(tmp_path / "part", "part 0") >= 0
            batches = list(read(tmp_path / "part", bytes(upload)))
        except InvalidRequest:
            refused += 1
        else:
            pa.Table.from_batches(batches, PAYLOAD_SCHEMA).validate(full=True)
            taken += 1
    assert refused > 300, "most of these bytes say how the rows are laid out"
    assert taken > 300, "others are not looked at"


def test_file_that_is_not_what_was_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    upload = stream_of(values(2))
    (tmp_path / "part").write_bytes(upload)
    with pytest.raises(OSError, match="CRC32C"):
        list(read_rows(tmp_path / "part", crc32c(upload) ^ 1, RULES, "part 0"))


@pytest.mark.parametrize(
    "batches",
    [[values(100_000, 0)], [values(30_000, 1000)], [values(10)] * 50, [values(1, GROUPED_BYTES + 1), values(1)]],
    ids=["many rows", "many bytes", "small batches", "a large row"],
)
def test_rows_come_in_batches_as_a_log_stores_them(tmp_path: Path, batches: list[pa.RecordBatch]) -> None:
    found = list(regrouped(read(tmp_path / "part", stream_of(*batches))))
    assert pa.Table.from_batches(found).column("value") == pa.Table.from_batches(batches).column("value")
    assert set(pa.Table.from_batches(found).column("subject").to_pylist()) == {"orders.new"}
    for batch in found:
        assert batch.num_rows <= GROUPED_ROWS
        assert batch.nbytes <= GROUPED_BYTES or batch.num_rows == 1
        assert all(column.offset == 0 for column in batch.columns)
    assert len(found) < 10
