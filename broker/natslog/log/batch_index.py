"""Where each batch of a segment lies: six int64 columns, 48 bytes a batch, searched by bisection."""

from __future__ import annotations

import base64
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from natslog.errors import CorruptLog
from natslog.wire.stored_layout import BASE, BODY_BYTES, END, HEADER_BYTES, NEWEST, POSITION, ROWS

_VERSIONS = {b"v1": 1, b"v2": 2}
_MOST_BATCHES, _FEWEST_BATCHES, _CLOSED_AFTER_US = 8192, 512, 30_000_000
_ROWS_OF_SMALL = 64


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One batch: offsets `[base_offset, end_offset)`, of which `rows` have a message (the others were removed); bytes
    `[position, position + length)` of its file.
    """

    base_offset: int
    end_offset: int
    rows: int
    position: int
    length: int
    max_timestamp_us: int

    @property
    def has_gaps(self) -> bool:
        return self.rows < self.end_offset - self.base_offset


class BatchIndex:
    """Batches in offset order. Only the owner appends; readers may look up published entries at any time."""

    __slots__ = ("base_offsets", "end_offsets", "lengths", "max_timestamps_us", "positions", "rows")

    def __init__(self) -> None:
        self.base_offsets = array("q")
        self.end_offsets = array("q")
        self.rows = array("q")
        self.positions = array("q")
        self.lengths = array("q")
        self.max_timestamps_us = array("q")

    def __len__(self) -> int:
        return len(self.end_offsets)  # the column appended last: what it counts is whole

    def __getitem__(self, at: int) -> BatchEntry:
        return BatchEntry(*(column[at] for column in self._columns()))

    def _columns(self) -> tuple[array[int], ...]:
        """In the order of the fields of `BatchEntry`."""
        return (
            self.base_offsets,
            self.end_offsets,
            self.rows,
            self.positions,
            self.lengths,
            self.max_timestamps_us,
        )

    def append(self, entry: BatchEntry) -> None:
        self.base_offsets.append(entry.base_offset)
        self.rows.append(entry.rows)
        self.positions.append(entry.position)
        self.lengths.append(entry.length)
        self.max_timestamps_us.append(entry.max_timestamp_us)
        self.end_offsets.append(entry.end_offset)

    def extend(self, batches: npt.NDArray[np.int64], position: int) -> None:
        """Appends the batches of a small run (`wire.small_batches`). `position`: of its first byte in the file."""
        self.base_offsets.frombytes(batches[:, BASE].tobytes())
        self.rows.frombytes(batches[:, ROWS].tobytes())
        self.positions.frombytes((batches[:, POSITION] + position).tobytes())
        self.lengths.frombytes((batches[:, HEADER_BYTES] + batches[:, BODY_BYTES]).tobytes())
        self.max_timestamps_us.frombytes(batches[:, NEWEST].tobytes())
        self.end_offsets.frombytes(batches[:, END].tobytes())

    def has(self, at: int, batches: npt.NDArray[np.int64]) -> bool:
        """Whether the batches from `at` on are these of a small run."""
        behind = at + len(batches)
        return all(
            column[at:behind].tobytes() == batches[:, number].tobytes()
            for column, number in ((self.base_offsets, BASE), (self.end_offsets, END), (self.rows, ROWS))
        )

    def first(self, count: int) -> BatchIndex:
        """A new index of the first `count` batches."""
        kept = BatchIndex()
        for column, source in zip(kept._columns(), self._columns(), strict=True):
            column.extend(source[:count])
        return kept

    def first_covering(self, offset: int) -> int:
        """Index of the first batch that ends above `offset` (its length if there is none)."""
        return bisect_right(self.end_offsets, offset, 0, len(self))

    def first_at_or_after(self, timestamp_us: int) -> int:
        """Index of the first batch whose newest message is not older than this (its length if there is none)."""
        return bisect_left(self.max_timestamps_us, timestamp_us, 0, len(self))

    @property
    def has_gaps(self) -> bool:
        """Whether messages of some offsets were removed."""
        return sum(self.rows) < sum(self.end_offsets) - sum(self.base_offsets)

    def has_many_small(self, age_us: int) -> bool:
        """Whether an active segment is closed because of its number of small batches; from a few hundred on after a
        while.

        Args:
            age_us: of its first message.
        """
        batches = len(self.end_offsets)
        if batches < (_MOST_BATCHES if age_us < _CLOSED_AFTER_US else _FEWEST_BATCHES):
            return False
        return self.end_offsets[batches - 1] - self.base_offsets[0] < _ROWS_OF_SMALL * batches

    def to_text(self) -> bytes:
        """ASCII for a footer: base64 of the columns one after another, little-endian, and a CRC32C. Version 1 has no
        number of rows: no message was removed.
        """
        version = 2 if self.has_gaps else 1
        raw = b"".join(column.tobytes() for column in self._stored_columns(version))
        return b"v%d batches=%d crc32c=%08x " % (version, len(self), crc32c(raw)) + base64.b64encode(raw)

    def _stored_columns(self, version: int) -> list[array[int]]:
        return [column for column in self._columns() if column is not self.rows or version > 1]

    @classmethod
    def from_text(cls, text: bytes, source: str) -> BatchIndex:
        """The index that `to_text` wrote.

        Raises:
            CorruptLog: it is not whole.
        """
        index = cls()
        try:
            version, batches, crc, encoded = text.split(b" ")
            count = int(batches.removeprefix(b"batches="))
            raw = base64.b64decode(encoded, validate=True)
            columns = index._stored_columns(_VERSIONS[version])
            if len(raw) != 8 * len(columns) * count or crc32c(raw) != int(crc.removeprefix(b"crc32c="), 16):
                raise ValueError("the CRC32C does not match")
        except (ValueError, KeyError) as error:
            raise CorruptLog(f"{source}: the index in the footer is damaged ({error})", file=source) from error
        for column, start in zip(columns, range(0, len(raw), 8 * count or 1), strict=False):
            column.frombytes(raw[start : start + 8 * count])
        if not index.rows:
            index.rows.extend(end - base for base, end in zip(index.base_offsets, index.end_offsets, strict=True))
        return index
