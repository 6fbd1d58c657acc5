"""The files of a Raft store: one write-ahead log, in which a save is one write and one sync.

    FOLDER/hard-state   checked file, version 2: the id of the log; replaced only when another log begins
    FOLDER/wal-<id>     a head of 512 bytes, then records, then zeros up to the size that the file was made with

Theory of operation. The first record holds all that is stored when the log begins: snapshot, hard state, entries. Each
further record is one save: the hard state, where the log is cut, the entries after that. A save is complete or does not
exist: the CRC of a record continues the CRC of the previous one, and the first one that of the id. A log that is full,
a snapshot, and the start after a crash begin another log: the file is written and synced beside the old one, and then
`hard-state` names it instead. Until then the old log is valid, from then on the new one. Files that are not named are
removed.

How the end is determined. The header states how many bytes of the file are durable. It is rewritten after each save,
once the sync has returned, and is itself synced by the next save (or by the kernel, some seconds later), so it is never
too large. All up to there must be whole, and end there: anything else is damage, be it a cut between two records or
zeros. Beyond it lie at most the last save that returned, where the power was lost before the kernel wrote the head, and
one that never returned. What is whole there is kept. What is not is the torn tail of a save that never returned: one
that returned is on the disk. The head lies in one sector of 512 bytes, which a disk writes whole or not at all, and
within one page of the cache.

The zeros are room that was allocated when the log began: a sync need not change the file's size, and a save that fits
needs no space on a full disk.

Invariants. Nothing is changed before all was read and proven. Once anything was saved there is a `hard-state`, and a
file it names is there. Only durable bytes are kept: if there is anything beyond the end that the header names, opening
starts another log, because after a kill or a failed sync such bytes may be in the page cache only.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from pathlib import Path

import msgspec
from crc32c import crc32c

from natslog.cluster.encoding import written_by_newer
from natslog.errors import DataDirError
from natslog.log.checked_file import sync_folder, write_all, write_checked
from natslog.log_events import event
from natslog.node.metadata.raft_stored import FILES, Save, Stored, damage

logger = logging.getLogger("natslog.raft")

ROOM_BYTES = 1024 * 1024
MANIFEST_VERSION = 2
_FORMAT_VERSION = 1
_HEAD_BYTES = 512
_HEAD = re.compile(rb"natslog raft-wal v(\d+) id=[0-9a-f]{16} bytes=(\d{20}) durable=(\d{20}) crc32c=([0-9a-f]{8})\n")


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `hard-state`; no id: nothing was stored yet, and any log found is invalid."""

    wal: str | None


