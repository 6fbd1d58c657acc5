"""An offline check of every byte of a data folder: CRCs, headers, the chain of segments. Reads only."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import msgspec
from crc32c import crc32c

from natslog.arrow import ipc
from natslog.errors import CorruptLog, NatslogError
from natslog.log.checked_file import read_checked
from natslog.log.recovery import scan_segment
from natslog.log.sealed import read_footer_index, sealing_bytes, split_footer
from natslog.log.segment import ACTIVE_SUFFIX, SEALED_SUFFIX, check_file_header, header_bytes_of, read_batch

_CHECKED = {  # name: (kind, newest version)
    "broker": ("broker", 3),
    "life": ("life", 2),
    "metadata": ("metadata", 1),
    "hw-checkpoint": ("hw-checkpoint", 1),
    "log-start": ("log-start", 1),
    "leader-epochs": ("leader-epochs", 1),
    "scrub": ("scrub", 1),
    "hard-state": ("raft-hard-state", 2),
    "snapshot": ("raft-snapshot", 1),
}
_RAFT_LOG = re.compile(r"log-\d{20}|wal-[0-9a-f]{16}")
_RAFT_LOG_HEADER = re.compile(rb"(natslog raft-log v1 first_index=\d{20} crc32c=)([0-9a-f]{8})\n")
_RAFT_WAL_HEAD = re.compile(
    rb"(natslog raft-wal v1 id=([0-9a-f]{16}) bytes=(\d{20}) durable=(\d{20}) crc32c=)([0-9a-f]{8})\n\0*"
)
_RAFT_WAL_HEAD_BYTES = 512
_RECORD = struct.Struct("<II")


class FileReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result for a file; `problems` is empty if nothing is wrong."""

    file: str
    kind: str
    bytes: int
    batches: int | None = None
    messages: int | None = None
    note: str = ""
    problems: tuple[str, ...] = ()


def files_of(folder: Path) -> list[Path]:
    """The natslog files below a folder, in order."""
    wanted = (SEALED_SUFFIX, ACTIVE_SUFFIX)
    found = (path for path in folder.rglob("*") if path.suffix in wanted or path.name in _CHECKED or _is_raft_log(path))
    return sorted(found)


def _is_raft_log(path: Path) -> bool:
    return path.parent.name == "raft" and _RAFT_LOG.fullmatch(path.name) is not None


def check_file(path: Path) -> FileReport:
    """Reads the whole file; what is wrong with it is in the report."""
    size_bytes = path.stat().st_size
    try:
        if path.suffix == ACTIVE_SUFFIX:
            return _check_active(path, size_bytes)
        if path.suffix == SEALED_SUFFIX:
            return _check_sealed(path, size_bytes)
        if _is_raft_log(path):
            check = _check_raft_wal if path.name.startswith("wal-") else _check_raft_log
            return check(path, size_bytes)
        kind, newest_version = _CHECKED[path.name]
        read_checked(path, kind, newest_version)
        return FileReport(file=str(path), kind=path.name, bytes=size_bytes)
    except (NatslogError, OSError) as error:
        kind = {ACTIVE_SUFFIX: "active", SEALED_SUFFIX: "sealed"}.get(path.suffix, path.name)
        return FileReport(file=str(path), kind=kind, bytes=size_bytes, problems=(str(error),))


def _check_raft_log(path: Path, size_bytes: int) -> FileReport:
    """Records one after another; an incomplete last one is the result of a crash (a start reports it if it is more)."""
    data = path.read_bytes()
    header = _RAFT_LOG_HEADER.match(data)
    if header is None or crc32c(header.group(1)) != int(header.group(2), 16):
        raise CorruptLog(f"{path}: the header line is damaged", file=str(path), position=0)
    position, entries = header.end(), 0
    while position + _RECORD.size <= len(data):
        length, crc = _RECORD.unpack_from(data, position)
        payload = data[position + _RECORD.size : position + _RECORD.size + length]
        if len(payload) < length:
            break
        if crc32c(payload, crc32c(data[position : position + 4])) != crc:
            raise CorruptLog(
                f"{path}: the record at byte {position} has a wrong CRC32C", file=str(path), position=position
            )
        position, entries = position + _RECORD.size + length, entries + 1
    note = f"{len(data) - position} bytes of an incomplete record at the end" if position < len(data) else ""
    return FileReport(file=str(path), kind="raft-log", bytes=size_bytes, messages=entries, note=note)


