"""Exports a stream into a folder: Arrow files of bounded size, then the manifest.

Theory of operation. The high watermark when the export begins is its end, so an export is consistent at one offset.
Stored batches are requested and written as they are. Each file is on stable storage before it has its name, and then
stands in a manifest of what is there so far (`manifest.partial.json`); `manifest.json` is replaced when all is there.
So an export that is interrupted, or fails, leaves the one before it intact, and the next one continues.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from natslog.arrow import ipc
from natslog.arrow.batch_line import BatchHeader
from natslog.backup.arrow_files import FileWriter, check_file
from natslog.backup.manifest import (
    FILE_NAME,
    FORMAT_VERSION,
    MANIFEST,
    PARTIAL,
    ExportedFile,
    StreamManifest,
    read_manifest,
    write_manifest,
)
from natslog.backup.removals import applied, drop_unnamed, removed_from
from natslog.client import NatslogClient
from natslog.errors import DamagedExport, ExportFailed, natslog_version
from natslog.log.checked_file import make_folder
from natslog.model import MAX_LINEAGE, Fork, JetStreamSettings, Offset, StreamId
from natslog.stream_settings import SETTING_NAMES
from natslog.units import offsets_between

FILE_BYTES = 128 * 1024 * 1024
_AT_ONCE_BYTES = 8 * 1024 * 1024

Progress = Callable[[int, int], None]
"""Called with the offsets that are done, and all of them."""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What an export has now, and what was added to it. `removed_messages`: of those that were exported before, how
    many were removed from the stream since then. `rewritten_files`: files that had erased ones.
    """

    stream: str
    id: str
    first_offset: int
    end_offset: int
    messages: int
    bytes: int
    files: int
    added_messages: int
    added_bytes: int
    removed_messages: int = 0
    rewritten_files: int = 0


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """`file_bytes`: a file is closed when the next batch would make it larger. `verify`: compare files of an earlier
    export with their CRCs before it is continued. `deliver`: takes each file that is complete, which is then removed.
    """

    file_bytes: int = FILE_BYTES
    verify: bool = True
    deliver: Callable[[Path], None] | None = None
    progress: Progress = lambda done, total: None


def export_stream(client: NatslogClient, name: str, folder: Path, options: ExportOptions = ExportOptions()) -> Exported:
    """Exports what the stream has, or what it has got since the last export into this folder.

    Raises:
        ExportFailed: the folder is not that of an export of this stream; messages were removed before they were
            exported; it could not be written. DamagedExport: of the export that is continued. As
            `NatslogClient.stored_batches`.
    """
    with writing_to(folder), locked(folder):
        info, cluster_id = client.position(name), client.cluster()["cluster_id"]
        before = _export_there(folder, info, options)
        planned, files = _manifest(info, cluster_id, before), tuple[ExportedFile, ...]()
        if before is not None:
            removed = removed_from(client, name, before.first_offset, before.end_offset)
            files, removed = applied(folder, before, removed)
            planned = msgspec.structs.replace(planned, removals=removed.stated())
        written = _write_files(client, folder, planned, files, options)
        write_manifest(folder / MANIFEST, written)
        (folder / PARTIAL).unlink(missing_ok=True)
        if before is not None:
            drop_unnamed(folder, written)
        if options.deliver is not None:
            options.deliver(folder / MANIFEST)
    kept = written.files[: len(files)]
    removed_rows = (before.rows if before else 0) - sum(file.messages for file in kept)
    rewritten = 0 if before is None else sum(one.name != was.name for one, was in zip(kept, before.files, strict=True))
    return Exported(
        stream=name,
        id=written.id,
        first_offset=written.first_offset,
        end_offset=written.end_offset,
        messages=written.rows,
        bytes=written.bytes,
        files=len(written.files),
        added_messages=written.rows - sum(file.messages for file in kept),
        added_bytes=written.bytes - sum(file.bytes for file in kept),
        removed_messages=removed_rows,
        rewritten_files=rewritten,
    )


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raises ExportFailed in place of OSError."""
    try:
        yield
    except OSError as error:
        raise ExportFailed(
            f"the export to {error.filename or folder} failed: {error.strerror or error}. What was exported before is "
            "intact: when the cause is corrected, the same command continues"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One export at a time. Raises ExportFailed, OSError."""
    make_folder(folder)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ExportFailed(f"another export to {folder} is in progress: wait until it has ended") from error
    try:
        yield
    finally:
        os.close(fd)


