"""The header of a record-batch message, filled by numbers into a copy of one that pyarrow wrote.

Theory of operation. The flatbuffer of a record batch of one schema has one shape: only numbers in it change. So pyarrow
writes one message, the places of its numbers are looked up in the flatbuffer, and each further header is a copy in
which they are overwritten.

Source: Arrow columnar format, `Message.fbs` and `Schema.fbs`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from flatbuffers.table import Table


@dataclass(frozen=True, slots=True)
class MessageTemplate:
    """A header, and where its numbers stand: byte positions. `line`: where our own line of text begins."""

    header: bytes
    line: int
    body_length: int
    row_count: int
    nodes: int
    buffers: int

    @classmethod
    def of(cls, header: bytes, line: int) -> MessageTemplate:
        """Of the header of an encapsulated message."""
        message, batch = batch_tables(header)
        return cls(
            header,
            line,
            body_length=message.Pos + message.Offset(10),
            row_count=batch.Pos + batch.Offset(4),
            nodes=batch.Vector(batch.Offset(6)),
            buffers=batch.Vector(batch.Offset(8)),
        )

    def filled(self, rows: int, nodes: Sequence[int], buffers: Sequence[int], body_bytes: int) -> bytearray:
        """A header with these numbers.

        Args:
            nodes: length and null count of each. buffers: position and length of each, in bytes.
        """
        header = bytearray(self.header)
        struct.pack_into("<q", header, self.body_length, body_bytes)
        struct.pack_into("<q", header, self.row_count, rows)
        struct.pack_into(f"<{len(nodes)}q", header, self.nodes, *nodes)
        struct.pack_into(f"<{len(buffers)}q", header, self.buffers, *buffers)
        return header


def batch_tables(header: bytes | bytearray) -> tuple[Table, Table]:
    """The flatbuffer tables `Message` and `RecordBatch` of an encapsulated message."""
    message = Table(header, 8 + int.from_bytes(header[8:12], "little"))
    return message, Table(header, message.Indirect(message.Pos + message.Offset(8)))