def _check_raft_wal(path: Path, size_bytes: int) -> FileReport:
    """Each record's CRC begins with the one before it. After the durable end there is unused space, or the result of a
    crash.
    """
    data = path.read_bytes()
    head = _RAFT_WAL_HEAD.fullmatch(data[:_RAFT_WAL_HEAD_BYTES])
    if head is None or crc32c(head.group(1)) != int(head.group(5), 16) or len(data) != int(head.group(3)):
        raise CorruptLog(f"{path}: the header is damaged, or the file was truncated", file=str(path), position=0)
    position, durable, crc, saves = _RAFT_WAL_HEAD_BYTES, int(head.group(4)), crc32c(head.group(2)), 0
    while position < durable:
        length, found = _RECORD.unpack_from(data, position)
        payload = data[position + _RECORD.size : position + _RECORD.size + length]
        crc = crc32c(payload, crc32c(data[position : position + 4], crc))
        if found != crc or position + _RECORD.size + length > durable:
            raise CorruptLog(
                f"{path}: the record at byte {position} has a wrong CRC32C", file=str(path), position=position
            )
        position, saves = position + _RECORD.size + length, saves + 1
    extra_bytes = len(data[durable:].rstrip(b"\0"))
    note = f"{extra_bytes} bytes after the durable end" if extra_bytes else ""
    return FileReport(file=str(path), kind="raft-wal", bytes=size_bytes, messages=saves, note=note)


def _header_bytes(path: Path) -> int:
    if not path.stem.isdecimal():
        raise CorruptLog(
            f"{path}: is not a segment: segments are named by their first offset", file=str(path), position=0
        )
    with open(path, "rb") as file:
        return check_file_header(file.read(ipc.MAX_HEADER_BYTES), path, None, int(path.stem))


def _check_active(path: Path, size_bytes: int) -> FileReport:
    checkpoint = read_checked(path.with_name("hw-checkpoint"), "hw-checkpoint", 1)
    scan = scan_segment(
        path,
        position=_header_bytes(path),
        base_offset=int(path.stem),
        durable_offset=checkpoint["high_watermark"] if checkpoint else 0,
    )
    rows = sum(scan.index.rows)
    note = f"{scan.torn_bytes} bytes of an incomplete commit at the end" if scan.torn_bytes else ""
    return FileReport(
        file=str(path),
        kind="active",
        bytes=size_bytes,
        batches=len(scan.index),
        messages=rows,
        note=note,
        problems=tuple(map(str, scan.damages)),
    )


def _check_sealed(path: Path, size_bytes: int) -> FileReport:
    _header_bytes(path)
    index = read_footer_index(path)
    problems, expected = [], int(path.stem)
    lengths: dict[int, int] = {}
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(len(index)):
            entry = index[at]
            if entry.base_offset != expected:
                problems.append(f"offsets {expected} to {entry.base_offset} are missing")
            expected = entry.end_offset
            try:
                lengths[entry.position] = header_bytes_of(read_batch(fd, entry, path))
            except NatslogError as error:
                problems.append(error.message)
    finally:
        os.close(fd)
    position, footer = split_footer(path)
    if len(lengths) == len(index) and footer != sealing_bytes(index, lengths):
        problems.append(
            f"the footer, from byte {position}, is not what sealing wrote: other Arrow programs may read it incorrectly"
        )
    following = sorted(
        int(other.stem) for other in path.parent.iterdir() if other.suffix in (SEALED_SUFFIX, ACTIVE_SUFFIX)
    )
    later = [base for base in following if base > int(path.stem)]
    if later and later[0] != expected:
        problems.append(f"this segment ends at offset {expected}, but the next begins at {later[0]}: a file is missing")
    return FileReport(
        file=str(path),
        kind="sealed",
        bytes=size_bytes,
        batches=len(index),
        messages=sum(index.rows),
        problems=tuple(problems),
    )
