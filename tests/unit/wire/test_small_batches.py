"""Many small stored batches, read as one: the rows are those that Arrow reads of each by itself, and so is damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from natslog.arrow import ipc
from natslog.arrow.batch_line import find_batch_line
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.message_template import MessageTemplate
from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers
from natslog.arrow.run_marks import RunMark
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.errors import CorruptLog
from natslog.log.batch_encoder import encode_rows
from natslog.wire import small_batches
from natslog.wire.small_batches import SMALL_BYTES, StoredRows, rows_of
from tests.conftest import open_log
from tests.conftest import rows as buffers_of

TEXTS = st.text(max_size=12)
PAIRS = st.lists(st.fixed_dictionaries({"key": TEXTS, "value": st.none() | TEXTS}), max_size=3)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "subject": TEXTS,
            "key": st.none() | st.binary(max_size=9),
            "headers": st.none() | PAIRS,
            "value": st.binary(max_size=40),
        }
    ),
    min_size=1,
    max_size=20,
)
OFFSETS = (5, 8, 11, 14, 17, 20)  # of subject, key, headers, names and values of headers, value
KINDS = ("plain",) * 6 + ("gaps", "large", "run", "format 1", "compressed", "ids", "epoch", "other form")


def written(kind: str, rows: list[dict[str, Any]], base: int, epoch: int) -> tuple[bytes, int]:
    """A batch of these rows, and where the next one begins."""
    if kind == "large":
        rows = [rows[0] | {"value": bytes(SMALL_BYTES)}]
    table = pa.RecordBatch.from_pylist(rows, schema=PAYLOAD_SCHEMA)
    buffers, count = RowBuffers.of(table), len(rows)
    if kind == "ids":
        ids = np.arange(12 * count, dtype=np.uint8).reshape(-1, 12)
        buffers = RowBuffers(count, buffers.nodes, buffers.buffers, ids)
    if kind in ("plain", "large", "ids", "epoch", "format 1", "run"):
        encoded = encode_rows(
            buffers,
            base_offset=base,
            timestamp_us=1_700_000_000_000_000 + base,
            epoch=epoch,
            run=RunMark("my-offset", 1, base, base + count, 5) if kind == "run" else None,
            batch_format=1 if kind == "format 1" else 2,
        )
        return b"".join(map(bytes, encoded.pieces)), base + count
    spread = 3 if kind == "gaps" else 1
    offsets = pa.array([base + spread * number for number in range(count)], pa.int64())
    times = pa.array([base] * count, MESSAGE_SCHEMA.field("timestamp").type)
    batch = pa.RecordBatch.from_arrays([offsets, times, *table.columns], schema=MESSAGE_SCHEMA)
    stated: dict[str, Any] = {"base_offset": base, "end_offset": base + spread * count, "epoch": epoch}
    compressed = kind == "compressed"
    message = ipc.encode_batch(
        batch,
        **stated,
        max_timestamp_us=base,
        compression="zstd" if compressed else None,
        stats=b"{}" if compressed or kind == "other form" else None,
    )
    return bytes(message), base + spread * count


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """A part of a log: batches that follow one another, most of them small."""
    parts, base, epoch = [], draw(st.sampled_from([0, 5, 10**17])), 3
    for kind, rows in draw(st.lists(st.tuples(st.sampled_from(KINDS), ROWS), max_size=14)):
        epoch += kind == "epoch"
        message, base = written(kind, rows, base, epoch)
        parts.append(message)
    data = b"".join(parts)
    return ipc.schema_message() + data + ipc.END_OF_STREAM if draw(st.booleans()) else data


def one_by_one(data: bytes) -> Iterator[tuple[ipc.BatchHeader, pa.RecordBatch]]:
    for header, message in ipc.split_messages(data, source="a test"):
        yield header, ipc.decode_batch(message)


def read(found: Iterator[tuple[Any, pa.RecordBatch]]) -> tuple[list[dict[str, Any]], list[tuple[int, int]], str]:
    """Rows; of each offset, its epoch, and where the newest time is stated; what is damaged."""
    rows: list[dict[str, Any]] = []
    stated: list[tuple[int, int]] = []
    try:
        for header, batch in found:
            batch.validate(full=True)
            assert header.rows == batch.num_rows
            stated += [(offset, header.epoch) for offset in range(header.base_offset, header.end_offset)]
            rows += batch.to_pylist()
    except CorruptLog as error:
        return rows, stated, error.message
    return rows, stated, ""


def is_the_same(data: bytes) -> bool:
    return read(rows_of(data, source="a test")) == read(one_by_one(data))


@given(streams())
def test_rows_are_those_of_each_batch(data: bytes) -> None:
    assert is_the_same(data)


@given(streams(), st.data())
def test_damage_is_found_in_the_same_batch(data: bytes, draw: st.DataObject) -> None:
    if not data:
        return
    at = draw.draw(st.integers(0, len(data) - 1))
    damaged = bytearray(data)
    damaged[at] ^= 1 << draw.draw(st.integers(0, 7))
    assert is_the_same(bytes(damaged))
    assert is_the_same(data[:at])


def singles(count: int, base: int = 0) -> list[bytes]:
    row = {"subject": "orders.eu", "key": None, "headers": None, "value": b"v" * 100}
    return [written("plain", [row], base + number, 3)[0] for number in range(count)]


def test_small_batches_are_read_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batches, "_forms", ())
    found = [header for header, _ in rows_of(b"".join(singles(5000)), source="a test")]
    assert (found[0].base_offset, found[0].end_offset) == (0, 1), "its form is not known yet"
    assert len(found) < 12
    assert all(isinstance(header, StoredRows) for header in found[1:])
    assert [header.base_offset for header in found[1:]] == [header.end_offset for header in found[:-1]]
    assert found[-1].max_timestamp_us == 1_700_000_000_000_000 + 4999


def test_small_batches_of_buffers_that_arrow_made_longer_are_read_as_one(tmp_path: Path) -> None:
    """As requests of clients leave them: there is one more offset than a batch without headers needs."""
    log = open_log(tmp_path)
    for _ in range(100):
        log.append(buffers_of([b"v"]), 1_700_000_000_000_000)
    with log.reader.plan_read(0, max_bytes=1 << 20) as plan:
        assert len(list(plan.rows())) <= 2
    log.close()


def test_offsets_that_are_missing_between_batches_end_a_run() -> None:
    data = b"".join([*singles(50), *singles(50, base=60)])
    ends = [(header.base_offset, header.end_offset) for header, _ in rows_of(data, source="a test")]
    assert 50 in {end for _, end in ends}
    assert 60 in {base for base, _ in ends}
    assert is_the_same(data)


def resigned(message: bytes, change: Any) -> bytes:
    """A message whose body was changed, with CRCs that hold."""
    from tests.fuzz.of_imports import signed

    header = find_batch_line(message)
    assert header is not None
    body = bytearray(message[header.header_bytes :])
    change(body)
    return signed(message[: header.header_bytes] + bytes(body))


@pytest.mark.parametrize("number", [-1, 1, 9, 101, 2**31 - 1])
def test_texts_that_lead_out_of_their_batch_are_left_to_arrow(number: int) -> None:
    """Compiled code has no check of bounds: it would read, or write, what is behind."""
    row = {"subject": "orders.eu", "key": b"k", "headers": [{"key": "a", "value": "b"}], "value": b"v" * 100}
    one, behind = written("plain", [row, row], 3, 3)
    header = find_batch_line(one)
    assert header is not None
    refused = 0
    buffers = BatchMetadata(one[8 : header.header_bytes]).buffers
    for at in [at for which in OFFSETS for at in range(buffers[which][0], sum(buffers[which]), 4)]:

        def change(body: bytearray, at: int = at) -> None:
            body[at : at + 4] = number.to_bytes(4, "little", signed=True)

        data = b"".join([*singles(3), resigned(one, change), *singles(3, behind)])
        together = [
            (header.base_offset, header.end_offset)
            for header, _ in rows_of(data, source="a test")
            if isinstance(header, StoredRows)
        ]
        try:
            assert is_the_same(data)
        except pa.ArrowInvalid:
            refused += 1
            assert not any(base <= 3 < end for base, end in together), "it was read by the kernel"
    assert refused


def test_every_flipped_byte_is_found() -> None:
    before, one, behind = singles(2), singles(3)[2], singles(2, base=3)
    for at in range(len(one)):
        damaged = bytearray(one)
        damaged[at] ^= 1 << at % 8
        data = b"".join([*before, damaged, *behind])
        found = read(rows_of(data, source="a test"))
        assert found == read(one_by_one(data))
        assert found[2], f"byte {at}"


def test_run_of_a_producer_whose_name_ends_in_offset_is_no_schema() -> None:
    """A schema message has that word, with a zero behind it: what followed was passed over without an error."""
    row = {"subject": "s", "key": None, "headers": None, "value": b"v"}
    data = b"".join([written("run", [row] * 3, 7, 3)[0], *singles(3, 10)])
    assert [header.base_offset for header, _ in ipc.split_messages(data, source="a test")] == [7, 10, 11, 12]
    assert is_the_same(data)


@pytest.mark.parametrize("place", ["root", "nodes"])
def test_header_whose_metadata_leads_out_of_it_has_no_form(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batches, "_forms", ())
    (one,) = singles(1)
    header, template = find_batch_line(one), MessageTemplate.of(one, 0)
    assert header is not None
    assert small_batches.learn(header, one)
    monkeypatch.setattr(small_batches, "_forms", ())
    changed = bytearray(one)
    at = 8 if place == "root" else template.nodes - 4
    changed[at : at + 4] = (0x40000000).to_bytes(4, "little")
    assert not small_batches.learn(header, changed)
    assert small_batches._forms == ()


def test_a_form_is_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batches, "_forms", ())
    for one in singles(5):
        header = find_batch_line(one)
        assert header is not None
        assert small_batches.learn(header, one)
    assert len(small_batches._forms) == 1
