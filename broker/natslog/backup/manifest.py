"""What an export consists of: the manifest of a stream, and that of a whole cluster. JSON, with a CRC32C of its own.

    DIR/manifest.json  DIR/00000000000000000000.arrow …                       of one stream
    DIR/cluster.json   DIR/streams/NAME/manifest.json …                       of all

Names of files follow from offsets and names of streams, which are checked, so that no manifest can name a file
elsewhere. docs/FORMATS.md describes both.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from crc32c import crc32c
from msgspec import UNSET, Meta, UnsetType

from natslog.errors import DamagedExport, InvalidRequest
from natslog.log.checked_file import sync_folder
from natslog.model import MAX_LINEAGE, Fork, JetStreamSettings, Offset, StreamId
from natslog.security.records import Security
from natslog.stream_settings import parse_settings
from natslog.subjects import NAME_PATTERN

FORMAT_VERSION = 1
MANIFEST, PARTIAL, CLUSTER = "manifest.json", "manifest.partial.json", "cluster.json"
STREAMS = "streams"
_MOST_BYTES = 256 * 1024 * 1024

Count = Annotated[int, Meta(ge=0, le=2**62)]
Crc = Annotated[str, Meta(pattern="^[0-9a-f]{8}$")]
Name = Annotated[str, Meta(pattern=f"^{NAME_PATTERN}$", max_length=128)]
FILE_NAME = re.compile(r"(\d{20})(?:-([1-9]\d{0,8}))?\.arrow")


class ExportedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An Arrow IPC file with the batches of the offsets `[first_offset, end_offset)`. `crc32c`: of the whole file.
    `rows`: that are in it. `removed`: how many of them were removed from the stream since (`Removals`).
    """

    name: str
    bytes: Count
    crc32c: Crc
    first_offset: Count
    end_offset: Count
    rows: Count
    removed: Count | UnsetType = UNSET

    @property
    def messages(self) -> int:
        """That the stream still has."""
        return self.rows - (self.removed or 0)


class Removals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Offsets that the stream does not have any more, as Roaring bitmaps: `removed`; and those of them that were
    erased, by subject or by key.
    """

    removed: bytes = b""
    erased_subjects: bytes = b""
    erased_keys: bytes = b""


class StreamManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All messages of a stream with offsets `[first_offset, end_offset)`.

    Attributes:
        settings: as the HTTP API has them. `subjects`: wildcards that cover the subjects of all messages.
        lineage: what a stream that is restored from this has: the streams whose positions are valid in it, this one
            last.
        high_watermark: of the stream when the export began; the same as `end_offset`, unless it is not complete.
        jetstream: of a stream of JetStream, what its configuration has beside `settings`.
        removals: of messages that were exported before. An import leaves them out. Files have no erased ones.
    """

    format_version: int
    natslog: str
    cluster_id: str
    name: Name
    id: Annotated[str, Meta(pattern="^[0-9a-f]{1,64}$")]
    settings: dict[str, Any]
    subjects: list[str]
    sealed: bool
    lineage: Annotated[tuple[Fork, ...], Meta(min_length=1, max_length=MAX_LINEAGE)]
    first_offset: Count
    end_offset: Count
    high_watermark: Count
    exported_at: str
    files: tuple[ExportedFile, ...]
    jetstream: JetStreamSettings | UnsetType = UNSET
    removals: Removals | UnsetType = UNSET
    crc32c: str = ""

    @property
    def rows(self) -> int:
        """How many messages it has that were not removed since."""
        return sum(file.messages for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def check(self, path: Path) -> None:
        """Raises DamagedExport: what it states cannot be."""
        at = self.first_offset
        for file in self.files:
            has_too_many = file.rows > file.end_offset - at or (file.removed or 0) > file.rows
            if file.first_offset != at or file.end_offset <= at or has_too_many:
                raise DamagedExport(f"{path}: the offsets of the file {file.name!r} do not follow those before it")
            if (found := FILE_NAME.fullmatch(file.name)) is None or int(found.group(1)) != at:
                raise DamagedExport(f"{path}: {file.name!r} is not the name of the file with offset {at}")
            at = file.end_offset
        forks = [fork.offset for fork in self.lineage]
        if at != self.end_offset or at > self.high_watermark:
            raise DamagedExport(f"{path}: the files end at offset {at}, the export at {self.end_offset}")
        if self.lineage[-1] != Fork(id=StreamId(self.id), offset=Offset(at)) or forks != sorted(forks):
            raise DamagedExport(f"{path}: the lineage is not that of an export that ends at offset {at}")
        try:
            parse_settings(self.settings)
        except (InvalidRequest, TypeError, AttributeError) as error:
            raise DamagedExport(f"{path}: {error}") from error


class ExportedCursor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    consumer: Name
    stream: Name
    id: str
    offset: Count
    timestamp: str


class ClusterManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A backup of a cluster: streams in folders of their own, cursors, and what access control has.

    `holds`, `lacks`: what it has and what not, for people. `security`: None where it is not enabled, or left out.
    """

    format_version: int
    natslog: str
    cluster_id: str
    exported_at: str
    holds: list[str]
    lacks: list[str]
    streams: list[Name]
    cursors: list[ExportedCursor]
    security: Security | None
    crc32c: str = ""


Kind = TypeVar("Kind", StreamManifest, ClusterManifest)


class _Version(msgspec.Struct):
    format_version: int


def file_name(first_offset: int) -> str:
    return f"{first_offset:020d}.arrow"


def next_file_name(name: str) -> str:
    """Of the file that takes the place of another one: the name is new, so that the former one stays until then."""
    found = FILE_NAME.fullmatch(name)
    assert found is not None, "a manifest is checked"
    return f"{found.group(1)}-{int(found.group(2) or 0) + 1}.arrow"


def read_manifest(path: Path, kind: type[Kind]) -> Kind | None:
    """None where there is none.

    Raises:
        DamagedExport: it is damaged, was changed, or is of a newer format.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DamagedExport(f"{path} is larger than any manifest")
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise DamagedExport(
                f"{path} is of format version {version}; this version of natslog supports {FORMAT_VERSION}: use the "
                "version that wrote it, or a newer one"
            )
        manifest = msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise DamagedExport(f"{path} is not a manifest of an export, or is damaged: {error}") from error
    if manifest.crc32c != _crc(manifest):
        raise DamagedExport(f"{path} is damaged, or was changed: its CRC32C does not match")
    if isinstance(manifest, StreamManifest):
        manifest.check(path)
    return manifest


def write_manifest(path: Path, manifest: StreamManifest | ClusterManifest) -> None:
    """Replaces the file; durable when this returns. Raises OSError: it is as it was."""
    stated = msgspec.structs.replace(manifest, crc32c=_crc(manifest))
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # digests of tokens, settings
        file.write(msgspec.json.format(msgspec.json.encode(stated), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def _crc(manifest: StreamManifest | ClusterManifest) -> str:
    return f"{crc32c(msgspec.json.encode(msgspec.structs.replace(manifest, crc32c=''), order='deterministic')):08x}"
