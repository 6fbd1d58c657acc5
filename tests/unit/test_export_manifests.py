"""Manifests from elsewhere: what cannot be is refused with a reason, and no file outside of the folder is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from natslog.backup.manifest import (
    CLUSTER,
    MANIFEST,
    ClusterManifest,
    ExportedFile,
    StreamManifest,
    read_manifest,
    write_manifest,
)
from natslog.errors import DamagedExport
from natslog.model import Fork


def manifest(**changes: Any) -> StreamManifest:
    files = tuple(
        ExportedFile(
            name=f"{first:020d}.arrow", bytes=10, crc32c="0" * 8, first_offset=first, end_offset=first + 5, rows=5
        )
        for first in (10, 15)
    )
    good = StreamManifest(
        format_version=1,
        natslog="0.2.0",
        cluster_id="c",
        name="orders",
        id="ab" * 16,
        settings={"subject": "orders.>", "replicas": 3, "max_age": "7d"},
        subjects=["orders.>"],
        sealed=False,
        lineage=(Fork(id="ab" * 16, offset=20),),
        first_offset=10,
        end_offset=20,
        high_watermark=20,
        exported_at="2026-11-23T00:00:00Z",
        files=files,
    )
    return msgspec.structs.replace(good, **changes)


def written(path: Path, content: StreamManifest) -> StreamManifest | None:
    write_manifest(path, content)
    return read_manifest(path, StreamManifest)


def file(at: int, **changes: Any) -> tuple[ExportedFile, ...]:
    files = list(manifest().files)
    files[at] = msgspec.structs.replace(files[at], **changes)
    return tuple(files)


def test_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    assert read_manifest(path, StreamManifest) is None
    found = written(path, manifest())
    assert found is not None
    assert msgspec.structs.replace(found, crc32c="") == manifest()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "changes",
    [
        {"files": file(0, name="../../../etc/passwd")},
        {"files": file(0, name="/etc/passwd")},
        {"files": file(1, name=f"{16:020d}.arrow")},
        {"files": file(1, first_offset=16)},
        {"files": file(1, first_offset=14)},
        {"files": file(0, end_offset=10)},
        {"files": file(0, rows=6)},
        {"files": file(0, rows=-1)},
        {"files": file(0, bytes=2**63)},
        {"files": file(0, crc32c="zz")},
        {"files": manifest().files[:1]},
        {"end_offset": 25},
        {"high_watermark": 19},
        {"first_offset": 0},
        {"lineage": ()},
        {"lineage": (Fork(id="ab" * 16, offset=21),)},
        {"lineage": (Fork(id="cd" * 16, offset=20),)},
        {"lineage": (Fork(id="cd" * 16, offset=30), Fork(id="ab" * 16, offset=20))},
        {"id": "../x"},
        {"name": "../x"},
        {"name": ""},
        {"settings": {}},
        {"settings": {"subject": "a b"}},
        {"settings": {"subject": "a", "replicas": 10**30}},
        {"settings": {"subject": "a", "max_age": [1]}},
        {"format_version": 2},
        {"format_version": -1},
    ],
)
def test_manifest_that_cannot_be_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DamagedExport):
        written(tmp_path / MANIFEST, manifest(**changes))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"format_version": 1}', b"[" * 100_000, b"\xff\xfe"])
def test_foreign_files_are_refused(data: bytes, tmp_path: Path) -> None:
    for name, kind in ((MANIFEST, StreamManifest), (CLUSTER, ClusterManifest)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DamagedExport):
            read_manifest(tmp_path / name, kind)


def test_change_of_any_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    found = written(path, manifest())
    data = path.read_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        try:
            assert read_manifest(path, StreamManifest) == found, f"byte {at}"
        except DamagedExport:
            continue
