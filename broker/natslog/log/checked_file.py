"""Small files that prove themselves: one header line with format, length and CRC32C, then JSON.

    natslog hw-checkpoint v1 bytes=27 crc32c=8f1c2a07
    {"high_watermark": 38094}

A file is replaced whole: written beside, fsynced, renamed over, and the folder fsynced. A reader sees the old one or
the new one, never a part.
"""

from __future__ import annotations

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

_HEADER = re.compile(rb"natslog ([a-z-]+) v(\d+) bytes=(\d+) crc32c=([0-9a-f]{8})")


def write_checked(path: Path, kind: str, version: int, content: Any) -> None:
    """Replaces `path` durably with `content` (anything msgspec can write as JSON)."""
    payload = msgspec.json.encode(content)
    header = b"natslog %s v%d bytes=%d crc32c=" % (kind.encode(), version, len(payload))
    crc = crc32c(payload, crc32c(header))
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb") as file:
        file.write(header + b"%08x\n" % crc + payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def read_checked(path: Path, kind: str, version: int) -> Any | None:
    """The content, or None if there is no such file.

    Raises:
        CorruptLog: the file is cut short or its CRC does not hold.
        DataDirError: it is of a newer format version than this natslog knows.
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
            f"{path}: the CRC32C of this {kind} file does not hold; restore it from a copy", file=str(path)
        )
    if int(found.group(2)) > version:
        raise DataDirError(
            f"{path} is of format version {int(found.group(2))}; this natslog knows up to {version}: upgrade natslog",
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
            f"{path} was written by a newer natslog ({error}): upgrade this broker. It does not start, and nothing is "
            "changed",
            file=str(path),
        ) from error


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
