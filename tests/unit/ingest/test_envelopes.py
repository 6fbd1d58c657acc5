"""What an envelope claims is checked at a cost that is limited, whatever it claims."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from natslog.arrow.batch_metadata import BatchMetadata
from natslog.errors import InvalidRequest
from natslog.ingest import envelopes
from natslog.ingest.columns import edges_and_data
from natslog.wire.outgoing import texts_of
from pyspark_natslog.payload.rows import Payloads


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
            envelopes._check_claims(message * 10_000, subject_bytes=5)
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
