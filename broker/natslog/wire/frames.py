"""The columnar frame parser: received bytes in, rows of positions out.

Theory of operation. Bytes are collected until whole frames are there; one scan of the buffer finds them all. The caller
handles the frames (views of the buffer, so at once) and the next scan begins behind them. A frame that is not whole
says how long it
will be, and nothing is scanned again until that much has come: a 64 MiB payload costs one scan, not thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from natslog.wire import kernels, plain
from natslog.wire.layout import FRAME_COLUMNS, ScanResult

Scan = Callable[[npt.NDArray[np.uint8], int, npt.NDArray[np.int64]], tuple[int, int, int, bool]]

default_scan: Scan = kernels.scan if kernels.HAVE_NUMBA else plain.scan
_ROWS_AT_ONCE = 8192


class MalformedFrame(Exception):
    """The bytes are not NATS protocol: the connection is of no more use."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Rows of `layout.FRAME_COLUMNS` over `buffer`; both are valid until the parser is asked for more."""

    buffer: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int64]

    def select(self, mask: npt.NDArray[np.bool_]) -> Frames:
        return Frames(self.buffer, self.rows[mask])


class FrameParser:
    """One per connection. `receive_data`, then exhaust `frames()`."""

    def __init__(self, scan: Scan = default_scan) -> None:
        self._scan = scan
        self._chunks: list[bytes] = []
        self._received_bytes = 0
        self._needed = 0
        self._out = np.zeros((_ROWS_AT_ONCE, FRAME_COLUMNS), np.int64)

    def receive_data(self, data: bytes) -> None:
        self._chunks.append(data)
        self._received_bytes += len(data)

    def frames(self) -> Iterator[Frames]:
        """Whole frames, a chunk at a time.

        Raises:
            MalformedFrame: what comes next is not NATS protocol.
        """
        while self._received_bytes and self._received_bytes >= self._needed:
            received = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            buffer = np.frombuffer(received, np.uint8)
            result = ScanResult(*self._scan(buffer, len(buffer), self._out))
            rest = received[result.consumed :]
            self._chunks, self._received_bytes = [rest], len(rest)
            self._needed = result.needed
            if result.frames:
                yield Frames(buffer, self._out[: result.frames])
            if result.malformed:
                raise MalformedFrame(f"not NATS protocol: {rest[:60]!r}")
            if not result.frames:
                return
