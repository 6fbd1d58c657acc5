"""What an envelope claims is checked at a cost that is limited, whatever it claims."""

from __future__ import annotations

import pyarrow as pa
import pytest

from natslog.arrow.batch_metadata import BatchMetadata
from natslog.errors import InvalidRequest
from natslog.ingest import envelopes


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
