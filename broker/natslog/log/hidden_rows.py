"""Leaves hidden rows out of a read plan while it is made, so that everything behind it handles stored batches only.

Theory of operation. A batch without hidden rows stays what it is: a range of its file, sent by sendfile. A batch with
some is read and proven, and the rows that are left of it and of its neighbours become one batch (`merging`); many small
ones are handled together (`SmallRuns`). Batches of which all rows are hidden are not read. What is made goes to an
unnamed file in memory, which the plan holds as it holds the files of segments. Small untouched batches between made
ones are copied there too: so a plan consists of few ranges.

Invariant. The batches of a plan are contiguous, whatever is hidden: an offset without a batch is lost.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.arrow import ipc
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.cluster.epochs import NO_EPOCH
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.checked_file import write_all
from natslog.log.merging import Merging, stored
from natslog.log.read_plan import FileRange, ReadPlan
from natslog.log.removed import AllBut, Hidden
from natslog.log.segment import read_batch
from natslog.log.small_runs import SmallRuns
from natslog.wire.small_batches import SmallRun, StoredHeader

_MOST_READ_BYTES = 64 * 1024 * 1024
_MOST_MADE_BYTES = 8 * 1024 * 1024
"""A plan ends when so many bytes were read to leave rows out, or so many were made."""
_COPIED_BYTES = 256 * 1024
_MOST_CLEAN = 100_000
_FEW_OFFSETS = 64  # of a batch on average: hidden ones are counted for all batches together
_clean: dict[tuple[Path, int], tuple[object, ...]] = {}
"""By file and position: which file it was, and a batch of it without hidden rows, with how many hidden offsets."""
_MADE = Path("(messages in memory)")
_NO_ROWS = pa.RecordBatch.from_arrays([pa.nulls(0, one.type) for one in MESSAGE_SCHEMA], schema=MESSAGE_SCHEMA)


@dataclass(slots=True)
class _Void:
    """Offsets without a visible message that are not in the plan yet."""

    start: int
    end: int
    timestamp_us: int


class Hiding:
    """Of one plan; `close` it before the plan is used.

    Args:
        max_bytes: of the plan, about.
    """

    def __init__(self, plan: ReadPlan, removed: Hidden, max_bytes: int) -> None:
        self._plan, self._removed, self._max_bytes = plan, removed, max_bytes
        self._read_bytes = 0
        self._is_of_view = isinstance(removed, AllBut)
        self._merging = Merging()
        self._void: _Void | None = None  # behind what is being merged
        self._fd = -1
        self._file: tuple[int, ...] = ()  # which one the last range is of
        self._size_bytes = self._planned_bytes = 0  # of what is made, and of that in the plan
        self._index = BatchIndex()
        self._first = 0  # of the made batches that are not in the plan yet

    @property
    def room_bytes(self) -> int:
        """About how many more bytes may be read."""
        waiting_bytes = self._size_bytes - self._planned_bytes + self._merging.size_bytes
        return min(
            _MOST_READ_BYTES - self._read_bytes,
            _MOST_MADE_BYTES - self._size_bytes - self._merging.size_bytes,
            self._max_bytes - self._plan.length - waiting_bytes,
        )

    def pass_over(self, start: int, end: int, timestamp_us: int) -> None:
        """All of `[start, end)` is hidden; the newest message up to there is of this time, or older."""
        if self._void is None:
            self._void = _Void(start, end, timestamp_us)
        else:
            self._void.end, self._void.timestamp_us = end, max(timestamp_us, self._void.timestamp_us)

    def hide_in_last(self) -> None:
        """In the range that was added to the plan last. The plan may end within it.

        Raises:
            CorruptLog: a batch with hidden rows is not what was written.
        """
        piece = self._plan.ranges[-1]
        file = os.fstat(piece.fd)
        self._file = (file.st_ino, file.st_size, file.st_mtime_ns)
        touched = self._touched(piece)
        if not touched.any() and not self._waits:
            return
        self._plan.ranges.pop()
        at, runs = piece.first, SmallRuns(piece.fd, piece.position + piece.length)
        try:
            while at < piece.last and self.room_bytes > 0:
                if touched[at - piece.first]:
                    at = self._make(piece, at, runs)
                    continue
                following = np.flatnonzero(touched[at - piece.first :])
                at = self._keep(piece, at, at + int(following[0]) if len(following) else piece.last, runs)
        finally:
            if at < piece.last:
                self._plan.next_offset = max(self._plan.start, piece.index.base_offsets[at])
            os.close(piece.fd)

    def _touched(self, piece: FileRange) -> npt.NDArray[np.bool_]:
        """Of each batch: whether a row may be hidden that it still has. Of a view every message has a row. Otherwise
        offsets without a row are hidden too, or were removed before an import: a batch is read once to find out.
        """
        index, which = piece.index, slice(piece.first, piece.last)
        starts, ends, rows = (np.array(one[which]) for one in (index.base_offsets, index.end_offsets, index.rows))
        if piece.end - piece.start > _FEW_OFFSETS * piece.batches:
            hidden = np.array([self._removed.count(*one) for one in zip(starts.tolist(), ends.tolist(), strict=True)])
        else:
            gone = self._removed.offsets_within(piece.start, piece.end)
            hidden = np.searchsorted(gone, ends) - np.searchsorted(gone, starts)
        found: npt.NDArray[np.bool_] = (rows > 0) & (hidden > 0)
        if self._is_of_view:
            found &= rows != ends - starts - hidden
            return found
        for at in np.flatnonzero(found).tolist() if _clean else ():
            entry = index[piece.first + at]
            found[at] = _clean.get((piece.path, entry.position)) != (self._file, entry, int(hidden[at]))
        return found

    def _note_clean(self, piece: FileRange, entry: BatchEntry, hidden: int) -> None:
        """None of its rows is among the `hidden` offsets of it; until more are hidden."""
        if not self._is_of_view:
            if len(_clean) >= _MOST_CLEAN:
                _clean.clear()
            _clean[piece.path, entry.position] = self._file, entry, hidden

    @property
    def _waits(self) -> bool:
        """Whether something is made that is not in the plan yet."""
        return self._first < len(self._index) or bool(self._merging) or self._void is not None

    def _make(self, piece: FileRange, first: int, runs: SmallRuns) -> int:
        """A batch without its hidden rows; small ones behind it, too. Returns the next one."""
        if (run := runs.at(piece.index.positions[first])) is not None:
            self._read_bytes += run.end
            self._merge_run(run)
            return first + len(run.batches)
        entry = piece.index[first]
        known = self._removed.count(entry.base_offset, entry.end_offset)  # before: more may be hidden meanwhile
        if known == entry.end_offset - entry.base_offset:
            self.pass_over(entry.base_offset, entry.end_offset, entry.max_timestamp_us)
            return first + 1
        header, batch, ids, message = self._read(piece, entry)
        runs.note(header, message)
        hidden = self._removed.marks(batch.column("offset").to_numpy())
        if not hidden.any():
            self._note_clean(piece, entry, known)
        self._merge(header, batch, ids, ~hidden)
        return first + 1

    def _merge_run(self, run: SmallRun) -> None:
        batch = run.rows()
        hidden = self._removed.marks(batch.column("offset").to_numpy())
        self._merge(run.stated, batch, run.packed_ids(), ~hidden)

    def _keep(self, piece: FileRange, first: int, last: int, runs: SmallRuns) -> int:
        """Untouched batches: as they are, or copied where they are few between made ones. Returns the next one."""
        kept = FileRange(piece.fd, piece.path, piece.index, first, last)
        if not self._waits or kept.length >= _COPIED_BYTES:
            self._flush()
            self._plan.ranges.append(FileRange(os.dup(piece.fd), piece.path, piece.index, first, last))
            return last
        while first < last:
            if (run := runs.at(piece.index.positions[first])) is not None:
                self._read_bytes += run.end
                self._merge_run(run)
                first += len(run.batches)
                continue
            header, batch, ids, message = self._read(piece, piece.index[first])
            runs.note(header, message)
            self._merge(header, batch, ids, None)
            first += 1
        return first

    def _read(
        self, piece: FileRange, entry: BatchEntry
    ) -> tuple[ipc.BatchHeader, pa.RecordBatch, ipc.PackedIds | None, bytes]:
        message = read_batch(piece.fd, entry, piece.path)
        self._read_bytes += len(message)
        return (*stored(message), message)

    def _merge(
        self,
        header: StoredHeader,
        batch: pa.RecordBatch,
        ids: ipc.PackedIds | None,
        kept: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Rows of proven batches, with the rows before them. `kept`: which of the rows; None: all."""
        if kept is not None and not kept.all():
            if not kept.any():
                self.pass_over(header.base_offset, header.end_offset, header.max_timestamp_us)
                return
            batch = batch.filter(pa.array(kept))
            ids = None if ids is None else ids[kept]
        size_bytes = batch.nbytes  # stored batches may be compressed
        if not self._merging.has_room_for(header.epoch, batch.num_rows, size_bytes):
            self._end_merging()
        if not self._merging and self._void is not None:
            header, self._void = replace(header, base_offset=self._void.start), None
        self._void = None  # within the merged batch
        self._merging.add(header if header.run is None else replace(header, run=None), batch, ids, size_bytes)

    def _end_merging(self) -> None:
        """What is being merged, with the offsets without a message behind it, or these alone."""
        void, self._void = self._void, None
        if self._merging:
            upto = (None, 0) if void is None else (void.end, void.timestamp_us)
            for merged in self._merging.taken(*upto):
                entry = BatchEntry(
                    merged.base_offset, merged.end_offset, merged.rows.num_rows, 0, 0, merged.max_timestamp_us
                )
                self._write(merged.encoded(), entry)
        elif void is not None:
            message = ipc.encode_batch(
                _NO_ROWS,
                base_offset=void.start,
                end_offset=void.end,
                epoch=NO_EPOCH,
                max_timestamp_us=void.timestamp_us,
            )
            self._write(message, BatchEntry(void.start, void.end, 0, 0, 0, void.timestamp_us))

    def _write(self, message: memoryview, entry: BatchEntry) -> None:
        """`entry`: of the batch, without its place."""
        if self._fd < 0:
            self._fd = _unnamed_file()
        write_all(self._fd, [message])
        self._index.append(replace(entry, position=self._size_bytes, length=len(message)))
        self._size_bytes += len(message)

    def _flush(self) -> None:
        """What was made is in the plan now."""
        self._end_merging()
        if self._first < len(self._index):
            path = self._plan.ranges[-1].path if self._plan.ranges else _MADE
            last = len(self._index)
            self._plan.ranges.append(FileRange(os.dup(self._fd), path, self._index, self._first, last))
            self._first, self._planned_bytes = last, self._size_bytes

    def close(self) -> None:
        try:
            self._flush()
        finally:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("natslog", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
