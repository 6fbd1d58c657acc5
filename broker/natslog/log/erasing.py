"""Erasure: messages whose bytes are removed from all files of a log soon, however few they are.

Theory of operation. A record of the companion log names the offsets (`ErasedOffsets`), which hides them on every
replica. Each replica then writes the sealed segments that have these rows again, one after another, without waiting
until that frees much space; the open segment is rolled and sealed before. If a subject is erased, its rows are dropped
whole: all of them are hidden, so no older one can return. If a key is erased, offset, timestamp and subject of its rows
stay, because they count for a limit per subject; key, headers and value are emptied. Rewriting in the ordinary course
drops these rows when they no longer count. At last the texts that only erased rows had are removed from the file
`newest`.

What was done is stored in the file `erasures` beside the log: a rewritten file stands there before it takes the place
of the former one. An erasure stands there as complete when no file of the log has its bytes any more.

Invariant. A log that is cut below the end of an erasure, and fetched again, is checked again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from natslog.arrow import ipc
from natslog.errors import CorruptLog
from natslog.log.chain import SegmentChain
from natslog.log.checked_file import read_record, write_checked
from natslog.log.merging import merge, stored
from natslog.log.removed import from_bytes, marks_among, offset_range, to_array, to_bytes
from natslog.log.sealed import SealedSegment, Written, write_beside
from natslog.log.segment import ActiveSegment, open_segment, read_batch
from natslog.log_events import event

logger = logging.getLogger("natslog.log")

_FILE, _VERSION = "erasures", 1
_MOST_RECEIPTS = 1000

Erases = Literal["subject", "key"]
"""What was named: it determines whether rows are dropped, or emptied."""


class ErasedOffsets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record of the companion log: some, or all, of the offsets of an erasure. The text that was named is in no
    record.

    Attributes:
        below: the high watermark when it was requested. `messages`: how many rows were stored then, of all its records.
        offsets: a bitmap; also of rows whose text is known although they are not stored any more.
    """

    id: str
    erases: Erases
    below: int
    requested_us: int
    messages: int
    offsets: bytes

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def bitmap(self, source: str) -> BitMap64:
        """Raises CorruptLog."""
        return from_bytes(self.offsets, source)

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> ErasedOffsets:
        """Raises CorruptLog: it is no such record, or one of a newer version."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise CorruptLog(f"{source}: the record of an erasure cannot be read ({error})") from error


class RewrittenFile(msgspec.Struct, frozen=True, kw_only=True):
    """`rows`: how many it had that were dropped or emptied."""

    name: str
    bytes_before: int
    bytes_after: int
    rows: int
    at_us: int


class LogReceipt(msgspec.Struct, kw_only=True):
    """What an erasure has changed in one log. `completed_us`: 0 while it is not complete. `offsets`: how many it had
    when it was complete; with more of them, from a further record, it is not.
    """

    files: list[RewrittenFile] = []
    completed_us: int = 0
    offsets: int = 0


class _Stored(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    receipts: dict[str, LogReceipt]


@dataclass(slots=True)
class Erasure:
    """One that is known here, of all its records."""

    id: str
    erases: Erases
    below: int
    requested_us: int
    messages: int
    offsets: BitMap64 = field(default_factory=BitMap64)

    def to_bytes(self) -> bytes:
        """As one record."""
        return ErasedOffsets(
            id=self.id,
            erases=self.erases,
            below=self.below,
            requested_us=self.requested_us,
            messages=self.messages,
            offsets=to_bytes(self.offsets),
        ).to_bytes()


def _joined(erasures: Sequence[Erasure]) -> Iterator[Erasure]:
    """The oldest ones, of which no receipt is kept: one of each kind stands for all of them."""
    for erases in ("subject", "key"):
        alike = [one for one in erasures if one.erases == erases]
        if alike:
            offsets = BitMap64.union(*(one.offsets for one in alike))
            below, messages = max(one.below for one in alike), sum(one.messages for one in alike)
            yield Erasure(f"earlier-{erases}", alike[0].erases, below, alike[-1].requested_us, messages, offsets)


@dataclass(frozen=True, slots=True)
class ErasedRows:
    """The rows of several erasures: those that are dropped, and those that are emptied. `ids`: of the erasures.
    `below`: their rows are below. `serial`: rises with each change of what is to be erased.
    """

    dropped: BitMap64
    emptied: BitMap64
    ids: tuple[str, ...]
    below: int
    serial: int

    @property
    def all(self) -> BitMap64:
        return self.dropped | self.emptied

    def concerns(self, start: int, end: int) -> bool:
        return bool(self.dropped.range_cardinality(start, end) or self.emptied.range_cardinality(start, end))


class Erasures:
    """Those of one log. Thread-safe. `is_pending`: whether one is not complete here."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._lock = threading.Lock()
        self._known: dict[str, Erasure] = {}
        self._receipts = self._read()
        self._serial = 0
        self.is_pending = False

    def _read(self) -> dict[str, LogReceipt]:
        """Damaged: the segments are checked again."""
        try:
            stored = read_record(self._path, _FILE, _VERSION, _Stored)
        except CorruptLog as error:
            logger.error(
                f"{error.message}. The erasures of the stream are checked again", extra=event("log.file_damaged")
            )
            stored = None
        return {} if stored is None else stored.receipts

    def _store(self) -> None:
        """Under the lock. Raises OSError."""
        newest = dict(list(self._receipts.items())[-_MOST_RECEIPTS:])
        write_checked(self._path, _FILE, _VERSION, msgspec.to_builtins(_Stored(receipts=newest)))

    # ---- what is to be erased ----

    @property
    def serial(self) -> int:
        """Rises with each change of what is to be erased."""
        return self._serial

    def add(self, record: ErasedOffsets, source: str) -> None:
        """A committed record; it may be given again. Raises CorruptLog."""
        offsets = record.bitmap(source)
        with self._lock:
            known = self._known.get(record.id)
            if known is None:
                known = self._known[record.id] = Erasure(
                    record.id, record.erases, record.below, record.requested_us, record.messages
                )
                self._receipts.setdefault(record.id, LogReceipt())
            if not offsets <= known.offsets:
                known.offsets |= offsets
                known.below = max(known.below, record.below)
                self._serial += 1
                receipt = self._receipts[record.id]
                if len(known.offsets) > receipt.offsets:
                    receipt.completed_us = 0
            self._note_pending()

    def _note_pending(self) -> None:
        """Under the lock."""
        self.is_pending = any(not self._receipts[one].completed_us for one in self._known)

    def pending(self) -> ErasedRows | None:
        """What is not complete here."""
        with self._lock:
            waiting = [one for one in self._known.values() if not self._receipts[one.id].completed_us]
            return self._rows_of(waiting) if waiting else None

    def all_rows(self) -> ErasedRows:
        """Of all erasures, complete or not."""
        with self._lock:
            return self._rows_of(list(self._known.values()))

    def _rows_of(self, erasures: Sequence[Erasure]) -> ErasedRows:
        dropped, emptied = BitMap64(), BitMap64()
        for one in erasures:
            if one.erases == "subject":
                dropped |= one.offsets
            else:
                emptied |= one.offsets
        below = max((one.below for one in erasures), default=0)
        return ErasedRows(dropped, emptied - dropped, tuple(one.id for one in erasures), below, self._serial)

    def records(self) -> list[bytes]:
        """Records that stand for all that were given."""
        with self._lock:
            known = list(self._known.values())
            kept = [*_joined(known[:-_MOST_RECEIPTS]), *known[-_MOST_RECEIPTS:]]
            return [one.to_bytes() for one in kept]

    # ---- what was done ----

    def rewrote(self, rows: ErasedRows, start: int, end: int, file: RewrittenFile) -> None:
        """This file, of the offsets `[start, end)`, takes the place of the former one next. Durable when this returns.

        Raises:
            OSError.
        """
        with self._lock:
            for one in rows.ids:
                if (known := self._known.get(one)) is not None and known.offsets.range_cardinality(start, end):
                    receipt = self._receipts[one]
                    receipt.files = [*(other for other in receipt.files if other.name != file.name), file]
            self._store()

    def complete(self, rows: ErasedRows, now_us: int) -> bool:
        """No file has these rows any more. False where there is more to be erased by now. Raises OSError."""
        with self._lock:
            if rows.serial != self._serial:
                return False
            for one in rows.ids:
                self._receipts[one].completed_us = now_us
                self._receipts[one].offsets = len(self._known[one].offsets)
            self._store()
            self._note_pending()
        return True

    def cut(self, end_offset: int) -> None:
        """The log is cut: what is fetched again may have erased rows. Raises OSError."""
        with self._lock:
            again = [one for one in self._known.values() if one.below > end_offset]
            for one in again:
                self._receipts[one.id].completed_us = 0
            if again:
                self._serial += 1
                self._note_pending()
                self._store()

    def receipt(self, erasure_id: str) -> tuple[Erasure, LogReceipt] | None:
        """None: it is not known here."""
        with self._lock:
            known = self._known.get(erasure_id)
            return None if known is None else (known, msgspec.structs.replace(self._receipts[erasure_id]))