def _export_there(folder: Path, info: dict[str, Any], options: ExportOptions) -> StreamManifest | None:
    """The export that is continued, checked; its temporary files are removed. None: the folder is empty.

    Raises:
        ExportFailed, DamagedExport.
    """
    name, stream_id = info["name"], info["id"]
    whole, partial = (read_manifest(folder / one, StreamManifest) for one in (MANIFEST, PARTIAL))
    found = partial or whole
    if found is None:
        if any(folder.iterdir()):
            raise ExportFailed(f"{folder} has other files, and no export: name an empty or new folder")
        return None
    if any(one is not None and one.id != stream_id for one in (whole, partial)):
        raise ExportFailed(
            f"{folder} has an export of stream {found.name!r} with the id {found.id}; stream {name!r} has the id "
            f"{stream_id}, so it is another one: name another folder"
        )
    if whole is not None and partial is not None and _ranges(partial)[: len(whole.files)] != _ranges(whole):
        raise DamagedExport(f"{folder}: {MANIFEST} and {PARTIAL} contradict each other: use another folder")
    for left in folder.glob("*.tmp"):
        if FILE_NAME.fullmatch(left.name.removesuffix(".tmp")) or left.name.startswith(MANIFEST.split(".")[0]):
            left.unlink()
    for file in found.files:
        check_file(folder, file, verify=options.verify)
    if info["log_start_offset"] > found.end_offset:
        raise ExportFailed(
            f"{folder} has {offsets_between(found.first_offset, found.end_offset)} of stream {name!r}, which now "
            f"begins at {info['log_start_offset']}: the messages in between were removed before they were exported. "
            "The export in the folder is intact; export into a new folder, and more often than messages expire",
        )
    if info["high_watermark"] < found.end_offset:
        raise ExportFailed(
            f"stream {name!r} ends at offset {info['high_watermark']}, but {folder} has messages up to "
            f"{found.end_offset}: the stream lost messages since. The export is intact; keep it, and use another folder"
        )
    return found


def _ranges(manifest: StreamManifest) -> list[tuple[int, int]]:
    """Of its files. (One with erased messages has another name in the later manifest.)"""
    return [(file.first_offset, file.end_offset) for file in manifest.files]


def _manifest(info: dict[str, Any], cluster_id: str, before: StreamManifest | None) -> StreamManifest:
    """What the export will be, without its files: `lineage` is that of the stream."""
    first = info["log_start_offset"] if before is None else before.first_offset
    subjects = dict.fromkeys([*info["subjects"], *info.get("former_subjects", [">"])])
    subjects |= dict.fromkeys(before.subjects if before is not None else ())
    return StreamManifest(
        format_version=FORMAT_VERSION,
        natslog=natslog_version(),
        cluster_id=cluster_id,
        name=info["name"],
        id=info["id"],
        settings={name: info[name] for name in SETTING_NAMES},
        jetstream=msgspec.convert(info["jetstream"], JetStreamSettings) if "jetstream" in info else UNSET,
        subjects=list(subjects),
        sealed=info.get("sealed", False),
        lineage=tuple(msgspec.convert(info.get("lineage", []), tuple[Fork, ...])),
        first_offset=first,
        end_offset=first,
        high_watermark=info["high_watermark"],
        exported_at=now(),
        files=(),
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _with_files(planned: StreamManifest, files: tuple[ExportedFile, ...]) -> StreamManifest:
    """The manifest of so many files: its end, and the lineage of a stream that is restored from them."""
    end = files[-1].end_offset if files else planned.first_offset
    forks = [Fork(id=one.id, offset=Offset(min(one.offset, end))) for one in planned.lineage]
    lineage = (*forks, Fork(id=StreamId(planned.id), offset=Offset(end)))[-MAX_LINEAGE:]
    return msgspec.structs.replace(planned, files=files, end_offset=end, lineage=lineage)


def _write_files(
    client: NatslogClient,
    folder: Path,
    planned: StreamManifest,
    files: tuple[ExportedFile, ...],
    options: ExportOptions,
) -> StreamManifest:
    """The manifest of these files, and of those that are added up to the high watermark."""
    manifest = _with_files(planned, files)
    begun, total = manifest.end_offset, manifest.high_watermark - manifest.end_offset
    write_manifest(folder / PARTIAL, manifest)
    writer: FileWriter | None = None

    def finish(writer: FileWriter) -> StreamManifest:
        file = writer.finish()
        found = _with_files(planned, (*manifest.files, file))
        write_manifest(folder / PARTIAL, found)
        if options.deliver is not None:
            options.deliver(folder / file.name)
            (folder / file.name).unlink()
        return found

    try:
        for header, message in _batches(client, manifest):
            if writer is not None and writer.size_bytes + header.total_bytes > options.file_bytes:
                manifest, writer = finish(writer), None
            writer = writer or FileWriter(folder, planned.id, header.base_offset)
            writer.add(header, message)
            options.progress(header.end_offset - begun, total)
        return manifest if writer is None else finish(writer)
    except BaseException:
        if writer is not None:
            writer.abort()
        raise


def _batches(client: NatslogClient, manifest: StreamManifest) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Those behind the end of the manifest, up to the high watermark. The first and the last one are cut where the
    export begins or ends inside of them.
    """
    at, end = manifest.end_offset, manifest.high_watermark
    while at < end:
        upto, _ = client.extent(manifest.name, at, end, max_bytes=_AT_ONCE_BYTES)
        for header, message in client.stored_batches(manifest.name, at, min(upto, end), expected_id=manifest.id):
            yield _within(header, message, at, end)
            at = min(header.end_offset, end)


def _within(header: BatchHeader, message: memoryview, start: int, end: int) -> tuple[BatchHeader, memoryview]:
    if start <= header.base_offset and header.end_offset <= end:
        return header, message
    clipped = ipc.clip_batch(message, start, end)
    found = ipc.proven_header(clipped[: ipc.MAX_HEADER_BYTES])
    assert found is not None, "it was just written"
    return found, clipped
