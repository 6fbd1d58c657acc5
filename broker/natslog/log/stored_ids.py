"""Message ids of a log, from which a deduplication window is filled: of the rows in its files, and of rows that the
files have lost.

Theory of operation. An id is stored with its message. Where a message leaves the files while its id may still be asked
for (retention, limits, a purge, erasure), the hash of the id, the offset and the time are stored in the file `ids`
beside the log before the row goes (`KeptIds`). A replica that is not in sync takes over what its leader keeps before it
copies anything (`cluster.replica`): the leader's files may lack rows that this replica has never had.

Invariant. Of the newest `MAX_IDS` ids within the window, each is in the files or in `ids`. Older ones go.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from natslog.arrow import ipc
from natslog.errors import CorruptLog, OffsetOutOfRange
from natslog.log.chain import Segment, SegmentChain
from natslog.log.checked_file import read_record, sync_folder, write_checked
from natslog.log.log_reader import LogReader
from natslog.log.merging import Stored
from natslog.wire import own_ids
from natslog.wire.message_ids import MAX_IDS, Ids, ids_of_headers

_PLAN_BYTES = 256 * 1024 * 1024  # not read at once: small batches by the MiB, and of others those with headers
_GROUP_BATCHES, _GROUP_BYTES = 4096, 16 * 1024 * 1024
_RECORD = np.dtype([("id", "<u8", 2), ("offset", "<i8"), ("time_us", "<i8")])


class StoredIds(NamedTuple):
    """Rows that have an id: its hash, the offset of the message, and its timestamp in µs."""

    ids: Ids
    offsets: npt.NDArray[np.int64]
    times_us: npt.NDArray[np.int64]

    @classmethod
    def joined(cls, parts: Iterable[StoredIds]) -> StoredIds:
        """All of them, oldest first; rows with several entries count once."""
        columns = zip(*(NO_IDS, *parts), strict=True)
        ids, offsets, times_us = (np.concatenate(one) for one in columns)
        offsets, first = np.unique(offsets, return_index=True)
        return cls(ids[first], offsets, times_us[first])

    def below(self, end: int) -> StoredIds:
        """Of the rows before this offset."""
        kept = self.offsets < end
        return StoredIds(self.ids[kept], self.offsets[kept], self.times_us[kept])

    def newest(self, most: int, oldest_us: int) -> StoredIds:
        """The last `most` of those that are not older than `oldest_us`; of rows in the order of their offsets."""
        kept = np.flatnonzero(self.times_us >= oldest_us)[-most:]
        return StoredIds(self.ids[kept], self.offsets[kept], self.times_us[kept])

    def to_bytes(self) -> bytes:
        records = np.empty(len(self.offsets), _RECORD)
        records["id"], records["offset"], records["time_us"] = self
        return records.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> StoredIds:
        """Raises ValueError: they are no records."""
        records = np.frombuffer(data, _RECORD)
        return cls(*(np.ascontiguousarray(records[name]) for name in ("id", "offset", "time_us")))


NO_IDS = StoredIds(np.zeros((0, 2), np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))


class NewestIds(NamedTuple):
    """`known_from_us`: ids of older messages may be missing; 0: none is. `damage`: the first that hid ids."""

    found: StoredIds
    known_from_us: int
    damage: CorruptLog | None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ids`: records of 32 bytes: hash, offset, timestamp in µs, little-endian, oldest first."""

    ids: bytes