# ---- segments ----


def due_segment(chain: SegmentChain, rows: ErasedRows) -> SealedSegment | None:
    """The first sealed segment of the offsets of these rows that was not checked for them yet."""
    for segment, following in pairwise([*chain.snapshot(), None]):
        if isinstance(segment, SealedSegment) and segment.checked_erasures < rows.serial:
            end = segment.end_offset if following is None else following.base_offset
            if rows.concerns(segment.base_offset, end):
                return segment
    return None


def is_in_unsealed(chain: SegmentChain, rows: ErasedRows) -> bool:
    return any(
        isinstance(one, ActiveSegment) and rows.concerns(one.base_offset, one.end_offset) for one in chain.snapshot()
    )


def erased(
    segment: SealedSegment, rows: ErasedRows, stream_id: str, compression: str, pause: Callable[[], None]
) -> tuple[Written, int] | None:
    """The segment without the bytes of these rows, as a new file beside it, durable and proven, and how many they
    were. None where it has none of them.

    Raises:
        CorruptLog: a batch is damaged; the segment stays as it is. OSError: as the system says.
    """
    marks = _Marks(rows, segment.base_offset, segment.end_offset)
    if not any(count for _, count in _changed(segment, marks, pause)):
        return None
    total = 0

    def messages() -> Iterator[memoryview]:
        nonlocal total
        for message, count in _changed(segment, marks, pause):
            total += count
            yield message

    batches = merge(map(stored, messages()))
    return write_beside(segment, segment.end_offset, batches, stream_id, compression, pause), total


