"""The active segment: an append-only Arrow IPC stream behind the 8-byte Arrow file magic, one record batch per commit.

Invariants. One owner appends. Bytes below `size_bytes` are written and fsynced; bytes above are a commit that has not
been acknowledged. The first failed write or fsync is final for the file: nothing is appended to it again.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from crc32c import crc32c

from natslog.arrow import ipc
from natslog.arrow.schema import MESSAGE_SCHEMA
from natslog.errors import CorruptLog, DataDirError
from natslog.log.batch_encoder import EncodedBatch
from natslog.log.batch_index import BatchEntry, BatchIndex
from natslog.log.checked_file import write_all
from natslog.units import offsets_between

FILE_MAGIC = b"ARROW1\0\0"
ACTIVE_SUFFIX = ".active"
SEALED_SUFFIX = ".arrow"
SUBJECTS_SUFFIX = ".subjects"
FORMAT_VERSION = 1
_BATCH_RECOVERY_BYTES = 20 * 1024

_HEADER_LINE = re.compile(
    rb"v(\d+) stream=([0-9a-f]+) base_offset=(\d{20}) header_bytes=(\d{10}) crc32c=([0-9a-f]{8})\0"
)


def segment_path(folder: Path, base_offset: int, suffix: str) -> Path:
    """`00000000000000000042.active`: names sort as offsets do."""
    return folder / f"{base_offset:020d}{suffix}"


def file_header(stream_id: str, base_offset: int) -> bytes:
    """Magic and schema message; the schema's metadata names stream and base offset, and has a CRC32C of both."""
    line = f"v{FORMAT_VERSION} stream={stream_id} base_offset={base_offset:020d} header_bytes={{:010d}} crc32c=00000000"
    blank = MESSAGE_SCHEMA.with_metadata({"natslog.segment": line.format(0)})
    header_bytes = len(FILE_MAGIC) + len(ipc.schema_message(blank))
    schema = MESSAGE_SCHEMA.with_metadata({"natslog.segment": line.format(header_bytes)})
    header = bytearray(FILE_MAGIC + ipc.schema_message(schema))
    found = _HEADER_LINE.search(header)
    assert found is not None, "the header line must be in the schema just written"
    assert len(header) == header_bytes, "lengths are of fixed width"
    header[found.start(5) : found.end(5)] = b"%08x" % crc32c(header)
    return bytes(header)


def check_file_header(window: bytes, path: Path, stream_id: str | None, base_offset: int) -> int:
    """Length of a valid header at the start of a segment.

    Raises:
        CorruptLog: it is damaged, or belongs to another stream or base offset.
        DataDirError: a newer format.
    """
    found = _HEADER_LINE.search(window)
    if found is None or not window.startswith(FILE_MAGIC):
        raise CorruptLog(f"{path}: the file header is damaged", file=str(path), position=0, start=base_offset)
    header_bytes = int(found.group(4))
    blank = window[: found.start(5)] + b"00000000" + window[found.end(5) : header_bytes]
    named = (found.group(2).decode(), int(found.group(3)))
    if crc32c(blank) != int(found.group(5), 16) or named != (stream_id or named[0], base_offset):
        raise CorruptLog(
            f"{path}: the file header is damaged, or the file belongs to another stream or offset",
            file=str(path),
            position=0,
            start=base_offset,
        )
    if int(found.group(1)) > FORMAT_VERSION:
        raise DataDirError(
            f"{path} is of segment format {int(found.group(1))}; this version of natslog supports versions up to "
            f"{FORMAT_VERSION}: upgrade natslog"
        )
    return header_bytes


class SegmentFile(Protocol):
    """What any segment has."""

    @property
    def path(self) -> Path: ...


