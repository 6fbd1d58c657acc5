"""Removals of messages that an export has already: an incremental export states them, and an import applies them.

Theory of operation. The manifest has the offsets that the stream does not have any more, as of the last export
(`Removals`). Removed messages stay in the files of the export, and imports leave them out: files of a backup change
seldom. Files with erased messages are written again without them (and without removed ones), under new names; the
former files are deleted when the manifest that names the new ones is there.

What retention has removed stays in the export: only deletions, purges, limits per subject, compaction and expiry of
single messages count, and those of messages that the stream would still have otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from pyroaring import BitMap64

from natslog.arrow import ipc
from natslog.arrow.batch_line import BatchHeader
from natslog.backup.arrow_files import FileWriter, batches_of
from natslog.backup.manifest import FILE_NAME, ExportedFile, Removals, StreamManifest, next_file_name
from natslog.client import NatslogClient
from natslog.errors import CorruptLog, DamagedExport
from natslog.log.checked_file import sync_folder
from natslog.log.removed import from_bytes, offset_range, to_array, to_bytes

_OFFSETS_AT_ONCE = 1 << 26
"""A bitmap of so many offsets takes at most 8 MiB."""


@dataclass(slots=True)
class Removed:
    """`Removals` as sets. `removed` has those that were erased, too."""

    removed: BitMap64 = field(default_factory=BitMap64)
    subjects: BitMap64 = field(default_factory=BitMap64)
    keys: BitMap64 = field(default_factory=BitMap64)

    @classmethod
    def of(cls, stated: Removals | msgspec.UnsetType, source: str) -> Removed:
        """Raises DamagedExport."""
        if isinstance(stated, msgspec.UnsetType):
            return cls()
        try:
            sets = [
                from_bytes(data, source) if data else BitMap64()
                for data in (stated.removed, stated.erased_subjects, stated.erased_keys)
            ]
        except CorruptLog as error:
            raise DamagedExport(error.message) from error
        return cls(sets[0] | sets[1] | sets[2], sets[1], sets[2])

    def stated(self) -> Removals:
        return Removals(
            removed=to_bytes(self.removed), erased_subjects=to_bytes(self.subjects), erased_keys=to_bytes(self.keys)
        )

    @property
    def erased(self) -> BitMap64:
        return self.subjects | self.keys

    def __or__(self, other: Removed) -> Removed:
        return Removed(self.removed | other.removed, self.subjects | other.subjects, self.keys | other.keys)

    def within(self, start: int, end: int) -> Removed:
        wanted = offset_range(start, end)
        return Removed(self.removed & wanted, self.subjects & wanted, self.keys & wanted)


def removed_from(client: NatslogClient, name: str, start: int, end: int) -> Removed:
    """What the stream does not have any more of these offsets. Raises as `NatslogClient.removals`."""
    found = Removed()
    for first in range(start, end, _OFFSETS_AT_ONCE):
        stated = client.removals(name, first, min(first + _OFFSETS_AT_ONCE, end))
        found |= Removed.of(msgspec.convert(stated, Removals), f"removed messages of stream {name!r}")
    return found


def applied(folder: Path, before: StreamManifest, now: Removed) -> tuple[tuple[ExportedFile, ...], Removed]:
    """The files of an export when these offsets are removed from it, durable, and all that was removed by then. Files
    that have another name now were written again.

    Raises:
        DamagedExport, OSError: the files that are there are as they were.
    """
    known = Removed.of(before.removals, str(folder))
    every = known | now
    new, new_erased = every.removed - known.removed, every.erased - known.erased
    files = []
    for file in before.files:
        within = offset_range(file.first_offset, file.end_offset)
        if new_erased & within and _rows_in(folder, before, file, new_erased):
            file = _written_again(folder, before, file, every.removed)
        elif new & within and (count := _rows_in(folder, before, file, new)):
            file = msgspec.structs.replace(file, removed=(file.removed or 0) + count)
        files.append(file)
    return tuple(files), every


def _rows_in(folder: Path, manifest: StreamManifest, file: ExportedFile, offsets: BitMap64) -> int:
    return sum(int(marks.sum()) for _, _, marks in _marked(folder, manifest, file, offsets))


def _marked(
    folder: Path, manifest: StreamManifest, file: ExportedFile, offsets: BitMap64
) -> Iterable[tuple[BatchHeader, memoryview, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    """Each batch, with marks of its rows that have one of these offsets."""
    for header, message in batches_of(folder, manifest, file):
        marks = np.zeros(header.rows, np.bool_)
        if header.rows and offsets.range_cardinality(header.base_offset, header.end_offset):
            rows = ipc.decode_batch(message).column("offset").to_numpy()
            marks = np.isin(rows, to_array(offsets & offset_range(header.base_offset, header.end_offset)))
        yield header, message, marks


def without_removed(
    folder: Path, manifest: StreamManifest, file: ExportedFile, removed: BitMap64
) -> Iterable[tuple[BatchHeader, memoryview]]:
    """The batches of a file without these rows. Raises DamagedExport."""
    for header, message, marks in _marked(folder, manifest, file, removed):
        if not marks.any():
            yield header, message
            continue
        kept = ipc.without_rows(message, marks)
        stated = ipc.proven_header(kept[: ipc.MAX_HEADER_BYTES])
        assert stated is not None, "it was just written"
        yield stated, kept


def _written_again(folder: Path, manifest: StreamManifest, file: ExportedFile, removed: BitMap64) -> ExportedFile:
    writer = FileWriter(folder, manifest.id, file.first_offset, next_file_name(file.name))
    try:
        for header, message in without_removed(folder, manifest, file, removed):
            writer.add(header, message)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def drop_unnamed(folder: Path, manifest: StreamManifest) -> None:
    """Files of former exports that the manifest does not name any more. Raises OSError."""
    named = {file.name for file in manifest.files}
    left = [path for path in folder.glob("*.arrow") if FILE_NAME.fullmatch(path.name) and path.name not in named]
    for path in left:
        path.unlink()
    if left:
        sync_folder(folder)


def messages_from(folder: Path, manifest: StreamManifest, file: ExportedFile, start: int, removed: BitMap64) -> int:
    """How many rows of a file have offsets from `start` on, and are not removed. Raises DamagedExport."""
    if start <= file.first_offset:
        return file.messages
    return _rows_in(folder, manifest, file, offset_range(start, file.end_offset) - removed)
