"""The metadata of an Arrow IPC message, which describes its body: a flatbuffer, of which a few fields are read.

The places of fields are those of Arrow's Message.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from flatbuffers.table import Table

FIRST_BUFFERS = (0, 2, 4, 7, 10, 19)
"""The first buffer of each column of the message schema (offset, timestamp, subject, key, headers, value), in Arrow's
depth-first order.
"""
BUFFERS = 22

_RECORD_BATCH = 3
_VERSION = 4  # V5


class BatchMetadata:
    """The metadata of a message (after the eight bytes of its prefix).

    All methods raise struct.error, ValueError, TypeError or IndexError if the bytes are not valid metadata.
    """

    def __init__(self, metadata: bytes) -> None:
        self._metadata = metadata
        self._root = Table(metadata, int.from_bytes(metadata[:4], "little"))
        self.is_batch = self._number(self._root, 6, "<B") == _RECORD_BATCH
        self.body_bytes = max(0, self._number(self._root, 10, "<q"))
        self._batch = Table(metadata, self._root.Indirect(self._root.Pos + self._root.Offset(8)))

    def _number(self, table: Table, place: int, form: str) -> int:
        offset = table.Offset(place)
        return int(struct.unpack_from(form, self._metadata, table.Pos + offset)[0]) if offset else 0

    @property
    def rows(self) -> int:
        return max(0, self._number(self._batch, 4, "<q"))

    @property
    def nodes(self) -> list[tuple[int, int]]:
        """Length and null count of each field of a record batch."""
        return self._pairs(6)

    @property
    def buffers(self) -> list[tuple[int, int]]:
        """Start in the body and length, in bytes, of each buffer of a record batch."""
        return self._pairs(8)

    def _pairs(self, place: int) -> list[tuple[int, int]]:
        vector = self._batch.Offset(place)
        count = self._batch.VectorLen(vector) if vector else 0
        numbers = struct.unpack_from(f"<{2 * count}q", self._metadata, self._batch.Vector(vector)) if count else ()
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    @property
    def codec(self) -> int | None:
        """How the buffers are compressed: 0 LZ4 frames, 1 zstd; None: not at all."""
        compression = self._batch.Offset(10)
        if not compression:
            return None
        return self._number(Table(self._metadata, self._batch.Indirect(self._batch.Pos + compression)), 4, "<b")

    def column_starts(self) -> list[int]:
        """Where each column of the message schema begins in the body. Raises ValueError: it has other columns."""
        buffers = self.buffers
        if len(buffers) != BUFFERS:
            raise ValueError(f"{len(buffers)} buffers are not those of the message schema")
        return [buffers[at][0] for at in FIRST_BUFFERS]

    def set_body_bytes(self, metadata: memoryview, size_bytes: int) -> None:
        """Changes the stated length of the body in the bytes of this metadata."""
        struct.pack_into("<q", metadata, self._root.Pos + self._root.Offset(10), size_bytes)

    def unpacked_bytes(self, begin: Callable[[int], bytes]) -> int:
        """The uncompressed size of the buffers of a compressed record batch; 0 if nothing is compressed. A buffer
        begins with its uncompressed length, or with -1 if it is not compressed.

        Args:
            begin: the eight bytes at a place in the message's body.
        """
        if self._number(self._root, 4, "<h") != _VERSION:  # Arrow decompresses what an older one states elsewhere
            raise ValueError("the metadata of the message is not of Arrow's version V5")
        buffers, compression = self._batch.Offset(8), self._batch.Offset(10)
        total = 0
        for at in range(self._batch.VectorLen(buffers) if buffers and compression else 0):
            offset, length = struct.unpack_from("<qq", self._metadata, self._batch.Vector(buffers) + 16 * at)
            if length >= 8:
                (claimed,) = struct.unpack("<q", begin(offset))
                total += length if claimed < 0 else claimed
        return total
