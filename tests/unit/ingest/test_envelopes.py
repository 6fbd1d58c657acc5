"""What an envelope claims is checked at a cost that is limited, whatever it claims."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from natslog.arrow.batch_metadata import BatchMetadata
from natslog.arrow.payloads import Payloads
from natslog.arrow.row_buffers import PAYLOAD_SCHEMA
from natslog.errors import InvalidRequest
from natslog.ingest import envelopes
from natslog.ingest.columns import edges_and_data
from natslog.ingest.envelopes import Envelope, split_envelopes
from natslog.ingest.message_sizes import first_larger
from natslog.wire.envelope import MAX_ROWS, enveloped
from natslog.wire.frames import FrameParser
from natslog.wire.outgoing import texts_of

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_metadata_of_few_messages_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload may consist of hundreds of thousands of messages, all of them read in the event loop."""
    read = 0

    class Counting(BatchMetadata):
        def __init__(self, metadata: bytes) -> None:
            nonlocal read
            read += 1
            super().__init__(metadata)

    monkeypatch.setattr(envelopes, "BatchMetadata", Counting)
    schema = pa.schema([("value", pa.binary())])
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"a"])}, schema=schema)
    for message in (schema.serialize().to_pybytes(), batch.serialize().to_pybytes()):
        read = 0
        with pytest.raises(InvalidRequest, match="at most 64 batches"):
            envelopes._claimed_rows(message * 10_000)
        assert read < 100


def test_offsets_in_a_buffer_of_any_length_are_read() -> None:
    """Arrow accepts it; numpy reads whole numbers only, and its error closed the connection to NATS."""
    keys = ["a", "bc", "d"]
    offsets = np.array([0, 1, 3, 4], np.int32).tobytes()
    texts = pa.Array.from_buffers(pa.binary(), 3, [None, pa.py_buffer(offsets + b"123"), pa.py_buffer(b"abcd")])
    texts.validate(full=True)
    for column in (texts, texts.slice(1)):
        edges, data = edges_and_data(column)
        assert [data[low:high].tobytes().decode() for low, high in pairwise(edges)] == keys[-len(column) :]
        assert len(texts_of(column)[0]) == len(column) + 1
        assert Payloads.of(column)[0].decode() == keys[-len(column)]
    assert edges_and_data(texts.slice(3))[0].tolist() == [0]


def opened(rows: pa.RecordBatch, subject: str = "orders", max_message_bytes: int | None = None) -> pa.RecordBatch:
    """The rows of an envelope whose message has a trace context."""
    block, payload = f"NATS/1.0\r\nTraceparent: {CONTEXT}\r\n\r\n".encode(), enveloped(rows)
    sizes = f"{len(block)} {len(block) + len(payload)}"
    parser = FrameParser()
    parser.receive_data(f"HMSG {subject} 1 {sizes}\r\n".encode() + block + payload + b"\r\n")
    (frames,) = parser.frames()
    ((received, _),) = split_envelopes(frames, max_message_bytes=max_message_bytes)
    assert isinstance(received, Envelope)
    return received.rows


def test_rows_get_the_context_unless_they_become_too_large_for_the_stream() -> None:
    """The context takes 82 bytes with a header block, and 70 where there is one; this own header takes 18 with it."""
    own, context = {"key": "a", "value": "b"}, {"key": "traceparent", "value": CONTEXT}
    given = [None, None, None, [own], [own]]
    values = [b"x" * size for size in (18, 19, 100, 12, 13)]
    columns = {"value": pa.array(values), "headers": pa.array(given, PAYLOAD_SCHEMA.field("headers").type)}
    rows = opened(pa.RecordBatch.from_pydict(columns), max_message_bytes=100)
    assert rows.column("headers").to_pylist() == [[context], None, None, [own, context], [own]]
    assert first_larger(rows, 100) is None
    assert first_larger(rows, 99) == (0, 100)


def test_envelope_that_is_full_is_stored_without_its_context() -> None:
    subject = "s" * 150
    rows = pa.RecordBatch.from_pydict({"value": pa.array([b"x"] * MAX_ROWS)})
    assert opened(rows, subject).column("headers").null_count == MAX_ROWS
    assert opened(rows, "s").column("headers").null_count == 0
