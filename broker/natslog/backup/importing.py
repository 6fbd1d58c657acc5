"""Imports an export of a stream into a cluster.

Theory of operation. The export is checked completely before anything is created. The stream is then created in the
state "importing", in which it takes no message and is not read, and gets the batches at the offsets that they have.
The log itself shows how far the import is, so it may be repeated after any failure. Messages that the original does not
have any more are left out, and removed from what an earlier import has appended. An export that has more of the same
stream is added to a stream that was imported and not resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET
from pyroaring import BitMap64

from natslog.backup.arrow_files import check_batches, check_file
from natslog.backup.exporting import Progress
from natslog.backup.manifest import MANIFEST, PARTIAL, StreamManifest, read_manifest
from natslog.backup.removals import Removed, messages_from, removed_from, without_removed
from natslog.client import NatslogClient
from natslog.errors import DamagedExport, NotEnoughReplicas, OffsetOutOfRange, StreamConflict, StreamNotFound

_AT_ONCE_BYTES = 8 * 1024 * 1024
_OFFSETS_AT_ONCE = 1 << 25
_SET_BACKS = 100


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """The stream after an import. `added_messages`: 0 where all was there before. `without_interest`: its retention was
    `interest`, and is `limits`.
    """

    stream: str
    id: str
    origin_id: str
    first_offset: int
    end_offset: int
    added_messages: int
    resumed: bool
    without_interest: bool


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """`resume`: the stream takes messages when it is complete. `settings`: instead of those of the original."""

    resume: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    progress: Progress = lambda done, total: None


def checked_export(folder: Path, on_file: Callable[[], None] = lambda: None) -> StreamManifest:
    """The manifest of an export whose files are all there, and as they were written.

    Raises:
        DamagedExport.
    """
    manifest = read_manifest(folder / MANIFEST, StreamManifest)
    if manifest is None:
        what = "its export was not completed: repeat it" if (folder / PARTIAL).exists() else "it has no export"
        raise DamagedExport(f"{folder} has no {MANIFEST}: {what}")
    if manifest.end_offset != manifest.high_watermark:
        raise DamagedExport(f"{folder} has messages up to {manifest.end_offset} of {manifest.high_watermark}")
    for file in manifest.files:
        check_file(folder, file)
        check_batches(folder, manifest, file)
        on_file()
    return manifest


def import_stream(
    client: NatslogClient, folder: Path, manifest: StreamManifest, name: str, options: ImportOptions = ImportOptions()
) -> Imported:
    """Imports a checked export as the stream `name`; continues where an earlier import of it has ended.

    An export has no JetStream consumers. A stream with the retention `interest` would remove all messages that no
    consumer needs as soon as it is resumed, so it is imported with the retention `limits`.

    Raises:
        StreamConflict: a stream of that name is no import of this export, or was resumed since. As
        `NatslogClient.append_import`.
    """
    there, removed = _state(client, name), Removed.of(manifest.removals, str(folder / MANIFEST))
    if there is not None and _has_all(there, manifest) and _lacks(client, there, removed):
        return _result(client, there, manifest, 0, options)
    if there is not None and there["next_offset"] < manifest.first_offset:
        raise StreamConflict(
            f"stream {name!r} ends at offset {there['next_offset']}, and the export begins at {manifest.first_offset}: "
            "the messages in between are missing. Import the export under another name (--as)",
            stream=name,
        )
    settings = manifest.settings | options.settings
    if "replicas" in options.settings:
        settings.pop("min_isr", None)
    client.begin_import(
        name,
        settings=settings,
        lineage=manifest.lineage,
        first_offset=manifest.first_offset,
        subjects=manifest.subjects,
        jetstream=_jetstream_of(manifest),
    )
    there = client.import_state(name)
    _remove(client, there, removed)
    added = _append(client, folder, manifest, there, options, removed.removed)
    there |= client.finish_import(name, there["id"], lineage=manifest.lineage, resume=options.resume)
    if manifest.sealed:
        client.seal(name)
    return _result(client, there, manifest, added, options)


def _jetstream_of(manifest: StreamManifest) -> dict[str, Any] | None:
    kept = manifest.jetstream
    if kept is UNSET:
        return None
    if kept.retention == "interest":
        kept = msgspec.structs.replace(kept, retention="limits")
    found: dict[str, Any] = msgspec.to_builtins(kept)
    return found


def _state(client: NatslogClient, name: str) -> dict[str, Any] | None:
    try:
        return client.import_state(name)
    except StreamNotFound:
        return None


def _has_all(there: dict[str, Any], manifest: StreamManifest) -> bool:
    """Whether this export, or one with more of the same stream, was imported completely."""
    forks = {fork["id"]: fork["offset"] for fork in there["lineage"]}
    return there["state"] != "importing" and bool(forks.get(manifest.id, -1) >= manifest.end_offset)


def _remove(client: NatslogClient, there: dict[str, Any], removed: Removed) -> None:
    """What an earlier import has appended, and the original does not have any more."""
    first, end = there["first_offset"], there["next_offset"]
    for start in range(first, end, _OFFSETS_AT_ONCE):
        part = removed.within(start, min(start + _OFFSETS_AT_ONCE, end))
        if part.removed:
            client.remove_imported(there["name"], there["id"], msgspec.to_builtins(part.stated()))


def _lacks(client: NatslogClient, there: dict[str, Any], removed: Removed) -> bool:
    """Whether a stream that was imported completely has nothing more that the original does not have."""
    if there["state"] == "resumed" or not removed.removed:
        return True
    wanted = removed.within(there["first_offset"], there["next_offset"])
    known = removed_from(client, there["name"], there["first_offset"], there["next_offset"])
    pairs = ((wanted.removed, known.removed), (wanted.subjects, known.subjects), (wanted.keys, known.keys))
    return all(one <= other for one, other in pairs)


def _append(
    client: NatslogClient,
    folder: Path,
    manifest: StreamManifest,
    there: dict[str, Any],
    options: ImportOptions,
    removed: BitMap64,
) -> int:
    """Appends what is not there. Returns how many messages."""
    name, begun = there["name"], there["next_offset"]
    at = begun
    for _ in range(_SET_BACKS):
        try:
            for body, end in _bodies(folder, manifest, at, removed):
                at = max(end, client.append_import(name, there["id"], body))
                options.progress(min(at, manifest.end_offset) - begun, manifest.end_offset - begun)
            files = [file for file in manifest.files if file.end_offset > begun]
            return sum(messages_from(folder, manifest, file, begun, removed) for file in files)
        except OffsetOutOfRange as error:  # another leader, which has cut a part of a direct append
            at = _set_back_to(error, at)
    raise NotEnoughReplicas(f"the leader of stream {name!r} changes again and again: repeat the import", stream=name)


def _set_back_to(error: OffsetOutOfRange, at: int) -> int:
    """Raises the error: the log does not end before what was sent."""
    next_offset = error.facts.get("next_offset")
    if not isinstance(next_offset, int) or next_offset >= at:
        raise error
    return next_offset


def _bodies(folder: Path, manifest: StreamManifest, start: int, removed: BitMap64) -> Iterator[tuple[bytes, int]]:
    """The batches from an offset on without removed rows, some megabytes at a time, and the offset where they end."""
    pieces: list[memoryview] = []
    size_bytes = end = 0
    for file in manifest.files:
        if file.end_offset <= start:
            continue
        for header, message in without_removed(folder, manifest, file, removed):
            if header.end_offset <= start:
                continue
            if pieces and size_bytes + len(message) > _AT_ONCE_BYTES:
                yield b"".join(pieces), end
                pieces, size_bytes = [], 0
            pieces.append(message)
            size_bytes, end = size_bytes + len(message), header.end_offset
    if pieces:
        yield b"".join(pieces), end


def _result(
    client: NatslogClient, there: dict[str, Any], manifest: StreamManifest, added: int, options: ImportOptions
) -> Imported:
    is_resumed = there["state"] == "resumed"
    if options.resume and not is_resumed:
        client.edit_stream(there["name"], paused=False)
        is_resumed = True
    return Imported(
        stream=there["name"],
        id=there["id"],
        origin_id=manifest.id,
        first_offset=there["first_offset"],
        end_offset=manifest.end_offset,
        added_messages=added,
        resumed=is_resumed,
        without_interest=manifest.jetstream is not UNSET and manifest.jetstream.retention == "interest",
    )
