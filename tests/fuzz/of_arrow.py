"""Arrow IPC from clients and disks: uploads, the metadata of messages, batches with their CRCs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
from collections.abc import Iterator

import pyarrow as pa
from crc32c import crc32c

from natslog.arrow import ipc
from natslog.arrow.batch_line import BatchHeader
from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.row_buffers import PAYLOAD_SCHEMA, RowBuffers, offsets_of
from natslog.arrow.run_marks import RunMark
from natslog.errors import CorruptLog, InvalidRequest
from natslog.ingest.staged_rows import BYTES_PER_ROW, GROUPED_ROWS, RowRules, claimed_bytes, read_rows, regrouped
from natslog.subjects import cover
from natslog.wire import small_batches
from natslog.wire.row_hashes import row_hashes
from tests.fuzz import edits
from tests.fuzz.of_imports import signed
from tests.fuzz.scratch import SCRATCH
from tests.fuzz.target import target
from tests.unit.client.test_answers import stored
from tests.unit.ingest.test_staged_rows import stream_of, values

# ---- uploads ----

_RULES = (RowRules(("orders.>",), "orders.new"), RowRules(("orders.*", "returns.*"), None))
_MOST_CLAIMED_BYTES = 16 * 1024 * 1024


@functools.cache
def _uploads() -> list[bytes]:
    subjects, headers = ["orders.new", "orders.old"], PAYLOAD_SCHEMA.field("headers").type
    full = pa.RecordBatch.from_pydict(
        {
            "value": pa.array([b"a", b"bb"], pa.binary()),
            "subject": pa.array(subjects),
            "key": pa.array([None, b"k"], pa.binary()),
            "headers": pa.array([[{"key": "Trace", "value": "x"}], None], headers),
        }
    )
    large = pa.RecordBatch.from_pydict({"value": pa.array(["é", "b"], pa.large_string()), "subject": subjects})
    streams = [stream_of(values(3)), stream_of(full, full), stream_of(large), stream_of(values(2), values(0))]
    return [*streams, *(stream_of(full, compression=codec) for codec in ("zstd", "lz4"))]


def _upload_seeds() -> Iterator[bytes]:
    for rules, upload in itertools.product((0, 1), _uploads()):
        yield bytes([rules]) + upload


@target(
    "uploads", _upload_seeds, [b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\0\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\0\x80"]
)
def check_uploads(data: bytes) -> None:
    """An upload is refused (InvalidRequest), or its rows are valid, fit the stream, and take no more memory than its
    headers claim.
    """
    rules, upload = _RULES[(data[0] if data else 0) % len(_RULES)], data[1:]
    path = SCRATCH / "upload"
    path.write_bytes(upload)
    try:
        claimed = claimed_bytes(path, "the upload")
        assert claimed >= 0
        if claimed > _MOST_CLAIMED_BYTES:  # refused before it is read
            return
        batches = list(read_rows(path, crc32c(upload), rules, "the upload"))
    except InvalidRequest:
        return
    taken = 0
    for batch in batches:
        assert batch.schema.equals(PAYLOAD_SCHEMA)
        batch.validate(full=True)
        assert batch.column("value").null_count == batch.column("subject").null_count == 0
        subjects = set(batch.column("subject").to_pylist())
        assert all(cover(rules.covered_by, subject) for subject in subjects)
        default_bytes = batch.column("subject").nbytes if rules.default_subject in subjects else 0
        taken += batch.nbytes - default_bytes + BYTES_PER_ROW * batch.num_rows
        hashes = row_hashes(*(batch.column(name) for name in ("subject", "value", "key", "headers")))
        assert len(hashes) == batch.num_rows
    # Validity and 32-bit offsets are made for columns that come without them.
    rows = sum(batch.num_rows for batch in batches)
    assert taken <= claimed + 32 * rows + 1024 * len(batches), f"{taken} bytes were read, {claimed} were claimed"
    grouped = list(regrouped(batches))
    for batch in grouped:
        _check_buffers(RowBuffers.of(batch))
    assert sum(batch.num_rows for batch in grouped) == rows
    assert all(batch.num_rows <= GROUPED_ROWS for batch in grouped)


def _check_buffers(rows: RowBuffers) -> None:
    """What is appended is what `RowBuffers` promises: buffers of the exact length."""
    stored = rows.to_arrow()
    stored.validate(full=True)
    for column in (stored.column("subject"), stored.column("key"), stored.column("value")):
        validity, offsets, data = column.buffers()
        assert validity is None or validity.size == (rows.rows + 7) // 8, f"{validity.size} bytes of validity"
        assert offsets.size == 4 * (rows.rows + 1), f"{offsets.size} bytes of offsets for {rows.rows} rows"
        assert (data.size if data else 0) == offsets_of(column)[-1], f"{data.size} bytes of texts"


# ---- metadata ----


def _metadata() -> Iterator[bytes]:
    for upload in _uploads():
        at = 0
        while (size := int.from_bytes(upload[at + 4 : at + 8], "little")) > 0:
            metadata = upload[at + 8 : at + 8 + size]
            yield metadata
            at += 8 + size + BatchMetadata(metadata).body_bytes


_UNREADABLE = (struct.error, ValueError, TypeError, IndexError)


@target("metadata", _metadata, [b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xfc\xff\xff\xff", b"\4\0\0\0"])
def check_metadata(data: bytes) -> None:
    """The metadata of a message is read, or one of the four documented errors is raised; no size in it is negative, and
    the sum of uncompressed sizes is limited by what is stated.
    """
    try:
        metadata = BatchMetadata(data)
    except _UNREADABLE:
        return
    assert metadata.body_bytes >= 0
    for read in (
        lambda: metadata.rows >= 0,
        lambda: isinstance(metadata.nodes, list),
        lambda: isinstance(metadata.buffers, list),
        lambda: metadata.codec is None or -128 <= metadata.codec < 128,
        lambda: isinstance(metadata.column_starts(), list),
        lambda: metadata.unpacked_bytes(lambda _: struct.pack("<q", 1 << 40)) >= 0,
    ):
        with contextlib.suppress(*_UNREADABLE):
            assert read()


# ---- batches ----


@functools.cache
def _batches() -> list[bytes]:
    """Runs of stored batches, as replicas and clients receive them."""
    marked = [_encoded(4, RunMark("query-1", 7, 4, 8, 5)), _encoded(6, RunMark("query-1", 7, 4, 8, 5))]
    old = [bytes(_encoded(0, None, 1)), bytes(_encoded(2, RunMark("q", 0, 2, 4), 1))]
    return [
        b"".join(map(bytes, (stored(0, 3), stored(3, 1)))),
        b"".join(bytes(stored(base, 1)) for base in range(5)),
        b"".join(map(bytes, marked)),
        ipc.schema_message() + b"".join(old) + ipc.END_OF_STREAM,
    ]


def _encoded(base: int, run: RunMark | None, batch_format: int = 2) -> memoryview:
    batch = ipc.decode_batch(stored(base, 2))
    return ipc.encode_batch(
        batch, base_offset=base, epoch=3, max_timestamp_us=9, run=run, batch_format=batch_format, stats=b"{}"
    )


@functools.cache
def _written() -> list[dict[bytes, BatchHeader]]:
    """Of each run: its batches and what their headers state."""
    return [
        {bytes(message): header for header, message in ipc.split_messages(run, source="seed")} for run in _batches()
    ]


def _one_by_one(data: bytes) -> Iterator[tuple[BatchHeader, pa.RecordBatch]]:
    for header, message in ipc.split_messages(data, source="a test"):
        yield header, ipc.decode_batch(message)


def _read(batches: Iterator[tuple[object, pa.RecordBatch]]) -> tuple[list[dict[str, object]], str]:
    rows: list[dict[str, object]] = []
    try:
        for _, batch in batches:
            rows += batch.to_pylist()
    except CorruptLog as error:
        return rows, error.message
    return rows, ""


@target("small-batches", lambda: edits.seeds([bytes(stored(1, 2))]))
def check_small_batches(script: bytes) -> None:
    """Small batches with valid CRCs are read as one as they are one by one, if Arrow accepts them; what leads out of a
    batch is not followed.
    """
    changed = signed(edits.edited(script, [bytes(stored(1, 2))]))
    data = b"".join((bytes(stored(0, 1)), changed, bytes(stored(3, 1)), bytes(stored(4, 1))))
    with contextlib.suppress(*_UNREADABLE):
        if BatchMetadata(changed[8:]).codec is not None:
            return  # Arrow takes the memory that a compressed batch claims
    try:
        for _, batch in _one_by_one(data):
            batch.validate(full=True)
        is_valid = True
    except (CorruptLog, pa.ArrowException, OSError, *_UNREADABLE):
        is_valid = False
    if is_valid:
        assert _read(small_batches.rows_of(data, source="a test")) == _read(_one_by_one(data)), "as one, they differ"
        return
    with contextlib.suppress(CorruptLog, pa.ArrowException, OSError, *_UNREADABLE):
        for header, batch in small_batches.rows_of(data, source="a test"):
            if isinstance(header, small_batches.StoredRows):
                batch.validate()


@target("batches", lambda: edits.seeds(_batches()))
def check_batches(script: bytes) -> None:
    """Of bytes that were changed, cut, repeated or moved, no batch is accepted that was not written, and no header
    states what it did not state; all else is CorruptLog. Small batches that are read as one have the same rows.
    """
    data = edits.edited(script, _batches())
    assert _read(small_batches.rows_of(data, source="a test")) == _read(_one_by_one(data)), "as one, they differ"
    written = {message: header for run in _written() for message, header in run.items()}
    for view in (data, memoryview(data)):
        try:
            for header, message in ipc.split_messages(view, source="a test"):
                assert written.get(bytes(message)) == header, "a batch was accepted that was not written"
        except CorruptLog:
            pass
    headers = {message[: header.header_bytes] for message, header in written.items()}
    for at in range(0, len(data), 8):
        if data[at : at + 4] == b"\xff\xff\xff\xff":
            window = data[at : at + ipc.MAX_HEADER_BYTES]
            found = ipc.proven_header(window)
            assert found is None or window[: found.header_bytes] in headers, (
                "a header was accepted that was not written"
            )
            ipc.find_batch_line(window)
