"""Neighbouring batches of a log as one: tiny commits when a segment is sealed, and batches of which few rows are left.

A merged batch has up to 64 Ki rows and 8 MiB, unless one of its batches alone has more, and rows of one leader epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from natslog.arrow import ipc
from natslog.arrow.run_marks import RunMark
from natslog.wire.small_batches import StoredHeader

Stored: TypeAlias = tuple[StoredHeader, pa.RecordBatch, ipc.PackedIds | None]
"""What stored batches state, their rows, and the packed ids of these."""

MERGED_ROWS = 64 * 1024
MERGED_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Merged:
    """Rows that become one batch, of the offsets `[base_offset, end_offset)`."""

    base_offset: int
    end_offset: int
    max_timestamp_us: int
    rows: pa.RecordBatch
    packed_ids: ipc.PackedIds | None
    epoch: int
    run: RunMark | None
    batch_format: int

    def encoded(self, *, compression: str | None = None, stats: bytes | None = None) -> memoryview:
        """As one encapsulated message."""
        return ipc.encode_batch(
            self.rows,
            base_offset=self.base_offset,
            end_offset=self.end_offset,
            epoch=self.epoch,
            max_timestamp_us=self.max_timestamp_us,
            compression=compression,
            stats=stats,
            run=self.run,
            packed_ids=self.packed_ids,
            batch_format=self.batch_format,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows that one batch adds."""

    header: StoredHeader
    rows: pa.RecordBatch
    packed_ids: ipc.PackedIds | None


class Merging:
    """Neighbouring batches of one epoch that will be one. `size_bytes`: of those that wait, about."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._rows = self.size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def has_room_for(self, epoch: int, rows: int, size_bytes: int) -> bool:
        if not self._parts:
            return True
        fits = self._rows + rows <= MERGED_ROWS and self.size_bytes + size_bytes <= MERGED_BYTES
        return fits and epoch == self._parts[0].header.epoch

    def add(
        self, header: StoredHeader, rows: pa.RecordBatch, packed_ids: ipc.PackedIds | None, size_bytes: int
    ) -> None:
        """Rows of the batch with this header: all, or some."""
        self._parts.append(_Part(header, rows, packed_ids))
        self._rows += rows.num_rows
        self.size_bytes += size_bytes

    def taken(self, end_offset: int | None = None, max_timestamp_us: int = 0) -> Iterator[Merged]:
        """What waits, if anything; nothing waits then.

        Args:
            end_offset, max_timestamp_us: where the next batch begins, if messages behind the last batch were removed,
                and the time of the newest message before it, as far as it is known.
        """
        if not self._parts:
            return
        parts, self._parts, self._rows, self.size_bytes = self._parts, [], 0, 0
        first, last = parts[0].header, parts[-1].header
        end_offset = last.end_offset if end_offset is None else end_offset
        rows = concat([part.rows for part in parts])
        has_gaps = rows.num_rows < end_offset - first.base_offset
        yield Merged(
            first.base_offset,
            end_offset,
            max(last.max_timestamp_us, max_timestamp_us),
            rows,
            _joined_ids(parts),
            first.epoch,
            first.run,
            ipc.LATEST_FORMAT if has_gaps else max(part.header.batch_format for part in parts),
        )


def stored(message: bytes | memoryview) -> tuple[ipc.BatchHeader, pa.RecordBatch, ipc.PackedIds | None]:
    """A proven message."""
    header = ipc.proven_header(message[: ipc.MAX_HEADER_BYTES])
    assert header is not None, "these messages are proven"
    return header, ipc.decode_batch(message), ipc.packed_ids_of(header, message)


def merge(batches: Iterable[Stored]) -> Iterator[Merged]:
    """Neighbouring batches of one epoch as one batch; a batch of a run stays one by itself."""
    merging = Merging()
    for header, rows, packed_ids in batches:
        size_bytes = rows.nbytes  # not as stored: batches may be compressed
        if header.run is not None or not merging.has_room_for(header.epoch, header.rows, size_bytes):
            yield from merging.taken()
        merging.add(header, rows, packed_ids, size_bytes)
        if header.run is not None:
            yield from merging.taken()
    yield from merging.taken()


def concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all rows (the batch itself where there is one)."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _joined_ids(parts: list[_Part]) -> ipc.PackedIds | None:
    if all(part.packed_ids is None for part in parts):
        return None
    none = np.zeros((max(part.rows.num_rows for part in parts), ipc.ID_BYTES), np.uint8)
    return np.concatenate(
        [none[: part.rows.num_rows] if part.packed_ids is None else part.packed_ids for part in parts]
    )
