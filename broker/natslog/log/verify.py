"""An offline check of a data folder: CRCs, headers, the chain of segments. Reads only.

Of the messages of a segment, those are counted as removed that the companion log beside it records. What rules of the
stream hide in addition is not known here: it depends on settings in the metadata.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec
import pyarrow as pa
from crc32c import crc32c
from pyroaring import BitMap64

from natslog.arrow import ipc
from natslog.errors import CorruptLog, NatslogError
from natslog.log.batch_index import BatchIndex
from natslog.log.checked_file import read_checked
from natslog.log.erasing import ErasedOffsets
from natslog.log.recovery import scan_segment
from natslog.log.removed import from_bytes
from natslog.log.sealed import read_footer_index, sealing_bytes, split_footer
from natslog.log.segment import ACTIVE_SUFFIX, SEALED_SUFFIX, check_file_header, header_bytes_of, read_batch
from natslog.units import gap_between

_CHECKED = {  # name: (kind, newest version)
    "broker": ("broker", 3),
    "life": ("life", 2),
    "metadata": ("metadata", 1),
    "hw-checkpoint": ("hw-checkpoint", 1),
    "log-start": ("log-start", 1),
    "leader-epochs": ("leader-epochs", 1),
    "scrub": ("scrub", 1),
    "compression": ("compression", 1),
    "newest": ("newest", 1),
    "erasures": ("erasures", 1),
    "producers": ("producers", 1),
    "clock": ("clock", 1),
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
    """The result for a file; `problems` is empty if nothing is wrong. `messages`: rows that are stored. `removed`: how
    many of their offsets are recorded as removed, with those that have no row any more.
    """

    file: str
    kind: str
    bytes: int
    batches: int | None = None
    messages: int | None = None
    removed: int | None = None
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


def _base_of(path: Path) -> int:
    """The first offset. (A file of an export that was written again has a number behind it.)"""
    return int(path.stem.partition("-")[0])


def _header_bytes(path: Path) -> int:
    if not path.stem.partition("-")[0].isdecimal():
        raise CorruptLog(
            f"{path}: is not a segment: segments are named by their first offset", file=str(path), position=0
        )
    with open(path, "rb") as file:
        return check_file_header(file.read(ipc.MAX_HEADER_BYTES), path, None, _base_of(path))


def _check_active(path: Path, size_bytes: int) -> FileReport:
    checkpoint = read_checked(path.with_name("hw-checkpoint"), "hw-checkpoint", 1)
    scan = scan_segment(
        path,
        position=_header_bytes(path),
        base_offset=_base_of(path),
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
        removed=_removed_in(path, scan.index),
        note=note,
        problems=tuple(map(str, scan.damages)),
    )


def _check_sealed(path: Path, size_bytes: int) -> FileReport:
    _header_bytes(path)
    index = read_footer_index(path)
    problems, expected = [], _base_of(path)
    lengths: dict[int, int] = {}
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(len(index)):
            entry = index[at]
            if entry.base_offset != expected:
                problems.append(gap_between(expected, entry.base_offset))
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
        _base_of(other) for other in path.parent.iterdir() if other.suffix in (SEALED_SUFFIX, ACTIVE_SUFFIX)
    )
    later = [base for base in following if base > _base_of(path)]
    if later and later[0] != expected:
        problems.append(f"this segment ends at offset {expected}, but the next begins at {later[0]}: a file is missing")
    return FileReport(
        file=str(path),
        kind="sealed",
        bytes=size_bytes,
        batches=len(index),
        messages=sum(index.rows),
        removed=_removed_in(path, index),
        problems=tuple(problems),
    )


def _removed_in(path: Path, index: BatchIndex) -> int | None:
    """None where the stream has no companion log, or where it is damaged, which the report of its file says."""
    companion = path.parent / "companion"
    if not len(index) or not companion.is_dir():
        return None
    try:
        state = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in companion.iterdir()]
        removed = _recorded(companion, tuple(sorted(state)))
    except (NatslogError, OSError):
        return None
    return int(removed.range_cardinality(index.base_offsets[0], index.end_offsets[-1]))


@lru_cache(maxsize=1)
def _recorded(companion: Path, state: tuple[tuple[str, int, int], ...]) -> BitMap64:
    """All offsets that the records of a companion log name, whose files are in this state. Raises CorruptLog,
    OSError.
    """
    found = BitMap64()
    for batch in _batches_of(companion):
        for kind, data in zip(batch.column("subject").to_pylist(), batch.column("value").to_pylist(), strict=True):
            if kind == "removed":
                found |= from_bytes(data, str(companion))
            elif kind == "erased":
                found |= ErasedOffsets.from_bytes(data, str(companion)).bitmap(str(companion))
    return found


def _batches_of(folder: Path) -> Iterator[pa.RecordBatch]:
    for path in sorted(folder.iterdir()):
        if path.suffix == ACTIVE_SUFFIX:
            index = scan_segment(path, position=_header_bytes(path), base_offset=_base_of(path), durable_offset=0).index
        elif path.suffix == SEALED_SUFFIX:
            index = read_footer_index(path)
        else:
            continue
        with open(path, "rb") as file:
            for at in range(len(index)):
                yield ipc.decode_batch(read_batch(file.fileno(), index[at], path))
