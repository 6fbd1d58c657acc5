"""The envelope: one NATS message that carries the rows of an Arrow IPC stream, all on the subject of the message.

    bytes 0 to 7    cookie, F5 6E 61 74 73 6C 6F 67: no text in UTF-8 begins with it
    byte 8          2: the rest is an Arrow IPC stream (1 is reserved)
    bytes 9 to 15   zeros
    from byte 16    an Arrow IPC stream, complete: columns value and, if wanted, key and headers

A publisher that can send headers also sends `Natslog-Envelope: arrow`: a broker then never takes it for a plain
message.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

COOKIE = b"\xf5natslog"
OPENING = COOKIE + bytes([2]) + bytes(7)
HEADER_NAME, HEADER_VALUE = "Natslog-Envelope", "arrow"
HEADER_BYTES = len(f"{HEADER_NAME}: {HEADER_VALUE}\r\n")
MAX_ROWS = 64 * 1024
"""Of one envelope."""

OPENING_ARRAY: npt.NDArray[np.uint8] = np.frombuffer(OPENING, np.uint8)


def enveloped(rows: pa.RecordBatch) -> bytes:
    """The payload that carries these rows: columns value (binary) and, if wanted, key (binary) and headers."""
    sink = pa.BufferOutputStream()
    sink.write(OPENING)
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    payload: bytes = sink.getvalue().to_pybytes()
    return payload