class _Marks:
    """The offsets of a segment that are concerned, in ascending order."""

    def __init__(self, rows: ErasedRows, start: int, end: int) -> None:
        within = offset_range(start, end)
        self.dropped, self.emptied = to_array(rows.dropped & within), to_array(rows.emptied & within)

    def concern(self, start: int, end: int) -> bool:
        return any(np.searchsorted(one, start) < np.searchsorted(one, end) for one in (self.dropped, self.emptied))


def _changed(segment: SealedSegment, marks: _Marks, pause: Callable[[], None]) -> Iterator[tuple[memoryview, int]]:
    """Each batch as it is to be, and how many of its rows were dropped or emptied."""
    index = segment.index
    with open(open_segment(segment), "rb") as file:
        for at in range(len(index)):
            message = memoryview(read_batch(file.fileno(), index[at], segment.path))
            yield _without(message, marks) if marks.concern(*_range(segment, at)) else (message, 0)
            pause()


def _range(segment: SealedSegment, at: int) -> tuple[int, int]:
    return segment.index.base_offsets[at], segment.index.end_offsets[at]


def _without(message: memoryview, marks: _Marks) -> tuple[memoryview, int]:
    batch = ipc.decode_batch(message)
    offsets = batch.column("offset").to_numpy()
    dropped = marks_among(offsets, marks.dropped)
    emptied = marks_among(offsets, marks.emptied) & ~dropped & _has_contents(batch)
    if emptied.any():
        message = ipc.without_contents(message, emptied)
    if dropped.any():
        message = ipc.without_rows(message, dropped)
    return message, int(dropped.sum() + emptied.sum())


def _has_contents(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Which rows have a key, headers or a value."""
    has_value = pc.greater(pc.binary_length(batch.column("value")), 0)
    has_any = pc.or_(pc.or_(pc.is_valid(batch.column("key")), pc.is_valid(batch.column("headers"))), has_value)
    return np.asarray(has_any.to_numpy(zero_copy_only=False), np.bool_)
