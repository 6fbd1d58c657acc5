"""The files of an export: stored batches as they are, in Arrow IPC files that any Arrow reader opens.

They have the form of sealed segments, so `natslog verify` checks them, too.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from crc32c import crc32c

from natslog.arrow import ipc
from natslog.arrow.batch_line import BatchHeader
from natslog.backup.manifest import ExportedFile, StreamManifest, file_name
from natslog.errors import CorruptLog, DamagedExport, DataDirError
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.checked_file import sync_folder, write_all
from natslog.log.sealed import sealing_bytes
from natslog.log.segment import check_file_header, file_header
from natslog.units import gap_between

_AT_ONCE_BYTES = 8 * 1024 * 1024


class FileWriter:
    """Writes one file under a temporary name; `finish` gives it its name, `abort` removes it."""

    def __init__(self, folder: Path, stream_id: str, first_offset: int, name: str | None = None) -> None:
        self._path = folder / (name or file_name(first_offset))
        self._beside = self._path.with_name(self._path.name + ".tmp")
        self._index = BatchIndex()
        self._header_bytes: dict[int, int] = {}
        self._first_offset = first_offset
        self.end_offset, self.size_bytes, self._crc = first_offset, 0, 0
        self._fd = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self._write(file_header(stream_id, first_offset))
        except BaseException:
            self.abort()
            raise

    def add(self, header: BatchHeader, message: ipc.Bytes) -> None:
        """A proven batch that follows the one before it. Raises OSError."""
        assert header.base_offset == self.end_offset, "batches follow one another"
        position = self.size_bytes
        self._write(message)
        self._header_bytes[position] = header.header_bytes
        self._index.append(
            BatchEntry(
                header.base_offset,
                header.end_offset,
                header.rows,
                position,
                header.total_bytes,
                header.max_timestamp_us,
            )
        )
        self.end_offset = header.end_offset

    def _write(self, data: ipc.Bytes) -> None:
        write_all(self._fd, [data])
        self._crc = crc32c(data, self._crc)
        self.size_bytes += len(data)

    def finish(self) -> ExportedFile:
        """The file is on stable storage, under its name. Raises OSError."""
        self._write(sealing_bytes(self._index, self._header_bytes))
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        os.replace(self._beside, self._path)
        sync_folder(self._path.parent)
        return ExportedFile(
            name=self._path.name,
            bytes=self.size_bytes,
            crc32c=f"{self._crc:08x}",
            first_offset=self._first_offset,
            end_offset=self.end_offset,
            rows=sum(self._index.rows),
        )

    def abort(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._beside.unlink(missing_ok=True)


def check_file(folder: Path, file: ExportedFile, *, verify: bool = True) -> None:
    """Raises DamagedExport: it is missing, or is not what was written. `verify`: by its CRC, not only by its size."""
    path = folder / file.name
    try:
        size_bytes = path.lstat().st_size
        if not path.is_file() or path.is_symlink() or size_bytes != file.bytes:
            raise DamagedExport(f"{path} has {size_bytes} bytes, not {file.bytes}: it was changed, or cut short")
        if verify and _crc_of(path) != file.crc32c:
            raise DamagedExport(f"{path} is damaged: its CRC32C does not match. Use another copy of the export")
    except OSError as error:
        raise DamagedExport(f"{path} cannot be read: {error.strerror or error}") from error


def _crc_of(path: Path) -> str:
    crc = 0
    with open(path, "rb") as file:
        while data := file.read(_AT_ONCE_BYTES):
            crc = crc32c(data, crc)
    return f"{crc:08x}"


def check_batches(folder: Path, manifest: StreamManifest, file: ExportedFile) -> None:
    """The batches are those that the manifest states. Raises DamagedExport."""
    at, rows = file.first_offset, 0
    for header, _ in batches_of(folder, manifest, file):
        if header.base_offset != at:
            raise DamagedExport(f"{folder / file.name}: {gap_between(at, header.base_offset)}")
        at, rows = header.end_offset, rows + header.rows
    if (at, rows) != (file.end_offset, file.rows):
        raise DamagedExport(f"{folder / file.name} ends at offset {at} with {rows} messages, which the manifest denies")


def batches_of(folder: Path, manifest: StreamManifest, file: ExportedFile) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Each batch, proven by its CRC; the file is mapped into memory, not copied. Raises DamagedExport."""
    path = folder / file.name
    try:
        with open(path, "rb") as opened:
            view = memoryview(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ))
        begin = check_file_header(bytes(view[: ipc.MAX_HEADER_BYTES]), path, manifest.id, file.first_offset)
        yield from ipc.split_messages(view[begin:], source=str(path))
    except (CorruptLog, DataDirError, OSError, ValueError) as error:
        raise DamagedExport(f"{path} is damaged: {error}. Use another copy of the export") from error
