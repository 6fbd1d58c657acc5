"""Frames of a consumer of JetStream as columns, and the batches that they become."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from natslog.arrow import ipc
from natslog.arrow.restamping import checked_batches
from natslog.errors import MigrationFailed
from natslog.ingest.batches import BatchBuilder
from natslog.log.batch_encoder import encode_rows_at
from natslog.migration.receiving import _statuses, gap, numbers_of
from natslog.wire.frames import FrameParser, Frames

V1 = "$JS.ACK.ORDERS.natslog-1.1.{seq}.{number}.{time}.{pending}"
V2 = "$JS.ACK.hub.ACCOUNT.ORDERS.natslog-1.1.{seq}.{number}.{time}.{pending}.random"


def frames_of(data: bytes) -> Frames:
    parser = FrameParser()
    parser.receive_data(data)
    (found,) = parser.frames()
    return found


def message(subject: str, reply: str, value: bytes = b"x", headers: bytes = b"") -> bytes:
    if headers:
        head = f"HMSG {subject} 1 {reply} {len(headers)} {len(headers) + len(value)}\r\n".encode()
        return head + headers + value + b"\r\n"
    return f"MSG {subject} 1 {reply} {len(value)}\r\n".encode() + value + b"\r\n"


@pytest.mark.parametrize("form", [V1, V2])
def test_numbers_of_replies_of_both_forms_are_parsed(form: str) -> None:
    replies = [
        form.format(seq=5 + at, number=1 + at, time=1_700_000_000_123_456_789, pending=2 - at) for at in range(3)
    ]
    found = numbers_of(frames_of(b"".join(message("orders.a", reply) for reply in replies)))
    assert found.seqs.tolist() == [5, 6, 7]
    assert found.consumer_seqs.tolist() == [1, 2, 3]
    assert set(found.times_us.tolist()) == {1_700_000_000_123_456}
    assert found.pending.tolist() == [2, 1, 0]


def test_numbers_of_other_replies_are_refused() -> None:
    with pytest.raises(MigrationFailed, match="not the one of a consumer"):
        numbers_of(frames_of(message("a", "_INBOX.x")))


def test_only_what_is_sent_to_the_inbox_is_a_status() -> None:
    heartbeat = b"NATS/1.0 100 Idle Heartbeat\r\n\r\n"
    reply = V1.format(seq=1, number=1, time=1, pending=0)
    data = (
        message("_INBOX.a", "$JS.FC.x", b"", heartbeat)
        + message("_INBOX.b", reply, b"", heartbeat)  # a message of the same length, with such headers
        + message("_INBOX.a", reply, b"x", heartbeat)
    )
    assert _statuses(frames_of(data), b"_INBOX.a").tolist() == [True, False, False]


def test_rows_at_offsets_are_the_batch_that_pyarrow_writes() -> None:
    reply = V1.format(seq=1, number=1, time=1, pending=0)
    builder = BatchBuilder()
    builder.add(frames_of(b"".join(message("orders.a", reply, b"%d" % at) for at in range(4))), packs_ids=False)
    offsets, times = np.array([10, 12, 13, 19]), np.array([5, 6, 6, 9])
    encoded = encode_rows_at(
        builder.taken().rows, offsets, times, base_offset=9, end_offset=22, max_timestamp_us=9, epoch=3
    )
    found = b"".join(encoded.pieces)
    batch = ipc.decode_batch(found)
    assert batch.column("offset").to_pylist() == offsets.tolist()
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == times.tolist()
    expected = ipc.encode_batch(batch, base_offset=9, end_offset=22, epoch=3, max_timestamp_us=9)
    assert found == bytes(expected)
    ((header, _),) = checked_batches(found, ("orders.*",))
    assert (header.base_offset, header.end_offset, header.rows, header.epoch) == (9, 22, 4, 3)


def test_gap_is_a_batch_that_imports_accept() -> None:
    ((header, _),) = checked_batches(gap(5, 1_000_000, 7), (">",))
    assert (header.base_offset, header.end_offset, header.rows, header.max_timestamp_us) == (5, 1_000_000, 0, 7)
