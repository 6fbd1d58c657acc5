"""The metadata of an Arrow IPC message, which describes its body: a flatbuffer, of which a few fields are read.

The places of fields are those of Arrow's Message.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from flatbuffers.table import Table

_RECORD_BATCH = 3


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

    def unpacked_bytes(self, begin: Callable[[int], bytes]) -> int:
        """The uncompressed size of the buffers of a compressed record batch; 0 if nothing is compressed. A buffer
        begins with its uncompressed length, or with -1 if it is not compressed.

        Args:
            begin: the eight bytes at a place in the message's body.
        """
        buffers, compression = self._batch.Offset(8), self._batch.Offset(10)
        total = 0
        for at in range(self._batch.VectorLen(buffers) if buffers and compression else 0):
            offset, length = struct.unpack_from("<qq", self._metadata, self._batch.Vector(buffers) + 16 * at)
            if length >= 8:
                (claimed,) = struct.unpack("<q", begin(offset))
                total += length if claimed < 0 else claimed
        return total
