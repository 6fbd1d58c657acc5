"""Envelopes: a NATS message whose payload holds more than a value. Bytes 0 to 7 are a cookie, F5 6E 61 74 73 6C 6F 67:
no text in UTF-8 begins with it. Byte 8 says what follows.

1: one message with its headers, from a publisher that cannot send headers

    bytes 9 to 11   zeros
    bytes 12 to 15  the size of the header block in bytes, uint32, little-endian
    from byte 16    the header block as NATS defines it (`NATS/1.0`, lines `Name: value`, an empty line), then the value

2: rows, all on the subject of the message

    bytes 9 to 15   zeros
    from byte 16    an Arrow IPC stream, complete: columns value and, if wanted, key and headers

A publisher that can send headers also sends `Natslog-Envelope: arrow` with rows: a broker then never takes them for a
plain message.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

COOKIE = b"\xf5natslog"
OPENING = COOKIE + bytes([2]) + bytes(7)
MESSAGE_OPENING = COOKIE + bytes([1]) + bytes(3)
HEADER_NAME, HEADER_VALUE = "Natslog-Envelope", "arrow"
HEADER_BYTES = len(f"{HEADER_NAME}: {HEADER_VALUE}\r\n")
MAX_ROWS = 64 * 1024
"""Of one envelope."""

OPENING_ARRAY: npt.NDArray[np.uint8] = np.frombuffer(OPENING, np.uint8)
MESSAGE_OPENING_ARRAY: npt.NDArray[np.uint8] = np.frombuffer(MESSAGE_OPENING, np.uint8)


def enveloped(rows: pa.RecordBatch) -> bytes:
    """The payload that carries these rows: columns value (binary) and, if wanted, key (binary) and headers."""
    sink = pa.BufferOutputStream()
    write_envelope(sink, rows)
    payload: bytes = sink.getvalue().to_pybytes()
    return payload


def write_envelope(sink: pa.NativeFile, rows: pa.RecordBatch) -> None:
    """As `enveloped`, to the end of a file."""
    sink.write(OPENING)
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