@dataclass(slots=True)
class ActiveSegment:
    """The file being appended to, or one that is full and waits to be sealed.

    Attributes:
        failed: a write or fsync failed; nothing is appended any more.
        has_excess: bytes of a failed commit could not be cut off yet; no other segment may follow before they are.
        unsealable: sealing failed; it is read as it is, and not tried again in this process.
    """

    path: Path
    base_offset: int
    size_bytes: int
    index: BatchIndex = field(default_factory=BatchIndex)
    failed: bool = False
    has_excess: bool = False
    unsealable: bool = False
    _fd: int = -1

    @classmethod
    def create(cls, folder: Path, stream_id: str, base_offset: int) -> ActiveSegment:
        """A new file, durable with its name before this returns.

        Raises:
            OSError: as the system says; no file is left behind, under no name.
        """
        path = segment_path(folder, base_offset, ACTIVE_SUFFIX)
        beside = path.with_suffix(".tmp")
        header = file_header(stream_id, base_offset)
        fd = os.open(beside, os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_RDWR, 0o644)
        try:
            write_all(fd, [memoryview(header)])
            os.fsync(fd)
            replace_durably(beside, path)  # over an empty one that failed, if there is one
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):  # the first error is the one to report
                beside.unlink()
            raise
        return cls(path, base_offset, len(header), _fd=fd)

    @property
    def end_offset(self) -> int:
        ends = self.index.end_offsets  # of one index: cutting replaces it
        return ends[-1] if ends else self.base_offset

    @property
    def recovery_bytes(self) -> int:
        """The cost of its recovery in bytes to be read: a batch costs as much as 20 KiB."""
        return self.size_bytes + _BATCH_RECOVERY_BYTES * len(self.index)

    @property
    def max_timestamp_us(self) -> int:
        count = len(self.index)
        return self.index.max_timestamps_us[count - 1] if count else 0

    def append(self, *batches: EncodedBatch, written: Callable[[], None] | None = None) -> None:
        """Writes one commit at the end and returns when it is on stable storage.

        Args:
            written: is called when it is written, before it is synced.

        Raises:
            OSError: the write or fsync failed. The file was truncated to its durable length and accepts no more writes.
        """
        assert not self.failed, "nothing is appended to a file after its first failure"
        assert batches[0].header.base_offset == self.end_offset, "a batch begins where the one before ends"
        try:
            write_all(self._writable(), [piece for batch in batches for piece in batch.pieces])
            if written is not None:
                written()
            os.fdatasync(self._fd)
        except BaseException:
            self.failed = True
            self._cut_back()
            raise
        self._take_up([batch.header for batch in batches])

    def append_run(self, batches: Iterable[EncodedBatch]) -> EncodedBatch | None:
        """Writes them one after another and returns when all are on stable storage; until then none is in the index.
        The result is the batch, if it is only one.

        Each is synced before the next is written: so at most the last one in the file is ever torn.

        Raises:
            OSError: a write or fsync failed; or whatever `batches` raises. The file was truncated to its previous
                length and accepts no more writes.
        """
        assert not self.failed, "nothing is appended to a file after its first failure"
        headers, last = [], None
        try:
            for last in batches:
                write_all(self._writable(), last.pieces)
                os.fdatasync(self._fd)
                headers.append(last.header)
        except BaseException:
            self.failed = True
            self._cut_back()
            raise
        self._take_up(headers)
        return last if len(headers) == 1 else None

    def _take_up(self, headers: Iterable[ipc.BatchHeader]) -> None:
        """Batches on stable storage at the end of the file become visible."""
        for header in headers:
            assert header.base_offset == self.end_offset, "a batch begins where the one before ends"
            self.index.append(
                BatchEntry(
                    header.base_offset,
                    header.end_offset,
                    header.rows,
                    self.size_bytes,
                    header.total_bytes,
                    header.max_timestamp_us,
                )
            )
            self.size_bytes += header.total_bytes

    def cut_to(self, end_offset: int) -> bool:
        """Drops the batches from `end_offset` on; durable when this returns. False, and nothing is done, where
        `end_offset` is inside a batch: a file is cut between two only.

        Raises:
            OSError: the file could not be cut.
        """
        kept = self.index.first_covering(end_offset)
        if kept < len(self.index) and self.index.base_offsets[kept] < end_offset:
            return False
        position = self._end_position(kept)
        if position != self.size_bytes or self.has_excess:
            self.index = self.index.first(kept)  # before: a reader finds no more than the file holds
            os.ftruncate(self._writable(), position)
            os.fsync(self._fd)
            self.size_bytes, self.has_excess = position, False
        return True

    def _end_position(self, batches: int) -> int:
        """Where the file ends that holds only the first so many batches; damage may lie behind the last known one."""
        if batches:
            return self.index.positions[batches - 1] + self.index.lengths[batches - 1]
        if len(self.index):
            return self.index.positions[0]
        with open(self.path, "rb") as file:
            return check_file_header(file.read(ipc.MAX_HEADER_BYTES), self.path, None, self.base_offset)

    def _writable(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_APPEND | os.O_RDWR)
        return self._fd

    def _cut_back(self) -> None:
        """Removes the bytes of an unacknowledged commit, so that they are not found later; if this fails, `cut_excess`
        must be called.
        """
        self.has_excess = True
        with contextlib.suppress(OSError):
            self.cut_excess()

    def cut_excess(self) -> None:
        """Cuts off what a failed commit may have left; durable when this returns.

        Raises:
            OSError: it could not be cut.
        """
        if self.has_excess:
            os.ftruncate(self._writable(), self.size_bytes)
            os.fsync(self._fd)
            self.has_excess = False

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def sync(self) -> None:
        """Everything in the file onto stable storage."""
        os.fsync(self._writable())

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_segment(segment: SegmentFile) -> int:
    """Its file, to be read. Sealing in place renames it a moment before the list of segments changes."""
    try:
        return os.open(segment.path, os.O_RDONLY)
    except FileNotFoundError:
        return os.open(segment.path.with_suffix(SEALED_SUFFIX), os.O_RDONLY)