class KeptIds:
    """The file `ids` of a log. From any thread.

    Attributes:
        serial: another one whenever ids were added; 0: there are none.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ids"
        self._lock = threading.Lock()
        self._newest_us = 0
        self.serial = self._last_serial = int(self._path.exists())

    def read(self) -> StoredIds:
        """Raises CorruptLog: it is damaged. UpgradeRequired, DataDirError: of a newer version. OSError."""
        stored = read_record(self._path, "message-ids", 1, _File) if self.serial else None
        try:
            return NO_IDS if stored is None else StoredIds.from_bytes(stored.ids)
        except ValueError as error:
            raise CorruptLog(f"{self._path}: {error}", file=str(self._path)) from error

    def add(self, found: StoredIds, oldest_us: int) -> None:
        """Durable when this returns; older ones go. A damaged file is replaced. Raises OSError: nothing was stored."""
        if not len(found.offsets):
            return
        with self._lock:
            try:
                known = self.read()
            except CorruptLog:
                known = NO_IDS
            kept = StoredIds.joined((known, found)).newest(MAX_IDS, oldest_us)
            if len(kept.offsets):
                write_checked(self._path, "message-ids", 1, _File(kept.to_bytes()))
                self._newest_us = int(kept.times_us.max())
                self._last_serial += 1
                self.serial = self._last_serial

    def expire(self, oldest_us: int) -> None:
        """Removes the file if all ids in it are older, or none can be read. Raises as `read`, but for damage."""
        with self._lock:
            if self.serial and not self._newest_us:
                try:
                    self._newest_us = int(self.read().times_us.max(initial=1))
                except CorruptLog:
                    self._newest_us = 1
            if self.serial and self._newest_us < oldest_us:
                self._path.unlink(missing_ok=True)
                sync_folder(self._path.parent)
                self.serial = self._newest_us = 0


def newest_ids(chain: SegmentChain, reader: LogReader, kept: KeptIds, oldest_us: int) -> NewestIds:
    """The newest ids of a log, committed or not: at least `MAX_IDS`, or all that are not older than `oldest_us`.

    Segments are read from the newest on; of batches without headers and ids, only the metadata is read.
    """
    parts: list[StoredIds] = []
    damage: CorruptLog | None = None
    count, known_from_us = 0, 0
    for segment, end_offset in reversed(_with_ends(chain)):
        if count >= MAX_IDS:
            known_from_us = min(int(part.times_us[0]) for part in parts if len(part.times_us))
            break
        if segment.base_offset == end_offset:
            continue
        if is_older(segment, oldest_us):
            break
        found, problem = ids_in(chain, reader, _first_within(segment, oldest_us), end_offset)
        damage = damage or problem
        parts.append(found)
        count += len(found.offsets)
    try:
        parts.append(kept.read())  # at last: rows that have gone meanwhile have left their ids there before
    except (CorruptLog, OSError) as error:
        damage = damage or as_damage(error)
    return NewestIds(StoredIds.joined(parts), known_from_us, damage)


def _with_ends(chain: SegmentChain) -> list[tuple[Segment, int]]:
    segments = chain.snapshot()
    ends = [following.base_offset for _, following in pairwise(segments)]
    return list(zip(segments, [*ends, chain.log_end_offset], strict=True))


def _first_within(segment: Segment, oldest_us: int) -> int:
    """Where the messages of a segment begin that are not older, about."""
    try:
        index = segment.index
    except (CorruptLog, OSError):
        return segment.base_offset
    at = index.first_at_or_after(oldest_us)
    return index.base_offsets[at] if at < len(index) else segment.base_offset


def is_older(segment: Segment, oldest_us: int) -> bool:
    """Whether all its messages are. False where that cannot be read."""
    try:
        return segment.max_timestamp_us < oldest_us
    except (CorruptLog, OSError):
        return False


def ids_in(chain: SegmentChain, reader: LogReader, start: int, end: int) -> tuple[StoredIds, CorruptLog | None]:
    """Of the rows in these offsets that have one, and the first damage that hid some: those behind it are there."""
    parts: list[StoredIds] = []
    damage: CorruptLog | None = None
    while start < end:
        try:
            with reader.plan_read(start, end, max_bytes=_PLAN_BYTES, prove=False, uncommitted=True) as plan:
                parts += (_ids_of(some) for some in _in_groups(plan.headed_rows()))
                start = plan.next_offset
        except OffsetOutOfRange:  # retention was faster
            start = max(start + 1, chain.log_start_offset)
        except (CorruptLog, OSError) as error:
            damage = damage or as_damage(error)
            start = _behind(start, as_damage(error), chain)
    return StoredIds.joined(parts), damage


def as_damage(error: CorruptLog | OSError) -> CorruptLog:
    return error if isinstance(error, CorruptLog) else CorruptLog(f"the log cannot be read: {error}")


def _in_groups(batches: Iterator[Stored]) -> Iterator[list[Stored]]:
    """Batches of a row are as many as the rows: their ids are computed together."""
    group: list[Stored] = []
    size_bytes = 0
    for found in batches:
        group.append(found)
        size_bytes += found[1].nbytes
        if len(group) == _GROUP_BATCHES or size_bytes >= _GROUP_BYTES:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group


def _ids_of(batches: Sequence[Stored]) -> StoredIds:
    """Of the rows of these batches that have one, wherever they have it."""
    rows = pa.Table.from_batches([one.select(["offset", "timestamp", "headers"]) for _, one, _ in batches])
    hashes = own_ids.hashed(np.concatenate([_ids_or_zeros(one, ids) for _, one, ids in batches]))
    ids = ids_of_headers(rows.column("headers").combine_chunks())
    if ids is not None:
        hashes = np.where(hashes.any(axis=1, keepdims=True), hashes, ids)
    found = np.flatnonzero(hashes.any(axis=1))
    times_us = rows.column("timestamp").cast(pa.int64()).to_numpy()
    return StoredIds(hashes[found], rows.column("offset").to_numpy()[found], times_us[found])


def _ids_or_zeros(rows: pa.RecordBatch, packed_ids: ipc.PackedIds | None) -> ipc.PackedIds:
    return np.zeros((rows.num_rows, ipc.ID_BYTES), np.uint8) if packed_ids is None else packed_ids


def _behind(start: int, error: CorruptLog, chain: SegmentChain) -> int:
    """The next offset that may be readable: behind what is known to be damaged, else in the next segment."""
    damaged_to = error.facts.get("end")
    if isinstance(damaged_to, int) and damaged_to > start:
        return damaged_to
    bases = (segment.base_offset for segment in chain.snapshot())
    return next((base for base in bases if base > start), chain.log_end_offset)
