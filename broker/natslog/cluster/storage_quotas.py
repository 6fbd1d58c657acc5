"""Quotas on what an identity stores in a cluster: streams, the bytes that these may take, cursors. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from natslog.cluster.stream_changes import wanted_replicas
from natslog.errors import StorageQuotaExceeded
from natslog.model import StreamRecord, StreamSettings
from natslog.security.records import Quota

_REMEDY = "delete some that are not needed, or ask an administrator for a higher quota (natslog quota set)"


def require_stream(
    quota: Quota, owner: str, settings: StreamSettings, streams: Iterable[StreamRecord], *, is_new: bool = True
) -> None:
    """Raises StorageQuotaExceeded: the owner may not have another stream, or not one of this size.

    Args:
        streams: the others.
    """
    owned = [record for record in streams if record.owner == owner]
    if is_new and quota.streams is not None and len(owned) >= quota.streams:
        raise StorageQuotaExceeded(
            f"{owner} has {len(owned)} streams, and may have {quota.streams}: {_REMEDY}", quota="streams"
        )
    if quota.stored_bytes is None:
        return
    if settings.max_bytes is None:
        raise StorageQuotaExceeded(
            f"{owner} may store {quota.stored_bytes} bytes, so each of its streams needs a limit of its size: give "
            "max_bytes (--max-bytes)",
            quota="stored_bytes",
        )
    reserved = sum(_reserved(record.settings, wanted_replicas(record)) for record in owned)
    asked = _reserved(settings, settings.replicas)
    if reserved + asked > quota.stored_bytes:
        raise StorageQuotaExceeded(
            f"{owner} may store {quota.stored_bytes} bytes; its streams may already take {reserved} (max_bytes times "
            f"replicas), and this one {asked} more: give a smaller max_bytes, or {_REMEDY}",
            quota="stored_bytes",
        )


def _reserved(settings: StreamSettings, replicas: int) -> int:
    return (settings.max_bytes or 0) * replicas


def require_cursor(quota: Quota, owner: str, count: int) -> None:
    """Raises StorageQuotaExceeded: the owner has this many cursors, and may not have another one."""
    if quota.cursors is not None and count >= quota.cursors:
        raise StorageQuotaExceeded(
            f"{owner} has {count} cursors, and may have {quota.cursors}: {_REMEDY}", quota="cursors"
        )
