"""Small self-validating files: one header line with format, length and CRC32C, then JSON.

    natslog hw-checkpoint v1 bytes=27 crc32c=8f1c2a07
    {"high_watermark": 38094}

A file is replaced as a whole: the new file is written under another name, fsynced and renamed, then the folder is
fsynced. A reader gets the old or the new content, never a part.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from crc32c import crc32c

from natslog.errors import CorruptLog, DataDirError, UpgradeRequired

Record = TypeVar("Record")

_HEADER = re.compile(rb"natslog ([a-z-]+) v(\d{1,9}) bytes=(\d{1,18}) crc32c=([0-9a-f]{8})")


def checked_bytes(kind: str, version: int, content: Any, *, width: int = 0) -> bytes:
    """A whole checked file. `width`: the JSON is padded with spaces to this many bytes, so that every file of the kind
    has the same length.
    """
    payload = msgspec.json.encode(content).ljust(width)
    header = b"natslog %s v%d bytes=%d crc32c=" % (kind.encode(), version, len(payload))
    return header + b"%08x\n" % crc32c(payload, crc32c(header)) + payload


def write_checked(path: Path, kind: str, version: int, content: Any, *, width: int = 0, sync_name: bool = True) -> None:
    """Replaces `path` durably with `content` (anything msgspec can write as JSON).

    Args:
        width: as `checked_bytes`.
        sync_name: False if the caller makes the names of several files durable at once.

    Raises:
        OSError: as the system reports it. No other file remains; `path` has the complete old or new content.
    """
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb") as file:
            file.write(checked_bytes(kind, version, content, width=width))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to report
            beside.unlink()
        raise
    if sync_name:
        sync_folder(path.parent)


def overwrite_checked(path: Path, kind: str, version: int, content: Any, *, width: int) -> None:
    """Overwrites a file of the same length in place, which needs no space on a full disk; durable when this returns.

    A crash may leave it damaged: the caller keeps the previous content elsewhere.
    """
    data = checked_bytes(kind, version, content, width=width)
    fd = os.open(path, os.O_WRONLY)
    try:
        if os.fstat(fd).st_size != len(data):
            raise OSError(errno.ENOSPC, "the file has another length and cannot be written in place", str(path))
        os.pwrite(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_checked(path: Path, kind: str, version: int) -> Any | None:
    """The content, or None if there is no such file.

    Raises:
        CorruptLog: the file is cut short or its CRC does not hold.
        DataDirError: its format version is newer than those that this natslog supports.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    line, _, payload = raw.partition(b"\n")
    found = _HEADER.fullmatch(line)
    if found is None or found.group(1).decode() != kind:
        raise CorruptLog(f"{path}: not a natslog {kind} file, or its first line is damaged", file=str(path))
    crc = crc32c(payload, crc32c(line[:-8]))
    if len(payload) != int(found.group(3)) or crc != int(found.group(4), 16):
        raise CorruptLog(
            f"{path}: the CRC32C of this {kind} file does not match; restore it from a copy", file=str(path)
        )
    if int(found.group(2)) > version:
        raise DataDirError(
            f"{path} is of format version {int(found.group(2))}; this version of natslog supports versions up to "
            f"{version}: upgrade natslog",
            file=str(path),
        )
    return msgspec.json.decode(payload)


def read_record(path: Path, kind: str, version: int, content: type[Record]) -> Record | None:
    """The same as one of those structs. Raises as `read_checked`; UpgradeRequired: it has other fields."""
    found = read_checked(path, kind, version)
    try:
        return None if found is None else msgspec.convert(found, content)
    except msgspec.ValidationError as error:
        raise UpgradeRequired(
            f"{path} was written by a newer version of natslog ({error}): upgrade this broker. The broker does not "
            "start; nothing was changed",
            file=str(path),
        ) from error


def make_folder(folder: Path) -> None:
    """Makes the folder, and those above it, where they are missing; their names are durable when this returns.

    The name of an existing folder is made durable too: the process that created it may have ended before that.
    """
    if not folder.is_dir():
        if folder.parent != folder and not folder.parent.is_dir():
            make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # a folder that this user may not read was not created by natslog
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes names created, renamed or removed in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, pieces: Sequence[Any]) -> None:
    """Writes every byte at the file's end, however short the single writes are.

    Raises:
        OSError: the kernel refused; some bytes may have been written.
    """
    waiting = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while waiting:
        written = os.writev(fd, waiting[:512])
        if written == 0:
            raise OSError(errno.EIO, "the kernel wrote nothing")
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.pop(0))
        if written:
            waiting[0] = waiting[0][written:]