class RaftWal:
    """The log in `folder` that this manifest names, read and proven; what a crash interrupted is finished.

    Args:
        manifest: None: nothing was ever stored, and nothing is changed before the first save.
        room_bytes: for saves, before another log begins.

    Raises:
        CorruptLog: what was stored is not all there, or not whole. Nothing was changed.
        DataDirError: a newer format. OSError.
    """

    def __init__(self, folder: Path, manifest: Manifest | None, *, room_bytes: int) -> None:
        self.stored = Stored()
        self._folder, self._room_bytes = folder, room_bytes
        self._id = None if manifest is None else manifest.wal
        self._size_bytes = self._end = self._crc = 0  # of the file as it was made; of the last record
        if manifest is None:
            return
        has_more = manifest.wal is not None and self._read(manifest.wal)
        sync_folder(folder)
        if has_more:
            self._begin(self.stored)
        else:
            self._remove_unnamed()

    def save(self, save: Save) -> None:
        """On stable storage on return. Raises OSError: the file must be read again, and may or may not have this."""
        stored = self.stored.after(save)
        if stored == self.stored and self._id is not None:
            return
        record = self._record(Save(stored.hard_state, save.truncate_from, save.entries))
        if save.snapshot is not None or self._id is None or self._end + len(record) > self._size_bytes:
            self._begin(stored)
        else:
            with open(self._path, "r+b", buffering=0) as file:
                file.seek(self._end)
                write_all(file.fileno(), [record])
                os.fdatasync(file.fileno())
                self._end, self._crc = self._end + len(record), _crc_of(record)
                os.pwrite(file.fileno(), self._head(), 0)
        self.stored = stored

    # What follows changes names: between any two steps, and after the loss of what was not synced, the folder opens.

    def _begin(self, stored: Stored) -> None:
        """A new log with the stored data, which replaces all other files: they are valid until it is named."""
        manifest = self._folder / "hard-state"
        if not manifest.exists():  # a log without one would be damage
            write_checked(manifest, "raft-hard-state", MANIFEST_VERSION, Manifest(None))
        self._id = secrets.token_hex(8)
        self._crc = crc32c(self._id.encode())
        record = self._record(Save(stored.hard_state, None, stored.entries, stored.snapshot))
        self._crc, self._end = _crc_of(record), _HEAD_BYTES + len(record)
        self._size_bytes = self._end + self._room_bytes
        with open(self._path, "xb", buffering=0) as file:
            write_all(file.fileno(), [self._head(), record, bytes(self._room_bytes)])
            os.fsync(file.fileno())
        sync_folder(self._folder)
        write_checked(manifest, "raft-hard-state", MANIFEST_VERSION, Manifest(self._id))
        self._remove_unnamed()

    def _remove_unnamed(self) -> None:
        """Other logs, and unfinished replacements. `hard-state` is durable by now."""
        for path in [found for pattern in (*FILES, "*.new") for found in self._folder.glob(pattern)]:
            if path != self._path:
                os.unlink(path)
        sync_folder(self._folder)

    @property
    def _path(self) -> Path:
        return self._folder / f"wal-{self._id}"

    def _head(self) -> bytes:
        assert self._id is not None
        line = b"natslog raft-wal v%d id=%s bytes=%020d durable=%020d crc32c=" % (
            _FORMAT_VERSION,
            self._id.encode(),
            self._size_bytes,
            self._end,
        )
        return (line + b"%08x\n" % crc32c(line)).ljust(_HEAD_BYTES, b"\0")

    def _record(self, save: Save) -> bytes:
        payload = msgspec.msgpack.encode(save)
        length = len(payload).to_bytes(4, "little")
        return length + crc32c(payload, crc32c(length, self._crc)).to_bytes(4, "little") + payload

    def _read(self, wal_id: str) -> bool:
        """Whether anything lies beyond the end that the head names."""
        raw = self._path.read_bytes() if self._path.exists() else b""
        durable = self._read_head(raw)
        self._end, self._crc = _HEAD_BYTES, crc32c(wal_id.encode())
        is_proven = False
        while (record := _record_at(raw, self._end, self._crc)) is not None:
            try:
                save = msgspec.msgpack.decode(record[8:], type=Save)
            except msgspec.ValidationError as error:
                raise written_by_newer(self._path, error) from error
            self.stored = self.stored.after(save)
            self._end, self._crc = self._end + len(record), _crc_of(record)
            is_proven |= self._end == durable
        if not is_proven:
            what = f"the record at byte {self._end} is damaged, but all records up to byte {durable} were stored"
            raise damage(self._path, what)
        if extra_bytes := len(raw[durable:].rstrip(b"\0")):
            kept_bytes = self._end - durable
            logger.info(
                "%s: of %d bytes after byte %d, %d were kept",
                self._path,
                extra_bytes,
                durable,
                kept_bytes,
                extra=event("metadata.tail_recovered", path=self._path, bytes=extra_bytes),
            )
        return extra_bytes > 0

    def _read_head(self, raw: bytes) -> int:
        """How many bytes are durable."""
        head = raw[:_HEAD_BYTES]
        found = _HEAD.match(head)
        if found is not None and int(found[1]) > _FORMAT_VERSION and int(found[4], 16) == crc32c(found[0][:-9]):
            known = f"this version of natslog supports versions up to {_FORMAT_VERSION}: upgrade natslog"
            raise DataDirError(f"{self._path} is of format version {int(found[1])}; {known}", file=str(self._path))
        self._size_bytes, self._end = (int(found[2]), int(found[3])) if found is not None else (0, 0)
        if head != self._head():
            raise damage(self._path, "the file is missing, or its header is damaged or belongs to another log")
        if len(raw) != self._size_bytes:
            raise damage(self._path, f"the file has {len(raw)} bytes, but was created with {self._size_bytes} bytes")
        return self._end


def _record_at(raw: bytes, position: int, crc: int) -> bytes | None:
    """The whole record there that follows the one with this CRC."""
    length = raw[position : position + 4]
    record = raw[position : position + 8 + int.from_bytes(length, "little")]
    is_whole = len(record) > 8 and len(record) == 8 + int.from_bytes(length, "little")
    return record if is_whole and crc32c(record[8:], crc32c(length, crc)) == _crc_of(record) else None


def _crc_of(record: bytes) -> int:
    return int.from_bytes(record[4:8], "little")