def remove_segment_files(path: Path) -> None:
    """Removes a segment under both of its names (where sealing failed half-way, there may be two files), and what
    belongs to it.
    """
    for suffix in (ACTIVE_SUFFIX, SEALED_SUFFIX, SUBJECTS_SUFFIX):
        path.with_suffix(suffix).unlink(missing_ok=True)


def replace_durably(beside: Path, path: Path) -> None:
    """Renames a synced file to its name in the same folder; the name is durable when this returns.

    Raises:
        OSError: as the system says. Where there was no file of that name, there is none now.
    """
    folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # first: this may fail too
    try:
        was_there = path.exists()
        os.replace(beside, path)
        try:
            os.fsync(folder_fd)
        except BaseException:
            if not was_there:
                with contextlib.suppress(OSError):
                    path.unlink()
                    os.fsync(folder_fd)
            raise
    finally:
        os.close(folder_fd)


def read_at(fd: int, position: int, length: int) -> bytes:
    """Exactly these bytes, or fewer at the end of the file."""
    pieces = []
    while length > 0 and (piece := os.pread(fd, length, position)):
        pieces.append(piece)
        position += len(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_batch(fd: int, entry: BatchEntry, path: Path) -> bytes:
    """The encapsulated message of one batch, proven.

    Raises:
        CorruptLog: the bytes on disk are not what was written.
    """
    try:
        message = read_at(fd, entry.position, entry.length)
    except OSError as error:
        raise damage(path, entry, f"cannot be read: {error.strerror}") from error
    header = ipc.proven_header(message)
    if header is None or header.base_offset != entry.base_offset or header.total_bytes != len(message):
        raise damage(path, entry, "has a damaged header")
    if not ipc.body_holds(header, message):
        raise damage(path, entry, "has a wrong CRC32C")
    return message


def header_bytes_of(message: bytes) -> int:
    """The length of the metadata part of a proven batch."""
    return 8 + int.from_bytes(message[4:8], "little")


def damage(path: Path, entry: BatchEntry, what: str) -> CorruptLog:
    """The error for one batch, with file, position and offsets."""
    return CorruptLog(
        f"{path}: the batch at byte {entry.position}, {offsets_between(entry.base_offset, entry.end_offset)}, {what}. "
        "Restore the file from a replica or a copy; `natslog verify` checks it",
        file=str(path),
        position=entry.position,
        start=entry.base_offset,
        end=entry.end_offset,
    )
