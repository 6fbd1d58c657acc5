"""A backup of a cluster: every stream, cursors, and what access control has; and its import into another cluster.

Invariant. Cursors are read before the streams, so each points to a message that is exported, or to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from natslog.backup.exporting import Exported, ExportOptions, export_stream, locked, now, writing_to
from natslog.backup.importing import Imported, ImportOptions, checked_export, import_stream
from natslog.backup.manifest import (
    CLUSTER,
    FORMAT_VERSION,
    STREAMS,
    ClusterManifest,
    ExportedCursor,
    StreamManifest,
    read_manifest,
    write_manifest,
)
from natslog.client import NatslogClient
from natslog.cluster.cursors import CONSUMER_PREFIX
from natslog.errors import DamagedExport, ExportFailed, InvalidRequest, StreamRecreated, natslog_version
from natslog.security.records import Security

LACKS = [
    "secrets of tokens (only their digests, by which brokers recognise them)",
    "configuration files, certificates and secrets of brokers",
    "the identity of the cluster, and ids and leader epochs of its streams",
    "the stream __activity",
    "states of consumers at the brokers (they do not exist)",
]


class ExportedCluster(msgspec.Struct, frozen=True, kw_only=True):
    streams: list[Exported]
    cursors: int
    holds: list[str]
    lacks: list[str]


class ImportedCluster(msgspec.Struct, frozen=True, kw_only=True):
    """`cursors_left`: those that exist, and were left as they are. `cursor_problems`: why others were not set.
    `access`: how much was added; None: nothing was to be.
    """

    streams: list[Imported]
    cursors: int
    cursors_left: int
    cursor_problems: list[str]
    access: dict[str, int] | None


def export_cluster(
    client: NatslogClient,
    folder: Path,
    options: ExportOptions = ExportOptions(),
    *,
    with_access: bool = True,
) -> ExportedCluster:
    """Exports all streams into folders of their own, then the manifest of the cluster.

    Raises:
        ExportFailed: as `export_stream`; or the folder has other files. Forbidden: access control is exported by an
        administrator only.
    """
    with writing_to(folder), locked(folder):
        known = read_manifest(folder / CLUSTER, ClusterManifest)
        if known is None and any(path.name != STREAMS for path in folder.iterdir()):
            raise ExportFailed(f"{folder} has other files, and no export of a cluster: name an empty or new folder")
        cluster_id = client.cluster()["cluster_id"]
        if known is not None and known.cluster_id != cluster_id:
            raise ExportFailed(
                f"{folder} has an export of the cluster {known.cluster_id}, and this is {cluster_id}: name another "
                "folder"
            )
        security = _security_of(client) if with_access else None
        cursors = [one for one in client.cursors() if not one["consumer"].startswith(CONSUMER_PREFIX)]
        names = [body["name"] for body in client.streams(current=True)]
        exported = [export_stream(client, name, folder / STREAMS / name, options) for name in names]
        ends = {one.stream: one for one in exported}
        manifest = ClusterManifest(
            format_version=FORMAT_VERSION,
            natslog=natslog_version(),
            cluster_id=cluster_id,
            exported_at=now(),
            holds=["streams with their settings", "cursors", *(["tokens, roles, rules, quotas"] if security else [])],
            lacks=LACKS if security else [*LACKS, "tokens, roles, rules, quotas"],
            streams=names,
            cursors=[_cursor(one) for one in cursors if one["stream"] in ends and one["id"] == ends[one["stream"]].id],
            security=security,
        )
        write_manifest(folder / CLUSTER, manifest)
        if options.deliver is not None:
            options.deliver(folder / CLUSTER)
    return ExportedCluster(streams=exported, cursors=len(manifest.cursors), holds=manifest.holds, lacks=manifest.lacks)


def _security_of(client: NatslogClient) -> Security | None:
    found = client.stored_security()
    return msgspec.convert(found["security"], Security) if found["enabled"] else None


def _cursor(shown: dict[str, Any]) -> ExportedCursor:
    return ExportedCursor(
        consumer=shown["consumer"],
        stream=shown["stream"],
        id=shown["id"],
        offset=shown["offset"],
        timestamp=shown["timestamp"],
    )


@dataclass(frozen=True, slots=True)
class CheckedCluster:
    """An export whose files are all as they were written."""

    folder: Path
    manifest: ClusterManifest
    streams: dict[str, StreamManifest]


def checked_cluster(folder: Path, on_file: Callable[[], None] = lambda: None) -> CheckedCluster:
    """Raises DamagedExport."""
    manifest = read_manifest(folder / CLUSTER, ClusterManifest)
    if manifest is None:
        raise DamagedExport(f"{folder} has no {CLUSTER}: the export was not completed, or it is none")
    streams = {}
    for name in manifest.streams:
        streams[name] = checked_export(folder / STREAMS / name, on_file)
        if streams[name].name != name:
            raise DamagedExport(f"{folder / STREAMS / name} has the export of stream {streams[name].name!r}")
    return CheckedCluster(folder, manifest, streams)


def import_cluster(
    client: NatslogClient,
    checked: CheckedCluster,
    options: ImportOptions = ImportOptions(),
    *,
    with_access: bool = True,
) -> ImportedCluster:
    """Imports all streams, then cursors that do not exist, then what access control lacks.

    Raises:
        InvalidRequest: the export has tokens and rules, and security is not enabled here. As `import_stream`.
    """
    manifest = checked.manifest
    security = manifest.security if with_access else None
    if security is not None and not client.stored_security()["enabled"]:
        raise InvalidRequest(
            "the export has tokens and access rules, and security is not enabled in this cluster: set security = true "
            "in the configuration of its brokers, or leave them out with --no-access. Nothing was imported"
        )
    _require_brokers(client, checked, options)
    imported = [
        import_stream(client, checked.folder / STREAMS / name, stream, name, options)
        for name, stream in checked.streams.items()
    ]
    there = {(one["consumer"], one["stream"]) for one in client.cursors()}
    missing = [one for one in manifest.cursors if (one.consumer, one.stream) not in there]
    problems = []
    for cursor in missing:
        try:
            client.set_cursor(cursor.consumer, cursor.stream, cursor.offset, expected_id=cursor.id)
        except (InvalidRequest, StreamRecreated) as error:  # it is wrong: the others are not
            problems.append(f"the cursor of {cursor.consumer!r} on {cursor.stream} was not set: {error.message}")
    access = None
    if security is not None:
        access = client.restore_security(msgspec.to_builtins(security))
    return ImportedCluster(
        streams=imported,
        cursors=len(missing) - len(problems),
        cursors_left=len(manifest.cursors) - len(missing),
        cursor_problems=problems,
        access=access,
    )


def _require_brokers(client: NatslogClient, checked: CheckedCluster, options: ImportOptions) -> None:
    """Raises InvalidRequest: a stream has more replicas than there are brokers here."""
    if "replicas" in options.settings:
        return
    brokers = len(client.cluster()["brokers"])
    having = {one["name"] for one in client.streams()}
    wanted = {name: int(stream.settings.get("replicas", 1)) for name, stream in checked.streams.items()}
    beyond = [f"{name} has {count}" for name, count in wanted.items() if count > brokers and name not in having]
    if beyond:
        raise InvalidRequest(
            f"this cluster has {brokers} broker(s), and streams of the export have more replicas "
            f"({', '.join(beyond)}): give the number that they are to have here, as in --replicas {brokers}. Nothing "
            "was imported"
        )
